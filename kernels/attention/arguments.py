"""The arguments of the kernels, made from tensors and a PreparedMask.

Values that belong together are one argument: a tuple whose fields a kernel reads by name. Triton compiles another
kernel if an integer in a tuple is 1, and if it is divisible by 16. For strides this is useful, because it allows loads
of 16 bytes. Lengths and bands must not cause a compilation, so they are not in tuples but in DO_NOT_SPECIALIZE.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn.masks import PreparedMask

from ..common.launch import dot_precision, padded_dim
from ..common.philox import dropout_constants

DO_NOT_SPECIALIZE = ["seqlen_q", "seqlen_k", "band_lo", "band_hi"]


class StridedTensor(NamedTuple):
    """A tensor (B, H, L, D) whose last dimension is contiguous."""

    ptr: Tensor
    stride_b: int
    stride_h: int
    stride_l: int


class Matrix(NamedTuple):
    """A tensor that broadcasts to (B, H, Lq, Lk): the bias, its gradient, the weights. A broadcast stride is 0.

    columns: Lk again. In a tuple Triton learns whether 16 divides it, and can then load and store vectors.
    """

    ptr: Tensor
    stride_b: int
    stride_h: int
    stride_m: int
    stride_n: int
    columns: int


class Mask(NamedTuple):
    """The tensors of a PreparedMask, or None. All are contiguous, so their sizes follow from the lengths.

    per_sample, per_head, per_row: 1 if there is an entry for each sample, head or row, 0 if all share one.
    """

    intervals: Tensor | None = None
    intervals_per_sample: int = 0
    columns: Tensor | None = None
    columns_per_sample: int = 0
    bits: Tensor | None = None
    bits_per_sample: int = 0
    bits_per_head: int = 0
    bits_per_row: int = 0
    counts: Tensor | None = None
    tiles: Tensor | None = None
    tiles_per_sample: int = 0
    tiles_per_head: int = 0


class Dropout(NamedTuple):
    """rng_state: int64 (seed, offset). threshold, scale: see dropout_constants()."""

    rng_state: Tensor
    threshold: int
    scale: float


def strided(t: Tensor) -> StridedTensor:
    """t (B, H, L, D)"""
    return StridedTensor(t, *t.stride()[:3])


def matrix(t: Tensor, columns: int) -> Matrix:
    """t (b, h, m, n), each dimension full or 1."""
    strides = (stride if size > 1 else 0 for size, stride in zip(t.shape, t.stride(), strict=True))
    return Matrix(t, *strides, columns)


def masking(mask: PreparedMask) -> dict[str, Any]:
    """The arguments that say the mask."""
    return {"mask": _tensors(mask), "band_lo": mask.band_lo, "band_hi": mask.band_hi}


def _tensors(mask: PreparedMask) -> Mask:
    if mask.band_only:
        return Mask()

    def per(t: Tensor | None, dim: int) -> int:
        return 0 if t is None or t.shape[dim] == 1 else 1

    intervals, columns, bits, tiles = mask.intervals, mask.columns, mask.bits, mask.tiles
    return Mask(
        *(intervals, per(intervals, 0)),
        *(columns, per(columns, 0)),
        *(bits, per(bits, 0), per(bits, 1), per(bits, 2)),
        *(mask.counts, tiles, per(tiles, 0), per(tiles, 1)),
    )


def problem(
    q: Tensor, k: Tensor, bias: Tensor | None, softmax_scale: float, dropout_p: float, rng_state: Tensor | None
) -> dict[str, Any]:
    """The arguments of every kernel, except the mask."""
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
        "BLOCK_DK": padded_dim(q.shape[3]),
        "PRECISION": dot_precision(q.dtype),
        # The scale can be part of the exponent's unit if it is positive (the maximum stays the maximum) and nothing is
        # added after it. It costs one more rounding, too much for float32.
        "FOLD_SCALE": bias is None and softmax_scale > 0 and q.dtype != torch.float32,
    }


def value_dims(v: Tensor) -> dict[str, int]:
    """The arguments of the kernels that read v."""
    return {"HEAD_DIM_V": v.shape[3], "BLOCK_DV": padded_dim(v.shape[3])}


def empty_like(x: Tensor, head_dim: int) -> Tensor:
    """Uninitialised (B, H, L, head_dim) in x's memory order: (B, L, H, D) when x comes as a view of that."""
    B, H, L, _ = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty(B, L, H, head_dim).transpose(1, 2)
    return x.new_empty(B, H, L, head_dim)
