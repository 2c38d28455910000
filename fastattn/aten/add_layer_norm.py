"""Dropout, residual and layer or RMS normalisation by PyTorch's own operators."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.reference import philox


def why_not(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    x_bias: Tensor | None = None,
) -> str | None:
    """PyTorch serves everything."""
    return None


def add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    rng_state: Tensor | None,
    x_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As fastattn.reference.add_layer_norm.add_layer_norm, which is the specification."""
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    dtype, hidden = x.dtype, x.shape[-1]
    if dtype != acc or weight.dtype != acc:  # a cast that changes nothing still costs a call
        x, weight = x.to(acc), weight.to(acc)
        residual, bias = (None if t is None else t.to(acc) for t in (residual, bias))
    if x_bias is not None:
        x = x + x_bias.to(acc)
    if rng_state is None:
        z = x if residual is None else residual + x
    else:
        factor = philox.keep_factor(rng_state, x.numel() // hidden, hidden, dropout_p, acc).view(x.shape)
        z = x * factor if residual is None else torch.addcmul(residual, x, factor)
    out = F.rms_norm(z, (hidden,), weight, eps) if bias is None else F.layer_norm(z, (hidden,), weight, bias, eps)
    return (out, z) if dtype == acc else (out.to(dtype), z.to(dtype))
