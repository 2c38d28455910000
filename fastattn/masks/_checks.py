"""Checks of flags and sizes, for everything public: masks import no other part of the package."""

from __future__ import annotations

from numbers import Integral

import numpy as np
import torch
from torch import Tensor


def check_flags(**flags: object) -> None:
    """TypeError unless each is a bool of Python or numpy: any other value would silently count as true or false."""
    for name, value in flags.items():
        if value is not True and value is not False and not isinstance(value, (np.bool_, torch.SymBool)):
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
