"""Attention on a CPU by PyTorch's fused operator, one call for each block of a mask.

The operator adds its mask to the scores in float32 at least. So a bias without a gradient is part of the mask.
Saved for the backward: q, k, v, out and the logarithms of the softmax's sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn._tracing import differentiable_gradients, needs_formula
from fastattn.backends.aten._at_once import repeat_heads
from fastattn.backends.aten._visible import Block, Visible, formula

_operator = torch._scaled_dot_product_flash_attention_for_cpu
_operator_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class FusedAttention(torch.autograd.Function):
    """q (B, H, Lq, D), k, v (B, Hk, Lk, D) -> out (B, H, Lq, D)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, visible: Visible, softmax_scale: float) -> Tensor:
        ctx.visible, ctx.softmax_scale = visible, softmax_scale
        out, sums = forward(q, k, v, visible, softmax_scale)
        # The masks too, so that one that is edited in place meanwhile is noticed.
        masks = [block.score_mask for block in visible.blocks if block.score_mask is not None]
        ctx.save_for_backward(q, k, v, out, *sums, *masks)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, *others = ctx.saved_tensors
        visible, softmax_scale = ctx.visible, ctx.softmax_scale
        sums = others[: len(visible.blocks)]
        if needs_formula(dout):
            found = differentiable_gradients(lambda *t: formula(*t, visible, softmax_scale), (q, k, v), (dout,))
            return *found, None, None
        Hk = k.shape[1]
        k, v = repeat_heads(k, v, q.shape[1])
        if visible.is_whole:
            dq, dk, dv = _gradients(visible.blocks[0], softmax_scale, dout, q, k, v, out, *sums)
        else:
            dq, dk, dv = visible.new_queries(q), visible.new_keys(k), visible.new_keys(v)
            inputs = (visible.queries_of(dout), visible.queries_of(q), visible.keys_of(k), visible.keys_of(v))
            results = (visible.queries_of(dq), visible.keys_of(dk), visible.keys_of(dv))
            parts = zip(visible.blocks, *inputs, visible.queries_of(out), sums, *results, strict=True)
            for block, *given, dq_part, dk_part, dv_part in parts:
                found = _gradients(block, softmax_scale, *given)
                dq_part.copy_(found[0])
                for part, grad in ((dk_part, found[1]), (dv_part, found[2])):
                    part.add_(grad) if visible.shares_keys else part.copy_(grad)
        if Hk != q.shape[1]:
            dk, dv = (t.unflatten(1, (Hk, -1)).sum(2) for t in (dk, dv))
        return dq, dk.to(q.dtype), dv.to(q.dtype), None, None


def forward(q: Tensor, k: Tensor, v: Tensor, visible: Visible, softmax_scale: float) -> tuple[Tensor, list[Tensor]]:
    """out, in the memory (B, Lq, H, D) that a projection reads, and lse of each block."""
    B, H, Lq, D = q.shape
    if len(visible.blocks) == 1 and visible.has_all_queries:  # no copy
        (keys,), (values,) = visible.keys_of(k), visible.keys_of(v)
        out, lse = _forward(visible.blocks[0], softmax_scale, q, *repeat_heads(keys, values, H))
        return out, [lse]
    k, v = repeat_heads(k, v, H)
    out, sums = visible.new_queries(q.new_empty(B, Lq, H, D)).transpose(1, 2), []
    parts = (visible.queries_of(out), visible.queries_of(q), visible.keys_of(k), visible.keys_of(v))
    for block, out_part, *given in zip(visible.blocks, *parts, strict=True):
        found, lse = _forward(block, softmax_scale, *given)
        out_part.copy_(found)
        sums.append(lse)
    return out, sums


def _forward(block: Block, softmax_scale: float, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse of a block."""
    return _operator(q, k, v, 0.0, block.is_causal, attn_mask=block.score_mask, scale=softmax_scale)


def _gradients(
    block: Block, softmax_scale: float, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of a block."""
    given = (dout, q, k, v, out, lse, 0.0, block.is_causal)
    return _operator_backward(*given, attn_mask=block.score_mask, scale=softmax_scale)
