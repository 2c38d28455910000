"""The Triton backend of the feed-forward network: forward.py and backward.py hold kernels and launches."""

from torch import Tensor

from ..common.launch import DTYPES, refuse_device
from .backward import feed_forward_bwd as feed_forward_bwd
from .forward import feed_forward_fwd as feed_forward_fwd
from .forward import feed_forward_hidden as feed_forward_hidden


def unsupported_reason(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str,
    dropout_p: float,
) -> str | None:
    """None, or what is refused and what was got."""
    if reason := refuse_device(x):
        return reason
    if x.dtype not in DTYPES:
        return f"Triton feed-forward takes float32, bfloat16 and float16, got {x.dtype}"
    return None
