"""Attention of new tokens to a cache by PyTorch's operators.

All queries of a sequence are one problem. If rows differ, its keys are those of all rows, in the order of memory, and a
mask selects the row that a query reads. That is R times the products, which are few, but nothing is copied.

The fused operator computes one query, and several of few sequences. Two products compute several queries of many, if
the keys of a head are together in memory, as in fastattn.nn.kv_cache. On two cores of an AMD EPYC, float32, 5 queries,
8 heads of 64, 32 sequences, the fused operator takes 517 us for 30 keys and 1397 us for 160 with a mask, two products
178 and 986. On one core of a Zen 4, one sequence, 32 keys and 150 with a mask, the fused operator takes 18 and 56 us,
two products 36 and 76; 4 sequences 55 and 190, 73 and 220.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fastattn._tracing import can_read_values

DIFFERENTIABLE = True
MAX_FUSED = 16  # sequences times heads
_fused = torch._C._nn.scaled_dot_product_attention


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
    """As fastattn.backends.reference.decode_attention.decode_attention, which is the specification."""
    (B, W), (M, R) = q.shape[:2], k.shape[1:3]
    if lengths is not None and can_read_values(q) and (lengths >= M).all():
        lengths = None
    visible = visible_keys(B, W, M, R, q.device, lengths, ancestors)
    q = q.transpose(1, 2)  # (B, H, W, D)
    k, v = (t.permute(0, 3, 1, 2, 4).flatten(2, 3) for t in (k, v))  # (B, Hk, M * R, D)
    if bias is not None:
        bias = bias.repeat_interleave(R, 1)[:, None].to(torch.promote_types(q.dtype, torch.float32))
    if visible is None:
        return attend(q, k, v, bias, softmax_scale, softcap).transpose(1, 2).contiguous()
    masked = as_bias(visible, q.dtype)
    bias = masked if bias is None else masked + bias
    if can_read_values(q):
        # NaN in a key that no query attends to shows in the result, or does no harm. So does a query without keys.
        out = attend(q, k, v, bias, softmax_scale, softcap)
        if math.isfinite(out.sum()):
            return out.transpose(1, 2).contiguous()
    used = visible.any(1)[:, None, :, None]
    out = attend(q, k.where(used, 0), v.where(used, 0), bias, softmax_scale, softcap).transpose(1, 2)
    return out.where(visible.any(-1)[..., None, None], 0).contiguous()


def visible_keys(
    B: int, W: int, M: int, R: int, device: torch.device, lengths: Tensor | None, ancestors: Tensor | None
) -> Tensor | None:
    """(B or 1, 1 or W, M * R) bool, True = attend; None where all is visible."""
    visible = None
    if ancestors is not None:
        visible = ancestors[..., None] == torch.arange(R, dtype=torch.int32, device=device)
    elif R > 1:
        visible = torch.eye(R, dtype=torch.bool, device=device)[:, None].expand(B, W, M, R)
    if lengths is not None:
        in_length = (torch.arange(M, device=device) < lengths[:, None])[:, None, :, None]
        visible = in_length.expand(B, 1, M, R) if visible is None else visible & in_length
    return None if visible is None else visible.flatten(2)


def as_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """What `attend` adds to the scores, (B, 1, 1 or W, N): 0 or -inf."""
    return visible.to(dtype).log_()[:, None]


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, softmax_scale: float, softcap: float | None = None
) -> Tensor:
    """q (B, H, W, Dk), k (B, Hk, N, Dk), v (B, Hk, N, Dv) -> (B, H, W, Dv)."""
    (B, H, W, Dk), (Hk, N, Dv) = q.shape, v.shape[1:]
    if N == 0:
        return q.new_zeros(B, H, W, Dv)
    by_products = W > 1 and q.device.type == "cpu" and q.dtype != torch.float16  # whose scores would overflow
    by_products = by_products and (torch.compiler.is_compiling() or B * H > MAX_FUSED)  # a graph is for all B
    by_products = by_products and _heads_merge(k) and _heads_merge(v)
    fits_operator = softcap is None and (bias is None or bias.dtype is q.dtype)
    if fits_operator and not by_products:
        grouped = True if Hk != H else False  # PyTorch takes no bool of traced sizes
        return _fused(q, k, v, bias, scale=softmax_scale, enable_gqa=grouped)
    k, v = k.flatten(0, 1), v.flatten(0, 1)
    products = torch.float32 if q.dtype is torch.float16 else q.dtype
    rows = q.reshape(B * Hk, H // Hk * W, Dk).to(products)
    scores = torch.bmm(rows, k.to(products).mT).view(B, H, W, N)
    acc = scores if q.dtype in (torch.float32, torch.float64) else scores.float()
    if softcap is not None:
        acc, softmax_scale = torch.tanh(acc * (softmax_scale / softcap)), softcap
    acc = acc * softmax_scale if bias is None else torch.add(bias, acc, alpha=softmax_scale)
    weights = acc.softmax(-1).to(q.dtype)
    return torch.bmm(weights.view(B * Hk, H // Hk * W, N), v).view(B, H, W, Dv)


def attention_of(B: int, H: int, Hk: int, W: int, softmax_scale: float) -> Callable[..., Tensor]:
    """`attend` of q, k, v and bias of one dtype and these sizes, without its questions where it is the operator."""
    if W == 1 or B * H <= MAX_FUSED:
        return partial(_fused, scale=softmax_scale, enable_gqa=Hk != H)
    return partial(attend, softmax_scale=softmax_scale)


def _heads_merge(t: Tensor) -> bool:
    """Whether t (B, Hk, N, D) is a batch of B * Hk matrices without a copy."""
    return t.stride(0) == t.shape[1] * t.stride(1)
