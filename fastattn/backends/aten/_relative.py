"""A bias by distance on a CPU, without a tensor of all scores: relative_bias[h, n - m + Lq - 1] for query m and key n.

With the queries in reverse order, query i of them is m = Lq - 1 - i, and the place is n + i: a bias that PyTorch reads
as a view with the strides (1, 1), which needs no memory. So a call with such a bias computes the blocks of the mask
with the queries reversed: `reverse_queries` of q and of the result, `reversed_blocks` of the mask.

The gradient is the sum of dS over its diagonals, here those with one n + i: dS is copied into rows with as many zeros
as there are rows, which a view with rows one number shorter turns into columns (`add_diagonals`), block by block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.backends.aten._visible import Block, Visible
from fastattn.masks import AttentionMask


def bias_of_block(relative_bias: Tensor, block: Block) -> Tensor:
    """What is added to the scores of a block, (1, heads, rows, keys). relative_bias: (H, Lq + Lk - 1)."""
    _, heads, rows, keys, *_ = block
    bias = relative_bias[heads, rows.start + keys.start :]
    sizes = 1, heads.stop - heads.start, rows.stop - rows.start, keys.stop - keys.start
    return bias.as_strided(sizes, (0, bias.stride(0), 1, 1))


def add_diagonals(total: Tensor, block: Block, dscores: Tensor) -> None:
    """Adds a block's part to the gradient, total (H, Lq + Lk - 1). dscores: (sentences * heads, rows, keys)."""
    _, heads, rows, keys, *_ = block
    first, count, length, width = (
        rows.start + keys.start,
        heads.stop - heads.start,
        rows.stop - rows.start,
        keys.stop - keys.start,
    )
    dscores = dscores.view(-1, count, length, width)
    summed = dscores.sum(0, dtype=total.dtype) if len(dscores) > 1 else dscores[0]
    diagonals = length + width - 1
    skewed = F.pad(summed, (0, length)).as_strided((count, length, diagonals), (length * (diagonals + 1), diagonals, 1))
    total[heads, first : first + diagonals] += skewed.sum(1, dtype=total.dtype)


def without_band(mask: AttentionMask, Lq: int, Lk: int) -> AttentionMask | None:
    """The mask with its band in relative_bias, as -inf. None where it is no band alone, or leaves a query no key."""
    if not (mask.band_only and mask.has_band):
        return None
    low, high = mask.band(Lq, Lk)
    if not (low <= high and high >= 0 and Lq - 1 + low <= Lk - 1):
        return None
    distance = torch.arange(1 - Lq, Lk)
    bias = mask.relative_bias.masked_fill((distance < low) | (distance > high), -torch.inf)
    return mask.without_band().with_relative_bias(bias)


def of_all_distances(relative_bias: Tensor, L: int) -> Tensor:
    """That of L packed tokens, whose distances count inside their sequences, with zeros for longer distances."""
    missing = L - 1 - relative_bias.shape[1] // 2
    return F.pad(relative_bias, (missing, missing))


def reverse_queries(t: Tensor) -> Tensor:
    """(B, H, Lq, D)"""
    return t.flip(2)


def reversed_blocks(visible: Visible, Lq: int) -> Visible:
    """The blocks with the queries in reverse order. None of them is_causal."""
    blocks = []
    for block in visible.blocks:
        rows = slice(Lq - block.rows.stop, Lq - block.rows.start)
        masked = block.score_mask
        masked = masked.flip(2) if masked is not None and masked.shape[2] > 1 else masked
        blocks.append(block._replace(rows=rows, score_mask=masked))
    has_keys = None if visible.has_keys is None else visible.has_keys.flip(2)
    splits = visible.splits if len(blocks) == 1 else None
    return visible._replace(blocks=blocks, splits=splits, has_keys=has_keys)
