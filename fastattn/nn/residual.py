"""Residual connections: a sublayer's dropout, the addition of its input and a LayerNorm, in one fused op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

from fastattn.backends import Backend
from fastattn.nn.fusible import can_fuse
from fastattn.nn.leaves import Dropout, dropout_add, drops_faster
from fastattn.nn.params import NormParams, norm_params
from fastattn.ops import _autocast
from fastattn.ops._checks import check_choice
from fastattn.ops.add_layer_norm import dropout_add_layer_norm, dropout_add_rms_norm


class PendingResidual(NamedTuple):
    """The two summands of residual + dropout(branch), before they are added (norm_first only).

    The fused op adds two tensors and normalises the sum in one pass. With norm_first the addition belongs to one
    sublayer and the LayerNorm to the next. A sublayer therefore returns the summands, and the next sublayer's norm adds
    them.

    branch: (B, L, d_model).     residual: likewise, or None where the sum is dropout(branch) alone, as at the input.
    bias: (d_model,), added to the branch before dropout; None where there is none or the branch already contains it.
    dropout: that of the sublayer that made the branch: a module, or its current probability of dropping. None for
        that of the norm which adds the summands.

    A pre-norm stack, and the same with each sum fused with the norm that follows it:

        x = dropout(embedded)        x = PendingResidual(embedded, None)
        for layer in layers:         for layer in layers:
            x, _ = layer(x, mask)        x, _ = layer(x, mask)
        out = norm(x)                out = norm(x.sum())

    norm: a LayerNorm for the end of the stack. On the right the first layer's dropout is applied to embedded.
    """

    branch: Tensor
    residual: Tensor | None
    bias: Tensor | None = None
    dropout: nn.Module | float | None = None

    def sum(self, dropout: nn.Module | float | None = None) -> Tensor:
        """residual + dropout(branch + bias), (B, L, d_model).

        dropout: used where the summands have none."""
        dropout = dropout if self.dropout is None else self.dropout
        branch, residual, bias, dropout = self._replace(dropout=dropout).with_known_dropout()
        branch, _ = _autocast.stream_inputs(branch if bias is None else branch + bias, residual)
        if dropout and drops_faster(branch):
            return dropout_add(branch, residual, dropout)
        branch = F.dropout(branch, dropout) if dropout else branch
        return branch if residual is None else residual + branch

    def with_known_dropout(self) -> PendingResidual:
        """The same with a number in place of a dropout module, which is called where it is modified."""
        branch, residual, bias, dropout = self
        if not isinstance(dropout, nn.Module):
            return self
        if can_fuse(dropout):
            return self._replace(dropout=current_dropout_p(dropout))
        return PendingResidual(dropout(branch if bias is None else branch + bias), residual, None, 0.0)


# A sublayer's input and output. Post-norm: a normalised tensor. norm_first: a sum to be normalised, or its summands.
HiddenState = Tensor | PendingResidual
# The same, for functions whose result has the type of their input.
HiddenStateT = TypeVar("HiddenStateT", Tensor, PendingResidual, HiddenState)


Norm = Literal["layer", "rms"]
_NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


def new_norm(norm: Norm, d_model: int, **factory: Any) -> nn.Module:
    """The norm of a sublayer. factory: device and dtype. ValueError for another name. An RMSNorm is not fused."""
    check_choice("norm", norm, tuple(_NORMS))
    return _NORMS[norm](d_model, eps=1e-6, **factory)


Compute = Callable[[Tensor, Tensor], PendingResidual]  # of (norm(z), z); post-norm of (x, x)
AddNorm = Callable[[PendingResidual], tuple[Tensor, Tensor]]  # (norm(z), z)


def connect(x: HiddenStateT, compute: Compute, norm: AddNorm) -> HiddenStateT:
    """A sublayer with its residual connection: post-norm of a tensor, norm_first of a PendingResidual."""
    if isinstance(x, PendingResidual):
        return compute(*norm(x))
    return norm(compute(x, x))[0]


def current_dropout_p(dropout: nn.Module) -> float:
    """The probability of dropping that applies now: 0 in eval mode, and of a module that is not an nn.Dropout."""
    return dropout.p if dropout.training and type(dropout) in (nn.Dropout, Dropout) else 0.0


def add_norm(
    pending: PendingResidual,
    dropout: nn.Module | float | None,
    layer_norm: nn.Module,
    backend: Backend | None,
    *,
    fusible: bool = False,
) -> tuple[Tensor, Tensor]:
    """(layer_norm(z), z), where z = residual + dropout(branch + bias).

    dropout: used where `pending` has none: a module, or its current probability of dropping.
    fusible: whether can_fuse is known to be true of layer_norm. A module of which it is false is called.
    Under torch.autocast the results keep the dtype of residual, as in PyTorch, where float32 + bfloat16 is float32.
    """
    if not (fusible or can_fuse(layer_norm)):
        z = pending.sum(dropout)
        return layer_norm(z), z
    dropout = dropout if pending.dropout is None else pending.dropout
    branch, residual, bias, dropout = pending._replace(dropout=dropout).with_known_dropout()
    options = {"dropout_p": dropout or 0.0, "x_bias": bias, "backend": backend}
    return fused_add_norm(branch, residual, norm_params(layer_norm, 0.0), **options)


def fused_add_norm(branch: Tensor, residual: Tensor | None, norm: NormParams, **options: Any) -> tuple[Tensor, Tensor]:
    """(norm(z), z) by the op of this norm. options: the op's."""
    options |= {"eps": norm.eps, "return_sum": True}
    if norm.bias is None:
        return dropout_add_rms_norm(branch, residual, norm.weight, **options)
    return dropout_add_layer_norm(branch, residual, norm.weight, norm.bias, **options)
