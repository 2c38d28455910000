"""Forward of dropout + residual + LayerNorm or RMSNorm.

Specification: fastattn/backends/reference/add_layer_norm.py

    z = residual + dropout(x + x_bias);    out = (z - mean) * rstd * weight + bias;    rstd = 1 / sqrt(var + eps)
    RMSNorm, where bias is None:  out = z * rstd * weight;                    rstd = 1 / sqrt(mean(z^2) + eps)
    with eps_on_std:              rstd = 1 / (std + eps);                     std = sqrt(var * hidden / (hidden - 1))

Grid: one program for BLOCK_M rows. A program holds its rows of z in registers, as float32, 32 values a lane: x and
residual are read once, and the variance is two-pass (the mean square of z - mean: nothing cancels) at no extra traffic.
Up to hidden 1024 a row belongs to one warp, so the two sums are shuffles, without shared memory or barriers.
The statistics are those of z before it is rounded for storage.

Floor: read x, residual, write z, out: 8 bytes an element in 16-bit types, 8 KiB for a row of 1024. Without residual,
dropout and x_bias z is x itself and is not written: 4 bytes. With x in 16 bits and residual in float32: 14 bytes, 16
with `read`, whose cast in a launch of its own moves 6 more. The dropout mask is recomputed from Philox, never stored.
H200 (copies at 4.27 TB/s), bf16, 65536 x 1024 with dropout: 0.136 ms, 92 % of that rate.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import LIMIT, Launches, addresses
from ..common.norm import TICKETS, empty_statistics, forward_tile, normalize
from ..common.philox import dropout_constants, dropout_keep


@triton.jit(do_not_specialize=["rows", "threshold"])
def add_layer_norm_fwd_kernel(
    x, x_bias, residual, weight, bias, out, read, z, statistics, rng_state,
    rows, hidden, eps, threshold, scale,
    HAS_X_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_DROPOUT: tl.constexpr, IS_RMS: tl.constexpr,
    EPS_ON_STD: tl.constexpr, STORE_READ: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TICKETS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_N)
    inside = (row < rows)[:, None] & (col < hidden)[None, :]
    place = row[:, None] * hidden + col[None, :]

    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_X_BIAS:
        value += tl.load(x_bias + col, mask=col < hidden, other=0.0).to(tl.float32)[None, :]
    if HAS_DROPOUT:
        value = tl.where(dropout_keep(rng_state, threshold, row, 0, BLOCK_N), value * scale, 0.0)
    if HAS_RESIDUAL:
        value += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_X_BIAS or HAS_RESIDUAL or HAS_DROPOUT:
        tl.store(z + place, value.to(z.dtype.element_ty), mask=inside)
    value = normalize(value, weight, bias, statistics, row, rows, col, hidden, eps, IS_RMS, TICKETS, EPS_ON_STD)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)
    if STORE_READ:
        tl.store(read + place, value.to(read.dtype.element_ty), mask=inside)


_LAUNCHES = Launches(add_layer_norm_fwd_kernel, *[Tensor] * 10)


def add_layer_norm_fwd(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    rng_state: Tensor | None,
    x_bias: Tensor | None = None,
    eps_on_std: bool = False,
    out_dtype: torch.dtype | None = None,
    read: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual: (rows, hidden) contiguous; weight, bias, x_bias: (hidden,), any float dtype; without bias RMSNorm.

    x may be bfloat16 or float16 where residual is float32: the results are those of x.float(), but for the
    order in which a row is summed up.

    Where z is float32, out_dtype may be that of out in 16 bits; or read, 16 bits like z, is filled with out.

    Returns out and z, both like residual, or x without it (z is x itself without residual, dropout and x_bias), and the
    backward's statistics.
    """
    rows, hidden = x.shape
    stream = x if residual is None else residual
    out = torch.empty_like(stream, dtype=out_dtype)
    z = x if residual is None and dropout_p == 0 and x_bias is None else torch.empty_like(stream)
    statistics = empty_statistics(rows, x, eps_on_std)
    if x.numel() == 0:
        return out, z, statistics
    tensors = x, x_bias, residual, weight, bias, out, read, z, statistics, rng_state
    found, alignment = addresses(*tensors)
    x_bias_dtype, bias_dtype = None if x_bias is None else x_bias.dtype, None if bias is None else bias.dtype
    device, has_dropout = x.get_device(), dropout_p > 0
    key = (
        *(device, x.dtype, z.dtype, x_bias_dtype, residual is None, weight.dtype, bias_dtype, alignment),
        *(rng_state is None, rows < LIMIT, hidden, has_dropout, eps_on_std),
        *(out_dtype, None if read is None else read.dtype),
    )
    launch = _LAUNCHES.get(key)
    if launch is None:
        block_m, block_n, num_warps = forward_tile(hidden)
        flags = {"HAS_X_BIAS": x_bias is not None, "HAS_RESIDUAL": residual is not None, "IS_RMS": bias is None}
        flags |= {"HAS_DROPOUT": has_dropout, "EPS_ON_STD": eps_on_std, "STORE_READ": read is not None}
        sizes = {"TICKETS": TICKETS, "BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps}
        launch = _LAUNCHES.add(key, block_m, **flags, **sizes)
    arguments = *found, rows, hidden, float(eps), *dropout_constants(dropout_p)
    launch.run(device, -(-rows // launch.tile), arguments, tensors)
    return out, z, statistics
