"""The checks can fail, in the Triton kernels themselves: a helper that they call, or a table that they read, is spoilt.

Interpreted kernels look their helpers up by name at every call, so a test can put a broken one in their place.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import weights_checks
from attention_checks import backend_call, check, make
from test_attention_edge import spread

Spoil = Callable[[Callable[..., Any]], Callable[..., Any]]


def _list_partial_tiles_as_full(tiles: Callable[..., Any]) -> Callable[..., Any]:
    def swapped(*args: Any) -> Any:
        found = tiles(*args)
        found = found._replace(num_partial=found.num_full, num_full=found.num_partial)
        return found._replace(partial=found.full, full=found.partial)

    return swapped


def _leave_out_a_tile(tiles: Callable[..., Any]) -> Callable[..., Any]:
    def fewer(*args: Any) -> Any:
        found = tiles(*args)
        return found._replace(num_partial=found.num_partial - 1)

    return fewer


def _key_off(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda m, n, *rest: f(m, n + 1, *rest)


def _query_off(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda m, n, *rest: f(m + 1, n, *rest)


def _row_off(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda rng_state, threshold, rows, *rest: f(rng_state, threshold, rows + 1, *rest)


def _column_of_the_tile(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda rng_state, threshold, rows, first_col, BLOCK_N: f(rng_state, threshold, rows, 0, BLOCK_N)


# bug -> the module of the backend and the name spoilt there, how, and the result that must show it
BUGS: dict[str, tuple[Any, str, Spoil, str]] = {
    "element mask one key off": ("forward", "keep_elements", _key_off, "out"),
    "element mask one query off": ("forward", "keep_elements", _query_off, "out"),
    "bias one key off": ("forward", "load_bias", _key_off, "out"),
    "the first tile again and again": ("forward", "tile_at", lambda f: lambda i, *rest: f(i * 0, *rest), "out"),
    "rescale forgotten": ("forward", "tl", lambda tl: _Language(tl, exp2=lambda x: tl.exp2(x * 0)), "out"),
    "dropout row off by one": ("forward", "dropout_keep", _row_off, "out"),
    "dropout column from the tile": ("forward", "dropout_keep", _column_of_the_tile, "out"),
    "backward draws other dropout": ("backward", "dropout_keep", _row_off, "dq"),
    "backward masks one key off": ("backward", "keep_elements", _key_off, "dq"),
    "backward without the bias": ("backward", "load_bias", lambda f: lambda *args: f(*args) * 0, "dq"),
    "gradient of lse forgotten": ("", "attention_bwd", lambda f: lambda dout, dlse, *rest: f(dout, None, *rest), "dq"),
    "bias gradient one key off": ("bias_gradient", "load_bias", _key_off, "dbias"),
    "intervals one key short": ("arguments", "intervals", lambda f: lambda *a: (f(*a)[0], f(*a)[1] - 1), "out"),
    "a tile left out": ("arguments", "tile_lists", _leave_out_a_tile, "out"),
    "partial tiles listed as full": ("arguments", "tile_lists", _list_partial_tiles_as_full, "out"),
}


class _Language:
    """triton.language with some functions replaced."""

    def __init__(self, language: Any, **replaced: Callable[..., Any]) -> None:
        self._language = language
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._language, name)


PROBLEM = {"B": 1, "H": 2, "Lq": 20, "Lk": 140, "D": 16, "mask": "attn_mask", "bias": (1, 2, 20, 140), "dropout_p": 0.3}


@pytest.fixture
def interpreted(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("compiled kernels hold their helpers inside; they can be replaced in the interpreter only")


def test_the_problem_is_passed_without_a_bug(interpreted: None, device: torch.device) -> None:
    check(make(**PROBLEM), backend_call("triton", device))


@pytest.mark.parametrize("bug", BUGS)
def test_each_bug_is_caught(interpreted: None, bug: str, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    attend = backend_call("triton", device, weights=False)
    place, name, spoil, result = BUGS[bug]
    if isinstance(place, str):
        place = importlib.import_module(".".join(filter(None, ["fastattn.kernels.attention", place])))
    if name == "tl":  # the interpreter asks that a kernel sees triton.language under some name
        monkeypatch.setattr(place, "_language", place.tl, raising=False)
    monkeypatch.setattr(place, name, spoil(getattr(place, name)))
    with pytest.raises(AssertionError, match=f"^{result}: error"):
        check(make(**PROBLEM), attend)


@pytest.mark.parametrize(
    "module, name, spoil",
    [
        ("weights", "keep_elements", _key_off),
        ("weights", "dropout_keep", _row_off),
        ("weights", "program_place", lambda f: lambda *args: (*f(*args)[:2], f(*args)[2] * 0)),
        ("alignment", "keep_elements", _key_off),
        ("alignment", "load_bias", _query_off),
        ("alignment", "tile_at", lambda f: lambda i, *rest: f(i * 0, *rest)),
    ],
)
def test_bugs_of_wished_weights_are_caught(
    interpreted: None, module: str, name: str, spoil: Spoil, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    backend_call("triton", device)
    p = make(**{**PROBLEM, "H": 4, "bias": (1, 4, 20, 140)})
    place = importlib.import_module(f"fastattn.kernels.attention.{module}")
    monkeypatch.setattr(place, name, spoil(getattr(place, name)))
    with pytest.raises(AssertionError, match="^weights: error" if module == "weights" else "^alignment:"):
        weights_checks.check(p, weights_checks.ask("triton"))


def test_32_bit_offsets_are_caught(interpreted: None, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """The problem of test_offsets_beyond_32_bits, with the rows of q, k and v found by 32-bit arithmetic."""
    attend = backend_call("triton", device, weights=False)
    forward = importlib.import_module("fastattn.kernels.attention.forward")
    tl = forward.tl

    def load_rows(ptr: Any, first: Any, stride: Any, inside: Any, BLOCK: int, HEAD_DIM: int, BLOCK_D: int) -> Any:
        col = tl.arange(0, BLOCK_D)[None, :]
        places = ((first + tl.arange(0, BLOCK)[:, None]) * stride).to(tl.int32) + col
        keep = (places >= 0) & (col < HEAD_DIM)  # what wrapped around would be read from before the tensor
        return tl.load(ptr + places, mask=keep if inside is None else keep & inside[:, None], other=0.0)

    monkeypatch.setattr(forward, "load_rows", load_rows)
    p = make(B=1, H=1, Lq=20, Lk=20, D=16, mask="attn_mask", dtype=torch.bfloat16)
    check(p, attend, ("out",))  # near by, the 32 bits suffice
    with pytest.raises(AssertionError, match="^out: error"):
        check(p.but(k=spread(p.k, 2**27 + 8)), attend, ("out",))
