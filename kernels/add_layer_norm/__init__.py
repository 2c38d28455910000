"""Dropout + residual + LayerNorm or RMSNorm in Triton: kernels and launches are in forward.py and backward.py."""

from typing import Any

from torch import Tensor

from ..common.launch import unsupported_tensors
from .backward import add_layer_norm_bwd as add_layer_norm_bwd
from .forward import MAX_HIDDEN
from .forward import TICKETS as TICKETS
from .forward import add_layer_norm_fwd as add_layer_norm_fwd


def unsupported_reason(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, *options: Any
) -> str | None:
    """Why these kernels cannot run, or None. options: dropout_p and, if there is one, x_bias."""
    if x.shape[-1] > MAX_HIDDEN:
        return f"Triton layer norm keeps a row in registers, hidden <= {MAX_HIDDEN}, got {x.shape[-1]}"
    _, *x_bias = options
    return unsupported_tensors("layer norm", x=x, weight=weight, bias=bias, x_bias=x_bias[0] if x_bias else None)
