"""Embedding + positions + dropout + LayerNorm in Triton: kernels and launches are in forward.py and backward.py."""

from typing import Any

from torch import Tensor

from ..common.launch import unsupported_tensors
from ..common.norm import MAX_HIDDEN
from ..common.norm import TICKETS as TICKETS
from .backward import embed_layer_norm_bwd as embed_layer_norm_bwd
from .forward import embed_layer_norm_fwd as embed_layer_norm_fwd


def unsupported_reason(tokens: Tensor, embedding: Tensor, *_: Any) -> str | None:
    """Why these kernels cannot run, or None."""
    if embedding.shape[1] > MAX_HIDDEN:
        return f"Triton embedding keeps a row in registers, d <= {MAX_HIDDEN}, got {embedding.shape[1]}"
    return unsupported_tensors("embedding", embedding=embedding)
