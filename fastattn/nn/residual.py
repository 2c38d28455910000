"""Residual connections: a sublayer's dropout, the addition of its input and a LayerNorm, in one fused op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fastattn.backends import Backend, default_order, requested
from fastattn.nn.fusible import can_fuse
from fastattn.nn.recompute import is_recomputing, remember_norm
from fastattn.ops.add_layer_norm import dropout_add_layer_norm


class PendingResidual(NamedTuple):
    """The two summands of residual + dropout(branch), before they are added (norm_first only).

    The fused op adds two tensors and normalises the sum in one pass. With norm_first the addition belongs to one
    sublayer and the LayerNorm to the next. A sublayer therefore returns the summands, and the next sublayer's norm adds
    them. That sublayer also applies its own dropout rate to the branch.

    branch: (B, L, d_model).     residual: likewise, or None where the sum is dropout(branch) alone, as at the input.
    bias: (d_model,), added to the branch before dropout; None where there is none or the branch already contains it.

    A pre-norm stack, and the same with each sum fused with the norm that follows it:

        x = dropout(embedded)        x = PendingResidual(embedded, None)
        for layer in layers:         for layer in layers:
            x, _ = layer(x, mask)        x, _ = layer(x, mask)
        out = norm(x)                out = norm(x.sum(layers[-1].pos_ffn.dropout))

    norm: a LayerNorm for the end of the stack. On the right the first layer's dropout is applied to embedded.
    """

    branch: Tensor
    residual: Tensor | None
    bias: Tensor | None = None

    def sum(self, dropout: nn.Module) -> Tensor:
        """residual + dropout(branch + bias), (B, L, d_model). dropout: that of the sublayer which made the branch."""
        branch, residual, bias = self
        branch = dropout(branch if bias is None else branch + bias)
        return branch if residual is None else residual + branch


# A sublayer's input and output. Post-norm: a normalised tensor. norm_first: a sum to be normalised, or its summands.
Stream = TypeVar("Stream", Tensor, PendingResidual)
_KEEP = nn.Identity()  # in place of a dropout, for what was dropped before


def current_dropout_p(dropout: nn.Module) -> float:
    """The probability of dropping that applies now: 0 in eval mode, and of a module that is not an nn.Dropout."""
    return dropout.p if dropout.training and type(dropout) is nn.Dropout else 0.0


def norm_adds_bias(x: Tensor, backend: Backend | None) -> bool:
    """Whether the bias of a branch's last linear map should be added by the norm instead of by the product.

    A product adds it for free, but its gradient then takes a pass over the data. A kernel of the norm adds it and sums
    its gradient in passes that it makes anyway. PyTorch's operators, the default on a CPU, would need a pass for each.
    """
    return torch.is_grad_enabled() and (requested(backend)[0] or default_order(x.device)[0]) in ("triton", "cuda")


def add_norm(
    total: PendingResidual,
    dropout: nn.Module,
    layer_norm: nn.Module,
    backend: Backend | None,
    return_sum: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """layer_norm(z), or with return_sum (layer_norm(z), z), where z = residual + dropout(branch + bias).

    Under torch.autocast all inputs and outputs are in its dtype, so the stream between sublayers is stored in low
    precision, as by the public implementation's in-place addition. LayerNorm's weight, bias and statistics stay
    float32. A dropout or layer_norm that can_fuse denies is called.
    """
    if not can_fuse(layer_norm):
        z = total.sum(dropout)
        return (layer_norm(z), z) if return_sum else layer_norm(z)
    branch, residual, bias = total
    dropout_p = current_dropout_p(dropout)
    if not can_fuse(dropout):
        branch, bias, dropout_p = dropout(branch if bias is None else branch + bias), None, 0.0
    norm = {"weight": layer_norm.weight, "bias": layer_norm.bias, "eps": layer_norm.eps}
    options = norm | {"dropout_p": dropout_p, "x_bias": bias, "backend": backend}
    if not is_recomputing():
        return dropout_add_layer_norm(branch, residual, **options, return_sum=return_sum)
    out, z = dropout_add_layer_norm(branch, residual, **options, return_sum=True)
    kept_sum = z.detach()
    chosen_backend = requested(backend)[0]  # the backward may run outside of use_backend
    remember_norm(out, lambda: dropout_add_layer_norm(kept_sum, None, **norm, backend=chosen_backend))
    return (out, z) if return_sum else out


def add_branch(sublayer: Any, x: Stream, branch: Callable[[Tensor], tuple[Tensor, Tensor | None]]) -> Stream:
    """The residual connection around a sublayer's branch and its norm, where sublayer.norm_first puts that.

    branch: from what it reads, (B, L, d_model), to its result and a bias that the norm is to add to it, or None.
    TypeError for a PendingResidual without norm_first.
    """
    dropout, layer_norm, backend = sublayer.dropout, sublayer.layer_norm, sublayer.backend
    if isinstance(x, PendingResidual):
        if not sublayer.norm_first:
            raise TypeError(f"{type(sublayer).__name__} got a PendingResidual, expected a Tensor: norm_first is False")
        normed, total = add_norm(x, dropout, layer_norm, backend, return_sum=True)
        out, bias = branch(normed)
        return PendingResidual(out, total, bias)
    if not isinstance(x, Tensor):
        raise TypeError(f"{type(sublayer).__name__} got a {type(x).__name__}, expected a Tensor")
    if sublayer.norm_first:
        out, bias = branch(add_norm(PendingResidual(x, None), _KEEP, layer_norm, backend))
        return PendingResidual(out, x, bias).sum(dropout)
    out, bias = branch(x)
    return add_norm(PendingResidual(out, x, bias), dropout, layer_norm, backend)
