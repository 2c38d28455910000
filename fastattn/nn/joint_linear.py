"""Linear maps, alone and several of one input as one matrix product.

The query, key and value projections of self-attention read the same input. The key and value projections of all
decoder layers read the encoder's output. In training their weights are concatenated at every call, and one product
replaces three, or two a layer. The parameters themselves stay separate tensors in storages of their own.

Cost: a copy of the weights at every call (3 MB a layer at d_model 512 in float32), kept for the backward; under
torch.autocast it is the copy in 16 bits that PyTorch would make of each weight.
Measured on two CPU cores in float32, forward and backward of the projections alone, medians: one product over
concatenated weights and over weights that are stored side by side take the same time (11.9 and 11.8 ms at d_model 512,
512 tokens; 0.16 and 0.17 ms at d_model 64, 128 tokens). Separate products take 11.7 and 0.20 ms: they are as fast
where the matrices are large, and a quarter slower where they are small.
A whole training step takes 0.98 to 1.01 times the CPU time that it takes with weights stored side by side (1 + 1 layers
of width 64 to 6 + 6 layers of width 512, float32 and bfloat16).
Without gradients the products are separate. For few tokens the copy would cost more than the products (0.42 against
0.15 ms for 5 tokens at d_model 512).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastattn import backends
from fastattn._tracing import is_transformed
from fastattn.backends import Backend, cpu_matmul
from fastattn.nn.fusible import can_fuse
from fastattn.ops import _checks


def linear(module: nn.Module, x: Tensor, *, backend: Backend | None = None) -> Tensor:
    """module(x), by the product that is fastest on this processor where the module is a plain nn.Linear."""
    if (
        can_fuse(module)
        and _checks.autocast_dtype(x.device) is None
        and cpu_matmul.uses_onednn(x, module.weight)
        and backends.requested(backend)[0] in (None, "aten")
    ):
        return cpu_matmul.linear(x, module.weight, module.bias)
    return module(x)


def joint_linear(x: Tensor, linears: Sequence[nn.Linear], *, backend: Backend | None = None) -> tuple[Tensor, ...]:
    """The outputs (..., rows) of linear maps for one input x (..., d). All of them have a bias, or none.

    In training they are views of one product. The maps are called one by one where no gradient is recorded, under the
    backend "reference", under torch.compile, in transforms of torch.func, and where a map has hooks, is of another
    class, or differs from the others in dtype or device.
    """
    if (
        not torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or is_transformed()
        or backends.requested(backend)[0] == "reference"
        or not all(map(can_fuse, linears))
        or len({(linear.weight.dtype, linear.weight.device) for linear in linears}) != 1
    ):
        return tuple(linear(module, x, backend=backend) for module in linears)
    weights, biases = [module.weight for module in linears], [module.bias for module in linears]
    dtype = _checks.autocast_dtype(x.device) or weights[0].dtype
    bias = None if biases[0] is None else _Joint.apply(dtype, *biases)
    return cpu_matmul.linear(x, _Joint.apply(dtype, *weights), bias).split([len(weight) for weight in weights], -1)


class _Joint(torch.autograd.Function):
    """The tensors one below the other, in a dtype: one copy where torch.cat and a cast would be two."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> Tensor:
        ctx.sizes, ctx.dtype = [len(t) for t in tensors], tensors[0].dtype
        joint = tensors[0].new_empty(sum(ctx.sizes), *tensors[0].shape[1:], dtype=dtype)
        torch._foreach_copy_(list(joint.split(ctx.sizes)), list(tensors))
        return joint

    @staticmethod
    def backward(ctx: Any, djoint: Tensor) -> tuple[Tensor | None, ...]:
        return None, *djoint.to(ctx.dtype).split(ctx.sizes)
