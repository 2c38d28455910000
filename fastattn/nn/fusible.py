"""Whether an op may compute what a module would, from its parameters, instead of calling it. Decided only here.

The modules of fastattn fuse several of their children into one op; `fused_children` of a class names them. A child that
is modified, by an adapter, a hook, a parametrisation, pruning or quantisation, is called, and the op computes the rest.
A module may be modified between any two calls, so every call checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.modules import module as torch_module

from fastattn.nn.leaves import Dropout
from fastattn.nn.position import PositionalEncoding

# The classes that ops can replace, and what they read of such a module.
READ = {
    nn.Linear: ("weight",),
    nn.modules.linear.NonDynamicallyQuantizableLinear: ("weight",),  # a Linear by another name
    nn.Embedding: ("weight",),
    nn.LayerNorm: ("weight", "bias"),
    nn.Dropout: (),
    Dropout: (),
    PositionalEncoding: ("pos_table",),
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (nn.Parameter, Tensor, FakeTensor)  # not other subclasses: quantised and distributed tensors


def can_fuse(module: nn.Module) -> bool:
    """True if the module is unmodified and of a class that ops can replace: no hooks, no patched forward."""
    return unfusible_reason(module) is None


def all_can_fuse(parent: nn.Module, names: tuple[str, ...]) -> bool:
    """Whether can_fuse is true of all these children of parent. About 3x faster than one call for each.

    Also False where it cannot decide, for FSDP's weights that are no parameters: then call can_fuse for each.
    """
    return not torch_module._has_any_global_hook() and are_unmodified([parent._modules.get(name) for name in names])


def is_unmodified(module: Any, kind: type, names: tuple[str, ...]) -> bool:
    """Whether the module is of this class, without hooks, and all_can_fuse is true of these children.

    Global hooks are not checked: the caller checks them once for many modules.
    """
    if type(module) is not kind:
        return False
    own = module.__dict__
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
        return False
    return "forward" not in own and are_unmodified([own["_modules"].get(name) for name in names])


def are_unmodified(modules: Sequence[nn.Module | None]) -> bool:
    """Whether can_fuse is true of all these modules. Global hooks are left to the caller, as in is_unmodified."""
    for child in modules:
        if (tensors := READ.get(type(child))) is None or type(child) is nn.Embedding:
            return False
        own = child.__dict__
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
            return False
        if "forward" in own:
            return False
        parameters = own["_parameters"]
        for tensor in tensors:
            if type(parameters.get(tensor)) not in _PLAIN:
                return False
    return True


def unfusible_reason(module: Any) -> str | None:
    """Why the module has to be called, or None if an op may replace it. Takes about a microsecond."""
    kind = type(module)
    if kind not in READ:
        return f"is a {kind.__module__}.{kind.__qualname__}"
    if (reason := hook_reason(module)) is not None:
        return reason
    for name in READ[kind]:
        if type(t := getattr(module, name)) not in _PLAIN:
            return f"has {name}=None" if t is None else f"has a {name} of {type(t).__name__}"
    if kind is nn.Embedding and (module.max_norm is not None or module.scale_grad_by_freq or module.sparse):
        return "has max_norm, scale_grad_by_freq or sparse"
    return None


def check_step(decoder: nn.Module) -> None:
    """TypeError where a decoder's class overrides `forward` but not `step`, so that decoding would differ."""
    kind = type(decoder)
    forward, step = (next(i for i, c in enumerate(kind.__mro__) if name in vars(c)) for name in ("forward", "step"))
    if forward < step:
        raise TypeError(f"cannot decode by steps: {kind.__name__} overrides forward and not step: override step too")


def hook_reason(module: nn.Module) -> str | None:
    """Hooks of any kind, or a forward set on the object, as a sentence. None if a call is that of the class."""
    own = module.__dict__
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
        return f"has {', '.join(name[1:].replace('_', ' ') for name in _HOOKS if own[name])}"
    if "forward" in own:
        return "has a forward of its own"
    return "is under global module hooks" if torch_module._has_any_global_hook() else None
