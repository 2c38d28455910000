"""Attention of new tokens to a cache in Triton. Specification: fastattn/backends/reference/decode_attention.py

Kernels, launches and tile sizes are in forward.py; there is no backward.
"""

from typing import Any

from torch import Tensor

from ..common.launch import unsupported_tensors
from .forward import decode_attention_fwd as decode_attention_fwd

_MAX_HEAD_DIM = 256


def unsupported_reason(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> str | None:
    """Why these kernels cannot run, or None. It reads dtype, device and shape only."""
    if max(q.shape[3], v.shape[4]) > _MAX_HEAD_DIM:
        dims = f"{q.shape[3]} and {v.shape[4]}"
        return f"decode_attention in Triton takes head dimensions up to {_MAX_HEAD_DIM}, got {dims}"
    return unsupported_tensors("decode_attention", query=q)
