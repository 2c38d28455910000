"""What the backward must know of a row more exactly than lse and out can say.

remainder   lse is handed out in float32, right to half a unit in its last place, and so are the weights exp(S - lse)
            made from it. A bias may move whole rows to where float32 is coarse: -1e4, with which some models mask, or
            finfo.min, where max + log(sum) rounds to max, and a row of n equal scores would get weights 1 instead of
            1 / n. The remainder is what is missing: log2 of sum_j exp(S_ij - lse_i).
delta       sum_j P_ij dP_ij - dlse_i. It equals sum_d out_id dout_id - dlse_i, which the dq kernel takes, but for
            rounding: with this one a row of dS sums to what it should, and a query with one key gets the gradient 0.

16-bit types need the remainder alone, with a bias, and only of rows with a coarse lse; and delta under heavy dropout
and of few queries: fastattn/_attention_delta.py. Among more queries dropout makes out inexact too, even where a query
has one key, whose dP is delta: nothing should be left of dS, but dq and dk would get 4 times the error allowed. There
the dq kernel takes delta from a tile (delta_of_tile). Exact float32 gets both, always: what they correct would be the
largest errors of its backward. The price is a third walk over the keys. And it keeps dlse apart,
dS = P * (dP - delta) + P * dlse: of their difference, where the mean of dP is the larger one, the last bits of dlse are
gone, and of a query of one key dlse is all that is left of dS.
What is left: problems of many queries of which masks leave few, with keys in different tiles. The CUDA kernels walk
twice in blocks with few such queries; here that spilled 17 to 35 stores in every problem with dropout and a bias.
Grid: one program per (batch, head, BLOCK_M queries), along all keys; it stops at once unless one of its lse is coarse.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import current_arch
from ..common.philox import dropout_keep
from .config import config
from .tiles import LOG2E, exponential, keep_elements, key_interval, load_bias, load_rows, program_place

_COARSE = 64.0  # to 16-bit types: half a unit in the last place of an lse beyond it is 4e-6
# A probability beyond it is 1: it is that exact for scores up to some hundreds.
ALL_THE_WEIGHT = tl.constexpr(1 - 2**-13)
_OF_THE_GRADIENT = (
    *("v_ptr", "v_stride_b", "v_stride_h", "v_stride_n"),
    *("dout_ptr", "dout_stride_b", "dout_stride_h", "dout_stride_m", "delta_ptr"),
)  # fmt: skip


@triton.jit
def delta_of_tile(delta, p, dp, dlse, only_tile):
    """delta of the rows of which a tile of keys, p and dp [BLOCK_M, BLOCK_N], says it: of all, if it is the only tile
    that they meet, else of those that have a key with all the weight. p is 0 where a key is hidden."""
    if only_tile:
        weight = tl.sum(p, axis=1)
        delta = tl.sum(tl.where(p > 0, p * dp, 0.0), axis=1) / tl.where(weight > 0, weight, 1.0) - dlse
    else:
        its = tl.max(tl.where(p > ALL_THE_WEIGHT, dp, float("-inf")), axis=1)
        delta = tl.where(its > float("-inf"), its - dlse, delta)
    return delta


@triton.jit
def attention_rows_kernel(
    # lse, dlse (None, or what delta gets of it), remainder, delta (B, H, Lq) float32, contiguous; delta only HAS_DELTA.
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, dlse_ptr, remainder_ptr, delta_ptr,
    q_stride_b, q_stride_h, q_stride_m,
    k_stride_b, k_stride_h, k_stride_n,
    v_stride_b, v_stride_h, v_stride_n,
    dout_stride_b, dout_stride_h, dout_stride_m,
    num_heads, group, seqlen_q, seqlen_k, softmax_scale, coarse_from,
    band_lo, band_hi,
    k_start_ptr, k_end_ptr, interval_stride_b,
    seen_ptr, seen_stride_b, seen_stride_h,
    attn_mask_ptr, attn_mask_stride_b, attn_mask_stride_h, attn_mask_stride_m, attn_mask_stride_n,
    bias_ptr, bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n,
    rng_state_ptr, dropout_threshold, dropout_scale,
    HEAD_DIM_K: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    FOLD_SCALE: tl.constexpr, LISTS: tl.constexpr, HAS_ATTN_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_DELTA: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile, b, h = program_place(tl.cdiv(seqlen_q, BLOCK_M), num_heads)
    m0 = tile * BLOCK_M
    m = m0 + tl.arange(0, BLOCK_M)
    row = (b * num_heads + h) * seqlen_q + m
    lse = tl.load(lse_ptr + row, mask=m < seqlen_q, other=float("-inf"))
    coarse = (tl.abs(lse) >= coarse_from) & (lse != float("-inf"))
    total = tl.where(coarse, 0.0, 1.0)
    delta = tl.zeros([BLOCK_M], tl.float32)
    if tl.max(coarse.to(tl.int32), axis=0) > 0:
        q_ptr += b * q_stride_b + h * q_stride_h
        k_ptr += b * k_stride_b + h // group * k_stride_h
        q = load_rows(q_ptr, m0, q_stride_m, m < seqlen_q, BLOCK_M, HEAD_DIM_K, BLOCK_DK)
        if HAS_DELTA:
            v_ptr += b * v_stride_b + h // group * v_stride_h
            dout_ptr += b * dout_stride_b + h * dout_stride_h
            dout = load_rows(dout_ptr, m0, dout_stride_m, m < seqlen_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV)
        if LISTS:
            k_start_ptr += b * interval_stride_b
            k_end_ptr += b * interval_stride_b
        if LISTS or HAS_BIAS:
            seen_ptr += b * seen_stride_b + h * seen_stride_h
        if HAS_ATTN_MASK:
            attn_mask_ptr += b * attn_mask_stride_b + h * attn_mask_stride_h
        if HAS_BIAS:
            bias_ptr += b * bias_stride_b + h * bias_stride_h
        start, end = key_interval(m[:, None], seqlen_q, seqlen_k, band_lo, band_hi, k_start_ptr, k_end_ptr, LISTS)
        for n0 in range(0, seqlen_k, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            seen = n < seqlen_k
            if LISTS or HAS_BIAS:
                seen = tl.load(seen_ptr + n, mask=seen, other=0) != 0
            keep = seen[None, :] & coarse[:, None] & keep_elements(
                m[:, None], n[None, :], start, end, seqlen_q, seqlen_k,
                attn_mask_ptr, attn_mask_stride_m, attn_mask_stride_n, HAS_ATTN_MASK,
            )  # fmt: skip
            if tl.max(keep.to(tl.int32)) > 0:  # an empty tile costs no product
                k = load_rows(k_ptr, n0, k_stride_n, seen, BLOCK_N, HEAD_DIM_K, BLOCK_DK)
                scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * softmax_scale
                if HAS_BIAS:
                    bias = load_bias(m[:, None], n[None, :], seqlen_q, seqlen_k, bias_ptr, bias_stride_m, bias_stride_n)
                    scores += bias
                    keep = keep & (bias != float("-inf"))
                p = tl.where(keep, exponential(scores, lse[:, None], 0.0, LOG2E, FOLD_SCALE), 0.0)
                total += tl.sum(p, axis=1)
                if HAS_DELTA:
                    v = load_rows(v_ptr, n0, v_stride_n, seen, BLOCK_N, HEAD_DIM_V, BLOCK_DV)
                    dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
                    if HAS_DROPOUT:
                        kept = dropout_keep(rng_state_ptr, dropout_threshold, row, n0, BLOCK_N)
                        dp = tl.where(kept, dp * dropout_scale, 0.0)
                    delta += tl.sum(tl.where(keep, p * dp, 0.0), axis=1)
    tl.store(remainder_ptr + row, tl.log2(total), mask=m < seqlen_q)
    if HAS_DELTA:
        delta = delta / total
        if dlse_ptr is not None:
            delta -= tl.load(dlse_ptr + row, mask=m < seqlen_q, other=0.0)
        tl.store(delta_ptr + row, delta, mask=m < seqlen_q)


class RowStatistics(NamedTuple):
    """What row_statistics() found for the other kernels of the backward."""

    remainder: Tensor | None  # (B, H, Lq) float32, in powers of two; None where it would all be 0
    has_delta: bool  # whether delta is filled
    dlse_apart: Tensor | None = None  # dlse, where delta was filled without it


def row_statistics(
    inputs: dict[str, Any], shared: dict[str, Any], dlse: Tensor | None = None, exact_delta: bool = False
) -> RowStatistics:
    """inputs, shared: the arguments that the kernels of a launch have in common. Without delta_ptr among them, there is
    no gradient and the remainder is all."""
    q, lse = inputs["q_ptr"], inputs["lse_ptr"]
    is_exact_type = q.dtype == torch.float32 and shared["PRECISION"] == "ieee"
    exact = exact_delta or is_exact_type
    if not exact and not shared["HAS_BIAS"]:
        return RowStatistics(None, False)
    has_delta = exact and "delta_ptr" in inputs
    remainder = torch.empty_like(lse)
    c = config("weights", current_arch(), q.dtype, max(shared["HEAD_DIM_K"], shared["HEAD_DIM_V"]), q.shape[2])
    programs = q.shape[0] * q.shape[1] * triton.cdiv(q.shape[2], c.BLOCK_M)
    if programs > 0:
        attention_rows_kernel[(programs,)](
            remainder_ptr=remainder, dlse_ptr=None if is_exact_type else dlse,
            coarse_from=0.0 if exact else _COARSE, HAS_DELTA=has_delta,
            **{**dict.fromkeys(_OF_THE_GRADIENT), **inputs}, **{**shared, "FOLD_SCALE": False}, **c._asdict(),
        )  # fmt: skip
    return RowStatistics(remainder, has_delta, dlse if has_delta and is_exact_type else None)
