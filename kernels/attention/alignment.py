"""The alignment on request: for each query the key of its largest weight, which is that of its largest score.

Grid: one program per (batch, head, BLOCK_M queries), along the key tiles that hold something to see, with the forward's
tiles and lists. Bytes: q once, k once per query tile, 8 a query; nothing of the size of the scores.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.masks import AttentionMask

from ..common.launch import current_arch, on_device
from . import arguments
from .config import config
from .tiles import keep_elements, key_interval, load_bias, load_rows, plan_visits, program_place, tile_at


@triton.jit
def attention_alignment_kernel(
    # best (B, H, Lq) int64, contiguous.
    q_ptr, k_ptr, best_ptr,
    q_stride_b, q_stride_h, q_stride_m,
    k_stride_b, k_stride_h, k_stride_n,
    num_heads, group, seqlen_q, seqlen_k, softmax_scale,
    band_lo, band_hi,
    k_start_ptr, k_end_ptr, interval_stride_b,
    seen_ptr, seen_stride_b, seen_stride_h,
    attn_mask_ptr, attn_mask_stride_b, attn_mask_stride_h, attn_mask_stride_m, attn_mask_stride_n,
    bias_ptr, bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n,
    num_partial_ptr, partial_ptr, num_full_ptr, full_ptr, tiles_stride_b, tiles_stride_h,
    HEAD_DIM_K: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    FOLD_SCALE: tl.constexpr, LISTS: tl.constexpr, HAS_ATTN_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    num_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    tile, b, h = program_place(num_tiles, num_heads)
    tile = num_tiles - 1 - tile
    m0 = tile * BLOCK_M
    m_last = tl.minimum(m0 + BLOCK_M, seqlen_q) - 1
    m = m0 + tl.arange(0, BLOCK_M)
    q_ptr += b * q_stride_b + h * q_stride_h
    k_ptr += b * k_stride_b + h // group * k_stride_h
    if LISTS:
        k_start_ptr += b * interval_stride_b
        k_end_ptr += b * interval_stride_b
        seen_ptr += b * seen_stride_b + h * seen_stride_h
        place = b * tiles_stride_b + h * tiles_stride_h + tile
        num_partial, num_full = tl.load(num_partial_ptr + place), tl.load(num_full_ptr + place)
        partial_ptr += place * tl.cdiv(seqlen_k, BLOCK_N)
        full_ptr += place * tl.cdiv(seqlen_k, BLOCK_N)
        first, num_left = 0, 0
    else:
        first, num_left, num_partial, num_full = plan_visits(
            tl.maximum(m0 + band_lo, 0),
            tl.maximum(m_last + band_lo, 0),
            tl.maximum(tl.minimum(m0 + band_hi + 1, seqlen_k), 0),
            tl.maximum(tl.minimum(m_last + band_hi + 1, seqlen_k), 0),
            BLOCK_N,
        )
    if HAS_ATTN_MASK:
        attn_mask_ptr += b * attn_mask_stride_b + h * attn_mask_stride_h
    if HAS_BIAS:
        bias_ptr += b * bias_stride_b + h * bias_stride_h

    start, end = key_interval(m[:, None], seqlen_q, seqlen_k, band_lo, band_hi, k_start_ptr, k_end_ptr, LISTS)
    q = load_rows(q_ptr, m0, q_stride_m, m < seqlen_q, BLOCK_M, HEAD_DIM_K, BLOCK_DK)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    best = tl.full([BLOCK_M], 2147483647, tl.int32)  # no key yet: it loses against every other
    for FULL in tl.static_range(2):  # so tiles do not come in order, and equal scores are told apart by their keys
        for i in range(num_full if FULL else num_partial):
            n0 = BLOCK_N * tile_at(i, full_ptr if FULL else partial_ptr, first, num_left, num_full, FULL, LISTS)
            n = n0 + tl.arange(0, BLOCK_N)
            k = load_rows(k_ptr, n0, k_stride_n, None if FULL else n < seqlen_k, BLOCK_N, HEAD_DIM_K, BLOCK_DK)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * softmax_scale
            if not FULL:
                keep = keep_elements(
                    m[:, None], n[None, :], start, end, seqlen_q, seqlen_k,
                    attn_mask_ptr, attn_mask_stride_m, attn_mask_stride_n, HAS_ATTN_MASK,
                )  # fmt: skip
                if LISTS:  # key padding is among the keys that nobody sees
                    keep = keep & (tl.load(seen_ptr + n, mask=n < seqlen_k, other=0) != 0)[None, :]
                scores = tl.where(keep, scores, float("-inf"))
            if HAS_BIAS:
                bias = load_bias(m[:, None], n[None, :], seqlen_q, seqlen_k, bias_ptr, bias_stride_m, bias_stride_n)
                scores = tl.where(bias == float("-inf"), bias, scores + bias)  # also where a score is NaN
            its_top = tl.max(scores, axis=1)
            its_best = tl.min(tl.where(scores == its_top[:, None], n[None, :], 2147483647), axis=1)
            better = (its_top > top) | ((its_top == top) & (its_top > float("-inf")) & (its_best < best))
            top = tl.where(better, its_top, top)
            best = tl.where(better, its_best, best)
    best = tl.where(top > float("-inf"), best, -1)
    row = (b * num_heads + h) * seqlen_q + m
    tl.store(best_ptr + row, best.to(tl.int64), mask=m < seqlen_q)


def alignment(q: Tensor, k: Tensor, mask: AttentionMask | None, softmax_scale: float) -> Tensor:
    """q (B, H, Lq, Dk), k (B, Hk, Lk, Dk) -> int64 (B, H, Lq), -1 for a query that sees nothing."""
    best = torch.empty(q.shape[:3], dtype=torch.int64, device=q.device)
    with on_device(q):
        c = config("forward", current_arch(), q.dtype, q.shape[3], q.shape[2])
        programs = q.shape[0] * q.shape[1] * triton.cdiv(q.shape[2], c.BLOCK_M)
        if programs > 0:
            attention_alignment_kernel[(programs,)](
                q_ptr=q, k_ptr=k, best_ptr=best,
                **arguments.strides("m", q=q), **arguments.strides("n", k=k),
                **arguments.problem(q, k, k, softmax_scale),
                **arguments.visibility(q, k, mask, softmax_scale),
                **arguments.visits(mask, q, k, c, by_key=False),
                **c._asdict(),
            )  # fmt: skip
    return best
