"""What modules of other libraries become in accelerate(): the same objects, with a class whose forward is fastattn's.

Such a class is made of a module's own class and a mixin that overrides its forward. Parameters, children, hooks and
attributes stay as they are, and every call reads them.

The mixin of whole layers, TableLayer, reads a row: where the layer has its attention, maps, norms and dropouts. By it a
call describes the layer as a list of Sublayers, which the executor fuses (fastattn/nn/run_layer.py) where their params
are unmodified, and calls otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fastattn.masks import AttentionMask
from fastattn.nn.fusible import are_unmodified, hook_reason
from fastattn.nn.leaves import fastest_products
from fastattn.nn.params import AttentionParams, FeedForwardParams, norm_params
from fastattn.nn.plan import Sublayer, shared_plan
from fastattn.nn.residual import HiddenStateT, PendingResidual, current_dropout_p
from fastattn.nn.run_layer import Called, run_layer
from fastattn.ops.feed_forward import Activation


class Accelerated:
    """Base of the mixins. original: the module's own class.     in_stack: whether it makes the model around it one."""

    original: type[nn.Module]
    in_stack = False

    def call_original(self: Any, x: Tensor, *args: Any, **options: Any) -> Any:
        """The library's own forward."""
        with fastest_products(x):
            return self.original.forward(self, x, *args, **options)


@functools.cache
def accelerated_class(original: type[nn.Module], mixin: type[Accelerated]) -> Any:
    """The class that computes what the original does by the mixin's forward, under the original's name."""

    def reduce(self: Any, protocol: Any) -> Any:  # the class has no name by which pickle would find it
        return _new, self.made_of, self.__dict__

    made_of = *getattr(original, "made_of", (original,)), mixin
    names: dict[str, object] = {"original": original, "made_of": made_of, "__reduce_ex__": reduce}
    names |= {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    return type(original.__name__, (mixin, original), names)


def _new(original: type[nn.Module], *mixins: type[Accelerated]) -> Any:
    kind = functools.reduce(accelerated_class, mixins, original)
    return object.__new__(kind)


# Activations by the names of their classes, torch's and transformers', and torch's functions.
_ACTIVATIONS: dict[str, Activation] = {
    "ReLU": "relu",
    "GELU": "gelu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "SiLU": "silu",
    "SiLUActivation": "silu",
}
_FUNCTIONS: dict[Any, Activation] = {torch.relu: "relu", F.relu: "relu", F.gelu: "gelu", F.silu: "silu"}
# Those that read two maps, by that of the first.
GATED: dict[Any, Activation] = {"relu": "reglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "silu": "swiglu"}


def activation_name(activation: Any) -> Activation | None:
    """The name by which feed_forward knows an activation, a module or a function; None for another."""
    if not isinstance(activation, nn.Module):
        return _FUNCTIONS.get(activation)
    kind = type(activation)
    name = _ACTIVATIONS.get(kind.__name__) if kind.__module__.startswith(("torch.nn.", "transformers.")) else None
    if name is None or hook_reason(activation) is not None:
        return None
    return "gelu_tanh" if name == "gelu" and getattr(activation, "approximate", "none") == "tanh" else name


class AttentionNames(NamedTuple):
    """Where an attention sublayer has its parts: paths from the layer, or from the module where they start with a dot.

    module: the attention.     kind: its class, by the name without the model's.
    maps: of queries, keys and values; empty where the module has them in one parameter.
    out: the map after its heads. The module calls it if it is the module's, else the layer does.
    head_dim: the width of a head.     weights_dropout: of the attention weights, a module or a probability.
    dropout: likewise, of the sublayer's output.     norm: the sublayer's.
    """

    module: str
    kind: str
    maps: str
    out: str
    head_dim: str
    weights_dropout: str
    dropout: str
    norm: str


class FeedForwardNames(NamedTuple):
    """Likewise of a feed-forward sublayer.

    first: the first map, or several, of which a layer has one, or two that its activation gates, the gate first.
    hidden_dropout: after the activation; empty where there is none.
    module: what has the maps and the activation, and is called where these are modified; empty for the layer."""

    first: str
    activation: str
    hidden_dropout: str
    second: str
    dropout: str
    norm: str
    module: str = ""


class Row:
    """A kind of layer: its feed-forward, and its attentions, the second of which attends to a memory.

    A layer may lack the second attention.

    norm_first: None where the layer has an attribute of this name.
    containers: path -> class, by the name without the model's, of the modules between the layer and those named here;
        one of several, with | between them.
    clamps_float16: whether the layer clamps its output in float16.
    by_position: what the layer gives its attentions by position, the rest by name: a full backward hook of a module
        gets the gradients of arguments by position alone.
    mask, memory: names of arguments of the attentions: the mask, and of the second attention the memory.
    arguments: what the layer may get by position, after the hidden states.
    """

    def __init__(
        self,
        feed_forward: FeedForwardNames,
        *attentions: AttentionNames,
        norm_first: bool | None = None,
        containers: dict[str, str] | None = None,
        clamps_float16: bool = False,
        by_position: tuple[str, ...] = ("hidden_states",),
        mask: str = "attention_mask",
        memory: str = "key_value_states",
        arguments: tuple[str, ...] = ("attention_mask", "encoder_hidden_states", "encoder_attention_mask"),
    ) -> None:
        self.attentions, self.norm_first, self.clamps_float16 = attentions, norm_first, clamps_float16
        self.by_position, self.mask, self.memory, self.arguments = by_position, mask, memory, arguments
        self.containers = containers or {}
        self.container_paths = split_paths(self.containers)
        self.attention_paths = [split_paths((a.module, *a[3:], *a.maps.split()), a.module) for a in attentions]
        self.memory_paths = split_paths([a.module for a in attentions[1:]])
        first, *names, module = feed_forward
        self.feed_forward_paths = split_paths((module, *names, *first.split()), module)


Paths = list[list[str]]


def split_paths(paths: Iterable[str], module: str = "") -> Paths:
    return [(module + path if path.startswith(".") else path).split(".") if path else [] for path in paths]


def find(layer: nn.Module, paths: Paths) -> list[Any]:
    """The modules or attributes at these paths, each None where there is none. The name -1: the last module."""
    found = []
    for path in paths:
        at: Any = layer if path else None
        for name in path:
            own = {} if at is None else at.__dict__
            modules = own.get("_modules", own)
            at = own[name] if name in own else next(reversed(modules.values())) if name == "-1" else modules.get(name)
        found.append(at)
    return found


class Attend(NamedTuple):
    """A call of one of a layer's attentions.

    branch: (module, x) -> what the module makes of the sublayer's input x, (B, L, d_model).
    mask: with which fastattn's attention makes the same.     is_fusible: whether there is such a mask.
    """

    branch: Callable[[nn.Module, Tensor], Tensor]
    mask: AttentionMask | None
    is_fusible: bool = True


class TableLayer(Accelerated):
    """A layer that a row describes. The mixin of a library adds how its attention is read:

    may_fuse(attention, n): whether the n-th attention itself is unmodified, and computes what fastattn's does.
    projections(maps, attention, reads_memory): weights and biases as in AttentionParams, and the rows of the keys.
    project(memory): keys and values of the second attention, (B, Lk, rows) each.
    """

    row: Row

    def describe(self: Any, attends: Sequence[Attend], fuse: bool = True) -> list[Sublayer]:
        """fuse: False where all modules have to be called."""
        fuse = fuse and not _has_any_global_hook()
        sublayers = [self._attention(n, attend, fuse) for n, attend in enumerate(attends)]
        return [*sublayers, self._feed_forward(fuse)]

    def _attention(self: Any, n: int, attend: Attend, fuse: bool) -> Sublayer:
        names, params = self.row.attentions[n], None
        module, out, head_dim, weights_dropout, dropout, norm, *maps = find(self, self.row.attention_paths[n])
        dropout, weights_p = current_dropout(self, dropout, fuse), current_dropout(module, weights_dropout, fuse)
        if fuse and attend.is_fusible and isinstance(dropout, float) and isinstance(weights_p, float):
            if self.may_fuse(module, n) and are_unmodified([*maps, out, norm]):
                weights, biases, key_rows = self.projections(maps, module, n > 0)
                heads = key_rows // head_dim, head_dim, head_dim, module.__dict__.get("scaling", head_dim**-0.5)
                fc, end = out._parameters, norm_params(norm, dropout)
                params = AttentionParams(weights, biases, fc["weight"], fc["bias"], end, *heads, weights_p, None)

        def branch(x: Tensor) -> Tensor:
            attended = attend.branch(module, x)
            return attended if names.out.startswith(".") else out(attended)

        return Sublayer(params, Called(branch, dropout, norm))

    def _feed_forward(self: Any, fuse: bool) -> Sublayer:
        module, activation, hidden_dropout, second, dropout, norm, *firsts = find(self, self.row.feed_forward_paths)
        firsts = [first for first in firsts if first is not None]
        dropout, hidden_p = current_dropout(self, dropout, fuse), current_dropout(self, hidden_dropout, fuse)
        name, params = activation_name(activation) if fuse else None, None
        name = name if len(firsts) == 1 else GATED.get(name)
        if name is not None and isinstance(dropout, float) and isinstance(hidden_p, float):
            if are_unmodified([*firsts, second, norm]):
                own, w_2, end = [first._parameters for first in firsts], second._parameters, norm_params(norm, dropout)
                first = tuple([p["weight"] for p in own]), tuple([p["bias"] for p in own])
                if first[0][0].dtype is w_2["weight"].dtype:  # from_pretrained keeps T5's last map in float32
                    params = FeedForwardParams(*first, w_2["weight"], w_2["bias"], end, name, hidden_p, None)

        def branch(x: Tensor) -> Tensor:
            if module is not None:
                return module(x)
            (first,) = firsts
            return second(PendingResidual(activation(first(x)), None).sum(hidden_p))

        return Sublayer(params, Called(branch, dropout, norm))

    def run(self: Any, x: Tensor, attends: Sequence[Attend], *memory: Tensor, batch_first: bool = True) -> Tensor:
        """The layer's output, of the shape of x.

        x: (B, L, d_model).     memory: (B, Lk, d_model), what the second attention attends to.
        batch_first: False where the first two dimensions of these are exchanged. Modules are called with them so.
        """
        norm_first = self.norm_first if self.row.norm_first is None else self.row.norm_first
        if torch.compiler.is_compiling():
            return run_layer(None, norm_first, x, self.describe(attends, fuse=False))
        sublayers = self.describe(attends)
        if not batch_first:
            x, *memory = map(_swapped, (x, *memory))
            sublayers = [sublayer._replace(call=_Swapped(*sublayer.call)) for sublayer in sublayers]
        # Masks that are no AttentionMask are read by modules.
        masks = [attend.mask if isinstance(attend.mask, AttentionMask) else None for attend in attends]
        sublayers[0] = sublayers[0]._replace(mask=masks[0])
        if memory:
            projected = self.project(*memory) if sublayers[1].params is not None else ()
            sublayers[1] = sublayers[1]._replace(mask=masks[1], memory=projected)
        out = run_layer(shared_plan(masks, x), norm_first, x, sublayers)
        return out if batch_first else _swapped(out)


class _Swapped(Called):
    """Called for an input whose first two dimensions are exchanged. Modules get theirs as the layer got its own."""

    def __call__(self, x: HiddenStateT) -> HiddenStateT:
        return _swapped(super().__call__(_swapped(x)))


def _swapped(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.transpose(0, 1)
    residual = None if x.residual is None else x.residual.transpose(0, 1)
    return x._replace(branch=x.branch.transpose(0, 1), residual=residual)


def current_dropout(owner: Any, dropout: Any, fuse: bool = True) -> float | nn.Module:
    """The current probability of a dropout, or the module if it has to be called.

    dropout: a module, a probability that holds in training of its owner, or None.
    """
    if not isinstance(dropout, nn.Module):
        return float(dropout) if dropout and owner.training else 0.0
    return current_dropout_p(dropout) if fuse and are_unmodified([dropout]) else dropout
