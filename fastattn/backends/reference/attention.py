"""Masked scaled dot-product attention, the formula. Source: Vaswani et al. 2017, "Attention Is All You Need", eq. 1.

    S = cap(softmax_scale * q k^T) + bias, cap(x) = softcap * tanh(x / softcap), or x without a softcap
    S_ij = -inf where query i may not attend to key j
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
    softcap: float | None = None,
    *,
    return_lse: bool = True,
    return_weights: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """q (B, H, Lq, Dk), k (B, Hk, Lk, Dk), v (B, Hk, Lk, Dv) -> out (B, H, Lq, Dv), lse (B, H, Lq) and the weights.

    weights: P after dropout, (B, H, Lq, Lk). All are differentiable in q, k, v and the mask's biases. Sums run in
    float32, or in float64 for float64 inputs.
    """
    B, H, Lq, _ = q.shape
    Lk = k.shape[2]
    k, v = (t.repeat_interleave(H // max(t.shape[1], 1), dim=1) for t in (k, v))
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    visible, bias = torch.ones(1, 1, Lq, Lk, dtype=torch.bool, device=q.device), None
    if mask is not None:
        visible = mask.dense(B, H, Lq, Lk, q.device)
        bias = mask.bias if mask.relative_bias is None else mask.dense_relative_bias(Lq, Lk)
        if bias is not None:
            visible = visible & (bias != -torch.inf)
        structure = mask.replace(attn_mask=None, bias=None, relative_bias=None).dense(B, H, Lq, Lk, q.device)
        k, v = (t.where(structure.any(-2).unsqueeze(-1), 0) for t in (k, v))
    has_keys = visible.any(-1, keepdim=True)
    q = q.where(has_keys, 0)

    products = acc if q.dtype == torch.float16 else q.dtype  # scores soon exceed 65504, the largest number of float16
    scores = (q.to(products) @ k.mT.to(products)).to(acc) * softmax_scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.to(acc).where(visible, 0)
    scores = scores.masked_fill(~visible, -torch.inf)

    peak = scores.amax(-1, keepdim=True).where(has_keys, 0).detach() if Lk > 0 else scores.new_zeros(())
    exps = torch.exp(scores - peak)
    total = exps.sum(-1, keepdim=True).where(has_keys, 1)
    weights = philox.dropout((exps / total).to(q.dtype), dropout_p, rng_state)
    out = (weights @ v).where(has_keys, 0)
    lse = (peak + torch.log(total)).where(has_keys, -torch.inf).squeeze(-1)
    return out, lse, weights if return_weights else None
