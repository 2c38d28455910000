"""What float32 cannot hold of an lse.

lse is handed out in float32, right to half a unit in its last place, and so are the weights exp(S - lse) made from it:
to 3e-7 of themselves at an lse of 5. To 16-bit types that is nothing, to float32 the largest error of the backward. And
a bias may move whole rows to where float32 is coarse: -1e4, with which some models mask, or finfo.min, where
max + log(sum) rounds to max, and a row of n equal scores would get weights 1 instead of 1 / n.
The remainder is what is missing: log2 of sum_j exp(S_ij - lse_i); it is computed where it matters, and 0 elsewhere.
Grid: one program per (batch, head, BLOCK_M queries), along all keys, unless none of its lse is coarse.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import current_arch
from . import arguments
from .config import config
from .tiles import LOG2E, exponential, keep_elements, key_interval, load_bias, load_rows, program_place

_COARSE = 64.0  # to 16-bit types: half a unit in the last place of an lse beyond it is 4e-6


@triton.jit
def lse_remainder_kernel(
    # lse, remainder (B, H, Lq) float32, contiguous.
    q_ptr, k_ptr, lse_ptr, remainder_ptr,
    q_stride_b, q_stride_h, q_stride_m,
    k_stride_b, k_stride_h, k_stride_n,
    num_heads, group, seqlen_q, seqlen_k, softmax_scale, coarse_from,
    band_lo, band_hi,
    k_start_ptr, k_end_ptr, interval_stride_b,
    seen_ptr, seen_stride_b, seen_stride_h,
    attn_mask_ptr, attn_mask_stride_b, attn_mask_stride_h, attn_mask_stride_m, attn_mask_stride_n,
    bias_ptr, bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n,
    HEAD_DIM_K: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    FOLD_SCALE: tl.constexpr, LISTS: tl.constexpr, HAS_ATTN_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile, b, h = program_place(tl.cdiv(seqlen_q, BLOCK_M), num_heads)
    m0 = tile * BLOCK_M
    m = m0 + tl.arange(0, BLOCK_M)
    row = (b * num_heads + h) * seqlen_q + m
    lse = tl.load(lse_ptr + row, mask=m < seqlen_q, other=float("-inf"))
    coarse = (tl.abs(lse) >= coarse_from) & (lse != float("-inf"))
    total = tl.where(coarse, 0.0, 1.0)
    if tl.max(coarse.to(tl.int32), axis=0) > 0:
        q_ptr += b * q_stride_b + h * q_stride_h
        k_ptr += b * k_stride_b + h // group * k_stride_h
        if LISTS or HAS_BIAS:
            seen_ptr += b * seen_stride_b + h * seen_stride_h
        if HAS_BIAS:
            bias_ptr += b * bias_stride_b + h * bias_stride_h
        if LISTS:
            k_start_ptr += b * interval_stride_b
            k_end_ptr += b * interval_stride_b
        if HAS_ATTN_MASK:
            attn_mask_ptr += b * attn_mask_stride_b + h * attn_mask_stride_h
        start, end = key_interval(m[:, None], seqlen_q, seqlen_k, band_lo, band_hi, k_start_ptr, k_end_ptr, LISTS)
        q = load_rows(q_ptr, m0, q_stride_m, m < seqlen_q, BLOCK_M, HEAD_DIM_K, BLOCK_DK)
        for n0 in range(0, seqlen_k, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            seen = n < seqlen_k
            if LISTS or HAS_BIAS:
                seen = tl.load(seen_ptr + n, mask=seen, other=0) != 0
            keep = seen[None, :] & coarse[:, None] & keep_elements(
                m[:, None], n[None, :], start, end, seqlen_q, seqlen_k,
                attn_mask_ptr, attn_mask_stride_m, attn_mask_stride_n, HAS_ATTN_MASK,
            )  # fmt: skip
            if tl.max(keep.to(tl.int32)) > 0:
                k = load_rows(k_ptr, n0, k_stride_n, seen, BLOCK_N, HEAD_DIM_K, BLOCK_DK)
                scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * softmax_scale
                if HAS_BIAS:
                    bias = load_bias(m[:, None], n[None, :], seqlen_q, seqlen_k, bias_ptr, bias_stride_m, bias_stride_n)
                    scores += bias
                    keep = keep & (bias != float("-inf"))
                p = exponential(scores, lse[:, None], 0.0, LOG2E, FOLD_SCALE)
                total += tl.sum(tl.where(keep, p, 0.0), axis=1)
    tl.store(remainder_ptr + row, tl.log2(total), mask=m < seqlen_q)


def lse_remainder(q: Tensor, k: Tensor, lse: Tensor, shared: dict[str, Any]) -> dict[str, Any]:
    """remainder_ptr: float32 (B, H, Lq), in powers of two, or None where it would all be 0, with HAS_REMAINDER.

    lse: contiguous, of the forward. shared: the arguments of problem() and visibility().
    """
    if shared["FOLD_SCALE"] or not (shared["HAS_BIAS"] or q.dtype == torch.float32):
        return {"remainder_ptr": None, "HAS_REMAINDER": False}
    remainder = torch.empty_like(lse)
    c = config("weights", current_arch(), q.dtype, q.shape[3], q.shape[2])
    programs = q.shape[0] * q.shape[1] * triton.cdiv(q.shape[2], c.BLOCK_M)
    if programs > 0:
        lse_remainder_kernel[(programs,)](
            q_ptr=q, k_ptr=k, lse_ptr=lse, remainder_ptr=remainder,
            coarse_from=0.0 if q.dtype == torch.float32 else _COARSE,
            **arguments.strides("m", q=q), **arguments.strides("n", k=k), **shared, **c._asdict(),
        )  # fmt: skip
    return {"remainder_ptr": remainder, "HAS_REMAINDER": True}
