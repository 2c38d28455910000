"""Linear maps of one input as one product, over weights that stay parameters of their own.

Query, key and value projections read the same input, and all decoder layers read the encoder's output. Their weights
lie below each other in one block of memory, put there by ``join``, and ``joint_linear`` reads the block as one matrix.
A state_dict, an optimizer and everybody else sees the separate parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn import _dispatch
from fastattn.ops import _arguments as arguments


def join(weights: Iterable[nn.Parameter]) -> None:
    """Move the weights, each (rows, d), into one block of memory, in this order. Nothing is done where they differ in
    device, dtype or d. Casts and moves between devices take them apart again."""
    weights = list(weights)
    alike = len({(w.dtype, w.device, w.shape[1]) for w in weights}) == 1
    if alike and _joined(weights) is None:
        block = torch.cat([w.data for w in weights])
        for w, rows in zip(weights, block.split([len(w) for w in weights]), strict=True):
            w.data = rows


def joint_linear(x: Tensor, linears: Sequence[nn.Linear], *, backend: str | None = None) -> tuple[Tensor, ...]:
    """What each of the linear maps, which have no bias, makes of x (..., d): views (..., rows) of one product.

    Maps whose weights are not joined, that carry hooks or are of another class, and all under the backend "reference",
    are called one by one.
    """
    weights = [linear.weight for linear in linears]
    joined = not torch.compiler.is_compiling() and all(map(_plain, linears)) and _joined(weights) is not None
    if not joined or _dispatch.requested(backend)[0] == "reference":
        return tuple(linear(x) for linear in linears)
    dtype = arguments.autocast_dtype(x.device)
    with arguments.no_autocast(x.device):
        return _JointLinear.apply(arguments.cast(x, dtype), *weights)


def _plain(linear: nn.Module) -> bool:
    """Whether calling it is a product with its weight and nothing else."""
    return type(linear) is nn.Linear and not linear._forward_hooks and not linear._forward_pre_hooks


def _joined(weights: Sequence[Tensor]) -> Tensor | None:
    """The (rows of all, d) matrix that the weights are parts of, a view; None where they are not."""
    if not weights:
        return None
    first, rows = weights[0], 0
    start, row_bytes = first.data_ptr(), first.shape[1] * first.element_size()
    for w in weights:
        if w.data_ptr() != start + rows * row_bytes or not w.is_contiguous():
            return None
        rows += len(w)
    # Neighbours by chance lie in storages of their own.
    if first.storage_offset() * first.element_size() + rows * row_bytes > first.untyped_storage().nbytes():
        return None
    return first.detach().as_strided((rows, first.shape[1]), (first.shape[1], 1))


class _JointLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        weight = _joined(weights).to(x.dtype)
        ctx.save_for_backward(x, weight)
        ctx.rows, ctx.dtype = [len(w) for w in weights], weights[0].dtype
        return F.linear(x, weight).split(ctx.rows, -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *dout: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dout = torch.cat(dout, -1)
        dx = dout @ weight if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[1:]):
            return dx, *[None] * len(ctx.rows)
        dweight = (dout.flatten(0, -2).t() @ x.flatten(0, -2)).to(ctx.dtype)
        return dx, *dweight.split(ctx.rows)
