"""Attention on a CPU as a loop over the visible blocks of a mask (_visible.py), whose scores stay in the cache.

A block is computed by PyTorch's fused operator, or by products:
    S = softmax_scale q k^T + score_mask,   P = softmax(S),   out = (P * factor) v
The operator has no dropout on a CPU: with it, PyTorch writes all heads' scores to memory several times. In bfloat16 its
products are slower than those of whole matrices. Measured on two cores of an AMD EPYC, torch 2.13, heads of width 64,
32 to 1024 tokens, forward and backward, products against PyTorch's fastest: with dropout 1.3 to 2.9 times
as fast in float32 and 1.5 to 3.6 times in bfloat16; without it 1 to 2 times in bfloat16, and 0.85 to 1.3 times in
float32, which is left to PyTorch where sequences are long.

Saved for the backward: q, k, v, and of the operator out and the logarithms of the softmax's sums. Of products P before
and after dropout where these are few; else the backward computes P again, and keeps one byte a weight with dropout. Of
products in 16 bits also out: see _score_gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn._tracing import refuse_second_derivative
from fastattn.backends.aten._plain import add_score_mask, repeat_heads
from fastattn.backends.aten._visible import BLOCK_SCORES, Block, Visible, relative_part
from fastattn.backends.constants import dropout_scale
from fastattn.backends.reference.philox import LaneStream, draw_kept, keep_mask_from_lanes

MAX_SAVED_BYTES = 1 << 23  # more weights a call are not saved for the backward, which makes them again
# A row of scores in fewer bytes, a vector register's, is computed number by number. On an AMD EPYC, torch 2.13, the
# softmax of 6,400 scores in rows of 10 takes 112 us forward and 45 backward in float32, by four operators 26 and 11; of
# 262,144 scores in rows of 20 1270 and 1680 us in bfloat16, by float32 620 and 300. Rows of 33 take 350 and 190.
SHORT_ROW = 64
# The softmax of a row of fewer 16-bit numbers is faster in float32, forward alone. Likewise, 524,288 scores in rows of
# 32, 48, 63, 80 and 128: 770, 1070, 1860, 830 and 450 us in bfloat16, by float32 590, 520, 630, 480 and 490; backward
# 170 to 230 and 230 to 270. Only rows of 33 and 65 are slower: 810 and 970, 580 and 680 us.
LONG_ROW = 128

operator = torch._scaled_dot_product_flash_attention_for_cpu
_operator_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class Call(NamedTuple):
    """rng_state: (seed,) of dropout, or None. With by_torch there is none.

    n_head: H.     dtype: of out.
    as_rows: whether out is (B * Lq, H * Dv), as a projection reads it, in place of (B, H, Lq, Dv).
    relative_bias: that of the mask for all heads, detached, if products add it. PyTorch's operator has it in its mask.
    """

    visible: Visible
    by_torch: bool
    softmax_scale: float
    dropout_p: float
    rng_state: Tensor | None
    n_head: int
    dtype: torch.dtype
    as_rows: bool
    relative_bias: Tensor | None = None
    zero_distance: int = 0  # its place in relative_bias

    @property
    def kept_scale(self) -> float:
        """Not 0, even if dropout drops all: baddbmm with factors of 0 alone leaves the memory as it was."""
        return 1.0 if self.rng_state is None else dropout_scale(self.dropout_p) or 1.0


class BlockAttention(torch.autograd.Function):
    """out of q, k, v, given as three tensors, or those of one shape stacked in front.

    PyTorch's operator gets (B, H, L, D), products (B * H, L, D), contiguous, with equally many heads.
    bias: what score_masks are views of, or the call's relative_bias, which gets a gradient, or None. It must not be
        edited before the backward.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, bias: Tensor | None, *tensors: Tensor) -> Tensor:
        if call.by_torch:
            out, saved = forward_by_operator(call, tensors)
        else:
            out, saved = _forward_by_products(call, tensors, saves=any(ctx.needs_input_grad))
        ctx.save_for_backward(bias, *tensors, *saved)
        ctx.call, ctx.count = call, len(tensors)
        return _result(call, out)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(dout)
        call, (bias, *tensors) = ctx.call, ctx.saved_tensors
        tensors, saved = tensors[: ctx.count], tensors[ctx.count :]
        if call.as_rows:
            Lq, H = tensors[0].shape[-2], call.n_head
            dout = dout.reshape(dout.shape[0] // Lq, Lq, H, dout.shape[1] // H).transpose(1, 2)
        dbias = None
        if ctx.needs_input_grad[1]:
            dbias = torch.zeros_like(call.relative_bias, dtype=_wide(bias.dtype))
        if call.by_torch:
            grads = _backward_by_operator(call, dout, tensors, saved)
        else:
            grads = _backward_by_products(call, dout, tensors, saved, dbias)
        return None, None if dbias is None else dbias.sum_to_size(bias.shape).to(bias.dtype), *grads


def _result(call: Call, out: Tensor) -> Tensor:
    """out (B, H, Lq, Dv) as the call returns it."""
    if call.as_rows:
        out = out.transpose(1, 2)
    if out.dtype is not call.dtype:
        out = out.to(call.dtype, memory_format=torch.contiguous_format)
    return out.reshape(out.shape[0] * out.shape[1], -1) if call.as_rows else out


def unstacked(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """q, k and v."""
    return tensors if len(tensors) == 3 else tensors[0].unbind()


def forward_by_operator(call: Call, tensors: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    """out, and what the backward reads. Of one block of all scores autograd records a gradient."""
    (q, k, v), visible = unstacked(tensors), call.visible
    (B, H, Lq, _), blocks = q.shape, visible.blocks
    if len(blocks) == 1 and visible.has_all_queries:  # no copy
        keys, values = repeat_heads(visible.keys_of(k)[0], visible.keys_of(v)[0], H)
        out, lse = operator(q, keys, values, **_options(call, blocks[0]))
        return out, (out, lse)
    k, v = repeat_heads(k, v, H)
    # In the memory that a projection reads.
    out = visible.new_queries(q.new_empty(B, Lq, H, v.shape[3])).transpose(1, 2)
    saved = [out]
    parts = visible.queries_of(out), visible.queries_of(q), visible.keys_of(k), visible.keys_of(v)
    for block, of_out, q, k, v in zip(blocks, *parts, strict=True):
        found, lse = operator(q, k, v, **_options(call, block))
        of_out.copy_(found)
        saved.append(lse)
    return out, saved


def _forward_by_products(call: Call, tensors: Sequence[Tensor], saves: bool) -> tuple[Tensor, Sequence[Tensor | None]]:
    (q, k, v), visible = unstacked(tensors), call.visible
    (heads, Lq, _), (Lk, Dv) = q.shape, v.shape[1:]
    out = visible.new_queries(q.new_empty(heads, Lq, Dv))
    kept = None if call.rng_state is None else _draw(call, (heads, Lq, Lk))
    saves_weights = saves and heads * Lq * Lk * q.itemsize <= MAX_SAVED_BYTES
    workspace = None if saves_weights else _Workspace(q)
    saved = [out if q.itemsize == 2 else None, *([] if saves_weights else [kept])]
    parts = visible.queries_of(out), visible.queries_of(q), visible.keys_of(k), visible.keys_of(v)
    for block, of_kept, of_out, q, k, v in zip(visible.blocks, visible.scores_of(kept), *parts, strict=True):
        weights, dropped = _weights(call, block, workspace, of_kept, q, k)
        of_out.baddbmm_(dropped, v, beta=0, alpha=call.kept_scale)
        if saves_weights:
            saved += weights, dropped
    return out.view(heads // call.n_head, call.n_head, Lq, Dv), saved


def _backward_by_operator(
    call: Call, dout: Tensor, tensors: Sequence[Tensor], saved: Sequence[Tensor]
) -> Sequence[Tensor]:
    (q, k, v), visible = unstacked(tensors), call.visible
    H, Hk, blocks = q.shape[1], k.shape[1], visible.blocks
    if H != Hk:
        tensors = q, k, v = q, *repeat_heads(k, v, H)
    if visible.is_whole and len(tensors) == 3:  # no copy
        grads = _operator_backward(dout, q, k, v, *saved, **_options(call, blocks[0]))
    else:
        grads = _new_gradients(visible, tensors)
        dq, dk, dv = unstacked(grads)
        parts = *map(visible.queries_of, (dout, q, saved[0], dq)), *map(visible.keys_of, (k, v, dk, dv))
        for block, lse, dout, q, out, dq, k, v, dk, dv in zip(blocks, saved[1:], *parts, strict=True):
            found = _operator_backward(dout, q, k, v, out, lse, **_options(call, block))
            dq.copy_(found[0])
            for total, grad in ((dk, found[1]), (dv, found[2])):
                total.add_(grad) if visible.shares_keys else total.copy_(grad)
    if H != Hk:
        grads = grads[0], *(t.unflatten(1, (Hk, -1)).sum(2) for t in grads[1:])
    return [t.to(q.dtype) for t in grads]


def _backward_by_products(
    call: Call, dout: Tensor, tensors: Sequence[Tensor], saved: Sequence[Tensor | None], dbias: Tensor | None
) -> Sequence[Tensor]:
    visible, grads = call.visible, _new_gradients(call.visible, tensors)
    (q, k, v), (dq, dk, dv), workspace = unstacked(tensors), unstacked(grads), _Workspace(tensors[0])
    (out, *saved), dtype = saved, q.dtype
    has_weights = len(saved) == 2 * len(visible.blocks)
    of_blocks = zip(saved[::2], saved[1::2], strict=True) if has_weights else zip(visible.scores_of(saved[0]))
    dout = (dout if dout.dtype is dtype else dout.to(dtype)).reshape(*q.shape[:2], v.shape[2]).contiguous()
    of_out = repeat(None) if out is None else visible.queries_of(out)
    queries, keys = (dout, q, dq), (k, v, dk, dv)
    parts = *map(visible.queries_of, queries), *map(visible.keys_of, keys)
    of_blocks = zip(visible.blocks, of_blocks, *parts, strict=True)
    for (block, of_block, dout, q, dq, k, v, dk, dv), out in zip(of_blocks, of_out, strict=False):
        weights, dropped = of_block if has_weights else _weights(call, block, workspace, of_block[0], q, k)
        _add_product(dv, dropped.mT, dout, call.kept_scale, visible.shares_keys)
        dscores = _score_gradient(call, workspace, dout, out, v, weights, dropped)
        _add_product(dq, dscores, k, call.softmax_scale, False)
        _add_product(dk, dscores.mT, q, call.softmax_scale, visible.shares_keys)
        if dbias is not None:
            _add_diagonals(dbias, call.zero_distance, block, dscores)
    return [t if t.dtype is dtype else t.to(dtype) for t in grads]


def _add_diagonals(total: Tensor, zero: int, block: Block, dscores: Tensor) -> None:
    """Adds the sums of dS over its diagonals to the gradient of a bias by distance, total (H, Lq + Lk - 1).

    dS, with its queries in reverse order, is copied into rows with as many zeros as there are rows. A view with rows
    one number shorter turns its diagonals into columns."""
    _, heads, rows, keys, *_ = block
    count, length, width = heads.stop - heads.start, rows.stop - rows.start, keys.stop - keys.start
    diagonals, first = length + width - 1, keys.start - rows.stop + 1 + zero
    summed = dscores.view(-1, count, length, width).sum(0, dtype=total.dtype)
    skewed = F.pad(summed.flip(1), (0, length))
    skewed = skewed.as_strided((count, length, diagonals), (length * (diagonals + 1), diagonals, 1))
    total[heads, first : first + diagonals] += skewed.sum(1)


def _new_gradients(visible: Visible, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Memory for the gradients: 0 for what is in no block and for what is added to, which is in float32 at least."""
    grads = []
    for number, t in enumerate(tensors):
        of_queries, of_keys = number == 0, number > 0 or len(tensors) == 1
        adds = of_keys and visible.shares_keys
        is_written = (visible.has_all_queries or not of_queries) and (visible.has_all_keys or not of_keys)
        dtype = _wide(t.dtype) if adds else t.dtype
        grads.append((torch.empty_like if is_written and not adds else torch.zeros_like)(t, dtype=dtype))
    return grads


class _Workspace:
    """Scratch memory that every block uses again, so that it stays in the cache."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.tensors: dict[str, Tensor] = {}

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        t, count = self.tensors.get(name), math.prod(shape)
        if t is None or t.numel() < count:
            t = self.tensors[name] = self.like.new_empty(shape)
        return t if t.shape == shape else t.view(-1)[:count].view(shape)


# PyTorch's operator adds its mask to the scores in float32 at least, so a bias is part of the mask.


def _options(call: Call, block: Block) -> dict[str, Any]:
    scale = call.softmax_scale
    return {"dropout_p": 0.0, "is_causal": block.is_causal, "attn_mask": block.score_mask, "scale": scale}


def _add_product(total: Tensor, left: Tensor, right: Tensor, factor: float, adds: bool) -> None:
    if total.dtype is left.dtype:
        total.baddbmm_(left, right, beta=int(adds), alpha=factor)
    else:
        total.add_(torch.bmm(left, right), alpha=factor)


def _weights(
    call: Call, block: Block, workspace: _Workspace | None, kept: Tensor | None, q: Tensor, k: Tensor
) -> tuple[Tensor, Tensor]:
    """P before and after dropout, (heads, rows, keys), without the factor of what is kept. In new memory where there
    is no workspace."""
    scores = _scores(call, block, workspace, q, k)
    shape = scores.shape
    weights = _softmax(scores, None if workspace is None else workspace("weights", shape), q.dtype)
    if kept is None:
        return weights, weights
    if workspace is None:
        return weights, weights * kept
    return weights, workspace("dropped", shape).copy_(kept).mul_(weights)


def _scores(call: Call, block: Block, workspace: _Workspace | None, q: Tensor, k: Tensor) -> Tensor:
    """S, (heads, rows, keys), with what is added to it."""
    shape = *q.shape[:2], k.shape[1]
    scores = q.new_empty(shape) if workspace is None else workspace("scores", shape)
    scores.baddbmm_(q, k.mT, beta=0, alpha=call.softmax_scale)
    if (dtype := scores_dtype(q.dtype, shape[2])) is not scores.dtype:
        scores = scores.to(dtype)
    by_sentence = scores.view(block.batch.stop - block.batch.start, -1, *shape[1:])
    if call.relative_bias is not None:
        by_sentence.add_(relative_part(call.relative_bias[block.heads], call.zero_distance, block.rows, block.keys))
    if block.score_mask is not None:
        add_score_mask(by_sentence, block.score_mask)
    return scores


def scores_dtype(products: torch.dtype, columns: int) -> torch.dtype:
    """Of masked scores in rows of this length: see LONG_ROW."""
    return _wide(products) if columns < LONG_ROW else products


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _softmax(scores: Tensor, out: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Of the last dimension, in this dtype. scores may be changed."""
    if scores.dtype is not dtype:
        weights = _softmax(scores, None, scores.dtype)
        return weights.to(dtype) if out is None else out.copy_(weights)
    if scores.shape[-1] * scores.itemsize >= SHORT_ROW:
        return torch.softmax(scores, -1, out=out)
    exps = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    return exps.div_(exps.sum(-1, keepdim=True))


def _score_gradient(
    call: Call, workspace: _Workspace, dout: Tensor, out: Tensor | None, v: Tensor, weights: Tensor, dropped: Tensor
) -> Tensor:
    """dS = P * (dP - rowsum(P * dP)), where dP = keep * factor * dout v^T. out: None unless P has 16 bits.

    A row of P in 16 bits does not sum up to 1. Where values have much in common, dP is large, and the error of dS would
    be as large as dS. But dS is the same if a number is added to a row of dP: of dP - dout * out the sum is nearly 0.
    """
    shape, dtype, acc = weights.shape, weights.dtype, _wide(weights.dtype)
    is_short, dweights = shape[-1] * weights.itemsize < SHORT_ROW, workspace("dweights", shape)
    shift = None
    if not (is_short or dtype is acc):
        shift = torch.mul(dout, out, out=workspace("product", dout.shape)).sum(-1, keepdim=True).neg_()
    if shift is not None and dropped is weights:  # added by the product, before it rounds
        dweights.copy_(shift).baddbmm_(dout, v.mT, alpha=call.kept_scale)
    else:
        dweights.baddbmm_(dout, v.mT, beta=0, alpha=call.kept_scale)
    if shift is not None and dropped is not weights:
        torch.addcmul(shift, dweights, torch.sign(dropped, out=workspace("kept", shape)), out=dweights)
        dropped = weights
    if dropped is weights and not is_short:
        return torch._softmax_backward_data(dweights, weights, -1, dtype, grad_input=dweights)
    if dtype is acc:
        dscores = dweights.mul_(dropped)
        return dscores.addcmul_(weights, dscores.sum(-1, keepdim=True), value=-1)
    weights, dscores = weights.to(acc), dweights.to(acc).mul_(dropped.to(acc))
    for _ in range(2):  # the second time the rest, as P does not sum up to 1
        dscores.addcmul_(weights, dscores.sum(-1, keepdim=True), value=-1)
    return dscores.to(dtype)


def _draw(call: Call, shape: tuple[int, ...]) -> Tensor:
    """1 or True where a weight is kept, (B * H, Lq, Lk). The number of a weight is its place in all of them."""
    heads, scores = shape[0], shape[1] * shape[2]
    if heads * scores <= BLOCK_SCORES:
        return draw_kept(call.rng_state, shape, call.dropout_p)
    keep, lanes = torch.empty(heads, scores, dtype=torch.bool), LaneStream(call.rng_state)
    for part in keep.split(max(2 * BLOCK_SCORES // scores, 1)):  # as many as have their lanes in the cache
        keep_mask_from_lanes(lanes.take(part.numel()).view(part.shape), call.dropout_p, torch.bool, out=part)
    return keep.view(shape)
