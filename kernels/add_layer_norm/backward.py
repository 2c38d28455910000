"""Backward of dropout + residual + LayerNorm.          Specification: fastattn/reference/add_layer_norm.py

    normal = (z - mean) * rstd;    g = dout * weight
    dresidual = (g - mean(g) - normal * mean(g * normal)) * rstd + dz       means along the row; dz: of a returned z
    dx = dropout(dresidual);    dweight = sum over rows of dout * normal;    dbias = sum over rows of dout

Grid: two programs a multiprocessor, each walking the rows in strides of the grid, 4096 elements a turn, the next turn's
loads in flight (cp.async). In registers: 16 values a lane of dout, z and of both weight gradients, which therefore cost
no traffic in the loop. Each program writes its sums as one row of `partial`; a second kernel adds the rows. No atomics,
and every sum has one order: equal inputs give equal bits.

Floor: read dout, z (, dz), write dresidual (, dx): 6 to 10 bytes an element in 16-bit types; `partial` adds
2 * programs * hidden * 4 bytes written and read once (264 programs, hidden 1024: 2 x 2.2 MB, mostly in L2).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import multiprocessors, on_device
from ..common.philox import dropout_constants, dropout_keep


@triton.jit(do_not_specialize=["rows", "threshold"])
def add_layer_norm_bwd_kernel(
    dout, dz, z, weight, mean, rstd, dx, dresidual, partial, rng_state,
    rows, hidden, threshold, scale,
    HAS_DZ: tl.constexpr, HAS_DROPOUT: tl.constexpr, STORE_DRESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    col = tl.arange(0, BLOCK_N)
    in_row = col < hidden
    gain = tl.load(weight + col, mask=in_row, other=0.0).to(tl.float32)
    dgain = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    dshift = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)

    for turn in tl.range(program, tl.cdiv(rows, BLOCK_M), programs, num_stages=STAGES):
        row = turn * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        inside = (row < rows)[:, None] & in_row[None, :]
        place = row[:, None] * hidden + col[None, :]
        center = tl.load(mean + row, mask=row < rows, other=0.0)
        inverse = tl.load(rstd + row, mask=row < rows, other=0.0)
        grad = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
        normal = tl.load(z + place, mask=inside, other=0.0).to(tl.float32)
        normal = tl.where(inside, (normal - center[:, None]) * inverse[:, None], 0.0)

        dgain += grad * normal
        dshift += grad
        grad *= gain[None, :]
        along = tl.sum(grad * normal, axis=1) / hidden
        level = tl.sum(grad, axis=1) / hidden
        grad = (grad - level[:, None] - normal * along[:, None]) * inverse[:, None]
        if HAS_DZ:
            grad += tl.load(dz + place, mask=inside, other=0.0).to(tl.float32)
        if STORE_DRESIDUAL:
            tl.store(dresidual + place, grad.to(dresidual.dtype.element_ty), mask=inside)
        if HAS_DROPOUT:
            grad = tl.where(dropout_keep(rng_state, threshold, row, 0, BLOCK_N), grad * scale, 0.0)
            tl.store(dx + place, grad.to(dx.dtype.element_ty), mask=inside)

    mine = partial + program.to(tl.int64) * hidden + col
    tl.store(mine, tl.sum(dgain, axis=0), mask=in_row)
    tl.store(mine + programs.to(tl.int64) * hidden, tl.sum(dshift, axis=0), mask=in_row)


@triton.jit(do_not_specialize=["programs"])
def add_partials_kernel(
    partial, dweight, dbias, programs, hidden, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Program (n, 0) adds BLOCK_N columns of dweight's partial rows, (n, 1) of dbias's; all rows in one load."""
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_P)
    inside = (row < programs)[:, None] & (col < hidden)[None, :]
    place = (tl.program_id(1) * programs + row).to(tl.int64)[:, None] * hidden + col[None, :]
    total = tl.sum(tl.load(partial + place, mask=inside, other=0.0), axis=0)
    if tl.program_id(1) == 0:
        tl.store(dweight + col, total.to(dweight.dtype.element_ty), mask=col < hidden)
    else:
        tl.store(dbias + col, total.to(dbias.dtype.element_ty), mask=col < hidden)


def backward_tile(hidden: int) -> tuple[int, int, int, int]:
    """(BLOCK_M, BLOCK_N, num_warps, stages): 16 values a lane; above 4096 one turn already fills the loads in flight.

    Registers a thread at sm_90, offline: 94 to 128 in bfloat16, up to 161 in float32; up to 8192 at most 2 spilled.
    At 16384 the two sums and a row are all 64 registers of 1024 threads: 45 to 91 spilled values, held by L1; 16 warps
    spill 273. Dropped: three stages (147 to 173 registers: one program a multiprocessor instead of two); 32 values a
    lane (246 registers at 512).
    """
    block_n = max(triton.next_power_of_2(hidden), 8)
    return max(4096 // block_n, 1), block_n, max(block_n // 512, 8), 2 if block_n <= 4096 else 1


def add_layer_norm_bwd(
    dout: Tensor,
    dz: Tensor | None,
    z: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    dropout_p: float,
    rng_state: Tensor | None,
    has_residual: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Returns dx, dresidual (None without a residual; dx itself without dropout), dweight, dbias.

    dout, dz, z: (rows, hidden) contiguous; dz is the gradient of a returned z, or None.
    """
    rows, hidden = z.shape
    dweight, dbias = torch.empty_like(weight), torch.empty_like(bias)
    dz_total = torch.empty_like(z)
    dx = torch.empty_like(z) if dropout_p > 0 else dz_total
    if z.numel() == 0:
        return dx, dz_total if has_residual else None, dweight.zero_(), dbias.zero_()
    block_m, block_n, num_warps, stages = backward_tile(hidden)
    programs = min(triton.cdiv(rows, block_m), 2 * multiprocessors(z))
    partial = torch.empty((2, programs, hidden), dtype=torch.float32, device=z.device)
    threshold, scale = dropout_constants(dropout_p)
    with on_device(z):
        add_layer_norm_bwd_kernel[(programs,)](
            dout, dz, z, weight, mean, rstd, dx, dz_total, partial, rng_state,
            rows, hidden, threshold, scale,
            HAS_DZ=dz is not None, HAS_DROPOUT=dropout_p > 0, STORE_DRESIDUAL=has_residual or dropout_p == 0,
            BLOCK_M=block_m, BLOCK_N=block_n, STAGES=stages, num_warps=num_warps,
        )  # fmt: skip
        add_partials_kernel[(triton.cdiv(hidden, 32), 2)](
            partial, dweight, dbias, programs, hidden,
            BLOCK_P=triton.next_power_of_2(programs), BLOCK_N=32, num_warps=8,
        )  # fmt: skip
    return dx, dz_total if has_residual else None, dweight, dbias
