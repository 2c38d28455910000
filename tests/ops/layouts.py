"""Layouts in memory, for tensors that ops are given."""

from __future__ import annotations

from torch import Tensor


def reversed_dims(t: Tensor) -> Tensor:
    order = tuple(reversed(range(t.dim())))
    return t.permute(order).contiguous().permute(order)


def swapped_dims(t: Tensor) -> Tensor:
    """The two dimensions before the last: heads inside positions, as a projection viewed as heads has them."""
    return t.transpose(-2, -3).contiguous().transpose(-2, -3) if t.dim() > 2 else t


def sliced(t: Tensor) -> Tensor:
    """Rows of odd length; the first element is aligned to its own size only."""
    larger = t.new_zeros([n + 1 for n in t.shape])
    return larger[(slice(1, None),) * t.dim()].copy_(t)


def every_second(t: Tensor) -> Tensor:
    return t.repeat_interleave(2, -1)[..., ::2]


def expanded(t: Tensor) -> Tensor:
    return t[:1].expand(t.shape)


LAYOUTS = (reversed_dims, swapped_dims, sliced, every_second, expanded)
