"""What of a cache must reach no result of an attention to it, in every backend, and bad calls."""

from __future__ import annotations

import itertools

import pytest
import torch
from checks import check, skip_without
from helpers import backends_of
from torch import Tensor

from fastattn import decode_attention
from fastattn.check import cases
from fastattn.check.cases import Problem

EVERY_BACKEND = pytest.mark.parametrize("backend", backends_of("decode_attention"))
BF16, FP32 = torch.bfloat16, torch.float32


def out_of(p: Problem, backend: str) -> Tensor:
    """The result, judged. What is NaN in the cache is 0 for the formula."""
    clean = p.but(key=p.tensors["key"].nan_to_num(0), value=p.tensors["value"].nan_to_num(0))
    out = check(p, backend, formula_of=clean)["out"]
    assert out.is_contiguous()
    return out


@pytest.mark.bug_class("T10")
@pytest.mark.parametrize("dtype", [FP32, BF16])
@EVERY_BACKEND
def test_what_is_not_attended_may_be_nan(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    """After the lengths, and in rows that are no query's ancestor."""
    sizes = {"ancestors": True, "lengths": [37, 20], "queries": 4, "rows": 6, "dtype": dtype}
    p = cases.decode_attention(**sizes, device=device)
    p.options["ancestors"].clamp_(max=4)
    for t in (p.tensors["key"], p.tensors["value"]):
        t[:, :, 5] = torch.nan
        t[1, 20:] = torch.nan
    assert out_of(p, backend).isfinite().all()


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # NaN in the interpreter
@pytest.mark.parametrize("dtype", [FP32, pytest.param(BF16, marks=pytest.mark.full)])
@EVERY_BACKEND
def test_nan_comes_out(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    """Of one element that is attended to, where the formula has it: in the last tile, and in all of them; and where
    several programs share the keys."""
    skip_without(backend, "decode_attention", device)
    for name, where, size in itertools.product(
        ("query", "key", "value"),
        (-1, slice(None)),
        ({"ancestors": True}, {"rows": 1, "queries": 5}, {"queries": 1, "positions": 520}),
    ):
        p = cases.decode_attention(heads=1, heads_k=1, dtype=dtype, device=device, **size)
        if "ancestors" in size:
            p.options["ancestors"][1] = 0
        p.tensors[name][(1, where, 0, 3) if name == "query" else (1, where, 0, 0, 3)] = torch.nan
        out, truth = (decode_attention(**p.arguments(), backend=each) for each in (backend, "reference"))
        assert truth.isnan().any()
        assert torch.equal(out.isnan(), truth.isnan()), (name, where, size)


@EVERY_BACKEND
def test_ancestors_outside_of_the_rows_mask(backend: str, device: torch.device) -> None:
    p = cases.decode_attention(ancestors=True, device=device)
    p.options["ancestors"][0, :, 5:9] = -1
    p.options["ancestors"][1, 0] = 3  # nothing is left to attend to
    out = out_of(p, backend)
    assert not out[1, 0].any()
    assert out[1, 1:].any()


@pytest.mark.bug_class("T3", "T4")
@EVERY_BACKEND
def test_strides(backend: str, device: torch.device) -> None:
    """Slices of a larger cache and of its ancestors, heads outside of positions."""
    p = cases.decode_attention(ancestors=True, lengths=[30, 11], positions=41, device=device)
    key = p.tensors["key"].permute(0, 3, 1, 2, 4).contiguous().permute(0, 2, 3, 1, 4)
    value, ancestors = p.tensors["value"][:, :33], p.options["ancestors"][:, :, :33]
    sliced = p.but(key=key[:, :33], value=value, ancestors=ancestors)
    torch.testing.assert_close(out_of(sliced, backend), out_of(p, backend))


@pytest.mark.bug_class("T12")
@pytest.mark.parametrize("ancestors", [False, True])
@EVERY_BACKEND
def test_empty_dimensions(backend: str, ancestors: bool, device: torch.device) -> None:
    """Each of them alone, with one row that all queries share and with rows of their own."""
    for empty, rows in itertools.product(("batch", "queries", "heads", "positions", "rows"), (1, 3)):
        sizes = {"rows": rows, "queries": 3} | {empty: 0}
        if ancestors or sizes["rows"] in (1, sizes["queries"]):  # others are refused
            p = cases.decode_attention(**sizes, ancestors=ancestors, device=device)
            assert not out_of(p, backend).any()


def test_autocast() -> None:
    p = cases.decode_attention(queries=2)
    with torch.autocast("cpu", torch.bfloat16):
        out = decode_attention(**p.arguments())
    assert torch.equal(out, decode_attention(**p.but(**{n: t.to(BF16) for n, t in p.tensors.items()}).arguments()))
