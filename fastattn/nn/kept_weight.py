"""Copies of weights that inference on a CPU reads faster. A module keeps them until a weight changes.

A change shows in a weight's version or address, or in 8 of its elements. The elements are for changes through `.data`,
which leave version and address as they were: an average of weights that is copied into a model changes all elements. A
change of few elements through `.data` may be missed until `model.train()`, which drops what is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

PROBED = 8  # elements
_NAME = "_fastattn_kept"  # attribute of a module

T = TypeVar("T")


class Kept:
    """What a module keeps. `holds` is true while the tensors that it was made of are unchanged.

    made: what was made of them.     key: for which calls.
    A copy of the module, and what is read from a pickle, keeps nothing: there `tensors` is empty.
    """

    def __init__(self, tensors: Sequence[Tensor] = (), key: Any = 0, made: Any = None) -> None:
        self.tensors, self.key, self.made = tensors, key, made
        self._places = [(t._version, t.data_ptr()) for t in tensors]
        flat = [t.detach().flatten() for t in tensors]  # views, of contiguous tensors
        self._probes = [t[:: max(1, len(t) // PROBED) | 1] for t in flat]
        self._probed = [t.clone() for t in self._probes]

    def holds(self, *tensors: Tensor) -> bool:
        """tensors: in place of which it was made."""
        if len(tensors) != len(self.tensors):
            return False
        return (
            all([a is b for a, b in zip(tensors, self.tensors, strict=True)])
            and [(t._version, t.data_ptr()) for t in tensors] == self._places
            and all(map(torch.equal, self._probes, self._probed))
        )

    def __reduce__(self) -> Any:
        return Kept, ()


class DropsKept(nn.Module):
    """Mixin of modules that keep something: model.train() drops it."""

    def train(self: Any, mode: bool = True) -> Any:
        if mode:
            drop_kept(self)
        return super().train(mode)


def drop_kept(module: nn.Module) -> None:
    module.__dict__.pop(_NAME, None)


def keep(module: nn.Module, key: Any, tensors: Sequence[Tensor | None], make: Callable[[], T]) -> T:
    """make(), or what the module keeps of an earlier call with this key and these tensors, unchanged."""
    given = [t for t in tensors if t is not None]
    kept: Kept | None = module.__dict__.get(_NAME)
    if kept is not None and kept.key == key and kept.holds(*given):
        return kept.made
    made = make()
    if not any([t.is_inference() for t in given]):  # they have no version
        module.__dict__[_NAME] = Kept(given, key, made)
    return made
