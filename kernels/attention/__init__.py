"""Masked attention in Triton, forward and backward. Specification: fastattn/reference/attention.py

Who sees whom is decided from an AttentionMask in tiles.py, for every kernel alike. Kernels and their launches:
    forward.py         out and lse
    backward.py        dq, and dk with dv
    bias_gradient.py   dbias, where the bias needs it
    weights.py         the weights, on request
    alignment.py       each query's key of the largest weight, on request
    seen.py            keys that nobody sees, once a mask
    lists.py           intervals of keys and lists of tiles that hold work, once a mask
    rows.py            what the backward must know of a row more exactly than lse and out say
arguments.py turns tensors into kernel arguments; config.py holds the tile sizes.
"""

from torch import Tensor

from fastattn.masks import AttentionMask

from ..common.launch import DTYPES, refuse_device
from .backward import attention_bwd
from .forward import attention_fwd
from .weights import attention_weights

__all__ = ["attention_bwd", "attention_fwd", "attention_weights", "why_not"]

_MAX_HEAD_DIM = 256


def why_not(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None, dropout_p: float) -> str | None:
    """Why these kernels cannot serve, or None. Looks at dtype, device and shape alone."""
    if q.dtype not in DTYPES:
        return f"attention in Triton takes float32, bfloat16 and float16, got {q.dtype}"
    if max(q.shape[3], v.shape[3]) > _MAX_HEAD_DIM:
        return f"attention in Triton takes head dimensions up to {_MAX_HEAD_DIM}, got {q.shape[3]} and {v.shape[3]}"
    return refuse_device(q)
