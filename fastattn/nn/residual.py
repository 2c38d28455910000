"""Residual connections: where a sublayer's dropout, the addition and a LayerNorm meet in one fused op."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastattn._dispatch import default_order, requested
from fastattn.nn.recompute import note_norm, recomputing
from fastattn.ops.add_layer_norm import dropout_add_layer_norm


class OpenSum(NamedTuple):
    """The sum residual + dropout(branch), not added up yet (norm_first only).

    Before a LayerNorm comes a sum, and with norm_first the two belong to different sublayers. A sublayer therefore
    hands its sum on open, and the next norm closes it, so that sum and norm stay one pass over the data. That next
    norm's sublayer also applies its own dropout rate to the branch.

    branch: (B, L, d_model).     residual: likewise, or None where the sum is dropout(branch) alone, as at the input.
    bias: (d_model,), to be added to the branch before its dropout; or None, also where the branch has it already.
    """

    branch: Tensor
    residual: Tensor | None
    bias: Tensor | None = None


# A sublayer's input and output: complete and normalised (post-norm), or open (norm_first).
Stream = Tensor | OpenSum


def active(dropout: nn.Dropout) -> float:
    """The probability of dropping that the module asks for now: 0 in eval mode."""
    return dropout.p if dropout.training else 0.0


def norm_adds_bias(x: Tensor, backend: str | None) -> bool:
    """Whether the bias of a branch's last linear layer had better be added in the norm than in the product.

    In the product it is free, but its gradient is a pass over the data. A kernel of the norm makes neither; PyTorch's
    operators, which serve on a CPU, would make both.
    """
    return torch.is_grad_enabled() and (requested(backend)[0] or default_order(x.device)[0]) in ("triton", "cuda")


def add_norm(
    total: OpenSum, dropout: nn.Dropout, layer_norm: nn.LayerNorm, backend: str | None, return_sum: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Close a sum: layer_norm(z), or (layer_norm(z), z); z = residual + dropout(branch + bias), shaped as the branch.

    Under torch.autocast all three are in its dtype, so the stream between sublayers is kept in low precision, as the
    public implementation's in-place addition keeps it. LayerNorm's weight and bias stay float32, and so do its sums.
    """
    norm = (layer_norm.weight, layer_norm.bias, layer_norm.eps)
    branch, residual, bias = total
    inputs = (branch, residual, *norm, active(dropout))
    if not recomputing():
        return dropout_add_layer_norm(*inputs, return_sum=return_sum, x_bias=bias, backend=backend)
    out, z = dropout_add_layer_norm(*inputs, return_sum=True, x_bias=bias, backend=backend)
    kept, same = z.detach(), requested(backend)[0]  # the backward may run outside of use_backend
    note_norm(out, lambda: dropout_add_layer_norm(kept, None, *norm, backend=same))
    return (out, z) if return_sum else out
