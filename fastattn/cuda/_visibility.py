"""From an AttentionMask to what the CUDA kernels read: csrc/attention/attention.h says the formats.

Bits, their transpose and tile lists are made once a mask, on the device, and kept with it; the keys that somebody sees
too, unless a bias, which may be another one at every call, has a say.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastattn.cuda import DTYPES, address, device_index, extension, stream
from fastattn.masks import AttentionMask

BIT_BLOCK, BIT_WORDS = 128, 4  # kBitBlock and kBitWords


class TileLists(NamedTuple):
    """int32 (b, h, lists, 2) and (b, h, lists, places): struct TileLists."""

    counts: Tensor
    tiles: Tensor


def bits(mask: AttentionMask, Lq: int, Lk: int, device: torch.device) -> Tensor:
    """int32 (B or 1, H or 1, Lq, ceil(Lk / 128), 4): everything but the bias. Not for a mask that is band_only."""
    return mask.cached(("bits", Lq, Lk, device), lambda: _build_bits(mask, Lq, Lk, device))


def _build_bits(mask: AttentionMask, Lq: int, Lk: int, device: torch.device) -> Tensor:
    start, end = (t.contiguous() for t in mask.intervals(Lq, Lk, device))
    padding, dense = mask.key_padding, mask.attn_mask
    B = max(len(t) for t in (start, padding, dense) if t is not None)
    H = 1 if dense is None else dense.shape[1]
    words = torch.empty(B, H, Lq, _blocks(Lk, BIT_BLOCK), BIT_WORDS, dtype=torch.int32, device=device)
    given = (
        *(address(start), address(end), broadcast_strides(start, 1)[0]),
        *(address(padding), 0 if padding is None else broadcast_strides(padding, 1)[0]),
        *(address(dense), *((0,) * 4 if dense is None else broadcast_strides(dense, 4))),
    )
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
        words = bits(mask, Lq, Lk, device)
        shape = (*words.shape[:2], _blocks(Lq, block_m), _blocks(Lk, block_n))
        classes = torch.empty(shape, dtype=torch.uint8, device=device)
        matrix = _bit_matrix(words, Lk)
        extension(device).attention_classify_tiles(matrix, block_m, block_n, address(classes), *_place(words))
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
    """int32 (B or 1, H or 1, ceil(Lk / 32)): bit n % 32 of word n / 32, does some query see key n."""

    def build() -> Tensor:
        words = None if keys_alone(mask) else bits(mask, Lq, Lk, device)
        padding = mask.key_padding if words is None else None
        rows = None if padding is None else padding[:, None]
        shapes = [t.shape for t in (words, rows, mask.bias) if t is not None]
        B, H = (max(shape[i] for shape in shapes) for i in range(2))
        seen = torch.empty(B, H, _blocks(Lk, 32), dtype=torch.int32, device=device)
        if Lq == 0:
            return seen.zero_()
        extension(device).attention_seen_keys(
            address(seen), (B, H, Lq, Lk), band(mask, Lq, Lk), _with_strides(words, 2), _with_strides(padding, 1),
            bias(mask), *_place(seen),
        )  # fmt: skip
        return seen

    return build() if mask.bias is not None else mask.cached(("seen_bits", Lq, Lk, device), build)


def visibility(
    mask: AttentionMask | None, Lq: int, Lk: int, block_m: int, block_n: int, by_key: bool, device: torch.device
) -> tuple[tuple[int, ...], list[Tensor | None]]:
    """The integers of struct Visibility, and the tensors whose addresses are among them: keep those until the launch.

    by_key: for a kernel that walks along the queries of a key tile; its bits are the transposed ones. block_m 0: for a
    kernel that wants no lists, and takes key padding without bits.
    """

    def build() -> tuple[tuple[int, ...], list[Tensor | None]]:
        seen = None if mask is None or (mask.band_only and mask.bias is None) else seen_keys(mask, Lq, Lk, device)
        if mask is None or mask.band_only or (block_m == 0 and keys_alone(mask)):
            return (*band(mask, Lq, Lk), *(0,) * 8, *_with_strides(seen, 2)), [seen]
        words = (transposed_bits if by_key else bits)(mask, Lq, Lk, device)
        lists, listed = (), (0,) * 5
        if block_m > 0:
            lists = tile_lists(mask, Lq, Lk, block_m, block_n, by_key, device)
            list_strides = tuple(n // 2 for n in broadcast_strides(lists.counts, 2))
            listed = (*map(address, lists), lists.tiles.shape[3], *list_strides)
        numbers = (-Lq, Lk, *_with_strides(words, 2), *listed, *_with_strides(seen, 2))
        return numbers, [seen, words, *lists]

    if mask is None or mask.bias is not None:
        return build()
    return mask.cached(("visibility", Lq, Lk, block_m, block_n, by_key, device), build)


def elements(
    mask: AttentionMask | None, Lq: int, Lk: int, device: torch.device
) -> tuple[tuple[int, ...], list[Tensor | None]]:
    """The same for a kernel that looks at every tile: no lists. Its rows are queries."""
    return visibility(mask, Lq, Lk, 0, 0, False, device)


def keys_alone(mask: AttentionMask) -> bool:
    """Whether a band and key padding, nothing else, say who sees whom: query m sees key n if the band lets it, and n is
    seen at all."""
    return all(t is None for t in (mask.attn_mask, mask.query_padding, mask.cu_seqlens_q))


def band(mask: AttentionMask | None, Lq: int, Lk: int) -> tuple[int, int]:
    """(band_lo, band_hi) of struct Visibility, in 32 bits: query m sees no key n but by band_lo <= n - m <= band_hi."""
    low, high = (None if mask is None or not keys_alone(mask) else mask.band(Lq, Lk)) or (-Lq, Lk)
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


def _bit_matrix(words: Tensor, columns: int) -> tuple[int, int, int, int]:
    """The integers of struct BitMatrix."""
    B, H, rows = words.shape[:3]
    return address(words), B * H, rows, columns


def _place(t: Tensor) -> tuple[int, int]:
    """The last two arguments of every launch."""
    return device_index(t), stream(t)


def _blocks(count: int, block: int) -> int:
    return -(-count // block)
