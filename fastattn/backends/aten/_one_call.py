"""Attention on a CPU by one call of PyTorch's fused operator, where a mask leaves one block.

One node of autograd reads heads from rows and writes such rows: as views that autograd records, each would be a node.
Measured on one core of an AMD EPYC, torch 2.13, 32 tokens, 4 heads of width 64, float32, forward and backward: by
_blocks.py 253 us, by this node 217. PyTorch's function between recorded views takes 167, and has no second derivative.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn._tracing import differentiable_gradients, needs_formula, same_for_the_batch
from fastattn.backends import attention_rows
from fastattn.backends.aten._plain import plain_attention
from fastattn.masks import AttentionMask

_operator = torch._scaled_dot_product_flash_attention_for_cpu
_operator_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class OneCall(NamedTuple):
    """mask: of the formula.     is_causal, score_mask: of the one block.

    sizes: of rows, see attention_rows.py. None: tensors are q, k, v and out, (B, H, L, D).
    """

    mask: AttentionMask | None
    is_causal: bool
    score_mask: Tensor | None
    softmax_scale: float
    sizes: attention_rows.Sizes | None

    def __call__(self, *tensors: Tensor) -> Tensor:
        """out of q, k and v, or of projected and memory, with as many heads of keys as of queries."""
        if not torch.is_grad_enabled():
            return self.compute(tensors)[0]
        bias = None if self.mask is None else self.mask.bias
        return OneCallAttention.apply(self, bias, *tensors)

    def compute(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """out; q, k and v (B, H, L, D), the operator's out and its lse."""
        _, is_causal, score_mask, scale, sizes = self
        q, k, v = tensors if sizes is None else attention_rows.heads(tensors[0], tensors[1:], sizes)
        out, lse = _operator(q, k, v, 0.0, is_causal, attn_mask=score_mask, scale=scale)
        rows = out if sizes is None else out.transpose(1, 2).reshape(len(tensors[0]), -1)
        return rows, q, k, v, out, lse

    def by_formula(self, *tensors: Tensor) -> Tensor:
        q, k, v = tensors if self.sizes is None else attention_rows.heads(tensors[0], tensors[1:], self.sizes)
        with same_for_the_batch():
            out, *_ = plain_attention(q, k, v, self.mask, self.softmax_scale, 0.0, None)
        return out if self.sizes is None else out.transpose(1, 2).flatten(0, 1).flatten(1)


class OneCallAttention(torch.autograd.Function):
    """bias: what score_mask is a view of, or None: it must not be edited before the backward."""

    @staticmethod
    def forward(ctx: Any, call: OneCall, bias: Tensor | None, *tensors: Tensor) -> Tensor:
        rows, *saved = call.compute(tensors)
        ctx.save_for_backward(bias, *saved, *tensors)
        ctx.call = call
        return rows

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        call, (_, q, k, v, out, lse, *tensors) = ctx.call, ctx.saved_tensors
        if needs_formula(dout):
            return None, None, *differentiable_gradients(call.by_formula, tensors, (dout,))
        _, is_causal, score_mask, scale, sizes = call
        if sizes is not None:
            B, L, H, *_, Dv = sizes
            dout = dout.reshape(B, L, H, Dv).transpose(1, 2)
        grads = _operator_backward(dout, q, k, v, out, lse, 0.0, is_causal, attn_mask=score_mask, scale=scale)
        if sizes is None:
            return None, None, *grads
        if len(tensors) == 1:
            return None, None, torch.cat([t.transpose(1, 2).flatten(2) for t in grads], 2).view_as(tensors[0])
        return None, None, *[t.transpose(1, 2).reshape(rows.shape) for t, rows in zip(grads, tensors, strict=True)]
