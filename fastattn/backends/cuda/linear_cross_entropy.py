"""The CUDA backend of the linear layer with cross-entropy. Kernel and floor: csrc/linear_cross_entropy/."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastattn.backends import cross_entropy_chunks as products
from fastattn.backends.constants import DTYPES
from fastattn.backends.cuda import extension, refuse_device

ALIGNMENT = 64  # elements: each row begins at a multiple, so that 16 bytes are read at a time for any number of classes


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
    """None, or what is not supported and what the call has."""
    if reason := refuse_device(x):
        return reason
    if x.dtype not in DTYPES:
        return f"CUDA linear cross-entropy takes float32, bfloat16 and float16, got {x.dtype}"
    return None


def _empty_logits(rows: int, n_class: int, like: Tensor) -> Tensor:
    """(rows, n_class) of like's dtype and device; each row begins at a multiple of ALIGNMENT."""
    shape = rows, -(-n_class // ALIGNMENT) * ALIGNMENT
    # On a CPU, where tests run, PyTorch's bfloat16 product multiplies the padding of a row by 0: it must not be NaN.
    return (like.new_zeros(shape) if like.device.type == "cpu" else like.new_empty(shape))[:, :n_class]


def cross_entropy_rows(
    logits: Tensor,
    bias: Tensor | None,
    target: Tensor,
    losses: Tensor,
    dloss: Tensor | None,
    count: Tensor | None,
    label_smoothing: float,
    ignore_index: int,
    logit_scale: float,
    needs_gradient: bool,
) -> None:
    """Writes losses (rows,) float32 and, with needs_gradient, each row's gradient over its logits (rows, classes).

    logits: last stride 1.    bias: (classes,) contiguous, added to each row, or None.    target: (rows,) int64.
    dloss: (rows,) or () float32, None is 1.    count: () int64, divides the gradient, or None.
    """
    dloss_stride = 0 if dloss is None or dloss.dim() == 0 else 1
    tensors = logits, bias, target, losses, dloss, dloss_stride, count
    extension(logits.is_cuda).cross_entropy_rows(*tensors, label_smoothing, ignore_index, logit_scale, needs_gradient)


_ROWS = products.RowKernel(cross_entropy_rows, _empty_logits)


def linear_cross_entropy_fwd(*call: Any) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """As fastattn.backends.cross_entropy_chunks.forward, which has the arguments."""
    return products.forward(_ROWS, *call)


def linear_cross_entropy_bwd(*call: Any) -> tuple[Tensor | None, ...]:
    """As fastattn.backends.cross_entropy_chunks.backward, which has the arguments."""
    return products.backward(_ROWS, *call)
