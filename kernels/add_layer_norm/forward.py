"""Forward of dropout + residual + LayerNorm.          Specification: fastattn/reference/add_layer_norm.py

    z = residual + dropout(x);    out = (z - mean) * rstd * weight + bias;    rstd = 1 / sqrt(var + eps)

Grid: one program for BLOCK_M rows. A program holds its rows of z in registers, as float32, 32 values a lane: x and
residual are read once, and the variance is two-pass (the mean square of z - mean: nothing cancels) at no extra traffic.
Up to hidden 1024 a row belongs to one warp, so the two sums are shuffles, without shared memory or barriers.
The statistics are those of z before it is rounded for storage.

Floor: read x, residual, write z, out: 8 bytes an element in 16-bit types, 8 KiB for a row of 1024. Without residual and
dropout z is x itself and is not written: 4 bytes. The dropout mask is recomputed from Philox, never stored.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import on_device
from ..common.philox import dropout_constants, dropout_keep


@triton.jit(do_not_specialize=["rows", "threshold"])
def add_layer_norm_fwd_kernel(
    x, residual, weight, bias, out, z, mean, rstd, rng_state,
    rows, hidden, eps, threshold, scale,
    HAS_RESIDUAL: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_N)
    in_row = col < hidden
    inside = (row < rows)[:, None] & in_row[None, :]
    place = row[:, None] * hidden + col[None, :]

    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_DROPOUT:
        value = tl.where(dropout_keep(rng_state, threshold, row, 0, BLOCK_N), value * scale, 0.0)
    if HAS_RESIDUAL:
        value += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL or HAS_DROPOUT:
        tl.store(z + place, value.to(z.dtype.element_ty), mask=inside)

    # Rounded to nearest: on a GPU the plain division and root may be two units off, the same way along the whole row.
    count = tl.zeros([BLOCK_M], tl.float32) + hidden
    center = tl.div_rn(tl.sum(value, axis=1), count)
    value = tl.where(in_row[None, :], value - center[:, None], 0.0)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(value * value, axis=1) / hidden + eps))
    tl.store(mean + row, center, mask=row < rows)
    tl.store(rstd + row, inverse, mask=row < rows)

    gain = tl.load(weight + col, mask=in_row, other=0.0).to(tl.float32)
    shift = tl.load(bias + col, mask=in_row, other=0.0).to(tl.float32)
    value = value * inverse[:, None] * gain[None, :] + shift[None, :]
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


def forward_tile(hidden: int) -> tuple[int, int, int]:
    """(BLOCK_M, BLOCK_N, num_warps): 32 values a lane, several rows a warp where they are short.

    Registers a thread with dropout at sm_90, offline: 66 to 72 in bfloat16 (80 to 128 with float32 weights), 86 to 96
    in float32, no spills. Dropped: 64 values a lane (120 to 199 registers), which leaves a multiprocessor half the
    warps and no more loads in flight.
    """
    block_n = max(triton.next_power_of_2(hidden), 8)  # 8: the dropout rule serves eight columns at a time
    return max(1024 // block_n, 1), block_n, max(block_n // 1024, 1)


def add_layer_norm_fwd(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dropout_p: float,
    rng_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, residual: (rows, hidden) contiguous; weight, bias: (hidden,), any float dtype.

    Returns out and z, both like x (z is x itself without residual and dropout), and mean, rstd: (rows,) float32.
    """
    rows, hidden = x.shape
    out = torch.empty_like(x)
    z = x if residual is None and dropout_p == 0 else torch.empty_like(x)
    mean = torch.empty(rows, dtype=torch.float32, device=x.device)
    rstd = torch.empty_like(mean)
    if x.numel() == 0:
        return out, z, mean, rstd
    block_m, block_n, num_warps = forward_tile(hidden)
    threshold, scale = dropout_constants(dropout_p)
    with on_device(x):
        add_layer_norm_fwd_kernel[(triton.cdiv(rows, block_m),)](
            x, residual, weight, bias, out, z, mean, rstd, rng_state,
            rows, hidden, eps, threshold, scale,
            HAS_RESIDUAL=residual is not None, HAS_DROPOUT=dropout_p > 0,
            BLOCK_M=block_m, BLOCK_N=block_n, num_warps=num_warps,
        )  # fmt: skip
    return out, z, mean, rstd
