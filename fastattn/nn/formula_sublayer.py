"""A fused sublayer over aten, whose operators and nodes autograd records.

Tried for aten in small models and dropped: one node for a sublayer, with its backward by hand. It needs 12 % fewer
operators and 9 % more Python calls, and is not faster (d_model 64 and 128, one core of an AMD EPYC)."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from fastattn.backends import Implementation, attention_rows, cpu_matmul
from fastattn.backends.reference import add_layer_norm as reference_norm
from fastattn.backends.reference import feed_forward as reference_ff
from fastattn.nn.fused_calls import AttentionCall, Call, Draw, FeedForwardCall, Weights
from fastattn.nn.plan import Plan
from fastattn.nn.residual import HiddenStateT, PendingResidual, connect
from fastattn.ops import _watch
from fastattn.ops.feed_forward import feed_forward_unchecked


def run_formula_sublayer(plan: Plan, x: HiddenStateT, call: Call, weights: Weights, draw: Draw) -> HiddenStateT:
    """The sublayer's output from x, a matrix (rows, d_model), or with norm_first a PendingResidual of such."""
    if isinstance(call, AttentionCall):
        compute = partial(_attend, plan, call, weights, draw)
    else:
        compute = partial(_feed_forward, plan, call, weights, draw)
    return connect(x, compute, partial(_add_norm, plan, call, draw))


def _add_norm(plan: Plan, call: Call, draw: Draw, pending: PendingResidual) -> tuple[Tensor, Tensor]:
    """(norm(z), z), z = residual + dropout(branch + bias), in the dtype of the stream."""
    (branch, residual, bias, dropout_p), (weight, norm_bias, eps, _) = pending, call.params.norm
    if branch.dtype is not plan.stream_dtype:
        branch = branch.to(plan.stream_dtype)
    op_args = branch, residual, weight, norm_bias, eps, dropout_p, draw(call.norm, dropout_p), bias
    if _watch.current is None:
        return call.norm.module.add_layer_norm(*op_args)
    return _watch.current.run("add_layer_norm", _add_layer_norm, call.norm, reference_norm.add_layer_norm, op_args)


def _add_layer_norm(chosen: Implementation, *op_args: Any) -> tuple[Tensor, Tensor]:
    return chosen.module.add_layer_norm(*op_args)


def _attend(
    plan: Plan, call: AttentionCall, weights: Weights, draw: Draw, x: Tensor, residual: Tensor
) -> PendingResidual:
    (*maps, fc, fc_bias), params, (chosen, mask, way, *_), (B, L, *_) = weights, call.params, call.choice, call.sizes
    options = params.softmax_scale, params.dropout_p, draw(chosen, params.dropout_p)
    read, count = plan.cast(x), len(maps) // 2
    projected, *others = [cpu_matmul.linear(read, w, b) for w, b in zip(maps[:count], maps[count:], strict=True)]
    memory = [t.view(B, L, -1) for t in others] or call.memory
    if _watch.current is None:
        rows = chosen.module.attend_rows(projected, memory, call.sizes, way, *options)
    else:
        compute = partial(_attend_rows, call.sizes, way, options)
        formula = partial(attention_rows.by_formula, _watch.attention_formula(chosen), call.sizes, mask, options)
        rows = _watch.current.run("attention", compute, chosen, formula, (projected, *memory), (params.fc,))
    return PendingResidual(cpu_matmul.linear(rows, fc, fc_bias), residual, None, params.norm.dropout_p)


def _attend_rows(
    sizes: attention_rows.Sizes, way: Any, options: tuple[Any, ...], chosen: Implementation, *tensors: Tensor
) -> Tensor:
    projected, *memory = tensors
    return chosen.module.attend_rows(projected, memory, sizes, way, *options)


def _feed_forward(
    plan: Plan, call: FeedForwardCall, weights: Weights, draw: Draw, x: Tensor, residual: Tensor
) -> PendingResidual:
    (weight1, bias1, weight2, bias2), params, chosen = weights, call.params, call.chosen
    op_args: tuple[Any, ...] = plan.cast(x), weight1, bias1, weight2, bias2, params.activation, params.dropout_p
    op_args = *op_args, draw(chosen, params.dropout_p)
    if _watch.current is None:
        branch = feed_forward_unchecked(chosen, *op_args)
    else:
        compute, formula = feed_forward_unchecked, reference_ff.feed_forward
        branch = _watch.current.run("feed_forward", compute, chosen, formula, op_args, (params.weight2,))
    return PendingResidual(branch, residual, None, params.norm.dropout_p)
