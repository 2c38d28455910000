"""Attention on a CPU by products of a few heads at a time, whose scores stay in the cache.

For each block of heads and queries:   S = softmax_scale q k^T + score_mask,   P = softmax(S),   out = (P * factor) v
PyTorch's fused operator has no dropout on a CPU: with it, all heads' scores are written to memory several times. In
bfloat16 its products are slower than those of whole matrices. Measured on two cores of an AMD EPYC, torch
2.13, heads of width 64, 32 to 1024 tokens, forward and backward, against the fastest of PyTorch's ways: with dropout
1.3 to 2.9 times as fast in float32 and 1.5 to 3.6 times in bfloat16; without it 1 to 2 times in bfloat16, and 0.85 to
1.3 times in float32, which is left to PyTorch where sequences are long.

Saved for the backward: q, k, v, with dropout one byte a weight, and the weights where they are few.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn._tracing import differentiable_gradients, needs_formula
from fastattn.backends.aten._at_once import add_score_mask, plain_weights
from fastattn.backends.constants import dropout_scale
from fastattn.backends.reference.philox import LaneStream, keep_mask_from_lanes

BLOCK_BYTES = 1 << 21  # of a block's scores: what the L2 caches of two cores hold
MAX_SAVED_BYTES = 1 << 23  # more weights a call are not saved for the backward, which makes them again


class _Block(NamedTuple):
    """Slices of B, H and Lq. keys: how many keys, from the first, its queries may attend to.

    It holds either all heads of some sentences, or some heads of one, so that two dimensions of its tensors are one.
    """

    batch: slice
    heads: slice
    rows: slice
    keys: int

    def queries(self, t: Tensor) -> Tensor:
        """(B, H, Lq, ..) -> (heads of the block, rows, ..), a view."""
        return t[self.batch, self.heads, self.rows].flatten(0, 1)

    def keys_of(self, t: Tensor) -> Tensor:
        """(B, H, Lk, D) -> (heads of the block, keys, D), a view."""
        return t[self.batch, self.heads, : self.keys].flatten(0, 1)


def _blocks(q: Tensor, k: Tensor, is_causal: bool) -> Iterator[_Block]:
    B, H, Lq, _ = q.shape
    Lk = k.shape[2]
    head_bytes = max(Lq * Lk * q.itemsize, 1)
    heads = max(BLOCK_BYTES // head_bytes, 1)
    sentences, heads = (heads // H, H) if heads >= H else (1, heads)
    # Sums over parts of the queries would be rounded in 16 bits, so those are not cut.
    rows = -(-Lq // -(-head_bytes // BLOCK_BYTES)) if q.itemsize > 2 else Lq
    for batch in range(0, B, sentences):
        for head in range(0, H, heads):
            for row in range(0, Lq, rows):
                end = min(row + rows, Lq)
                place = slice(batch, min(batch + sentences, B)), slice(head, min(head + heads, H)), slice(row, end)
                yield _Block(*place, min(end, Lk) if is_causal else Lk)


class _Workspace:
    """Scratch memory that every block uses again, so that it stays in the cache."""

    def __init__(self, like: Tensor) -> None:
        self.like, self.tensors = like, {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        heads, rows, keys = shape
        if name not in self.tensors or self.tensors[name].numel() < heads * rows * keys:
            self.tensors[name] = self.like.new_empty(heads * rows * keys)
        return self.tensors[name][: heads * rows * keys].view(shape)


class BlockedAttention(torch.autograd.Function):
    """q, k, v: (B, H, L, D), contiguous, equally many heads.

    score_mask: None, or -inf and 0 in their dtype, or bool with True = masked. Its four dimensions broadcast to
        (B, H, Lq, Lk), and every query has a visible key.
    is_causal: score_mask masks every key that comes after its query, so those are not computed.
    rng_state: (seed,) of dropout, or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        score_mask: Tensor | None,
        is_causal: bool,
        softmax_scale: float,
        dropout_p: float,
        rng_state: Tensor | None,
    ) -> Tensor:
        Lk, lanes, dropout_mask, saved = k.shape[2], None, None, None
        shape = (*q.shape[:3], Lk)
        if rng_state is not None:
            lanes, dropout_mask = LaneStream(rng_state), q.new_empty(shape, dtype=torch.bool)
        if any(ctx.needs_input_grad) and q.shape[:3].numel() * Lk * q.itemsize <= MAX_SAVED_BYTES:
            saved = q.new_empty(shape)
        out, space = q.new_empty(*q.shape[:3], v.shape[3]), _Workspace(q)
        # Not 0, even if dropout drops all: baddbmm with factors of 0 alone leaves the memory as it was.
        alpha = 1.0 if rng_state is None else dropout_scale(dropout_p) or 1.0
        for block in _blocks(q, k, is_causal):
            weights = _weights(q, k, score_mask, softmax_scale, block, space, saved)
            if lanes is not None:
                # The numbers of keys that are not computed are drawn too, so that a weight's number is its place.
                drawn = lanes.take(weights.shape[0] * weights.shape[1] * Lk).view(*weights.shape[:2], Lk)
                keep_mask_from_lanes(drawn, dropout_p, torch.bool, out=block.queries(dropout_mask))
                factor = space("factor", *weights.shape)
                weights = keep_mask_from_lanes(drawn[..., : block.keys], dropout_p, q.dtype, out=factor).mul_(weights)
            block.queries(out).baddbmm_(weights, block.keys_of(v), beta=0, alpha=alpha)
        ctx.save_for_backward(q, k, v, score_mask, dropout_mask, saved)
        ctx.options = is_causal, softmax_scale, alpha
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, score_mask, dropout_mask, saved = ctx.saved_tensors
        is_causal, softmax_scale, alpha = ctx.options
        if needs_formula(dout):

            def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                weights = plain_weights(q, k, score_mask, softmax_scale)
                return torch.matmul(
                    (weights if dropout_mask is None else weights * dropout_mask * alpha).to(q.dtype), v
                )

            return *differentiable_gradients(formula, (q, k, v), (dout,)), *(None,) * 5
        dout, space = dout.contiguous(), _Workspace(q)
        dq, (dk, dv) = torch.empty_like(q), (torch.zeros_like(t) if is_causal else torch.empty_like(t) for t in (k, v))
        for block in _blocks(q, k, is_causal):
            if saved is not None:
                weights = block.queries(saved)[..., : block.keys]
            else:
                weights = _weights(q, k, score_mask, softmax_scale, block, space, None)
            dweights = space("dweights", *weights.shape)
            dweights.baddbmm_(block.queries(dout), block.keys_of(v).mT, beta=0, alpha=alpha)
            dropped = weights
            if dropout_mask is not None:
                factor = space("factor", *weights.shape).copy_(block.queries(dropout_mask)[..., : block.keys])
                dweights.mul_(factor)
                dropped = factor.mul_(weights)
            beta = 1 if is_causal or block.rows.start > 0 else 0
            block.keys_of(dv).baddbmm_(dropped.mT, block.queries(dout), beta=beta, alpha=alpha)
            dscores = torch._softmax_backward_data(
                dweights, weights, -1, weights.dtype, grad_input=space("scores", *weights.shape)
            )
            block.queries(dq).baddbmm_(dscores, block.keys_of(k), beta=0, alpha=softmax_scale)
            block.keys_of(dk).baddbmm_(dscores.mT, block.queries(q), beta=beta, alpha=softmax_scale)
        return dq, dk, dv, *(None,) * 5


def _weights(
    q: Tensor,
    k: Tensor,
    score_mask: Tensor | None,
    softmax_scale: float,
    block: _Block,
    space: _Workspace,
    saved: Tensor | None,
) -> Tensor:
    """P of a block before dropout, (its heads, rows, keys): in the memory of saved, if given, or in a space."""
    queries, keys = block.queries(q), block.keys_of(k)
    shape = len(queries), queries.shape[1], block.keys
    scores = space("scores", *shape).baddbmm_(queries, keys.mT, beta=0, alpha=softmax_scale)
    if score_mask is not None:
        part = [slice(None) if n == 1 else s for n, s in zip(score_mask.shape, block[:3], strict=False)]
        block_mask = score_mask[(*part, slice(0, block.keys) if score_mask.shape[3] > 1 else slice(None))]
        add_score_mask(scores.view(block.batch.stop - block.batch.start, -1, *shape[1:]), block_mask)
    out = space("weights", *shape) if saved is None else block.queries(saved)[..., : block.keys]
    return torch.softmax(scores, -1, out=out)
