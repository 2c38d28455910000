"""The tile lists of an AttentionMask: which tiles of the scores hold work, and which of them need element masks."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Tiles(NamedTuple):
    """Which tiles of the score matrix hold work. int32, leading dimensions (B or 1, H or 1).

    num_* (.., nQ): how many key tiles a query tile visits; the lists (.., nQ, nK) hold their indices, ascending, in the
    first num_* places. A partial tile needs the element masks, a full one needs none.
    *_t is the transpose: the query tiles of a key tile, (.., nK) and (.., nK, nQ).
    """

    num_partial: Tensor
    partial: Tensor
    num_full: Tensor
    full: Tensor
    num_partial_t: Tensor
    partial_t: Tensor
    num_full_t: Tensor
    full_t: Tensor


def build_tiles(
    k_start: Tensor,
    k_end: Tensor,
    Lk: int,
    key_padding: Tensor | None,
    attn_mask: Tensor | None,
    BLOCK_M: int,
    BLOCK_N: int,
) -> Tiles:
    """k_start, k_end (B or 1, Lq): AttentionMask.intervals; key_padding and attn_mask as AttentionMask keeps them."""
    b, Lq = k_start.shape
    pad_q, pad_k = -Lq % BLOCK_M, -Lk % BLOCK_N
    nQ, nK = (Lq + pad_q) // BLOCK_M, (Lk + pad_k) // BLOCK_N
    # Rows past the end get an empty interval, so ragged tiles are never full.
    start, end = (F.pad(t, (0, pad_q)).view(b, 1, nQ, 1, BLOCK_M) for t in (k_start, k_end))
    first = torch.arange(nK, device=k_start.device).view(nK, 1) * BLOCK_N
    some = (torch.maximum(start, first) < torch.minimum(end, first + BLOCK_N)).any(-1)  # (b, 1, nQ, nK)
    every = ((start <= first) & (end >= first + BLOCK_N)).all(-1)
    if key_padding is not None:
        keys = F.pad(key_padding, (0, pad_k)).view(len(key_padding), 1, 1, nK, BLOCK_N)
        some, every = some & keys.any(-1), every & keys.all(-1)
    if attn_mask is not None:
        some = some & _any_in_tile(attn_mask, BLOCK_M, BLOCK_N)
        every = every & ~_any_in_tile(~attn_mask, BLOCK_M, BLOCK_N)
    full = some & every
    lists = (_compact(flags) for flags in (some & ~every, full, (some & ~every).mT, full.mT))
    return Tiles(*(t for pair in lists for t in pair))


def _any_in_tile(mask: Tensor, BLOCK_M: int, BLOCK_N: int) -> Tensor:
    """Bool (b, h, Lq or 1, Lk or 1) -> does a tile hold a True, (b, h, nQ or 1, nK or 1)."""
    rows, cols = mask.shape[2:]
    block_m, block_n = (BLOCK_M if rows != 1 else 1), (BLOCK_N if cols != 1 else 1)
    padded = F.pad(mask, (0, -cols % block_n, 0, -rows % block_m))
    return padded.unflatten(3, (-1, block_n)).unflatten(2, (-1, block_m)).any(5).any(3)


def _compact(flags: Tensor) -> tuple[Tensor, Tensor]:
    """Bool (.., n) -> how many are set, int32 (..), and their indices, ascending and first, int32 (.., n)."""
    order = torch.argsort(flags.to(torch.uint8), dim=-1, descending=True, stable=True)
    return flags.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()
