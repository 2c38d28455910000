"""What one forward of a model decides for all of its layers: backends, dtypes, prepared masks; and which sublayers of a
layer are fused.

A sublayer is fused from its params, where these fit each other and the input; otherwise it is called. `prepare` checks
that, once a call.

Dropped: a plan that the next forward uses again. In a training step of 6 + 6 layers all decisions take 0.47 of 13 ms of
the host. 0.24 of them check that modules are unmodified, 0.08 that parameters fit, and neither may be skipped: hooks
and `.data` leave no version.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from fastattn import backends
from fastattn._tracing import is_transformed, may_write_in_place
from fastattn.backends import Backend, Implementation
from fastattn.masks import AttentionMask
from fastattn.nn.linear import Group, joined, joins, without_gaps
from fastattn.nn.params import AttentionParams, FeedForwardParams, NormParams, Params
from fastattn.nn.residual import HiddenState, PendingResidual
from fastattn.ops import _autocast
from fastattn.ops.attention import prepare_masks

MAX_CHOICES = 64  # of a plan that later forwards use again


class AttentionChoice(NamedTuple):
    """What the calls of attention with one mask, one size and one layout share.

    route: how aten computes them; None of other backends.     masks: as kernels read `mask`.
    bound: a dictionary in which the backend keeps the launches that these calls share.
    bias: what the mask adds to the scores, or nothing.
    """

    chosen: Implementation
    mask: AttentionMask | None
    route: Any
    masks: Sequence[Any]
    bound: dict[str, Any]
    bias: Sequence[Tensor]


class Plan:
    """The decisions of a forward, made when a layer first needs them.

    keeps: whether gradients are recorded.     stream_dtype: of the residual stream: the input's.
    dtype: of what the sublayers compute from it: torch.autocast's, or the input's.
    """

    def __init__(self, state: tuple[Any, ...]) -> None:
        """state: of the first layer's input, see _state."""
        self.state = state
        self.device, self.stream_dtype, autocast_dtype, self.keeps, _ = state
        self.is_under_autocast = autocast_dtype is not None
        keeps_dtype = autocast_dtype is None or self.stream_dtype is torch.float64
        self.dtype = self.stream_dtype if keeps_dtype else autocast_dtype
        self._choices: dict[tuple[Any, ...], Any] = {}

    def cast(self, x: Tensor) -> Tensor:
        """x in the dtype of the products."""
        return x if x.dtype is self.dtype else x.to(self.dtype)

    def choose(
        self, op_name: str, backend: Backend | None, key: tuple[Any, ...], dtype: torch.dtype, x: Tensor, *others: Any
    ) -> Implementation:
        """The backend of an op. key: what distinguishes calls for which it may differ.

        x, others: the op's arguments.     dtype: in which the op gets x.
        """
        key = op_name, backend, *key
        if (chosen := self._choices.get(key)) is None:
            x = x if x.dtype is dtype else torch.empty_like(x, dtype=dtype)
            chosen = self._choices[key] = backends.choose(op_name, self.device, (x, *others), backend)
        return chosen

    def choose_attention(
        self,
        backend: Backend | None,
        mask: AttentionMask | None,
        sizes: tuple[int, ...],
        dropout_p: float,
        softmax_scale: float,
        layout: tuple[Any, ...] | None,
    ) -> AttentionChoice:
        """The choice for a mask and sizes (B, Lq, Lk, H, Hk, Dk, Dv). The mask is checked here.

        layout: strides of the memory, None for self-attention. Calls with one choice have them in common.
        """
        key = id(mask), sizes, dropout_p, backend, softmax_scale, layout
        if (choice := self._choices.get(key)) is None:
            B, Lq, Lk, H, Hk, Dk, Dv = sizes
            shapes = (B, H, Lq, Dk), (B, Hk, Lk, Dk), (B, Hk, Lk, Dv)
            q, k, v = (torch.empty(shape, dtype=self.dtype, device=self.device) for shape in shapes)
            if mask is not None:
                mask.check(B, H, Lq, Lk, self.device)
            inputs = q, k, v, mask, dropout_p, None, False, False
            chosen = backends.choose("attention", self.device, inputs, backend)
            route, masks = None, ()
            if not chosen.differentiable:
                masks = prepare_masks(chosen, q, k, v, mask, needs_gradient=self.keeps)
            elif chosen.name == "aten":
                route = chosen.module.decide(q, k, v, mask, softmax_scale, dropout_p)
            bias = () if mask is None or mask.any_bias is None else (mask.any_bias,)
            choice = self._choices[key] = AttentionChoice(chosen, mask, route, masks, {}, bias)
        return choice


def _state(x: Tensor | PendingResidual) -> tuple[Any, ...] | None:
    """What a Plan depends on, next to the layers; None where no sublayer may be fused."""
    t = x
    if isinstance(x, PendingResidual):
        t = x.branch if x.residual is None else x.residual
    if type(t) is not Tensor or torch.compiler.is_compiling() or is_transformed() or _has_any_global_hook():
        return None
    modes = torch.is_grad_enabled(), may_write_in_place()
    return t.device, t.dtype, _autocast.autocast_dtype(t.device), *modes


def open_plan(plan: Plan | None, x: Tensor | PendingResidual) -> Plan | None:
    """A plan for a layer's call with this input, or None where its sublayers have to be called.

    plan: that of the forward, which the layers share, or None. Where it was made for another kind of call, the layer
    gets its own: activation checkpointing, for one, calls a layer without gradients.
    """
    state = _state(x)
    if state is None:
        return None
    return plan if plan is not None and plan.state == state else Plan(state)


class _LastPlan(threading.local):
    """What shared_plan returned last, for which masks, and for which of their stamps, requested backend and shape."""

    masks: Sequence[Callable[[], AttentionMask | None]] = ()
    state: Any = None
    plan: Plan | None = None


_last = _LastPlan()


def shared_plan(masks: Sequence[AttentionMask | None], x: Tensor) -> Plan | None:
    """open_plan for layers that get no plan of their forward, of a model of another library.

    The layers of a forward have their masks in common, so the plan is kept as long as calls have the same masks, or
    none, with the same values, on the same stream. A forward with other sizes gets another plan, and so does each layer
    where a mask keeps nothing that is prepared, as in the capture of a CUDA graph. So does the forward after
    MAX_CHOICES decisions, for memories of many lengths.
    """
    if torch.compiler.is_compiling():
        return open_plan(None, x)
    given = [mask for mask in masks if mask is not None]
    stamps = [mask.stamp(x.device, with_bias=True) for mask in given]
    state = backends.request_of_all_ops(), x.shape, stamps
    same = None not in stamps and _last.state == state and [ref() for ref in _last.masks] == given
    same = same and (_last.plan is None or len(_last.plan._choices) < MAX_CHOICES)
    plan = open_plan(_last.plan if same else None, x)
    if plan is not _last.plan:
        _last.masks, _last.state, _last.plan = [weakref.ref(mask) for mask in given], state, plan
    return plan


class Sublayer(NamedTuple):
    """A sublayer of a layer, which run_layer fuses where it can.

    params: None where something is modified.     call: the whole sublayer, of x, where it is not fused.
    mask, memory: of an attention; memory: projected keys and values (B, Lk, rows), or () for self-attention.
    """

    params: Params | None
    call: Callable[[Any], Any]
    mask: Tensor | AttentionMask | None = None
    memory: Sequence[Tensor] = ()


class Call(NamedTuple):
    """A sublayer that is fused.

    groups: what the products read. Of an attention: weights, then as many biases, of the projections and of the last
        product. The tensors of a group are concatenated: a kernel reads the results of one product.
    memory: of an attention, as of Sublayer.     choice, sizes (B, L, n_head, n_head_kv, d_k, d_v): of an attention.
    """

    params: Any
    chosen: Implementation
    norm: Implementation
    groups: Sequence[Group]
    memory: Sequence[Tensor] = ()
    choice: Any = None
    sizes: tuple[int, ...] = ()


Draw = Callable[[Implementation, float], Tensor | None]  # of a backend and dropout_p: an op's rng_state
# One tensor for each of a call's groups.
Weights = tuple[Any, ...]


def joined_weights(calls: Sequence[Call], dtype: torch.dtype) -> list[Weights]:
    """What the products of each call read, in their dtype: each group of tensors as one."""
    made = iter(joined([group for call in calls for group in call.groups], dtype))
    return [tuple(islice(made, len(call.groups))) for call in calls]


def prepare(plan: Plan, norm_first: bool, x: HiddenState, sublayers: Sequence[Sublayer]) -> list[Call | None]:
    """The call of each sublayer that is fused; None for one that is called."""
    t, residual = (x.branch, x.residual) if isinstance(x, PendingResidual) else (x, None)
    fits = isinstance(x, PendingResidual) is norm_first and type(t) is Tensor and t.dim() == 3
    fits = fits and t.dtype in (plan.stream_dtype, plan.dtype)  # a branch may have either
    if not fits or (residual is not None and (residual.device != t.device or residual.dim() != 3)):
        return [None] * len(sublayers)
    return [_call(plan, params, t, memory, mask) if params else None for params, _, mask, memory in sublayers]


def _call(plan: Plan, params: Params, x: Tensor, memory: Sequence[Tensor], mask: Any) -> Call | None:
    """x: (B, L, d_model). memory: projected keys and values (B, Lk, rows), or nothing for self-attention."""
    weight, bias, _, dropout_p = params.norm
    name = "add_rms_norm" if bias is None else "add_layer_norm"
    key, op_args = (x.shape, weight.dtype, dropout_p), (None, weight, bias, dropout_p, None)
    norm = plan.choose(name, params.backend, key, plan.stream_dtype, x, *op_args)
    if isinstance(params, FeedForwardParams):
        call = _feed_forward_call(plan, params, norm, x)
    else:
        mask = mask if isinstance(mask, AttentionMask) else AttentionMask.of(mask, has_heads=False)
        call = _attention_call(plan, params, norm, x, memory, mask)
    # Both ops of a sublayer are computed by one route. Under the reference all modules are called.
    if call is None or "reference" in (call.chosen.name, norm.name):
        return None
    return call if call.chosen.differentiable is norm.differentiable else None


def _attention_call(
    plan: Plan,
    params: AttentionParams,
    norm_by: Implementation,
    x: Tensor,
    memory: Sequence[Tensor],
    mask: AttentionMask | None,
) -> Call | None:
    if mask is not None and mask.bias is not None and mask.relative_bias is not None:  # kernels read one
        return None
    weights, biases, fc, fc_bias, norm, n_head_kv, d_k, d_v, softmax_scale, dropout_p, backend = params
    B, L, d_model = x.shape
    if not _fit(plan, norm, d_model, fc, fc_bias, *weights, *biases) or weights[0].shape[1] != d_model:
        return None
    keys, values, seqlen_k, queries = n_head_kv * d_k, n_head_kv * d_v, L, weights[0].shape[0]
    if memory:
        for t in memory:
            if t.dtype is not plan.dtype or t.device != plan.device or t.dim() != 3 or t.stride(2) != 1:
                return None
        (batch, seqlen_k, keys), (same_batch, same, values) = memory[0].shape, memory[1].shape
        if not B == batch == same_batch or same != seqlen_k or keys * d_v != values * d_k:
            return None
        n_head_kv = keys // d_k
    elif len(weights) == 1:
        queries -= keys + values
    elif not (weights[1].shape[0] == keys and weights[2].shape[0] == values):
        return None
    sizes = queries // d_k, n_head_kv, d_k, d_v
    layout = (memory[0].stride(), memory[1].stride()) if memory else None
    choice = plan.choose_attention(backend, mask, (B, L, seqlen_k, *sizes), dropout_p, softmax_scale, layout)
    if not choice.chosen.differentiable or (len(weights) > 1 and joins(weights[0], plan.dtype)):
        groups = [weights, without_gaps(weights, biases), (fc,), (fc_bias,)]
    else:
        groups = [(t,) for t in (*weights, *biases, fc, fc_bias)]
    return Call(params, choice.chosen, norm_by, groups, memory, choice, (B, L, *sizes))


def _feed_forward_call(plan: Plan, params: FeedForwardParams, norm_by: Implementation, x: Tensor) -> Call | None:
    weights1, biases1, weight2, bias2, norm, activation, dropout_p, backend = params
    if not _fit(plan, norm, x.shape[2], weight2, bias2, *weights1, *biases1):
        return None
    for weight, bias in zip(weights1, biases1, strict=True):
        if weight.shape[1] != x.shape[2] or (bias is not None and bias.numel() != weight.shape[0]):
            return None
    key, op_args = (x.shape, activation, weights1[0].shape, dropout_p), (weights1[0], biases1[0], weight2, bias2)
    chosen = plan.choose("feed_forward", backend, key, plan.dtype, x, *op_args, activation, dropout_p)
    biases1 = biases1 if len(biases1) == 1 else without_gaps(weights1, biases1)
    return Call(params, chosen, norm_by, [weights1, biases1, (weight2,), (bias2,)])


def _fit(
    plan: Plan, norm: NormParams, d_model: int, last: Tensor, last_bias: Tensor | None, *parameters: Tensor | None
) -> bool:
    """Whether the parameters have the device, dtypes, sizes and contiguous memory that products and kernels need.

    last (d_model, k), last_bias: of the product that gives the branch. TypeError where no product accepts the input.
    """
    dtype, device = last.dtype, plan.device
    if dtype is not plan.dtype and not plan.is_under_autocast:
        raise TypeError(f"the layer's input has dtype {plan.dtype}, expected {dtype} as its weights, or torch.autocast")
    if dtype is not plan.dtype and dtype is torch.float64:
        return False
    for t in (last, last_bias, *parameters):
        if t is not None and not (t.dtype is dtype and t.device == device and t.is_contiguous()):
            return False
    w, b = norm.weight, norm.bias
    if not (w.dtype is plan.stream_dtype or w.dtype is torch.float32) or last.shape[0] != d_model:
        return False
    for t in (w,) if b is None else (w, b):
        if not (t.dtype is w.dtype and t.device == device and t.is_contiguous() and t.numel() == d_model):
            return False
    return last_bias is None or last_bias.numel() == d_model
