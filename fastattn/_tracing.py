"""Whether a call is traced, transformed by torch.func, or differentiated forward.

In each of these a tensor may represent others, and its values cannot be read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

Function = TypeVar("Function", bound=Callable[..., Any])

_MODE = torch._C._TorchDispatchModeKey
_TRACING_MODES = (_MODE.FAKE, _MODE.PROXY, _MODE.FUNCTIONAL)


def constant_in_traces(function: Function) -> Function:
    """Decorator: torch.compile calls the function while it traces, and its result is a constant of the graph.

    As torch.compiler.assume_constant_result, which loads torch._dynamo, 1 s and 150 MB, into every program.
    """
    function.__dict__["_dynamo_marked_constant"] = True
    return function


def is_traced() -> bool:
    """Whether torch.compile, torch.export or make_fx traces, or a FakeTensorMode computes shapes and no values."""
    return torch.compiler.is_compiling() or (torch._C._len_torch_dispatch_stack() > 0 and _in_a_tracing_mode())


def _in_a_tracing_mode() -> bool:
    return any([torch._C._get_dispatch_mode(mode) is not None for mode in _TRACING_MODES])


def is_transformed() -> bool:
    """Whether torch.func.grad, vmap, jvp or another of its transforms is active, or forward-mode differentiation.

    These need the plain formula: kernels and PyTorch's fused operators do not have every derivative, and have no rule
    for vmap.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_batch(t: Tensor | None) -> bool:
    """Whether t represents a batch of gradients, as in torch.autograd.grad(.., is_grads_batched=True).

    PyTorch's operators accept such a tensor; kernels, and operators with out= or in place, do not.
    """
    return t is not None and torch._C._functorch.is_legacy_batchedtensor(t)


def is_recorded_or_batched(*doutputs: Tensor | None) -> bool:
    """Whether a backward is recorded, to be differentiated again (create_graph=True), or gets batches of gradients
    (is_grads_batched=True)."""
    return torch.is_grad_enabled() or any(map(is_batch, doutputs))


def refuse_second_derivative(*doutputs: Tensor | None) -> None:
    """For a backward of operators that autograd cannot record and vmap cannot map."""
    if is_recorded_or_batched(*doutputs):
        raise RuntimeError(
            "fused operators have no second derivative (create_graph=True) and accept no batch of gradients "
            "(is_grads_batched=True): compute this step, with its forward, within "
            'fastattn.use_backend("reference"), without backend= in the call or the model'
        )


def can_read_values(t: Tensor) -> bool:
    """Whether values may be read: they exist, and on a CPU, where reading needs no synchronisation."""
    if not t.is_cpu or type(t) is FakeTensor or torch.compiler.is_compiling() or is_transformed():
        return False
    return torch._C._len_torch_dispatch_stack() == 0 or not _in_a_tracing_mode()


def known_equal(a: Any, b: Any) -> bool:
    """Whether two numbers, strings or the like are equal. In a trace two lengths are so only if they always are: `if
    a == b` would make the graph that of equal lengths, or that of different ones."""
    if not is_traced():
        return a == b
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # it loads sympy, as every trace does

    return statically_known_true(a == b)


def may_write_in_place() -> bool:
    """Whether an operator's result may be changed in place. Selective activation checkpointing, a dispatch mode, keeps
    the results of single operators, also of those in a graph of torch.compile."""
    return not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() == 0
