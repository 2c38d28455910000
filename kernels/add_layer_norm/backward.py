"""Backward of dropout + residual + LayerNorm or RMSNorm.

Specification: fastattn/backends/reference/add_layer_norm.py

    normal = (z - mean) * rstd;    g = dout * weight
    dresidual = (g - mean(g) - normal * mean(g * normal)) * rstd + dz       means along the row; dz: of a returned z
    dx = dropout(dresidual);    dweight = sum over rows of dout * normal;    dbias = sum over rows of dout
    dx_bias = sum over rows of dx
    With eps_on_std mean(g * normal) is multiplied by the row's ratio (common/norm.py).
    RMSNorm, where bias is None: mean and mean(g) are 0, and there is no dbias.

Grid: two programs a multiprocessor, each walking the rows in strides of the grid, 4096 elements a turn, the next turn's
loads in flight (cp.async). In registers: 16 values a lane of dout, z and of both weight gradients, which therefore cost
no traffic in the loop; with x_bias, whose gradient is a third, half as much of each. Each program writes its sums as
one row of `partial`. Every sum has one order: equal inputs give equal bits.

Weight gradients: up to hidden 1024 they are finished here, in two steps by the programs that arrive last (finish_sums
in common/norm.py); wider ones by a second launch, which costs the host time that eager training waits for.

Floor: read dout, z (, dz), write dresidual (, dx): 6 to 10 bytes an element in 16-bit types, 14 or 18 in float32
with dx in 16 bits; `partial` adds 2 * programs * hidden * 4 bytes written and read once (264 programs, hidden 1024:
2 x 2.2 MB, mostly in L2).
H200 (copies at 4.27 TB/s), bf16, ms: 65536 x 1024 with dropout 0.200, 63 % of that rate, without 0.150; 65536 x 512
0.090, 8192 x 512 0.030.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import norm
from ..common.launch import LIMIT, Launches, addresses
from ..common.philox import dropout_constants, dropout_keep


@triton.jit(do_not_specialize=["rows", "threshold"])
def add_layer_norm_bwd_kernel(
    dout, dz, z, weight, statistics, dx, dresidual, partial, dweight, dbias, dx_bias, rng_state,
    rows, hidden, width, threshold, scale,
    HAS_DZ: tl.constexpr, HAS_DROPOUT: tl.constexpr, STORE_DRESIDUAL: tl.constexpr, STORE_DX: tl.constexpr,
    IS_RMS: tl.constexpr, EPS_ON_STD: tl.constexpr, HAS_X_BIAS: tl.constexpr, FINISH: tl.constexpr, SPAN: tl.constexpr,
    REREAD: tl.constexpr, TICKETS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, BLOCK_N)
    in_row = col < hidden
    gain = tl.load(weight + col, mask=in_row, other=0.0).to(tl.float32)
    dgain = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    dshift = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    dx_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)

    for turn in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        row = turn * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        inside = (row < rows)[:, None] & in_row[None, :]
        place = row[:, None] * hidden + col[None, :]
        center, inverse = norm.load_statistics(statistics, row, rows)
        ratio = 1.0
        if EPS_ON_STD:
            ratio = tl.load(statistics + rows + rows + TICKETS + row, mask=row < rows, other=0.0)
        grad = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
        normal = tl.load(z + place, mask=inside, other=0.0).to(tl.float32)
        normal = tl.where(inside, (normal - center[:, None]) * inverse[:, None], 0.0)

        dgain += grad * normal
        if not IS_RMS:
            dshift += grad
        if REREAD:  # from L1: the weights' gradients leave no registers to hold a wide row while its means are made
            near = tl.load(weight + col, mask=in_row, other=0.0).to(tl.float32)
            dot_mean, grad_mean = norm.gradient_means(grad, normal, near, hidden, IS_RMS, ratio)
            grad = tl.load(dout + place, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            normal = tl.load(z + place, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            normal = (normal - center[:, None]) * inverse[:, None]
            again = tl.load(weight + col, mask=in_row, other=0.0, eviction_policy="evict_last").to(tl.float32)
            grad = norm.norm_gradient(grad, normal, again, inverse, dot_mean, grad_mean)
        else:
            dot_mean, grad_mean = norm.gradient_means(grad, normal, gain, hidden, IS_RMS, ratio)
            grad = norm.norm_gradient(grad, normal, gain, inverse, dot_mean, grad_mean)
        if HAS_DZ:
            grad += tl.load(dz + place, mask=inside, other=0.0).to(tl.float32)
        if STORE_DRESIDUAL:
            tl.store(dresidual + place, grad.to(dresidual.dtype.element_ty), mask=inside)
        if HAS_DROPOUT:
            grad = tl.where(dropout_keep(rng_state, threshold, row, 0, BLOCK_N), grad * scale, 0.0)
        if STORE_DX:
            tl.store(dx + place, grad.to(dx.dtype.element_ty), mask=inside)
        if HAS_X_BIAS:
            dx_sum += grad

    norm.store_partial(partial, 0, dgain, col, width, hidden)
    if not IS_RMS:
        norm.store_partial(partial, hidden, dshift, col, width, hidden)
    if HAS_X_BIAS:
        norm.store_partial(partial, width - hidden, dx_sum, col, width, hidden)
    if FINISH:
        COLS: tl.constexpr = 512 if BLOCK_N > 512 else BLOCK_N  # min() of Triton 3.5 is no plain number
        norm.finish_sums(
            partial, statistics, rows, dweight, dbias, dx_bias, width, hidden, IS_RMS, HAS_X_BIAS, SPAN, COLS
        )


_LAUNCHES = Launches(add_layer_norm_bwd_kernel, *[Tensor] * 12)


def add_layer_norm_bwd(
    dout: Tensor,
    dz: Tensor | None,
    z: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    statistics: Tensor,
    dropout_p: float,
    rng_state: Tensor | None,
    has_residual: bool,
    x_bias: Tensor | None = None,
    eps_on_std: bool = False,
    x_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """Returns dx, dresidual (None without a residual; dx itself without dropout), dweight, dbias (None for RMSNorm) and
    dx_bias (None without x_bias).

    dout, dz, z: (rows, hidden) contiguous; dz is the gradient of a returned z, or None.
    x_dtype: of dx, if not that of z, which then is float32. dx is rounded once, and is not dresidual.
    """
    rows, hidden = z.shape
    dz_total = torch.empty_like(z)
    stores_dx = dropout_p > 0 or (x_dtype is not None and x_dtype is not z.dtype)
    dx = torch.empty_like(z, dtype=x_dtype) if stores_dx else dz_total
    if z.numel() == 0:
        dweight, dbias, dx_bias = (None if t is None else torch.zeros_like(t) for t in (weight, bias, x_bias))
        return dx, dz_total if has_residual else None, dweight, dbias, dx_bias
    x_bias_dtype, bias_dtype = None if x_bias is None else x_bias.dtype, None if bias is None else bias.dtype
    device, has_dropout, stores_dresidual = z.get_device(), dropout_p > 0, has_residual or not stores_dx
    inputs = dout, dz, z, weight, statistics
    (*found, rng_place), alignment = addresses(*inputs, rng_state)
    key = (
        *(device, z.dtype, dx.dtype, dz is None, weight.dtype, bias_dtype, x_bias_dtype, alignment),
        *(rng_state is None, rows < LIMIT, hidden, has_dropout, stores_dresidual, eps_on_std),
    )
    launch = _LAUNCHES.get(key)
    if launch is None:
        block_m, block_n, num_warps, stages = norm.backward_tile(hidden, x_bias is not None)
        flags = {"HAS_DZ": dz is not None, "HAS_DROPOUT": has_dropout, "HAS_X_BIAS": x_bias is not None}
        flags |= {"STORE_DRESIDUAL": stores_dresidual, "STORE_DX": stores_dx, "IS_RMS": bias is None}
        flags |= {"EPS_ON_STD": eps_on_std, "FINISH": hidden <= norm.FINISH_HIDDEN, "REREAD": hidden > 8192}
        sizes = {"SPAN": norm.SPAN, "TICKETS": norm.TICKETS, "BLOCK_M": block_m, "BLOCK_N": block_n, "STAGES": stages}
        launch = _LAUNCHES.add(key, block_m, **flags, **sizes, num_warps=num_warps)
    programs, width, sums = norm.empty_sums(z, launch.tile, weight, bias, x_bias)
    results = dx, dz_total, *sums
    arguments = *found, *addresses(*results)[0], rng_place, rows, hidden, width, *dropout_constants(dropout_p)
    launch.run(device, programs, arguments, (*inputs, *results, rng_state))
    if hidden > norm.FINISH_HIDDEN:
        norm.add_sums(device, programs, width, hidden, *sums)
    return dx, dz_total if has_residual else None, *sums[1:]
