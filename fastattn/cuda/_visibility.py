"""From an AttentionMask to what the CUDA kernels read: csrc/attention/attention.h says the formats.

All of it is made once a mask, on the device, and kept with it; but the keys that somebody sees only where no bias,
which may be another one at every call, has a say.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastattn.cuda import DTYPES, address, device_index, extension, stream
from fastattn.masks import AttentionMask

BIT_BLOCK, BIT_WORDS = 128, 4  # kBitBlock and kBitWords
_FAR = 2**40  # no bound, among those of a band


class TileLists(NamedTuple):
    """int32 (b, h, lists, 2) and (b, h, lists, places): struct TileLists."""

    counts: Tensor
    tiles: Tensor


def spans(mask: AttentionMask, Lq: int, Lk: int, by_key: bool, device: torch.device) -> Tensor:
    """int32 (B or 1, Lq, 2): query i sees only keys [i, 0] <= j < [i, 1]. Band, packed sequences and query padding are
    folded in. Or, by_key, (B or 1, Lk, 2), the same of the mask transposed: which queries a key is seen by."""

    def build() -> Tensor:
        sides = [(Lq, mask.cu_seqlens_q), (Lk, mask.cu_seqlens_k)]
        padding, bounds = mask.query_padding, mask.bands
        if by_key:
            sides.reverse()
            padding, bounds = mask.key_padding, [(_minus(high), _minus(low)) for low, high in bounds]
        (rows, of_rows), (columns, of_columns) = sides
        batch = 1 if padding is None else len(padding)
        out = torch.empty(batch, rows, 2, dtype=torch.int32, device=device)
        sequences = 0 if of_rows is None else len(of_rows) - 1
        limits = [_limit(n, far) for band in bounds for n, far in zip(band, (-_FAR, _FAR), strict=True)]
        offsets = [None if t is None else t.contiguous() for t in (of_rows, of_columns)]
        extension(device).attention_make_spans(
            address(out), (batch, rows, columns, sequences), limits, [*map(address, offsets)],
            _with_strides(padding, 1), *_place(out),
        )  # fmt: skip
        return out

    return mask.cached(("spans", Lq, Lk, by_key, device), build)


def real_queries(mask: AttentionMask, device: torch.device) -> Tensor | None:
    """int32 (B or 1, 1, ceil(Lq / 128), 4): bits of the queries that are no padding; None: all are."""
    padding = mask.query_padding
    if padding is None:
        return None
    sees_one = AttentionMask(key_padding=padding)  # of one query, which sees these
    return mask.cached(("real_queries", device), lambda: seen_keys(sees_one, 1, padding.shape[1], device))


def bits(mask: AttentionMask, Lq: int, Lk: int, device: torch.device) -> Tensor:
    """int32 (B or 1, H or 1, Lq, ceil(Lk / 128), 4): everything but the bias, of a mask that has an attn_mask."""
    return mask.cached(("bits", Lq, Lk, device), lambda: _build_bits(mask, Lq, Lk, device))


def _build_bits(mask: AttentionMask, Lq: int, Lk: int, device: torch.device) -> Tensor:
    intervals, padding, dense = spans(mask, Lq, Lk, False, device), mask.key_padding, mask.attn_mask
    B, H = max(len(t) for t in (intervals, padding, dense) if t is not None), dense.shape[1]
    words = torch.empty(B, H, Lq, _blocks(Lk, BIT_BLOCK), BIT_WORDS, dtype=torch.int32, device=device)
    given = (*_spans_with_stride(intervals), *_with_strides(padding, 1), *_with_strides(dense, 4))
    extension(device).attention_pack_bits(given, H, _bit_matrix(words, Lk), *_place(words))
    return words


def transposed_bits(mask: AttentionMask, Lq: int, Lk: int, device: torch.device) -> Tensor:
    """int32 (B or 1, H or 1, Lk, ceil(Lq / 128), 4)."""

    def build() -> Tensor:
        words = bits(mask, Lq, Lk, device)
        out = words.new_empty(*words.shape[:2], Lk, _blocks(Lq, BIT_BLOCK), BIT_WORDS)
        extension(device).attention_transpose_bits(_bit_matrix(words, Lk), address(out), *_place(out))
        return out

    return mask.cached(("transposed_bits", Lq, Lk, device), build)


def tile_lists(
    mask: AttentionMask, Lq: int, Lk: int, block_m: int, block_n: int, by_key: bool, device: torch.device
) -> TileLists:
    """The tiles of block_m queries by block_n keys that hold work: a list for each query tile or, by_key, key tile."""

    def classify() -> Tensor:
        who, kept = _who_sees(mask, Lq, Lk, False, device)
        B, H = max(map(len, kept), default=1), 1 if mask.attn_mask is None else mask.attn_mask.shape[1]
        classes = torch.empty(B, H, _blocks(Lq, block_m), _blocks(Lk, block_n), dtype=torch.uint8, device=device)
        extension(device).attention_classify_tiles(
            address(classes), (B, H, Lq, Lk), block_m, block_n, (*who, *(0,) * 8), *_place(classes)
        )
        return classes

    def build() -> TileLists:
        classes = mask.cached(("tile_classes", Lq, Lk, block_m, block_n, device), classify)
        B, H, row_tiles, column_tiles = classes.shape
        lists, places = (column_tiles, row_tiles) if by_key else (row_tiles, column_tiles)
        made = TileLists(
            *(torch.empty(B, H, lists, n, dtype=torch.int32, device=device) for n in (2, places)),
        )
        extension(device).attention_list_tiles(
            address(classes), B * H, row_tiles, column_tiles, by_key, *map(address, made), *_place(classes)
        )
        return made

    return mask.cached(("tile_lists", Lq, Lk, block_m, block_n, by_key, device), build)


def seen_keys(mask: AttentionMask, Lq: int, Lk: int, device: torch.device) -> Tensor:
    """int32 (B or 1, H or 1, ceil(Lk / 128), 4): bits of the keys that some query sees, the bias included."""

    def build() -> Tensor:
        words = by_key = queries = None
        if mask.attn_mask is not None:
            words = bits(mask, Lq, Lk, device)
        else:
            queries = real_queries(mask, device)
            by_key = None if mask.cu_seqlens_k is None else spans(mask, Lq, Lk, True, device)
        padding = mask.key_padding
        given = (t for t in (words, by_key, queries, padding, mask.bias) if t is not None)
        heads = (t.shape[1] for t in (words, mask.bias) if t is not None)
        B, H = max(map(len, given), default=1), max(heads, default=1)
        seen = torch.empty(B, H, _blocks(Lk, BIT_BLOCK), BIT_WORDS, dtype=torch.int32, device=device)
        if Lq == 0:
            return seen.zero_()
        extension(device).attention_seen_keys(
            address(seen), (B, H, Lq, Lk), band(mask, Lq, Lk), _spans_with_stride(by_key), _with_strides(words, 2),
            _with_strides(queries, 1), _with_strides(padding, 1), bias(mask), *_place(seen),
        )  # fmt: skip
        return seen

    return build() if mask.bias is not None else mask.cached(("seen_bits", Lq, Lk, device), build)


def visibility(
    mask: AttentionMask | None, Lq: int, Lk: int, block_m: int, block_n: int, by_key: bool, device: torch.device
) -> tuple[tuple[int, ...], list[Tensor]]:
    """The integers of struct Visibility, and the tensors whose addresses are among them: keep those until the launch.

    by_key: for a kernel that walks along the queries of a key tile, whose rows are keys. block_m 0: for a kernel that
    wants no lists.
    """

    def build() -> tuple[tuple[int, ...], list[Tensor]]:
        if mask is None or (mask.band_only and mask.bias is None):
            return (*band(mask, Lq, Lk), *(0,) * 14), []
        plain = without_a_row(mask, Lk)
        who, kept = _who_sees(plain, Lq, Lk, by_key, device)
        seen = seen_keys(plain, Lq, Lk, device)
        lists, listed = (), (0,) * 5
        if block_m > 0 and not plain.band_only:
            lists = tile_lists(plain, Lq, Lk, block_m, block_n, by_key, device)
            list_strides = tuple(n // 2 for n in broadcast_strides(lists.counts, 2))
            listed = (*map(address, lists), lists.tiles.shape[3], *list_strides)
        return (*who, *listed, *_with_strides(seen, 2)), [seen, *kept, *lists]

    if mask is None or mask.bias is not None:
        return build()
    return mask.cached(("visibility", Lq, Lk, block_m, block_n, by_key, device), build)


def without_a_row(mask: AttentionMask, Lk: int) -> AttentionMask:
    """The same mask; an attn_mask that all heads and queries share, (B or 1, 1, 1, Lk), is key padding."""
    dense = mask.attn_mask
    if dense is None or dense.numel() == 0 or any(dense.shape[i] > 1 and dense.stride(i) > 0 for i in (1, 2)):
        return mask

    def build() -> AttentionMask:
        (_, padding, *others), bounds = mask.flatten()
        row = dense[:, 0, 0].expand(-1, Lk).contiguous()
        return AttentionMask.unflatten([None, row if padding is None else row & padding, *others], bounds, None)

    return mask.cached(("without_a_row", Lk), build).with_bias(mask.bias)


def _who_sees(
    mask: AttentionMask, Lq: int, Lk: int, by_key: bool, device: torch.device
) -> tuple[tuple[int, ...], list[Tensor]]:
    """Band, spans and bits of struct Visibility, without the bias."""
    intervals = words = None
    if mask.attn_mask is not None:
        words = (transposed_bits if by_key else bits)(mask, Lq, Lk, device)
    else:
        of_rows, of_columns = mask.query_padding, mask.key_padding
        if by_key:
            of_rows, of_columns = of_columns, of_rows
        if of_rows is not None or mask.cu_seqlens_q is not None:
            intervals = spans(mask, Lq, Lk, by_key, device)
        if of_columns is not None:
            row = real_queries(mask, device) if by_key else seen_keys(mask.with_bias(None), Lq, Lk, device)
            words = row[:, :, None]
    numbers = (*band(mask, Lq, Lk), *_spans_with_stride(intervals), *_with_strides(words, 3))
    return numbers, [t for t in (intervals, words) if t is not None]


def elements(
    mask: AttentionMask | None, Lq: int, Lk: int, device: torch.device
) -> tuple[tuple[int, ...], list[Tensor | None]]:
    """The same for a kernel that looks at every tile: no lists. Its rows are queries."""
    return visibility(mask, Lq, Lk, 0, 0, False, device)


def band(mask: AttentionMask | None, Lq: int, Lk: int) -> tuple[int, int]:
    """(band_lo, band_hi) of struct Visibility, in 32 bits: query m sees no key n but by band_lo <= n - m <= band_hi."""
    low, high = (None if mask is None or mask.cu_seqlens_q is not None else mask.band(Lq, Lk)) or (-Lq, Lk)
    return max(min(low, Lk), -Lq), max(min(high, Lk), -Lq)


def shape(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """The integers of struct Shape."""
    return q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3]


def rows(t: Tensor) -> tuple[int, ...]:
    """The integers of struct Rows; the last dimension is contiguous."""
    return address(t), *t.stride()[:3]


def bias(mask: AttentionMask | None) -> tuple[int, ...]:
    """The integers of struct Bias."""
    if mask is None or mask.bias is None:
        return (0,) * 6
    return (*_with_strides(mask.bias, 4), DTYPES[mask.bias.dtype])


def broadcast_strides(t: Tensor, dims: int) -> tuple[int, ...]:
    """The strides of the first dimensions, 0 along those of size 1: they are broadcast."""
    return tuple(t.stride(i) if t.shape[i] > 1 else 0 for i in range(dims))


def _with_strides(t: Tensor | None, dims: int) -> tuple[int, ...]:
    return (0,) * (dims + 1) if t is None else (address(t), *broadcast_strides(t, dims))


def _spans_with_stride(t: Tensor | None) -> tuple[int, int]:
    """The stride is in pairs."""
    given, stride_b = _with_strides(t, 1)
    return given, stride_b // 2


def _limit(bound: int | None, far: int) -> int:
    return far if bound is None else max(-_FAR, min(bound, _FAR))


def _minus(bound: int | None) -> int | None:
    return None if bound is None else -bound


def _bit_matrix(words: Tensor, columns: int) -> tuple[int, int, int, int]:
    """The integers of struct BitMatrix."""
    B, H, rows = words.shape[:3]
    return address(words), B * H, rows, columns


def _place(t: Tensor) -> tuple[int, int]:
    """The last two arguments of every launch."""
    return device_index(t), stream(t)


def _blocks(count: int, block: int) -> int:
    return -(-count // block)
