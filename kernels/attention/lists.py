"""Each query's interval of keys, and the lists of tiles that hold work: an AttentionMask prepared by a launch for each.

They are what AttentionMask.intervals and .tiles make by some sixty of PyTorch's operators, which specify them and serve
what is not here: packed sequences, and an arbitrary attn_mask. A step prepares three masks, so this is a third of what
it would launch otherwise.

intervals: one program for BLOCK queries of a batch; each walks over the keys' padding for the first and the last real
key. Tile lists: one program for a query tile, listing key tiles, or for a key tile, listing query tiles; it walks along
the other axis, CHUNK tiles at a time, and appends those that are partly or wholly visible, so that lists are ascending.
Bytes: intervals 8 a query, written once and read once for every tile of the other axis, as is the padding, a byte a
key; all from L2. Nothing is as large as the scores.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.masks import AttentionMask, Tiles

BLOCK = 256
CHUNK = 32  # tiles at once: at most 128 x 32 comparisons, 32 a lane of four warps


@triton.jit
def intervals_kernel(
    start_ptr, end_ptr, key_padding_ptr, key_padding_stride_b, query_padding_ptr, query_padding_stride_b,
    seqlen_q, seqlen_k, band_lo, band_hi,
    HAS_KEY_PADDING: tl.constexpr, HAS_QUERY_PADDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(seqlen_q, BLOCK)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    m = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    start = tl.maximum(m + band_lo, 0)
    end = tl.minimum(m + band_hi + 1, seqlen_k)
    if HAS_KEY_PADDING:
        first = tl.zeros([BLOCK], tl.int32) + seqlen_k
        last = tl.zeros([BLOCK], tl.int32)
        for n0 in range(0, seqlen_k, BLOCK):
            n = n0 + tl.arange(0, BLOCK)
            ptrs = key_padding_ptr + b * key_padding_stride_b + n
            real = tl.load(ptrs, mask=n < seqlen_k, other=0) != 0
            first = tl.where(real, tl.minimum(first, n), first)
            last = tl.where(real, n + 1, last)
        start = tl.maximum(start, tl.min(first, axis=0))
        end = tl.minimum(end, tl.max(last, axis=0))
    if HAS_QUERY_PADDING:
        ptrs = query_padding_ptr + b * query_padding_stride_b + m
        end = tl.where(tl.load(ptrs, mask=m < seqlen_q, other=0) != 0, end, 0)
    some = end > start
    place = b * seqlen_q + m
    tl.store(start_ptr + place, tl.where(some, start, 0), mask=m < seqlen_q)
    tl.store(end_ptr + place, tl.where(some, end, 0), mask=m < seqlen_q)


@triton.jit
def append(tiles, some, every, partial_ptr, num_partial, full_ptr, num_full):
    """Write the partly and the wholly visible ones of these tiles behind those that are listed; the new numbers."""
    partial = some - every
    tl.store(partial_ptr + num_partial + tl.cumsum(partial, axis=0) - partial, tiles, mask=partial > 0)
    tl.store(full_ptr + num_full + tl.cumsum(every, axis=0) - every, tiles, mask=every > 0)
    return num_partial + tl.sum(partial, axis=0), num_full + tl.sum(every, axis=0)


@triton.jit
def tile_lists_kernel(
    start_ptr, end_ptr, interval_stride_b, key_padding_ptr, key_padding_stride_b,
    num_partial_ptr, partial_ptr, num_full_ptr, full_ptr,
    num_partial_t_ptr, partial_t_ptr, num_full_t_ptr, full_t_ptr,
    seqlen_q, seqlen_k, num_q, num_k,
    HAS_KEY_PADDING: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Queries past the end have an empty interval, keys past the end are in none: a ragged tile is never full."""
    b = (tl.program_id(0) // (num_q + num_k)).to(tl.int64)
    tile = tl.program_id(0) % (num_q + num_k)
    start_ptr += b * interval_stride_b
    end_ptr += b * interval_stride_b
    if HAS_KEY_PADDING:
        key_padding_ptr += b * key_padding_stride_b
    num_partial, num_full = 0, 0
    if tile < num_q:  # lists key tiles: intervals [BLOCK_M, 1] against their first keys [1, CHUNK]
        row = b * num_q + tile
        m = tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        start = tl.load(start_ptr + m, mask=m < seqlen_q, other=0)
        end = tl.load(end_ptr + m, mask=m < seqlen_q, other=0)
        for j0 in range(0, num_k, CHUNK):
            j = j0 + tl.arange(0, CHUNK)
            first = (j * BLOCK_N)[None, :]
            meets = tl.maximum(start, first) < tl.minimum(end, first + BLOCK_N)
            inside = (start <= first) & (end >= first + BLOCK_N)
            some, every = tl.max(meets.to(tl.int32), axis=0), tl.min(inside.to(tl.int32), axis=0)
            if HAS_KEY_PADDING:
                n = (j * BLOCK_N)[:, None] + tl.arange(0, BLOCK_N)[None, :]
                real = (tl.load(key_padding_ptr + n, mask=n < seqlen_k, other=0) != 0).to(tl.int32)
                some, every = some * tl.max(real, axis=1), every * tl.min(real, axis=1)
            num_partial, num_full = append(
                j, some, every, partial_ptr + row * num_k, num_partial, full_ptr + row * num_k, num_full
            )
        tl.store(num_partial_ptr + row, num_partial)
        tl.store(num_full_ptr + row, num_full)
    else:  # lists query tiles: intervals [CHUNK, BLOCK_M] against the first key of one tile
        row = b * num_k + tile - num_q
        first = (tile - num_q) * BLOCK_N
        for i0 in range(0, num_q, CHUNK):
            i = i0 + tl.arange(0, CHUNK)
            m = (i * BLOCK_M)[:, None] + tl.arange(0, BLOCK_M)[None, :]
            start = tl.load(start_ptr + m, mask=m < seqlen_q, other=0)
            end = tl.load(end_ptr + m, mask=m < seqlen_q, other=0)
            meets = tl.maximum(start, first) < tl.minimum(end, first + BLOCK_N)
            inside = (start <= first) & (end >= first + BLOCK_N)
            some, every = tl.max(meets.to(tl.int32), axis=1), tl.min(inside.to(tl.int32), axis=1)
            if HAS_KEY_PADDING:
                n = first + tl.arange(0, BLOCK_N)
                real = (tl.load(key_padding_ptr + n, mask=n < seqlen_k, other=0) != 0).to(tl.int32)
                some, every = some * tl.max(real, axis=0), every * tl.min(real, axis=0)
            num_partial, num_full = append(
                i, some, every, partial_t_ptr + row * num_q, num_partial, full_t_ptr + row * num_q, num_full
            )
        tl.store(num_partial_t_ptr + row, num_partial)
        tl.store(num_full_t_ptr + row, num_full)


def intervals(mask: AttentionMask, Lq: int, Lk: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(k_start, k_end), int32 (B or 1, Lq), as AttentionMask.intervals. Call inside on_device."""
    if mask.cu_seqlens_q is not None or _empty(mask, Lq, Lk):
        return mask.intervals(Lq, Lk, device)

    def build() -> tuple[Tensor, Tensor]:
        keys, queries = mask.key_padding, mask.query_padding
        B = max(1 if t is None else len(t) for t in (keys, queries))
        low, high = mask.band(Lq, Lk) or (-Lq, Lk)
        start, end = (torch.empty(B, Lq, dtype=torch.int32, device=device) for _ in range(2))
        intervals_kernel[(B * triton.cdiv(Lq, BLOCK),)](
            start, end, keys, _stride(keys), queries, _stride(queries), Lq, Lk, low, high,
            HAS_KEY_PADDING=keys is not None, HAS_QUERY_PADDING=queries is not None, BLOCK=BLOCK,
        )  # fmt: skip
        return start, end

    return mask.cached(("triton intervals", Lq, Lk, device), build)


def tile_lists(mask: AttentionMask, Lq: int, Lk: int, BLOCK_M: int, BLOCK_N: int, device: torch.device) -> Tiles:
    """The lists for tiles of BLOCK_M queries by BLOCK_N keys, as AttentionMask.tiles; what is behind the first num_* of
    a list is undefined. Call inside on_device."""
    if mask.cu_seqlens_q is not None or mask.attn_mask is not None or _empty(mask, Lq, Lk):
        return mask.tiles(Lq, Lk, BLOCK_M, BLOCK_N, device)

    def build() -> Tiles:
        start, end = intervals(mask, Lq, Lk, device)
        B, num_q, num_k, keys = len(start), triton.cdiv(Lq, BLOCK_M), triton.cdiv(Lk, BLOCK_N), mask.key_padding
        shapes = [(B, 1, num_q), (B, 1, num_q, num_k)] * 2 + [(B, 1, num_k), (B, 1, num_k, num_q)] * 2
        lists = Tiles(*(torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes))
        tile_lists_kernel[(B * (num_q + num_k),)](
            start, end, Lq, keys, _stride(keys), *lists, Lq, Lk, num_q, num_k,
            HAS_KEY_PADDING=keys is not None, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, CHUNK=CHUNK,
        )  # fmt: skip
        return lists

    return mask.cached(("triton tiles", Lq, Lk, BLOCK_M, BLOCK_N, device), build)


def _empty(mask: AttentionMask, Lq: int, Lk: int) -> bool:
    return Lq * Lk == 0 or any(t is not None and len(t) == 0 for t in (mask.key_padding, mask.query_padding))


def _stride(padding: Tensor | None) -> int:
    """Of the batch, 0 where there is one row for all."""
    return 0 if padding is None or len(padding) == 1 else padding.stride(0)
