"""What every attention kernel does with a tile of scores: find it, load it, mask it, turn scores into probabilities.

A kernel has rows and columns as its PreparedMask has: rows are queries and columns are keys. In the kernel whose
programs own keys it is the other way round. Offsets are 64-bit: an index is widened before it is
multiplied by a stride.

A kernel first visits its partial tiles, where it tests every element, and then its full tiles, where it tests none.
The mask's lists name these tiles. If a band is the only restriction, they follow from arithmetic. If there is neither,
all tiles are partial.
"""

import triton
import triton.language as tl

from fastattn.masks import kernel_format

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
BIT_BLOCK, BIT_WORDS = tl.constexpr(kernel_format.BIT_BLOCK), tl.constexpr(kernel_format.BIT_WORDS)


@triton.jit
def program_coords(num_tiles, num_heads):
    """(tile, batch, head) of this program. Neighbours share a head, so its keys and values stay in the L2 cache."""
    head = tl.program_id(0) // num_tiles
    return tl.program_id(0) % num_tiles, (head // num_heads).to(tl.int64), (head % num_heads).to(tl.int64)


@triton.jit
def load_rows(x, b, h, first, inside, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """[BLOCK, BLOCK_D]: rows first, first + 1, .. of head h. Rows not inside and columns from HEAD_DIM on read as 0.

    inside: [BLOCK] bool; None when all are.
    """
    row = tl.arange(0, BLOCK).to(tl.int64)[:, None]
    col = tl.arange(0, BLOCK_D)[None, :]
    ptrs = x.ptr + (b * x.stride_b + h * x.stride_h + tl.cast(first, tl.int64) * x.stride_l) + row * x.stride_l + col
    if inside is None:
        if HEAD_DIM == BLOCK_D:
            tile = tl.load(ptrs)
        else:
            tile = tl.load(ptrs, mask=col < HEAD_DIM, other=0.0)
    else:
        if HEAD_DIM == BLOCK_D:
            tile = tl.load(ptrs, mask=inside[:, None], other=0.0)
        else:
            tile = tl.load(ptrs, mask=inside[:, None] & (col < HEAD_DIM), other=0.0)
    return tile


@triton.jit
def store_rows(x, b, h, first, inside, tile, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """The counterpart of load_rows: casts tile to the type of x, and writes only what is inside."""
    row = tl.arange(0, BLOCK).to(tl.int64)[:, None]
    col = tl.arange(0, BLOCK_D)[None, :]
    ptrs = x.ptr + (b * x.stride_b + h * x.stride_h + tl.cast(first, tl.int64) * x.stride_l) + row * x.stride_l + col
    tl.store(ptrs, tile.to(x.ptr.dtype.element_ty), mask=inside[:, None] & (col < HEAD_DIM))


@triton.jit
def load_bias(bias, b, h, m, n, seqlen_q, seqlen_k, RELATIVE: tl.constexpr):
    """The additive bias in float32, 0 outside the scores: m [M, 1] and n [1, N], or m [1, M] and n [N, 1]."""
    if RELATIVE:  # columns are distances; see fastattn.masks.zero_distance
        first = tl.where(bias.columns == seqlen_q + seqlen_k - 1, seqlen_q - 1, bias.columns // 2)
        place = n - m + first
        ptrs = bias.ptr + h * bias.stride_h + place
        inside = (place >= 0) & (place < bias.columns)
    else:
        ptrs = bias.ptr + (b * bias.stride_b + h * bias.stride_h) + m.to(tl.int64) * bias.stride_m
        ptrs = ptrs + n.to(tl.int64) * bias.stride_n
        inside = (m < seqlen_q) & (n < bias.columns)
    return tl.load(ptrs, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def row_intervals(mask, b, row, rows, columns, band_lo, band_hi):
    """(begin, end), shaped as row: a row may attend only to columns begin <= c < end. Empty after the last row."""
    if mask.intervals is not None:
        ptrs = mask.intervals + 2 * (b * mask.intervals_per_sample * rows + row)
        begin = tl.load(ptrs, mask=row < rows, other=0)
        end = tl.load(ptrs + 1, mask=row < rows, other=0)
    else:
        begin = tl.maximum(row + band_lo, 0)
        end = tl.where(row < rows, tl.minimum(row + band_hi + 1, columns), 0)
    return begin, end


@triton.jit
def tile_columns(mask, begin, end, first_row, last_row, columns, band_lo, band_hi):
    """(begin, end) of the columns that some row of a tile may attend to. begin, end: row_intervals() of its rows."""
    if mask.intervals is not None:
        tile_begin = tl.min(tl.where(begin < end, begin, columns), axis=0)
        tile_end = tl.max(end, axis=0)
    else:
        tile_begin = tl.maximum(first_row + band_lo, 0)
        tile_end = tl.maximum(tl.minimum(last_row + band_hi + 1, columns), 0)
        tile_end = tl.where(band_lo <= band_hi, tile_end, 0)
    return tile_begin, tile_end


@triton.jit
def plan_tiles(
    mask, b, h, num_heads, row_tile, tile_begin, tile_end, last_row, rows, columns, band_lo, band_hi,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """The column tiles that a row tile visits: (first, num_left, num_partial, num_visited), for tile_at().

    With lists, first is where the row tile's list begins. Without lists, first is a tile: num_left partial tiles from
    there on are followed by the full ones, if there are any, and then by the rest of the partial ones.
    """
    first = tile_begin // BLOCK_COLUMNS
    num_visited = tl.maximum(tl.cdiv(tile_end, BLOCK_COLUMNS) - first, 0)
    num_partial, num_left = num_visited, num_visited
    if mask.tiles is not None:
        place = head_index(b, h, num_heads, mask.tiles_per_sample, mask.tiles_per_head)
        place = place * tl.cdiv(rows, BLOCK_ROWS) + row_tile
        num_partial, num_visited = tl.load(mask.counts + 2 * place), tl.load(mask.counts + 2 * place + 1)
        first = place * tl.cdiv(columns, BLOCK_COLUMNS)
    elif mask.intervals is None and mask.columns is None and mask.bits is None:
        # The intervals of a band only grow: the last row begins last, and the first row ends first.
        first_row = row_tile * BLOCK_ROWS
        begin_of_last = tl.maximum(last_row + band_lo, 0)
        end_of_first = tl.maximum(tl.minimum(first_row + band_hi + 1, columns), 0)
        first_full = tl.cdiv(begin_of_last, BLOCK_COLUMNS)
        end_full = tl.minimum(end_of_first // BLOCK_COLUMNS, first + num_visited)
        num_full = tl.maximum(end_full - first_full, 0)
        num_left = tl.where(num_full > 0, first_full - first, num_visited)
        num_partial = num_visited - num_full
    return first, num_left, num_partial, num_visited


@triton.jit
def tile_at(mask, i, first, num_left, num_partial, num_visited, FULL: tl.constexpr):
    """The i-th tile to visit: partial ones have 0 <= i < num_partial, full ones num_partial <= i < num_visited."""
    if mask.tiles is not None:
        tile = tl.load(mask.tiles + first + i)
    elif FULL:
        tile = first + num_left + i - num_partial
    else:
        tile = first + i + tl.where(i >= num_left, num_visited - num_partial, 0)
    return tile


@triton.jit
def head_index(b, h, num_heads, per_sample, per_head):
    """The entry of a contiguous (B or 1, H or 1, ..) for head h of sample b; see arguments.Mask."""
    return b * per_sample * (1 + (num_heads - 1) * per_head) + h * per_head


@triton.jit
def readable_columns(mask, b, first_column, tile_begin, tile_end, columns, BLOCK: tl.constexpr):
    """[BLOCK] bool: the columns of a partial tile that may be read. The others may hold NaN, and 0 * NaN is NaN, so
    they count as 0."""
    col = first_column + tl.arange(0, BLOCK)
    inside = (col >= tile_begin) & (col < tile_end)
    if mask.columns is not None:
        block = b * mask.columns_per_sample * tl.cdiv(columns, BIT_BLOCK) + first_column // BIT_BLOCK
        words = tl.load(mask.columns + block * BIT_WORDS + tl.arange(0, BIT_WORDS))
        octet = tl.arange(0, BLOCK // 8)[:, None, None] + first_column % BIT_BLOCK // 8
        bits = words[None, :, None] >> (2 * octet + tl.arange(0, 2)[None, None, :])
        inside = inside & (tl.reshape(bits & 1, (BLOCK,)) != 0)
    return inside


@triton.jit
def visible_elements(
    mask, b, h, num_heads, begin, end, inside, row, first_column, rows, columns, BLOCK: tl.constexpr
):  # fmt: skip
    """[ROWS, BLOCK] bool: which elements of a partial tile are visible. False outside the scores.

    begin, end: row_intervals(row); inside: readable_columns(). Column 8 * octet + 2 * word + e of a block is bit
    2 * octet + e of that word of the row: fastattn/masks/kernel_format.py.
    """
    col = (first_column + tl.arange(0, BLOCK))[None, :]
    keep = (col >= begin[:, None]) & (col < end[:, None])
    if mask.bits is not None:
        first = head_index(b, h, num_heads, mask.bits_per_sample, mask.bits_per_head)
        first = first * (1 + (rows - 1) * mask.bits_per_row) + row.to(tl.int64) * mask.bits_per_row
        block = first * tl.cdiv(columns, BIT_BLOCK) + first_column // BIT_BLOCK
        words = tl.load(
            mask.bits + block[:, None] * BIT_WORDS + tl.arange(0, BIT_WORDS)[None, :],
            mask=(row < rows)[:, None],
            other=0,
        )
        octet = tl.arange(0, BLOCK // 8)[None, :, None, None] + first_column % BIT_BLOCK // 8
        bits = words[:, None, :, None] >> (2 * octet + tl.arange(0, 2)[None, None, None, :])
        keep = keep & (tl.reshape(bits & 1, (row.shape[0], BLOCK)) != 0)
    elif mask.columns is not None:
        keep = keep & inside[None, :]
    return keep


@triton.jit
def exponent_shift(lse, FOLD_SCALE: tl.constexpr):
    """exponential()'s shift that makes weights from scores: lse. For a query that attends to nothing it is inf, so its
    weights are 0."""
    shift = tl.where(lse == float("-inf"), float("inf"), lse)
    if FOLD_SCALE:
        shift *= LOG2E
    return shift


@triton.jit
def exponential(scores, shift, unit, FOLD_SCALE: tl.constexpr):
    """exp(scores - shift), as a power of two: the hardware has no other exponential.

    FOLD_SCALE: scores are the bare products q k^T, unit = softmax_scale * log2(e), shift is in powers of two: one
    multiply-add an element. Otherwise scores are scaled and biased, unit = log2(e), and shift is in the same units. The
    difference comes first: this is more exact, and a bias of finfo.min times log2(e) would overflow.
    """
    if FOLD_SCALE:
        power = scores * unit - shift
    else:
        power = (scores - shift) * unit
    return tl.exp2(power)
