"""Masks prepared on a GPU, for attention in Triton and in CUDA. Specification: fastattn/masks/kernel_format.py

The kernel and its launch are in prepare.py.
"""

from torch import Tensor

from ..common.launch import unsupported_device
from .prepare import prepare_mask

__all__ = ["prepare_mask", "unsupported_reason"]


def unsupported_reason(x: Tensor) -> str | None:
    """Why the kernel cannot run on the device of x, one of the mask's tensors, or None."""
    return unsupported_device(x)
