"""The Triton backend of embedding + positions + dropout + LayerNorm: forward.py and backward.py."""

import torch
from torch import Tensor

from ..common.launch import DTYPES, refuse_device
from ..common.norm import MAX_HIDDEN
from ..common.norm import TICKETS as TICKETS
from .backward import embed_layer_norm_bwd as embed_layer_norm_bwd
from .forward import embed_layer_norm_fwd as embed_layer_norm_fwd


def unsupported_reason(
    tokens: Tensor,
    embedding: Tensor,
    position_table: Tensor,
    weight: Tensor,
    bias: Tensor,
    position: Tensor | None,
    scale: float,
    padding_idx: int | None,
    dropout_p: float,
    dtype: torch.dtype,
) -> str | None:
    """None, or what is refused and what was got."""
    if reason := refuse_device(embedding):
        return reason
    if embedding.dtype not in DTYPES:
        return f"Triton embedding takes float32, bfloat16 and float16, got embedding of dtype {embedding.dtype}"
    if embedding.shape[1] > MAX_HIDDEN:
        return f"Triton embedding keeps a row in registers, d <= {MAX_HIDDEN}, got {embedding.shape[1]}"
    return None
