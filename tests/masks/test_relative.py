"""Biases by distance: ALiBi and T5's buckets against transformers', and what AttentionMask makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastattn import AttentionMask
from fastattn.masks import alibi, alibi_slopes, t5_relative_bias


def dense(bias: Tensor, Lq: int, Lk: int) -> Tensor:
    return AttentionMask(relative_bias=bias).dense_relative_bias(Lq, Lk)[0]


def test_alibi() -> None:
    """Slopes as transformers' MPT and BLOOM have them, and the penalty grows with the distance to both sides."""
    mpt = pytest.importorskip("transformers.models.mpt.modeling_mpt")
    for n_head in (1, 2, 8, 12, 16, 20):
        theirs = mpt.build_mpt_alibi_tensor(n_head, 5, alibi_bias_max=8)[:, 0]  # (H, 5), of the last query
        slopes = alibi_slopes(n_head)
        torch.testing.assert_close(slopes.sort()[0], (-theirs[:, -2]).sort()[0])
        found = dense(alibi(slopes, 3, 5), 3, 5)
        assert torch.equal(found[:, 2, :3], -slopes[:, None] * torch.tensor([2.0, 1.0, 0.0]))
        assert torch.equal(found[:, 0], -slopes[:, None] * torch.arange(5.0))
    for dtype in (torch.float16, torch.bfloat16):  # whose own numbers have no such distances
        slopes = alibi_slopes(8).to(dtype)
        exact = -slopes.double()[:, None] * torch.arange(70_000)
        assert torch.equal(alibi(slopes, 1, 70_000), exact.to(dtype))


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20)])
def test_t5(bidirectional: bool, num_buckets: int, max_distance: int) -> None:
    """transformers' compute_bias, and its gradient into the table."""
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    sizes: dict[str, Any] = dict(relative_attention_num_buckets=num_buckets, num_heads=3, d_kv=4, d_model=12)
    config = t5.T5Config(**sizes, relative_attention_max_distance=max_distance, is_decoder=not bidirectional)
    theirs = t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    table, Lq, Lk = theirs.relative_attention_bias.weight, 190, 211
    torch.nn.init.normal_(table)
    expected = theirs.compute_bias(Lq, Lk)[0]
    found = dense(t5_relative_bias(table, Lq, Lk, bidirectional=bidirectional, max_distance=max_distance), Lq, Lk)
    assert torch.equal(found, expected)
    dout = torch.randn_like(expected)
    grads = [torch.autograd.grad(t, table, dout)[0] for t in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-3)
