"""Packed sequences as a batch: (1, H, T, D) as (n, H, longest, D). No scores between sequences are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn.backends.aten._visible import CALL_OVERHEAD
from fastattn.masks import AttentionMask


class PackedAxis(NamedTuple):
    """Queries or keys: which packed position each place (sequence, position in it) holds, and the way back.

    gather_index (n, longest): for the places past a sequence's end its last position, so that NaN stays in a sequence.
    beyond_end (n, longest) bool: these places; None if there are none.
    sequence, offset (T,): the place of each packed position. tables: rows of heads, made once for each layout in memory
    and read by all layers.
    """

    gather_index: Tensor
    beyond_end: Tensor | None
    sequence: Tensor
    offset: Tensor
    tables: dict[tuple[Any, ...], Tensor]

    def table(self, key: tuple[Any, ...], build: Callable[[], Tensor]) -> Tensor:
        if key not in self.tables:
            self.tables[key] = build()
        return self.tables[key]

    def unpack(self, x: Tensor) -> Tensor:
        """(1, H, T, D) -> (n, H, longest, D), contiguous, or several stacked, (A, 1, H, T, D) -> (A, n, H, longest, D).
        Past the end is the last position again."""
        return _Unpacked.apply(x, self)

    def pack(self, x: Tensor) -> Tensor:
        """The way back, into the order in memory that a projection reads: (T, A, H, D)."""
        return _Packed.apply(x, self)

    # The same without gradients.

    def unpack_rows(self, x: Tensor) -> Tensor:
        *stack, _, H, _, D = x.shape
        rows, (*steps, _, head, position) = _rows(x)

        def place_rows() -> Tensor:  # (.., n, H, longest)
            row = self.gather_index[:, None] * position + torch.arange(H)[:, None] * head
            return row + torch.arange(*stack).view(-1, 1, 1, 1) * steps[0] if stack else row

        row = self.table(("unpack", *stack, H, *steps, head, position), place_rows)
        return torch.embedding(rows, row)

    def pack_rows(self, x: Tensor) -> Tensor:
        *stack, _, H, _, D = x.shape
        rows, (*steps, sequence, head, position) = _rows(x)

        def position_rows() -> Tensor:  # (T, .., H)
            row = (self.sequence * sequence + self.offset * position)[:, None] + torch.arange(H) * head
            return row[:, None] + torch.arange(*stack)[:, None] * steps[0] if stack else row

        row = self.table(("pack", *stack, H, *steps, sequence, head, position), position_rows)
        return torch.embedding(rows, row).movedim(0, -2).unsqueeze(-4)

    def clear_beyond_end(self, x: Tensor) -> Tensor:
        """x (.., n, H, longest, D), contiguous, with 0 past the ends; in place unless gradients are recorded."""
        if self.beyond_end is None:
            return x
        n, H, longest, D = x.shape[-4:]

        def rows_beyond_end() -> Tensor:
            sequence, offset = self.beyond_end.nonzero(as_tuple=True)
            return ((sequence * H + torch.arange(H)[:, None]) * longest + offset).flatten()

        row = self.table(("beyond_end", H), rows_beyond_end)
        rows = x.view(-1, n * H * longest, D)  # about 8x faster than masked_fill
        return (rows.index_fill if torch.is_grad_enabled() else rows.index_fill_)(1, row, 0).view(x.shape)


class _Unpacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: PackedAxis) -> Tensor:
        ctx.axis = axis
        return axis.unpack_rows(x)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.pack(dout), None  # nothing but 0 comes back for places past the end


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: PackedAxis) -> Tensor:
        ctx.axis = axis
        return axis.pack_rows(x)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.clear_beyond_end(ctx.axis.unpack(dout)), None


def _rows(x: Tensor) -> tuple[Tensor, list[int]]:
    """x (.., D) as a matrix (.., D), without a copy if possible, and the steps of its other axes in rows of it."""
    D = x.shape[-1]
    if x.stride(-1) != 1 or any(stride % D for stride in x.stride()[:-1]):
        x = x.contiguous()
    steps = [stride // D for stride in x.stride()[:-1]]
    count = 1 + sum((size - 1) * step for size, step in zip(x.shape[:-1], steps, strict=True))
    return x.as_strided((count, D), (D, 1)), steps


class UnpackingPlan(NamedTuple):
    """mask: over (n, H, longest query, longest key), of the kind that is not packed.

    padded: the scores of a head. real: those within the sequences."""

    queries: PackedAxis
    keys: PackedAxis
    mask: AttentionMask
    padded: int
    real: int

    def pays(self, heads: int) -> bool:
        """Whether what padding costs is less than a call of PyTorch's operator for each sequence. In bfloat16 on an AMD
        EPYC, where it is asked, that is fast without a gradient."""
        call = CALL_OVERHEAD if torch.is_grad_enabled() else CALL_OVERHEAD // 8
        return (self.padded - self.real) * heads < call * len(self.queries.gather_index)


def plan_unpacking(mask: AttentionMask, q: Tensor, k: Tensor) -> UnpackingPlan | None:
    """How to unpack queries and keys (1, H, T, D); None where that does not pay or changes the result.

    Reads offsets on the host, so it is for a CPU.
    """
    if mask.cu_seqlens_q is None or len(q) != 1:
        return None
    cu_seqlens_q, cu_seqlens_k = mask.cu_seqlens_q, mask.cu_seqlens_k
    others = (mask.attn_mask, mask.key_padding, mask.query_padding, mask.any_bias)
    if any(t is not None for t in others) or len(cu_seqlens_q) < 2:
        return None
    same_sequences = cu_seqlens_q is cu_seqlens_k
    if not same_sequences and mask.counts_from_the_end:  # would count from the end of the longest
        return None

    def build() -> UnpackingPlan | None:
        lengths_q, lengths_k = cu_seqlens_q.diff(), cu_seqlens_k.diff()
        longest_q, longest_k = (max(int(t.max()), 1) for t in (lengths_q, lengths_k))
        Lq, Lk = q.shape[2], k.shape[2]
        padded = len(lengths_q) * longest_q * longest_k
        if padded >= Lq * Lk:
            return None
        queries = _packed_axis(cu_seqlens_q, longest_q, Lq)
        keys = queries if same_sequences and Lq == Lk else _packed_axis(cu_seqlens_k, longest_k, Lk)
        key_padding = None if keys.beyond_end is None else ~keys.beyond_end
        # Results of queries past the end are not read. But where they alone see a key, it may be NaN.
        sees_more = bool((lengths_q < lengths_k).any()) and (mask.has_band or not lengths_q.all())
        query_padding = ~queries.beyond_end if sees_more and queries.beyond_end is not None else None
        unpacked = mask.replace(
            key_padding=key_padding, query_padding=query_padding, cu_seqlens_q=None, cu_seqlens_k=None
        )
        return UnpackingPlan(queries, keys, unpacked, padded, int((lengths_q * lengths_k).sum()))

    return mask.cached(("sequences", q.shape[2], k.shape[2]), q.device, build)


def _packed_axis(cu_seqlens: Tensor, longest: int, T: int) -> PackedAxis:
    start, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    gather_index = start[:, None] + torch.arange(longest)
    beyond_end = gather_index >= end[:, None]
    position = torch.arange(T)
    sequence = torch.searchsorted(end, position, right=True)
    return PackedAxis(
        torch.minimum(gather_index, (end - 1).clamp(min=0)[:, None]),
        beyond_end if beyond_end.any() else None,
        sequence,
        position - start[sequence],
        {},
    )
