"""What surrounds a call: a trace by torch.compile or torch.export, a transform of torch.func, forward-mode derivatives.

In each of them tensors may stand for others, and their values cannot be read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode


def is_transformed() -> bool:
    """Whether torch.func.grad, vmap, jvp or another of its transforms is active, or forward-mode differentiation.

    Only the plain formula serves there: kernels and PyTorch's fused operators do not have every derivative, and have no
    rule for vmap.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def can_read_values(t: Tensor) -> bool:
    """Whether values may be looked at: on a CPU, where that needs no synchronisation, and where they are there."""
    return t.device.type == "cpu" and not torch.compiler.is_compiling() and not is_transformed()


def may_write_in_place() -> bool:
    """Whether an operator's result may be changed in place: nobody notes the results of single operators, as selective
    activation checkpointing does."""
    return torch.compiler.is_compiling() or _get_current_dispatch_mode() is None


def differentiable_gradients(
    formula: Callable[..., Tensor | Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    dresults: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """The gradients of formula(*inputs), a tensor or several, that can be differentiated again; None where not needed.

    For a backward that runs with create_graph=True, and whose own computation has no derivative. The formula is
    computed once more.
    """
    # Views, because one input may have been made of another: the gradients stop at the views.
    views = [None if t is None else t.view_as(t) for t in inputs]
    results = formula(*views)
    results = (results,) if isinstance(results, Tensor) else results
    pairs = [(r, d) for r, d in zip(results, dresults, strict=True) if d is not None and r.requires_grad]
    wanted = [t for t in views if t is not None and t.requires_grad]
    if not pairs or not wanted:
        return (None,) * len(views)
    outputs, doutputs = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outputs, wanted, doutputs, create_graph=True, allow_unused=True))
    return tuple(next(found) if t is not None and t.requires_grad else None for t in views)
