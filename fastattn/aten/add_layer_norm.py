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
    eps_on_std: bool = False,
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
    if eps_on_std:
        out = _layer_norm_by_std(z, weight, bias, eps)
    elif bias is None:
        out = F.rms_norm(z, (hidden,), weight, eps)
    else:
        out = F.layer_norm(z, (hidden,), weight, bias, eps)
    return (out, z) if dtype == acc else (out.to(dtype), z.to(dtype))


def _layer_norm_by_std(z: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """By a norm, as torch.std is several times slower on a CPU. Its gradient is 0 where it is 0."""
    centred = z - z.mean(-1, keepdim=True)
    std = torch.linalg.vector_norm(centred, dim=-1, keepdim=True) * (z.shape[-1] - 1) ** -0.5
    return torch.addcmul(bias, weight, centred * (std + eps).reciprocal())
