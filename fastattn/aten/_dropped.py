"""Attention under dropout that keeps for its backward what grows with the length, not with its square, or one byte a
weight where autograd would keep three floats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattn._transforms import differentiable_gradients, may_write_in_place

Factor = Callable[[torch.dtype], Tensor]  # of dropout on the weights: (B, H, Lq, Lk), 0 or 1 / (1 - dropout_p)


def scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """softmax_scale * q k^T in float32 at least; exact inputs are scaled before the product, where they are fewer."""
    if _exact(q):
        return torch.matmul(q * scale, k.mT)
    return torch.matmul(q, k.mT).float() * scale


def _exact(q: Tensor) -> bool:
    return q.dtype in (torch.float32, torch.float64)


class DroppedAttention(torch.autograd.Function):
    """out = (P * factor) v with P = softmax(softmax_scale q k^T + hidden). P is made again in the backward.

    q, k, v: (B, H, L, D), contiguous, equally many heads. hidden: -inf or 0, broadcastable to (B, H, Lq, Lk), or bool,
    True = masked; every query has a visible key.     factor: see Factor. rescale: its greater value.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        hidden: Tensor | None,
        softmax_scale: float,
        factor: Factor,
        rescale: float,
    ) -> Tensor:
        weights = softmax(q, k, hidden, softmax_scale)
        kept = factor(weights.dtype)
        few = k.shape[2] <= q.shape[3]  # weights: no more of them than numbers of q
        out = torch.matmul((weights * kept if few else weights.mul_(kept)).to(q.dtype), v)
        ctx.save_for_backward(q, k, v, hidden, kept.bool(), weights if few else None)
        ctx.scales = softmax_scale, rescale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, hidden, kept, weights = ctx.saved_tensors
        softmax_scale, rescale = ctx.scales
        if torch.is_grad_enabled():  # the gradients are to be differentiated again

            def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                weights = softmax(q, k, hidden, softmax_scale)
                return torch.matmul((weights * kept * rescale).to(q.dtype), v)

            return *differentiable_gradients(formula, (q, k, v), (dout,)), None, None, None, None
        dout = dout.contiguous()
        if weights is None:
            weights = softmax(q, k, hidden, softmax_scale)
        factor = kept.to(weights.dtype).mul_(rescale)
        dv = torch.matmul((weights * factor).to(q.dtype).mT, dout)
        dweights = torch.matmul(dout, v.mT).to(weights.dtype).mul_(factor)
        del factor
        dscores = torch.ops.aten._softmax_backward_data(dweights, weights, -1, weights.dtype)
        del weights, dweights
        if not _exact(q):
            dscores = (dscores * softmax_scale).to(q.dtype)
            return torch.matmul(dscores, k), torch.matmul(dscores.mT, q), dv, None, None, None, None
        dq, dk = torch.matmul(dscores, k), torch.matmul(dscores.mT, q)
        return dq.mul_(softmax_scale), dk.mul_(softmax_scale), dv, None, None, None, None


def softmax(q: Tensor, k: Tensor, hidden: Tensor | None, softmax_scale: float) -> Tensor:
    """The weights before dropout."""
    s = scores(q, k, softmax_scale)
    return torch.softmax(s if hidden is None else hide(s, hidden), dim=-1)


def hide(s: Tensor, hidden: Tensor) -> Tensor:
    """The scores with -inf where hidden says so; in place where that may be."""
    if hidden.dtype == torch.bool:
        return (s.masked_fill_ if may_write_in_place() else s.masked_fill)(hidden, -torch.inf)
    return (s.add_ if may_write_in_place() else s.add)(hidden)
