"""Backward of attention: the gradient of the additive bias, dbias = dS summed over what the bias is broadcast over.

This separate kernel is launched only if the bias needs its gradient. It computes dS (see backward.py) again, so every
element of dbias has one writer, which sums in a fixed order: no atomics, equal results run to run.
Grid: one program per element of (batch or part, head or 1, query tile or 1, key tile). It loops over what is broadcast
- batches, heads, query tiles - and keeps the sum of dS in registers, [BLOCK_M, BLOCK_N] float32.
Parts: a bias that is broadcast over the batch leaves few programs with long loops. On an H200, 8 programs with 128
turns took 376 us (T5's position bias (1, 8, 32, 32), batch 128), 256 programs with 4 turns 31 us. So where there are
too few programs for the GPU, the batch is split into parts: each writes its sum in float32, and one torch sum adds
them, in a fixed order too.
Work: 2 * (Dk + Dv) FLOPs per score; bytes: q, k, v and dout once per tile, the bias and dbias once per part.
The loop's body, add_score_gradient, is also that of relative_bias_gradient.py.
Compiled offline, triton 3.6, with dropout and a bool matrix: sm_90a 190 registers at D 128, no spills; sm_80 255 at
D 64, 22 accesses spill.

A bias that is broadcast over the keys needs no kernel. It adds one number to a whole row of scores. That adds the same
number to lse and changes no weight, dropped or not: sum_j dS_ij = dlse_i. A sum of dS would contain the rounding of
delta with a 16-bit out: 1e-3 where the gradient is 0.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.backends.calls import AttentionCall
from fastattn.backends.constants import bias_parts

from ..common.launch import Launches, addresses, gpu_arch, multiprocessors, specialization
from ..common.philox import dropout_keep_in_product
from ..common.softcap import cap
from . import arguments
from . import masked_tiles as tiles
from .arguments import Dropout, Mask, Matrix, StridedTensor
from .tile_sizes import config


@triton.jit
def add_score_gradient(
    total, q, k, v, dout, lse_ptr, delta_ptr, bias, mask, dropout, b, h, m0, n0, n,
    num_heads, group, seqlen_q, seqlen_k, band_lo, band_hi, softmax_scale, softcap,
    HEAD_DIM_K: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    FOLD_SCALE: tl.constexpr, RELATIVE_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """total [BLOCK_M, BLOCK_N] plus dS of the tile of queries m0, m0 + 1, .. and keys n, of which the first is n0.

    n is given because in attention_dbias_kernel it is the same in all turns. Made here, 34 accesses spill, not 22.
    """
    m_last = tl.minimum(m0 + BLOCK_M, seqlen_q) - 1
    m = m0 + tl.arange(0, BLOCK_M)
    row = (b * num_heads + h) * seqlen_q + m
    begin, end = tiles.row_intervals(mask, b, m, seqlen_q, seqlen_k, band_lo, band_hi)
    n_begin, n_end = tiles.tile_columns(mask, begin, end, m0, m_last, seqlen_k, band_lo, band_hi)
    inside = tiles.readable_columns(mask, b, n0, n_begin, n_end, seqlen_k, BLOCK_N)
    keep = tiles.visible_elements(mask, b, h, num_heads, begin, end, inside, m, n0, seqlen_q, seqlen_k, BLOCK_N)
    if tl.max(keep.to(tl.int32)) > 0:  # an empty tile costs no product
        lse = tl.load(lse_ptr + row, mask=m < seqlen_q, other=float("-inf"))
        delta = tl.load(delta_ptr + row, mask=m < seqlen_q, other=0.0)
        q_tile = tiles.load_rows(q, b, h, m0, m < seqlen_q, BLOCK_M, HEAD_DIM_K, BLOCK_DK)
        k_tile = tiles.load_rows(k, b, h // group, n0, inside, BLOCK_N, HEAD_DIM_K, BLOCK_DK)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * softmax_scale
        if softcap is not None:
            scores, _ = cap(scores, softcap)
        scores += tiles.load_bias(bias, b, h, m[:, None], n[None, :], seqlen_q, seqlen_k, RELATIVE_BIAS)
        p = tiles.exponential(scores, tiles.exponent_shift(lse, FOLD_SCALE)[:, None], tiles.LOG2E, FOLD_SCALE)
        dout_tile = tiles.load_rows(dout, b, h, m0, m < seqlen_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV)
        v_tile = tiles.load_rows(v, b, h // group, n0, inside, BLOCK_N, HEAD_DIM_V, BLOCK_DV)
        dp = tl.dot(dout_tile, tl.trans(v_tile), input_precision=PRECISION)
        if dropout is not None:
            kept = dropout_keep_in_product(dropout.rng_state, dropout.threshold, row, n0, BLOCK_N)
            dp = tl.where(kept, dp * dropout.scale, 0.0)
        total += tl.where(keep, p * (dp - delta[:, None]), 0.0)
    return total


@triton.jit(do_not_specialize=arguments.DO_NOT_SPECIALIZE)
def attention_dbias_kernel(
    # StridedTensors q, k, v, dout; dbias a Matrix of bias_heads and bias_rows (1 or all);
    # lse, delta (B, H, Lq) float32.
    q, k, v, dout, dbias, lse_ptr, delta_ptr, bias, mask, dropout,
    bias_heads, bias_rows,
    # How many batches, heads and query tiles a program loops over: 1 where the bias is not broadcast.
    loop_b, loop_h, loop_m,
    # B where dbias has a partial sum for each part of the batch, of loop_b batches or, the last, fewer. Else None.
    batches,
    num_heads, group, seqlen_q, seqlen_k, band_lo, band_hi, softmax_scale, softcap,
    HEAD_DIM_K: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    FOLD_SCALE: tl.constexpr, RELATIVE_BIAS: tl.constexpr, SUM_ROWS: tl.constexpr, PRECISION: tl.constexpr,
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
    first_b, num_b = bias_b, loop_b
    if batches is not None:
        first_b = bias_b * loop_b
        num_b = tl.minimum(loop_b, batches - first_b).to(tl.int32)

    for i in range(num_b * loop_h * loop_m):
        # One loop over all that is broadcast, query tiles first. Where nothing is broadcast it has one turn and adds 0.
        m0 = (tile_m + i % loop_m) * BLOCK_M
        h = bias_h + i // loop_m % loop_h
        b = first_b + i // (loop_m * loop_h)
        total = add_score_gradient(
            total, q, k, v, dout, lse_ptr, delta_ptr, bias, mask, dropout, b, h, m0, n0, n, num_heads, group,
            seqlen_q, seqlen_k, band_lo, band_hi, softmax_scale, softcap, HEAD_DIM_K, HEAD_DIM_V, BLOCK_DK, BLOCK_DV,
            FOLD_SCALE, RELATIVE_BIAS, PRECISION, BLOCK_M, BLOCK_N,
        )  # fmt: skip

    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    if SUM_ROWS:  # one row is left, number 0
        total, m = tl.sum(total, axis=0, keep_dims=True), tl.arange(0, 1)
    ptrs = dbias.ptr + bias_b * dbias.stride_b + bias_h * dbias.stride_h
    ptrs += m.to(tl.int64)[:, None] * dbias.stride_m + n[None, :]
    inside = (m < bias_rows)[:, None] & (n < dbias.columns)[None, :]
    tl.store(ptrs, total.to(dbias.ptr.dtype.element_ty), mask=inside)


_LAUNCHES = Launches(attention_dbias_kernel, *[StridedTensor] * 4, Matrix, *[Tensor] * 2, Matrix, Mask, Dropout)


def bias_gradient(dout: Tensor, dlse: Tensor | None, call: AttentionCall, lse: Tensor, delta: Tensor) -> Tensor:
    """dbias, shaped and typed as bias. The arguments are those of attention_bwd; lse, dlse (or None) and the computed
    delta are contiguous. The first mask's rows are queries."""
    q, k, v, bias = call[:4]
    if bias.shape[3] == 1:
        of_rows = delta * 0  # 0, or NaN of what is not finite: delta has all of a row's dP and P, dS would have too
        if dlse is not None:
            of_rows += dlse.masked_fill(lse == -torch.inf, 0.0)  # a query without keys has no gradient
        return of_rows.sum_to_size(bias.shape[:3]).unsqueeze(3).to(bias.dtype)
    tile = config("dbias", gpu_arch(q), q.dtype, max(q.shape[3], v.shape[3]), q.shape[2])
    # (batches, heads, query tiles): the whole sum, what dbias has of it, and what a program loops over.
    whole = (*q.shape[:2], triton.cdiv(q.shape[2], tile.BLOCK_M))
    owned = [1 if size == 1 else n for size, n in zip(bias.shape[:3], whole, strict=True)]
    loops = [n if size == 1 else 1 for size, n in zip(bias.shape[:3], whole, strict=True)]
    programs = math.prod(owned) * triton.cdiv(v.shape[2], tile.BLOCK_N)
    parts = bias.shape[0]
    if parts == 1 and (most := bias_parts(loops[0], math.prod(loops), programs, multiprocessors(q))) > 1:
        loops[0] = triton.cdiv(loops[0], most)
        parts = triton.cdiv(q.shape[0], loops[0])
        programs *= parts
    batches = None if parts == bias.shape[0] else q.shape[0]
    dtype = bias.dtype if batches is None else torch.float32
    dbias = torch.empty(parts, *bias.shape[1:], dtype=dtype, device=bias.device)
    if programs == 0:
        return dbias
    strided, strides = arguments.strided(q, k, v, dout)
    result, result_key = arguments.matrix(dbias, v.shape[2])
    found, alignment = addresses(lse, delta)
    own = *bias.shape[1:3], *loops
    key = strides, alignment, result_key, specialization(*own), batches and specialization(batches)
    given, tensors = (*strided, result, *found), (q, k, v, dout, dbias, lse, delta)
    made, mask, own, sum_rows = arguments.problem(call), call.masks[0], (*own, batches), bias.shape[2] == 1
    arguments.run(_LAUNCHES, call, made, mask, tile, programs, key, given, tensors, None, own, SUM_ROWS=sum_rows)
    return dbias if batches is None else dbias.sum(0, keepdim=True).to(bias.dtype)
