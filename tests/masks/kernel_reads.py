"""A prepared mask, read as a kernel reads it: see fastattn/masks/kernel_format.py."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.masks import Layout, PreparedMask
from fastattn.masks.kernel_format import CLASS_BLOCK, CLASS_SHIFT

# With the classes of 64 x 64 blocks, as Hopper's forward and backward read them.
CLASSES = [Layout(False, 192, 128, (), True), Layout(True, 128, 128, (), True), Layout(True, 128, 64, (), True)]
LAYOUTS = [Layout(by_key, *tile) for by_key in (False, True) for tile in ((0, 0), (4, 4), (8, 2), (16, 128))] + CLASSES


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
        _check_lists(prepared, truth, layout)


def _check_lists(prepared: PreparedMask, truth: Tensor, layout: Layout) -> None:
    """Every full tile is listed as full, every other one that holds something as partial, each in ascending order."""
    B, H, rows, columns = truth.shape
    block_rows, block_columns = layout[1:3]
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
        if layout.has_classes:
            for entry in listed[:num_listed]:
                _check_classes(entry >> CLASS_SHIFT, padded[b, h, i, :, entry % 2**CLASS_SHIFT])
            listed = [entry % 2**CLASS_SHIFT for entry in listed]
        partial, full = listed[:num_partial], listed[num_partial:num_listed]
        assert partial == sorted(partial) and full == every[b, h, i].nonzero().flatten().tolist()
        missed = set(some[b, h, i].nonzero().flatten().tolist()) - set(partial + full)
        assert not missed, "a tile that holds something is skipped"


def _check_classes(classes: int, tile: Tensor) -> None:
    """tile: bool (rows, columns)."""
    blocks = (
        tile.unflatten(1, (-1, CLASS_BLOCK)).unflatten(0, (-1, CLASS_BLOCK)).transpose(1, 2).flatten(2).flatten(0, 1)
    )
    for place, block in enumerate(blocks):
        some, every = classes >> 2 * place & 1, classes >> 2 * place & 2
        assert some >= block.any() and bool(every) == block.all()
