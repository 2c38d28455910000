"""Masked attention in Triton, forward and backward. Specification: fastattn/backends/reference/attention.py

Kernels and their launches:
    forward.py         out and lse
    backward.py        dq, and dk with dv
    bias_gradient.py   dbias, where the bias needs it
    weights.py         the weights, on request
tiles.py has what every kernel does with a tile; which elements are visible is read from a PreparedMask there.
arguments.py turns tensors into kernel arguments; tile_sizes.py holds the tile sizes.
"""

from torch import Tensor

from fastattn.masks import AttentionMask, Layout

from ..common.launch import DTYPES, arch_of, refuse_device
from .backward import attention_bwd
from .forward import attention_fwd
from .tile_sizes import config
from .weights import attention_weights

__all__ = ["attention_bwd", "attention_fwd", "attention_weights", "mask_layouts", "unsupported_reason"]

_MAX_HEAD_DIM = 256


def unsupported_reason(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None, dropout_p: float) -> str | None:
    """Why these kernels cannot serve, or None. Looks at dtype, device and shape alone."""
    if q.dtype not in DTYPES:
        return f"attention in Triton takes float32, bfloat16 and float16, got {q.dtype}"
    if max(q.shape[3], v.shape[3]) > _MAX_HEAD_DIM:
        return f"attention in Triton takes head dimensions up to {_MAX_HEAD_DIM}, got {q.shape[3]} and {v.shape[3]}"
    return refuse_device(q)


def mask_layouts(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Layout, ...]:
    """How the kernels read the mask: the forward's, then those of dq, which dbias shares, and of dk and dv."""
    arch, head_dim = arch_of(q), max(q.shape[3], v.shape[3])
    lengths = {"forward": q.shape[2], "dq": q.shape[2], "dkv": k.shape[2]}
    forward, dq, dkv = (config(kernel, arch, q.dtype, head_dim, rows) for kernel, rows in lengths.items())
    return (
        _layout(False, forward.BLOCK_M, forward.BLOCK_N, k.shape[2]),
        _layout(False, dq.BLOCK_M, dq.BLOCK_N, k.shape[2]),
        _layout(True, dkv.BLOCK_N, dkv.BLOCK_M, q.shape[2]),
    )


def _layout(by_key: bool, block_rows: int, block_columns: int, columns: int) -> Layout:
    """No lists where there is one tile of columns: it is visited anyway. One tile of rows has lists, too: they cost no
    launch of their own, and its columns may be many, half of them padding."""
    return Layout(by_key) if columns <= block_columns else Layout(by_key, block_rows, block_columns)
