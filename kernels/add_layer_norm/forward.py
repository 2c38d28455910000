"""Forward of dropout + residual + LayerNorm or RMSNorm.

Specification: fastattn/backends/reference/add_layer_norm.py

    z = residual + dropout(x + x_bias);    out = (z - mean) * rstd * weight + bias;    rstd = 1 / sqrt(var + eps)
    RMSNorm, where bias is None:  out = z * rstd * weight;                    rstd = 1 / sqrt(mean(z^2) + eps)
    with eps_on_std:              rstd = 1 / (std + eps);                     std = sqrt(var * hidden / (hidden - 1))

Grid: one program for BLOCK_M rows. A program holds its rows of z in registers, as float32, 32 values a lane: x and
residual are read once, and the variance is two-pass (the mean square of z - mean: nothing cancels) at no extra traffic.
Up to hidden 1024 a row belongs to one warp, so the two sums are shuffles, without shared memory or barriers.
The statistics are those of z before it is rounded for storage. They are float32, for the backward: mean (rows), rstd
(rows), then TICKETS zeros, with which the backward counts its programs; it sets them to zero again. With eps_on_std,
ratio (rows) follows, the factor of mean(g * normal) in the backward:
    ratio = (std + eps) / std * hidden / (hidden - 1), or 0 where std is 0
It is stored because rstd alone cannot distinguish a std that is far below eps from 0.

Floor: read x, residual, write z, out: 8 bytes an element in 16-bit types, 8 KiB for a row of 1024. Without residual,
dropout and x_bias z is x itself and is not written: 4 bytes. With x in 16 bits and residual in float32: 14 bytes, 16
with `read`, whose cast in a launch of its own moves 6 more. The dropout mask is recomputed from Philox, never stored.
H200 (copies at 4.27 TB/s), bf16, 65536 x 1024 with dropout: 0.136 ms, 92 % of that rate.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.backends.calls import NormCall

from ..common.launch import LIMIT, Launches, addresses
from ..common.philox import dropout_constants, dropout_keep

MAX_HIDDEN = 16384  # a row is held in the registers of one program
TICKETS = 33  # one for each SPAN programs of the backward, and one for all


def forward_tile(hidden: int) -> tuple[int, int, int]:
    """(BLOCK_M, BLOCK_N, num_warps): 32 values a lane, several rows a warp where they are short.

    Registers a thread with dropout at sm_90, offline: 66 to 72 in bfloat16 (80 to 128 with float32 weights), 86 to 96
    in float32 (119 with x in bfloat16, 114 to 127 with `read`), no spills. Dropped: 64 values a lane (120 to 199
    registers), which leaves a multiprocessor half the warps and as many loads in flight.
    """
    block_n = max(triton.next_power_of_2(hidden), 8)  # 8: the dropout rule works on eight columns
    return max(1024 // block_n, 1), block_n, max(block_n // 1024, 1)


@triton.jit
def normalize(
    value, weight, bias, statistics, row, rows, col, hidden, eps,
    IS_RMS: tl.constexpr, TICKETS: tl.constexpr, EPS_ON_STD: tl.constexpr,
):  # fmt: skip
    """The normalised rows. Stores their statistics, and zero tickets."""
    in_row = col < hidden
    # Rounded to nearest: on a GPU the plain division and root may be two units off, the same way along the whole row.
    center = tl.zeros([value.shape[0]], tl.float32)
    if not IS_RMS:
        center = tl.div_rn(tl.sum(value, axis=1), center + hidden)
        value = tl.where(in_row[None, :], value - center[:, None], 0.0)
    squares = tl.sum(value * value, axis=1)
    if EPS_ON_STD:
        std = tl.sqrt_rn(squares / (hidden - 1))
        inverse = tl.div_rn(1.0, std + eps)
        ratio = (std + eps) / tl.where(std > 0, std, float("inf")) * (hidden / (hidden - 1))
        tl.store(statistics + rows + rows + TICKETS + row, ratio, mask=row < rows)
    else:
        inverse = tl.div_rn(1.0, tl.sqrt_rn(squares / hidden + eps))
    tl.store(statistics + row, center, mask=row < rows)
    tl.store(statistics + rows + row, inverse, mask=row < rows)
    if tl.program_id(0) == 0:
        ticket = tl.arange(0, 64)
        tl.store(statistics + 2 * rows.to(tl.int64) + ticket, tl.zeros([64], tl.float32), mask=ticket < TICKETS)

    gain = tl.load(weight + col, mask=in_row, other=0.0).to(tl.float32)
    value = value * inverse[:, None] * gain[None, :]
    if not IS_RMS:
        value += tl.load(bias + col, mask=in_row, other=0.0).to(tl.float32)[None, :]
    return value


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
    call: NormCall, out_dtype: torch.dtype | None = None, read: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """weight, bias, x_bias: any float dtype.

    x may be bfloat16 or float16 where residual is float32: the results are those of x.float(), but for the
    order in which a row is summed up.

    Where z is float32, out_dtype may be that of out in 16 bits; or read, 16 bits like z, is filled with out.

    Returns out and z, both like residual, or x without it (z is x itself without residual, dropout and x_bias), and the
    backward's statistics.
    """
    x, residual, weight, bias, x_bias, rng_state, eps, dropout_p, eps_on_std = call
    rows, hidden = x.shape
    stream = x if residual is None else residual
    out = torch.empty_like(stream, dtype=out_dtype)
    z = x if residual is None and dropout_p == 0 and x_bias is None else torch.empty_like(stream)
    size = (3 if eps_on_std else 2) * rows + TICKETS
    statistics = torch.empty(size, dtype=torch.float32, device=x.device)
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
