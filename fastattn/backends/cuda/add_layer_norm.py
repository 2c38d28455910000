"""The CUDA backend of dropout + residual + LayerNorm or RMSNorm. Formula, shapes and grid: csrc/add_layer_norm/."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.backends.calls import NormCall
from fastattn.backends.constants import DTYPES
from fastattn.backends.cuda import device_index, extension, refuse_device

# Known without the extension, too, and equal to its NORM_MAX_HIDDEN and NORM_TICKETS: csrc/add_layer_norm.
MAX_HIDDEN = 16384  # a row is kept in the registers of one block
TICKETS = 35  # zeros at the end of the statistics


def unsupported_reason(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    x_bias: Tensor | None = None,
) -> str | None:
    """None, or what is not supported and what the call has."""
    if reason := refuse_device(x):
        return reason
    if x.dtype not in DTYPES:
        return f"the CUDA layer norm takes float32, bfloat16 and float16, got {x.dtype}"
    dtype = x.dtype if residual is None else residual.dtype  # of the results
    other = weight.dtype if bias is None else bias.dtype
    if weight.dtype != other or weight.dtype not in (torch.float32, dtype):
        return (
            f"the CUDA layer norm takes weight and bias both in float32 or both in the result's {dtype}, "
            f"got {weight.dtype} and {other}"
        )
    if x_bias is not None and x_bias.dtype not in (torch.float32, dtype):
        return f"the CUDA layer norm takes x_bias in float32 or the result's {dtype}, got {x_bias.dtype}"
    if not 1 <= x.shape[-1] <= MAX_HIDDEN:
        return f"the CUDA layer norm keeps a row in registers, 1 <= hidden <= {MAX_HIDDEN}, got {x.shape[-1]}"
    return None


def add_layer_norm_fwd(
    call: NormCall, out_dtype: torch.dtype | None = None, read: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """x may be bfloat16 or float16 where residual is float32: the results are those of x.float(), bit for bit.

    Where z is float32, out_dtype may be that of out in 16 bits; or read, 16 bits like z, is filled with out.

    Returns out and z, both like residual, or x without it (z is x itself without residual, dropout and x_bias), and the
    backward's statistics, float32 (2 * rows + TICKETS,) or with eps_on_std (3 * rows + TICKETS,): add_layer_norm.h.
    """
    x, residual, weight, bias, x_bias, rng_state, eps, dropout_p, eps_on_std = call
    rows, hidden = x.shape
    out = torch.empty_like(x if residual is None else residual)
    z = x if residual is None and dropout_p == 0 and x_bias is None else torch.empty_like(out)
    statistics = torch.empty((3 if eps_on_std else 2) * rows + TICKETS, dtype=torch.float32, device=x.device)
    stored = None if z is x else z
    rounded = read if out_dtype in (None, out.dtype) else torch.empty_like(out, dtype=out_dtype)
    tensors = x, residual, weight, bias, x_bias, out, rounded, stored, statistics
    extension(x.is_cuda).add_layer_norm_fwd(*tensors, rows, hidden, eps, eps_on_std, dropout_p, rng_state)
    return out if rounded is read else rounded, z, statistics


def add_layer_norm_bwd(
    dout: Tensor,
    dz: Tensor | None,
    call: NormCall,
    statistics: Tensor,
    has_residual: bool,
    x_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """dout, dz: (rows, hidden) contiguous; dz is the gradient of a returned z, or None.

    Returns dx, dresidual (None without a residual; dx itself without dropout), dweight, dbias (None for RMSNorm) and
    dx_bias (None without x_bias).

    x_dtype: of dx, if not that of z, which then is float32. dx is rounded once, and is not dresidual; the other results
    are the same, bit for bit.
    """
    z, _, weight, bias, x_bias, rng_state, _, dropout_p, eps_on_std = call
    rows, hidden = z.shape
    module = extension(z.is_cuda)
    dweight, dbias = torch.empty_like(weight), None if bias is None else torch.empty_like(bias)
    sums_x_bias = x_bias is not None and hidden <= module.NORM_MAX_HIDDEN_DX_BIAS
    rounds_later = x_bias is not None and not sums_x_bias  # dx_bias is the sum of dx before it is rounded
    dx_dtype = z.dtype if x_dtype is None or rounds_later else x_dtype
    has_dx = dropout_p > 0 or dx_dtype is not z.dtype
    dsum = torch.empty_like(z) if has_residual or not has_dx else None  # the gradient of z
    dx = torch.empty_like(z, dtype=dx_dtype) if has_dx else None
    dx_bias = torch.empty_like(x_bias) if sums_x_bias else None
    blocks, partial_rows = module.add_layer_norm_bwd_grid(rows, hidden, device_index(z))
    width = hidden * (1 + (bias is not None) + sums_x_bias)
    partial = torch.empty(partial_rows * width, dtype=torch.float32, device=z.device)
    inputs, outputs = (dout, dz, z, weight, statistics), (dsum, dx, dweight, dbias, dx_bias, partial)
    module.add_layer_norm_bwd(*inputs, *outputs, rows, hidden, blocks, eps_on_std, dropout_p, rng_state)
    dx = dsum if dx is None else dx
    if x_bias is not None and not sums_x_bias:
        dx_bias = dx.sum(0, dtype=x_bias.dtype)
        dx = dx if x_dtype is None else dx.to(x_dtype)
    return dx, dsum if has_residual else None, dweight, dbias, dx_bias
