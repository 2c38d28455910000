"""Several linear maps of one input as one matrix product.

The query, key and value projections of self-attention read the same input. The key and value projections of all
decoder layers read the encoder's output. In training their weights are concatenated at every call, and one product
replaces three, or two a layer. The parameters themselves stay separate tensors in storages of their own.

Cost: a copy of the weights at every call (3 MB a layer at d_model 512 in float32), kept for the backward.
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

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn import _dispatch
from fastattn.nn.unmodified import is_unmodified


def joint_linear(x: Tensor, linears: Sequence[nn.Linear], *, backend: str | None = None) -> tuple[Tensor, ...]:
    """The outputs (..., rows) of linear maps for one input x (..., d). All of them have a bias, or none.

    In training they are views of one product. The maps are called one by one where no gradient is recorded, under the
    backend "reference", under torch.compile, and where a map has hooks, is of another class, or differs from the others
    in dtype or device.
    """
    if (
        not torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or _dispatch.requested(backend)[0] == "reference"
        or not all(map(is_unmodified, linears))
        or len({(linear.weight.dtype, linear.weight.device) for linear in linears}) != 1
    ):
        return tuple(linear(x) for linear in linears)
    weights = [linear.weight for linear in linears]
    biases = [linear.bias for linear in linears]
    bias = None if biases[0] is None else torch.cat(biases)
    return F.linear(x, torch.cat(weights), bias).split([weight.shape[0] for weight in weights], -1)
