"""Attention of new tokens to a cache, the formula: each query's keys are gathered for the formula of attention.

k_bwj = key[b, j, ancestors[b, w, j]], v_bwj likewise;  visible where j < lengths[b] and the ancestor is a row
out_bw = softmax over visible j of (cap(softmax_scale * q_bw k_bwj) + bias_j), times v_bwj; cap as in attention
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.backends.reference.attention import attention
from fastattn.masks import AttentionMask

DIFFERENTIABLE = True


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    ancestors: Tensor | None,
    softmax_scale: float,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """q (B, W, H, Dk), k (B, M, R, Hk, Dk), v (B, M, R, Hk, Dv), lengths (B,), ancestors (B, W, M), bias (H or 1, M)
    -> (B, W, H, Dv)."""
    (B, W), (M, R), device = q.shape[:2], k.shape[1:3], q.device
    if R == 0:  # there is no row to gather from
        return q.new_zeros(*q.shape[:3], v.shape[-1])
    if ancestors is None:
        own_row = torch.arange(W, device=device) if R == W else torch.zeros(W, device=device, dtype=torch.long)
        ancestors = own_row[:, None].expand(B, W, M)
    visible = (ancestors >= 0) & (ancestors < R)
    position = torch.arange(M, device=device)
    if lengths is not None:
        visible = visible & (position < lengths[:, None, None])
    place = (torch.arange(B, device=device)[:, None, None], position, ancestors.clamp(0, R - 1))
    # (B, W, M, Hk, D) -> (B * W, Hk, M, D): every query is a batch entry with its own keys.
    k, v = (t[place].flatten(0, 1).transpose(1, 2) for t in (k, v))
    mask = AttentionMask(key_padding=visible.flatten(0, 1), relative_bias=bias)
    out, _, _ = attention(q.flatten(0, 1)[:, :, None], k, v, mask, softmax_scale, 0.0, None, softcap)
    return out[:, :, 0].unflatten(0, (B, W))
