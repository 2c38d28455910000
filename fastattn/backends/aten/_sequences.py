"""Packed sequences one below the other: (1, H, T, D) as (n, H, longest, D), so that no score crosses their borders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn.masks import AttentionMask


class Side(NamedTuple):
    """Queries or keys: which packed position each place (sequence, position in it) holds, and the way back.

    token (n, longest): of places past the end any position. past (n, longest) bool: those places; None: no such.
    sequence, within (T,): the place of each packed position. tables: rows of heads, made once for each layout in memory
    and read by all layers.
    """

    token: Tensor
    past: Tensor | None
    sequence: Tensor
    within: Tensor
    tables: dict[tuple[Any, ...], Tensor]

    def table(self, key: tuple[Any, ...], build: Callable[[], Tensor]) -> Tensor:
        if key not in self.tables:
            self.tables[key] = build()
        return self.tables[key]

    def unpack(self, x: Tensor) -> Tensor:
        """(1, H, T, D) -> (n, H, longest, D), contiguous. Past the end are numbers of other sequences."""
        return _Unpacked.apply(x, self)

    def pack(self, x: Tensor) -> Tensor:
        """(n, H, longest, D) -> (1, H, T, D)."""
        return _Packed.apply(x, self)


class _Unpacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, side: Side) -> Tensor:
        ctx.side = side
        _, H, _, D = x.shape
        rows, (_, head, position) = _rows(x)

        def of_places() -> Tensor:  # (n, H, longest)
            return side.token[:, None] * position + torch.arange(H)[:, None] * head

        row = side.table(("unpack", H, head, position), of_places)
        return rows.index_select(0, row.flatten()).view(*row.shape, D)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return ctx.side.pack(dout), None  # nothing but 0 comes back for places past the end


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, side: Side) -> Tensor:
        ctx.side = side
        _, H, _, D = x.shape
        rows, (sequence, head, position) = _rows(x)

        def of_positions() -> Tensor:  # (T, H), the order in memory of what a projection reads
            return (side.sequence * sequence + side.within * position)[:, None] + torch.arange(H) * head

        row = side.table(("pack", H, sequence, head, position), of_positions)
        return rows.index_select(0, row.flatten()).view(1, *row.shape, D).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        dx, past = ctx.side.unpack(dout), ctx.side.past
        _, H, longest, D = dx.shape

        def past_the_end() -> Tensor:
            sequence, within = past.nonzero(as_tuple=True)
            return ((sequence * H + torch.arange(H)[:, None]) * longest + within).flatten()

        if past is not None:
            row = ctx.side.table(("past", H), past_the_end)
            rows = dx.view(-1, D)  # filled in an eighth of the time of masked_fill
            dx = (rows.index_fill if torch.is_grad_enabled() else rows.index_fill_)(0, row, 0).view(dx.shape)
        return dx, None


def _rows(x: Tensor) -> tuple[Tensor, list[int]]:
    """x (A, B, C, D) as a matrix (.., D), in place where that can be, and by how many of its rows the elements of A, B
    and C are apart."""
    D = x.shape[3]
    if x.stride(3) != 1 or any(stride % D for stride in x.stride()[:3]):
        x = x.contiguous()
    steps = [stride // D for stride in x.stride()[:3]]
    count = 1 + sum((size - 1) * step for size, step in zip(x.shape[:3], steps, strict=True))
    return x.as_strided((count, D), (D, 1)), steps


class Sequences(NamedTuple):
    """mask: over (n, H, longest query, longest key), of the kind that is not packed."""

    queries: Side
    keys: Side
    mask: AttentionMask


def sequences(mask: AttentionMask, q: Tensor, k: Tensor) -> Sequences | None:
    """How to take packed queries and keys (1, H, T, D) apart; None where that is not worth it or not the same.

    Reads offsets on the host, so it is for a CPU.
    """
    if mask.cu_seqlens_q is None or len(q) != 1:
        return None
    cu_seqlens_q, cu_seqlens_k = mask.cu_seqlens_q, mask.cu_seqlens_k
    others = (mask.attn_mask, mask.key_padding, mask.query_padding, mask.bias)
    if any(t is not None for t in others) or len(cu_seqlens_q) < 2:
        return None
    alike = cu_seqlens_q is cu_seqlens_k
    if not alike and mask.counts_from_the_end:  # would count from the end of the longest
        return None

    def build() -> Sequences | None:
        lengths_q, lengths_k = cu_seqlens_q.diff(), cu_seqlens_k.diff()
        longest_q, longest_k = (max(int(t.max()), 1) for t in (lengths_q, lengths_k))
        Lq, Lk = q.shape[2], k.shape[2]
        if len(lengths_q) * longest_q * longest_k >= Lq * Lk:
            return None
        queries = _side(cu_seqlens_q, longest_q, Lq)
        keys = queries if alike and Lq == Lk else _side(cu_seqlens_k, longest_k, Lk)
        key_padding = None if keys.past is None else ~keys.past
        # Results of queries past the end are not read.
        return Sequences(queries, keys, mask.replace(key_padding=key_padding, cu_seqlens_q=None, cu_seqlens_k=None))

    return mask.cached(("sequences", q.shape[2], k.shape[2]), q.device, build)


def _side(cu_seqlens: Tensor, longest: int, T: int) -> Side:
    start, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    token = start[:, None] + torch.arange(longest)
    past = token >= end[:, None]
    position = torch.arange(T)
    sequence = torch.searchsorted(end, position, right=True)
    return Side(token.clamp(max=T - 1), past if past.any() else None, sequence, position - start[sequence], {})
