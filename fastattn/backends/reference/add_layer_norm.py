"""Dropout, residual and layer normalisation, the formula. Source: Ba et al. 2016, "Layer Normalization".

z = residual + dropout(x + x_bias);  out = (z - mean(z)) / sqrt(var(z) + eps) * weight + bias
without bias, RMSNorm:      out = z / sqrt(mean(z^2) + eps) * weight
with eps_on_std:            out = (z - mean(z)) / (std(z) + eps) * weight + bias
                            std(z) = sqrt(sum((z - mean(z))^2) / (hidden - 1)).   Source: "The Annotated Transformer"
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.backends.reference import philox

DIFFERENTIABLE = True


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
    """x, residual (..., hidden), weight, bias, x_bias (hidden,) -> out and z, both (..., hidden) in x's dtype.

    Without bias RMSNorm. Statistics are taken of z before it is rounded, in float32 or, for float64 inputs, in float64.
    """
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    z = x.to(acc) if x_bias is None else x.to(acc) + x_bias.to(acc)
    z = philox.dropout(z, dropout_p, rng_state)
    if residual is not None:
        z = residual.to(acc) + z
    centred = z if bias is None else z - z.mean(-1, keepdim=True)
    if eps_on_std:
        rstd = 1 / (z.std(-1, correction=1, keepdim=True) + eps)  # where std is 0, PyTorch gives it the gradient 0
    else:
        rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    out = centred * rstd * weight.to(acc)
    if bias is not None:
        out = out + bias.to(acc)
    return out.to(x.dtype), z.to(x.dtype)
