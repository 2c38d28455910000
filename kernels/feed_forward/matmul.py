"""The matrix product that both directions share: tile order, loop and tile sizes."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl


@triton.jit
def grouped_tile(program, m_tiles, n_tiles, GROUP_M: tl.constexpr):
    """(m, n) of a program's tile: columns of GROUP_M tiles, one after another.

    The programs that run together then cover about as many rows as columns, and most of both operands comes from L2.
    """
    group = program // (GROUP_M * n_tiles)
    height = tl.minimum(m_tiles - group * GROUP_M, GROUP_M)
    place = program % (GROUP_M * n_tiles)
    return group * GROUP_M + place % height, place // height


@triton.jit
def multiply(
    a, b, b_second, a_mask, b_mask, stride_ak, stride_bk, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PAIR: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(A @ B, A @ B_second) of one tile in float32. Without PAIR the second is the same as the first.

    a: pointers [BLOCK_M, BLOCK_K] at depth 0, a_mask [BLOCK_M, 1]; b, b_second [BLOCK_K, BLOCK_N], b_mask [1, BLOCK_N].
    """
    first = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    second = first
    for k in range(0, depth, BLOCK_K):
        if EVEN_K:
            in_a, in_b = a_mask, b_mask
        else:
            inner = k + tl.arange(0, BLOCK_K)
            in_a, in_b = a_mask & (inner < depth)[None, :], b_mask & (inner < depth)[:, None]
        left = tl.load(a, mask=in_a, other=0.0)
        first = tl.dot(left, tl.load(b, mask=in_b, other=0.0), first, input_precision=PRECISION)
        if PAIR:
            second = tl.dot(left, tl.load(b_second, mask=in_b, other=0.0), second, input_precision=PRECISION)
            b_second += BLOCK_K * stride_bk
        a += BLOCK_K * stride_ak
        b += BLOCK_K * stride_bk
    return first, second


@triton.jit
def halves(tile):
    """The left and the right half of a [BLOCK_M, BLOCK_N] tile."""
    pairs = tl.reshape(tile, [tile.shape[0], 2, tile.shape[1] // 2])
    return tl.split(tl.permute(pairs, [0, 2, 1]))


class Tile(NamedTuple):
    """A program's tile of the product, the depth of a step, warps and stages, named as the launch's arguments."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    num_warps: int
    num_stages: int


GROUP_M = 8  # tiles; with tiles of 128 the 132 programs of one H200 wave cover 1024 rows x about 16 tiles of columns

FEW_TOKENS = 256  # up to here, as in decoding


def tile_for(dtype: torch.dtype, arch: int, tokens: int, wide: bool) -> Tile:
    """Tile sizes by dtype, architecture (90 for sm_90) and rows. wide: the epilogue leaves the registers to one large
    accumulator.

    An operand element fetched from L2 is used in BLOCK_M * BLOCK_N / (BLOCK_M + BLOCK_N) multiply-adds: 85 at
    128 x 256, 64 at 128 x 128. A depth of 512 is only eight steps, so the tile's width is more important than its
    stages. FEW_TOKENS get small tiles: 64 x 64 makes 32 programs of d_inner 2048, 128 x 256 makes 8.
    Dropped, offline at sm_90, bfloat16: 128 x 256 where z is read back and two tiles are stored (gelu backward: 470
    spills). Not taken without a timing: 128 x 128 by four warps, two programs a multiprocessor (gelu: 255 registers, no
    spills; its backward 400). sm_80 and the 99 KiB of consumer GPUs: 48 KiB, two programs each.
    float32 without tensor cores: 512 of the loop's 599 instructions are multiply-adds (gated 1024 of 1141). Dropped: z
    and dh by cuBLAS, read by a pointwise kernel, 619 to 2203 instructions at 40 to 138 registers. The CUDA backend has
    that; H200, 16384 x 512 x 2048, forward and backward, ms, CUDA's in brackets: bf16 relu 0.440 (0.458), gelu 0.610
    (0.498), swiglu 0.779 (0.694); float32 relu 6.15 (4.35).
    """
    few = tokens <= FEW_TOKENS
    if dtype == torch.float32:
        return Tile(32, 64, 16, 4, 3) if few else Tile(128, 64, 16, 8, 3)
    if 90 <= arch < 120:
        return Tile(64, 64, 64, 4, 3) if few else Tile(128, 256 if wide else 128, 64, 8, 3)
    return Tile(64, 64, 32, 4, 4) if few else Tile(128, 128 if wide else 64, 32, 8, 4)
