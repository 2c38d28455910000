"""Memory for time: what the backward can make again is not kept for it.

A sublayer keeps, for each token, the hidden layer of its feed-forward (d_inner numbers) and the output of its norm
(d_model). The hidden layer follows from its input by one product. A norm's output is kept by what reads it, for the
gradient of its weights, while the norm keeps the sum that it normalised: one follows from the other in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Again = Callable[[], Tensor]
# Of the contexts, innermost last: by address of its storage, a norm's output and what makes it once more.
_outputs: list[dict[int, tuple[StorageWeakRef, int, Again]]] = []


@contextmanager
def recomputed(wanted: bool = True) -> Iterator[None]:
    """Within it the modules of fastattn.nn keep neither hidden layers nor outputs of norms for the backward.

    Gradients stay as they are; in 16-bit types a norm's output is made again from the rounded sum, and may differ in
    its last place. Under torch.compile, which decides on this by itself, it changes nothing.
    """
    if not wanted or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        yield
        return
    _outputs.append({})
    try:
        with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
            yield
    finally:
        _outputs.pop()


def recomputing() -> bool:
    """Whether that is asked for now."""
    return bool(_outputs)


def note_norm(out: Tensor, again: Again) -> None:
    """out is the output of a norm, in memory of its own; again() makes it once more."""
    storage = StorageWeakRef(out.untyped_storage())
    _outputs[-1][storage.cdata] = storage, out.numel(), again


def _pack(t: Tensor) -> Any:
    """What is kept in place of t. A weak reference keeps an address from being used again: it names one storage."""
    _, numel, again = _outputs[-1].get(t.untyped_storage()._cdata, (None, -1, None)) if _outputs else (None, -1, None)
    return (again, t.shape) if numel == t.numel() and t.is_contiguous() else t


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    again, shape = packed
    with torch.no_grad():
        return again().view(shape)
