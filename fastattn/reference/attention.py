"""Masked scaled dot-product attention, the formula. Source: Vaswani et al. 2017, "Attention Is All You Need", eq. 1.

    S = softmax_scale * q k^T + bias;  S_ij = -inf where query i may not see key j
    lse_i = log sum_j exp(S_ij);  P_ij = exp(S_ij - lse_i);  out = dropout(P) v

A query that sees nothing has out = 0, lse = -inf and no gradient. It, and a key that no query sees, take no part at
all: whatever they hold, NaN included, reaches nothing (0 * NaN would).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fastattn.masks import AttentionMask
from fastattn.reference import philox


def why_not(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None, dropout_p: float) -> str | None:
    """The formula serves everything."""
    return None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | None,
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
    *,
    return_lse: bool = True,
    return_weights: tuple[range, ...] | Literal["mean", "argmax"] | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """q (B, H, Lq, Dk), k (B, Hk, Lk, Dk), v (B, Hk, Lk, Dv) -> out (B, H, Lq, Dv), lse (B, H, Lq) and the weights.

    weights: as `asked_for` says, P after dropout. Differentiable in q, k, v and mask.bias. Sums run in float32, or in
    float64 for float64 inputs.
    """
    B, H, Lq, _ = q.shape
    Lk = k.shape[2]
    k, v = (t.repeat_interleave(H // max(t.shape[1], 1), dim=1) for t in (k, v))
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    keep = torch.ones(1, 1, Lq, Lk, dtype=torch.bool, device=q.device)
    if mask is not None:
        keep = mask.dense(B, H, Lq, Lk, q.device)
        if mask.bias is not None:
            keep = keep & (mask.bias != -torch.inf)
        k, v = (t.where(keep.any(-2).unsqueeze(-1), 0) for t in (k, v))
    sees = keep.any(-1, keepdim=True)
    q = q.where(sees, 0)

    scores = (q @ k.mT).to(acc) * softmax_scale
    if mask is not None and mask.bias is not None:
        scores = scores + mask.bias.to(acc).where(keep, 0)
    scores = scores.masked_fill(~keep, -torch.inf)

    peak = scores.amax(-1, keepdim=True).where(sees, 0).detach() if Lk > 0 else scores.new_zeros(())
    exps = torch.exp(scores - peak)
    total = exps.sum(-1, keepdim=True).where(sees, 1)
    weights = philox.dropout((exps / total).to(q.dtype), dropout_p, rng_state)
    out = (weights @ v).where(sees, 0)
    lse = (peak + torch.log(total)).where(sees, -torch.inf).squeeze(-1)
    return out, lse, asked_for(return_weights, scores, weights, sees)


def asked_for(
    request: tuple[range, ...] | Literal["mean", "argmax"] | None, scores: Tensor, weights: Tensor, sees: Tensor | None
) -> Tensor | None:
    """Of weights (B, H, Lq, Lk), after dropout: those of the heads in the ranges, (B, number of heads, Lq, Lk); or
    "mean", over the heads, (B, Lq, Lk); or "argmax", before dropout, int64 (B, H, Lq): the key of the largest score,
    the first of equal ones, -1 for a query that sees nothing. None: nothing.

    sees: (.., Lq, 1), which queries see something, None: all.
    """
    if request is None:
        return None
    if request == "mean":
        return weights.mean(1)
    if request == "argmax":
        if scores.shape[3] == 0:
            return scores.new_full(scores.shape[:3], -1, dtype=torch.int64)
        best = scores.argmax(-1)
        return best if sees is None else best.where(sees.squeeze(-1), -1)
    if request == (range(weights.shape[1]),):
        return weights
    return torch.stack([weights[:, h] for heads in request for h in heads], dim=1)
