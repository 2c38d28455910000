"""A Linear's weight as a product of inference on a CPU reads it fastest, kept by the module until the weight changes.

A change shows in the weight's version or address, or in 8 of its elements. The elements are for changes through
`.data`, which leave version and address as they were: an average of weights that is copied into a model changes all
elements. A change of few elements through `.data` may be missed until `model.train()`, which drops what is kept.

Packing takes as long as several products (fastattn/backends/cpu_matmul.py). So a weight is packed when a second call
finds it unchanged.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from fastattn._tracing import can_read_values
from fastattn.backends import cpu_matmul

# Of all copies in a process. Of larger models some weights are read as they are.
MAX_BYTES = 4 << 30
PROBED = 8  # elements
_NAME = "_fastattn_kept_weight"  # attribute of a module


class KeptWeight:
    """kind: of the copy, as cpu_matmul.packing names it; None: there is none, nor for calls of up to `rows` rows.

    A copy of the module, and what is read from a pickle, keeps nothing: there its weight is None.
    """

    def __init__(self, weight: Tensor | None = None) -> None:
        self.weight, self.rows = weight, 0
        self.kind: str | None = None
        if weight is not None:
            flat = weight.detach().flatten()  # a view, of a contiguous weight
            self._place = weight._version, weight.data_ptr()
            self._probe = flat[:: max(1, len(flat) // PROBED) | 1]
            self._probed = self._probe.clone()

    def holds(self) -> bool:
        weight = self.weight
        return (weight._version, weight.data_ptr()) == self._place and torch.equal(self._probe, self._probed)

    def pack(self, rows: int) -> None:
        """For products of this many rows and up to twice as many."""
        self.rows, kind = 2 * rows, cpu_matmul.packing(rows, self.weight, self.weight.dtype)
        self.bytes = self.weight.numel() * self.weight.itemsize
        if kind is None or sum([other.bytes for other in _packed]) + self.bytes > MAX_BYTES:
            return
        self.copy = cpu_matmul.prepack(self.weight) if kind == "prepacked" else cpu_matmul.transposed(self.weight)
        self.kind = kind
        _packed.add(self)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.kind == "prepacked":
            return cpu_matmul.prepacked_product(x, self.copy, bias)
        return cpu_matmul.product(x, self.copy, bias)

    def __reduce__(self) -> Any:
        return KeptWeight, ()


_packed: weakref.WeakSet[KeptWeight] = weakref.WeakSet()


def kept_weight(module: nn.Module, x: Tensor, weight: Tensor) -> KeptWeight | None:
    """What the module keeps of its weight, where x weight^T is faster by it, or None. It is kept from the second call.

    Requires that no gradient is recorded.
    """
    if not _is_plain(x, weight):
        return None
    rows = x.numel() // weight.shape[1]
    kept: KeptWeight | None = module.__dict__.get(_NAME)
    if kept is not None and kept.weight is weight:
        if kept.kind is None and rows <= kept.rows:
            return None
        if kept.holds():
            if kept.kind is None:
                kept.pack(rows)
            return None if kept.kind is None else kept
    module.__dict__[_NAME] = KeptWeight(weight)
    return None


def drop_kept_weight(module: nn.Module) -> None:
    module.__dict__.pop(_NAME, None)


def _is_plain(x: Tensor, weight: Tensor) -> bool:
    if x.dtype is not weight.dtype or type(x) is not Tensor or type(weight) is not nn.Parameter:
        return False
    # An inference tensor has no version.
    return can_read_values(x) and not torch._C._is_any_autocast_enabled() and not weight.is_inference()
