"""Fills the structs of csrc/attention/, field by field, from tensors and a PreparedMask."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor

from fastattn.backends.constants import uses_tf32
from fastattn.backends.cuda import DTYPES, dropout_args
from fastattn.masks import PreparedMask


def fill_common(
    params: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
) -> None:
    """The fields that AttentionForward, AttentionBackward and AttentionWeights share."""
    params.q, params.k = strided_matrix(q), strided_matrix(k)
    params.shape = (*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3])
    params.lse = lse.data_ptr()
    if bias is not None:
        params.bias = (bias.data_ptr(), *_strides(bias, 4), DTYPES[bias.dtype])
    if rng_state is not None:
        params.dropout = dropout_args(rng_state, dropout_p)
    params.dtype = DTYPES[q.dtype]
    params.softmax_scale = softmax_scale
    params.tf32 = uses_tf32()


def mask_params(module: ModuleType, mask: PreparedMask) -> Any:
    """struct Mask. The tensors of the mask must be kept until the launch."""
    intervals = columns = (0, 0)
    bits = lists = None
    if mask.intervals is not None:
        intervals = mask.intervals.data_ptr(), _strides(mask.intervals, 1)[0] // 2
    if mask.columns is not None:
        columns = mask.columns.data_ptr(), *_strides(mask.columns, 1)
    if mask.bits is not None:
        bits = mask.bits.data_ptr(), *_strides(mask.bits, 3)
    if mask.tiles is not None:
        strides = (stride // 2 for stride in _strides(mask.counts, 2))
        lists = mask.counts.data_ptr(), mask.tiles.data_ptr(), mask.tiles.shape[3], *strides
    return module.AttentionMask(
        mask.band_lo, mask.band_hi, *intervals, *columns, *(bits or (*columns, 0, 0)), *(lists or (0, 0, 0, 0, 0))
    )


def strided_matrix(t: Tensor) -> tuple[int, ...]:
    """struct StridedMatrix; the last dimension is contiguous."""
    return t.data_ptr(), *t.stride()[:3]


def empty_like(x: Tensor, head_dim: int) -> Tensor:
    """Uninitialised (B, H, L, head_dim) in x's memory order: (B, L, H, D) if x is a view of that."""
    B, H, L, _ = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty(B, L, H, head_dim).transpose(1, 2)
    return x.new_empty(B, H, L, head_dim)


def _strides(t: Tensor, dims: int) -> tuple[int, ...]:
    """The strides of the first dimensions, 0 for those of size 1: they are broadcast."""
    return tuple(t.stride(i) if t.shape[i] > 1 else 0 for i in range(dims))
