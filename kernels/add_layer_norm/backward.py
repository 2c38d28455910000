"""Backward of dropout + residual + LayerNorm or RMSNorm.

Specification: fastattn/backends/reference/add_layer_norm.py

    normal = (z - mean) * rstd;    g = dout * weight
    dresidual = (g - mean(g) - normal * mean(g * normal)) * rstd + dz       means along the row; dz: of a returned z
    dx = dropout(dresidual);    dweight = sum over rows of dout * normal;    dbias = sum over rows of dout
    dx_bias = sum over rows of dx
    With eps_on_std mean(g * normal) is multiplied by the row's ratio (forward.py).
    RMSNorm, where bias is None: mean and mean(g) are 0, and there is no dbias.

Grid: two programs a multiprocessor, each walking the rows in strides of the grid, 4096 elements a turn, the next turn's
loads in flight (cp.async). In registers: 16 values a lane of dout, z and of both weight gradients, which therefore cost
no traffic in the loop; with x_bias, whose gradient is a third, half as much of each. Each program writes its sums as
one row of `partial`. Every sum has one order: equal inputs give equal bits.

Weight gradients: up to hidden 1024 they are finished here, in two steps by the programs that arrive last (finish_sums);
wider ones by a second launch, which costs the host time that eager training waits for.

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

from fastattn.backends.calls import NormCall

from ..common.launch import LIMIT, Launches, addresses, multiprocessors
from ..common.philox import dropout_constants, dropout_keep
from .forward import TICKETS

SPAN = 16  # programs in a group; the last of a group adds its sums
FINISH_HIDDEN = 1024  # the widest row whose weight gradients are finished in the same launch


def backward_tile(hidden: int, halved: bool = False) -> tuple[int, int, int, int]:
    """(BLOCK_M, BLOCK_N, num_warps, stages): 16 values a lane; above 4096 one turn already fills the loads in flight.

    halved: 8 values a lane, for x_bias's gradient.

    Registers a thread at sm_90, offline: 94 to 128 in bfloat16, up to 161 in float32; up to 8192 at most one spilled,
    outside of the loop.
    At 16384 the two sums and a row are all 64 registers of 1024 threads: the row is read again from L1 after its means,
    and 15 to 40 values still spilled, most of them past the sums. Dropped there: the row held, 57 to 104 spilled; the
    row in halves, or in pieces, by 512 or 1024 threads, 19 to 65. Dropped elsewhere: three stages (147 to 173
    registers: one program a multiprocessor instead of two); 32 values a lane (246 registers at 512).
    Halved, with x_bias: 64 to 104, in float32 too, no spills up to 8192; at 16384 some 60 values.
    """
    block_n = max(triton.next_power_of_2(hidden), 8)
    if halved:
        return max(2048 // block_n, 1), block_n, min(max(block_n // 256, 8), 32), 2 if block_n <= 4096 else 1
    return max(4096 // block_n, 1), block_n, max(block_n // 512, 8), 2 if block_n <= 4096 else 1


@triton.jit
def gradient_means(grad, normal, gain, hidden, IS_RMS: tl.constexpr, ratio):
    """(ratio * mean(g * normal), mean(g)) along each row, g = grad * gain. RMSNorm needs no mean(g).

    grad: of the result.
    """
    g = grad * gain[None, :]
    dot_mean = tl.sum(g * normal, axis=1) / hidden * ratio
    grad_mean = dot_mean * 0.0 if IS_RMS else tl.sum(g, axis=1) / hidden
    return dot_mean, grad_mean


@triton.jit
def norm_gradient(grad, normal, gain, inverse, dot_mean, grad_mean):
    """The gradient of the rows before the normalisation. dot_mean, grad_mean: from gradient_means."""
    return (grad * gain[None, :] - grad_mean[:, None] - normal * dot_mean[:, None]) * inverse[:, None]


@triton.jit
def sum_rows(source, count, hidden, col, BLOCK: tl.constexpr):
    """The sum of `count` <= BLOCK rows of `hidden` at these columns, in one order, read in one go."""
    row = tl.arange(0, BLOCK)
    inside = (row < count)[:, None] & (col < hidden)[None, :]
    return tl.sum(tl.load(source + row[:, None] * hidden + col[None, :], mask=inside, other=0.0), axis=0)


@triton.jit
def finish_sums(
    partial, statistics, rows, dweight, dbias, dx_bias, width, hidden,
    IS_RMS: tl.constexpr, HAS_X_BIAS: tl.constexpr, SPAN: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Add all programs' sums to the weight gradients, inside the launch that makes them. Called once by every program.

    The last program of a group of SPAN adds the group's rows. The last of these programs adds the groups' sums. Which
    program adds depends on the run. What is added, and in which order, does not. The barrier and the ticket's acquire
    and release make the other programs' rows visible.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    group, groups = program // SPAN, tl.cdiv(programs, SPAN)
    members = tl.minimum(SPAN, programs - group * SPAN)
    ticket = (statistics + rows + rows).to(tl.pointer_type(tl.int32))
    tl.debug_barrier()
    last = tl.atomic_add(ticket + 1 + group, 1) == members - 1
    if last:
        tl.store(ticket + 1 + group, 0)
        for start in range(0, width, COLS):
            col = start + tl.arange(0, COLS)
            total = sum_rows(partial + group * SPAN * width, members, width, col, SPAN)
            tl.store(partial + (programs + group) * width + col, total, mask=col < width)
        tl.debug_barrier()
        last = tl.atomic_add(ticket, 1) == groups - 1
    if last:
        tl.store(ticket, 0)
        for start in range(0, width, COLS):
            col = start + tl.arange(0, COLS)
            total = sum_rows(partial + programs * width, groups, width, col, 2 * SPAN)
            store_sums(dweight, dbias, dx_bias, col, total, width, hidden, IS_RMS, HAS_X_BIAS)


@triton.jit
def store_sums(
    dweight, dbias, dx_bias, col, total, width, hidden, IS_RMS: tl.constexpr, HAS_X_BIAS: tl.constexpr
):  # fmt: skip
    """The columns 0 .. hidden - 1 of the sums are dweight's, the next are dbias's, the last are dx_bias's."""
    tl.store(dweight + col, total.to(dweight.dtype.element_ty), mask=col < hidden)
    if not IS_RMS:
        shift = (col >= hidden) & (col < 2 * hidden)
        tl.store(dbias + col - hidden, total.to(dbias.dtype.element_ty), mask=shift)
    if HAS_X_BIAS:
        first = width - hidden
        tl.store(dx_bias + col - first, total.to(dx_bias.dtype.element_ty), mask=(col >= first) & (col < width))


@triton.jit
def store_partial(partial, start, sums, col, width, hidden):
    """Stores the sum of the rows of `sums` in this program's row of `partial`, from column `start` on."""
    mine = partial + tl.program_id(0).to(tl.int64) * width + start + col
    tl.store(mine, tl.sum(sums, axis=0), mask=col < hidden)


@triton.jit(do_not_specialize=["programs"])
def add_partials_kernel(
    partial, dweight, dbias, dx_bias, programs, width, hidden,
    IS_RMS: tl.constexpr, HAS_X_BIAS: tl.constexpr, BLOCK_P: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Weight gradients of rows wider than FINISH_HIDDEN: each program adds all rows of `partial` at COLS columns."""
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = sum_rows(partial, programs, width, col, BLOCK_P)
    store_sums(dweight, dbias, dx_bias, col, total, width, hidden, IS_RMS, HAS_X_BIAS)


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
        center = tl.load(statistics + row, mask=row < rows, other=0.0)  # RMSNorm's is 0
        inverse = tl.load(statistics + row + rows, mask=row < rows, other=0.0)
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
            dot_mean, grad_mean = gradient_means(grad, normal, near, hidden, IS_RMS, ratio)
            grad = tl.load(dout + place, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            normal = tl.load(z + place, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            normal = (normal - center[:, None]) * inverse[:, None]
            again = tl.load(weight + col, mask=in_row, other=0.0, eviction_policy="evict_last").to(tl.float32)
            grad = norm_gradient(grad, normal, again, inverse, dot_mean, grad_mean)
        else:
            dot_mean, grad_mean = gradient_means(grad, normal, gain, hidden, IS_RMS, ratio)
            grad = norm_gradient(grad, normal, gain, inverse, dot_mean, grad_mean)
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

    store_partial(partial, 0, dgain, col, width, hidden)
    if not IS_RMS:
        store_partial(partial, hidden, dshift, col, width, hidden)
    if HAS_X_BIAS:
        store_partial(partial, width - hidden, dx_sum, col, width, hidden)
    if FINISH:
        COLS: tl.constexpr = 512 if BLOCK_N > 512 else BLOCK_N  # min() of Triton 3.5 is no plain number
        finish_sums(partial, statistics, rows, dweight, dbias, dx_bias, width, hidden, IS_RMS, HAS_X_BIAS, SPAN, COLS)


_LAUNCHES = Launches(add_layer_norm_bwd_kernel, *[Tensor] * 12)
_ADD_PARTIALS = Launches(add_partials_kernel, *[Tensor] * 4)


def add_layer_norm_bwd(
    dout: Tensor,
    dz: Tensor | None,
    call: NormCall,
    statistics: Tensor,
    has_residual: bool,
    x_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """Returns dx, dresidual (None without a residual; dx itself without dropout), dweight, dbias (None for RMSNorm) and
    dx_bias (None without x_bias).

    dout, dz: (rows, hidden) contiguous; dz is the gradient of a returned z, or None.
    x_dtype: of dx, if not that of z, which then is float32. dx is rounded once, and is not dresidual.
    """
    z, _, weight, bias, x_bias, rng_state, _, dropout_p, eps_on_std = call
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
        block_m, block_n, num_warps, stages = backward_tile(hidden, x_bias is not None)
        flags = {"HAS_DZ": dz is not None, "HAS_DROPOUT": has_dropout, "HAS_X_BIAS": x_bias is not None}
        flags |= {"STORE_DRESIDUAL": stores_dresidual, "STORE_DX": stores_dx, "IS_RMS": bias is None}
        flags |= {"EPS_ON_STD": eps_on_std, "FINISH": hidden <= FINISH_HIDDEN, "REREAD": hidden > 8192}
        sizes = {"SPAN": SPAN, "TICKETS": TICKETS, "BLOCK_M": block_m, "BLOCK_N": block_n, "STAGES": stages}
        launch = _LAUNCHES.add(key, block_m, **flags, **sizes, num_warps=num_warps)
    width = hidden * (1 + (bias is not None) + (x_bias is not None))  # of a program's row of sums
    programs = min(-(-rows // launch.tile), 2 * multiprocessors(z), 2 * SPAN * SPAN)
    # A row for each program, and one for each group of SPAN programs.
    partial = torch.empty(programs - (-programs // SPAN), width, dtype=torch.float32, device=z.device)
    gradients = (None if t is None else torch.empty_like(t) for t in (weight, bias, x_bias))
    sums = partial, dweight, dbias, dx_bias = partial, *gradients
    results = dx, dz_total, *sums
    arguments = *found, *addresses(*results)[0], rng_place, rows, hidden, width, *dropout_constants(dropout_p)
    launch.run(device, programs, arguments, (*inputs, *results, rng_state))
    if hidden > FINISH_HIDDEN:
        found, alignment = addresses(*sums)
        key = device, weight.dtype, bias_dtype, x_bias_dtype, alignment, programs, width, hidden
        launch = _ADD_PARTIALS.get(key)
        if launch is None:
            flags = {"IS_RMS": bias is None, "HAS_X_BIAS": x_bias is not None, "COLS": 32, "num_warps": 8}
            launch = _ADD_PARTIALS.add(key, **flags, BLOCK_P=triton.next_power_of_2(programs))
        launch.run(device, triton.cdiv(width, 32), (*found, programs, width, hidden), sums)
    return dx, dz_total if has_residual else None, dweight, dbias, dx_bias
