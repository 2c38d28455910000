"""Masked scaled dot-product attention, the formula. Source: Vaswani et al. 2017, "Attention Is All You Need", eq. 1.

    S = softmax_scale * q k^T + bias;  S_ij = -inf where query i may not attend to key j
    lse_i = log sum_j exp(S_ij);  P_ij = exp(S_ij - lse_i);  out = dropout(P) v

A query without a visible key has out = 0, lse = -inf and no gradient. What it holds, and what a key holds that padding,
lengths, packing or a band exclude for every query, reaches nothing, NaN included (0 * NaN would).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.backends.reference import philox
from fastattn.masks import AttentionMask

DIFFERENTIABLE = True


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
    return_weights: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """q (B, H, Lq, Dk), k (B, Hk, Lk, Dk), v (B, Hk, Lk, Dv) -> out (B, H, Lq, Dv), lse (B, H, Lq) and the weights.

    weights: P after dropout, (B, H, Lq, Lk). All are differentiable in q, k, v and mask.bias. Sums run in float32, or
    in float64 for float64 inputs.
    """
    B, H, Lq, _ = q.shape
    Lk = k.shape[2]
    k, v = (t.repeat_interleave(H // max(t.shape[1], 1), dim=1) for t in (k, v))
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    visible = torch.ones(1, 1, Lq, Lk, dtype=torch.bool, device=q.device)
    if mask is not None:
        visible = mask.dense(B, H, Lq, Lk, q.device)
        if mask.bias is not None:
            visible = visible & (mask.bias != -torch.inf)
        structure = mask.replace(attn_mask=None, bias=None).dense(B, H, Lq, Lk, q.device)
        k, v = (t.where(structure.any(-2).unsqueeze(-1), 0) for t in (k, v))
    has_keys = visible.any(-1, keepdim=True)
    q = q.where(has_keys, 0)

    products = acc if q.dtype == torch.float16 else q.dtype  # scores soon exceed 65504, the largest number of float16
    scores = (q.to(products) @ k.mT.to(products)).to(acc) * softmax_scale
    if mask is not None and mask.bias is not None:
        scores = scores + mask.bias.to(acc).where(visible, 0)
    scores = scores.masked_fill(~visible, -torch.inf)

    peak = scores.amax(-1, keepdim=True).where(has_keys, 0).detach() if Lk > 0 else scores.new_zeros(())
    exps = torch.exp(scores - peak)
    total = exps.sum(-1, keepdim=True).where(has_keys, 1)
    weights = philox.dropout((exps / total).to(q.dtype), dropout_p, rng_state)
    out = (weights @ v).where(has_keys, 0)
    lse = (peak + torch.log(total)).where(has_keys, -torch.inf).squeeze(-1)
    return out, lse, weights if return_weights else None
