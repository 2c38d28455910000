"""A linear layer with cross-entropy in Triton: the kernel and its launch are in rows.py."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastattn.backends import cross_entropy_chunks as products
from fastattn.backends.calls import LossCall

from ..common.launch import unsupported_tensors
from .rows import cross_entropy_rows, empty_logits


def _logits(call: LossCall) -> Tensor:
    x, weight, *_ = call
    return torch.mm(x, weight.t(), out=empty_logits(len(x), len(weight), x))


_ROWS = products.RowKernel(cross_entropy_rows, _logits)


def unsupported_reason(x: Tensor, *_: Any) -> str | None:
    """Why these kernels cannot run, or None."""
    return unsupported_tensors("linear cross-entropy", x=x)


# The functions that the op calls. Their arguments: fastattn/backends/cross_entropy_chunks.py.
linear_cross_entropy_fwd = partial(products.forward, _ROWS)
linear_cross_entropy_bwd = partial(products.backward, _ROWS)
