"""What every attention kernel does to a tile: find it, load it, decide who sees whom, turn scores into probabilities.

m are positions of queries, n of keys. The helpers only broadcast m against n, so they serve a tile of scores, with
m [M, 1] and n [1, N], as well as its transpose, m [1, M] and n [N, 1]. Offsets are 64-bit: an index is widened before
it is multiplied by a stride.

Who sees whom: the structured restrictions give every query one interval of keys, start <= n < end; the arbitrary
attn_mask and the keys that nobody sees (seen.py; padding among them) come on top. Intervals have two sources:
    LISTS = False   nothing but a band restricts, band_lo <= n - m <= band_hi (or nothing at all): arithmetic;
    LISTS = True    AttentionMask has prepared them, and with them the lists of tiles that hold work.
Either way a kernel visits first its partial tiles, which look at masks element by element, then its full ones.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def program_place(num_tiles, num_heads):
    """(tile, batch, head) of this program. Neighbours share a head, whose keys and values so stay in the L2 cache."""
    row = tl.program_id(0) // num_tiles
    return tl.program_id(0) % num_tiles, (row // num_heads).to(tl.int64), (row % num_heads).to(tl.int64)


@triton.jit
def load_rows(ptr, first, stride, inside, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """[BLOCK, BLOCK_D]: rows first, first + 1, .. of a matrix. Rows not inside and columns from HEAD_DIM on read as 0.

    inside: [BLOCK] bool; None when all are.
    """
    row = tl.arange(0, BLOCK).to(tl.int64)[:, None]
    col = tl.arange(0, BLOCK_D)[None, :]
    ptrs = ptr + tl.cast(first, tl.int64) * stride + row * stride + col
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
def store_rows(ptr, first, stride, inside, tile, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """The counterpart of load_rows: casts tile to the type of the matrix, and leaves alone what is not inside."""
    row = tl.arange(0, BLOCK).to(tl.int64)[:, None]
    col = tl.arange(0, BLOCK_D)[None, :]
    ptrs = ptr + tl.cast(first, tl.int64) * stride + row * stride + col
    tl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=inside[:, None] & (col < HEAD_DIM))


@triton.jit
def plan_visits(begin_min, begin_max, end_min, end_max, BLOCK: tl.constexpr):
    """The tiles to visit along an axis, when every row of this program sees one interval and the intervals only grow:
    the first row sees [begin_min, end_min), the last one [begin_max, end_max), none of them negative.

    Returns (first, num_left, num_partial, num_full): num_left partial tiles from tile first on, then the full ones
    (inside every row's interval), then the rest of the partial ones.
    """
    first = begin_min // BLOCK
    last = tl.cdiv(end_max, BLOCK)
    first_full = tl.cdiv(begin_max, BLOCK)
    num_visited = tl.maximum(last - first, 0)
    num_full = tl.maximum(tl.minimum(end_min // BLOCK, last) - first_full, 0)
    num_left = tl.where(num_full > 0, first_full - first, num_visited)
    return first, num_left, num_visited - num_full, num_full


@triton.jit
def tile_at(i, list_ptr, first, num_left, num_full, FULL: tl.constexpr, LISTS: tl.constexpr):
    """The i-th tile to visit among the full or the partial ones."""
    if LISTS:
        tile = tl.load(list_ptr + i)
    elif FULL:
        tile = first + num_left + i
    else:
        tile = first + i + tl.where(i >= num_left, num_full, 0)
    return tile


@triton.jit
def key_interval(m, seqlen_q, seqlen_k, band_lo, band_hi, k_start_ptr, k_end_ptr, LISTS: tl.constexpr):
    """(start, end), shaped as m: query m may see only keys start <= n < end. Empty for m past the last query."""
    if LISTS:
        start = tl.load(k_start_ptr + m, mask=m < seqlen_q, other=0)
        end = tl.load(k_end_ptr + m, mask=m < seqlen_q, other=0)
    else:
        start = m + band_lo
        end = tl.where(m < seqlen_q, tl.minimum(m + band_hi + 1, seqlen_k), 0)
    return start, end


@triton.jit
def keep_elements(
    m, n, start, end, seqlen_q, seqlen_k,
    attn_mask_ptr, attn_mask_stride_m, attn_mask_stride_n, HAS_ATTN_MASK: tl.constexpr,
):  # fmt: skip
    """Who sees whom, key_padding aside: bool, m broadcast against n; False outside the matrix of scores.

    start, end: key_interval(m).
    """
    keep = (n >= start) & (n < end)
    if HAS_ATTN_MASK:
        ptrs = attn_mask_ptr + m.to(tl.int64) * attn_mask_stride_m + n.to(tl.int64) * attn_mask_stride_n
        keep = keep & (tl.load(ptrs, mask=(m < seqlen_q) & (n < seqlen_k), other=0) != 0)
    return keep


@triton.jit
def load_bias(m, n, seqlen_q, seqlen_k, bias_ptr, bias_stride_m, bias_stride_n):
    """The additive bias, float32, m broadcast against n."""
    ptrs = bias_ptr + m.to(tl.int64) * bias_stride_m + n.to(tl.int64) * bias_stride_n
    return tl.load(ptrs, mask=(m < seqlen_q) & (n < seqlen_k), other=0.0).to(tl.float32)


@triton.jit
def exponential(scores, shift, remainder, unit, FOLD_SCALE: tl.constexpr):
    """exp(scores - shift), less 2 ** remainder, as a power of two: the hardware has no other.

    FOLD_SCALE: scores are the bare products q k^T, unit = softmax_scale * log2(e), shift is in powers of two: one
    multiply-add an element. Otherwise scores are scaled and biased, unit = log2(e), shift is in the same units, and the
    difference comes first: it is more exact, and a bias of finfo.min times log2(e) would overflow.
    """
    if FOLD_SCALE:
        power = scores * unit - shift
    else:
        power = (scores - shift) * unit - remainder
    return tl.exp2(power)
