"""Layouts in memory, for tensors that ops are given."""

from __future__ import annotations

import numpy as np
import pytest
import torch
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


def zeros(dtype: torch.dtype, device: torch.device, *shape: int) -> Tensor:
    """Large, and on a CPU only touched pages take memory. Skips the test where not even that is possible."""
    try:
        if device.type == "cuda":
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.from_numpy(np.zeros(shape, dtype=f"i{dtype.itemsize}")).view(dtype)
    except (MemoryError, torch.OutOfMemoryError):
        pytest.skip(f"this machine cannot reserve {np.prod(shape) * dtype.itemsize >> 30} GiB")


def far(t: Tensor) -> Tensor:
    """The dimension before the last in steps so long that the last one passes 2^31 elements."""
    if t.dim() < 2 or t.shape[-2] < 2:
        return t
    rows = t.movedim(-2, 0)
    spread = zeros(t.dtype, t.device, len(rows), 2**31 // (len(rows) - 1) + 8)
    return spread[:, : rows[0].numel()].view(rows.shape).copy_(rows).movedim(0, -2)


LAYOUTS = (reversed_dims, swapped_dims, sliced, every_second, expanded, far)
