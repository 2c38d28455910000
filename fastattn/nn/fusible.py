"""Whether an op may compute what a module would, from its parameters, instead of calling it. Decided only here.

The modules of fastattn fuse several of their children into one op; `fused_children` of a class names them. Where
somebody has changed such a child, by an adapter, a hook, a parametrisation, pruning or quantisation, the child is
called, and the op computes the rest. A change may come between any two calls, so every call asks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.modules import module as torch_module

from fastattn.nn.lazy_logits import Head
from fastattn.nn.leaves import Dropout, Linear
from fastattn.nn.position import PositionalEncoding

# The classes that ops can replace, and what they read of such a module.
_READ = {
    nn.Linear: ("weight",),
    Linear: ("weight",),
    Head: ("weight",),
    nn.Embedding: ("weight",),
    nn.LayerNorm: ("weight", "bias"),
    nn.Dropout: (),
    Dropout: (),
    PositionalEncoding: ("pos_table",),
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (nn.Parameter, Tensor, FakeTensor)  # not other subclasses: quantised and distributed tensors


def can_fuse(module: nn.Module) -> bool:
    """Whether a call of the module does what its class says and nothing else."""
    return why_not_fusible(module) is None


def all_can_fuse(parent: nn.Module, names: tuple[str, ...]) -> bool:
    """Whether can_fuse is true of all these children of parent: one question, in a third of the time.

    False is also the answer where it is not sure, for FSDP's weights that are no parameters: then ask can_fuse of each.
    """
    return not torch_module._has_any_global_hook() and _are_unmodified(parent._modules, names)


def is_unmodified(module: Any, kind: type, names: tuple[str, ...]) -> bool:
    """Whether the module is of this class, without hooks, and all_can_fuse is true of these children.

    Global hooks are left to the caller, who asks once for many modules.
    """
    if type(module) is not kind:
        return False
    own = module.__dict__
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
        return False
    return "forward" not in own and _are_unmodified(own["_modules"], names)


def _are_unmodified(children: dict[str, Any], names: tuple[str, ...]) -> bool:
    for name in names:
        child = children.get(name)
        if (tensors := _READ.get(type(child))) is None or type(child) is nn.Embedding:
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


def why_not_fusible(module: Any) -> str | None:
    """Why the module has to be called: None, or what was done to it. Costs about a microsecond."""
    kind = type(module)
    if kind not in _READ:
        return f"is a {kind.__module__}.{kind.__qualname__}"
    if (reason := hook_reason(module)) is not None:
        return reason
    for name in _READ[kind]:
        if type(t := getattr(module, name)) not in _PLAIN:
            return f"has {name}=None" if t is None else f"has a {name} of {type(t).__name__}"
    if kind is nn.Embedding and (module.max_norm is not None or module.scale_grad_by_freq or module.sparse):
        return "has max_norm, scale_grad_by_freq or sparse"
    return None


def why_not_stepped(module: Any) -> str | None:
    """Why decoding by `step` would not do what the module's class does in `forward`, or None."""
    kind = type(module)
    if not hasattr(kind, "step"):
        return None
    forward, step = (next(i for i, c in enumerate(kind.__mro__) if name in vars(c)) for name in ("forward", "step"))
    return f"is a {kind.__name__}, which overrides forward and not step: override step too" if forward < step else None


def check_steps(decoder: nn.Module) -> None:
    """TypeError for the first of a decoder's modules whose steps would not do what its forward does."""
    for name, module in decoder.named_modules():
        if (reason := why_not_stepped(module)) is not None:
            raise TypeError(f"cannot decode by steps: {name or 'the decoder'} {reason}")


def hook_reason(module: nn.Module) -> str | None:
    """What changes a call of the module, next to its class: hooks of any kind, or a forward set on the object."""
    own = module.__dict__
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
        return f"has {', '.join(name[1:].replace('_', ' ') for name in _HOOKS if own[name])}"
    if "forward" in own:
        return "has a forward of its own"
    return "is under global module hooks" if torch_module._has_any_global_hook() else None
