"""Attention between products: it reads heads from the rows of their results, and writes such rows.

projected   (B * L, rows): queries, keys and values of all heads, or the queries where the others are in `memory`
memory      keys and values of all heads, (B, Lk, rows) each, in contiguous rows, or nothing
sizes       B, L, n_head, n_head_kv, d_k, d_v
out         (B * L, n_head * d_v), contiguous, and so is dout
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

Sizes = tuple[int, ...]


def heads(projected: Tensor, memory: Sequence[Tensor], sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v (B, H, L, D), views."""
    B, L, H, Hk, Dk, Dv = sizes
    if memory:
        q, (k, v) = projected.view(B, L, H, Dk), memory
        k, v = k.view(B, k.shape[1], Hk, Dk), v.view(B, v.shape[1], Hk, Dv)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if H == Hk and Dk == Dv:
        q, k, v = projected.view(B, L, 3, H, Dk).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v
    q, k, v = projected.split((H * Dk, Hk * Dk, Hk * Dv), 1)
    q, k, v = (t.view(B, L, h, d).transpose(1, 2) for t, h, d in ((q, H, Dk), (k, Hk, Dk), (v, Hk, Dv)))
    return q, k, v


def by_formula(
    attention: Callable[..., Any], sizes: Sizes, mask: Any, options: Sequence[Any], projected: Tensor, *memory: Tensor
) -> Tensor:
    """out, by a function of q, k, v, mask and options whose first result is (B, H, L, Dv)."""
    out, *_ = attention(*heads(projected, memory, sizes), mask, *options)
    return out.transpose(1, 2).reshape(projected.shape[0], sizes[2] * sizes[5])
