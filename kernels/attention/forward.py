"""Forward of attention, one pass over the keys. Specification: fastattn/backends/reference/attention.py

    S = cap(softmax_scale * q k^T) + bias;  S_ij = -inf where query i may not attend to key j
    cap(x) = softcap * tanh(x / softcap), or x without a softcap; a relative bias has bias_ij = bias[j - i + Lq - 1]
    lse_i = log sum_j exp(S_ij);  out_i = sum_j keep_ij / (1 - dropout_p) * exp(S_ij - lse_i) v_j

Source: Dao 2023, FlashAttention-2, arXiv:2307.08691, Algorithm 1.
Grid: one program per (batch, head, BLOCK_M queries), in one dimension. The last queries of a head come first: under a
causal mask they have the longest loop.
Registers: the accumulator [BLOCK_M, BLOCK_DV] and the running maximum and sum of BLOCK_M rows, in float32.
Shared memory: tiles of keys and values, num_stages deep, and on sm_90 the queries, which are read once. Nothing as
large as the scores is ever in memory.
Work: 2 * (Dk + Dv) FLOPs per visited score; bytes: q and out once, k and v once per query tile, mostly from L2. Only
visited tiles cost time: a tile that is outside the band, or masked as a whole, is not loaded.
Compiled offline with triton 3.6, bf16, sm_90a: causal D 64 takes 127 registers and 64 KiB of shared memory, two
programs an SM; D 128 237 and 128 KiB; D 128 with a bool matrix 234 and 98 KiB. A float32 bias, which the compiler
copies to shared memory: relative 224 and 128 KiB at D 64, 251 and 192 KiB at D 128; dense 178 and 128 KiB at D 64. A
relative one of 16 bits is read into registers: 172 and 80 KiB. A softcap: 126 at D 64, 181 at D 128. Nothing spills.
Estimated for sm_90a, clocks of a tile of 128 x 64: its products 512 at D 64, 1024 at D 128; a float32 relative bias
512, 256 loads of a warp that are not aligned and 256 from shared memory; exponentials 512, with a softcap 1536, as
tanh has an exponential and a reciprocal. So a softcap is limited by special functions. Neither is timed.
H200, bf16, ms, CUDA's in brackets: 2 x 16 heads, 8192 tokens, D 128 2.28 (1.79), 482 TFLOP/s, causal 1.21 (0.874); 2 x
32 heads, D 64 2.43 (2.15), 453 TFLOP/s; 16 x 32 heads, 1024 tokens, D 64, padding 0.534 (0.296).
Tried and dropped, same compiler:
    tiles of 128 x 128, or 4 warps for 128 x 64: at D 128 they spill, 5 to 120 stores without a mask, more with one;
    a word of mask bits loaded for each element, not for each row: dq of D 128 spills 28 stores for 8, and the words of
    a tile take 32 KiB of shared memory for 2.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.backends.calls import AttentionCall

from ..common.launch import Launches
from ..common.philox import dropout_keep_in_product
from ..common.softcap import cap
from . import arguments
from . import masked_tiles as tiles
from .arguments import Dropout, Mask, Matrix, StridedTensor
from .short import SHORT_FORWARD


@triton.jit(do_not_specialize=arguments.DO_NOT_SPECIALIZE)
def attention_forward_kernel(
    # StridedTensors q, k, v, out; lse (B, H, Lq) float32, contiguous; bias Matrix or None, mask, dropout or None.
    q, k, v, out, lse_ptr, bias, mask, dropout,
    num_heads, group, seqlen_q, seqlen_k, band_lo, band_hi, softmax_scale, softcap,
    HEAD_DIM_K: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    FOLD_SCALE: tl.constexpr, RELATIVE_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    num_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    tile, b, h = tiles.program_coords(num_tiles, num_heads)
    tile = num_tiles - 1 - tile
    m0 = tile * BLOCK_M
    m_last = tl.minimum(m0 + BLOCK_M, seqlen_q) - 1
    m = m0 + tl.arange(0, BLOCK_M)
    row = (b * num_heads + h) * seqlen_q + m  # int64: of lse, and of the dropout rule

    begin, end = tiles.row_intervals(mask, b, m, seqlen_q, seqlen_k, band_lo, band_hi)
    n_begin, n_end = tiles.tile_columns(mask, begin, end, m0, m_last, seqlen_k, band_lo, band_hi)
    first, num_left, num_partial, num_visited = tiles.plan_tiles(
        mask, b, h, num_heads, tile, n_begin, n_end, m_last, seqlen_q, seqlen_k, band_lo, band_hi, BLOCK_M, BLOCK_N
    )

    unit = softmax_scale * tiles.LOG2E if FOLD_SCALE else tiles.LOG2E
    q_tile = tiles.load_rows(q, b, h, m0, m < seqlen_q, BLOCK_M, HEAD_DIM_K, BLOCK_DK)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    for FULL in tl.static_range(2):  # unrolled: the loop over full tiles is compiled without tests
        for i in range(num_partial if FULL else 0, num_visited if FULL else num_partial):
            n0 = BLOCK_N * tiles.tile_at(mask, i, first, num_left, num_partial, num_visited, FULL)
            inside = None if FULL else tiles.readable_columns(mask, b, n0, n_begin, n_end, seqlen_k, BLOCK_N)
            k_tile = tiles.load_rows(k, b, h // group, n0, inside, BLOCK_N, HEAD_DIM_K, BLOCK_DK)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            if not FOLD_SCALE:
                scores *= softmax_scale
            if softcap is not None:
                scores, slope = cap(scores, softcap)
            if not FULL:
                keep = tiles.visible_elements(
                    mask, b, h, num_heads, begin, end, inside, m, n0, seqlen_q, seqlen_k, BLOCK_N
                )
            if bias is not None:
                scores += tiles.load_bias(
                    bias, b, h, m[:, None], (n0 + tl.arange(0, BLOCK_N))[None, :], seqlen_q, seqlen_k, RELATIVE_BIAS
                )
            if not FULL:
                scores = tl.where(keep, scores, float("-inf"))

            new_max = tl.maximum(row_max, tl.max(scores, axis=1))
            # A row without a visible key so far has the maximum -inf. 0 instead avoids -inf - -inf.
            shift = new_max
            if bias is not None or not FULL:
                shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            rescale = tl.exp2((row_max - shift) * unit)
            p = tiles.exponential(scores, (shift * unit if FOLD_SCALE else shift)[:, None], unit, FOLD_SCALE)
            row_sum = row_sum * rescale + tl.sum(p, axis=1)
            if dropout is not None:  # row_sum is without dropout; the factor of kept values is applied at the end
                p = tl.where(dropout_keep_in_product(dropout.rng_state, dropout.threshold, row, n0, BLOCK_N), p, 0.0)
            v_tile = tiles.load_rows(v, b, h // group, n0, inside, BLOCK_N, HEAD_DIM_V, BLOCK_DV)
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision=PRECISION)
            row_max = new_max

    empty = row_sum == 0.0
    row_sum = tl.where(empty, 1.0, row_sum)
    factor = 1.0 / row_sum
    if dropout is not None:
        factor = dropout.scale / row_sum
    lse = tl.where(empty, float("-inf"), row_max * (unit * tiles.LN2) + tl.log(row_sum))
    tl.store(lse_ptr + row, lse, mask=m < seqlen_q)
    out_tile = tl.where(empty[:, None], 0.0, acc * factor[:, None])
    tiles.store_rows(out, b, h, m0, m < seqlen_q, out_tile, BLOCK_M, HEAD_DIM_V, BLOCK_DV)


_LAUNCHES = Launches(attention_forward_kernel, *[StridedTensor] * 4, Tensor, Matrix, Mask, Dropout)


def attention_fwd(call: AttentionCall, bound: dict[str, Any] | None = None) -> tuple[Tensor, Tensor]:
    """out (B, H, Lq, Dv) in q's dtype and memory order, lse (B, H, Lq) float32. The mask's layout has the tile.

    bound: gets the launch as "forward", if nothing but its addresses distinguishes it: see rows.py."""
    q, k, v, mask = *call[:3], call.masks[0]
    (B, H, Lq, _), (_, _, Lk, Dv), tile = q.shape, v.shape, mask.layout.launch
    out = arguments.empty_like(q, Dv)
    lse = torch.empty(B, H, Lq, dtype=torch.float32, device=q.device)
    if lse.numel() > 0:
        strided, strides = arguments.strided(q, k, v, out)
        launches, programs = SHORT_FORWARD if 0 < Lk <= tile[1] else _LAUNCHES, B * H * -(-Lq // tile[0])
        bind = (bound, "forward", strided) if bound is not None and strides is True else None
        given, tensors = (*strided, lse.data_ptr()), (q, k, v, out, lse)
        arguments.run(launches, call, arguments.problem(call), mask, tile, programs, (strides,), given, tensors, bind)
    return out, lse
