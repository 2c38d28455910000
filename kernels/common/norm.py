"""LayerNorm and RMSNorm of rows in registers: the parts that all normalising kernels share, forward and backward.

A tile is BLOCK_M whole rows, [BLOCK_M, BLOCK_N] float32, zero in columns from `hidden` on. IS_RMS: RMSNorm, without
mean and bias. `statistics` is float32, written by the forward for the backward: mean (rows), rstd (rows), then TICKETS
zeros. The backward counts its programs with them and sets them to zero again. EPS_ON_STD: rstd is 1 / (std + eps),
where std has Bessel's correction, and ratio (rows) follows, the factor of mean(g * normal) in the backward:
    ratio = (std + eps) / std * hidden / (hidden - 1), or 0 where std is 0
It is stored because rstd alone cannot distinguish a std that is far below eps from 0.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launches, addresses, multiprocessors

MAX_HIDDEN = 16384  # a row is held in the registers of one program
SPAN = 16  # programs in a group; the last of a group adds its sums
TICKETS = 33  # one for each SPAN programs, and one for all
FINISH_HIDDEN = 1024  # the widest row whose weight gradients are finished in the same launch


def forward_tile(hidden: int) -> tuple[int, int, int]:
    """(BLOCK_M, BLOCK_N, num_warps): 32 values a lane, several rows a warp where they are short.

    Registers a thread with dropout at sm_90, offline: 66 to 72 in bfloat16 (80 to 128 with float32 weights), 86 to 96
    in float32 (119 with x in bfloat16, 114 to 127 with `read`), no spills. Dropped: 64 values a lane (120 to 199
    registers), which leaves a multiprocessor half the warps and as many loads in flight.
    """
    block_n = max(triton.next_power_of_2(hidden), 8)  # 8: the dropout rule works on eight columns
    return max(1024 // block_n, 1), block_n, max(block_n // 1024, 1)


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


def empty_statistics(rows: int, like: Tensor, eps_on_std: bool = False) -> Tensor:
    """Memory for the statistics of `rows` rows, on like's device."""
    return torch.empty((3 if eps_on_std else 2) * rows + TICKETS, dtype=torch.float32, device=like.device)


@triton.jit
def normalize(
    value, weight, bias, statistics, row, rows, col, hidden, eps,
    IS_RMS: tl.constexpr, TICKETS: tl.constexpr, EPS_ON_STD: tl.constexpr = False,
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


@triton.jit
def load_statistics(statistics, row, rows):
    """(mean, rstd) of these rows, 0 after the last. RMSNorm's mean is 0."""
    center = tl.load(statistics + row, mask=row < rows, other=0.0)
    return center, tl.load(statistics + row + rows, mask=row < rows, other=0.0)


@triton.jit
def gradient_means(grad, normal, gain, hidden, IS_RMS: tl.constexpr, ratio=1.0):
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


_LAUNCHES = Launches(add_partials_kernel, *[Tensor] * 4)


def empty_sums(
    z: Tensor, block_m: int, weight: Tensor, bias: Tensor | None, x_bias: Tensor | None = None
) -> tuple[int, int, tuple[Tensor, Tensor, Tensor | None, Tensor | None]]:
    """(programs, width, memory): how many programs sum up the weight gradients, how wide their rows of sums are.

    memory: partial, which has a row for each program and for each group of SPAN programs, and dweight, dbias, dx_bias.
    """
    rows, hidden = z.shape
    width = hidden * (1 + (bias is not None) + (x_bias is not None))
    programs = min(-(-rows // block_m), 2 * multiprocessors(z), 2 * SPAN * SPAN)
    partial = torch.empty(programs - (-programs // SPAN), width, dtype=torch.float32, device=z.device)
    dbias = None if bias is None else torch.empty_like(bias)
    dx_bias = None if x_bias is None else torch.empty_like(x_bias)
    return programs, width, (partial, torch.empty_like(weight), dbias, dx_bias)


def add_sums(device: int, programs: int, width: int, hidden: int, *memory: Tensor | None) -> None:
    """Add up the programs' sums in memory, from empty_sums, where rows are wider than FINISH_HIDDEN."""
    found, alignment = addresses(*memory)
    key = device, *(None if t is None else t.dtype for t in memory), alignment, programs, width, hidden
    launch = _LAUNCHES.get(key)
    if launch is None:
        _, _, dbias, dx_bias = memory
        constants = {"IS_RMS": dbias is None, "HAS_X_BIAS": dx_bias is not None, "COLS": 32, "num_warps": 8}
        launch = _LAUNCHES.add(key, **constants, BLOCK_P=triton.next_power_of_2(programs))
    launch.run(device, triton.cdiv(width, 32), (*found, programs, width, hidden), memory)
