"""What a CUDA graph of a module's call has frozen, other than the shapes of its inputs.

A graph repeats the addresses, numbers and branches of the call that was captured. Training (graphed_call.py) and
decoding (generate/kept_graphs.py) compare these descriptions before every replay, and capture again after a change.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from fastattn.backends import request_of_all_ops
from fastattn.nn.fusible import hook_reason
from fastattn.ops import _autocast

KNOWN = ("fastattn.", "torch.nn.modules.")  # where classes are from whose code is known
PLAIN = frozenset((bool, int, float, str, type(None)))
_TENSORS = frozenset((nn.Parameter, Tensor))
# Attributes of every module that are read by name below, or that forward does not read.
_CONTAINERS = frozenset(vars(nn.Module()))
# Of a config: save_pretrained writes the first two, a classifier's first loss the third. No stack reads them.
_SAVED = frozenset(("architectures", "dtype", "problem_type"))


def fingerprint(root: nn.Module, known: tuple[str, ...] = KNOWN) -> list[Any] | str:
    """All that forward reads of a module and of those inside: classes, children, tensors' addresses, attributes.

    To be compared by ==. Or a sentence, if calls may depend on more: on hooks, or on code that is in none of the
    packages `known`. Some 0.4 ms for 6 + 6 layers.
    """
    if torch_module._has_any_global_hook():
        return "global module hooks are set"
    parts: list[Any] = []
    todo, seen = [root], {id(root)}
    kinds: set[type] = set()
    configs: dict[int, Any] = {}
    for module in todo:  # it grows
        kind, own = type(module), module.__dict__
        if kind not in kinds:
            if not kind.__module__.startswith(known):
                return f"{kind.__module__}.{kind.__qualname__} is a class whose code is not known"
            kinds.add(kind)
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
            return f"{kind.__qualname__} {hook_reason(module)}"
        if own.get("gradient_checkpointing"):  # transformers'
            return f"{kind.__qualname__} has gradient checkpointing"
        parts += id(module), kind, kind.forward, own["training"]
        for tensors in (own["_parameters"], own["_buffers"]):
            if tensors:
                for t in tensors.values():
                    if type(t) in _TENSORS:
                        parts += id(t), t.data_ptr(), t.requires_grad, t.dtype, t.shape, t.stride()
                    elif t is not None:
                        return f"{kind.__qualname__} has a {type(t).__name__} as parameter"
        if own["_modules"]:
            parts += map(id, own["_modules"].values())  # a child may be used twice
            for child in own["_modules"].values():
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    todo.append(child)
        for name in own.keys() - _CONTAINERS:
            value = own[name]
            if type(value) in PLAIN:
                parts.append(value)
                continue
            if callable(value) and hasattr(kind, name):
                if module is root and name == "forward":
                    continue  # what is captured is called by it: Hugging Face's accelerate wraps it for autocast
                return f"{kind.__qualname__} has a {name} set on the object"
            if type(value).__module__.startswith("transformers."):
                configs[id(value)] = value  # which modules share
            parts.append(value_fingerprint(value))
    for config in configs.values():
        own = getattr(config, "__dict__", {})
        parts.append(value_fingerprint({k: v for k, v in own.items() if k not in _SAVED}))
    return parts


def value_fingerprint(value: Any) -> Any:
    """Of a value that is not plain: of a tensor where it is, of lists, tuples, sets and dicts what they hold."""
    if isinstance(value, Tensor):  # another weight is told apart, unless it is where the earlier one was
        return value.data_ptr(), value.dtype, value.shape, value.stride()
    if not isinstance(value, (dict, list, tuple, frozenset)):
        # A later object may have the same address, and references alone are compared by the objects' own __eq__.
        return id(value), weakref.ref(value) if type(value).__weakrefoffset__ else value
    values = value.values() if isinstance(value, dict) else value
    return tuple([v if type(v) in PLAIN else value_fingerprint(v) for v in values])


def modes(device: torch.device) -> tuple[Hashable, ...]:
    """PyTorch's and fastattn's settings that choose operators and kernels."""
    matmul, cuda = torch.backends.cuda.matmul, torch.backends.cuda
    return (
        _autocast.autocast_dtype(device),
        request_of_all_ops(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        getattr(matmul, "fp32_precision", None) or matmul.allow_tf32,
        (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled(), cuda.math_sdp_enabled()),
        torch.cuda.current_stream(device) if device.type == "cuda" else None,
    )
