"""Whether an op may read a module's weight instead of calling the module."""

from __future__ import annotations

from torch import nn

from fastattn.nn.position import PositionalEncoding

_KNOWN_CLASSES = (nn.Linear, nn.Embedding, PositionalEncoding)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_unmodified(module: nn.Module) -> bool:
    """Whether a call of the module does what its class says and nothing else.

    False for a module with hooks, and for a subclass such as the adapters of fine-tuning libraries.
    """
    return type(module) in _KNOWN_CLASSES and not any(getattr(module, hooks) for hooks in _HOOKS)
