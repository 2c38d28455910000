"""Forward of attention, one pass over the keys. Specification: fastattn/reference/attention.py

    S = softmax_scale * q k^T + bias;  S_ij = -inf where query i may not see key j
    lse_i = log sum_j exp(S_ij);  out_i = sum_j keep_ij / (1 - dropout_p) * exp(S_ij - lse_i) v_j

Source: Dao 2023, FlashAttention-2, arXiv:2307.08691, Algorithm 1.
Grid: one program per (batch, head, BLOCK_M queries), in one dimension, the last queries of a head first: under a causal
mask they have the longest way. A program keeps in registers its accumulator [BLOCK_M, BLOCK_DV] and the running
maximum and sum of BLOCK_M rows, in float32; its queries (shared memory on sm_90) are read once, and key and value tiles
stream through shared memory, num_stages deep. Nothing as large as the scores is ever in memory.
Work: 2 * (Dk + Dv) FLOPs per visited score; bytes: q and out once, k and v once per query tile, mostly from L2.
Only visited tiles cost: outside the band, or where AttentionMask found nothing to see, no tile is loaded.
Compiled offline with triton 3.6, bf16, sm_90a (no GPU has timed it yet): causal D 64 takes 127 registers and 64 KiB of
shared memory, two programs an SM; D 128 227 and 128 KiB. tests/compile prints these, and asserts that nothing spills.
Tried and dropped, same compiler:
    tiles of 128 x 128, or 4 warps for 128 x 64: at D 128 they spill, 5 to 120 stores without a mask, more with one;
    a column-wise any() of each masked tile, to find keys that nobody sees: 222 registers at D 64 where 122 do without,
    and 254 with its flags packed into words first; hence seen.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.masks import AttentionMask

from ..common.launch import current_arch, on_device
from ..common.philox import dropout_keep
from . import arguments
from .config import config
from .tiles import (
    LN2,
    LOG2E,
    exponential,
    keep_elements,
    key_interval,
    load_bias,
    load_rows,
    plan_visits,
    program_place,
    store_rows,
    tile_at,
)


@triton.jit
def attention_forward_kernel(
    # q (B, H, Lq, Dk), k (B, Hk, Lk, Dk), v (B, Hk, Lk, Dv), out (B, H, Lq, Dv); lse (B, H, Lq) float32, contiguous.
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    q_stride_b, q_stride_h, q_stride_m,
    k_stride_b, k_stride_h, k_stride_n,
    v_stride_b, v_stride_h, v_stride_n,
    out_stride_b, out_stride_h, out_stride_m,
    num_heads, group, seqlen_q, seqlen_k, softmax_scale,
    # Who sees whom; see arguments.py. Lists are of key tiles, one per query tile.
    band_lo, band_hi,
    k_start_ptr, k_end_ptr, interval_stride_b,
    seen_ptr, seen_stride_b, seen_stride_h,
    attn_mask_ptr, attn_mask_stride_b, attn_mask_stride_h, attn_mask_stride_m, attn_mask_stride_n,
    bias_ptr, bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n,
    num_partial_ptr, partial_ptr, num_full_ptr, full_ptr, tiles_stride_b, tiles_stride_h,
    rng_state_ptr, dropout_threshold, dropout_scale,
    HEAD_DIM_K: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    FOLD_SCALE: tl.constexpr, LISTS: tl.constexpr, HAS_ATTN_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    num_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    tile, b, h = program_place(num_tiles, num_heads)
    tile = num_tiles - 1 - tile
    m0 = tile * BLOCK_M
    m_last = tl.minimum(m0 + BLOCK_M, seqlen_q) - 1
    m = m0 + tl.arange(0, BLOCK_M)
    row = (b * num_heads + h) * seqlen_q + m  # int64: of lse, and of the dropout rule

    k_ptr += b * k_stride_b + h // group * k_stride_h
    v_ptr += b * v_stride_b + h // group * v_stride_h
    q_ptr += b * q_stride_b + h * q_stride_h
    if LISTS:
        k_start_ptr += b * interval_stride_b
        k_end_ptr += b * interval_stride_b
        place = b * tiles_stride_b + h * tiles_stride_h + tile
        num_partial, num_full = tl.load(num_partial_ptr + place), tl.load(num_full_ptr + place)
        partial_ptr += place * tl.cdiv(seqlen_k, BLOCK_N)
        full_ptr += place * tl.cdiv(seqlen_k, BLOCK_N)
        first, num_left = 0, 0
    else:
        n_first = tl.maximum(m0 + band_lo, 0)  # no query of this tile sees a key before it, or from n_end on
        n_end = tl.maximum(tl.minimum(m_last + band_hi + 1, seqlen_k), 0)
        first, num_left, num_partial, num_full = plan_visits(
            n_first,
            tl.maximum(m_last + band_lo, 0),
            tl.maximum(tl.minimum(m0 + band_hi + 1, seqlen_k), 0),
            n_end,
            BLOCK_N,
        )
    if LISTS or HAS_BIAS:
        seen_ptr += b * seen_stride_b + h * seen_stride_h
    if HAS_ATTN_MASK:
        attn_mask_ptr += b * attn_mask_stride_b + h * attn_mask_stride_h
    if HAS_BIAS:
        bias_ptr += b * bias_stride_b + h * bias_stride_h

    unit = softmax_scale * LOG2E if FOLD_SCALE else LOG2E
    start, end = key_interval(m[:, None], seqlen_q, seqlen_k, band_lo, band_hi, k_start_ptr, k_end_ptr, LISTS)
    q = load_rows(q_ptr, m0, q_stride_m, m < seqlen_q, BLOCK_M, HEAD_DIM_K, BLOCK_DK)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    for FULL in tl.static_range(2):  # unrolled: first the partial tiles, then the full ones, compiled without masks
        for i in range(num_full if FULL else num_partial):
            n0 = BLOCK_N * tile_at(i, full_ptr if FULL else partial_ptr, first, num_left, num_full, FULL, LISTS)
            n = n0 + tl.arange(0, BLOCK_N)
            # A key that nobody sees may hold anything, NaN included, and 0 * NaN is NaN: it is never loaded.
            if FULL and not HAS_BIAS:
                seen = None
            elif LISTS or HAS_BIAS:
                seen = tl.load(seen_ptr + n, mask=n < seqlen_k, other=0) != 0
            else:
                seen = (n >= n_first) & (n < n_end)
            k = load_rows(k_ptr, n0, k_stride_n, seen, BLOCK_N, HEAD_DIM_K, BLOCK_DK)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if not FOLD_SCALE:
                scores *= softmax_scale
            if not FULL:
                keep = seen[None, :] & keep_elements(
                    m[:, None], n[None, :], start, end, seqlen_q, seqlen_k,
                    attn_mask_ptr, attn_mask_stride_m, attn_mask_stride_n, HAS_ATTN_MASK,
                )  # fmt: skip
            if HAS_BIAS:
                bias = load_bias(m[:, None], n[None, :], seqlen_q, seqlen_k, bias_ptr, bias_stride_m, bias_stride_n)
                scores += bias
                keep = bias != float("-inf") if FULL else keep & (bias != float("-inf"))
            if HAS_BIAS or not FULL:
                scores = tl.where(keep, scores, float("-inf"))

            new_max = tl.maximum(row_max, tl.max(scores, axis=1))
            # A row that has seen nothing yet keeps the maximum -inf; 0 in its place avoids -inf - -inf.
            shift = tl.where(new_max == float("-inf"), 0.0, new_max) if HAS_BIAS or not FULL else new_max
            rescale = tl.exp2((row_max - shift) * unit)
            p = exponential(scores, (shift * unit if FOLD_SCALE else shift)[:, None], 0.0, unit, FOLD_SCALE)
            row_sum = row_sum * rescale + tl.sum(p, axis=1)
            if HAS_DROPOUT:  # the softmax is normalised without dropout; the factor of kept values follows at the end
                p = tl.where(dropout_keep(rng_state_ptr, dropout_threshold, row, n0, BLOCK_N), p, 0.0)
            v = load_rows(v_ptr, n0, v_stride_n, seen, BLOCK_N, HEAD_DIM_V, BLOCK_DV)
            acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
            row_max = new_max

    empty = row_sum == 0.0
    row_sum = tl.where(empty, 1.0, row_sum)
    factor = dropout_scale / row_sum if HAS_DROPOUT else 1.0 / row_sum
    out = tl.where(empty[:, None], 0.0, acc * factor[:, None])
    lse = tl.where(empty, float("-inf"), row_max * (unit * LN2) + tl.log(row_sum))
    tl.store(lse_ptr + row, lse, mask=m < seqlen_q)
    out_ptr += b * out_stride_b + h * out_stride_h
    store_rows(out_ptr, m0, out_stride_m, m < seqlen_q, out, BLOCK_M, HEAD_DIM_V, BLOCK_DV)


def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | None,
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """q (B, H, Lq, Dk), k (B, Hk, Lk, Dk), v (B, Hk, Lk, Dv) -> out (B, H, Lq, Dv) in q's dtype and memory order,
    lse (B, H, Lq) float32. rng_state: int64 (seed, offset), or None without dropout."""
    B, H, Lq, _ = q.shape
    out = arguments.empty_like(q, v.shape[3])
    lse = torch.empty(B, H, Lq, dtype=torch.float32, device=q.device)
    with on_device(q):
        c = config("forward", current_arch(), q.dtype, max(q.shape[3], v.shape[3]), Lq)
        programs = B * H * triton.cdiv(Lq, c.BLOCK_M)
        if programs > 0:
            attention_forward_kernel[(programs,)](
                q_ptr=q, k_ptr=k, v_ptr=v, out_ptr=out, lse_ptr=lse,
                **arguments.strides("m", q=q, out=out), **arguments.strides("n", k=k, v=v),
                **arguments.problem(q, k, v, softmax_scale),
                **arguments.visibility(q, k, mask, softmax_scale),
                **arguments.visits(mask, q, k, c, by_key=False),
                **arguments.dropout(dropout_p, rng_state),
                **c._asdict(),
            )  # fmt: skip
    return out, lse
