"""Dropout, residual and layer or RMS normalisation by PyTorch's own operators."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastattn._tracing import can_read_values
from fastattn.backends.constants import dropout_scale
from fastattn.backends.reference import philox

DIFFERENTIABLE = True
_16_BITS = (torch.bfloat16, torch.float16)


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
    """As fastattn.backends.reference.add_layer_norm.add_layer_norm, which is the specification.

    On a CPU in 16 bits the sum is rounded before it is normalised, as in PyTorch's layer_norm.
    """
    plain = x_bias is None and bias is not None and not eps_on_std
    if plain and x.dtype in _16_BITS and can_read_values(x):
        z = dropout_add(x, residual, dropout_p, rng_state)
        return torch.layer_norm(z, (x.shape[-1],), weight, bias, eps), z
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    dtype, hidden = x.dtype, x.shape[-1]
    if dtype != acc or weight.dtype != acc:  # a cast that changes nothing still costs a call
        x, weight = x.to(acc), weight.to(acc)
        residual, bias = (None if t is None else t.to(acc) for t in (residual, bias))
    if x_bias is not None:
        x = x + x_bias.to(acc)
    z = dropout_add(x, residual, dropout_p, rng_state)
    if eps_on_std:
        out = _layer_norm_by_std(z, weight, bias, eps)
    elif bias is None:
        out = torch.rms_norm(z, (hidden,), weight, eps)
    else:
        out = torch.layer_norm(z, (hidden,), weight, bias, eps)
    return (out, z) if dtype == acc else (out.to(dtype), z.to(dtype))


def dropout_add(x: Tensor, residual: Tensor | None, dropout_p: float, rng_state: Tensor | None) -> Tensor:
    """[residual +] dropout(x), in the dtype of x."""
    if rng_state is None:
        return x if residual is None else residual + x
    if x.dtype == torch.float16:  # dz may be inf, and inf * 0 would be NaN
        dropped = philox.dropout(x, dropout_p, rng_state)
        return dropped if residual is None else residual + dropped
    scale = dropout_scale(dropout_p)
    keep = philox.keep_mask(rng_state, math.prod(x.shape[:-1]), x.shape[-1], dropout_p, x.dtype)
    if x.dim() != 2:
        keep = keep.view(x.shape)
    if x.dtype not in _16_BITS:
        dropped = x * keep.mul_(scale)  # not addcmul, whose gradient is two products
        return dropped if residual is None else residual + dropped
    # Not addcmul, whose gradient rounds keep * scale.
    return x * keep * scale if residual is None else torch.add(residual, x * keep, alpha=scale)


def _layer_norm_by_std(z: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """By a norm, as torch.std is several times slower on a CPU. Its gradient is 0 where it is 0."""
    centred = z - z.mean(-1, keepdim=True)
    std = torch.linalg.vector_norm(centred, dim=-1, keepdim=True) * (z.shape[-1] - 1) ** -0.5
    return torch.addcmul(bias, weight, centred * (std + eps).reciprocal())
