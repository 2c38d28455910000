"""How masks are prepared on a GPU, for the attention of Triton and of CUDA. Specification: fastattn/masks/prepared.py

prepare.py has the kernel and its launch.
"""

from torch import Tensor

from ..common.launch import refuse_device
from .prepare import prepare_mask

__all__ = ["prepare_mask", "why_not"]


def why_not(x: Tensor) -> str | None:
    """Why the kernel cannot run where x, one of the mask's tensors, is; or None."""
    return refuse_device(x)
