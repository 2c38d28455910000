"""What of a cache must reach no result of an attention to it, and what must, in every backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from catalogue import check
from helpers import backends_of

import fastattn
from fastattn import use_backend
from fastattn.check import cases
from fastattn.ops.decode_attention import write_and_attend


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)])
@pytest.mark.parametrize("heads", [4, 10])  # aten computes few by its fused operator, more by two products
@pytest.mark.parametrize("backend", backends_of("decode_attention"))
def test_what_is_not_attended_may_be_nan(backend: str, heads: int, dtype: torch.dtype, device: torch.device) -> None:
    """After the lengths, in rows that are no query's ancestor, and where the ancestor is no row. The cache is a slice
    of a larger one, with heads outside of positions."""
    sizes = {"lengths": [30, 20], "queries": 4, "rows": 6, "positions": 41, "heads": heads, "heads_k": heads // 2}
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


SIZES = [
    {"ancestors": True, "queries": 3, "heads": 4, "heads_k": 2, "lengths": [33, 33]},
    {"queries": 5, "heads": 2, "lengths": [1, 1], "value_dim": 24},
    {"batch": 1, "queries": 1, "heads": 1, "heads_k": 1, "positions": 1024, "lengths": [513]},  # of several programs
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"lengths {sizes['lengths']}")
@pytest.mark.parametrize("backend", backends_of("decode_attention"))
def test_a_step_writes_its_keys(backend: str, sizes: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
    """The same numbers as attention to a cache that holds them, and nothing else is written. Row and query of the last
    position may differ, and what the cache held there and later may be NaN."""
    p = cases.decode_attention(**sizes, dtype=dtype, device=device)
    query, key, value = p.tensors.values()
    lengths, ancestors = p.options["lengths"], p.options.get("ancestors")
    last = int(lengths[0]) - 1
    rows = torch.randn(*query.shape[:2], key.shape[3], key.shape[4] + value.shape[4], dtype=dtype, device=device)
    new, before = rows.split([key.shape[4], value.shape[4]], 3), []  # views, as of one product
    for t, given in zip((key, value), new, strict=True):
        t[:, last + 1 :] = torch.nan
        t[:, last] = given
        before.append(t.clone())
        t[:, last] = torch.nan
    position = torch.tensor([last], device=device)
    with use_backend(backend):
        expected = fastattn.decode_attention(query, *before, lengths, ancestors, scale=0.3)
    out = write_and_attend(query, key, value, *new, position, lengths, ancestors, scale=0.3, backend=backend)
    assert out.isfinite().all()
    torch.testing.assert_close((out, key, value), (expected, *before), rtol=0, atol=0, equal_nan=True)
