"""The executor of a layer: own layers, those of other libraries, and single sublayers go through it.

    post-norm, for each sublayer:   branch = compute(x);   x = norm(x + dropout(branch))
    norm_first, likewise:           z = residual + dropout(branch);   branch, residual = compute(norm(z)), z

A sublayer is fused (sublayers.py), from its params, or called, where it is modified: that costs this sublayer alone.
Fused sublayers compute without further checks: Plan and `prepare` have checked everything.
Between fused sublayers x is a matrix, (B * L, d_model).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastattn.backends import Backend, Implementation
from fastattn.backends.reference.philox import draw_rng_states
from fastattn.nn.plan import Call, Draw, Plan, Sublayer, joined_weights, prepare
from fastattn.nn.residual import HiddenState, HiddenStateT, PendingResidual, add_norm, connect, current_dropout_p
from fastattn.nn.sublayers import Shared, run_formula_sublayer, run_kernel_sublayer
from fastattn.ops import _autocast


class Called(NamedTuple):
    """The call of a sublayer: its branch is called, and what is unmodified around it is fused.

    branch: (B, L, d_model) -> likewise.     dropout: a module, or its current probability.     norm: a LayerNorm.
    fusible: whether can_fuse is known to be true of norm.
    """

    branch: Callable[[Tensor], Tensor]
    dropout: nn.Module | float
    norm: nn.Module
    backend: Backend | None = None
    fusible: bool = False

    def __call__(self, x: HiddenStateT) -> HiddenStateT:
        branch, dropout, norm, backend, fusible = self

        def compute(normed: Tensor, residual: Tensor) -> PendingResidual:
            return PendingResidual(branch(normed), residual, None, dropout)

        options = {"dropout": dropout, "layer_norm": norm, "backend": backend, "fusible": fusible}
        return connect(x, compute, partial(add_norm, **options))


def run_module(x: HiddenStateT, sublayer: Any, compute: Callable[[Tensor], Tensor], fusible: bool) -> HiddenStateT:
    """A MultiHeadAttention or PositionwiseFeedForward around its block: compute(normed), all (B, L, d_model).

    fusible: what all_can_fuse returned of its dropout and layer_norm.
    Under torch.autocast the block's input is cast here, once for all linear maps that read it.
    TypeError for a PendingResidual without norm_first.
    """
    is_pending = isinstance(x, PendingResidual)
    if is_pending and not sublayer.norm_first:
        raise TypeError(f"{type(sublayer).__name__} got a PendingResidual, expected a Tensor: norm_first is False")
    if not is_pending and not isinstance(x, Tensor):
        raise TypeError(f"{type(sublayer).__name__} got a {type(x).__name__}, expected a Tensor")

    def branch(normed: Tensor) -> Tensor:
        return compute(*_autocast.autocast_inputs(normed))

    dropout = current_dropout_p(sublayer.dropout) if fusible else sublayer.dropout
    called = Called(branch, dropout, sublayer.layer_norm, sublayer.backend, fusible)
    if isinstance(x, Tensor) and sublayer.norm_first:
        return called(PendingResidual(x, None, None, 0.0)).sum()
    return called(x)


def run_layer(plan: Plan | None, norm_first: bool, x: HiddenStateT, sublayers: Sequence[Sublayer]) -> HiddenStateT:
    """The output of a layer, of the type of its input x.

    plan: of open_plan; with None every sublayer is called.
    x: (B, L, d_model), or with norm_first also a PendingResidual of such.
    """
    hidden: Any = x
    if is_sum := norm_first and isinstance(x, Tensor):
        hidden = PendingResidual(x, None, None, 0.0)
    calls: Sequence[Call | None] = [None] * len(sublayers)
    if plan is not None:
        calls = prepare(plan, norm_first, hidden, sublayers)
    fused = [call for call in calls if call is not None]
    if not fused:
        for sublayer in sublayers:
            hidden = _run_called(sublayer, hidden, is_sum)
        return hidden.sum() if is_sum else hidden
    if isinstance(hidden, PendingResidual):
        hidden = hidden.with_known_dropout()
    shape = hidden[0].shape if isinstance(hidden, PendingResidual) else hidden.shape
    draw = _draws(plan, hidden, fused, all_fused=len(fused) == len(calls))
    is_under_autocast, device_type = plan.is_under_autocast, plan.device.type
    with _autocast.no_autocast(plan.device) if is_under_autocast else nullcontext():
        shared = Shared([call for call in fused if not call.norm.differentiable], [], [])
        weights = iter(joined_weights([call for call in fused if call.norm.differentiable], plan.dtype))
        for sublayer, call, after in zip(sublayers, calls, [*calls[1:], None], strict=True):
            if call is None:  # it is called under torch.autocast, as it was
                with torch.autocast(device_type, plan.dtype) if is_under_autocast else nullcontext():
                    hidden = _run_called(sublayer, _reshaped(hidden, shape), is_sum)
                continue
            hidden = _as_matrices(hidden, call.params.norm.dropout_p)
            if call.norm.differentiable:
                hidden = run_formula_sublayer(plan, hidden, call, next(weights), draw)
            else:
                is_followed = after is not None and not after.norm.differentiable
                hidden = run_kernel_sublayer(plan, norm_first, hidden, call, shared, is_followed, draw)
        hidden = _reshaped(hidden, shape)
    return hidden.sum() if is_sum else hidden


def _run_called(sublayer: Sublayer, x: HiddenState, is_sum: bool) -> HiddenState:
    """is_sum: whether a module of the user's gets a tensor, as it would without fusion."""
    if is_sum and not isinstance(sublayer.call, Called):
        return PendingResidual(sublayer.call(x.sum()), None, None, 0.0)
    return sublayer.call(x)


def _as_matrices(x: HiddenState, dropout_p: float) -> HiddenState:
    """(B, L, d_model) -> (B * L, d_model). The dropout of a PendingResidual is known afterwards.

    dropout_p: that of the sublayer which reads it."""
    if isinstance(x, Tensor):
        return x if x.dim() == 2 else x.flatten(0, 1)
    if not isinstance(x.dropout, float):
        x = (x._replace(dropout=dropout_p) if x.dropout is None else x).with_known_dropout()
    return x if x.branch.dim() == 2 else _reshaped(x, (-1, x.branch.shape[2]))


def _reshaped(x: HiddenState, shape: Sequence[int]) -> HiddenState:
    if isinstance(x, Tensor):
        return x.reshape(shape)
    branch, residual, bias, dropout = x
    return PendingResidual(branch.reshape(shape), None if residual is None else residual.reshape(shape), bias, dropout)


def _draws(plan: Plan, x: HiddenState, calls: Sequence[Call], all_fused: bool) -> Draw:
    """What dropout draws from, in the order of the layer's ops; where all are fused, by one operator for the layer."""
    ps = [call.params.norm.dropout_p for call in calls]
    if isinstance(x, PendingResidual):  # the norm of a sublayer reads what the one before made
        ps = [ps[0] if x.dropout is None else x.dropout, *ps[:-1]]
    count = sum([p > 0 for p in (*ps, *[call.params.dropout_p for call in calls])])
    are_aten = {chosen.name == "aten" for call in calls for chosen in (call.norm, call.chosen)}  # it draws otherwise
    states: list[Tensor] = []
    if all_fused and count and len(are_aten) == 1:
        states = list(reversed(draw_rng_states(plan.device, calls[0].norm.name, count)))

    def draw(chosen: Implementation, dropout_p: float) -> Tensor | None:
        if dropout_p == 0:
            return None
        return states.pop() if states else draw_rng_states(plan.device, chosen.name, 1)[0]

    return draw
