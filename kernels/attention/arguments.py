"""From tensors and an AttentionMask to the arguments that every attention kernel takes, under one set of names.

A launch takes some seventy of them, by name; what can be known beforehand is cached, because microseconds add up.
"""

import functools
from typing import Any

import torch
import triton
from torch import Tensor

from fastattn.masks import AttentionMask

from ..common.launch import dot_precision
from ..common.philox import dropout_constants
from .config import Config
from .lists import intervals, tile_lists
from .seen import seen_keys


@functools.cache
def padded_head_dim(head_dim: int) -> int:
    """Columns of a tile in registers: tl.dot and tl.arange want a power of two, and at least 16."""
    return max(16, triton.next_power_of_2(head_dim))


def empty_like(x: Tensor, head_dim: int) -> Tensor:
    """Uninitialised (B, H, L, head_dim) in x's memory order: (B, L, H, D) when x comes as a view of that."""
    B, H, L, _ = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty(B, L, H, head_dim).transpose(1, 2)
    return x.new_empty(B, H, L, head_dim)


def strides(rows: str, **tensors: Tensor) -> dict[str, int]:
    """strides("m", q=q) -> q_stride_b, q_stride_h, q_stride_m. The last dimension has stride 1."""
    named: dict[str, int] = {}
    for name, t in tensors.items():
        named.update(zip(_names(name, "bh" + rows), t.stride(), strict=False))
    return named


def problem(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> dict[str, Any]:
    """Sizes, and what follows from them alone."""
    return {
        "num_heads": q.shape[1],
        "group": q.shape[1] // max(k.shape[1], 1),  # query heads that share a key head
        "seqlen_q": q.shape[2],
        "seqlen_k": k.shape[2],
        "softmax_scale": softmax_scale,
        "HEAD_DIM_K": q.shape[3],
        "HEAD_DIM_V": v.shape[3],
        "BLOCK_DK": padded_head_dim(q.shape[3]),
        "BLOCK_DV": padded_head_dim(v.shape[3]),
        "PRECISION": dot_precision(q.dtype),
    }


def visibility(q: Tensor, k: Tensor, mask: AttentionMask | None, softmax_scale: float) -> dict[str, Any]:
    """Who sees whom, and the bias. Absent tensors are None, their strides 0. Launches a kernel unless it is cached."""
    Lq, Lk = q.shape[2], k.shape[2]
    lists = mask is not None and not mask.band_only
    band = mask.band(Lq, Lk) if mask is not None and not lists else None
    k_start, k_end = intervals(mask, Lq, Lk, q.device) if lists else (None, None)
    attn_mask, bias = (None, None) if mask is None else (mask.attn_mask, mask.bias)
    who = {
        "band_lo": -Lq if band is None else band[0],
        "band_hi": Lk if band is None else band[1],
        "k_start_ptr": k_start,
        "k_end_ptr": k_end,
        "interval_stride_b": _broadcast_strides(k_start, "b")[0],
        "attn_mask_ptr": attn_mask,
        **_named("attn_mask", "bhmn", _broadcast_strides(attn_mask, "bhmn")),
        "bias_ptr": bias,
        **_named("bias", "bhmn", _broadcast_strides(bias, "bhmn")),
        "LISTS": lists,
        "HAS_ATTN_MASK": attn_mask is not None,
        "HAS_BIAS": bias is not None,
    }
    seen = seen_keys(mask, Lq, Lk, q.device, who) if lists or bias is not None else None
    return {
        **who,
        "seen_ptr": seen,
        **_named("seen", "bh", _broadcast_strides(seen, "bh")),
        # Folding the scale into the exponent's unit needs a maximum that commutes with it and nothing added after it,
        # and rounds once more than float32 would like.
        "FOLD_SCALE": bias is None and softmax_scale > 0 and q.dtype != torch.float32,
    }


def visits(mask: AttentionMask | None, q: Tensor, k: Tensor, c: Config, by_key: bool) -> dict[str, Any]:
    """Tile lists for a kernel that walks along the keys of a query tile or, by_key, the queries of a key tile."""
    names = ("num_partial_ptr", "partial_ptr", "num_full_ptr", "full_ptr")
    lists = (None,) * 4
    if mask is not None and not mask.band_only:
        tiles = tile_lists(mask, q.shape[2], k.shape[2], c.BLOCK_M, c.BLOCK_N, q.device)
        lists = tiles[4:] if by_key else tiles[:4]
    return dict(zip(names, lists, strict=True)) | _named("tiles", "bh", _broadcast_strides(lists[0], "bh"))


def dropout(dropout_p: float, rng_state: Tensor | None) -> dict[str, Any]:
    """The dropout rule's. rng_state: int64 (seed, offset), or None without dropout."""
    threshold, scale = dropout_constants(dropout_p)
    return {
        "rng_state_ptr": rng_state,
        "dropout_threshold": threshold,
        "dropout_scale": scale,
        "HAS_DROPOUT": rng_state is not None,
    }


def _broadcast_strides(t: Tensor | None, dims: str) -> tuple[int, ...]:
    """The strides of the first dimensions, 0 along those of size 1: they are broadcast."""
    if t is None:
        return (0,) * len(dims)
    return tuple(t.stride(i) if t.shape[i] > 1 else 0 for i in range(len(dims)))


def _named(tensor: str, dims: str, strides: tuple[int, ...]) -> dict[str, int]:
    return dict(zip(_names(tensor, dims), strides, strict=True))


@functools.cache
def _names(tensor: str, dims: str) -> tuple[str, ...]:
    return tuple(f"{tensor}_stride_{dim}" for dim in dims)
