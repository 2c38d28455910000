"""Less memory for more time: outputs that the backward can compute again are not saved for it.

For each token a sublayer saves the hidden layer of its feed-forward (d_inner numbers) and the output of its norm
(d_model numbers). One product of the saved input gives the hidden layer again. The norm's output is saved by the linear
maps that read it, for their weights' gradients, while the norm itself saves the sum that it normalised. One pass over
that sum gives the output again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fastattn._tracing import is_transformed

Recompute = Callable[[], Tensor]


class _ThreadState(threading.local):
    """norm_outputs: one dict for each open context, innermost last. It maps the storage of a norm's output to a weak
    reference to that storage, the output's number of elements, and the function that computes the output again."""

    def __init__(self) -> None:
        self.norm_outputs: list[dict[int, tuple[StorageWeakRef, int, Recompute]]] = []


_state = _ThreadState()


@contextmanager
def recomputed(enabled: bool = True) -> Iterator[None]:
    """Within it the modules of fastattn.nn save neither hidden layers nor outputs of norms for the backward.

    Gradients stay as they are, except in 16-bit types: there a norm's output is computed again from the rounded sum and
    may differ in its last bit. It does nothing under torch.compile, which plans recomputation itself, nor in transforms
    of torch.func.
    """
    if not enabled or not torch.is_grad_enabled() or torch.compiler.is_compiling() or is_transformed():
        yield
        return
    _state.norm_outputs.append({})
    try:
        with torch.autograd.graph.saved_tensors_hooks(_save_recipe, _follow_recipe):
            yield
    finally:
        _state.norm_outputs.pop()


def is_recomputing() -> bool:
    """Whether a context of ``recomputed`` is open."""
    return bool(_state.norm_outputs)


def remember_norm(out: Tensor, recompute: Recompute) -> None:
    """Register out, a norm's output with a storage of its own, and the function that computes it again."""
    storage = StorageWeakRef(out.untyped_storage())
    _state.norm_outputs[-1][storage.cdata] = storage, out.numel(), recompute


def remember_cast(cast: Tensor, x: Tensor) -> None:
    """Register cast, which is x in another dtype, where x is the output of a norm."""
    if (recompute := _recipe(x)) is not None:
        dtype = cast.dtype
        remember_norm(cast, lambda: recompute().to(dtype))


def _recipe(t: Tensor) -> Recompute | None:
    """The function that computes t again, where t is the whole output of a norm.

    The weak reference keeps the storage's address from being reused, so the address identifies one storage.
    """
    known = _state.norm_outputs[-1].get(t.untyped_storage()._cdata) if _state.norm_outputs else None
    return None if known is None or known[1] != t.numel() or not t.is_contiguous() else known[2]


def _save_recipe(t: Tensor) -> Any:
    """What autograd saves in place of t: for the output of a norm the function that computes it, and its shape."""
    recompute = _recipe(t)
    return t if recompute is None else (recompute, t.shape)


def _follow_recipe(saved: Any) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    recompute, shape = saved
    with torch.no_grad():
        return recompute().view(shape)
