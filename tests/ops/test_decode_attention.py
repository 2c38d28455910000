"""Attention to a cache in every backend against float64, and what of a cache must reach no result."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from decode_attention_checks import Inputs, check, make
from helpers import backends_of

from fastattn import decode_attention

BACKENDS = backends_of("decode_attention")
KERNELS = backends_of("decode_attention", kernels_only=True)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


EVERYDAY: list[dict[str, Any]] = [
    {"ancestors": True, "lengths": [37, 20]},
    {"rows": 1, "lengths": [5, 37], "queries": 5, "heads": 4, "heads_k": 2},
    {"lengths": [1, 0], "head_dim": 40, "value_dim": 24},
    {"queries": 1, "positions": 300, "heads": 3, "heads_k": 1, "dtype": BF16},
    {"ancestors": True, "queries": 5, "positions": 70, "head_dim": 64, "dtype": FP16},
    {"ancestors": True, "rows": 7, "queries": 2, "batch": 1, "positions": 700, "heads": 1, "heads_k": 1, "dtype": BF16},
    {
        "queries": 1,
        "positions": 700,
        "heads": 1,
        "heads_k": 1,
        "lengths": [40, 0],
    },  # of a split program nothing is left
]
FULL: list[dict[str, Any]] = [
    {
        "queries": queries,
        "rows": rows,
        "ancestors": ancestors,
        "head_dim": d,
        "positions": positions,
        "dtype": dtype,
        **heads,
    }
    for queries, rows, ancestors in ((1, 1, False), (5, 1, False), (4, 4, False), (5, 5, True), (40, 1, False))
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
    """Behind the lengths, and in rows that are nobody's ancestor."""
    inputs = make(device, ancestors=True, lengths=[37, 20], queries=4, rows=6, dtype=dtype)
    inputs.ancestors.clamp_(max=4)
    for t in (inputs.key, inputs.value):
        t[:, :, 5] = torch.nan
        t[1, 20:] = torch.nan
    assert check(inputs, backend).isfinite().all()


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
    """Slices of a larger cache, heads that lie outside of positions, a transposed query."""
    inputs = make(device, ancestors=True, lengths=[30, 11], positions=41)
    q, k, v, lengths, ancestors = inputs
    key = k.permute(0, 3, 1, 2, 4).contiguous().permute(0, 2, 3, 1, 4)
    sliced = Inputs(
        q.transpose(1, 2).contiguous().transpose(1, 2), key[:, :33], v[:, :33], lengths, ancestors[:, :, :33]
    )
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
def test_no_length(backend: str, device: torch.device) -> None:
    assert not check(make(device, lengths=[0, 0]), backend).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_scale(backend: str, device: torch.device) -> None:
    check(make(device), backend, scale=-0.7)


@pytest.mark.parametrize("backend", KERNELS)
def test_same_bits_every_time(backend: str, device: torch.device) -> None:
    inputs = make(device, ancestors=True, positions=700, batch=1, queries=2, dtype=BF16)
    first = check(inputs, backend)
    for _ in range(3):
        assert torch.equal(first, check(inputs, backend))


@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_under_compile(backend: str) -> None:
    inputs = make(torch.device("cpu"), ancestors=True, lengths=[9, 37])
    compiled = torch.compile(lambda *given: decode_attention(*given, backend=backend), fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), decode_attention(*inputs, backend=backend))


def test_autocast() -> None:
    inputs = make(torch.device("cpu"), queries=2)
    with torch.autocast("cpu", torch.bfloat16):
        out = decode_attention(*inputs)
    assert torch.equal(out, decode_attention(*inputs.to(BF16)))


def _changed(**changes: Any) -> Inputs:
    inputs = make(torch.device("cpu"), ancestors=True, lengths=[37, 20])
    return inputs._replace(**{name: change(getattr(inputs, name)) for name, change in changes.items()})


@pytest.mark.parametrize(
    "error, message, changes",
    [
        (TypeError, "query must be a Tensor", {"query": lambda t: 3}),
        (TypeError, "value has dtype torch.float64", {"value": lambda t: t.double()}),
        (ValueError, "query has 3 dimensions", {"query": lambda t: t[0]}),
        (ValueError, "key has 4 dimensions", {"key": lambda t: t[:, :, 0]}),
        (ValueError, "key has shape", {"key": lambda t: t[..., :8]}),
        (ValueError, "value has shape", {"value": lambda t: t[:, :8]}),
        (ValueError, "which must divide", {"key": lambda t: t[:, :, :, :0], "value": lambda t: t[:, :, :, :0]}),
        (ValueError, "without ancestors", {"ancestors": lambda t: None, "query": lambda t: t[:, :2]}),
        (TypeError, "lengths has dtype torch.int64", {"lengths": lambda t: t.long()}),
        (ValueError, "lengths has shape", {"lengths": lambda t: t[:1]}),
        (TypeError, "ancestors has dtype", {"ancestors": lambda t: t.float()}),
        (ValueError, "ancestors has shape", {"ancestors": lambda t: t[:, :, 1:]}),
        (ValueError, "has no gradient", {"query": lambda t: t.requires_grad_()}),
    ],
)  # fmt: skip
def test_bad_arguments(error: type[Exception], message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        decode_attention(*_changed(**changes))


def test_bad_scale() -> None:
    with pytest.raises(ValueError, match="scale must be finite"):
        decode_attention(*_changed(), scale=float("nan"))
    with pytest.raises(TypeError, match="scale must be a number"):
        decode_attention(*_changed(), scale="1")
    with pytest.raises(TypeError, match="positional"):
        decode_attention(*_changed(), 0.5)


def test_numbers_of_numpy() -> None:
    inputs = make(torch.device("cpu"))
    assert torch.equal(decode_attention(*inputs, scale=np.float32(0.5)), decode_attention(*inputs, scale=0.5))
