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

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn._tracing import differentiable_gradients, needs_formula
from fastattn.backends.constants import dropout_scale
from fastattn.backends.reference.philox import draw_kept

SHORT_ROW = 16  # float32 numbers in a vector register


class AtOnceMask(NamedTuple):
    """The mask of a call.

    scores_shape: (B, H, Lq, Lk).
    score_mask: None, or -inf and 0 in float32 at least, or bool with True = masked. It broadcasts to scores_shape, and
        every query has a visible key.
    """

    scores_shape: tuple[int, int, int, int]
    score_mask: Tensor | None


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AtOnceMask,
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
    saves: bool,
) -> tuple[Tensor, Tensor]:
    """q, k, v (B * H, L, D), contiguous, equally many heads -> out, likewise, and the weights as `backward` reads them.

    softmax_scale: not 0.     rng_state: (seed,) of dropout, or None.     saves: whether there will be a backward.
    """
    (N, Lq, _), (_, Lk, Dv), dtype = q.shape, v.shape, q.dtype
    scores = _wide(q.new_empty(N, Lq, Lk).baddbmm_(q, k.mT, beta=0, alpha=softmax_scale))
    if mask.score_mask is not None:
        add_score_mask(scores.view(mask.scores_shape), mask.score_mask)
    weights = _softmax(scores)
    saved = weights = weights if weights.dtype is dtype else weights.to(dtype)
    alpha = 1.0
    if rng_state is not None:
        alpha = _kept_scale(dropout_p)
        weights = weights * draw_kept(rng_state, weights.shape, dropout_p)
        if saves:
            saved.sub_(weights, alpha=2)
    return q.new_empty(N, Lq, Dv).baddbmm_(weights, v, beta=0, alpha=alpha), saved


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    saved: Tensor,
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
    grads: Sequence[Tensor],
) -> Sequence[Tensor]:
    """grads, into which it writes dq, dk and dv, contiguous. dout (B * H, Lq, Dv), contiguous."""
    dtype, drops = q.dtype, rng_state is not None
    alpha = _kept_scale(dropout_p) if drops else 1.0
    dweights = _wide(saved.new_empty(saved.shape).baddbmm_(dout, v.mT, beta=0, alpha=alpha))
    kept = weights = _wide(saved)
    if drops:  # kept, and so dscores, have the other sign: the factors of the products turn it
        kept, weights = weights.clamp_max(0), weights.abs()
        softmax_scale, alpha = -softmax_scale, -alpha
    if drops or saved.shape[2] < SHORT_ROW:
        dscores = _softmax_gradient(dweights.mul_(kept), weights)
    else:
        dscores = torch._softmax_backward_data(dweights, weights, -1, weights.dtype)
    if dscores.dtype is not dtype:
        kept, dscores = kept.to(dtype), dscores.to(dtype)
    dq, dk, dv = grads
    dq.baddbmm_(dscores, k, beta=0, alpha=softmax_scale)
    dk.baddbmm_(dscores.mT, q, beta=0, alpha=softmax_scale)
    dv.baddbmm_(kept.mT, dout, beta=0, alpha=alpha)
    return grads


def _kept_scale(dropout_p: float) -> float:
    """Not 0, even if dropout drops all: baddbmm with factors of 0 alone leaves the memory as it was."""
    return dropout_scale(dropout_p) or 1.0


class AttentionAtOnce(torch.autograd.Function):
    """`forward` and `backward` as one node, which can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: AtOnceMask, *options: Any) -> Tensor:
        """options: softmax_scale, dropout_p, rng_state."""
        out, saved = forward(q, k, v, mask, *options, saves=any(ctx.needs_input_grad))
        ctx.save_for_backward(q, k, v, mask.score_mask, saved)
        ctx.heads, ctx.options = mask.scores_shape[:2], options
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, score_mask, saved = ctx.saved_tensors
        softmax_scale, dropout_p, rng_state = ctx.options
        if not needs_formula(dout):
            grads = [torch.empty_like(t) for t in (q, k, v)]
            return *backward(dout.contiguous(), q, k, v, saved, *ctx.options, grads), *(None,) * 4

        def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            heads = q.unflatten(0, ctx.heads), k.unflatten(0, ctx.heads)
            weights = plain_weights(*heads, score_mask, softmax_scale).flatten(0, 1)
            if rng_state is not None:
                weights = weights * (saved < 0) * _kept_scale(dropout_p)
            return torch.matmul(weights.to(q.dtype), v)

        return *differentiable_gradients(formula, (q, k, v), (dout,)), *(None,) * 4


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
    """softmax_scale * q k^T in float32 at least. q is scaled before the product, where it is fewer numbers, unless that
    rounds it. In float16 the product would overflow at 65504: on a CPU it is one of float32, which is also faster."""
    if q.dtype == torch.bfloat16:
        return torch.matmul(q, k.mT).float() * scale
    if q.dtype == torch.float16 and q.is_cpu:
        q, k = q.float(), k.float()
    return _wide(torch.matmul(q * scale, k.mT))


def plain_weights(q: Tensor, k: Tensor, score_mask: Tensor | None, softmax_scale: float) -> Tensor:
    """P of all heads before dropout, by operators that autograd differentiates. 0 for a query without a key."""
    scores = plain_scores(q, k, softmax_scale)
    if score_mask is None:
        return torch.softmax(scores, dim=-1)
    scores = add_score_mask(scores, score_mask, in_place=False)
    is_empty = scores.amax(-1, keepdim=True) == -torch.inf
    return torch.softmax(scores.masked_fill(is_empty, 0), dim=-1).masked_fill(is_empty, 0)


def add_score_mask(scores: Tensor, score_mask: Tensor, in_place: bool = True) -> Tensor:
    """The scores with -inf where score_mask says so."""
    if score_mask.dtype == torch.bool:
        return (scores.masked_fill_ if in_place else scores.masked_fill)(score_mask, -torch.inf)
    return (scores.add_ if in_place else scores.add)(score_mask)


def repeat_heads(k: Tensor, v: Tensor, H: int) -> tuple[Tensor, Tensor]:
    """k and v (B, Hk, ..) with a head for each of the H heads of queries."""
    if k.shape[1] == H:
        return k, v
    return k.repeat_interleave(H // k.shape[1], dim=1), v.repeat_interleave(H // v.shape[1], dim=1)
