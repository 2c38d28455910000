"""A prepared mask, read as a kernel reads it: see fastattn/masks/kernel_format.py."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.masks import Layout, PreparedMask

LAYOUTS = [Layout(by_key, *tile) for by_key in (False, True) for tile in ((0, 0), (4, 4), (8, 2), (16, 128))]


def unpacked(words: Tensor, columns: int) -> Tensor:
    """Bits as bool (..., columns)."""
    column = torch.arange(columns)
    word = words[..., column // 128, column % 8 // 2]
    return (word >> (column % 128 // 8 * 2 + column % 2)) & 1 == 1


def visible(prepared: PreparedMask, rows: int, columns: int) -> Tensor:
    """Bool, broadcast to (B, H, rows, columns)."""
    row, column = torch.arange(rows)[:, None], torch.arange(columns)[None]
    keep = ((column - row >= prepared.band_lo) & (column - row <= prepared.band_hi))[None, None]
    if prepared.intervals is not None:
        keep = ((column >= prepared.intervals[..., :1]) & (column < prepared.intervals[..., 1:]))[:, None]
    if prepared.bits is not None:
        return keep & unpacked(prepared.bits, columns)
    return keep if prepared.columns is None else keep & unpacked(prepared.columns, columns)[:, None, None]


def check(prepared: PreparedMask, keep: Tensor) -> None:
    """What a kernel reads is `keep`, bool (B, H, Lq, Lk), by rows and by tiles."""
    layout, truth = prepared.layout, keep.mT if prepared.layout.by_key else keep
    B, H, rows, columns = truth.shape
    for t in prepared[2:7]:
        assert t is None or (t.dtype == torch.int32 and t.is_contiguous() and t.shape[0] in (1, B))
    assert torch.equal(visible(prepared, rows, columns).expand(truth.shape), truth), layout
    if prepared.columns is not None:
        assert not (truth & ~unpacked(prepared.columns, columns)[:, None, None]).any(), layout
    if layout.block_rows > 0 and not prepared.band_only:
        _check_lists(prepared, truth, layout.block_rows, layout.block_columns)


def _check_lists(prepared: PreparedMask, truth: Tensor, block_rows: int, block_columns: int) -> None:
    """Every full tile is listed as full, every other one that holds something as partial, each in ascending order."""
    B, H, rows, columns = truth.shape
    row_tiles, column_tiles = -(-rows // block_rows), -(-columns // block_columns)
    padded = torch.zeros(B, H, row_tiles * block_rows, column_tiles * block_columns, dtype=torch.bool)
    padded[:, :, :rows, :columns] = truth
    padded = padded.view(B, H, row_tiles, block_rows, column_tiles, block_columns)
    some, every = padded.any(5).any(3), padded.all(5).all(3)
    counts = prepared.counts.expand(B, H, row_tiles, 2)
    tiles = prepared.tiles.expand(B, H, row_tiles, column_tiles)
    for at in torch.cartesian_prod(*(torch.arange(n) for n in (B, H, row_tiles))).tolist():
        b, h, i = at
        num_partial, num_listed = counts[b, h, i].tolist()
        listed = tiles[b, h, i].tolist()
        partial, full = listed[:num_partial], listed[num_partial:num_listed]
        assert partial == sorted(partial) and full == every[b, h, i].nonzero().flatten().tolist()
        missed = set(some[b, h, i].nonzero().flatten().tolist()) - set(partial + full)
        assert not missed, "a tile that holds something is skipped"
