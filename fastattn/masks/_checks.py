"""Checks of flags and sizes, for everything public: masks import no other part of the package."""

from __future__ import annotations

from numbers import Integral

import torch
from torch import Tensor

_NUMPY_BOOLS = ("numpy", "bool"), ("numpy", "bool_")  # in numpy 2 and before, without its import


def check_flags(**flags: object) -> None:
    """TypeError unless each is a bool of Python or numpy: any other value would silently count as true or false."""
    for name, value in flags.items():
        if value is True or value is False or isinstance(value, torch.SymBool):
            continue
        if (type(value).__module__, type(value).__name__) not in _NUMPY_BOOLS:
            raise TypeError(f"{name} must be a bool, got {value!r}")


def check_sizes(least: int = 1, **sizes: object) -> None:
    """ValueError unless each is an integer of at least `least`."""
    for name, value in sizes.items():
        if not isinstance(value, (Integral, torch.SymInt)) or isinstance(value, bool) or value < least:
            expected = "a positive integer" if least == 1 else f"an integer of at least {least}"
            raise ValueError(f"{name} must be {expected}, got {value!r}")


def check_token_ids(name: str, seq: object) -> None:
    """TypeError or ValueError unless seq is a Tensor (B, L)."""
    if not isinstance(seq, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(seq).__name__}")
    if seq.dim() != 2:
        raise ValueError(f"{name} has shape {tuple(seq.shape)}, expected (B, L)")
