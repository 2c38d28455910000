"""Backward of attention: the gradient of a relative bias (H or 1, R), dS summed over all pairs of a query m and a key n
at one distance n - m, over the batch, and over the heads if they share one row.

Grid: one program per (part, head or 1, diagonal of tiles). All tiles on a diagonal, tile_n - tile_m = d, have the same
distances at the same places. So a program adds their dS element by element in registers, [BLOCK, BLOCK] float32, over
tiles, heads and batches. After that it sums the tile along its own diagonals: row i is turned by i places, and columns
are sums then. Neighbouring diagonals of tiles have BLOCK - 1 distances in common, which torch adds. No atomics, and
everything in a fixed order: equal results run to run.
Only diagonals with a distance are launched that the bias has, of packed sequences those shorter than the longest of
them, and that the band allows. Of a causal mask these are half. What else is masked is found out tile by tile.
Parts: as in bias_gradient.py, where there are too few programs for the GPU. The loop over batches, heads and tiles is
split. No record times it yet: PyTorch's operators, its rival, make a tensor of all scores.
Work: 2 * (Dk + Dv) FLOPs per score; bytes: q, k, v and dout once per tile, from L2; 2 * BLOCK float32 a program.
Estimated for sm_90a, clocks of a tile of 64 x 64 at D 64: products 256, 32 KiB from L2 512, the bias 128 loads of a
warp. Not timed.
Compiled offline, triton 3.6, bf16, registers: sm_90a 146 at D 64, 184 at D 128, 255 at D 256; sm_80 255, 176, 254;
sm_100a 196 at D 128; sm_120a 178. Nothing spills; with dropout, softcap and a bool matrix 17 accesses at D 256.
Tried and dropped:
    64 x 64 at D 128 on sm_80: 51 accesses spill, 70 with all options; 32 x 32 by 4 warps: 254 registers for 176;
    32 x 32 at D 256 on sm_90a: 2 and 23 accesses spill, and its products are not wgmma's;
    tiles in global memory, summed by torch: BLOCK / 2 times the memory, for a turn that costs one gather a program.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fastattn.backends.calls import AttentionCall
from fastattn.backends.constants import bias_parts
from fastattn.masks import zero_distance

from ..common.launch import Launches, addresses, gpu_arch, multiprocessors
from . import arguments
from .arguments import Dropout, Mask, Matrix, StridedTensor
from .bias_gradient import add_score_gradient
from .tile_sizes import config

_OWN = ["bias_heads", "batches", "parts", "first_diagonal", "num_diagonals"]


@triton.jit(do_not_specialize=[*_OWN, *arguments.DO_NOT_SPECIALIZE])
def attention_relative_dbias_kernel(
    # StridedTensors q, k, v, dout; sums (parts, bias_heads, num_diagonals, 2, BLOCK) float32, of the distances below
    # d * BLOCK and from there on; lse, delta (B, H, Lq) float32. All but the first four contiguous.
    q, k, v, dout, sums, lse_ptr, delta_ptr, bias, mask, dropout,
    bias_heads, batches, parts, first_diagonal, num_diagonals,
    num_heads, group, seqlen_q, seqlen_k, band_lo, band_hi, softmax_scale, softcap,
    HEAD_DIM_K: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    FOLD_SCALE: tl.constexpr, RELATIVE_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = BLOCK_M  # tiles are squares
    diagonal = first_diagonal + tl.program_id(0) % num_diagonals
    bias_h = tl.program_id(0) // num_diagonals % bias_heads
    part = tl.program_id(0) // (num_diagonals * bias_heads)
    first_tile = tl.maximum(-diagonal, 0)
    num_tiles = tl.minimum(tl.cdiv(seqlen_q, BLOCK), tl.cdiv(seqlen_k, BLOCK) - diagonal) - first_tile
    heads = num_heads // bias_heads
    turns = batches * heads * num_tiles
    share = tl.cdiv(turns, parts)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for i in range(part * share, tl.minimum(part * share + share, turns)):
        m0 = (first_tile + i % num_tiles) * BLOCK
        n0 = m0 + diagonal * BLOCK
        h = (bias_h + i // num_tiles % heads).to(tl.int64)
        b = (i // (num_tiles * heads)).to(tl.int64)
        total = add_score_gradient(
            total, q, k, v, dout, lse_ptr, delta_ptr, bias, mask, dropout, b, h, m0, n0,
            n0 + tl.arange(0, BLOCK), num_heads, group, seqlen_q, seqlen_k, band_lo, band_hi, softmax_scale, softcap,
            HEAD_DIM_K, HEAD_DIM_V, BLOCK_DK, BLOCK_DV, FOLD_SCALE, RELATIVE_BIAS, PRECISION, BLOCK, BLOCK,
        )  # fmt: skip

    row, col = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    turned = tl.gather(total, (row + col) % BLOCK, axis=1)  # its distance is col, or col - BLOCK after the end of a row
    ptrs = sums + tl.program_id(0).to(tl.int64) * 2 * BLOCK + tl.arange(0, BLOCK)
    tl.store(ptrs, tl.sum(tl.where(row + col < BLOCK, 0.0, turned), axis=0))
    tl.store(ptrs + BLOCK, tl.sum(tl.where(row + col < BLOCK, turned, 0.0), axis=0))


_LAUNCHES = Launches(attention_relative_dbias_kernel, *[StridedTensor] * 4, *[Tensor] * 3, Matrix, Mask, Dropout)


def relative_bias_gradient(dout: Tensor, _: Any, call: AttentionCall, lse: Tensor, delta: Tensor) -> Tensor:
    """dbias, shaped and typed as bias. The arguments are those of bias_gradient."""
    q, k, v, bias, mask = *call[:4], call.masks[0]
    (B, H, Lq, _), (_, _, Lk, Dv), (heads, places) = q.shape, v.shape, bias.shape
    tile = config("relative dbias", gpu_arch(q), q.dtype, max(q.shape[3], Dv), Lq)
    BLOCK, tiles_q, tiles_k = tile.BLOCK_M, triton.cdiv(Lq, tile.BLOCK_M), triton.cdiv(Lk, tile.BLOCK_N)
    zero = zero_distance(places, Lq, Lk)
    lowest, highest = max(mask.band_lo, -zero), min(mask.band_hi, places - 1 - zero)  # distances
    # Diagonal d has the distances from (d - 1) * BLOCK + 1 to (d + 1) * BLOCK - 1.
    first = max(lowest // BLOCK, 1 - tiles_q)
    diagonals = min(triton.cdiv(highest, BLOCK), tiles_k - 1) - first + 1
    turns = B * (H // max(heads, 1)) * min(tiles_q, tiles_k)
    if turns == 0 or diagonals <= 0:
        return torch.zeros_like(bias)
    programs = heads * diagonals
    parts = bias_parts(turns // 4, turns, programs, multiprocessors(q))
    sums = torch.empty(parts, heads, diagonals, 2, BLOCK, dtype=torch.float32, device=q.device)
    strided, strides = arguments.strided(q, k, v, dout)
    found, alignment = addresses(sums, lse, delta)
    given, tensors, own = (*strided, *found), (q, k, v, dout, sums, lse, delta), (heads, B, parts, first, diagonals)
    made, key, programs = arguments.problem(call), (strides, alignment), programs * parts
    arguments.run(_LAUNCHES, call, made, mask, tile, programs, key, given, tensors, None, own)
    below, above = sums.sum(0).unbind(2)  # (heads, diagonals, BLOCK)
    distances = (F.pad(below, (0, 0, 0, 1)) + F.pad(above, (0, 0, 1, 0))).flatten(1)  # from (first - 1) * BLOCK on
    start = zero + (first - 1) * BLOCK
    return F.pad(distances, (start, places - start - distances.shape[1])).to(bias.dtype)
