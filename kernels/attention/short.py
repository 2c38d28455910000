"""Attention of short sequences, where one tile holds all keys. Formulas: forward.py and backward.py

The forward needs no running maximum and no rescaling, because a program has all scores of its rows. The backward makes
dq, dk and dv in one launch: delta is the row sum of P * dP, so out is not read, S and dP are computed once, and there
are 5 products where backward.py needs 7. tile_sizes.py has the largest number of keys and queries, by dtype and head
dimension. A mask has no lists of tiles here, and one layout for the whole backward.

Grid: forward, one program per (batch, head, BLOCK_M queries). Backward, one program per (batch, key head), over the
heads of its group and their query tiles.
Registers: backward, dk and dv [BLOCK_N, BLOCK_D*], and a tile each of S, dP and dq, float32. P and dS go through shared
memory to be transposed.
Bytes: forward q, k, v, out; backward q, k, v, dout, dq, dk, dv; each once, k and v once for each query tile.

Compiled offline, triton 3.6, sm_90a, bfloat16 at D 64, key padding and dropout: registers, programs an SM. Nothing
spills but with a bias and a bool matrix at 64 tokens, 12 accesses. H200, 8192 tokens, 8 heads: ms of both directions,
CUDA's in brackets. At 128 tokens the backward is that of backward.py: dq 76 us and dk and dv 83 us of 16384 tokens.
    tokens   forward    backward   padding           padding, dropout
    32        79, 12    244, 4     0.0388 (0.0455)   0.0435 (0.0501)
    64        96,  5    255, 2     0.0416 (0.0615)   0.0495 (0.0697)
    128      158,  3               0.0885 (0.0932)   0.110  (0.107)
Tried and dropped:
    one warp for 32 x 32: the forward spills 6 and issues 25 % less, the backward spills 255;
    four warps for 32 x 32: over 25 % more instructions, 3 programs an SM;
    the backward at 128 keys: 64 queries a turn spill 180; 32 a turn are one program of 8 warps an SM, about as many
    instructions as two launches that skip tiles of padding;
    two stages: nothing to overlap in one tile, 140 and 240 instructions more.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fastattn.backends.calls import AttentionCall

from ..common.launch import Launches, addresses
from ..common.philox import dropout_keep_in_product
from ..common.softcap import cap
from . import arguments
from . import masked_tiles as tiles
from .arguments import Dropout, Mask, Matrix, StridedTensor


@triton.jit(do_not_specialize=arguments.DO_NOT_SPECIALIZE)
def attention_short_fwd_kernel(
    # StridedTensors q, k, v, out; lse (B, H, Lq) float32, contiguous; bias Matrix or None, mask, dropout or None.
    q, k, v, out, lse_ptr, bias, mask, dropout,
    num_heads, group, seqlen_q, seqlen_k, band_lo, band_hi, softmax_scale, softcap,
    HEAD_DIM_K: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    FOLD_SCALE: tl.constexpr, RELATIVE_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile, b, h = tiles.program_coords(tl.cdiv(seqlen_q, BLOCK_M), num_heads)
    m0 = tile * BLOCK_M
    m_last = tl.minimum(m0 + BLOCK_M, seqlen_q) - 1
    m, n = m0 + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    n0 = tl.full([], 0, tl.int32)  # in the interpreter a plain 0 is no number of Triton's
    row = (b * num_heads + h) * seqlen_q + m
    begin, end = tiles.row_intervals(mask, b, m, seqlen_q, seqlen_k, band_lo, band_hi)
    n_begin, n_end = tiles.tile_columns(mask, begin, end, m0, m_last, seqlen_k, band_lo, band_hi)
    inside = tiles.readable_columns(mask, b, n0, n_begin, n_end, seqlen_k, BLOCK_N)
    q_tile = tiles.load_rows(q, b, h, m0, m < seqlen_q, BLOCK_M, HEAD_DIM_K, BLOCK_DK)
    k_tile = tiles.load_rows(k, b, h // group, 0, inside, BLOCK_N, HEAD_DIM_K, BLOCK_DK)
    v_tile = tiles.load_rows(v, b, h // group, 0, inside, BLOCK_N, HEAD_DIM_V, BLOCK_DV)
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
    if not FOLD_SCALE:
        scores *= softmax_scale
    if softcap is not None:
        scores, slope = cap(scores, softcap)
    if bias is not None:
        scores += tiles.load_bias(bias, b, h, m[:, None], n[None, :], seqlen_q, seqlen_k, RELATIVE_BIAS)
    keep = tiles.visible_elements(mask, b, h, num_heads, begin, end, inside, m, n0, seqlen_q, seqlen_k, BLOCK_N)
    scores = tl.where(keep, scores, float("-inf"))
    unit = softmax_scale * tiles.LOG2E if FOLD_SCALE else tiles.LOG2E
    row_max = tl.max(scores, axis=1)
    # Not -inf - -inf, in a row that sees no key. The maximum does not show which one that is: it drops NaN.
    shift = tl.where(row_max == float("-inf"), 0.0, row_max)
    p = tiles.exponential(scores, (shift * unit if FOLD_SCALE else shift)[:, None], unit, FOLD_SCALE)
    row_sum = tl.sum(p, axis=1)
    empty = row_sum == 0.0
    row_sum = tl.where(empty, 1.0, row_sum)
    factor = 1.0 / row_sum
    if dropout is not None:
        p = tl.where(dropout_keep_in_product(dropout.rng_state, dropout.threshold, row, 0, BLOCK_N), p, 0.0)
        factor = dropout.scale / row_sum
    factor = tl.where(empty, 0.0, factor)
    lse = tl.where(empty, float("-inf"), row_max * (unit * tiles.LN2) + tl.log(row_sum))
    tl.store(lse_ptr + row, lse, mask=m < seqlen_q)
    out_tile = tl.dot(p.to(v_tile.dtype), v_tile, input_precision=PRECISION) * factor[:, None]
    out_tile = tl.where(factor[:, None] == 0.0, 0.0, out_tile)
    tiles.store_rows(out, b, h, m0, m < seqlen_q, out_tile, BLOCK_M, HEAD_DIM_V, BLOCK_DV)


@triton.jit(do_not_specialize=arguments.DO_NOT_SPECIALIZE)
def attention_short_bwd_kernel(
    # StridedTensors q, k, v, dout, dq, dk, dv; lse, dlse (or None), delta (or None) (B, H, Lq) float32, contiguous.
    q, k, v, dout, dq, dk, dv, lse_ptr, dlse_ptr, delta_ptr, bias, mask, dropout,
    num_heads, group, seqlen_q, seqlen_k, band_lo, band_hi, softmax_scale, softcap,
    HEAD_DIM_K: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    FOLD_SCALE: tl.constexpr, RELATIVE_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    _, b, h_k = tiles.program_coords(1, num_heads // group)
    n, n0 = tl.arange(0, BLOCK_N), tl.full([], 0, tl.int32)
    n_begin = tl.maximum(band_lo, 0)  # of all queries
    n_end = tl.minimum(seqlen_q + band_hi, seqlen_k)
    inside = tiles.readable_columns(mask, b, n0, n_begin, n_end, seqlen_k, BLOCK_N)
    k_tile = tiles.load_rows(k, b, h_k, 0, inside, BLOCK_N, HEAD_DIM_K, BLOCK_DK)
    v_tile = tiles.load_rows(v, b, h_k, 0, inside, BLOCK_N, HEAD_DIM_V, BLOCK_DV)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_DK], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    unit = softmax_scale * tiles.LOG2E if FOLD_SCALE else tiles.LOG2E

    num_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    for i in range(group * num_tiles):
        h = h_k * group + i // num_tiles
        m0 = i % num_tiles * BLOCK_M
        m = m0 + tl.arange(0, BLOCK_M)
        row = (b * num_heads + h) * seqlen_q + m
        begin, end = tiles.row_intervals(mask, b, m, seqlen_q, seqlen_k, band_lo, band_hi)
        lse = tl.load(lse_ptr + row, mask=m < seqlen_q, other=float("-inf"))
        seen = lse != float("-inf")  # the other queries have gradient 0, even if q, dout or dlse is NaN there
        q_tile = tiles.load_rows(q, b, h, m0, seen, BLOCK_M, HEAD_DIM_K, BLOCK_DK)
        dout_tile = tiles.load_rows(dout, b, h, m0, seen, BLOCK_M, HEAD_DIM_V, BLOCK_DV)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if not FOLD_SCALE:
            scores *= softmax_scale
        if softcap is not None:
            scores, slope = cap(scores, softcap)
        if bias is not None:
            scores += tiles.load_bias(bias, b, h, m[:, None], n[None, :], seqlen_q, seqlen_k, RELATIVE_BIAS)
        keep = tiles.visible_elements(mask, b, h, num_heads, begin, end, inside, m, n0, seqlen_q, seqlen_k, BLOCK_N)
        p = tiles.exponential(scores, tiles.exponent_shift(lse, FOLD_SCALE)[:, None], unit, FOLD_SCALE)
        p = tl.where(keep, p, 0.0)
        dp = tl.dot(dout_tile, tl.trans(v_tile), input_precision=PRECISION)
        z = p
        if dropout is not None:
            kept = dropout_keep_in_product(dropout.rng_state, dropout.threshold, row, 0, BLOCK_N)
            z = tl.where(kept, p * dropout.scale, 0.0)
            dp = tl.where(kept, dp * dropout.scale, 0.0)
        delta = tl.sum(p * dp, axis=1)
        if dlse_ptr is not None:
            delta -= tl.load(dlse_ptr + row, mask=seen, other=0.0)
        if delta_ptr is not None:
            tl.store(delta_ptr + row, delta, mask=m < seqlen_q)
        ds = p * (dp - delta[:, None])
        if softcap is not None:
            ds *= slope
        ds = ds.to(q_tile.dtype)
        dv_acc = tl.dot(tl.trans(z.to(dout_tile.dtype)), dout_tile, dv_acc, input_precision=PRECISION)
        dk_acc = tl.dot(tl.trans(ds), q_tile, dk_acc, input_precision=PRECISION)
        dq_tile = tl.dot(ds, k_tile, input_precision=PRECISION) * softmax_scale
        tiles.store_rows(dq, b, h, m0, m < seqlen_q, dq_tile, BLOCK_M, HEAD_DIM_K, BLOCK_DK)

    tiles.store_rows(dk, b, h_k, 0, n < seqlen_k, dk_acc * softmax_scale, BLOCK_N, HEAD_DIM_K, BLOCK_DK)
    tiles.store_rows(dv, b, h_k, 0, n < seqlen_k, dv_acc, BLOCK_N, HEAD_DIM_V, BLOCK_DV)


SHORT_FORWARD = Launches(attention_short_fwd_kernel, *[StridedTensor] * 4, Tensor, Matrix, Mask, Dropout)
_BACKWARD = Launches(attention_short_bwd_kernel, *[StridedTensor] * 7, *[Tensor] * 3, Matrix, Mask, Dropout)


def short_backward(
    dout: Tensor, dlse: Tensor | None, call: AttentionCall, lse: Tensor, delta: Tensor | None, grads: Any, bound: Any
) -> None:
    """Writes grads, and delta if given. The arguments are those of attention_bwd; dout's last dimension, lse, dlse (or
    None) and delta are contiguous. bound: gets the launch as "short"."""
    q, k, v, mask = *call[:3], call.masks[0]
    B, Hk, Lk, _ = v.shape
    if B * Hk * Lk == 0:
        return
    strided, strides = arguments.strided(q, k, v, dout, *grads)
    found, alignment = addresses(lse, dlse, delta)
    can_bind = bound is not None and dlse is None and strides is True and alignment is True
    bind = (bound, "short", strided) if can_bind else None
    key, tensors = (strides, alignment, dlse is None, delta is None), (q, k, v, dout, *grads, lse, dlse, delta)
    made, tile, given = arguments.problem(call), mask.layout.launch, (*strided, *found)
    arguments.run(_BACKWARD, call, made, mask, tile, B * Hk, key, given, tensors, bind)
