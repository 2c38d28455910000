"""Split the scores into visible blocks: some queries against the range of keys that some of them attend to.

A call on a CPU computes these blocks alone, so that it costs what is visible. The blocks of a mask are found once, for
all layers. Packed sequences are a block each; else queries are cut into equal parts, and sentences are separated, where
that leaves fewer scores than the additional calls cost. Products get blocks of a few heads, whose scores fit into the
cache. Where all scores fit, they are one block.

The constants below were chosen on two cores of an AMD EPYC, torch 2.13, 8 heads of width 64, 2048 tokens, by what
benchmarks/bench_attention.py measures. With CALL_OVERHEAD half as large 16 sentences of 128 tokens with padding
are separated, which takes 0.84 to 0.97 of the speed of one call. Without MERGE_OVERHEAD a causal mask of 128 tokens is
cut for products, 0.73 to 0.88 in float32, and one of 2048 tokens into parts of 64 queries, 0.82 in bfloat16 where
parts of 256 are 1.15 (all: PyTorch's time divided by ours, training).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastattn.masks import AttentionMask
from fastattn.masks.attention_mask import cut
from fastattn.masks.relative import zero_distance

CALL_OVERHEAD = 1 << 15  # as many scores are computed while PyTorch's fused operator is called
MERGE_OVERHEAD = 32  # gradients of keys are added to those of other blocks in the time of the scores of 32 queries
ROWS = (64, 128, 256, 512)  # queries of a part
MAX_COST = 0.9  # of the uncut cost; a cut that leaves more is not made
BLOCK_SCORES = 1 << 19  # of a block that products compute: in float32, what the L2 caches of two cores hold

_CPU = torch.device("cpu")
_ALL = slice(None)
Place = tuple[slice, slice, slice]  # of the batch, of queries, of keys


class Block(NamedTuple):
    """The sentences `batch` and their `heads`: queries `rows` against `keys`. All four have a start and a stop.

    score_mask: None, or what is added to the scores, or bool with True = masked. Its four dimensions broadcast to the
        scores of the block.
    is_causal: key j of the block is masked for its query i where j > i, on top of score_mask.
    flat: sentences and heads as one dimension, B * H, of which a block that products compute has a part.
    """

    batch: slice
    heads: slice
    rows: slice
    keys: slice
    score_mask: Tensor | None
    is_causal: bool
    flat: slice

    @property
    def scores(self) -> int:
        sentences, heads, rows, keys = (part.stop - part.start for part in self[:4])
        return sentences * heads * rows * keys


class Visible(NamedTuple):
    """The blocks of a call. No score is in two of them.

    has_keys (b, h, Lq, 1): bool, the queries with a visible key. None if all have one, or a bias masks the others. The
        masks of the blocks leave the keys of a query that has none, since its softmax would be NaN.
    unseen (b, h or hk, Lk, 1): bool, the keys that are in a block, that no query attends to, and that may hold NaN.
        None if there are none.
    has_all_queries: every query is in a block. Otherwise the others have no visible key.
    has_all_keys: every key is in a block.     shares_keys: one is in the blocks of different queries.
    splits: the lengths of the blocks, if all queries and all keys are split into them one after the other.
    """

    blocks: list[Block]
    splits: tuple[list[int], list[int]] | None
    has_keys: Tensor | None = None
    unseen: Tensor | None = None
    has_all_queries: bool = True
    has_all_keys: bool = True
    shares_keys: bool = False

    @property
    def is_whole(self) -> bool:
        """There is one block, of all scores."""
        return self.splits is not None and len(self.blocks) == 1

    def queries_of(self, t: Tensor) -> Sequence[Tensor]:
        """(B, H, Lq, D) -> (sentences, heads, rows, D) of each block, or (B * H, Lq, D) likewise: views."""
        if self.splits is not None:  # about 5x faster
            return t.split(self.splits[0], -2) if len(self.blocks) > 1 else (t,)
        is_flat = t.dim() == 3
        return [t[b.flat, b.rows] if is_flat else t[b.batch, b.heads, b.rows] for b in self.blocks]

    def keys_of(self, t: Tensor) -> Sequence[Tensor]:
        """(B, H, Lk, D) -> (sentences, heads, keys, D) of each block, or (B * H, Lk, D) likewise: views."""
        if self.splits is not None:
            return t.split(self.splits[1], -2) if len(self.blocks) > 1 else (t,)
        is_flat = t.dim() == 3
        return [t[b.flat, b.keys] if is_flat else t[b.batch, b.heads, b.keys] for b in self.blocks]

    def new_queries(self, t: Tensor) -> Tensor:
        """t, for the queries of all blocks to be written to: 0 for the others."""
        return t if self.has_all_queries else t.zero_()

    def scores_of(self, t: Tensor | None) -> Sequence[Tensor | None]:
        """(B * H, Lq, Lk) -> (sentences * heads, rows, keys) of each block, views. None for each if t is None."""
        if t is None:
            return [None] * len(self.blocks)
        return (t,) if self.is_whole else [t[block.flat, block.rows, block.keys] for block in self.blocks]


def visible_blocks(
    mask: AttentionMask | None, q: Tensor, k: Tensor, mask_dtype: torch.dtype, by_torch: bool
) -> Visible:
    """The blocks of queries (B, H, Lq, ..) and keys (B, Hk, Lk, ..), whose values are not read.

    mask_dtype: of the score_masks, bool or a float type. by_torch: PyTorch's operator computes them, which knows
        is_causal, and reads all heads in turn.
    """
    sizes = B, H, Hk, Lq, Lk = *q.shape[:2], k.shape[1], q.shape[2], k.shape[2]
    whole = (slice(0, B), slice(0, Lq), slice(0, Lk))
    is_free = mask is None or (mask.band_only and not mask.has_band)
    fits = not by_torch and B * H * Lq * Lk <= BLOCK_SCORES
    if is_free and (fits or (by_torch and (mask is None or mask.relative_bias is None))):
        bias = None if mask is None or not by_torch else _bias(mask, Lq, Lk, whole, mask_dtype)
        return Visible([_block(whole, H, bias, False)], ([Lq], [Lk]))

    def build() -> Visible:
        places = [whole] if fits else _places(mask, sizes, by_torch)
        is_one = mask is not None and places == [whole]
        visible = (_one_block if is_one else _build)(mask, places, sizes, mask_dtype, by_torch)
        return visible if by_torch or fits else _with_few_heads(visible, H)

    if mask is None:
        return build()
    return mask.cached(("visible blocks", *sizes, mask_dtype, by_torch), _CPU, build, with_bias=by_torch)


def _block(place: Place, H: int, score_mask: Tensor | None, is_causal: bool) -> Block:
    batch, rows, keys = place
    return Block(batch, slice(0, H), rows, keys, score_mask, is_causal, slice(batch.start * H, batch.stop * H))


def _one_block(
    mask: AttentionMask, places: list[Place], sizes: tuple[int, ...], mask_dtype: torch.dtype, by_torch: bool
) -> Visible:
    """_build where one place has all scores."""
    (_, H, _, Lq, Lk), (whole,) = sizes, places
    if by_torch and mask.band_only and mask.any_bias is None and Lq >= Lk and mask.is_causal(Lq, Lk):
        return Visible([_block(whole, H, None, True)], ([Lq], [Lk]))  # PyTorch needs no mask, and there is no other key
    score_mask, is_causal, queries, seen = _keep(mask, Lq, Lk, *whole, mask_dtype, by_torch)
    unseen = None if seen is None else _unseen(mask, ~seen, sizes)
    return Visible([_block(whole, H, score_mask, is_causal)], ([Lq], [Lk]), queries, unseen)


def _with_few_heads(visible: Visible, H: int) -> Visible:
    """Its blocks cut into all heads of some sentences, or some heads of one, so that two dimensions of their tensors
    are one."""
    blocks = []
    for batch, _, rows, keys, score_mask, *_ in visible.blocks:
        heads = max(BLOCK_SCORES // ((rows.stop - rows.start) * (keys.stop - keys.start)), 1)
        sentences, heads = (heads // H, H) if heads >= H else (1, heads)
        for some, few in itertools.product(_parts(batch.stop - batch.start, sentences), _parts(H, heads)):
            of_call = slice(batch.start + some.start, batch.start + some.stop)
            own = None if score_mask is None else cut(score_mask, some, few)
            flat = slice(of_call.start * H + few.start, (of_call.stop - 1) * H + few.stop)
            blocks.append(Block(of_call, few, rows, keys, own, False, flat))
    return visible if len(blocks) == len(visible.blocks) else visible._replace(blocks=blocks, splits=None)


def _even_part(rows: int, keys: int) -> int:
    """How many rows the equal parts have whose scores for one head are at most BLOCK_SCORES."""
    return -(-rows // max(-(-rows * keys // BLOCK_SCORES), 1))


def _parts(length: int, part: int) -> Iterator[slice]:
    return (slice(start, min(start + part, length)) for start in range(0, length, max(part, 1)))


def _places(mask: AttentionMask | None, sizes: tuple[int, ...], by_torch: bool) -> list[Place]:
    """The cut that costs least, in scores."""
    B, H, _, Lq, Lk = sizes
    most_rows = Lq if by_torch else _even_part(Lq, Lk)
    if mask is not None and mask.cu_seqlens_q is not None:
        edges = zip(*(itertools.pairwise(t.tolist()) for t in (mask.cu_seqlens_q, mask.cu_seqlens_k)), strict=True)
        return [
            (slice(0, B), slice(q0 + part.start, q0 + part.stop), slice(k0, k1))
            for (q0, q1), (k0, k1) in edges
            if k1 > k0
            for part in _parts(q1 - q0, q1 - q0 if by_torch else _even_part(q1 - q0, k1 - k0))
        ]
    uncut = [(slice(0, B), part, slice(0, Lk)) for part in _parts(Lq, most_rows)]
    ranges = None if mask is None or Lq * Lk < CALL_OVERHEAD else _key_ranges(mask, Lq, Lk)
    if ranges is None:
        return uncut
    begin, end = ranges  # (b, Lq)
    # Of what is_causal masks, PyTorch's operator leaves out whole parts of 512 keys. A fifth of the time is a mask's.
    half = 0.4 * (1 + min(512 / max(Lk, 1), 1)) if by_torch and mask.is_causal(Lq, Lk) else 1.0
    best, least = uncut, MAX_COST * (B * H * Lq * Lk * half + CALL_OVERHEAD * len(uncut))
    for rows, apart in itertools.product({most_rows, *(n for n in ROWS if n < most_rows)}, {False, len(begin) > 1}):
        n = -(-Lq // rows)
        rate = half if rows == Lq else 1.0 if by_torch else 1 + MERGE_OVERHEAD / rows
        first, last = (
            torch.nn.functional.pad(t, (0, n * rows - Lq), value=neutral).view(-1, n, rows)
            for t, neutral in ((begin, Lk), (end, 0))
        )
        first, last = first.amin(2), last.amax(2)
        if not apart:
            first, last = first.amin(0, keepdim=True), last.amax(0, keepdim=True)
        widths = (last - first).clamp_min_(0)
        scores = int(widths.sum()) * min(rows, Lq) * H * (1 if apart else B) * rate
        cost = scores + CALL_OVERHEAD * int(torch.count_nonzero(widths))
        if cost < least:
            least, best = cost, []
            for number, sentence in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
                batch = slice(number, number + 1) if apart else slice(0, B)
                for part, low, high in zip(_parts(Lq, rows), *sentence, strict=True):
                    if low < high:
                        best.append((batch, part, slice(low, high)))
    return best


def _key_ranges(mask: AttentionMask, Lq: int, Lk: int) -> tuple[Tensor, Tensor] | None:
    """(begin, end), (b, Lq) each: no query attends to a key outside of begin <= j < end, which is empty as (Lk, 0).
    Returns None if the mask does not say."""
    ranges: list[tuple[Tensor, Tensor]] = []  # broadcastable to (b, Lq)
    if mask.has_band:
        low, high = mask.band(Lq, Lk)
        row = torch.arange(Lq)[None]
        ranges.append(((row + low).clamp_min_(0), (row + high + 1).clamp_max_(Lk)))
    if mask.key_padding is not None:
        ranges.append(_hull(mask.key_padding[:, None]))
    if mask.attn_mask is not None and mask.attn_mask.shape[3] > 1:
        ranges.append(_hull(mask.attn_mask.view(torch.uint8).amax(1).view(torch.bool)))
    if not ranges:
        return None
    begin, end = ranges[0]
    for other_begin, other_end in ranges[1:]:
        begin, end = torch.maximum(begin, other_begin), torch.minimum(end, other_end)
    is_empty = begin >= end
    if mask.query_padding is not None:
        is_empty = is_empty | ~mask.query_padding
    begin, end = begin.where(~is_empty, Lk), end.where(~is_empty, 0)
    return begin.expand(-1, Lq), end.expand(-1, Lq)


def _hull(keep: Tensor) -> tuple[Tensor, Tensor]:
    """keep (.., Lk) bool -> the first True of each row, and the place after the last. A row without one: (Lk, 0)."""
    Lk = keep.shape[-1]
    numbers = torch.arange(1, Lk + 1, dtype=torch.int16 if Lk < 2**15 else torch.int32)  # int64 is about 10x slower
    return Lk - (keep * numbers.flip(0)).amax(-1).long(), (keep * numbers).amax(-1).long()


def _all(keep: Tensor) -> bool:
    return bool(keep.view(torch.uint8).amin())


class _Kept(NamedTuple):
    """What a block keeps. queries (b, h, rows, 1), keys (b, h, keys, 1): bool, which see and are seen; None if all."""

    score_mask: Tensor | None
    is_causal: bool
    queries: Tensor | None
    keys: Tensor | None


def _build(
    mask: AttentionMask | None, places: list[Place], sizes: tuple[int, ...], mask_dtype: torch.dtype, by_torch: bool
) -> Visible:
    B, H, _, Lq, Lk = sizes
    splits = _splits(places, B, Lq, Lk)
    if mask is None:
        return Visible([_block(place, H, None, False) for place in places], splits, shares_keys=len(places) > 1)
    tensors, by_distance = (
        (mask.attn_mask, mask.key_padding, mask.query_padding, mask.bias),
        mask.relative_bias is not None,
    )
    # Blocks of one shape, at the same distance from the diagonal, keep the same, if nothing but a band distinguishes.
    repeat = all(t is None for t in tensors) and (not mask.has_band or mask.cu_seqlens_q is mask.cu_seqlens_k)
    found: dict[tuple[int, ...], _Kept] = {}
    kept = []
    for batch, rows, keys in places:
        distance = rows.start - keys.start if mask.has_band or by_distance else 0
        same = (distance, rows.stop - rows.start, keys.stop - keys.start)
        if not repeat or same not in found:
            found[same] = _keep(mask, Lq, Lk, batch, rows, keys, mask_dtype, by_torch)
        kept.append(found[same])
    blocks = [_block(place, H, of.score_mask, of.is_causal) for place, of in zip(places, kept, strict=True)]
    if splits is not None and all(of.queries is None and of.keys is None for of in kept):
        return Visible(blocks, splits)
    return _with_gaps(mask, Visible(blocks, splits), kept, sizes)


def _keep(
    mask: AttentionMask,
    Lq: int,
    Lk: int,
    batch: slice,
    rows: slice,
    keys: slice,
    mask_dtype: torch.dtype,
    by_torch: bool,
) -> _Kept:
    keep, count = mask.part(Lq, Lk, batch, rows, keys), keys.stop - keys.start
    bias = _bias(mask, Lq, Lk, (batch, rows, keys), mask_dtype) if by_torch else None  # products add it
    numbers = keep.view(torch.uint8)  # their maximum is about 30x faster than any()
    queries, seen = numbers.amax(-1, keepdim=True), numbers.amax(-2).unsqueeze(-1)
    all_queries, all_keys = bool(queries.amin()), bool(seen.amin())
    is_packed = mask.cu_seqlens_q is not None
    is_causal = by_torch and not is_packed and mask.is_causal(Lq, Lk) and rows.start == keys.start
    if is_causal:
        keep = mask.without_band().part(Lq, Lk, batch, rows, keys)
    elif not all_queries:
        keep = keep | (queries == 0)
    if by_torch and is_packed and mask.has_band and keep.shape[:2] == (1, 1):
        is_causal = torch.equal(keep[0, 0], torch.ones_like(keep[0, 0]).tril_())
        keep = keep | is_causal  # nothing else is masked
    masks_some = all_queries and not (all_keys or is_causal)  # a key that no query sees
    score_mask = _score_mask(keep, bias, mask_dtype, count) if masks_some or not _all(keep) else bias
    queries, seen = queries.view(torch.bool), seen.view(torch.bool)
    return _Kept(score_mask, is_causal, None if all_queries else queries, None if all_keys else seen)


def _with_gaps(mask: AttentionMask, visible: Visible, kept: list[_Kept], sizes: tuple[int, ...]) -> Visible:
    """visible where some queries or keys are in no block, or keys in several, or hidden within one."""
    B, _, _, Lq, Lk = sizes
    with_batch = [t for t in (mask.key_padding, mask.query_padding, mask.attn_mask) if t is not None]
    b = max((t.shape[0] for t in with_batch), default=1)
    h = 1 if mask.attn_mask is None else mask.attn_mask.shape[1]
    has_keys = torch.zeros(b, h, Lq, 1, dtype=torch.bool)
    seen, read = torch.zeros(b, h, Lk, 1, dtype=torch.bool), torch.zeros(b, 1, Lk, 1, dtype=torch.bool)
    count, true = [0, 0], torch.ones((), dtype=torch.bool)
    for (batch, _, rows, keys, *_), of in zip(visible.blocks, kept, strict=True):
        cut(has_keys, batch, _ALL, rows).copy_(true if of.queries is None else of.queries)
        cut(seen, batch, _ALL, keys).logical_or_(true if of.keys is None else of.keys)
        cut(read, batch, _ALL, keys).fill_(True)
        for i, part in enumerate((rows, keys)):
            count[i] += (batch.stop - batch.start) * (part.stop - part.start)
    different = int(torch.count_nonzero(read)) * (B // b)
    has_all, shares_keys = (count[0] == B * Lq, different == B * Lk), count[1] > different
    queries, unseen = None if _all(has_keys) else has_keys, _unseen(mask, read & ~seen, sizes)
    return Visible(visible.blocks, visible.splits, queries, unseen, *has_all, shares_keys=shares_keys)


def _unseen(mask: AttentionMask, hidden: Tensor, sizes: tuple[int, ...]) -> Tensor | None:
    """Of Visible. hidden (b, h, Lk, 1): which keys in a block no query attends to."""
    if mask.key_padding is None and mask.cu_seqlens_q is None and not mask.has_band:
        return None
    if hidden.shape[1] > 1:  # for all heads of a group
        hidden = hidden.unflatten(1, (sizes[2], -1)).all(2)
    return hidden if hidden.any() else None


def _splits(places: list[Place], B: int, Lq: int, Lk: int) -> tuple[list[int], list[int]] | None:
    found: list[list[int]] = []
    for length, parts in ((Lq, [rows for _, rows, _ in places]), (Lk, [keys for *_, keys in places])):
        edges = [0, *(part.stop for part in parts)]
        if any(part.start != end for part, end in zip(parts, edges, strict=False)) or edges[-1] != length:
            return None
        found.append([part.stop - part.start for part in parts])
    rows, keys = found
    return (rows, keys) if all(batch == slice(0, B) for batch, *_ in places) else None


def _score_mask(keep: Tensor, bias: Tensor | None, mask_dtype: torch.dtype, keys: int) -> Tensor | None:
    """Of a Block, where keep is False, with a bias."""
    keep = keep.expand(-1, -1, -1, keys)  # PyTorch's operators need all
    if mask_dtype == torch.bool and bias is None:
        return ~keep
    bias = torch.zeros((), dtype=mask_dtype) if bias is None else bias
    return torch.where(keep, bias, -torch.inf)


def _bias(mask: AttentionMask, Lq: int, Lk: int, place: Place, mask_dtype: torch.dtype) -> Tensor | None:
    """A block's, as PyTorch's operator takes it with queries of mask_dtype: in that, or in float32."""
    batch, rows, keys = place
    if mask.relative_bias is not None:
        bias = mask.relative_bias.detach()
        bias = relative_part(bias, zero_distance(bias.shape[1], Lq, Lk), rows, keys)[None]
    elif mask.bias is not None:
        bias = cut(mask.bias.detach(), batch, _ALL, rows, keys)
    else:
        return None
    if bias.dtype != mask_dtype:
        bias = bias.to(torch.promote_types(mask_dtype, torch.float32))
    return bias.expand(-1, -1, -1, keys.stop - keys.start)


def relative_part(bias: Tensor, zero: int, rows: slice, keys: slice) -> Tensor:
    """A bias by distance (H, ..) of these queries and keys, (H, rows, keys). zero: the place of distance 0 in it."""
    first = keys.start - rows.stop + 1 + zero  # of the last query
    length, width = rows.stop - rows.start, keys.stop - keys.start
    return bias[:, first : first + length + width - 1].unfold(1, width, 1).flip(1)
