"""Linear maps of one input as one product, over weights that stay parameters of their own.

Query, key and value projections read the same input, and all decoder layers read the encoder's output. Their weights
lie below each other in one block of memory, put there by ``join``, and ``joint_linear`` reads the block as one matrix.
A state_dict, an optimizer and everybody else sees the separate parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn import _dispatch
from fastattn.nn.plain import plain
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
    if torch.compiler.is_compiling() or _dispatch.requested(backend)[0] == "reference" or not all(map(plain, linears)):
        return tuple(linear(x) for linear in linears)
    weights = [linear.weight for linear in linears]
    joined = _joined(weights)
    if joined is None:
        return tuple(linear(x) for linear in linears)
    dtype = arguments.autocast_dtype(x.device)
    if dtype is None and not torch.is_grad_enabled():
        return F.linear(x, joined).split([w.shape[0] for w in weights], -1)
    with arguments.no_autocast(x.device):
        return _JointLinear.apply(arguments.cast(x, dtype), joined, *weights)


def _joined(weights: Sequence[Tensor]) -> Tensor | None:
    """The (rows of all, d) matrix that the weights are parts of, a view; None where they are not."""
    if not weights:
        return None
    first, rows, width = weights[0], 0, weights[0].shape[1]
    address, row_bytes = first.data_ptr(), width * first.element_size()
    for w in weights:
        if w.data_ptr() != address or w.stride() != (width, 1):
            return None
        rows += w.shape[0]
        address += w.shape[0] * row_bytes
    # Neighbours by chance lie in storages of their own.
    if first.storage_offset() * first.element_size() + rows * row_bytes > first.untyped_storage().nbytes():
        return None
    return first.detach().as_strided((rows, width), (width, 1))


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """The parts (.., columns) as one, along the last dimension: a view where they lie so, as those of attention do."""
    shape = (*parts[0].shape[:-1], sum(part.shape[-1] for part in parts))
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    first, address = parts[0], parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != address or list(part.stride()) != strides:
            return torch.cat(parts, -1)
        address += part.shape[-1] * part.element_size()
    if (first.storage_offset() + math.prod(shape)) * first.element_size() > first.untyped_storage().nbytes():
        return torch.cat(parts, -1)
    return first.as_strided(shape, strides)


class _JointLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, joined: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        weight = joined.to(x.dtype)
        ctx.save_for_backward(x, weight)
        ctx.rows, ctx.dtype = [w.shape[0] for w in weights], joined.dtype
        return F.linear(x, weight).split(ctx.rows, -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *dout: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dout = _side_by_side(dout)
        dx = dout @ weight if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[2:]):
            return dx, None, *[None] * len(ctx.rows)
        dweight = (dout.flatten(0, -2).t() @ x.flatten(0, -2)).to(ctx.dtype)
        return dx, None, *dweight.split(ctx.rows)
