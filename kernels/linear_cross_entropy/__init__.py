"""The Triton room of the linear layer with cross-entropy: products.py walks the chunks, rows.py holds the kernel."""

import torch
from torch import Tensor

from ..common.launch import refuse_device
from .products import linear_cross_entropy_bwd as linear_cross_entropy_bwd
from .products import linear_cross_entropy_fwd as linear_cross_entropy_fwd

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_not(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    label_smoothing: float,
    ignore_index: int,
    logit_scale: float,
    reduction: str,
) -> str | None:
    """None, or what is refused and what was got."""
    if reason := refuse_device(x):
        return reason
    if x.dtype not in DTYPES:
        return f"Triton linear cross-entropy takes float32, bfloat16 and float16, got {x.dtype}"
    return None
