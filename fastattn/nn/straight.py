"""The straight path of a layer: its products and launches, in the order in which they run.

Small tensors, or a fast GPU, wait for the Python between launches. So a layer that nobody has modified is computed here
without calling its modules. What its calls have to know is decided before, once a forward for all layers (Plan). A
layer that is modified, traced or transformed goes op by op, through its modules, with the same results (layers.py); on
a GPU perhaps with another draw of dropout, see draw_rng_states.

The layer is one autograd node, _Layer, over its backends' forward and backward functions. aten has those for small
calls alone; of others, which Python hardly delays, autograd records the formulas.

    post-norm, for each sublayer:   branch = sublayer(x);   x = norm(x + dropout(branch))
    norm_first, likewise:           z = residual + dropout(branch);   branch, residual = sublayer(norm(z)), z

x is a matrix here, (B * L, d_model). `kept` is a stack: what the forward of a sublayer or norm pushes, its backward
pops. It is None where nothing is kept: without gradients, and where autograd records.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from fastattn import backends
from fastattn._tracing import (
    differentiable_gradients,
    is_transformed,
    may_write_in_place,
    needs_formula,
    same_for_the_batch,
)
from fastattn.backends import Backend, Implementation, attention_rows, cpu_matmul, implementation
from fastattn.backends.reference.philox import draw_rng_states, dropout
from fastattn.masks import AttentionMask
from fastattn.nn.attention import READ_BY_OPS, MultiHeadAttention, ScaledDotProductAttention, as_attention_mask
from fastattn.nn.feed_forward import PositionwiseFeedForward
from fastattn.nn.fusible import is_unmodified
from fastattn.nn.linear import joined, without_gaps
from fastattn.nn.recompute import is_recomputing, remember_cast, remember_norm
from fastattn.nn.residual import PendingResidual, current_dropout_p
from fastattn.ops import _autocast
from fastattn.ops.add_layer_norm import dropout_add_layer_norm
from fastattn.ops.attention import prepare_masks

Kept = list[tuple[Tensor | None, ...]]
Parameters = tuple[Tensor | None, ...]


class Norm(NamedTuple):
    """A sublayer's dropout and LayerNorm. weight, bias (d_model,)."""

    weight: Tensor
    bias: Tensor
    eps: float
    dropout_p: float
    chosen: Implementation

    def by_formula(self, parameters: Iterator[Tensor | None]) -> Norm:
        chosen = _formula("add_layer_norm", self.chosen)
        return self._replace(weight=next(parameters), bias=next(parameters), chosen=chosen)


class AttentionChoice(NamedTuple):
    """What the calls of attention with one mask, one size and one layout share.

    masks: as the backend's forward and backward read it; None where it has a formula alone, which reads mask.
    bound: a dictionary in which the backend keeps the launches that these calls share.
    """

    chosen: Implementation
    mask: AttentionMask | None
    masks: Any
    bound: dict[str, Any]


class Attention(NamedTuple):
    """A call of an attention sublayer.

    projections: of queries, keys and values, each (rows, d_model), or one of all their rows; where keys and values come
        projected (reads_memory), of the queries alone.
    biases: theirs, each (rows,); none or all.     fc: (d_model, n_head * d_v).
    sizes: B, L, n_head, n_head_kv, d_k, d_v.
    """

    projections: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    fc: Tensor
    fc_bias: Tensor | None
    norm: Norm
    sizes: tuple[int, ...]
    softmax_scale: float
    dropout_p: float
    reads_memory: bool
    choice: AttentionChoice

    @property
    def parameters(self) -> Parameters:
        return *self.projections, *self.biases, self.fc, self.fc_bias, self.norm.weight, self.norm.bias

    @property
    def groups(self) -> tuple[Parameters, ...]:
        """What the products read. The tensors of a group are concatenated."""
        return self.projections, self.biases or (None,), (self.fc,), (self.fc_bias,)

    @property
    def joined(self) -> Parameters:
        """The groups, where nothing has to be cast."""
        if len(self.projections) == 1:
            return self.projections[0], self.biases[0] if self.biases else None, self.fc, self.fc_bias
        return torch.cat(self.projections), torch.cat(self.biases) if self.biases else None, self.fc, self.fc_bias

    def by_formula(self, parameters: Iterator[Tensor | None]) -> Attention:
        """The same call by the plain formula, with other tensors for `parameters`."""
        projections, biases = (tuple(next(parameters) for _ in ts) for ts in (self.projections, self.biases))
        choice = AttentionChoice(_formula("attention", self.choice.chosen), self.choice.mask, None, {})
        fc, fc_bias, norm = next(parameters), next(parameters), self.norm.by_formula(parameters)
        return Attention(projections, biases, fc, fc_bias, norm, *self[5:9], choice)


class FeedForward(NamedTuple):
    """A call of a feed-forward sublayer. weight1 (rows, d_model), weight2 (d_model, d_inner).

    dropout_p: on the hidden units.
    """

    weight1: Tensor
    bias1: Tensor | None
    weight2: Tensor
    bias2: Tensor | None
    norm: Norm
    activation: str
    dropout_p: float
    chosen: Implementation

    @property
    def parameters(self) -> Parameters:
        return self.weight1, self.bias1, self.weight2, self.bias2, self.norm.weight, self.norm.bias

    @property
    def groups(self) -> tuple[Parameters, ...]:
        return (self.weight1,), (self.bias1,), (self.weight2,), (self.bias2,)

    @property
    def joined(self) -> Parameters:
        return self[:4]

    def by_formula(self, parameters: Iterator[Tensor | None]) -> FeedForward:
        weights = [next(parameters) for _ in range(4)]
        chosen = _formula("feed_forward", self.chosen)
        return FeedForward(*weights, self.norm.by_formula(parameters), self.activation, self.dropout_p, chosen)


Call = Attention | FeedForward


class NormParts(NamedTuple):
    """What the end of a sublayer is made of: a dropout with its current probability and a LayerNorm."""

    weight: Tensor
    bias: Tensor
    eps: float
    dropout_p: float


class AttentionParts(NamedTuple):
    """What the straight path reads of an attention sublayer that nobody has modified.

    weights, biases: of the projections of queries, keys and values, or of one projection with all their rows. Of those
        that come with a memory, which is projected before, only the queries'. A projection without a bias has None.
    fc, fc_bias: of the projection that follows the heads.
    """

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
    fc: Tensor
    fc_bias: Tensor | None
    norm: NormParts
    n_head_kv: int
    d_k: int
    d_v: int
    softmax_scale: float
    dropout_p: float
    backend: Backend | None


class FeedForwardParts(NamedTuple):
    """The same of a feed-forward sublayer. dropout_p: on the hidden units."""

    weight1: Tensor
    bias1: Tensor | None
    weight2: Tensor
    bias2: Tensor | None
    norm: NormParts
    activation: str
    dropout_p: float
    backend: Backend | None


Parts = AttentionParts | FeedForwardParts


def _formula(op_name: str, chosen: Implementation) -> Implementation:
    """What autograd can record of an op: aten drops other elements than the kernels and the reference."""
    return chosen if chosen.differentiable else implementation(op_name, "reference")


class Plan:
    """What one forward of a model decides for all of its layers.

    is_open: whether any layer may go straight.     keeps: whether gradients are recorded.
    stream_dtype: of the residual stream: the input's.
    dtype: of what the sublayers compute from it: torch.autocast's, or the input's.
    """

    def __init__(self, x: Tensor | PendingResidual) -> None:
        """x: the first layer's input."""
        self._state = _state(x)
        self.is_open = self._state is not None
        if self._state is not None:
            self.device, self.stream_dtype, autocast_dtype, self.keeps, self.is_recomputing = self._state
            self.is_under_autocast = autocast_dtype is not None
            keeps_dtype = autocast_dtype is None or self.stream_dtype is torch.float64
            self.dtype = self.stream_dtype if keeps_dtype else autocast_dtype
            self._choices: dict[tuple[Any, ...], Any] = {}

    def holds_for(self, x: Tensor | PendingResidual) -> bool:
        """Whether a layer's call with this input may use it. Activation checkpointing, for one, calls a layer without
        gradients."""
        return self._state == _state(x)

    def choose(
        self, op_name: str, backend: Backend | None, key: tuple[Any, ...], dtype: torch.dtype, x: Tensor, *others: Any
    ) -> Implementation:
        """The backend of an op. key: what distinguishes calls for which the answer may differ.

        x, others: its arguments.     dtype: in which the op gets x.
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

        layout: of the memory, None for self-attention. Calls with one choice have it in common.
        """
        key = id(mask), sizes, dropout_p, backend, softmax_scale, layout
        if (choice := self._choices.get(key)) is None:
            B, Lq, Lk, H, Hk, Dk, Dv = sizes
            shapes = (B, H, Lq, Dk), (B, Hk, Lk, Dk), (B, Hk, Lk, Dv)
            q, k, v = (torch.empty(shape, dtype=self.dtype, device=self.device) for shape in shapes)
            if mask is not None:
                mask.check(B, H, Lq, Lk, self.device)
            chosen = backends.choose("attention", self.device, (q, k, v, mask, dropout_p), backend)
            if not chosen.differentiable:
                masks = prepare_masks(chosen, q, k, v, mask, needs_gradient=self.keeps)
            elif chosen.name == "aten" and self.keeps:
                masks = chosen.module.rows_mask(q, k, v, mask, softmax_scale, dropout_p)
            else:
                masks = None
            choice = self._choices[key] = AttentionChoice(chosen, mask, masks, {})
        return choice


def _state(x: Tensor | PendingResidual) -> tuple[Any, ...] | None:
    """What a Plan depends on, next to the layers; None where no layer may go straight."""
    t = x
    if isinstance(x, PendingResidual):
        t = x.branch if x.residual is None else x.residual
    if type(t) is not Tensor or torch.compiler.is_compiling() or is_transformed() or _has_any_global_hook():
        return None
    return t.device, t.dtype, _autocast.autocast_dtype(t.device), torch.is_grad_enabled(), is_recomputing()


def open_plan(plan: Plan | None, x: Tensor | PendingResidual) -> Plan | None:
    """A plan for a layer's call with this input, or None: the layer has to go op by op.

    plan: that of the forward, which the layers share, or None. Where it was made for another kind of call, the layer
    gets one of its own.
    """
    if plan is None or not plan.holds_for(x):
        plan = Plan(x)
    return plan if plan.is_open else None


class _LastPlan(threading.local):
    """What shared_plan gave last, for which masks, and for which of their stamps, requested backend and shape."""

    masks: Sequence[Callable[[], AttentionMask | None]] = ()
    state: Any = None
    plan: Plan | None = None


_last = _LastPlan()


def shared_plan(masks: Sequence[AttentionMask | None], x: Tensor) -> Plan | None:
    """open_plan for layers that get no plan of their forward, of a model of another library.

    The layers of a forward have their masks in common, so the plan is kept as long as calls have the same masks with
    the same values, on the same stream. A forward with other sizes gets another plan, and so does each layer where a
    mask keeps nothing that is prepared, as in the capture of a CUDA graph.
    """
    given = [mask for mask in masks if mask is not None]
    if not given or torch.compiler.is_compiling():
        return open_plan(None, x)
    stamps = [mask.stamp(x.device, with_bias=True) for mask in given]
    state = backends.requested(None), x.shape, stamps
    same = None not in stamps and _last.state == state and [ref() for ref in _last.masks] == given
    plan = open_plan(_last.plan if same else None, x)
    if plan is not _last.plan:
        _last.masks, _last.state, _last.plan = [weakref.ref(mask) for mask in given], state, plan
    return plan


def run_layer(
    plan: Plan | None,
    layer: Any,
    x: Tensor | PendingResidual,
    masks: Sequence[Tensor | AttentionMask | None],
    *memory: Tensor,
) -> Tensor | PendingResidual | None:
    """The output of an EncoderLayer or DecoderLayer, or None: it has to go op by op. See open_plan and run_parts."""
    plan = open_plan(plan, x)
    parts = None if plan is None else layer.parts()
    return None if parts is None else run_parts(plan, parts, layer.norm_first, x, masks, *memory)


def run_parts(
    plan: Plan,
    parts: Sequence[Parts],
    norm_first: bool,
    x: Tensor | PendingResidual,
    masks: Sequence[Tensor | AttentionMask | None],
    *memory: Tensor,
) -> Tensor | PendingResidual | None:
    """The output of a layer, of the type of its input x, or None: it has to go op by op.

    plan: of open_plan.     parts: of the sublayers in their order.     masks: of those that are attention.
    x: a tensor (B, L, d_model), or with norm_first also a PendingResidual of such.
    memory: what the second attention attends to, projected to keys and values, (B, Lk, rows).
    """
    stream = x if isinstance(x, PendingResidual) else (x, None, None) if norm_first else (x,)
    first = stream[0]
    if type(first) is not Tensor or first.dim() != 3 or (isinstance(x, PendingResidual) and not norm_first):
        return None
    residual = stream[1] if norm_first else None
    if first.dtype is not plan.stream_dtype and first.dtype is not plan.dtype:  # of a branch, which joins the residual
        return None
    if residual is not None and (residual.device != first.device or residual.dim() != 3):
        return None
    for t in memory:
        if t.dtype is not plan.dtype or t.device != plan.device or t.dim() != 3:
            return None
    if memory and not first.shape[0] == memory[0].shape[0] == memory[1].shape[0]:
        return None
    calls: list[Call] = []
    reads, is_sum = iter((((), masks[0]), (memory, masks[-1]))), norm_first and isinstance(x, Tensor)
    for part in parts:
        if is_sum and not calls:  # x is a sum already: its dropout has been
            part = part._replace(norm=part.norm._replace(dropout_p=0.0))
        if isinstance(part, AttentionParts):
            call = _attention_call(plan, part, stream[0], *next(reads))
        else:
            call = _feed_forward_call(plan, part, stream[0])
        if call is None:
            return None
        calls.append(call)
    is_formula = call.chosen.differentiable
    for call in calls:
        for chosen in ((call.choice if isinstance(call, Attention) else call).chosen, call.norm.chosen):
            if chosen.differentiable is not is_formula or chosen.name == "reference":
                return None
    if is_formula and plan.is_recomputing:
        return None
    rng_states = _draw_rng_states(plan, calls, norm_first)
    parameters: list[Tensor | None] = []
    for call in calls:
        parameters += call.parameters
    with _autocast.no_autocast(plan.device) if plan.is_under_autocast else nullcontext():
        if plan.keeps and not (is_formula and _is_recorded(calls, stream, parameters)):
            given = plan, calls, rng_states, len(stream), len(memory)
            out, bias = _Layer.apply(given, *stream, *memory, *parameters), _bias_for_norm(calls[-1])
        else:
            out, bias = _forward(plan, calls, iter(rng_states), _as_matrices(stream), memory, None), None
            out = [t.view_as(first) for t in out]
        if not norm_first:
            return out[0]
        pending = PendingResidual(*out[:2], bias)
        return pending.sum(parts[-1].norm.dropout_p) if is_sum else pending


def _is_recorded(calls: Sequence[Call], stream: Sequence[Tensor | None], parameters: Sequence[Tensor | None]) -> bool:
    """Whether autograd records the formulas of aten: where its forward and backward do not compute such a call, where
    they may not write in place, and where parameters are frozen, whose gradients the formulas leave out."""
    adds_bias = len(stream) > 2 and stream[2] is not None
    if (
        adds_bias
        or not may_write_in_place()
        or any([isinstance(call, Attention) and call.choice.masks is None for call in calls])
    ):
        return True
    return not all([t is None or t.requires_grad for t in parameters])


def _bias_for_norm(call: FeedForward) -> Tensor | None:
    """The bias of the branch that the norm adds: a kernel does so, and sums its gradient, in passes that it makes
    anyway. For aten it is the product that adds it."""
    return None if call.chosen.differentiable else call.bias2


def _as_matrices(stream: Sequence[Tensor | None]) -> list[Tensor | None]:
    """(B, L, d_model) -> (B * L, d_model), contiguous. A bias (d_model,) stays as it is."""
    return [t if t is None or t.dim() == 1 else t.flatten(0, 1).contiguous() for t in stream]


# What a layer of this package consists of. None: something is modified, and the layer goes op by op.


def attention_parts(module: Any, norm_first: bool, reads_memory: bool) -> AttentionParts | None:
    """Of a MultiHeadAttention; with reads_memory its keys and values come projected."""
    if not is_unmodified(module, MultiHeadAttention, READ_BY_OPS) or module.norm_first is not norm_first:
        return None
    children = module._modules
    core = children["attention"]
    if not is_unmodified(core, ScaledDotProductAttention, ScaledDotProductAttention.fused_children):
        return None
    maps = [children[name]._parameters for name in (("w_qs",) if reads_memory else ("w_qs", "w_ks", "w_vs"))]
    weights, biases = (tuple([p[name] for p in maps]) for name in ("weight", "bias"))
    fc, dropout_p = children["fc"]._parameters, current_dropout_p(core._modules["dropout"])
    # Under tensor parallelism written by hand a process has some of the heads.
    n_head_kv = module.n_head_kv if reads_memory else weights[1].shape[0] // module.d_k
    heads = n_head_kv, module.d_k, module.d_v, 1 / core.temperature
    return AttentionParts(
        weights, biases, fc["weight"], fc["bias"], _norm_parts(module), *heads, dropout_p, core.backend
    )


def feed_forward_parts(module: Any, norm_first: bool) -> FeedForwardParts | None:
    """Of a PositionwiseFeedForward."""
    children = PositionwiseFeedForward.fused_children
    if not is_unmodified(module, PositionwiseFeedForward, children) or module.norm_first is not norm_first:
        return None
    w_1, w_2 = module._modules["w_1"]._parameters, module._modules["w_2"]._parameters
    weights = w_1["weight"], w_1["bias"], w_2["weight"], w_2["bias"]
    return FeedForwardParts(*weights, _norm_parts(module), module.activation, 0.0, module.backend)


def _norm_parts(module: Any) -> NormParts:
    norm = module._modules["layer_norm"]
    weight, bias = norm._parameters["weight"], norm._parameters["bias"]
    return NormParts(weight, bias, norm.eps, current_dropout_p(module._modules["dropout"]))


# The calls of the sublayers. None: their tensors do not fit each other, and the layer goes op by op.


def _attention_call(
    plan: Plan, parts: AttentionParts, x: Tensor, memory: Sequence[Tensor], mask: Any
) -> Attention | None:
    """x: (B, L, d_model). memory: projected keys and values (B, Lk, rows), or nothing for self-attention."""
    mask = mask if isinstance(mask, AttentionMask) else as_attention_mask(mask)
    if mask is not None and mask.bias is not None:
        return None
    weights, biases, fc, fc_bias, norm, n_head_kv, d_k, d_v, softmax_scale, dropout_p, backend = parts
    B, L, d_model = x.shape
    missing = sum([b is None for b in biases])  # count(None) would compare the tensors
    if missing:
        biases = () if missing == len(biases) else without_gaps(weights, biases)
    norm = _norm_call(plan, norm, x, backend)
    if not _fit(plan, norm, d_model, fc, fc_bias, *weights, *biases) or weights[0].shape[1] != d_model:
        return None
    keys, values, seqlen_k, layout, queries = n_head_kv * d_k, n_head_kv * d_v, L, None, weights[0].shape[0]
    if memory:
        (_, seqlen_k, keys), (_, same, values) = memory[0].shape, memory[1].shape
        layout = memory[0].stride(), memory[1].stride()
        if same != seqlen_k or keys * d_v != values * d_k or not layout[0][2] == layout[1][2] == 1:
            return None
        n_head_kv = keys // d_k
    elif len(weights) == 1:
        queries -= keys + values
    elif not (weights[1].shape[0] == keys and weights[2].shape[0] == values):
        return None
    n_head = queries // d_k
    sizes = n_head, n_head_kv, d_k, d_v
    choice = plan.choose_attention(backend, mask, (B, L, seqlen_k, *sizes), dropout_p, softmax_scale, layout)
    options = (B, L, *sizes), softmax_scale, dropout_p, bool(memory), choice
    return Attention(weights, biases, fc, fc_bias, norm, *options)


def _feed_forward_call(plan: Plan, parts: FeedForwardParts, x: Tensor) -> FeedForward | None:
    """x: (B, L, d_model)."""
    weight1, bias1, weight2, bias2, norm, activation, dropout_p, backend = parts
    norm = _norm_call(plan, norm, x, backend)
    if not _fit(plan, norm, x.shape[2], weight2, bias2, weight1, bias1):
        return None
    if weight1.shape[1] != x.shape[2] or (bias1 is not None and bias1.numel() != weight1.shape[0]):
        return None
    key = x.shape, activation, weight1.shape, dropout_p
    op_args = weight1, bias1, weight2, bias2, activation, dropout_p
    chosen = plan.choose("feed_forward", backend, key, plan.dtype, x, *op_args)
    return FeedForward(weight1, bias1, weight2, bias2, norm, activation, dropout_p, chosen)


def _norm_call(plan: Plan, parts: NormParts, x: Tensor, backend: Backend | None) -> Norm:
    weight, bias, eps, dropout_p = parts
    key = x.shape, weight.dtype, dropout_p
    op_args = None, weight, bias, dropout_p, None
    chosen = plan.choose("add_layer_norm", backend, key, plan.stream_dtype, x, *op_args)
    return Norm(weight, bias, eps, dropout_p, chosen)


def _fit(
    plan: Plan, norm: Norm, d_model: int, last: Tensor, last_bias: Tensor | None, *parameters: Tensor | None
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
    fits = b.dtype is w.dtype and w.device == b.device == device and w.is_contiguous() and b.is_contiguous()
    return fits and w.numel() == b.numel() == (d_model if last_bias is None else last_bias.numel()) == d_model


# A layer.


def _draw_rng_states(plan: Plan, calls: Sequence[Call], norm_first: bool) -> list[Tensor | None]:
    """What dropout draws from, in the order in which _forward needs it: twice for each call."""
    drops: list[bool] = []
    for call in calls:
        own = call.norm.dropout_p > 0, call.dropout_p > 0
        drops += own if norm_first else reversed(own)
    count = sum(drops)
    drawn = draw_rng_states(plan.device, calls[0].norm.chosen.name, count) if count else ()
    if count == len(drops):
        return list(drawn)
    rest = iter(drawn)
    return [next(rest) if drop else None for drop in drops]


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, given: tuple[Plan, list[Call], list[Tensor | None], int, int], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        """tensors: of the stream and of the memory, as many as the last of `given` say, and the parameters."""
        plan, calls, rng_states, width, num_memory = given
        stream, memory = tensors[:width], tensors[width : width + num_memory]
        kept: Kept = []
        out = _forward(plan, calls, iter(rng_states), _as_matrices(stream), memory, kept)
        first = stream[0]
        out = tuple([t.view_as(first) for t in out])
        # What is kept first is x, or with norm_first z: an input or output, which a second derivative passes through.
        # x is kept in the dtype of the stream, and cast again.
        kept[0] = out[2] if width > 1 else first, *kept[0][1:]
        ctx.save_for_backward(*memory, *rng_states, *chain.from_iterable(kept))
        ctx.set_materialize_grads(False)
        ctx.given = plan, calls, num_memory, len(rng_states), [len(pushed) for pushed in kept]
        ctx.versions = sum([t._version for t in tensors[width + num_memory :] if t is not None])
        return out

    @staticmethod
    def backward(ctx: Any, *douts: Tensor | None) -> tuple[Any, ...]:
        plan, calls, num_memory, num_states, num_pushed = ctx.given
        saved = iter(ctx.saved_tensors)  # activation checkpointing gives them out once
        memory, rng_states, *kept = [tuple(islice(saved, n)) for n in (num_memory, num_states, *num_pushed)]
        start, *others = kept[0]
        if needs_formula(*douts):
            parameters = chain.from_iterable([call.parameters for call in calls])  # of which not all are saved
            if ctx.versions != sum([t._version for t in parameters if t is not None]):
                raise RuntimeError(
                    "a parameter of a layer has been modified by an inplace operation since its forward, which a "
                    "backward with create_graph=True, or of a batch of gradients, computes again"
                )
            grads = _formula_backward(plan, calls, rng_states, douts, memory, start)
        else:
            (rows,) = _as_matrices((start,))
            kept[0] = rows if len(douts) > 1 or rows.dtype is plan.dtype else rows.to(plan.dtype), *others
            grads = _backward(plan, calls, rng_states, _as_matrices(douts), memory, kept)
            dx, dresidual, *rest = grads
            dx, is_shared = dx.view_as(start), dresidual is dx
            if len(douts) > 1:
                dresidual = dx if is_shared else dresidual.view_as(start)
            grads = dx, dresidual, *rest
        grads = None, *grads
        return tuple([grad if need else None for grad, need in zip(grads, ctx.needs_input_grad, strict=True)])


def _forward(
    plan: Plan,
    calls: Sequence[Call],
    rng_states: Iterator[Tensor | None],
    stream: Sequence[Tensor | None],
    memory: Sequence[Tensor],
    kept: Kept | None,
) -> tuple[Tensor, ...]:
    """stream: (x,), or with norm_first (branch, residual, bias). Returns (x,), or (branch, residual, z).

    z: what the first norm reads. As an output it is part of the graph, where a second derivative needs it.
    """
    weights = _weights(plan, calls)
    if len(stream) == 1:
        (x,) = stream
        for call, own in zip(calls, weights, strict=True):
            read = x if x.dtype is plan.dtype else x.to(plan.dtype)
            if plan.is_recomputing and read is not x:
                remember_cast(read, x)
            branch, bias = _FORWARD[type(call)](plan, call, own, rng_states, read, memory, kept)
            x, _ = _norm(plan, call.norm, next(rng_states), branch, x, bias, kept)
        return (x,)
    (branch, residual, bias), first = stream, None
    for call, own in zip(calls, weights, strict=True):
        x, residual = _norm(plan, call.norm, next(rng_states), branch, residual, bias, kept)
        first = residual if first is None else first
        read = x if x.dtype is plan.dtype else x.to(plan.dtype)
        if plan.is_recomputing and read is not x:
            remember_cast(read, x)
        branch, bias = _FORWARD[type(call)](plan, call, own, rng_states, read, memory, kept)
    return branch, residual, first


def _weights(plan: Plan, calls: Sequence[Call]) -> list[Parameters]:
    """What the products of each call read, in the dtype of the hidden states: its groups, each in one tensor."""
    if all([(call.fc if isinstance(call, Attention) else call.weight2).dtype is plan.dtype for call in calls]):
        return [call.joined for call in calls]
    cast = joined([group for call in calls for group in call.groups], plan.dtype)
    return [tuple(cast[i : i + 4]) for i in range(0, len(cast), 4)]


def _backward(
    plan: Plan,
    calls: Sequence[Call],
    rng_states: Sequence[Tensor | None],
    douts: Sequence[Tensor | None],
    memory: Sequence[Tensor],
    kept: Kept,
) -> tuple[Tensor | None, ...]:
    """Gradients of the stream, the memory and the parameters."""
    rng_states, dparameters = list(rng_states), []
    dmemory = [t.new_empty(*t.shape) for t in memory]
    if len(douts) == 1:
        (dx,) = douts
        for call in reversed(calls):
            dbranch, dresidual, *dnorm, dbias = _norm_backward(call.norm, kept, rng_states.pop(), dx, None)
            if dbranch.dtype is not plan.dtype:
                dbranch = dbranch.to(plan.dtype)
            dx, dweights = _BACKWARD[type(call)](call, kept, rng_states, dbranch, dresidual, memory, dmemory, dbias)
            dparameters = [*dweights, *dnorm, *dparameters]
        return dx, *dmemory, *dparameters
    dbranch, dresidual, dfirst = douts
    dbranch, dbias = torch.zeros_like(kept[0][0]) if dbranch is None else dbranch, None
    for call in reversed(calls):
        if dbranch.dtype is not plan.dtype:
            dbranch = dbranch.to(plan.dtype)
        dx, dweights = _BACKWARD[type(call)](call, kept, rng_states, dbranch, None, memory, dmemory, dbias)
        if call is calls[0] and dfirst is not None:
            dresidual = dfirst if dresidual is None else dresidual + dfirst
        if dx.dtype is not plan.stream_dtype:
            dx = dx.to(plan.stream_dtype)
        dbranch, dresidual, *dnorm, dprevious = _norm_backward(call.norm, kept, rng_states.pop(), dx, dresidual)
        dparameters, dbias = [*dweights, *dnorm, *dparameters], dprevious
    return dbranch, dresidual, dbias, *dmemory, *dparameters


def _formula_backward(
    plan: Plan,
    calls: Sequence[Call],
    rng_states: Sequence[Tensor | None],
    douts: Sequence[Tensor | None],
    memory: Sequence[Tensor],
    start: Tensor,
) -> tuple[Tensor | None, ...]:
    """As _backward, by operators that can be differentiated again: the plain formula of the same dropout, recorded.

    start: x, or with norm_first the sum z that the first norm reads. It and douts are (B, L, d_model).
    """
    norm_first, first = len(douts) > 1, calls[0].norm

    def formula(x: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        parameters, dropped, stream = iter(tensors[len(memory) :]), list(rng_states), _as_matrices((x,))
        formulas = [call.by_formula(parameters) for call in calls]
        if norm_first:
            dropped[0] = None
            stream += [None, None]
            if _bias_for_norm(calls[-1]) is not None:  # the next layer adds it
                formulas[-1] = formulas[-1]._replace(bias2=None)
        with _autocast.no_autocast(plan.device), same_for_the_batch():
            out = _forward(plan, formulas, iter(dropped), stream, tensors[: len(memory)], None)
        return tuple([t.view(x.shape) for t in out])

    inputs = start, *memory, *(t for call in calls for t in call.parameters)
    dx, *others = differentiable_gradients(formula, inputs, douts)
    if not norm_first:
        return dx, *others
    dbranch = None if dx is None else dropout(dx, first.dropout_p, rng_states[0])
    return dbranch, dx, None if dbranch is None else dbranch.sum((0, 1)), *others


# A sublayer. Forward and backward next to each other: what the one pushes, the other pops.


def _norm(
    plan: Plan,
    norm: Norm,
    rng_state: Tensor | None,
    branch: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    kept: Kept | None,
) -> tuple[Tensor, Tensor]:
    """(norm(z), z), z = residual + dropout(branch + bias), in the dtype of the stream."""
    module = norm.chosen.module
    if branch.dtype is not plan.stream_dtype:
        branch = branch.to(plan.stream_dtype)
    inputs = branch, residual, norm.weight, norm.bias, norm.eps, norm.dropout_p, rng_state, bias
    if kept is None and norm.chosen.differentiable:
        return module.add_layer_norm(*inputs)
    out, z, *statistics = module.add_layer_norm_fwd(*inputs)
    if kept is not None:
        kept.append((z, norm.weight, bias, *statistics))
        if plan.is_recomputing:
            again = {"weight": norm.weight, "bias": norm.bias, "eps": norm.eps, "backend": norm.chosen.name}
            remember_norm(out, lambda: dropout_add_layer_norm(z, None, **again))
    return out, z


def _norm_backward(
    norm: Norm, kept: Kept, rng_state: Tensor | None, dout: Tensor, dz: Tensor | None
) -> tuple[Tensor | None, ...]:
    """dbranch, dresidual (which may be dbranch itself), dweight, dbias, and the gradient of the bias of the branch."""
    z, weight, branch_bias, *statistics = kept.pop()
    inputs = dout, dz, z, weight, norm.bias, *statistics, norm.dropout_p, rng_state, True, branch_bias
    return norm.chosen.module.add_layer_norm_bwd(*inputs)


# A forward gives the sublayer's branch, and the bias that the norm is to add to it: see _bias_for_norm.
# A backward gives dresidual [+ the gradient of x], and the gradients of what the products read. It fills dmemory. Only
# dresidual, where it is not None, has the dtype of the stream; all else that of the products.
# dbias: the gradient of the branch's bias, where a norm has added it.


def _attention(
    plan: Plan,
    call: Attention,
    weights: Parameters,
    rng_states: Iterator[Tensor | None],
    x: Tensor,
    memory: Sequence[Tensor],
    kept: Kept | None,
) -> tuple[Tensor, Tensor | None]:
    (weight, bias, fc, fc_bias), (chosen, mask, masks, bound) = weights, call.choice
    module, options = chosen.module, (call.softmax_scale, call.dropout_p, next(rng_states))
    memory = memory if call.reads_memory else ()
    if chosen.differentiable:
        projected = cpu_matmul.linear(x, weight, bias)
        if kept is None:
            out, *_ = module.attention(
                *attention_rows.heads(projected, memory, call.sizes), mask, *options, return_lse=False
            )
            out_rows = out.transpose(1, 2).reshape(x.shape[0], fc.shape[1])
        else:
            out_rows, *read = module.attention_rows_fwd(projected, memory, masks, *options)
            kept.append((x, weight, fc, out_rows, *read))
        return cpu_matmul.linear(out_rows, fc, fc_bias), None
    projected = F.linear(x, weight, bias)
    out_rows, lse = module.attention_rows_fwd(projected, memory, call.sizes, masks[0], *options, bound)
    if kept is None:
        return F.linear(out_rows, fc, fc_bias), None
    kept.append((x, weight, fc, out_rows, lse, projected))
    return F.linear(out_rows, fc), call.fc_bias


def _attention_backward(
    call: Attention,
    kept: Kept,
    rng_states: list[Tensor | None],
    dbranch: Tensor,
    dresidual: Tensor | None,
    memory: Sequence[Tensor],
    dmemory: Sequence[Tensor],
    dbias: Tensor | None,
) -> tuple[Tensor, Parameters]:
    x, weight, fc, out_rows, *read = kept.pop()
    chosen, _, masks, bound = call.choice
    mm, addmm = (cpu_matmul.mm, cpu_matmul.addmm) if chosen.differentiable else (torch.mm, torch.addmm)
    dfc, dout = mm(dbranch.t(), out_rows) if call.fc.requires_grad else None, mm(dbranch, fc)
    options = call.softmax_scale, call.dropout_p, rng_states.pop()
    if not call.reads_memory:
        memory = dmemory = ()
    if chosen.differentiable:
        dbias = None if call.fc_bias is None else dbranch.sum(0)
        weights, *heads = read
        dprojected = chosen.module.attention_rows_bwd(dout, weights, heads, memory, dmemory, masks, *options)
    else:
        (lse, projected), dprojected = read, x.new_empty(x.shape[0], weight.shape[0])
        tensors = dout, projected, memory, out_rows, lse, dprojected, dmemory
        chosen.module.attention_rows_bwd(*tensors, call.sizes, masks[1:], *options, bound)
    if dresidual is None:
        dx = mm(dprojected, weight)
    elif dresidual.dtype is weight.dtype:
        dx = addmm(dresidual, dprojected, weight)
    else:
        dx = dresidual.add_(mm(dprojected, weight))
    rows = [w.shape[0] for w in call.projections]
    dweights = (None,) * len(rows)
    if any([w.requires_grad for w in call.projections]):
        dweights = mm(dprojected.t(), x).split_with_sizes(rows)
    dbiases = dprojected.sum(0).split_with_sizes(rows) if call.biases else ()
    return dx, (*dweights, *dbiases, dfc, dbias)


def _feed_forward(
    plan: Plan,
    call: FeedForward,
    weights: Parameters,
    rng_states: Iterator[Tensor | None],
    x: Tensor,
    memory: Sequence[Tensor],
    kept: Kept | None,
) -> tuple[Tensor, Tensor | None]:
    (weight1, bias1, weight2, bias2), module, is_formula = weights, call.chosen.module, call.chosen.differentiable
    options = call.activation, call.dropout_p, next(rng_states)
    if kept is None and is_formula:
        return module.feed_forward(x, weight1, bias1, weight2, bias2, *options), None
    bias = bias2 if kept is None or is_formula else None
    out, saved = module.feed_forward_fwd(x, weight1, bias1, weight2, bias, *options)
    if kept is None:
        return out, None
    kept.append((x, weight1, bias1, weight2, *(() if plan.is_recomputing else saved)))
    return out, _bias_for_norm(call)


def _feed_forward_backward(
    call: FeedForward,
    kept: Kept,
    rng_states: list[Tensor | None],
    dbranch: Tensor,
    dresidual: Tensor | None,
    memory: Sequence[Tensor],
    dmemory: Sequence[Tensor],
    dbias: Tensor | None,
) -> tuple[Tensor, Parameters]:
    x, weight1, bias1, weight2, *saved = kept.pop()
    module, options = call.chosen.module, (call.activation, call.dropout_p, rng_states.pop())
    if not saved:
        saved = module.feed_forward_hidden(x, weight1, bias1, *options)[1:]
    weights = weight1, bias1, weight2, call.bias2 if call.chosen.differentiable else None
    dx, *dweights, dbias2 = module.feed_forward_bwd(dbranch, x, *weights, *options, tuple(saved))
    dweights.append(dbias if dbias2 is None else dbias2)
    if dresidual is not None:
        dx = dx.add_(dresidual) if dx.dtype is dresidual.dtype else dresidual.add_(dx)
    return dx, tuple(dweights)


_FORWARD = {Attention: _attention, FeedForward: _feed_forward}
_BACKWARD = {Attention: _attention_backward, FeedForward: _feed_forward_backward}
