"""The arguments of an AttentionMask, checked and brought into one form. Messages name the argument, what came and what
was expected."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Band = tuple[int | None, int | None]  # j - i in [lo, hi]; None = unbounded
FREE: Band = (None, None)


def is_bool(t: Tensor) -> bool:
    return t.dtype == torch.bool


def four_dims(name: str, t: Tensor | None, right_dtype: Callable[[Tensor], bool], wanted: str) -> Tensor | None:
    if t is None:
        return None
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a Tensor or None, got {type(t).__name__}")
    if not right_dtype(t):
        raise TypeError(f"{name} has dtype {t.dtype}, expected {wanted}")
    if t.dim() > 4:
        raise ValueError(f"{name} has {t.dim()} dimensions {tuple(t.shape)}, expected at most 4: (B, H, Lq, Lk)")
    return t[(None,) * (4 - t.dim())]


def padding(name: str, t: Tensor | None) -> Tensor | None:
    if t is None:
        return None
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a Tensor or None, got {type(t).__name__}")
    if t.dtype != torch.bool:
        raise TypeError(f"{name} has dtype {t.dtype}, expected bool, True = a real token")
    if t.dim() != 2:
        raise ValueError(f"{name} has shape {tuple(t.shape)}, expected (B, L) or (1, L)")
    return t.contiguous()


def offsets(name: str, t: Tensor | None) -> Tensor | None:
    if t is None:
        return None
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a Tensor or None, got {type(t).__name__}")
    if t.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} has dtype {t.dtype}, expected int32")
    if t.dim() != 1 or len(t) < 1:
        raise ValueError(f"{name} has shape {tuple(t.shape)}, expected (n + 1,): n offsets and the end")
    # On a GPU a look would wait for it.
    if t.device.type == "cpu" and not torch.compiler.is_compiling() and (t[0] < 0 or (t[1:] < t[:-1]).any()):
        raise ValueError(f"{name} is {t.tolist()}, expected offsets that are not negative and never fall")
    return t.to(torch.int32)


def window_band(window: tuple[int | None, int | None] | None) -> Band:
    if window is None:
        return FREE
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window must be a pair (left, right), got {window!r}")
    for side in window:
        if side is not None and (not isinstance(side, int) or side < 0):
            raise ValueError(f"window must hold non-negative integers or None, got {tuple(window)}")
    left, right = window
    return (None if left is None else -left), right
