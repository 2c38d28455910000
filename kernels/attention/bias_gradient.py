"""Backward of attention: the gradient of the additive bias, dbias = dS summed over what the bias is broadcast over.

A kernel of its own, launched only where the bias needs its gradient: dS (see backward.py) is computed once more, so
that every element of dbias has one writer, which sums in a fixed order: no atomics, equal results run to run.
Grid: one program per element of (batch or 1, head or 1, query tile or 1, key tile). It loops over whatever is broadcast
- batches, heads, query tiles - and keeps the sum of dS in registers, [BLOCK_M, BLOCK_N] float32.
Work: 2 * (Dk + Dv) FLOPs per score; bytes: q, k, v and dout once per tile, the bias and dbias once.
A bias broadcast over both heads and queries leaves few programs, and long loops: right, not fast.
Compiled offline, triton 3.6, with dropout and attn_mask: sm_90a 181 registers at D 64 and 174 at D 128, no spills;
sm_80 255 at D 64, 27 stores spill.

A bias broadcast over the keys needs no kernel. It adds one number to a whole row of scores, which moves lse by as much
and changes no weight, dropped or not: sum_j dS_ij = dlse_i. A sum of dS would show how delta was rounded with a 16-bit
out: 1e-3 where the gradient is 0.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import current_arch
from ..common.philox import dropout_keep
from .config import config
from .tiles import LOG2E, exponential, keep_elements, key_interval, load_bias, load_rows


@triton.jit
def attention_dbias_kernel(
    # dbias (B or 1, H or 1, Lq or 1, Lk), contiguous, its number of heads and rows in `bias_*`; dlse: what delta lacks
    # of it, all or None.
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, remainder_ptr, dlse_ptr, delta_ptr, dbias_ptr,
    q_stride_b, q_stride_h, q_stride_m,
    k_stride_b, k_stride_h, k_stride_n,
    v_stride_b, v_stride_h, v_stride_n,
    dout_stride_b, dout_stride_h, dout_stride_m,
    bias_heads, bias_rows,
    # How many batches, heads and query tiles a program loops over: 1 where the bias is not broadcast.
    loop_b, loop_h, loop_m,
    num_heads, group, seqlen_q, seqlen_k, softmax_scale,
    band_lo, band_hi,
    k_start_ptr, k_end_ptr, interval_stride_b,
    seen_ptr, seen_stride_b, seen_stride_h,
    attn_mask_ptr, attn_mask_stride_b, attn_mask_stride_h, attn_mask_stride_m, attn_mask_stride_n,
    bias_ptr, bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n,
    rng_state_ptr, dropout_threshold, dropout_scale,
    HEAD_DIM_K: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    FOLD_SCALE: tl.constexpr, LISTS: tl.constexpr, HAS_ATTN_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
    SUM_ROWS: tl.constexpr, HAS_REMAINDER: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(seqlen_k, BLOCK_N)
    tiles_m = tl.cdiv(bias_rows, BLOCK_M)
    n0 = tl.program_id(0) % tiles_n * BLOCK_N
    n = n0 + tl.arange(0, BLOCK_N)
    tile_m = tl.program_id(0) // tiles_n % tiles_m
    head = tl.program_id(0) // (tiles_n * tiles_m)
    bias_b, bias_h = (head // bias_heads).to(tl.int64), (head % bias_heads).to(tl.int64)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)

    for i in range(loop_b * loop_h * loop_m):
        # One loop over all that is broadcast, query tiles first; a loop of one turn adds 0.
        m0 = (tile_m + i % loop_m) * BLOCK_M
        h = bias_h + i // loop_m % loop_h
        b = bias_b + i // (loop_m * loop_h)
        m = m0 + tl.arange(0, BLOCK_M)
        row = (b * num_heads + h) * seqlen_q + m
        start, end = key_interval(
            m[:, None], seqlen_q, seqlen_k, band_lo, band_hi,
            k_start_ptr + b * interval_stride_b if LISTS else None,
            k_end_ptr + b * interval_stride_b if LISTS else None, LISTS,
        )  # fmt: skip
        seen = tl.load(seen_ptr + b * seen_stride_b + h * seen_stride_h + n, mask=n < seqlen_k, other=0) != 0
        keep = seen[None, :] & keep_elements(
            m[:, None], n[None, :], start, end, seqlen_q, seqlen_k,
            attn_mask_ptr + b * attn_mask_stride_b + h * attn_mask_stride_h if HAS_ATTN_MASK else None,
            attn_mask_stride_m, attn_mask_stride_n, HAS_ATTN_MASK,
        )  # fmt: skip
        bias = load_bias(
            m[:, None], n[None, :], seqlen_q, seqlen_k,
            bias_ptr + b * bias_stride_b + h * bias_stride_h, bias_stride_m, bias_stride_n,
        )  # fmt: skip
        keep = keep & (bias != float("-inf"))
        if tl.max(keep.to(tl.int32)) > 0:  # an empty tile costs no product
            lse = tl.load(lse_ptr + row, mask=m < seqlen_q, other=0.0)
            delta = tl.load(delta_ptr + row, mask=m < seqlen_q, other=0.0)
            q = load_rows(
                q_ptr + b * q_stride_b + h * q_stride_h, m0, q_stride_m, m < seqlen_q, BLOCK_M, HEAD_DIM_K, BLOCK_DK
            )
            k = load_rows(
                k_ptr + b * k_stride_b + h // group * k_stride_h, n0, k_stride_n, seen, BLOCK_N, HEAD_DIM_K, BLOCK_DK
            )
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * softmax_scale + bias
            remainder = tl.load(remainder_ptr + row, mask=m < seqlen_q, other=0.0)
            p = exponential(scores, lse[:, None], remainder[:, None], LOG2E, FOLD_SCALE)
            dout = load_rows(
                dout_ptr + b * dout_stride_b + h * dout_stride_h, m0, dout_stride_m, m < seqlen_q,
                BLOCK_M, HEAD_DIM_V, BLOCK_DV,
            )  # fmt: skip
            v = load_rows(
                v_ptr + b * v_stride_b + h // group * v_stride_h, n0, v_stride_n, seen, BLOCK_N, HEAD_DIM_V, BLOCK_DV
            )
            dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
            if HAS_DROPOUT:
                kept = dropout_keep(rng_state_ptr, dropout_threshold, row, n0, BLOCK_N)
                dp = tl.where(kept, dp * dropout_scale, 0.0)
            ds = p * (dp - delta[:, None])
            if dlse_ptr is not None:
                ds += p * tl.load(dlse_ptr + row, mask=m < seqlen_q, other=0.0)[:, None]
            total += tl.where(keep, ds, 0.0)

    dbias_ptr += (bias_b * bias_heads + bias_h) * bias_rows * seqlen_k
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    if SUM_ROWS:  # one row is left, number 0
        total, m = tl.sum(total, axis=0, keep_dims=True), tl.arange(0, 1)
    ptrs = dbias_ptr + m.to(tl.int64)[:, None] * seqlen_k + n[None, :]
    inside = (m < bias_rows)[:, None] & (n < seqlen_k)[None, :]
    tl.store(ptrs, total.to(dbias_ptr.dtype.element_ty), mask=inside)


def bias_gradient(
    bias: Tensor, dlse: Tensor | None, dlse_apart: Tensor | None, inputs: dict[str, Any], shared: dict[str, Any]
) -> Tensor:
    """dbias, shaped and typed as bias. dlse (B, H, Lq) float32 or None; dlse_apart: as in RowStatistics. inputs,
    shared: arguments that all kernels of the backward take; delta is there by now."""
    q, k, v = inputs["q_ptr"], inputs["k_ptr"], inputs["v_ptr"]
    if bias.shape[3] == 1:
        if dlse is None:
            return torch.zeros(bias.shape, dtype=bias.dtype, device=bias.device)
        dlse = dlse.masked_fill(inputs["lse_ptr"] == -torch.inf, 0.0)  # a query that sees nothing has no gradient
        return dlse.sum_to_size(bias.shape[:3]).unsqueeze(3).to(bias.dtype)
    dbias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    c = config("dbias", current_arch(), q.dtype, max(q.shape[3], v.shape[3]), q.shape[2])
    # (batches, heads, query tiles): all that is to be summed, and what each program owns of it.
    whole = (*q.shape[:2], triton.cdiv(q.shape[2], c.BLOCK_M))
    owned = [1 if size == 1 else n for size, n in zip(bias.shape[:3], whole, strict=True)]
    loops = [n if size == 1 else 1 for size, n in zip(bias.shape[:3], whole, strict=True)]
    programs = math.prod(owned) * triton.cdiv(k.shape[2], c.BLOCK_N)
    if programs > 0:
        attention_dbias_kernel[(programs,)](
            dbias_ptr=dbias, dlse_ptr=dlse_apart, bias_heads=bias.shape[1], bias_rows=bias.shape[2],
            **dict(zip(("loop_b", "loop_h", "loop_m"), loops, strict=True)),
            SUM_ROWS=bias.shape[2] == 1, **inputs, **shared, **c._asdict(),
        )  # fmt: skip
    return dbias
