"""Packed sequences as a batch: (1, H, T, D) as (n, H, longest, D). No scores between sequences are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn.backends.aten._visible import CALL
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
        """(1, H, T, D) -> (n, H, longest, D), contiguous. Past the end is the last position again."""
        return _Unpacked.apply(x, self)

    def pack(self, x: Tensor) -> Tensor:
        """(n, H, longest, D) -> (1, H, T, D)."""
        return _Packed.apply(x, self)

    # The same without gradients, for several tensors in one, into new memory or into out.

    def unpack_rows(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """(A, H, T, D) -> (A, n, H, longest, D), contiguous."""
        A, H, _, D = x.shape
        rows, (tensor, head, position) = _rows(x)

        def place_rows() -> Tensor:  # (A, n, H, longest)
            first = torch.arange(A)[:, None] * tensor + torch.arange(H) * head
            return self.gather_index[:, None] * position + first[:, None, :, None]

        row = self.table(("unpack", A, H, tensor, head, position), place_rows)
        return _selected(rows, row, out)

    def pack_rows(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """(A, n, H, longest, D) -> (T, A, H, D), contiguous: the order in memory of what a projection reads."""
        A, _, H, _, D = x.shape
        rows, (tensor, sequence, head, position) = _rows(x)

        def position_rows() -> Tensor:  # (T, A, H)
            first = torch.arange(A)[:, None] * tensor + torch.arange(H) * head
            return (self.sequence * sequence + self.offset * position)[:, None, None] + first

        row = self.table(("pack", A, H, tensor, sequence, head, position), position_rows)
        return _selected(rows, row, out)

    def clear_beyond_end(self, x: Tensor) -> Tensor:
        """x (n, H, longest, D), contiguous, with 0 past the ends; in place unless gradients are recorded."""
        if self.beyond_end is None:
            return x
        _, H, longest, D = x.shape

        def rows_beyond_end() -> Tensor:
            sequence, offset = self.beyond_end.nonzero(as_tuple=True)
            return ((sequence * H + torch.arange(H)[:, None]) * longest + offset).flatten()

        row = self.table(("beyond_end", H), rows_beyond_end)
        rows = x.view(-1, D)  # filled in an eighth of the time of masked_fill
        return (rows.index_fill if torch.is_grad_enabled() else rows.index_fill_)(0, row, 0).view(x.shape)


class _Unpacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: PackedAxis) -> Tensor:
        ctx.axis = axis
        return axis.unpack_rows(x)[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.pack(dout), None  # nothing but 0 comes back for places past the end


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: PackedAxis) -> Tensor:
        ctx.axis = axis
        return axis.pack_rows(x[None]).permute(1, 2, 0, 3)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.clear_beyond_end(ctx.axis.unpack(dout)), None


def _selected(rows: Tensor, row: Tensor, out: Tensor | None) -> Tensor:
    """The rows (.., D) of these numbers (..), contiguous."""
    D = rows.shape[1]
    if out is not None:
        out = out.view(-1, D)
    return torch.index_select(rows, 0, row.flatten(), out=out).view(*row.shape, D)


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
        call = CALL if torch.is_grad_enabled() else CALL // 8
        return (self.padded - self.real) * heads < call * len(self.queries.gather_index)


def plan_unpacking(mask: AttentionMask, q: Tensor, k: Tensor) -> UnpackingPlan | None:
    """How to unpack queries and keys (1, H, T, D); None where that does not pay or changes the result.

    Reads offsets on the host, so it is for a CPU.
    """
    if mask.cu_seqlens_q is None or len(q) != 1:
        return None
    cu_seqlens_q, cu_seqlens_k = mask.cu_seqlens_q, mask.cu_seqlens_k
    others = (mask.attn_mask, mask.key_padding, mask.query_padding, mask.bias)
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
        # Results of queries past the end are not read.
        unpacked = mask.replace(key_padding=key_padding, cu_seqlens_q=None, cu_seqlens_k=None)
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
