"""What modules of other libraries become in accelerate(): the same objects, of a class that computes by fastattn.

Such a class is made of a module's own class and a mixin that overrides its forward. Parameters, children, hooks and
attributes stay as they are, and every call reads them. A layer that nobody has modified takes the straight path
(fastattn.nn.straight). Another goes sublayer by sublayer: its own attention is called, and what is unmodified around it
is fused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastattn.integrations.hidden_padding import pack, restore_padding
from fastattn.masks import AttentionMask
from fastattn.nn.fused_calls import Sublayer as S2
from fastattn.nn.fused_calls import prepare
from fastattn.nn.fusible import can_fuse, hook_reason
from fastattn.nn.linear import without_gaps
from fastattn.nn.params import NormParams
from fastattn.nn.params import Params as Parts
from fastattn.nn.plan import open_plan, shared_plan
from fastattn.nn.residual import PendingResidual, current_dropout_p
from fastattn.nn.run_layer import Called, run_layer
from fastattn.ops.feed_forward import feed_forward


class Accelerated:
    """Base of the mixins. original: the module's own class."""

    original: type[nn.Module]


@functools.cache
def accelerated_class(original: type[nn.Module], mixin: type[Accelerated]) -> Any:
    """The class that computes what the original does by the mixin's forward, under the original's name."""

    def reduce(self: Any, protocol: Any) -> Any:  # the class has no name by which pickle would find it
        return _new, (original, mixin), self.__dict__

    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    names |= {"original": original, "__reduce_ex__": reduce}
    return type(original.__name__, (mixin, original), names)


def _new(original: type[nn.Module], mixin: type[Accelerated]) -> Any:
    kind = accelerated_class(original, mixin)
    return kind.__new__(kind)


# Activations by the names of their classes, torch's and transformers', and torch's functions.
_ACTIVATIONS = {
    "ReLU": "relu",
    "GELU": "gelu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "SiLU": "silu",
    "SiLUActivation": "silu",
}
_FUNCTIONS = {
    torch.relu: "relu",
    nn.functional.relu: "relu",
    nn.functional.gelu: "gelu",
    nn.functional.silu: "silu",
}


def activation_name(activation: Any) -> Any:
    """The name by which feed_forward knows an activation, a module or a function; None for another."""
    if not isinstance(activation, nn.Module):
        return _FUNCTIONS.get(activation)
    kind = type(activation)
    name = _ACTIVATIONS.get(kind.__name__) if kind.__module__.startswith(("torch.nn.", "transformers.")) else None
    if name is None or hook_reason(activation) is not None:
        return None
    return "gelu_tanh" if name == "gelu" and getattr(activation, "approximate", "none") == "tanh" else name


def norm_parts(norm: nn.Module, dropout_p: float) -> NormParams:
    """Of an unmodified LayerNorm and the dropout before it."""
    return NormParams(norm.weight, norm.bias, norm.eps, dropout_p)


def run_straight(
    layer: Any,
    x: Tensor,
    masks: Sequence[AttentionMask | None],
    memory: Tensor | None = None,
) -> Tensor | None:
    """The layer's output, or None: something is modified, and the layer goes sublayer by sublayer.

    layer: has norm_first, parts(has_memory), which is None where something is modified, and project(memory), the keys
        and values of the second attention.
    x: (B, L, d_model).     memory: (B, Lk, d_model), what that attention attends to.
    """
    parts: list[Parts] | None = None if open_plan(None, x) is None else layer.parts(memory is not None)
    if parts is None:
        return None
    packed = pack(layer, x, masks, memory)
    if packed is not None:
        x, masks, memory, unpadded = packed
    plan = shared_plan(masks, x)
    projected = () if memory is None else layer.project(memory)
    if plan is None:
        return None
    reads = iter([(masks[0], ()), (masks[-1], projected)])
    subs = [S2(part, None, *(next(reads) if hasattr(part, "fc") else ())) for part in parts]
    if None in prepare(plan, layer.norm_first, PendingResidual(x, None, None, 0.0) if layer.norm_first else x, subs):
        return None
    out = run_layer(plan, layer.norm_first, x, subs)
    return out if packed is None else restore_padding(out, unpadded)


class Sublayer(NamedTuple):
    """branch: what the sublayer computes of its input.     dropout: a module, or its current probability."""

    branch: Callable[[Tensor], Tensor]
    dropout: nn.Module | float
    norm: nn.Module


def run_sublayers(x: Tensor, sublayers: Sequence[Sublayer], norm_first: bool) -> Tensor:
    """The layer's output for x (B, L, d_model): each residual connection fused with the norm after it."""
    if not norm_first:
        for branch, dropout, norm in sublayers:
            x = Called(branch, dropout, norm)(x)
        return x
    pending = PendingResidual(x, None, None, 0.0)
    for branch, dropout, norm in sublayers:
        pending = Called(branch, dropout, norm)(pending)
    return pending.sum()


def run_feed_forward(
    x: Tensor, linear1: nn.Module, activation: Any, dropout: nn.Module | float, linear2: nn.Module
) -> Tensor:
    """linear2(dropout(activation(linear1(x)))), in one op where nothing of it is modified."""
    name = activation_name(activation)
    is_fusible = name is not None and can_fuse(linear1) and can_fuse(linear2)
    if is_fusible and (isinstance(dropout, float) or can_fuse(dropout)):
        dropout_p = dropout if isinstance(dropout, float) else current_dropout_p(dropout)
        return feed_forward(x, linear1.weight, linear1.bias, linear2.weight, linear2.bias, name, dropout_p)
    return linear2(PendingResidual(activation(linear1(x)), None).sum(dropout))


def run_gated(
    x: Tensor, gate: nn.Module, up: nn.Module, activation: Any, dropout: nn.Module | float, down: nn.Module
) -> Tensor:
    """down(dropout(activation(gate(x)) * up(x))), in training in one op where nothing of it is modified.

    The op reads gate and up in one weight. Joining them pays in training, not for the few tokens of decoding.
    """
    name = _GATED.get(activation_name(activation))
    if name is not None and torch.is_grad_enabled() and all(map(can_fuse, (gate, up, down))):
        if isinstance(dropout, float) or can_fuse(dropout):
            dropout_p = dropout if isinstance(dropout, float) else current_dropout_p(dropout)
            pair = gate.weight, up.weight
            biases = without_gaps(pair, (gate.bias, up.bias))
            weights = torch.cat(pair), None if biases[0] is None else torch.cat(biases), down.weight, down.bias
            return feed_forward(x, *weights, name, dropout_p)
    hidden = activation(gate(x)) * up(x)
    return down(PendingResidual(hidden, None).sum(dropout))


_GATED = {"relu": "reglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "silu": "swiglu"}
