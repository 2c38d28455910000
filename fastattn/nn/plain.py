"""Whether an op may take a module's weight and leave its forward aside."""

from __future__ import annotations

from torch import nn

from fastattn.nn.position import PositionalEncoding

_KNOWN = (nn.Linear, nn.Embedding, PositionalEncoding)


def plain(module: nn.Module) -> bool:
    """Calling it does what its class says and nothing else: no hooks, no adapter, no subclass that adds something."""
    return type(module) in _KNOWN and not module._forward_hooks and not module._forward_pre_hooks
