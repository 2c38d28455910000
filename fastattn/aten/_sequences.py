"""Packed sequences one below the other: (1, H, T, D) as (n, H, longest, D), so that no score crosses their borders."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn.masks import AttentionMask


class Side(NamedTuple):
    """Queries or keys. token (n * longest,): the packed position of each place, any position for places past the end.
    start (n,): the first. place (T,): where each packed position went. inside (T,) bool: whether in any sequence."""

    token: Tensor
    start: Tensor
    place: Tensor
    inside: Tensor | None  # None: all are

    def unpack(self, x: Tensor) -> Tensor:
        """(1, H, T, D) -> (n, H, longest, D)"""
        _, H, _, D = x.shape
        rows = _Moved.apply(x[0].transpose(0, 1).flatten(1), self.token, self.place, self.inside)
        return rows.view(len(self.start), -1, H, D).transpose(1, 2)

    def pack(self, x: Tensor, otherwise: float) -> Tensor:
        """(n, H, longest, D) -> (1, H, T, D)"""
        _, H, _, D = x.shape
        rows = x.transpose(1, 2).reshape(-1, H * D).index_select(0, self.place)
        packed = rows.view(1, -1, H, D).transpose(1, 2)
        return packed if self.inside is None else packed.where(self.inside[:, None], otherwise)


class _Moved(torch.autograd.Function):
    """x (T, d) at token. The way back reads place, as nothing that comes back for places past the end is not 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, place: Tensor, inside: Tensor | None) -> Tensor:
        ctx.save_for_backward(place, inside)
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        place, inside = ctx.saved_tensors
        dx = dout.index_select(0, place)
        return dx if inside is None else dx.where(inside[:, None], 0), None, None, None


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
    (attn_mask, key_padding, query_padding, cu_seqlens_q, cu_seqlens_k), bounds = mask.flatten()
    others = (attn_mask, key_padding, query_padding, mask.bias)
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
        queries, real_q = _side(cu_seqlens_q, longest_q, Lq)
        keys, real_k = (queries, real_q) if alike and Lq == Lk else _side(cu_seqlens_k, longest_k, Lk)
        # Queries past the end may see what they like: nobody reads their results.
        return Sequences(queries, keys, AttentionMask.unflatten([None, real_k, None, None, None], bounds, None))

    return mask.cached(("sequences", q.shape[2], k.shape[2]), build)


def _side(cu_seqlens: Tensor, longest: int, T: int) -> tuple[Side, Tensor | None]:
    """One Side, and which of its places are real, bool (n, longest); None: all are."""
    start, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    token = start[:, None] + torch.arange(longest)
    real = token < end[:, None]
    position = torch.arange(T)
    sequence = torch.searchsorted(end, position, right=True)
    inside = (position >= start[0]) & (position < end[-1])
    place = (sequence * longest + position - start[sequence.clamp(max=len(start) - 1)]).clamp(0, token.numel() - 1)
    side = Side(token.clamp(max=T - 1).flatten(), start, place, None if inside.all() else inside)
    return side, None if real.all() else real
