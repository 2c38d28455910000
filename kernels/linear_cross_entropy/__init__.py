"""The Triton backend of the linear layer with cross-entropy: rows.py holds the kernel."""

from typing import Any

from torch import Tensor

from fastattn.backends import cross_entropy_chunks as products

from ..common.launch import DTYPES, refuse_device
from .rows import cross_entropy_rows, empty_logits

_ROWS = products.RowKernel(cross_entropy_rows, empty_logits)


def unsupported_reason(
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


def linear_cross_entropy_fwd(*call: Any) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """As fastattn.backends.cross_entropy_chunks.forward, which has the arguments."""
    return products.forward(_ROWS, *call)


def linear_cross_entropy_bwd(*call: Any) -> tuple[Tensor | None, ...]:
    """As fastattn.backends.cross_entropy_chunks.backward, which has the arguments."""
    return products.backward(_ROWS, *call)
