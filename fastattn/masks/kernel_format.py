"""What the Triton and CUDA kernels read of an AttentionMask: the format, and how PyTorch's operators make it.

This code is the specification. It runs on a CPU and while a function is traced. On a GPU one Triton kernel makes the
same result (kernels/mask/).

A kernel has rows and columns. Rows are queries m and columns are keys n. If the blocks of a kernel own keys, rows are
keys and columns are queries. Row r may attend to column c if c is in the row's interval and the row's bit of c is set.
A bias is added on top.
The bits of a bool matrix and the tile lists grow with rows times columns. Everything else grows with the sequence
lengths only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Bits are stored in blocks of 128 columns, four words a block. Column 8 * j + 2 * c + e of a block (j < 16, c < 4,
# e < 2) is bit 2 * j + e of word c. The tensor core instructions mma.m16n8k16 and wgmma give a thread the columns
# 8 * j + 2 * (lane % 4) + e of the accumulator, so a thread finds all its columns of a row in one word.
BIT_BLOCK, BIT_WORDS = 128, 4
# Where a layout has classes, an entry of the lists is tile + (classes << CLASS_SHIFT). Bits 2 * i and 2 * i + 1 of the
# classes are whether some, and whether all, of the tile's block i are visible. Blocks are counted by rows.
CLASS_BLOCK, CLASS_SHIFT = 64, 20


class Layout(NamedTuple):
    """How a kernel reads a mask, and the launch that it is read by.

    by_key: rows are keys and columns are queries.
    block_rows, block_columns: the kernel's tile of the scores, if it needs lists of its tiles. 0 if it needs no lists
        and visits every tile in the band.
    launch: the backend's numbers of the launch, such as tile, warps and stages. It finds them again in the
        PreparedMask, so a launch never uses another tile than its lists. Nothing else reads them.
    has_classes: the lists also say which of a tile's CLASS_BLOCK x CLASS_BLOCK blocks are empty, partial or full.
    """

    by_key: bool = False
    block_rows: int = 0
    block_columns: int = 0
    launch: tuple[int, ...] = ()
    has_classes: bool = False


class PreparedMask(NamedTuple):
    """A mask as kernels read it. Tensors are int32 and contiguous; leading dimensions are (B or 1) and (H or 1).

    band_lo, band_hi: without intervals, row r may attend to the columns r + band_lo .. r + band_hi. An absent band is
        (-rows, columns).
    intervals (b, rows, 2): row r may attend to the columns begin <= c < end. They include the band, packed sequences
        and the padding of rows. An empty interval is (0, 0). None if the band alone restricts.
    columns (b, ceil(columns / 128), 4): bits of the columns that are read: no padding and, with packed sequences, part
        of a sequence. A kernel reads the other columns as 0, because they may hold NaN. None if all are read.
    bits (b, h, rows or 1, ceil(columns / 128), 4): bits of a bool matrix, combined with `columns`, or None.
    counts (b, h, row tiles, 2), tiles (b, h, row tiles, column tiles): for each row tile, `tiles` lists first the
        partial column tiles and then the full ones, each in ascending order. counts holds how many are partial, and how
        many are listed. The elements of a partial tile must be tested, those of a full tile need no test. A tile that
        is not listed has nothing visible. A ragged tile is partial. `tiles` may hold anything after the listed ones.
        None if the layout needs no lists, or if they follow from the band by arithmetic.
    layout: what the mask was prepared for.
    """

    band_lo: int
    band_hi: int
    intervals: Tensor | None = None
    columns: Tensor | None = None
    bits: Tensor | None = None
    counts: Tensor | None = None
    tiles: Tensor | None = None
    layout: Layout = Layout()

    @property
    def band_only(self) -> bool:
        """True if only the band restricts; which tiles are full then follows from arithmetic."""
        return self.intervals is None and self.columns is None and self.bits is None


def to_operator_args(masks: Iterable[PreparedMask]) -> tuple[list[Tensor], list[int]]:
    """Masks as arguments of a torch.library operator, which takes lists of tensors and integers only."""
    tensors: list[Tensor] = []
    numbers: list[int] = []
    for band_lo, band_hi, *fields, layout in masks:
        tensors += [t for t in fields if t is not None]
        numbers += [band_lo, band_hi, *(int(t is not None) for t in fields)]
        numbers += [int(layout.by_key), layout.block_rows, layout.block_columns, int(layout.has_classes)]
        numbers += [len(layout.launch), *layout.launch]
    return tensors, numbers


def from_operator_args(tensors: Sequence[Tensor], numbers: Sequence[int]) -> list[PreparedMask]:
    """The masks that ``to_operator_args`` was given."""
    next_tensor, next_number = iter(tensors), iter(numbers)
    masks = []
    for band_lo in next_number:
        band_hi = next(next_number)
        fields: list[Any] = [next(next_tensor) if next(next_number) else None for _ in range(5)]
        by_key, block_rows, block_columns, has_classes, length = (next(next_number) for _ in range(5))
        launch = tuple(next(next_number) for _ in range(length))
        layout = Layout(bool(by_key), block_rows, block_columns, launch, bool(has_classes))
        masks.append(PreparedMask._make((band_lo, band_hi, *fields, layout)))
    return masks


class Restriction(NamedTuple):
    """The parts of an AttentionMask by rows and columns, without its bias.

    bands: (low, high) counted from the first row and column, and from the last; None = no bound.
    row_offsets, column_offsets: cu_seqlens.
    row_padding (b, rows), column_padding (b, columns): bool, True = real.
    matrix (b, h, rows or 1, columns or 1): bool, True = attend.
    """

    bands: tuple[tuple[int | None, int | None], tuple[int | None, int | None]]
    row_offsets: Tensor | None = None
    column_offsets: Tensor | None = None
    row_padding: Tensor | None = None
    column_padding: Tensor | None = None
    matrix: Tensor | None = None

    def transposed(self) -> Restriction:
        """With rows and columns exchanged."""
        from_first, from_last = [
            (None if high is None else -high, None if low is None else -low) for low, high in self.bands
        ]
        offsets, paddings = (self.column_offsets, self.row_offsets), (self.column_padding, self.row_padding)
        return Restriction(
            (from_first, from_last), *offsets, *paddings, None if self.matrix is None else self.matrix.mT
        )


def prepare(
    mask: Restriction,
    rows: int,
    columns: int,
    block_rows: int,
    block_columns: int,
    has_classes: bool,
    device: torch.device,
) -> PreparedMask:
    """The mask as a kernel reads it, in the default layout. No operation waits for the device."""
    mask = matrix_of_one_row_as_padding(mask, columns)
    packed = mask.row_offsets is not None
    low, high = (-rows, columns) if packed else band_of(mask, rows, columns)
    has_intervals = packed or mask.row_padding is not None
    intervals = build_intervals(mask, rows, columns, device) if has_intervals or block_rows > 0 else None
    read_columns = mask.column_padding
    if packed:
        unpadded = Restriction(mask.bands, mask.row_offsets, mask.column_offsets)
        begin, end = build_intervals(unpadded.transposed(), columns, rows, device).unbind(-1)
        in_sequence = begin < end
        read_columns = in_sequence if read_columns is None else in_sequence & read_columns
    bits = None
    if mask.matrix is not None:
        matrix = mask.matrix.expand(-1, -1, -1, columns)
        bits = pack_bits(matrix if read_columns is None else matrix & read_columns[:, None, None])
    counts = tiles = None
    if intervals is not None and block_rows > 0 and (has_intervals or read_columns is not None or bits is not None):
        tile = block_rows, block_columns, has_classes
        counts, tiles = tile_lists(intervals, read_columns, mask.matrix, columns, *tile)
    column_bits = None if read_columns is None else pack_bits(read_columns)
    return PreparedMask(low, high, intervals if has_intervals else None, column_bits, bits, counts, tiles)


def band_of(mask: Restriction, rows: int, columns: int) -> tuple[int, int]:
    """(low, high), both in [-rows, columns]: row r may attend to the columns r + low .. r + high. Not if packed."""
    lows, highs = [-rows], [columns]
    for (low, high), shift in zip(mask.bands, (0, columns - rows), strict=True):
        if low is not None:
            lows.append(low + shift)
        if high is not None:
            highs.append(high + shift)
    return min(max(lows), columns), max(min(highs), -rows)


def build_intervals(mask: Restriction, rows: int, columns: int, device: torch.device | str) -> Tensor:
    """PreparedMask.intervals, from the band, packed sequences and the padding of rows."""
    row = torch.arange(rows, device=device)[None, :]
    begin, end = torch.zeros_like(row), torch.full_like(row, columns)
    shift_first: Tensor | int = 0
    shift_last: Tensor | int = columns - rows
    if mask.row_offsets is not None:
        sequence, first, length = locate_in_sequences(mask.row_offsets, row)
        # A row that is in no sequence gets an empty interval.
        edges = F.pad(mask.column_offsets.long(), (0, 1)).clamp(0, columns)
        begin, end = edges[sequence], edges[sequence + 1]
        shift_first = begin - first
        shift_last = shift_first + (end - begin) - length
    for (low, high), shift in zip(mask.bands, (shift_first, shift_last), strict=True):
        if low is not None:
            begin = torch.maximum(begin, row + (shift + low))
        if high is not None:
            end = torch.minimum(end, row + (shift + high + 1))
    if mask.row_padding is not None:
        end = torch.where(mask.row_padding, end, 0)
    both = torch.stack(torch.broadcast_tensors(begin, end), -1)
    return torch.where((begin < end)[..., None], both, 0).to(torch.int32).contiguous()


def locate_in_sequences(offsets: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each position its packed sequence (n if it is in none), and the sequence's begin and length. int64."""
    offsets = offsets.long()
    sequence = torch.searchsorted(offsets, position.contiguous(), right=True) - 1
    sequence = torch.where(sequence < 0, offsets.shape[0] - 1, sequence)
    edges = torch.cat([offsets, offsets[-1:]])
    return sequence, edges[sequence], edges[sequence + 1] - edges[sequence]


def pack_bits(keep: Tensor) -> Tensor:
    """Bool (..., columns) -> int32 (..., ceil(columns / 128), 4), contiguous, in the order described at BIT_BLOCK."""
    keep = F.pad(keep, (0, -keep.shape[-1] % BIT_BLOCK)).contiguous()
    words = keep.unflatten(-1, (-1, BIT_BLOCK // 8, BIT_WORDS, 2)).transpose(-3, -2)  # (.., block, word, j, e)
    bits = words.flatten(-2).unflatten(-1, (4, 8))
    if torch.compiler.is_compiling():  # before torch 2.13 Inductor has no view of these as another dtype
        in_bytes = (bits * (1 << torch.arange(8, dtype=torch.uint8, device=keep.device))).sum(-1, dtype=torch.uint8)
        shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=keep.device)
        return (in_bytes.int() << shifts).sum(-1, dtype=torch.int32)
    shifted = bits.view(torch.uint8) << torch.arange(8, dtype=torch.uint8, device=keep.device)
    return shifted.sum(-1, dtype=torch.uint8).view(torch.int32).squeeze(-1)


def matrix_of_one_row_as_padding(mask: Restriction, columns: int) -> Restriction:
    """With a matrix that all heads and rows share, (b, 1, 1, columns), as column_padding: it has the same effect."""
    matrix = mask.matrix
    if matrix is None or any(matrix.shape[i] > 1 and matrix.stride(i) > 0 for i in (1, 2)) or matrix.numel() == 0:
        return mask
    row = matrix[:, 0, 0].expand(-1, columns)
    padding = row if mask.column_padding is None else row & mask.column_padding
    return Restriction(mask.bands, mask.row_offsets, mask.column_offsets, mask.row_padding, padding)


def tile_lists(
    intervals: Tensor,
    read_columns: Tensor | None,
    matrix: Tensor | None,
    columns: int,
    block_rows: int,
    block_columns: int,
    has_classes: bool,
) -> tuple[Tensor, Tensor]:
    """PreparedMask.counts and tiles.

    Whether an interval meets a block is decided by the hull of the intervals of the block's rows. That is exact unless
    there are gaps between the rows' intervals.
    """
    height, width = (CLASS_BLOCK, CLASS_BLOCK) if has_classes else (block_rows, block_columns)
    rows, column_tiles = intervals.shape[1], -(-columns // block_columns)
    # Intervals after the last row are empty, so a ragged block is not full.
    padded = F.pad(intervals, (0, 0, 0, -rows % block_rows)).unflatten(1, (-1, height))
    begin, end = padded.unbind(-1)
    hull_begin, hull_end = torch.where(begin < end, begin, columns).amin(-1), end.amax(-1)
    first = torch.arange(0, column_tiles * block_columns, width, device=intervals.device)
    any_visible = (hull_begin[..., None] < first + width) & (hull_end[..., None] > first)
    all_visible = (begin.amax(-1)[..., None] <= first) & (end.amin(-1)[..., None] >= first + width)
    any_visible, all_visible = any_visible[:, None], all_visible[:, None]  # (b, h, row blocks, column blocks)
    if read_columns is not None:
        padded = F.pad(read_columns, (0, -columns % block_columns)).unflatten(1, (-1, width))
        any_visible = any_visible & padded.any(-1)[:, None, None]
        all_visible = all_visible & padded.all(-1)[:, None, None]
    if matrix is not None:
        any_visible = any_visible & _any_in_block(matrix, height, width, block_rows, block_columns)
        all_visible = all_visible & ~_any_in_block(~matrix, height, width, block_rows, block_columns)
    all_visible = any_visible & all_visible

    def of_tiles(of_blocks: Tensor) -> Tensor:
        """(b, h, row tiles, column tiles, blocks of a tile)"""
        parts = of_blocks.unflatten(3, (-1, block_columns // width)).unflatten(2, (-1, block_rows // height))
        return parts.transpose(3, 4).flatten(4)

    some, every = of_tiles(any_visible), of_tiles(all_visible)
    visited, full = some.any(-1), every.all(-1)
    order = torch.where(visited, full.to(torch.uint8), 2)  # 0 partial, 1 full, 2 not listed
    tiles = order.argsort(dim=-1, stable=True)
    counts = torch.stack((order == 0, visited), -1).sum(-2, dtype=torch.int32)
    if has_classes:
        places = torch.arange(CLASS_SHIFT, CLASS_SHIFT + 2 * some.shape[-1], 2, device=tiles.device)
        classes = ((some.long() + 2 * every.long()) << places).sum(-1)
        tiles = tiles + classes.gather(-1, tiles)
    return counts.contiguous(), tiles.to(torch.int32).contiguous()


def _any_in_block(matrix: Tensor, height: int, width: int, block_rows: int, block_columns: int) -> Tensor:
    """Bool (b, h, rows or 1, columns or 1) -> does a block hold a True: (b, h, row blocks or 1, column blocks or 1).

    As many blocks as whole tiles have.
    """
    rows, columns = matrix.shape[2:]
    height, block_rows = (height, block_rows) if rows != 1 else (1, 1)
    width, block_columns = (width, block_columns) if columns != 1 else (1, 1)
    padded = F.pad(matrix, (0, -columns % block_columns, 0, -rows % block_rows))
    return padded.unflatten(3, (-1, width)).unflatten(2, (-1, height)).any(5).any(3)
