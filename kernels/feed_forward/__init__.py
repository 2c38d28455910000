"""The feed-forward network in Triton: kernels and launches are in forward.py and backward.py."""

from typing import Any

from torch import Tensor

from ..common.launch import unsupported_tensors
from .backward import feed_forward_dz as feed_forward_dz
from .forward import feed_forward_fwd as feed_forward_fwd


def unsupported_reason(x: Tensor, *_: Any) -> str | None:
    """Why these kernels cannot run, or None."""
    return unsupported_tensors("feed-forward", x=x)
