"""Attention to a cache in every backend against float64, and what of a cache must reach no result."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from decode_attention_checks import Inputs, check, make
from helpers import backends_of

from fastattn import decode_attention, explain

BACKENDS = backends_of("decode_attention")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

EVERYDAY: list[dict[str, Any]] = [
    {"ancestors": True, "lengths": [37, 20]},
    {"rows": 1, "lengths": [5, 37], "queries": 5, "heads": 4, "heads_k": 2},
    {"lengths": [1, 0], "head_dim": 40, "value_dim": 24},
    {"rows": 1, "queries": 2, "positions": 70, "head_dim": 256, "value_dim": 16},
    {"queries": 1, "positions": 300, "heads": 3, "heads_k": 1, "dtype": BF16},
    {"ancestors": True, "queries": 5, "positions": 70, "head_dim": 64, "dtype": FP16},
    {"ancestors": True, "rows": 7, "queries": 2, "batch": 1, "positions": 700, "heads": 1, "heads_k": 1, "dtype": BF16},
    {"lengths": [0, 0]},
    # One program of several has nothing to read.
    {"queries": 1, "positions": 700, "heads": 1, "heads_k": 1, "lengths": [40, 0]},
]
FULL: list[dict[str, Any]] = [
    {"head_dim": d, "positions": positions, "dtype": dtype, **rows, **heads}
    for rows in (
        {"queries": 1, "rows": 1},
        {"queries": 5, "rows": 1},
        {"queries": 4},
        {"queries": 5, "ancestors": True},
        {"queries": 40, "rows": 1},
    )
    for d, positions in ((64, 1), (128, 130), (72, 65), (256, 17))
    for dtype in (FP32, BF16)
    for heads in ({}, {"heads": 8, "heads_k": 2, "lengths": [positions, positions // 2]})
]


@pytest.mark.parametrize("case", [*EVERYDAY, *(pytest.param(case, marks=pytest.mark.full) for case in FULL)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_against_float64(backend: str, case: dict[str, Any], device: torch.device) -> None:
    check(make(device, **case), backend)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_attended_may_be_nan(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    """After the lengths, and in rows that are no query's ancestor."""
    inputs = make(device, ancestors=True, lengths=[37, 20], queries=4, rows=6, dtype=dtype)
    inputs.ancestors.clamp_(max=4)
    for t in (inputs.key, inputs.value):
        t[:, :, 5] = torch.nan
        t[1, 20:] = torch.nan
    assert check(inputs, backend).isfinite().all()


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # NaN in the interpreter
@pytest.mark.parametrize("dtype", [FP32, pytest.param(BF16, marks=pytest.mark.full)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_comes_out(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    """Of one element that is attended to, where the formula has it: in the last tile, and in all of them; and where
    several programs share the keys."""
    for name, where, size in itertools.product(
        ("query", "key", "value"),
        (-1, slice(None)),
        ({"ancestors": True}, {"rows": 1, "queries": 5}, {"queries": 1, "positions": 520}),
    ):
        inputs = make(device, heads=1, heads_k=1, dtype=dtype, **size)
        if inputs.ancestors is not None:
            inputs.ancestors[1] = 0
        t = getattr(inputs, name)
        t[(1, where, 0, 3) if name == "query" else (1, where, 0, 0, 3)] = torch.nan
        if explain(decode_attention, *inputs, backend=backend).refusals[backend] is not None:
            pytest.skip("the backend does not run on this machine")
        out, truth = (decode_attention(*inputs, backend=each) for each in (backend, "reference"))
        assert truth.isnan().any()
        assert torch.equal(out.isnan(), truth.isnan()), (name, where, size)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ancestors_outside_of_the_rows_mask(backend: str, device: torch.device) -> None:
    inputs = make(device, ancestors=True, queries=3)
    inputs.ancestors[0, :, 5:9] = -1
    inputs.ancestors[1, 0] = 3  # nothing is left to attend to
    out = check(inputs, backend)
    assert not out[1, 0].any()
    assert out[1, 1:].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides(backend: str, device: torch.device) -> None:
    """Slices of a larger cache and of its ancestors, heads outside of positions."""
    inputs = make(device, ancestors=True, lengths=[30, 11], positions=41)
    q, k, v, lengths, ancestors = inputs
    key = k.permute(0, 3, 1, 2, 4).contiguous().permute(0, 2, 3, 1, 4)
    sliced = Inputs(q, key[:, :33], v[:, :33], lengths, ancestors[:, :, :33])
    torch.testing.assert_close(check(sliced, backend), check(inputs, backend))


@pytest.mark.parametrize("ancestors", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_dimensions(backend: str, ancestors: bool, device: torch.device) -> None:
    """Each of them alone, with one row that all queries share and with rows of their own."""
    for empty, rows in itertools.product(("batch", "queries", "heads", "positions", "rows"), (1, 3)):
        sizes = {"rows": rows, "queries": 3} | {empty: 0}
        if ancestors or sizes["rows"] in (1, sizes["queries"]):  # others are refused
            assert not check(make(device, **sizes, ancestors=ancestors), backend).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_scale(backend: str, device: torch.device) -> None:
    check(make(device), backend, scale=-0.7)


def test_autocast() -> None:
    inputs = make(torch.device("cpu"), queries=2)
    with torch.autocast("cpu", torch.bfloat16):
        out = decode_attention(*inputs)
    assert torch.equal(out, decode_attention(*inputs.to(BF16)))


def test_arguments_that_do_not_fit_together() -> None:
    q, k, v, _, ancestors = make(torch.device("cpu"), ancestors=True)
    for message, given in (
        ("which must divide", (q, k[:, :, :, :0], v[:, :, :, :0], None, ancestors)),
        ("without ancestors", (q[:, :2], k, v)),
        ("has no gradient", (q.clone().requires_grad_(), k, v, None, ancestors)),
    ):
        with pytest.raises(ValueError, match=message):
            decode_attention(*given)
