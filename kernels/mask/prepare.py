"""What attention's kernels read of a mask, in one launch. Specification: fastattn/masks/kernel_format.py

    intervals_r = the columns that row r may attend to, by band, packed sequences and the padding of rows
    columns_c   = column c is no padding and, where sequences are packed, visible to some row
    bits_rc     = matrix_rc and columns_c
    tiles       = of a tile of rows, the column tiles that hold something: partial ones, then full ones, each ascending

Grid: one program per (batch, head, slot). Slot i owns tile i of the rows: their intervals, their bits of the matrix and
their list. It also owns block i of 128 columns, of which it writes the bits. No two programs write one element.
A program sweeps the columns in spans, of 128 with a matrix and of 1024 without. It visits the spans that the hull of
its rows' intervals meets, or all of them where it writes bits of a matrix. In each it finds what is visible in every
block: a tile, or with Layout.has_classes 64 x 64 of it. So it classifies every column tile as empty, partial or full,
and writes the class to `tiles`, with those of the blocks. At the end it reads the classes, numbers the partial and the
full tiles, and writes the list over them. After the list, `tiles` keeps the classes.
Packed sequences: the sequence of a row or column is found in cu_seqlens by bisection.
Registers: at most 64 rows of the matrix by 128 columns, and a class for each column tile. Offsets are 64-bit.
Bytes: a matrix once, a byte an element, and its bits, 1/8 of that. Without a matrix 8 bytes a row, and the
padding of the visited columns once per tile of rows, from L2: less than what a launch costs.
Lengths and the strides of paddings are not specialised: batches of all lengths share a compiled kernel.
Compiled offline with triton 3.6, sm_90a: packed sequences with padding 22 registers; a matrix in tiles of 128 x 64 105
and, transposed, 217, with loads of 16 bytes where 16 divides the lengths. Nothing spills. In tiles of 128 x 128, as the
CUDA kernels have them, with classes, 128 and, transposed, 239.
H200, a matrix (8, 1, 2048, 2048), 34 MB, 128 programs: tiles of 192 x 128 65 us, of 128 x 128 45, transposed 109. One
matrix for all samples and heads, (1, 1, L, L), has L / 128 programs with more columns each: not timed. Its mask is
prepared once, and attention to it takes milliseconds a layer.
Tried and dropped:
    lengths outside of Matrix: each byte of a matrix was loaded by itself;
    8 warps for a matrix, 64 or 127 registers: as many bytes in flight, and a spilled register.
Not tried: a second sweep that writes the lists would read a matrix twice; with counters in memory lists would not be
ascending.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.masks import kernel_format
from fastattn.masks.kernel_format import PreparedMask, Restriction, band_of, matrix_of_one_row_as_padding

from ..common.launch import LIMIT, Launches, addresses, specialization

BIT_BLOCK, BIT_WORDS = tl.constexpr(kernel_format.BIT_BLOCK), tl.constexpr(kernel_format.BIT_WORDS)
CLASS_BLOCK, CLASS_SHIFT = tl.constexpr(kernel_format.CLASS_BLOCK), tl.constexpr(kernel_format.CLASS_SHIFT)
ROWS_WITHOUT_LISTS = 64
SPAN_WITHOUT_MATRIX = 1024
MIN_TILES = 128  # every list has room for these, one a thread, so short lengths share a compiled kernel


class Matrix(NamedTuple):
    """Bool (b, h, rows or 1, columns or 1). Strides are 0 along dimensions of size 1.

    rows and columns once more: within a tuple Triton learns whether 16 divides them, and can then load vectors.
    """

    ptr: Tensor
    stride_b: int
    stride_h: int
    stride_row: int
    stride_column: int
    rows: int
    columns: int


@triton.jit
def interval_of(position, own_offsets, other_offsets, own_length, other_length, num_sequences, steps, bands):
    """(begin, end), shaped as position: what it may attend to by bands and packed sequences; (0, 0) if that is nothing.

    own_offsets, other_offsets: cu_seqlens, or None. steps: bits of num_sequences + 1. bands: (low, high) from the first
    position and from the last.
    """
    low_first, high_first, low_last, high_last = bands
    begin = position * 0
    end = begin + other_length
    shift_first = begin
    shift_last = begin + (other_length - own_length)
    if own_offsets is not None:
        passed = begin  # how many of the num_sequences + 1 offsets are at most position
        for i in range(steps):
            probe = passed + (1 << (steps - 1 - i))
            inside = probe <= num_sequences + 1
            offset = tl.load(own_offsets + probe - 1, mask=inside, other=0)
            passed = tl.where(inside & (offset <= position), probe, passed)
        known = (passed > 0) & (passed <= num_sequences)
        own_begin = tl.load(own_offsets + passed - 1, mask=known, other=0).to(tl.int32)
        own_end = tl.load(own_offsets + passed, mask=known, other=0).to(tl.int32)
        begin = tl.load(other_offsets + passed - 1, mask=known, other=0).to(tl.int32)
        end = tl.load(other_offsets + passed, mask=known, other=0).to(tl.int32)
        # On a GPU these values were not checked.
        begin = tl.minimum(tl.maximum(begin, 0), other_length)
        end = tl.minimum(tl.maximum(end, 0), other_length)
        shift_first = begin - own_begin
        shift_last = end - own_end
    begin = tl.maximum(begin, position + tl.maximum(shift_first + low_first, shift_last + low_last))
    end = tl.minimum(end, position + tl.minimum(shift_first + high_first, shift_last + high_last) + 1)
    holds = (begin < end) & (position < own_length)
    return tl.where(holds, begin, 0), tl.where(holds, end, 0)


@triton.jit
def readable_columns(column, b, padding, row_offsets, column_offsets, rows, columns, num_sequences, steps, bands):
    """Bool, shaped as column: no padding, and in a packed sequence with a row that may attend to it.

    padding: a bool (b, columns), or None, and its strides.
    """
    real = column < columns
    padding_ptr, stride_b, stride = padding
    if padding_ptr is not None:
        ptrs = padding_ptr + b * stride_b + column.to(tl.int64) * stride
        real = real & (tl.load(ptrs, mask=real, other=0) != 0)
    if row_offsets is not None:
        low_first, high_first, low_last, high_last = bands
        bands = (-high_first, -low_first, -high_last, -low_last)
        begin, end = interval_of(column, column_offsets, row_offsets, columns, rows, num_sequences, steps, bands)
        real = real & (begin < end)
    return real


@triton.jit
def pack(keep, ROWS: tl.constexpr):
    """Bool [ROWS, 128] -> int32 [ROWS, 4]: column 8 * j + 2 * c + e is bit 2 * j + e of word c."""
    keep = tl.reshape(keep.to(tl.int32), (ROWS, BIT_BLOCK // 8, BIT_WORDS, 2))
    bit = 2 * tl.arange(0, BIT_BLOCK // 8)[None, :, None, None] + tl.arange(0, 2)[None, None, None, :]
    return tl.sum(tl.sum(keep << bit, axis=3), axis=1)


@triton.jit
def lowest(x, DOWN: tl.constexpr):
    """The smallest number of each block of rows, (DOWN, 1), or of all as a scalar."""
    if DOWN > 1:
        found = tl.min(tl.reshape(x, (DOWN, x.shape[0] // DOWN)), axis=1)[:, None]
    else:
        found = tl.min(x, axis=0)
    return found


@triton.jit(
    do_not_specialize=[
        *("slots", "rows", "columns", "num_sequences", "steps", "low_first", "high_first", "low_last", "high_last"),
        *("row_stride_b", "row_stride", "column_stride_b", "column_stride", "num_heads"),
        *("intervals_batch", "columns_batch", "bits_batch"),
    ]
)
def prepare_mask_kernel(
    # Bool paddings (b, rows) and (b, columns), cu_seqlens of rows and columns, a Matrix; each may be None.
    row_padding, column_padding, row_offsets, column_offsets, matrix,
    # PreparedMask's tensors, contiguous; each may be None.
    intervals, column_bits, bits, counts, tiles,
    row_stride_b, row_stride, column_stride_b, column_stride, num_heads, intervals_batch, columns_batch, bits_batch,
    slots, rows, columns, num_sequences, steps, low_first, high_first, low_last, high_last,
    # A tile of rows, and a power of two that holds it; its rows of the matrix, and how many of them are read at once;
    # a tile of columns, how many are in a span, and a power of two that holds all; Layout.has_classes.
    BLOCK_ROWS: tl.constexpr, ROWS: tl.constexpr, TILE_ROWS: tl.constexpr, MATRIX_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, TILES: tl.constexpr, MAX_TILES: tl.constexpr,
    HAS_CLASSES: tl.constexpr,
):  # fmt: skip
    SPAN: tl.constexpr = TILES * BLOCK_COLUMNS
    HEIGHT: tl.constexpr = CLASS_BLOCK if HAS_CLASSES else ROWS  # of a block
    WIDTH: tl.constexpr = CLASS_BLOCK if HAS_CLASSES else BLOCK_COLUMNS
    DOWN: tl.constexpr = ROWS // HEIGHT  # blocks of a tile, some of them after its end
    ACROSS: tl.constexpr = BLOCK_COLUMNS // WIDTH
    slot, head = tl.program_id(0) % slots, tl.program_id(0) // slots
    b, h = (head // num_heads).to(tl.int64), (head % num_heads).to(tl.int64)
    bit_blocks = (columns + BIT_BLOCK - 1) // BIT_BLOCK
    bands = (low_first, high_first, low_last, high_last)
    padding = (column_padding, column_stride_b, column_stride)

    if column_bits is not None:
        if (h == 0) & (b < columns_batch) & (slot < bit_blocks):
            column = slot * BIT_BLOCK + tl.arange(0, BIT_BLOCK)
            real = readable_columns(
                column, b, padding, row_offsets, column_offsets, rows, columns, num_sequences, steps, bands
            )
            words = pack(real[None, :], 1)
            place = (b * bit_blocks + slot) * BIT_WORDS + tl.arange(0, BIT_WORDS)
            tl.store(column_bits + place[None, :], words)

    first_row = slot * BLOCK_ROWS
    writes_bits = False
    if matrix is not None:
        writes_bits = b < bits_batch
        if TILE_ROWS == 1:
            writes_bits = writes_bits & (slot == 0)
    if first_row < rows:
        first_span, end_span = 0, 0
        if writes_bits:
            end_span = (columns + SPAN - 1) // SPAN
        if tiles is not None or intervals is not None:
            index = tl.arange(0, ROWS)
            row = first_row + index
            begin, end = interval_of(row, row_offsets, column_offsets, rows, columns, num_sequences, steps, bands)
            own = (index < BLOCK_ROWS) & (row < rows)
            if row_padding is not None:
                padding_ptrs = row_padding + b * row_stride_b + row.to(tl.int64) * row_stride
                is_real = tl.load(padding_ptrs, mask=own, other=0) != 0
                begin, end = tl.where(is_real, begin, 0), tl.where(is_real, end, 0)
            if intervals is not None:
                if (h == 0) & (b < intervals_batch):
                    interval_ptrs = intervals + (b * rows + row) * 2
                    tl.store(interval_ptrs, begin, mask=own)
                    tl.store(interval_ptrs + 1, end, mask=own)
        if tiles is not None:
            down = tl.arange(0, DOWN)
            hull_begin = lowest(tl.where(own & (begin < end), begin, columns), DOWN)
            hull_end = -lowest(tl.where(own, -end, 0), DOWN)
            # The columns that all rows have. Rows after the last have none, so a ragged block is not full.
            common_begin = -lowest(tl.where(own, -begin, 0), DOWN)
            common_end = lowest(tl.where(index < BLOCK_ROWS, end, columns), DOWN)
            column_tiles = (columns + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
            row_list = (b * num_heads + h) * ((rows + BLOCK_ROWS - 1) // BLOCK_ROWS) + slot
            tiles += row_list * column_tiles
            if not writes_bits:
                first, last = hull_begin, hull_end
                if DOWN > 1:
                    first, last = tl.min(first), tl.max(last)
                first_span, end_span = first // SPAN, (last + SPAN - 1) // SPAN

        for span in range(first_span, end_span):
            column = span * SPAN + tl.arange(0, SPAN)
            if tiles is not None:
                tile = span * TILES + tl.arange(0, TILES)
                block = span * (SPAN // WIDTH) + tl.arange(0, SPAN // WIDTH)
                block_begin, block_end = block * WIDTH, (block + 1) * WIDTH
                any_visible = (hull_begin < block_end) & (hull_end > block_begin)
                all_visible = (common_begin <= block_begin) & (common_end >= block_end)
            if column_bits is not None:
                real = readable_columns(
                    column, b, padding, row_offsets, column_offsets, rows, columns, num_sequences, steps, bands
                )
                if tiles is not None:
                    num_real = tl.sum(tl.reshape(real.to(tl.int32), (SPAN // WIDTH, WIDTH)), axis=1)
                    any_visible &= num_real > 0
                    all_visible &= num_real == WIDTH
            if matrix is not None:
                num_visible = tl.zeros(
                    [DOWN, SPAN // WIDTH] if DOWN > 1 and TILE_ROWS > 1 else [SPAN // WIDTH], tl.int32
                )
                for i in range(0, TILE_ROWS, MATRIX_ROWS):
                    m = i + tl.arange(0, MATRIX_ROWS)
                    if TILE_ROWS > 1:
                        m += first_row
                    ptrs = matrix.ptr + b * matrix.stride_b + h * matrix.stride_h
                    ptrs = ptrs + m.to(tl.int64)[:, None] * matrix.stride_row
                    ptrs = ptrs + column.to(tl.int64)[None, :] * matrix.stride_column
                    inside = (m < matrix.rows)[:, None] & (column < matrix.columns)[None, :]
                    keep = tl.load(ptrs, mask=inside, other=0) != 0
                    if tiles is not None:
                        in_blocks = tl.reshape(keep.to(tl.int32), (MATRIX_ROWS, SPAN // WIDTH, WIDTH))
                        num_in_blocks = tl.sum(tl.sum(in_blocks, axis=2), axis=0)
                        if DOWN > 1 and TILE_ROWS > 1:
                            num_in_blocks = tl.where((down == i // HEIGHT)[:, None], num_in_blocks[None, :], 0)
                        num_visible += num_in_blocks
                    if writes_bits:
                        if column_bits is not None:
                            keep = keep & real[None, :]
                        bit_row = (b * num_heads + h) * (rows if TILE_ROWS > 1 else 1) + m
                        word = (bit_row * bit_blocks + span)[:, None] * BIT_WORDS + tl.arange(0, BIT_WORDS)[None, :]
                        tl.store(bits + word, pack(keep, MATRIX_ROWS), mask=(m < rows)[:, None])
                if tiles is not None:
                    any_visible &= num_visible > 0
                    all_visible &= num_visible == min(TILE_ROWS, HEIGHT) * WIDTH
            if tiles is not None:
                classes = 0
                if HAS_CLASSES:
                    some = tl.reshape(any_visible.to(tl.int32), (DOWN, TILES, ACROSS))
                    every = some & tl.reshape(all_visible.to(tl.int32), (DOWN, TILES, ACROSS))
                    places = 2 * (down[:, None, None] * ACROSS + tl.arange(0, ACROSS)[None, None, :])
                    classes = tl.sum(tl.sum((some + 2 * every) << places, axis=2), axis=0)
                    any_visible = tl.sum(tl.sum(some, axis=2), axis=0) > 0
                    all_visible = tl.sum(tl.sum(every, axis=2), axis=0) == BLOCK_ROWS // HEIGHT * ACROSS
                answer = tl.where(any_visible & all_visible, 1, tl.where(any_visible, 0, 2)) + (classes << 2)
                tl.store(tiles + tile, answer, mask=tile < column_tiles)

        if tiles is not None:
            tile = tl.arange(0, MAX_TILES)
            visited = (tile >= first_span * TILES) & (tile < end_span * TILES) & (tile < column_tiles)
            tl.debug_barrier()  # other threads wrote the answers
            answer = tl.load(tiles + tile, mask=visited, other=2)
            tl.debug_barrier()  # all are read before the first is overwritten
            if HAS_CLASSES:
                tile += (answer >> 2) << CLASS_SHIFT
                answer &= 3
            partial, full = (answer == 0).to(tl.int32), (answer == 1).to(tl.int32)
            num_partial, num_full = tl.sum(partial, axis=0), tl.sum(full, axis=0)
            place = tl.where(answer == 0, tl.cumsum(partial, axis=0), num_partial + tl.cumsum(full, axis=0)) - 1
            tl.store(tiles + place, tile, mask=answer < 2)
            tl.store(counts + row_list * 2, num_partial)
            tl.store(counts + row_list * 2 + 1, num_partial + num_full)


_LAUNCHES = Launches(prepare_mask_kernel, *[Tensor] * 4, Matrix, *[Tensor] * 5)


def prepare_mask(
    mask: Restriction,
    rows: int,
    columns: int,
    block_rows: int,
    block_columns: int,
    has_classes: bool,
    device: torch.device,
) -> PreparedMask:
    """As fastattn.masks.prepare, in one launch. After the listed tiles, `tiles` holds anything."""
    mask = matrix_of_one_row_as_padding(mask, columns)
    (from_first, from_last), row_offsets, column_offsets, row_padding, column_padding, matrix = mask
    packed = row_offsets is not None
    band = (-rows, columns) if packed else band_of(mask, rows, columns)
    limit = rows + columns  # a larger bound has no effect
    lows = [-limit if low is None else _within(low, limit) for low in (from_first[0], from_last[0])]
    highs = [limit if high is None else _within(high, limit) for high in (from_first[1], from_last[1])]

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    intervals = column_bits = bits = counts = tiles = None
    row_batch = 1 if row_padding is None else row_padding.shape[0]
    column_batch = 1 if column_padding is None else column_padding.shape[0]
    matrix_batch, num_heads, matrix_rows = (1, 1, 1) if matrix is None else matrix.shape[:3]
    bits_batch = _common(matrix_batch, column_batch)
    batch = _common(row_batch, bits_batch)
    # No triton.cdiv: it may also be called in a kernel, and finding out costs as much as an allocation.
    bit_blocks = -(-columns // kernel_format.BIT_BLOCK)
    if packed or row_padding is not None:
        intervals = empty(row_batch, rows, 2)
    if packed or column_padding is not None:
        column_bits = empty(column_batch, bit_blocks, BIT_WORDS)
    if matrix is not None:
        bits = empty(bits_batch, num_heads, matrix_rows, bit_blocks, BIT_WORDS)
    has_lists = block_rows > 0 and not (intervals is None and column_bits is None and bits is None)
    if not has_lists:
        block_rows, block_columns = ROWS_WITHOUT_LISTS, BIT_BLOCK.value
    row_tiles, column_tiles = -(-rows // block_rows), -(-columns // block_columns)
    if has_lists:
        counts, tiles = empty(batch, num_heads, row_tiles, 2), empty(batch, num_heads, row_tiles, column_tiles)

    slots = max(row_tiles, bit_blocks)
    programs = batch * num_heads * slots
    if programs > 0:
        inputs = row_padding, column_padding, row_offsets, column_offsets, matrix
        results = intervals, column_bits, bits, counts, tiles
        (*found, matrix_at), alignment = addresses(*inputs)
        strided_matrix = None if matrix is None else (matrix_at, *_strides(matrix), rows, columns)
        sizes = *_strides(row_padding), *_strides(column_padding), num_heads, row_batch, column_batch, bits_batch
        sizes += slots, rows, columns, *_sequences(row_offsets), lows[0], highs[0], lows[1], highs[1]
        index = next(t for t in inputs if t is not None).get_device()
        max_tiles = 1 << max(column_tiles - 1, MIN_TILES - 1).bit_length()
        key = (
            *(index, alignment, *[None if t is None else t.dtype for t in inputs], has_lists),
            *(block_rows, block_columns, has_classes, max_tiles, matrix_rows == 1, max(sizes) < LIMIT),
            None if matrix is None else specialization(*strided_matrix),
        )
        launch = _LAUNCHES.get(key)
        if launch is None:
            span = SPAN_WITHOUT_MATRIX if matrix is None else BIT_BLOCK.value
            constants = {"BLOCK_ROWS": block_rows, "ROWS": triton.next_power_of_2(block_rows)}
            constants |= {"BLOCK_COLUMNS": block_columns, "TILES": span // block_columns, "num_warps": 4}
            constants |= {"MAX_TILES": max_tiles, "TILE_ROWS": 1 if matrix_rows == 1 else block_rows}
            constants["MATRIX_ROWS"] = 1 if matrix_rows == 1 else min(block_rows & -block_rows, 64)
            constants["HAS_CLASSES"] = has_classes
            launch = _LAUNCHES.add(key, **constants)
        launch.run(index, programs, (*found, strided_matrix, *addresses(*results)[0], *sizes), (*inputs, *results))
    return PreparedMask(*band, intervals, column_bits, bits, counts, tiles)


def _within(bound: int, limit: int) -> int:
    return min(max(bound, -limit), limit)


def _common(a: int, b: int) -> int:
    """The size that two dimensions broadcast to."""
    return b if a == 1 else a


def _strides(t: Tensor | None) -> tuple[int, ...]:
    """0 along dimensions of size 1: they are broadcast. Two of 0 without a padding."""
    return (0, 0) if t is None else tuple([s if n > 1 else 0 for n, s in zip(t.shape, t.stride(), strict=True)])


def _sequences(offsets: Tensor | None) -> tuple[int, int]:
    """The number of packed sequences, and of the steps that find one of them."""
    return (0, 0) if offsets is None else (offsets.shape[0] - 1, offsets.shape[0].bit_length())
