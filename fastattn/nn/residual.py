"""Residual connections: a sublayer's dropout, the addition of its input and a LayerNorm, in one fused op."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

from fastattn._tracing import can_read_values
from fastattn.backends import Backend, requested
from fastattn.nn.fusible import can_fuse
from fastattn.nn.leaves import Dropout, dropout_add
from fastattn.nn.recompute import is_recomputing, remember_cast, remember_norm
from fastattn.ops import _autocast
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

    def sum(self, dropout: nn.Module | float | None) -> Tensor:
        """residual + dropout(branch + bias), (B, L, d_model).

        dropout: that of the sublayer which made the branch, or its current probability of dropping."""
        branch, residual, bias = self
        branch, _ = _autocast.stream_inputs(branch if bias is None else branch + bias, residual)
        if isinstance(dropout, nn.Module) and can_fuse(dropout):
            dropout = current_dropout_p(dropout)
        if isinstance(dropout, nn.Module):
            branch = dropout(branch)
        elif dropout and can_read_values(branch):
            return dropout_add(branch, residual, dropout)
        elif dropout:
            branch = F.dropout(branch, dropout)
        return branch if residual is None else residual + branch


# A sublayer's input and output. Post-norm: a normalised tensor. norm_first: a sum to be normalised, or its summands.
HiddenState = TypeVar("HiddenState", Tensor, PendingResidual)


def current_dropout_p(dropout: nn.Module) -> float:
    """The probability of dropping that applies now: 0 in eval mode, and of a module that is not an nn.Dropout."""
    return dropout.p if dropout.training and type(dropout) in (nn.Dropout, Dropout) else 0.0


def add_norm(
    pending: PendingResidual,
    dropout: nn.Module | float | None,
    layer_norm: nn.Module,
    backend: Backend | None,
    *,
    return_sum: bool = False,
    fusible: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """layer_norm(z), or with return_sum (layer_norm(z), z), where z = residual + dropout(branch + bias).

    dropout: a module, its current probability of dropping, or None where there is none. fusible: whether can_fuse is
    known to be true of both modules. A module of which it is false is called.
    Under torch.autocast the results keep the dtype of residual, as in PyTorch, where float32 + bfloat16 is float32.
    """
    if not (fusible or can_fuse(layer_norm)):
        z = pending.sum(dropout)
        return (layer_norm(z), z) if return_sum else layer_norm(z)
    branch, residual, bias = pending
    dropout_p = 0.0
    if isinstance(dropout, float):
        dropout_p = dropout
    elif dropout is not None and (fusible or can_fuse(dropout)):
        dropout_p = current_dropout_p(dropout)
    elif dropout is not None:
        branch, bias = dropout(branch if bias is None else branch + bias), None
    norm = {"weight": layer_norm.weight, "bias": layer_norm.bias, "eps": layer_norm.eps}
    options = norm | {"dropout_p": dropout_p, "x_bias": bias, "backend": backend}
    if not is_recomputing():
        return dropout_add_layer_norm(branch, residual, **options, return_sum=return_sum)
    out, z = dropout_add_layer_norm(branch, residual, **options, return_sum=True)
    saved_sum = z.detach()
    chosen_backend = requested(backend)[0]  # the backward may run outside of use_backend
    remember_norm(out, lambda: dropout_add_layer_norm(saved_sum, None, **norm, backend=chosen_backend))
    return (out, z) if return_sum else out


# The residual connection around a sublayer, and its norm where sublayer.norm_first puts it:
#     normed, residual = sublayer_input(sublayer, x, fusible)
#     out = ..what the sublayer computes from normed..
#     return residual_connection(sublayer, x, residual, out, fusible)


def sublayer_input(sublayer: Any, x: HiddenState, fusible: bool) -> tuple[Tensor, Tensor]:
    """What the sublayer's block reads, and what its output is added to, both (B, L, d_model).

    Under torch.autocast the first is cast here, once for all linear maps that read it.
    fusible: what all_can_fuse answered of the sublayer's dropout and layer_norm.
    TypeError for a PendingResidual without norm_first.
    """
    if isinstance(x, PendingResidual):
        if not sublayer.norm_first:
            raise TypeError(f"{type(sublayer).__name__} got a PendingResidual, expected a Tensor: norm_first is False")
        norm = (sublayer.dropout, sublayer.layer_norm, sublayer.backend)
        normed, z = add_norm(x, *norm, return_sum=True, fusible=fusible)
        return _product_input(normed), z
    if not isinstance(x, Tensor):
        raise TypeError(f"{type(sublayer).__name__} got a {type(x).__name__}, expected a Tensor")
    if not sublayer.norm_first:
        return _product_input(x), x
    normed = add_norm(PendingResidual(x, None), None, sublayer.layer_norm, sublayer.backend, fusible=fusible)
    return _product_input(normed), x


def _product_input(x: Tensor) -> Tensor:
    (cast,) = _autocast.autocast_inputs(x)
    if cast is not x and is_recomputing():
        remember_cast(cast, x)
    return cast


def residual_connection(sublayer: Any, x: HiddenState, residual: Tensor, out: Tensor, fusible: bool) -> HiddenState:
    """The sublayer's output, of the type of its input x. out: its block's."""
    pending = PendingResidual(out, residual)
    if not sublayer.norm_first:
        return add_norm(pending, sublayer.dropout, sublayer.layer_norm, sublayer.backend, fusible=fusible)
    return pending if isinstance(x, PendingResidual) else pending.sum(sublayer.dropout)
