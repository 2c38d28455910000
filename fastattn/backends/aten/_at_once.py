"""Attention with all scores at once: for calls whose scores fit into the cache, where each operator counts.

    S = softmax_scale q k^T + score_mask,   P = softmax(S),   out = scale * (P * keep) v,   scale = 1 / (1 - dropout_p)

In 16 bits the products are PyTorch's in 16 bits, and what is between them is float32: on an AMD EPYC, torch 2.13,
102,400 scores in rows of 20, PyTorch's softmax takes 486 us forward and 625 backward in bfloat16, 192 and 51 in
float32. Its rows shorter than a vector register are computed number by number: 6,400 scores in rows of 10 take 112 and
45 us, by four operators 26 and 11.

Saved for the backward: q, k, v and the weights in their dtype, with dropout as they are where they are dropped and
negative where they are kept. So there is no mask, and dS = P * (keep * dP - rowsum(P * keep * dP)) reads one tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn._tracing import differentiable_gradients, needs_formula
from fastattn.backends.constants import dropout_scale
from fastattn.backends.reference.philox import draw_lanes, keep_mask_from_lanes

SHORT_ROW = 16  # float32 numbers in a vector register


class AttentionAtOnce(torch.autograd.Function):
    """q, k, v: (B * H, L, D), contiguous, equally many heads.

    score_mask: None, or -inf and 0 in float32 at least, or bool with True = masked. It broadcasts to (B, H, Lq, Lk),
        which is scores_shape, and every query has a visible key.
    rng_state: (seed,) of dropout, or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        score_mask: Tensor | None,
        scores_shape: tuple[int, int, int, int],
        softmax_scale: float,
        dropout_p: float,
        rng_state: Tensor | None,
    ) -> Tensor:
        (N, Lq, _), (_, Lk, Dv), dtype = q.shape, v.shape, q.dtype
        scores = _wide(q.new_empty(N, Lq, Lk).baddbmm_(q, k.mT, beta=0, alpha=softmax_scale))
        if score_mask is not None:
            add_score_mask(scores.view(scores_shape), score_mask)
        saved = weights = _softmax(scores).to(dtype)
        alpha = 1.0
        if rng_state is not None:
            # Not 0, even if dropout drops all: baddbmm with factors of 0 alone leaves the memory as it was.
            alpha = dropout_scale(dropout_p) or 1.0
            lanes = draw_lanes(rng_state, weights.numel()).view(weights.shape)
            weights = keep_mask_from_lanes(lanes, dropout_p, dtype).mul_(weights)
            if any(ctx.needs_input_grad):
                saved.sub_(weights, alpha=2)
        ctx.save_for_backward(q, k, v, score_mask, saved)
        ctx.options = scores_shape, softmax_scale, alpha, rng_state is not None
        return q.new_empty(N, Lq, Dv).baddbmm_(weights, v, beta=0, alpha=alpha)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, score_mask, saved = ctx.saved_tensors
        scores_shape, softmax_scale, alpha, drops = ctx.options
        if needs_formula(dout):

            def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                weights = plain_weights(*(t.unflatten(0, scores_shape[:2]) for t in (q, k)), score_mask, softmax_scale)
                if drops:
                    weights = weights * (saved < 0).view(scores_shape) * alpha
                return torch.matmul(weights.to(q.dtype).flatten(0, 1), v)

            return *differentiable_gradients(formula, (q, k, v), (dout,)), *(None,) * 5
        shape, dtype, dout = saved.shape, q.dtype, dout.contiguous()
        dweights = _wide(saved.new_empty(shape).baddbmm_(dout, v.mT, beta=0, alpha=alpha))
        kept = weights = _wide(saved)
        if drops:  # kept, and so dscores, have the other sign: the factors of the products turn it
            kept, weights = weights.clamp_max(0), weights.abs()
            softmax_scale, alpha = -softmax_scale, -alpha
        if drops or shape[2] < SHORT_ROW:
            dscores = _softmax_gradient(dweights.mul_(kept), weights)
        else:
            dscores = torch._softmax_backward_data(dweights, weights, -1, weights.dtype)
        kept, dscores = kept.to(dtype), dscores.to(dtype)
        dq = torch.empty_like(q).baddbmm_(dscores, k, beta=0, alpha=softmax_scale)
        dk = torch.empty_like(k).baddbmm_(dscores.mT, q, beta=0, alpha=softmax_scale)
        dv = torch.empty_like(v).baddbmm_(kept.mT, dout, beta=0, alpha=alpha)
        return dq, dk, dv, *(None,) * 5


def _wide(t: Tensor) -> Tensor:
    """t in float32 at least."""
    return t if t.dtype in (torch.float32, torch.float64) else t.float()


def _softmax(scores: Tensor) -> Tensor:
    """Of the last dimension. scores may be changed."""
    if scores.shape[-1] >= SHORT_ROW:
        return torch.softmax(scores, -1)
    exps = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    return exps.div_(exps.sum(-1, keepdim=True))


def _softmax_gradient(product: Tensor, weights: Tensor) -> Tensor:
    """weights * (dweights - rowsum(weights * dweights)), in place of the product weights * dweights."""
    return product.addcmul_(weights, product.sum(-1, keepdim=True), value=-1)


def plain_scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """softmax_scale * q k^T in float32 at least; exact inputs are scaled before the product, where they are fewer."""
    if q.dtype in (torch.float32, torch.float64):
        return torch.matmul(q * scale, k.mT)
    return torch.matmul(q, k.mT).float() * scale


def plain_weights(q: Tensor, k: Tensor, score_mask: Tensor | None, softmax_scale: float) -> Tensor:
    """P of all heads before dropout, by operators that autograd differentiates."""
    scores = plain_scores(q, k, softmax_scale)
    if score_mask is not None:
        scores = add_score_mask(scores, score_mask, in_place=False)
    return torch.softmax(scores, dim=-1)


def add_score_mask(scores: Tensor, score_mask: Tensor, in_place: bool = True) -> Tensor:
    """The scores with -inf where score_mask says so."""
    if score_mask.dtype == torch.bool:
        return (scores.masked_fill_ if in_place else scores.masked_fill)(score_mask, -torch.inf)
    return (scores.add_ if in_place else scores.add)(score_mask)
