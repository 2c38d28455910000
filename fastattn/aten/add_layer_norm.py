"""Dropout, residual and layer normalisation by PyTorch's own operators."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.reference import philox


def why_not(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, dropout_p: float) -> str | None:
    """PyTorch serves everything."""
    return None


def add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dropout_p: float,
    rng_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As fastattn.reference.add_layer_norm.add_layer_norm, which is the specification."""
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    z = x.to(acc)
    if rng_state is None:
        z = z if residual is None else residual + z
    else:
        factor = philox.keep_factor(rng_state, *x.shape, dropout_p, acc)
        z = z * factor if residual is None else torch.addcmul(residual.to(acc), z, factor)
    out = F.layer_norm(z, z.shape[-1:], weight.to(acc), bias.to(acc), eps)
    return out.to(x.dtype), z.to(x.dtype)
