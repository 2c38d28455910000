"""What torch.autocast means for the public ops: floating-point inputs get its dtype, and float64 stays."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_NOTHING = nullcontext()
# Asked once, not in each op.
_WITH_AUTOCAST = tuple(t for t in ("cpu", "cuda", "xpu", "mps") if torch.amp.is_autocast_available(t))


def _maybe() -> bool:
    """False where it is so on no device: asked first, in a tenth of the time."""
    return torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled()


def _is_under_autocast(device: torch.device) -> bool:
    """torch refuses to answer for a device type, such as meta, that has no autocast."""
    return device.type in _WITH_AUTOCAST and torch.is_autocast_enabled(device.type)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that torch.autocast asks for on this device, None outside of it."""
    return torch.get_autocast_dtype(device.type) if _maybe() and _is_under_autocast(device) else None


def dtype_under_autocast(t: Tensor) -> torch.dtype:
    """The dtype in which an op reads t: that of torch.autocast, or t's own if it is float64 or outside of autocast."""
    return t.dtype if t.dtype == torch.float64 else autocast_dtype(t.device) or t.dtype


def autocast_inputs(*tensors: Any) -> tuple[Any, ...]:
    """In the dtype that torch.autocast asks for on the device of the first, a tensor. Outside of it as they are.

    What is no tensor of floating point is left to later checks; float64 stays, as under torch.autocast.
    """
    first = tensors[0]
    dtype = autocast_dtype(first.device) if _maybe() and isinstance(first, Tensor) else None
    if dtype is None:
        return tensors
    return tuple(
        t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in tensors
    )


def no_autocast(device: torch.device) -> AbstractContextManager:
    """The inputs were cast: below the public op, formulas run in the dtypes they are given."""
    if _maybe() and _is_under_autocast(device):
        return torch.autocast(device.type, enabled=False)
    return _NOTHING
