"""The Triton backend of dropout + residual + LayerNorm or RMSNorm: kernels and launches in forward.py, backward.py."""

from torch import Tensor

from ..common.launch import DTYPES, refuse_device
from ..common.norm import MAX_HIDDEN
from ..common.norm import TICKETS as TICKETS
from .backward import add_layer_norm_bwd as add_layer_norm_bwd
from .forward import add_layer_norm_fwd as add_layer_norm_fwd


def unsupported_reason(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    x_bias: Tensor | None = None,
) -> str | None:
    """None, or what is refused and what was got."""
    if reason := refuse_device(x):
        return reason
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias), ("x_bias", x_bias)):
        if tensor is not None and tensor.dtype not in DTYPES:
            return f"Triton layer norm takes float32, bfloat16 and float16, got {name} of dtype {tensor.dtype}"
    if x.shape[-1] > MAX_HIDDEN:
        return f"Triton layer norm keeps a row in registers, hidden <= {MAX_HIDDEN}, got {x.shape[-1]}"
    return None
