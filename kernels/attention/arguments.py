"""From tensors and a PreparedMask to the arguments of the kernels.

What belongs together is one argument, a tuple whose fields a kernel reads by name. Triton compiles a kernel anew where
an integer in a tuple is 1, or becomes or ceases to be divisible by 16. For strides that pays: it makes loads of 16
bytes possible. Lengths and bands must not do it, so they stay outside of the tuples, in DO_NOT_SPECIALIZE.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fastattn.masks import PreparedMask

from ..common.launch import dot_precision
from ..common.philox import dropout_constants

DO_NOT_SPECIALIZE = ["seqlen_q", "seqlen_k", "band_lo", "band_hi"]


class Rows(NamedTuple):
    """A tensor (B, H, L, D) whose last dimension is contiguous."""

    ptr: Tensor
    stride_b: int
    stride_h: int
    stride_l: int


class Matrix(NamedTuple):
    """A tensor that broadcasts to (B, H, Lq, Lk): the bias, its gradient, the weights. Strides are 0 where it does.

    columns is Lk once more: within a tuple Triton learns whether 16 divides it, and can then load and store vectors.
    """

    ptr: Tensor
    stride_b: int
    stride_h: int
    stride_m: int
    stride_n: int
    columns: int


class Mask(NamedTuple):
    """The tensors of a PreparedMask, or None. All are contiguous, so their sizes follow from the lengths; of_batch,
    of_head and of_row are 0 where one entry serves all samples, heads or rows, else 1."""

    intervals: Tensor | None = None
    intervals_of_batch: int = 0
    columns: Tensor | None = None
    columns_of_batch: int = 0
    bits: Tensor | None = None
    bits_of_batch: int = 0
    bits_of_head: int = 0
    bits_of_row: int = 0
    counts: Tensor | None = None
    tiles: Tensor | None = None
    tiles_of_batch: int = 0
    tiles_of_head: int = 0


class Dropout(NamedTuple):
    """rng_state: int64 (seed, offset). threshold, scale: see dropout_constants()."""

    rng_state: Tensor
    threshold: int
    scale: float


def rows(t: Tensor) -> Rows:
    """t (B, H, L, D)"""
    return Rows(t, *t.stride()[:3])


def matrix(t: Tensor, columns: int) -> Matrix:
    """t (b, h, m, n), each dimension full or 1."""
    strides = (stride if size > 1 else 0 for size, stride in zip(t.shape, t.stride(), strict=True))
    return Matrix(t, *strides, columns)


def masking(mask: PreparedMask) -> dict[str, Any]:
    """The mask, of the rows and columns that a kernel has."""
    return {"mask": _tensors(mask), "band_lo": mask.band_lo, "band_hi": mask.band_hi}


def _tensors(mask: PreparedMask) -> Mask:
    if mask.band_only:
        return Mask()

    def of(t: Tensor | None, dim: int) -> int:
        return 0 if t is None or t.shape[dim] == 1 else 1

    _, _, intervals, columns, bits, counts, tiles = mask
    return Mask(
        *(intervals, of(intervals, 0)),
        *(columns, of(columns, 0)),
        *(bits, of(bits, 0), of(bits, 1), of(bits, 2)),
        *(counts, tiles, of(tiles, 0), of(tiles, 1)),
    )


def problem(
    q: Tensor, k: Tensor, bias: Tensor | None, softmax_scale: float, dropout_p: float, rng_state: Tensor | None
) -> dict[str, Any]:
    """What every kernel takes, apart from the mask."""
    dropout = None if rng_state is None else Dropout(rng_state, *dropout_constants(dropout_p))
    return {
        "bias": None if bias is None else matrix(bias, k.shape[2]),
        "dropout": dropout,
        "num_heads": q.shape[1],
        "group": q.shape[1] // max(k.shape[1], 1),  # query heads that share a key head
        "seqlen_q": q.shape[2],
        "seqlen_k": k.shape[2],
        "softmax_scale": softmax_scale,
        "HEAD_DIM_K": q.shape[3],
        "BLOCK_DK": padded_head_dim(q.shape[3]),
        "PRECISION": dot_precision(q.dtype),
        # Folding the scale into the exponent's unit needs a maximum that commutes with it and nothing added after it,
        # and rounds once more than float32 would like.
        "FOLD_SCALE": bias is None and softmax_scale > 0 and q.dtype != torch.float32,
    }


def value_dims(v: Tensor) -> dict[str, int]:
    """For the kernels that read v."""
    return {"HEAD_DIM_V": v.shape[3], "BLOCK_DV": padded_head_dim(v.shape[3])}


@functools.cache
def padded_head_dim(head_dim: int) -> int:
    """Columns of a tile in registers: tl.dot and tl.arange want a power of two, and at least 16."""
    return max(16, triton.next_power_of_2(head_dim))


def empty_like(x: Tensor, head_dim: int) -> Tensor:
    """Uninitialised (B, H, L, head_dim) in x's memory order: (B, L, H, D) when x comes as a view of that."""
    B, H, L, _ = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty(B, L, H, head_dim).transpose(1, 2)
    return x.new_empty(B, H, L, head_dim)
