"""What of a cache must reach no result of an attention to it, and what must, in every backend."""

from __future__ import annotations

import pytest
import torch
from catalogue import check, skip_without
from helpers import backends_of

from fastattn import decode_attention
from fastattn.check import cases

full = pytest.mark.full
EVERY_BACKEND = pytest.mark.parametrize("backend", backends_of("decode_attention"))
EVERY_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=full)])


@EVERY_DTYPE
@EVERY_BACKEND
def test_what_is_not_attended_may_be_nan(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    """After the lengths, in rows that are no query's ancestor, and where the ancestor is no row. The cache is a slice
    of a larger one, with heads outside of positions."""
    sizes = {"lengths": [30, 20], "queries": 4, "rows": 6, "positions": 41, "heads": 4, "heads_k": 2}
    p = cases.decode_attention(ancestors=True, **sizes, dtype=dtype, device=device)
    ancestors = p.options["ancestors"].clamp_(max=4)
    ancestors[0, :, 5:9] = -1
    ancestors[1, 0] = 6  # nothing is left to attend to
    for name in ("key", "value"):
        t = p.tensors[name]
        t[:, :, 5] = torch.nan
        t[1, 20:] = torch.nan
        t[0, 5:9] = torch.nan
        p = p.but(**{name: t.permute(0, 3, 1, 2, 4).contiguous().permute(0, 2, 3, 1, 4)[:, :33]})
    out = check(p.but(ancestors=ancestors[:, :, :33]), backend)["out"]
    assert out.is_contiguous() and out.isfinite().all() and not out[1, 0].any() and out[1, 1:].any()


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # NaN in the interpreter
@EVERY_DTYPE
@pytest.mark.parametrize(
    "size",
    [
        {"ancestors": True},
        pytest.param({"rows": 1, "queries": 5}, marks=full),
        pytest.param({"queries": 1, "positions": 520}, marks=full),  # where several programs share the keys
    ],
    ids=str,
)
@EVERY_BACKEND
def test_nan_comes_out(backend: str, size: dict, dtype: torch.dtype, device: torch.device) -> None:
    """Of one element that is attended to, where the formula has it: in the last tile, and in all of them."""
    skip_without(backend, "decode_attention", device)
    for name in ("query", "key", "value"):
        for where in (-1, slice(None)):
            p = cases.decode_attention(heads=1, heads_k=1, dtype=dtype, device=device, **size)
            if "ancestors" in size:
                p.options["ancestors"][1] = 0
            p.tensors[name][(1, where, 0, 3) if name == "query" else (1, where, 0, 0, 3)] = torch.nan
            out, truth = (decode_attention(**p.arguments(), backend=each) for each in (backend, "reference"))
            assert truth.isnan().any() and torch.equal(out.isnan(), truth.isnan()), (name, where)
