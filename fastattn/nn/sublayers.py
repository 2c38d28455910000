"""Fused sublayers: over aten by operators that autograd records, over kernels by one node of autograd.

Tried for aten in small models and dropped: one node for a sublayer, with its backward by hand. It needs 12 % fewer
operators and 9 % more Python calls, and is not faster (d_model 64 and 128, one core of an AMD EPYC).

For small launches a GPU waits for Python, so the node over kernels holds what would be five. Its backward hands
dresidual to the product that adds to it, and the kernels write the gradients of queries, keys and values into one
tensor. Host time of a training step with Triton, launches left out (tiny tensors, 6 + 6 layers, float32, two cores of
an AMD EPYC), as a share of the same model in plain PyTorch: this 0.80; one node for a layer 0.75, with its wiring a
second time; one node for each op 1.05, which also adds gradients in launches of their own and copies those of a
projection. Without attention launches that are bound once (kernels/attention/rows.py) it is 0.88. Measured again later,
next to each other: this 0.81 to 0.87, one node for a layer 0.76 to 0.77.

Under autocast its norm also writes, in 16 bits, what the next sublayer's products read, and the backward keeps it: of 6
+ 6 layers 48 of the 60 casts go away, 156 of 3446 operators, and some 0.4 ms of 10 on a GPU (estimated, 8192 tokens x
512). Not across layers: a module's output is the user's, who may edit it through `.data`.

It has no second derivative: the reference's formula would need x in float32, 16 MiB for each post-norm sublayer. An
encoder and a decoder layer would keep 361 MiB, and not 281 (bfloat16 autocast, 8192 tokens x 512 in source and target).

`kept` is a stack: what the forward of a sublayer or norm pushes, its backward pops. It is None without gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn._tracing import refuse_second_derivative
from fastattn.backends import Implementation, attention_rows, cpu_matmul
from fastattn.backends.calls import FeedForwardCall, NormCall
from fastattn.backends.reference import add_layer_norm as reference_norm
from fastattn.backends.reference import feed_forward as reference_ff
from fastattn.nn.linear import wide_mm
from fastattn.nn.plan import Call, Draw, Plan, Weights, joined_weights
from fastattn.nn.residual import HiddenState, PendingResidual
from fastattn.ops import _watch
from fastattn.ops.feed_forward import feed_forward_unchecked


def run_formula_sublayer(plan: Plan, x: HiddenState, call: Call, weights: Weights, draw: Draw) -> HiddenState:
    """The sublayer's output from x, a matrix (rows, d_model), or with norm_first a PendingResidual of such."""
    normed, residual = _formula_norm(plan, call, draw, x) if isinstance(x, PendingResidual) else (x, x)
    compute: Any = _formula_attention if call.choice else _formula_feed_forward
    branch = compute(plan, call, weights, draw(call.chosen, call.params.dropout_p), plan.cast(normed))
    pending = PendingResidual(branch, residual, None, call.params.norm.dropout_p)
    return pending if isinstance(x, PendingResidual) else _formula_norm(plan, call, draw, pending)[0]


def _formula_norm(plan: Plan, call: Call, draw: Draw, pending: PendingResidual) -> tuple[Tensor, Tensor]:
    """(norm(z), z), z = residual + dropout(branch + bias), in the dtype of the stream."""
    (branch, residual, bias, dropout_p), (weight, norm_bias, eps, _) = pending, call.params.norm
    if branch.dtype is not plan.stream_dtype:
        branch = branch.to(plan.stream_dtype)
    op_args = branch, residual, weight, norm_bias, eps, dropout_p, draw(call.norm, dropout_p), bias
    if _watch.current is None:
        return call.norm.module.add_layer_norm(*op_args)
    given = call.norm, reference_norm.add_layer_norm, op_args
    return _watch.current.run("add_layer_norm", lambda norm, *args: norm.module.add_layer_norm(*args), *given)


def _formula_attention(plan: Plan, call: Call, weights: Weights, rng_state: Tensor | None, x: Tensor) -> Tensor:
    (*maps, fc, fc_bias), params, (chosen, mask, route, *_), (B, L, *_) = weights, call.params, call.choice, call.sizes
    options, count = (params.softmax_scale, params.dropout_p, rng_state), len(maps) // 2
    projected, *others = [cpu_matmul.linear(x, w, b) for w, b in zip(maps[:count], maps[count:], strict=True)]
    memory = [t.view(B, L, -1) for t in others] or call.memory
    if _watch.current is None:
        rows = chosen.module.attend_rows(projected, memory, call.sizes, route, *options)
    else:

        def compute(chosen: Implementation, projected: Tensor, *memory: Tensor) -> Tensor:
            return chosen.module.attend_rows(projected, memory, call.sizes, route, *options)

        formula = partial(attention_rows.by_formula, _watch.attention_formula(chosen), call.sizes, mask, options)
        rows = _watch.current.run("attention", compute, chosen, formula, (projected, *memory), (params.fc,))
    return cpu_matmul.linear(rows, fc, fc_bias)


def _formula_feed_forward(plan: Plan, call: Call, weights: Weights, rng_state: Tensor | None, x: Tensor) -> Tensor:
    params, chosen, *_ = call
    op_args = x, *weights, params.activation, params.dropout_p, rng_state
    if _watch.current is None:
        return feed_forward_unchecked(chosen, *op_args)
    given = chosen, reference_ff.feed_forward, op_args, (params.weight2,)
    return _watch.current.run("feed_forward", feed_forward_unchecked, *given)


_new = tuple.__new__  # of a call: without the Python function of its class, which takes 0.2 us

Kept = list[tuple[Tensor | None, ...]]
Gradients = tuple[Tensor | None, ...]


class Shared(NamedTuple):
    """What the nodes of a layer share. They make it themselves, as autograd does not record what happens in a node.

    weights: joined_weights of the calls, the next ones last. The first node makes all of them.
    read: a node's input in the dtype of the products, where the norm of the node before has written it.
    """

    calls: Sequence[Call]  # those that kernels compute
    weights: list[Weights]
    read: list[Tensor]


class _Given(NamedTuple):
    """What a sublayer needs next to tensors. dropout_p: of the norm, with norm_first of the stream's branch."""

    plan: Plan
    norm_first: bool
    call: Call
    shared: Shared
    rounds: bool  # whether the norm writes what the next products read in their 16 bits; post-norm as a second output
    dropout_p: float
    branch_dtype: torch.dtype  # of what the norm adds to the stream, and of its gradient


States = tuple[Tensor | None, Tensor | None]  # what dropout draws from: in the norm, and within the sublayer


def run_kernel_sublayer(
    plan: Plan, norm_first: bool, x: HiddenState, call: Call, shared: Shared, is_followed: bool, draw: Draw
) -> HiddenState:
    """The sublayer's output from x, a matrix (rows, d_model), or with norm_first a PendingResidual of such.

    is_followed: whether the output is the input of another one with the same `shared`, and nothing else.
    """
    params = call.params
    if isinstance(x, PendingResidual):
        branch, residual, bias, dropout_p = x
        stream = branch.contiguous(), None if residual is None else residual.contiguous(), bias
        norm_state = draw(call.norm, dropout_p)
        op_state = draw(call.chosen, params.dropout_p)
    else:
        stream, dropout_p = (x.contiguous(),), params.norm.dropout_p
        op_state = draw(call.chosen, params.dropout_p)
        norm_state = draw(call.norm, dropout_p)
    # Kernels read a branch of 16 bits next to a stream of float32. All others are cast.
    branch_dtype = plan.stream_dtype
    if branch_dtype is torch.float32:
        branch_dtype = plan.dtype if not norm_first else branch_dtype if residual is None else branch.dtype
    rounds = plan.stream_dtype is torch.float32 and plan.dtype is not torch.float32
    # With norm_first, comparisons need the norm's output in float32.
    rounds = rounds and (_watch.current is None if norm_first else is_followed)
    given = _Given(plan, norm_first, call, shared, rounds, dropout_p, branch_dtype)
    states = norm_state, op_state
    if plan.keeps:
        norm_weight, norm_bias, *_ = params.norm
        score_bias = call.choice.bias if call.choice else ()
        inputs = *stream, *call.memory, *score_bias, *chain(*call.groups), norm_weight, norm_bias
        out = _Sublayer.apply(given, states, *inputs)
    else:
        out = _forward(given, states, stream, None)
    if not norm_first:
        return out[0]
    branch, z = out
    return PendingResidual(branch, z, _last_bias(given), params.norm.dropout_p)


def _last_bias(given: _Given) -> Tensor | None:
    """The bias of the branch that the norm adds: its kernels do so, and sum its gradient, in passes that they make
    anyway. Without gradients the product adds it."""
    return given.call.groups[-1][0] if given.plan.keeps else None


class _Sublayer(torch.autograd.Function):
    """The results of the sublayer, of the stream, the memory, a bias of the scores and the parameters of the call."""

    @staticmethod
    def forward(ctx: Any, given: _Given, states: States, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        kept: Kept = []
        out = _forward(given, states, tensors[: 3 if given.norm_first else 1], kept)
        first, second = kept
        ctx.save_for_backward(*first, *second)
        ctx.set_materialize_grads(False)
        ctx.given, ctx.first = given, len(first)
        return out

    @staticmethod
    def backward(ctx: Any, *douts: Tensor | None) -> tuple[Any, ...]:
        refuse_second_derivative(*douts)
        saved = ctx.saved_tensors  # activation checkpointing gives them out once
        grads = _backward(ctx.given, [saved[: ctx.first], saved[ctx.first :]], douts)
        needs = ctx.needs_input_grad[2:]
        return None, None, *[grad if need else None for grad, need in zip(grads, needs, strict=True)]


def _forward(given: _Given, states: States, stream: Sequence[Tensor | None], kept: Kept | None) -> tuple[Tensor, ...]:
    """stream: (x,), or with norm_first (branch, residual, bias). Returns (x,), or (branch, z)."""
    plan, call, (calls, weights, read) = given.plan, given.call, given.shared
    if not weights:
        weights += joined_weights(calls, plan.dtype)[::-1]
    op_args = given, states[1], kept, weights.pop()
    compute: Any = _attend if call.choice else _feed_forward
    if not given.norm_first:
        branch = compute(*op_args, read.pop() if read else plan.cast(stream[0]))
        return _add_norm(given, states[0], kept, branch, stream[0], _last_bias(given))[:1]
    normed, z = _add_norm(given, states[0], kept, *stream)
    z = z.view_as(z) if z is stream[0] else z  # an argument must not be returned as it is
    return compute(*op_args, plan.cast(normed)), z


def _backward(given: _Given, kept: Kept, douts: Sequence[Tensor | None]) -> Gradients:
    """Gradients of the stream, the memory, a bias of the scores and the parameters of the call: _forward backwards."""
    plan, call = given.plan, given.call
    compute: Any = _attend_backward if call.choice else _feed_forward_backward
    if not given.norm_first:
        dbranch, dresidual, *dnorm, dbias = _add_norm_backward(given, kept, douts[0].contiguous(), None)
        dbranch = dbranch if dbranch.dtype is plan.dtype else dbranch.to(plan.dtype)
        dx, grads = compute(given, kept, dbranch, dresidual, dbias)
        return dx, *grads, *dnorm
    dbranch, dz = (None if t is None else t.contiguous() for t in douts)
    if dbranch is None:
        dbranch = torch.zeros_like(kept[0][0], dtype=plan.dtype)
    dx, grads = compute(given, kept, dbranch, None, None)
    dbranch, dresidual, *dnorm, dbias = _add_norm_backward(given, kept, dx, dz)
    return dbranch, dresidual, dbias, *grads, *dnorm


# Forward and backward next to each other: what the one pushes, the other pops.


def _add_norm(
    given: _Given,
    rng_state: Tensor | None,
    kept: Kept | None,
    branch: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(norm(z), z), z = residual + dropout(branch + bias), in the dtype of the stream."""
    plan, (weight, norm_bias, eps, _) = given.plan, given.call.params.norm
    if branch.dtype is not given.branch_dtype:
        branch = branch.to(given.branch_dtype)
    norm, written = given.call.norm, {}
    if given.rounds and given.norm_first:
        written["out_dtype"] = plan.dtype
    elif given.rounds:
        written["read"] = torch.empty_like(residual, dtype=plan.dtype)
        given.shared.read.append(written["read"])
    call = _new(NormCall, (branch, residual, weight, norm_bias, bias, rng_state, eps, given.dropout_p, False))
    out, z, *statistics = norm.module.add_layer_norm_fwd(call, **written)
    saved = z, weight, bias, rng_state, *statistics
    if _watch.current is not None:

        def gradients(douts: Sequence[Tensor | None]) -> Gradients:
            *grads, dbias = _add_norm_backward(given, [saved], *douts)
            return *grads, *(None,) * 3, dbias

        results, op_args = (out, z if given.norm_first else None), (*call[:4], eps, given.dropout_p, rng_state, bias)
        learns, formula = (plan.keeps, plan.keeps and given.norm_first), reference_norm.add_layer_norm
        _watch.current.compare("add_layer_norm", norm, formula, op_args, results, learns, gradients)
    if kept is not None:
        kept.append(saved)
    return out, z


def _add_norm_backward(given: _Given, kept: Kept, dout: Tensor, dz: Tensor | None) -> Gradients:
    """dbranch, dresidual (which may be dbranch itself), dweight, dbias, and the gradient of the bias of the branch."""
    z, weight, branch_bias, rng_state, *statistics = kept.pop()
    _, norm_bias, eps, _ = given.call.params.norm
    call = _new(NormCall, (z, None, weight, norm_bias, branch_bias, rng_state, eps, given.dropout_p, False))
    return given.call.norm.module.add_layer_norm_bwd(dout, dz, call, *statistics, True, given.branch_dtype)


def _attend(given: _Given, rng_state: Tensor | None, kept: Kept | None, weights: Weights, x: Tensor) -> Tensor:
    (weight, bias, fc, fc_bias), call = weights, given.call
    (chosen, mask, _, masks, bound, score_bias), params, memory = call.choice, call.params, call.memory
    projected, options = F.linear(x, weight, bias), (params.softmax_scale, params.dropout_p, rng_state)
    given_bias = bound, *score_bias
    rows, lse = chosen.module.attention_rows_fwd(projected, memory, call.sizes, masks[0], *options, *given_bias)
    if _watch.current is not None:

        def gradients(douts: Sequence[Tensor | None]) -> Gradients:
            dprojected, *dmemory = [torch.empty_like(t) for t in op_args]
            tensors = douts[0], projected, memory, rows, lse, dprojected, dmemory
            chosen.module.attention_rows_bwd(*tensors, call.sizes, masks[1:], *options, *given_bias)
            return dprojected, *dmemory

        formula = partial(attention_rows.by_formula, _watch.attention_formula(chosen), call.sizes, mask, options)
        op_args, learns = (projected, *memory), (given.plan.keeps,)
        _watch.current.compare("attention", chosen, formula, op_args, (rows,), learns, gradients, (params.fc,))
    if kept is not None:
        kept.append((x, weight, fc, rows, lse, projected, rng_state, *memory, *score_bias))
        fc_bias = None
    return F.linear(rows, fc, fc_bias)


# A backward returns [dresidual +] the gradient of x, in the dtype of the stream, and the gradients of the memory and of
# what the products read, in the dtype of the parameters. dresidual has the dtype of the stream; dbranch, x and memory
# have that of the products.
# dbias: the gradient of the branch's bias, where the norm of this sublayer has added it.


def _attend_backward(
    given: _Given, kept: Kept, dbranch: Tensor, dresidual: Tensor | None, dbias: Tensor | None
) -> tuple[Tensor, Gradients]:
    x, weight, fc, rows, lse, projected, rng_state, *others = kept.pop()
    call, params = given.call, given.call.params
    memory, bias = others[: len(call.memory)], others[len(call.memory) :]
    chosen, _, _, masks, bound, _ = call.choice
    dtype, drows = params.fc.dtype, dbranch.mm(fc)
    dfc = wide_mm(dbranch.t(), rows, dtype) if params.fc.requires_grad else None
    options = params.softmax_scale, params.dropout_p, rng_state
    dprojected, *dmemory = [torch.empty_like(t) for t in (projected, *memory)]
    tensors = drows, projected, memory, rows, lse, dprojected, dmemory
    of_bias = chosen.module.attention_rows_bwd(*tensors, call.sizes, masks[1:], *options, bound, *bias)
    dx = wide_mm(dprojected, weight, given.plan.stream_dtype, dresidual)
    projections, biases, *_ = call.groups
    lengths, dweights, dbiases = [w.shape[0] for w in projections], (None,) * len(projections), (None,) * len(biases)
    if any([w.requires_grad for w in projections]):
        dweights = wide_mm(dprojected.t(), x, dtype).split_with_sizes(lengths)
    if any([b is not None and b.requires_grad for b in biases]):
        dbiases = dprojected.sum(0, dtype=dtype).split_with_sizes(lengths)
    return dx, (*dmemory, *([of_bias] if bias else ()), *dweights, *dbiases, dfc, dbias)


def _feed_forward(given: _Given, rng_state: Tensor | None, kept: Kept | None, weights: Weights, x: Tensor) -> Tensor:
    params, chosen, *_ = given.call
    weight1, bias1, weight2, bias2 = weights
    bias2 = bias2 if kept is None else None
    ff = _new(FeedForwardCall, (x, weight1, bias1, weight2, bias2, rng_state, params.activation, params.dropout_p))
    branch, z = chosen.module.feed_forward_fwd(ff)
    saved = x, weight1, bias1, weight2, rng_state, z
    if _watch.current is not None:

        def gradients(douts: Sequence[Tensor | None]) -> Gradients:
            dx, grads = _feed_forward_backward(given, [saved], douts[0], None, None)
            count = len(params.weights1)
            firsts = grads[:count], grads[count:-2]
            return dx, *[None if of[0] is None else torch.cat(of) for of in firsts], grads[-2]

        op_args, learns = (*ff[:5], params.activation, params.dropout_p, rng_state), (given.plan.keeps,)
        formula, owners = reference_ff.feed_forward, (params.weight2,)
        _watch.current.compare("feed_forward", chosen, formula, op_args, (branch,), learns, gradients, owners)
    if kept is not None:
        kept.append(saved)
    return branch


def _feed_forward_backward(
    given: _Given, kept: Kept, dbranch: Tensor, dresidual: Tensor | None, dbias: Tensor | None
) -> tuple[Tensor, Gradients]:
    x, weight1, bias1, weight2, rng_state, z = kept.pop()
    params, chosen, *_ = given.call
    ff = _new(FeedForwardCall, (x, weight1, bias1, weight2, None, rng_state, params.activation, params.dropout_p))
    dz, h, dbias1 = chosen.module.feed_forward_dz(dbranch, ff, z)
    dx = wide_mm(dz, weight1, given.plan.stream_dtype, dresidual)
    firsts, biases, *_ = given.call.groups
    learns, dtype = any([w.requires_grad for w in firsts]), params.weight2.dtype
    dweight1 = wide_mm(dz.t(), x, dtype) if learns else None
    dweight2 = wide_mm(dbranch.t(), h, dtype) if params.weight2.requires_grad else None
    if len(firsts) == 1:
        return dx, (dweight1, dbias1, dweight2, dbias)
    halves = [(None,) * len(of) if t is None else t.chunk(2) for t, of in ((dweight1, firsts), (dbias1, biases))]
    return dx, (*chain(*halves), dweight2, dbias)
