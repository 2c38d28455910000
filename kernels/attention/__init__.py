"""Masked attention in Triton, forward and backward. Specification: fastattn/backends/reference/attention.py

Kernels and their launches:
    forward.py         out and lse
    backward.py        dq, and dk with dv
    short.py           both directions where one tile holds all keys
    bias_gradient.py   dbias, if the bias needs it
    relative_bias_gradient.py   the same of a bias by distance
    rows.py            forward and backward between the products of a layer
masked_tiles.py holds what every kernel does with a tile. It reads from a PreparedMask which elements are visible.
arguments.py turns tensors into kernel arguments. tile_sizes.py holds the tile sizes.
"""

from typing import Any

from torch import Tensor

from fastattn.backends.constants import NO_KERNEL
from fastattn.masks import Layout

from ..common.launch import gpu_arch, unsupported_tensors
from .backward import attention_bwd
from .forward import attention_fwd
from .rows import attention_rows_bwd, attention_rows_fwd
from .tile_sizes import Config, config, short_config

__all__ = [
    "attention_bwd",
    "attention_fwd",
    "attention_rows_bwd",
    "attention_rows_fwd",
    "mask_layouts",
    "unsupported_reason",
]

_MAX_HEAD_DIM = 256


def unsupported_reason(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> str | None:
    """Why these kernels cannot run, or None. options: mask, dropout_p, softcap, return_weights, return_lse."""
    if max(q.shape[3], v.shape[3]) > _MAX_HEAD_DIM:
        return f"attention in Triton takes head dimensions up to {_MAX_HEAD_DIM}, got {q.shape[3]} and {v.shape[3]}"
    reason = unsupported_tensors("attention", query=q)
    return f"{NO_KERNEL} the weights" if reason is None and options[3] else reason


def mask_layouts(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, softcap: float | None = None
) -> tuple[Layout, ...]:
    """How the kernels read the mask: the forward's layout, then those of dq, which dbias shares, and of dk and dv. In
    short sequences the three gradients share one launch and one layout.

    Each holds the launch's Config: the kernel takes its tile from there.
    """
    arch, head_dim, seqlen_q, seqlen_k = gpu_arch(q), max(q.shape[3], v.shape[3]), q.shape[2], k.shape[2]
    forward = short_config("forward", arch, q.dtype, head_dim, seqlen_q, seqlen_k)
    forward = forward or config("forward", arch, q.dtype, head_dim, seqlen_q)
    first = _layout(False, forward.BLOCK_M, forward.BLOCK_N, seqlen_k, forward)
    if (short := short_config("backward", arch, q.dtype, head_dim, seqlen_q, seqlen_k)) is not None:
        return first, Layout(launch=short)
    dq = config("dq", arch, q.dtype, head_dim, seqlen_q)
    dkv = config("dkv", arch, q.dtype, head_dim, seqlen_k)
    return (
        first,
        _layout(False, dq.BLOCK_M, dq.BLOCK_N, seqlen_k, dq),
        _layout(True, dkv.BLOCK_N, dkv.BLOCK_M, seqlen_q, dkv),
    )


def _layout(by_key: bool, block_rows: int, block_columns: int, columns: int, launch: Config) -> Layout:
    """No lists if there is only one tile of columns: it is visited anyway. One tile of rows has lists: they need no
    extra launch, and there may be many columns, half of them padding."""
    return (
        Layout(by_key, 0, 0, launch) if columns <= block_columns else Layout(by_key, block_rows, block_columns, launch)
    )
