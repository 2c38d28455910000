"""Cross-entropy of rows of logits, and its gradient in their place.

    z = logit_scale * (logits + bias);    lse = log(sum over c of exp(z_c));    t: the target
    loss = (1 - eps) * (lse - z_t) + eps * (lse - mean of z)
    gradient of logits_c = dloss * logit_scale * (exp(z_c - lse) - eps / classes - (1 - eps) * [c = t])
    Specification: fastattn/backends/reference/linear_cross_entropy.py

Grid: one program a row, which it sweeps twice, BLOCK columns a turn, in vectors of 16 bytes. For the place of each
vector the first sweep keeps a running maximum, a sum of powers of 2 relative to it and, for smoothing, a sum of logits,
in float32: they meet once, at the row's end. The next turns' loads are in flight (cp.async). The second sweep reads the
row again, from L2, and overwrites it. Only the program of a row touches it, and every sum has one order: equal inputs
give equal bits.

Floor, n rows of v classes: n v elements read and n v written; without the gradient, n v read. 2 n v exponentials, which
at 16-bit logits need 67 % of the time that memory needs.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.backends.calls import LossCall

from ..common.launch import LIMIT, Launches, addresses

ALIGNMENT = 64  # elements: rows begin at multiples of it, so that odd class counts too are read 16 bytes at a time


LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["dloss_stride", "ignore_index"])
def cross_entropy_rows_kernel(
    logits, bias, target, losses, dloss, count,
    n_class, stride, dloss_stride, ignore_index, logit_scale, on_target, on_each,
    HAS_BIAS: tl.constexpr, HAS_SMOOTHING: tl.constexpr, HAS_GRADIENT: tl.constexpr,
    HAS_DLOSS: tl.constexpr, IS_MEAN: tl.constexpr, IN_VECTORS: tl.constexpr,
    BLOCK: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR
    col = first + tl.arange(0, VECTOR)[None, :]
    logits += row * stride
    label = tl.load(target + row)
    if label == ignore_index:
        tl.store(losses + row, 0.0)
        if HAS_GRADIENT:
            nothing = tl.zeros([BLOCK // VECTOR, VECTOR], logits.dtype.element_ty)
            for start in range(0, n_class, BLOCK):
                tl.store(logits + start + col, nothing, mask=start + first < stride)
    else:
        # A target out of range makes its row NaN. Loads go to the row's padded end, which is whole in 16 bytes.
        known = (label >= 0) & (label < n_class)
        place_of_label = tl.where(known, label, -1).to(tl.int32)
        unit = logit_scale * LOG2E
        target_z = tl.load(logits + label, mask=known, other=float("nan")).to(tl.float32)
        if HAS_BIAS:
            target_z += tl.load(bias + label, mask=known, other=0.0).to(tl.float32)
        target_z *= unit
        total = tl.zeros([BLOCK // VECTOR], tl.float32)
        z_sum = total
        peaks = total - 3.0e38  # finite: a turn of -inf alone then adds exp(-inf), not exp(-inf + inf)
        for start in tl.range(0, n_class, BLOCK, num_stages=STAGES):
            z = tl.load(logits + start + col, mask=start + first < stride, other=0.0).to(tl.float32)
            inside = start + (first if IN_VECTORS else col) < n_class
            if HAS_BIAS:
                z += tl.load(bias + start + col, mask=inside, other=0.0).to(tl.float32)
            z *= unit
            if HAS_SMOOTHING:
                z_sum += tl.sum(tl.where(inside, z, 0.0), axis=1)
            z = tl.where(inside, z, -float("inf"))
            higher = tl.maximum(peaks, tl.max(z, axis=1))
            total = total * tl.exp2(peaks - higher) + tl.sum(tl.exp2(z - higher[:, None]), axis=1)
            peaks = higher
        peak = tl.max(peaks, axis=0)
        divisor = tl.sum(total * tl.exp2(peaks - peak), axis=0)
        loss = (peak - target_z) * LN2 + tl.log(divisor)  # the log is small: lse would be rounded
        if HAS_SMOOTHING:  # on_target is 1 - eps, on_each is eps / classes
            smooth = (peak - tl.sum(z_sum, axis=0) / n_class) * LN2 + tl.log(divisor)
            loss = loss * on_target + smooth * (1 - on_target)
        tl.store(losses + row, loss)

        if HAS_GRADIENT:
            rate = tl.where(known, logit_scale, float("nan"))
            if HAS_DLOSS:
                rate *= tl.load(dloss + row * dloss_stride)
            if IS_MEAN:
                rate /= tl.load(count).to(tl.float32)
            share = 1.0 / divisor
            for start in tl.range(0, n_class, BLOCK, num_stages=STAGES):
                place = logits + start + col
                z = tl.load(place, mask=start + first < stride, other=0.0).to(tl.float32)
                inside = start + (first if IN_VECTORS else col) < n_class
                if HAS_BIAS:
                    z += tl.load(bias + start + col, mask=inside, other=0.0).to(tl.float32)
                grad = tl.exp2(tl.where(inside, z * unit - peak, -float("inf"))) * share
                if HAS_SMOOTHING:
                    grad -= on_each
                grad = tl.where(col == place_of_label - start, grad - on_target, grad) * rate
                tl.store(place, grad.to(logits.dtype.element_ty), mask=start + first < stride)


_LAUNCHES = Launches(cross_entropy_rows_kernel, *[Tensor] * 6)


class Tile(NamedTuple):
    """Columns of a turn, warps and stages."""

    block: int
    num_warps: int
    stages: int


def tile_for(dtype: torch.dtype, n_class: int) -> Tile:
    """Eight values a lane in each of the vectors. Narrow rows have fewer warps, but at least four: with fewer, no
    barrier would order the second sweep's writes after every lane's read of the target's logit.

    Offline at sm_90a a wide row has 16 warps, 32 registers (float32 40), no spills, four rows a multiprocessor, and two
    turns of 8 KB in flight for each. Eight bfloat16 logits take 108 and 116 instructions in the two sweeps. It took 176
    and 206 with exp, whose argument is tested for small results, a division for each element, labels of 64 bits and one
    maximum of all warps in each turn. H200, 8192 x 512 -> 32000 with all products: that one 1.58 ms; a kernel in CUDA
    C++, of 117 and 98 instructions, 1.43: it was dropped for this one, which is not timed yet. Read from memory twice,
    such rows need 0.37 ms at 4.3 TB/s; that kernel took 0.42 without the products.
    Dropped: a row as a whole in registers (128, one row a multiprocessor).
    """
    block = min(max(triton.next_power_of_2(n_class), 1024), 4096)
    return Tile(block, block // 256, 3 if dtype != torch.float32 and n_class % 16 == 0 else 2)


def empty_logits(rows: int, n_class: int, like: Tensor) -> Tensor:
    """(rows, n_class) of like's dtype and device, rows beginning at multiples of ALIGNMENT."""
    logits = torch.empty((rows, -(-n_class // ALIGNMENT) * ALIGNMENT), dtype=like.dtype, device=like.device)
    return logits if logits.shape[1] == n_class else logits[:, :n_class]


def cross_entropy_rows(
    call: LossCall, logits: Tensor, losses: Tensor, dloss: Tensor | None, count: Tensor | None
) -> None:
    """Writes losses (rows,) float32 and, if any is wanted, each row's gradient over its logits, from empty_logits.

    dloss: (rows,) or () float32, None is 1.    count: () int64, divides the gradient, or None.
    """
    _, _, bias, target, label_smoothing, ignore_index, logit_scale, _, wanted = call
    needs_gradient = any(wanted)
    rows, n_class = logits.shape
    if rows == 0:
        return
    tensors = logits, bias, target, losses, dloss, count
    found, alignment = addresses(*tensors)
    device, stride = logits.get_device(), logits.stride(0)
    dloss_stride = 0 if dloss is None or dloss.dim() == 0 else dloss.stride(0)
    key = (
        *(device, logits.dtype, None if bias is None else bias.dtype, dloss is None, count is None, alignment),
        *(n_class, stride, dloss_stride < LIMIT, -LIMIT <= ignore_index < LIMIT, label_smoothing > 0, needs_gradient),
    )
    launch = _LAUNCHES.get(key)
    if launch is None:
        tile = tile_for(logits.dtype, n_class)
        flags: dict[str, int] = {"HAS_BIAS": bias is not None, "HAS_SMOOTHING": label_smoothing > 0}
        flags |= {"HAS_DLOSS": dloss is not None, "HAS_GRADIENT": needs_gradient, "IS_MEAN": count is not None}
        vector = 16 // logits.dtype.itemsize
        flags |= {"IN_VECTORS": n_class % vector == 0, "BLOCK": tile.block, "VECTOR": vector}
        launch = _LAUNCHES.add(key, **flags, STAGES=tile.stages, num_warps=tile.num_warps)
    weights = 1.0 - label_smoothing, label_smoothing / n_class
    arguments = *found, n_class, stride, dloss_stride, ignore_index, float(logit_scale), *weights
    launch.run(device, rows, arguments, tensors)
