"""What of a cache must reach no result of an attention to it, and what must, in every backend."""

from __future__ import annotations

import pytest
import torch
from catalogue import check
from helpers import backends_of

from fastattn.check import cases


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)])
@pytest.mark.parametrize("backend", backends_of("decode_attention"))
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
