"""How masks are prepared on a GPU, for the attention of Triton and of CUDA. Specification: fastattn/masks/kernel_format.py

prepare.py has the kernel and its launch.
"""

from torch import Tensor

from ..common.launch import refuse_device
from .prepare import prepare_mask

__all__ = ["prepare_mask", "unsupported_reason"]


def unsupported_reason(x: Tensor) -> str | None:
    """Why the kernel cannot run where x, one of the mask's tensors, is; or None."""
    return refuse_device(x)
