"""Checks that public ops and modules share. Messages name the argument, its value and what was expected."""

from __future__ import annotations

import math
import numbers

import torch
from torch import Tensor

from fastattn._tracing import can_read_values
from fastattn.backends import Backend, requested
from fastattn.masks._checks import check_flags as check_flags
from fastattn.masks._checks import check_sizes

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def same_dtype_and_device(first: object, *others: object) -> bool:
    """Whether all are tensors of one dtype that some backend takes, on one device: nothing to check one by one."""
    if not isinstance(first, Tensor) or first.dtype not in FLOATS:
        return False
    dtype, device = first.dtype, first.device
    for t in others:
        if not isinstance(t, Tensor) or t.dtype is not dtype or t.device != device:
            return False
    return True


def check_float(name: str, t: object) -> None:
    """t is a Tensor of a floating dtype that some backend takes."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(t).__name__}")
    if t.dtype not in FLOATS:
        raise TypeError(f"{name} has dtype {t.dtype}, expected one of {', '.join(map(str, FLOATS))}")


def check_like(name: str, t: Tensor, like_name: str, like: Tensor, *, dtype: bool = True) -> None:
    """t is on the device, and has the dtype, of another argument."""
    check_float(name, t)
    if t.device != like.device:
        raise ValueError(f"{name} is on {t.device}, expected {like.device} as {like_name}")
    if dtype and t.dtype != like.dtype:
        raise TypeError(f"{name} has dtype {t.dtype}, expected {like.dtype} as {like_name}")


def check_shape(name: str, t: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    if tuple(t.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(t.shape)}, expected {meaning} = {shape}")


def check_parameter(name: str, t: Tensor, shape: tuple[int, ...], meaning: str, like_name: str, like: Tensor) -> None:
    """t has this shape, is on the device of another argument, and has its dtype or float32."""
    check_like(name, t, like_name, like, dtype=False)
    check_shape(name, t, shape, meaning)
    if t.dtype not in (torch.float32, like.dtype):
        raise TypeError(f"{name} has dtype {t.dtype}, expected float32 or {like.dtype} as {like_name}")


def check_indices(name: str, t: object, like_name: str, like: Tensor) -> None:
    """t holds int64 or int32 on the device of another argument."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(t).__name__}")
    if t.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} has dtype {t.dtype}, expected int64 or int32")
    if t.device != like.device:
        raise ValueError(f"{name} is on {t.device}, expected {like.device} as {like_name}")


def check_range(name: str, t: Tensor, end: int, meaning: str) -> None:
    """0 <= t < end, read on a CPU only: on a GPU this would wait."""
    if not can_read_values(t) or t.numel() == 0:
        return
    low, high = t.aminmax()
    low, high = low.item(), high.item()
    if low < 0 or high >= end:
        raise ValueError(f"{name} has the value {low if low < 0 else high}, expected 0 to {end - 1}: {meaning}")


def check_number(name: str, value: object) -> None:
    """A real number of Python or numpy, not a bool."""
    is_number = isinstance(value, (int, float)) or isinstance(value, numbers.Real)  # the second costs more
    if not is_number or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")


def check_finite(name: str, value: float) -> None:
    if type(value) is not float:
        check_number(name, value)
    if not -math.inf < value < math.inf:
        raise ValueError(f"{name} must be finite, got {value}")


def check_positive(name: str, value: float) -> None:
    check_number(name, value)
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be finite and positive, got {value}")


def check_eps(eps: float) -> None:
    check_number("eps", eps)
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps must be finite and not negative, got {eps}")


def check_dropout(dropout_p: float) -> None:
    if type(dropout_p) is not float:
        check_number("dropout_p", dropout_p)
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p is the probability of dropping, between 0 and 1, got {dropout_p}")


def check_arguments(*, backend: Backend | None = None, **arguments: object) -> None:
    """ValueError unless each argument is a positive integer, or for one named *dropout a number from 0 to 1, and the
    backend's name is known. Errors are raised here and not in the first forward."""
    requested(backend)
    for name, value in arguments.items():
        if name.endswith("dropout"):
            if not isinstance(value, numbers.Real) or not 0 <= float(value) <= 1:
                raise ValueError(f"{name} must be a number from 0 to 1, the probability of dropping, got {value!r}")
        else:
            check_sizes(1, **{name: value})


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def as_matrix(x: Tensor) -> Tensor:
    """(..., hidden) -> (rows, hidden), contiguous: how kernels take it."""
    return (x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)).contiguous()
