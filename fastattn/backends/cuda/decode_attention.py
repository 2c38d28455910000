"""The CUDA backend of attention to a cache. Formula, shapes and grid: csrc/decode_attention/."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.backends.cuda import DTYPES, address, device_index, extension, refuse_device, stream

MAX_HEAD_DIM = 256  # the extension's DECODE_MAX_HEAD_DIM: csrc/decode_attention/decode_attention.h


def unsupported_reason(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, ancestors: Tensor | None) -> str | None:
    """None, or what is not supported and what the call has."""
    if reason := refuse_device(q):
        return reason
    if q.dtype not in DTYPES:
        return f"CUDA decode_attention takes float32, bfloat16 and float16, got {q.dtype}"
    if max(q.shape[3], v.shape[4]) > MAX_HEAD_DIM:
        dims = f"{q.shape[3]} and {v.shape[4]}"
        return f"CUDA decode_attention takes head dimensions up to {MAX_HEAD_DIM}, got {dims}"
    return None


def decode_attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, ancestors: Tensor | None, softmax_scale: float
) -> Tensor:
    """q (B, W, H, Dk), k (B, M, R, Hk, Dk), v (B, M, R, Hk, Dv), lengths (B,), ancestors (B, W, M) -> (B, W, H, Dv)."""
    (B, W, H, _), (_, M, R, Hk, Dv) = q.shape, v.shape
    module, device = extension(q.device), device_index(q)
    out = torch.empty(B, W, H, Dv, dtype=q.dtype, device=q.device)
    shared_keys = R == 1 and ancestors is None
    splits = module.decode_attention_splits(B, W, H, Hk, M, shared_keys, device)
    partial = lse = None
    if splits > 1:
        partial = torch.empty(splits, B, W, H, Dv, dtype=torch.float32, device=q.device)
        lse = torch.empty(splits, B, W, H, dtype=torch.float32, device=q.device)
    lengths = None if lengths is None else lengths.contiguous()
    queries = address(q), q.stride()[:3]
    cache = (address(k), *k.stride()[:4], k.shape[4]), (address(v), *v.stride()[:4], Dv)
    beams = address(lengths), address(ancestors), (0, 0, 0) if ancestors is None else ancestors.stride()
    outputs = address(out), address(partial), address(lse)
    options = B, W, H, Hk, M, R, splits, softmax_scale, DTYPES[q.dtype]
    module.decode_attention_fwd(*queries, *cache, *beams, *outputs, *options, device, stream(q))
    return out
