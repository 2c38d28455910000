"""The CUDA backend of attention to a cache. Formula, shapes and grid: csrc/decode_attention/."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.backends.constants import DTYPES
from fastattn.backends.cuda import device_index, extension, refuse_device

MAX_HEAD_DIM = 256  # the extension's DECODE_MAX_HEAD_DIM: csrc/decode_attention/decode_attention.h


def unsupported_reason(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    ancestors: Tensor | None,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> str | None:
    """None, or what is not supported and what the call has."""
    if reason := refuse_device(q):
        return reason
    if q.dtype not in DTYPES:
        return f"CUDA decode_attention takes float32, bfloat16 and float16, got {q.dtype}"
    if max(q.shape[3], v.shape[4]) > MAX_HEAD_DIM:
        dims = f"{q.shape[3]} and {v.shape[4]}"
        return f"CUDA decode_attention takes head dimensions up to {MAX_HEAD_DIM}, got {dims}"
    if bias is not None and bias.dtype not in DTYPES:
        return f"CUDA decode_attention takes a bias in float32, bfloat16 or float16, got {bias.dtype}"
    return None


def decode_attention_fwd(
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
    (B, W, H, _), (_, M, R, Hk, Dv) = q.shape, v.shape
    module = extension(q.is_cuda)
    out = torch.empty(B, W, H, Dv, dtype=q.dtype, device=q.device)
    shared_keys = R == 1 and ancestors is None
    splits, work = module.decode_attention_splits(B, W, H, Hk, M, shared_keys, device_index(q)), None
    if splits > 1:  # their results, and the lse of each
        work = torch.empty(splits * B * W * H * (Dv + 1), dtype=torch.float32, device=q.device)
    lengths = None if lengths is None else lengths.contiguous()
    bias = None if bias is None else bias.float()
    module.decode_attention_fwd(q, k, v, lengths, ancestors, bias, out, work, splits, softmax_scale, softcap or 0.0)
    return out
