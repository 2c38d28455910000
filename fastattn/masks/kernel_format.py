"""What the Triton and CUDA kernels read of an AttentionMask: its format, and how it is made, by PyTorch's operators.

On a GPU one Triton kernel makes the same (kernels/mask/); what is here is its specification, and what runs on a CPU and
while a function is traced.

A kernel works on rows and columns: rows are queries and columns keys or, for a kernel whose blocks own keys, the other
way round. Row r may attend to column c if its interval holds c and its bits have c; a bias is added on top.
Everything but the bits of a bool matrix and the tile lists is of the size of the sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Bits lie in blocks of 128 columns, four words a block: column 8 * j + 2 * c + e of a block (j < 16, c < 4, e < 2) is
# bit 2 * j + e of word c. The tensor cores' instructions mma.m16n8k16 and wgmma give a thread the columns
# 8 * j + 2 * (lane % 4) + e of their accumulators, so that it finds all its columns of a row in one word.
BIT_BLOCK, BIT_WORDS = 128, 4


class Layout(NamedTuple):
    """How a kernel wants to read a mask.

    by_key: its rows are keys and its columns queries. block_rows, block_columns: its tile of the scores, for which it
    wants lists; 0 where it visits every tile that the band leaves.
    """

    by_key: bool = False
    block_rows: int = 0
    block_columns: int = 0


class PreparedMask(NamedTuple):
    """A mask as kernels read it. Tensors are int32 and contiguous; leading dimensions are (B or 1) and (H or 1).

    band_lo, band_hi: without intervals, row r may attend to the columns r + band_lo .. r + band_hi. An absent band is
        (-rows, columns).
    intervals (b, rows, 2): row r may attend to the columns begin <= c < end. The band, packed sequences and the padding
        of rows are folded in; an empty interval is (0, 0). None: the band says it.
    columns (b, ceil(columns / 128), 4): bits of the columns that take part: no padding, and in a packed sequence where
        there are such. What the others hold may be NaN: a kernel reads it as 0. None: all take part.
    bits (b, h, rows or 1, ceil(columns / 128), 4): bits of a bool matrix, with `columns` folded in. None: no matrix.
    counts (b, h, row tiles, 2), tiles (b, h, row tiles, column tiles): of a row tile, `tiles` lists first the partial
        column tiles, then the full ones, each ascending; counts holds how many are partial, and how many are listed.
        A partial tile needs the tests of elements, a full one none; the others hold nothing. A ragged tile is partial.
        Past what is listed `tiles` may hold anything. None: no lists were asked for, or the band says it by arithmetic.
    """

    band_lo: int
    band_hi: int
    intervals: Tensor | None = None
    columns: Tensor | None = None
    bits: Tensor | None = None
    counts: Tensor | None = None
    tiles: Tensor | None = None

    @property
    def band_only(self) -> bool:
        """Whether the band alone restricts, so that it also says which tiles are full."""
        return self.intervals is None and self.columns is None and self.bits is None


def flatten(masks: Iterable[PreparedMask]) -> tuple[list[Tensor], list[int]]:
    """Their tensors, and three integers a mask: the arguments of an operator. ``unflatten`` is the way back."""
    tensors: list[Tensor] = []
    numbers: list[int] = []
    for low, high, *fields in masks:
        numbers += (low, high, sum(1 << i for i, t in enumerate(fields) if t is not None))
        tensors += [t for t in fields if t is not None]
    return tensors, numbers


def unflatten(tensors: Sequence[Tensor], numbers: Sequence[int]) -> tuple[PreparedMask, ...]:
    """The masks that ``flatten`` took apart."""
    left = iter(tensors)
    return tuple(
        PreparedMask(low, high, *(next(left) if given >> i & 1 else None for i in range(5)))
        for low, high, given in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
    )


class Restriction(NamedTuple):
    """The parts of an AttentionMask by rows and columns, its bias apart.

    bands: (low, high) counted from the first row and column, and from the last; None = no bound. row_offsets,
    column_offsets: cu_seqlens. row_padding, column_padding: bool (b, rows), (b, columns), True = real.
    matrix: bool (b, h, rows or 1, columns or 1), True = attend.
    """

    bands: tuple[tuple[int | None, int | None], tuple[int | None, int | None]]
    row_offsets: Tensor | None
    column_offsets: Tensor | None
    row_padding: Tensor | None
    column_padding: Tensor | None
    matrix: Tensor | None

    def transposed(self) -> Restriction:
        """With rows and columns exchanged."""

        def minus(bound: int | None) -> int | None:
            return None if bound is None else -bound

        from_first, from_last = ((minus(high), minus(low)) for low, high in self.bands)
        matrix = None if self.matrix is None else self.matrix.mT
        return Restriction(
            (from_first, from_last),
            self.column_offsets,
            self.row_offsets,
            self.column_padding,
            self.row_padding,
            matrix,
        )


def prepare(
    mask: Restriction, rows: int, columns: int, block_rows: int, block_columns: int, device: torch.device
) -> PreparedMask:
    """The mask as a kernel reads it. No operation waits for the device."""
    mask = matrix_of_one_row_as_padding(mask, columns)
    # A padding that is given transposed must not give its layout to what kernels read.
    paddings = (None if t is None else t.contiguous() for t in (mask.row_padding, mask.column_padding))
    mask = Restriction(mask.bands, mask.row_offsets, mask.column_offsets, *paddings, mask.matrix)
    packed = mask.row_offsets is not None
    low, high = (-rows, columns) if packed else band_of(mask, rows, columns)
    has_intervals = packed or mask.row_padding is not None
    intervals = build_intervals(mask, rows, columns, device) if has_intervals or block_rows > 0 else None
    taking_part = bits = None
    if packed:
        unpadded = Restriction(mask.bands, mask.row_offsets, mask.column_offsets, mask.row_padding, None, mask.matrix)
        begin, end = build_intervals(unpadded.transposed(), columns, rows, device).unbind(-1)
        taking_part = begin < end
    if mask.column_padding is not None:
        taking_part = mask.column_padding if taking_part is None else taking_part & mask.column_padding
    if mask.matrix is not None:
        matrix = mask.matrix.expand(-1, -1, -1, columns)
        bits = pack_bits(matrix if taking_part is None else matrix & taking_part[:, None, None])
    counts = tiles = None
    if intervals is not None and block_rows > 0 and (has_intervals or taking_part is not None or bits is not None):
        some, every = _classify(intervals, taking_part, mask.matrix, columns, block_rows, block_columns)
        counts, tiles = _list(some, every)
    packed_columns = None if taking_part is None else pack_bits(taking_part)
    return PreparedMask(low, high, intervals if has_intervals else None, packed_columns, bits, counts, tiles)


def band_of(mask: Restriction, rows: int, columns: int) -> tuple[int, int]:
    """(low, high) of sequences that are not packed: row r may attend to the columns r + low .. r + high; both lie in
    [-rows, columns]."""
    (low, high), (low_from_last, high_from_last) = mask.bands
    shift = columns - rows
    lows = [-rows, *(n for n in (low, None if low_from_last is None else low_from_last + shift) if n is not None)]
    highs = [columns, *(n for n in (high, None if high_from_last is None else high_from_last + shift) if n is not None)]
    return min(max(lows), columns), max(min(highs), -rows)


def build_intervals(mask: Restriction, rows: int, columns: int, device: torch.device) -> Tensor:
    """PreparedMask.intervals: band, packed sequences and the padding of rows; not that of columns."""
    row = torch.arange(rows, device=device)[None, :]
    begin, end = torch.zeros_like(row), torch.full_like(row, columns)
    shift_first: Tensor | int = 0
    shift_last: Tensor | int = columns - rows
    if mask.row_offsets is not None:
        sequence, first, length = sequences(mask.row_offsets, row)
        # Rows of no sequence get an empty interval.
        edges = F.pad(mask.column_offsets.long(), (0, 1)).clamp(0, columns)
        begin, end = edges[sequence], edges[sequence + 1]
        shift_first = begin - first
        shift_last = shift_first + (end - begin) - length
    for (low, high), shift in zip(mask.bands, (shift_first, shift_last), strict=True):
        if low is not None:
            begin = torch.maximum(begin, row + shift + low)
        if high is not None:
            end = torch.minimum(end, row + shift + high + 1)
    if mask.row_padding is not None:
        end = torch.where(mask.row_padding, end, 0)
    both = torch.stack(torch.broadcast_tensors(begin, end), -1)
    return torch.where((begin < end)[..., None], both, 0).to(torch.int32)


def sequences(offsets: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per position: its packed sequence (n for positions in none), where that begins, and its length. int64."""
    offsets = offsets.long()
    sequence = torch.searchsorted(offsets, position.contiguous(), right=True) - 1
    sequence = torch.where(sequence < 0, offsets.shape[0] - 1, sequence)
    edges = torch.cat([offsets, offsets[-1:]])
    return sequence, edges[sequence], edges[sequence + 1] - edges[sequence]


def pack_bits(keep: Tensor) -> Tensor:
    """Bool (..., columns) -> int32 (..., ceil(columns / 128), 4), in the order that is said at BIT_BLOCK."""
    keep = F.pad(keep, (0, -keep.shape[-1] % BIT_BLOCK))
    words = keep.unflatten(-1, (-1, BIT_BLOCK // 8, BIT_WORDS, 2)).transpose(-3, -2)  # (.., block, word, j, e)
    of_bytes = words.flatten(-2).unflatten(-1, (4, 8)).view(torch.uint8)
    shifted = of_bytes << torch.arange(8, dtype=torch.uint8, device=keep.device)
    return shifted.sum(-1, dtype=torch.uint8).view(torch.int32).squeeze(-1)


def matrix_of_one_row_as_padding(mask: Restriction, columns: int) -> Restriction:
    """A matrix that all heads and rows share, (b, 1, 1, columns), hides columns as padding does."""
    matrix = mask.matrix
    if matrix is None or any(matrix.shape[i] > 1 and matrix.stride(i) > 0 for i in (1, 2)):
        return mask
    if matrix.numel() == 0:
        return mask
    row = matrix[:, 0, 0].expand(-1, columns)
    padding = row if mask.column_padding is None else row & mask.column_padding
    return Restriction(mask.bands, mask.row_offsets, mask.column_offsets, mask.row_padding, padding, None)


def _classify(
    intervals: Tensor,
    taking_part: Tensor | None,
    matrix: Tensor | None,
    columns: int,
    block_rows: int,
    block_columns: int,
) -> tuple[Tensor, Tensor]:
    """Bool (b, h, row tiles, column tiles), twice: does a tile hold anything, and does it hold everything.

    The first is said by the hull of the intervals of a tile's rows: exact but for rows with gaps between them.
    """
    rows, column_tiles = intervals.shape[1], -(-columns // block_columns)
    # Past the last row intervals are empty, so that a ragged tile is not full.
    padded = F.pad(intervals, (0, 0, 0, -rows % block_rows)).unflatten(1, (-1, block_rows))
    begin, end = padded.unbind(-1)
    hull_begin, hull_end = torch.where(begin < end, begin, columns).amin(-1), end.amax(-1)
    first = torch.arange(column_tiles, device=intervals.device) * block_columns
    some = (hull_begin[..., None] < first + block_columns) & (hull_end[..., None] > first)
    every = (begin.amax(-1)[..., None] <= first) & (end.amin(-1)[..., None] >= first + block_columns)
    some, every = some[:, None], every[:, None]
    if taking_part is not None:
        real = F.pad(taking_part, (0, -columns % block_columns)).unflatten(1, (column_tiles, block_columns))
        some, every = some & real.any(-1)[:, None, None], every & real.all(-1)[:, None, None]
    if matrix is not None:
        some = some & _any_in_tile(matrix, block_rows, block_columns)
        every = every & ~_any_in_tile(~matrix, block_rows, block_columns)
    return some, every & some


def _any_in_tile(matrix: Tensor, block_rows: int, block_columns: int) -> Tensor:
    """Bool (b, h, rows or 1, columns or 1) -> does a tile hold a True, (b, h, row tiles or 1, column tiles or 1)."""
    rows, columns = matrix.shape[2:]
    block_rows, block_columns = (block_rows if rows != 1 else 1), (block_columns if columns != 1 else 1)
    padded = F.pad(matrix, (0, -columns % block_columns, 0, -rows % block_rows))
    return padded.unflatten(3, (-1, block_columns)).unflatten(2, (-1, block_rows)).any(5).any(3)


def _list(some: Tensor, every: Tensor) -> tuple[Tensor, Tensor]:
    """PreparedMask.counts and tiles."""
    order = torch.where(some, every.to(torch.uint8), 2)  # partial, full, neither
    tiles = order.argsort(dim=-1, stable=True).to(torch.int32)
    counts = torch.stack((order == 0, some), -1).sum(-2, dtype=torch.int32)
    return counts.contiguous(), tiles.contiguous()
