"""From tensors and a PreparedMask to the structs of csrc/attention/, which are filled field by field."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor

from fastattn.backends.constants import dropout_constants, uses_tf32
from fastattn.backends.cuda import DTYPES, address
from fastattn.masks import PreparedMask


def common(
    arguments: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
) -> Any:
    """The struct with the fields that all of them share."""
    arguments.q, arguments.k = rows(q), rows(k)
    arguments.shape = (*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3])
    arguments.lse = lse.data_ptr()
    if bias is not None:
        arguments.bias = (bias.data_ptr(), *_strides(bias, 4), DTYPES[bias.dtype])
    if rng_state is not None:
        arguments.dropout = (address(rng_state), *dropout_constants(dropout_p))
    arguments.dtype = DTYPES[q.dtype]
    arguments.softmax_scale = softmax_scale
    arguments.tf32 = uses_tf32()
    return arguments


def mask(module: ModuleType, prepared: PreparedMask, lists: bool = True) -> Any:
    """struct Mask. lists: whether the kernel takes the lists of tiles; false where they are for another tile size.

    The tensors must be kept until the launch.
    """
    arguments = module.AttentionMask()
    arguments.band_lo, arguments.band_hi = prepared.band_lo, prepared.band_hi
    if (intervals := prepared.intervals) is not None:
        arguments.intervals, arguments.intervals_stride_b = intervals.data_ptr(), _strides(intervals, 1)[0] // 2
    if (columns := prepared.columns) is not None:
        arguments.columns, arguments.columns_stride_b = columns.data_ptr(), _strides(columns, 1)[0]
        arguments.bits, arguments.bits_stride_b = columns.data_ptr(), _strides(columns, 1)[0]
    if (bits := prepared.bits) is not None:
        arguments.bits = bits.data_ptr()
        arguments.bits_stride_b, arguments.bits_stride_h, arguments.bits_stride_row = _strides(bits, 3)
    if lists and prepared.tiles is not None:
        counts, tiles = prepared.counts, prepared.tiles
        arguments.counts, arguments.tiles, arguments.max_tiles = counts.data_ptr(), tiles.data_ptr(), tiles.shape[3]
        arguments.lists_stride_b, arguments.lists_stride_h = (stride // 2 for stride in _strides(counts, 2))
    return arguments


def rows(t: Tensor) -> tuple[int, ...]:
    """struct Rows; the last dimension is contiguous."""
    return t.data_ptr(), *t.stride()[:3]


def empty_like(x: Tensor, head_dim: int) -> Tensor:
    """Uninitialised (B, H, L, head_dim) in x's memory order: (B, L, H, D) when x comes as a view of that."""
    B, H, L, _ = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty(B, L, H, head_dim).transpose(1, 2)
    return x.new_empty(B, H, L, head_dim)


def _strides(t: Tensor, dims: int) -> tuple[int, ...]:
    """The strides of the first dimensions, 0 along those of size 1: they are broadcast."""
    return tuple(t.stride(i) if t.shape[i] > 1 else 0 for i in range(dims))
