"""What torch.autocast means for the public ops: products and attention get its dtype, and float64 stays.

The residual stream keeps its own. What a sublayer computes in 16 bits is added to it in the stream's dtype, as PyTorch
adds bfloat16 to float32.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_NOTHING = nullcontext()
# Computed once, not in each op.
_WITH_AUTOCAST = tuple(t for t in ("cpu", "cuda", "xpu", "mps") if torch.amp.is_autocast_available(t))


# Cheap check: False if autocast is off on all devices (about 10x faster than the check of one device).
_any_autocast_enabled = torch._C._is_any_autocast_enabled


def _is_under_autocast(device: torch.device) -> bool:
    """torch raises an error for a device type that has no autocast, such as meta."""
    return device.type in _WITH_AUTOCAST and torch.is_autocast_enabled(device.type)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of torch.autocast on this device, or None outside of it."""
    return torch.get_autocast_dtype(device.type) if _any_autocast_enabled() and _is_under_autocast(device) else None


def dtype_under_autocast(t: Tensor) -> torch.dtype:
    """The dtype in which an op reads t: that of torch.autocast, or t's own if it is float64 or outside of autocast."""
    return t.dtype if t.dtype == torch.float64 else autocast_dtype(t.device) or t.dtype


def autocast_inputs(*tensors: Any) -> tuple[Any, ...]:
    """The tensors in the dtype of torch.autocast on the device of the first one. Outside of it they are unchanged.

    What is no tensor of floating point is left to later checks; float64 stays, as under torch.autocast.
    """
    first = tensors[0]
    dtype = autocast_dtype(first.device) if _any_autocast_enabled() and isinstance(first, Tensor) else None
    if dtype is None:
        return tensors
    return tuple(
        t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in tensors
    )


def stream_inputs(x: Any, residual: Any, *parameters: Any) -> tuple[Any, ...]:
    """What a residual connection adds, x to residual, and a norm's parameters, in the dtypes that torch.autocast gives.

    x gets the dtype of residual. Without one it is the stream itself. Parameters in 16 bits get that of the stream.
    Outside of torch.autocast, and where the stream is no tensor of floating point, all are as they are.
    """
    if not _any_autocast_enabled():
        return x, residual, *parameters
    stream = x if residual is None else residual
    is_float = isinstance(stream, Tensor) and stream.is_floating_point()
    if not (is_float and _is_under_autocast(stream.device)):
        return x, residual, *parameters
    if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64:
        x = x.to(stream.dtype)
    is_16_bits = [isinstance(t, Tensor) and t.is_floating_point() and t.dtype.itemsize == 2 for t in parameters]
    return x, residual, *(t.to(stream.dtype) if is_16 else t for t, is_16 in zip(parameters, is_16_bits, strict=True))


def no_autocast(device: torch.device) -> AbstractContextManager:
    """The inputs were cast: below the public op, formulas run in the dtypes they are given."""
    if _any_autocast_enabled() and _is_under_autocast(device):
        return torch.autocast(device.type, enabled=False)
    return _NOTHING
