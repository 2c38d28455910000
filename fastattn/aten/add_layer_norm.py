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
    z = philox.dropout(x.to(acc), dropout_p, rng_state)
    if residual is not None:
        z = residual + z
    out = F.layer_norm(z, z.shape[-1:], weight.to(acc), bias.to(acc), eps)
    return out.to(x.dtype), z.to(x.dtype)
