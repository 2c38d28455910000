"""Attention on a CPU by products of a few heads at a time, whose scores stay in the cache.

For each visible block (_visible.py), a few heads at a time:
    S = softmax_scale q k^T + score_mask,   P = softmax(S),   out = (P * factor) v
PyTorch's fused operator has no dropout on a CPU: with it, all heads' scores are written to memory several times. In
bfloat16 its products are slower than those of whole matrices. Measured on two cores of an AMD EPYC, torch
2.13, heads of width 64, 32 to 1024 tokens, forward and backward, against the fastest of PyTorch's ways: with dropout
1.3 to 2.9 times as fast in float32 and 1.5 to 3.6 times in bfloat16; without it 1 to 2 times in bfloat16, and 0.85 to
1.3 times in float32, which is left to PyTorch where sequences are long.

Saved for the backward: q, k, v, with dropout one byte a weight, and the weights where they are few.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fastattn._tracing import differentiable_gradients, needs_formula
from fastattn.backends.aten._at_once import add_score_mask
from fastattn.backends.aten._visible import Block, Visible, formula
from fastattn.backends.constants import dropout_scale
from fastattn.backends.reference.philox import LaneStream, keep_mask_from_lanes
from fastattn.masks.attention_mask import cut

BLOCK_BYTES = 1 << 21  # of the scores that are computed at a time: what the L2 caches of two cores hold
MAX_SAVED_BYTES = 1 << 23  # more weights a call are not saved for the backward, which makes them again


class _Piece:
    """Some heads of a block, whose scores fit into the cache: all heads of some sentences, or some heads of one, so
    that two dimensions of its tensors are one."""

    def __init__(self, block: Block, batch: slice, heads: slice) -> None:
        self.batch, self.heads, self.rows, self.keys = batch, heads, block.rows, block.keys
        self.score_mask = block.score_mask
        if self.score_mask is not None:
            of_block = slice(batch.start - block.batch.start, batch.stop - block.batch.start)
            self.score_mask = cut(self.score_mask, of_block, heads)

    def queries_of(self, t: Tensor) -> Tensor:
        """(B, H, Lq, ..) -> (heads of the piece, rows, ..), a view."""
        return t[self.batch, self.heads, self.rows].flatten(0, 1)

    def keys_of(self, t: Tensor) -> Tensor:
        """(B, H, Lk, D) -> (heads of the piece, keys, D), a view."""
        return t[self.batch, self.heads, self.keys].flatten(0, 1)

    def scores_of(self, t: Tensor) -> Tensor:
        """(B, H, Lq, Lk) -> (heads of the piece, rows, keys), a view."""
        return t[self.batch, self.heads, self.rows, self.keys].flatten(0, 1)


def _pieces(visible: Visible, H: int, itemsize: int) -> Iterator[_Piece]:
    for block in visible.blocks:
        head_bytes = (block.rows.stop - block.rows.start) * (block.keys.stop - block.keys.start) * itemsize
        heads = max(BLOCK_BYTES // max(head_bytes, 1), 1)
        sentences, heads = (heads // H, H) if heads >= H else (1, heads)
        for batch in range(block.batch.start, block.batch.stop, sentences):
            for head in range(0, H, heads):
                place = slice(batch, min(batch + sentences, block.batch.stop)), slice(head, min(head + heads, H))
                yield _Piece(block, *place)


class _Workspace:
    """Scratch memory that every piece uses again, so that it stays in the cache."""

    def __init__(self, like: Tensor) -> None:
        self.like, self.tensors = like, {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        heads, rows, keys = shape
        if name not in self.tensors or self.tensors[name].numel() < heads * rows * keys:
            self.tensors[name] = self.like.new_empty(heads * rows * keys)
        return self.tensors[name][: heads * rows * keys].view(shape)


class BlockedAttention(torch.autograd.Function):
    """q, k, v: (B, H, L, D), contiguous, equally many heads.

    visible: without is_causal; the score_masks are in q's dtype or bool.     rng_state: (seed,) of dropout, or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: Visible,
        softmax_scale: float,
        dropout_p: float,
        rng_state: Tensor | None,
    ) -> Tensor:
        (B, H, Lq, _), (Lk, Dv) = q.shape, v.shape[2:]
        dropout_mask = saved = None
        if rng_state is not None:
            dropout_mask = _draw(rng_state, (B * H, Lq * Lk), dropout_p).view(B, H, Lq, Lk)
        if any(ctx.needs_input_grad) and B * H * Lq * Lk * q.itemsize <= MAX_SAVED_BYTES:
            saved = q.new_empty(B, H, Lq, Lk)
        out, space = visible.new_queries(q.new_empty(B, H, Lq, Dv)), _Workspace(q)
        # Not 0, even if dropout drops all: baddbmm with factors of 0 alone leaves the memory as it was.
        alpha = 1.0 if rng_state is None else dropout_scale(dropout_p) or 1.0
        for piece in _pieces(visible, H, q.itemsize):
            weights = _weights(q, k, softmax_scale, piece, space, saved)
            if dropout_mask is not None:
                factor = space("factor", *weights.shape).copy_(piece.scores_of(dropout_mask))
                weights = factor.mul_(weights)
            piece.queries_of(out).baddbmm_(weights, piece.keys_of(v), beta=0, alpha=alpha)
        ctx.save_for_backward(q, k, v, dropout_mask, saved)
        ctx.options = visible, softmax_scale, alpha
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, dropout_mask, saved = ctx.saved_tensors
        visible, softmax_scale, alpha = ctx.options
        if needs_formula(dout):
            acc = torch.promote_types(q.dtype, torch.float32)
            factor = None if dropout_mask is None else dropout_mask.to(acc) * alpha
            found = differentiable_gradients(
                lambda *inputs: formula(*inputs, visible, softmax_scale, factor), (q, k, v), (dout,)
            )
            return *found, *(None,) * 4
        dout, space = dout.contiguous(), _Workspace(q)
        dq, dk, dv = visible.new_queries(q), visible.new_keys(k), visible.new_keys(v)

        def add(total: Tensor, left: Tensor, right: Tensor, factor: float) -> None:
            if total.dtype is q.dtype:
                total.baddbmm_(left, right, beta=int(visible.shares_keys), alpha=factor)
            else:
                total.add_(torch.bmm(left, right), alpha=factor)

        for piece in _pieces(visible, q.shape[1], q.itemsize):
            if saved is not None:
                weights = piece.scores_of(saved)
            else:
                weights = _weights(q, k, softmax_scale, piece, space, None)
            dweights = space("dweights", *weights.shape)
            dweights.baddbmm_(piece.queries_of(dout), piece.keys_of(v).mT, beta=0, alpha=alpha)
            dropped = weights
            if dropout_mask is not None:
                factor = space("factor", *weights.shape).copy_(piece.scores_of(dropout_mask))
                dweights.mul_(factor)
                dropped = factor.mul_(weights)
            add(piece.keys_of(dv), dropped.mT, piece.queries_of(dout), alpha)
            dscores = torch._softmax_backward_data(
                dweights, weights, -1, weights.dtype, grad_input=space("scores", *weights.shape)
            )
            piece.queries_of(dq).baddbmm_(dscores, piece.keys_of(k), beta=0, alpha=softmax_scale)
            add(piece.keys_of(dk), dscores.mT, piece.queries_of(q), softmax_scale)
        return dq, dk.to(k.dtype), dv.to(v.dtype), *(None,) * 4


def _draw(rng_state: Tensor, shape: tuple[int, int], dropout_p: float) -> Tensor:
    """Which weights are kept, bool. The number of a weight is its place, however the call is cut."""
    keep, lanes = torch.empty(shape, dtype=torch.bool), LaneStream(rng_state)
    rows = max(BLOCK_BYTES // (2 * max(shape[1], 1)), 1)  # as many as have their lanes in the cache
    for part in keep.split(rows):
        keep_mask_from_lanes(lanes.take(part.numel()).view(part.shape), dropout_p, torch.bool, out=part)
    return keep


def _weights(
    q: Tensor, k: Tensor, softmax_scale: float, piece: _Piece, space: _Workspace, saved: Tensor | None
) -> Tensor:
    """P of a piece before dropout, (its heads, rows, keys): in the memory of saved, if given, or in a space."""
    queries, keys = piece.queries_of(q), piece.keys_of(k)
    shape = len(queries), queries.shape[1], keys.shape[1]
    scores = space("scores", *shape).baddbmm_(queries, keys.mT, beta=0, alpha=softmax_scale)
    if piece.score_mask is not None:
        add_score_mask(scores.view(piece.batch.stop - piece.batch.start, -1, *shape[1:]), piece.score_mask)
    return torch.softmax(scores, -1, out=space("weights", *shape) if saved is None else piece.scores_of(saved))
