"""The dropout rule in plain PyTorch. The reference and all kernel backends draw exactly these bits; aten does not.

Element (row, col) of a matrix takes one 16-bit lane of Philox 4x32 with 7 rounds (Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3"), the fewest rounds that pass BigCrush:

    key     = (seed mod 2^32, seed div 2^32)                      rng_state = (seed, offset), int64, on the device
    counter = (col div 8, row mod 2^32, row div 2^32, offset mod 2^32)
    lane    = col mod 8: word lane div 2, its low half when lane is even and its high half when it is odd
    keep    = lane value >= round(dropout_p * 65536);   kept values are multiplied by 1 / (1 - dropout_p)

So one call gives the numbers of 8 neighbours, a 16-byte vector of 16-bit numbers. The probability is exact to 2^-17.
The bits depend on the element's global position only, not on tiles: a backward may read the data in another order.
Rows and columns: attention (b * H + h) * Lq + i and key j; the other ops flattened row and column of their input.

The backend `aten` uses PyTorch's generator instead, with the same threshold and scale. On a CPU this is about 10x
faster: rng_state holds only a seed, (1,). The lanes of a matrix, row after row, are the 16-bit parts of the 64-bit
numbers that torch.Generator draws from that seed. On a GPU the rule would need over a hundred operators: rng_state (1,)
holds nothing, and the device's generator draws when the mask is made.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fastattn._tracing import can_read_values
from fastattn.backends.constants import PACKAGE, dropout_scale, dropout_threshold

ROUNDS = 7
LANES = 8
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF

_reference_rule: str | None = None  # see reference_dropout_rule


def draw_rng_state(device: torch.device, backend: str | None = None) -> Tensor:
    """A fresh rng_state, int64, on the device: (seed, offset), or one number for the backend "aten".

    From torch's generator of the device: no host synchronisation, new at every call, repeatable under
    torch.manual_seed, replayed by activation checkpointing and renewed by CUDA-graph replay."""
    return draw_rng_states(device, backend, 1)[0]


def draw_rng_states(device: torch.device, backend: str | None, count: int) -> Sequence[Tensor]:
    """The results of `count` calls of draw_rng_state; on a GPU others, since its generator draws them in parallel."""
    if _reference_rule is not None and backend in (None, "reference"):
        backend = _reference_rule
    if backend == "aten" and device.type != "cpu":
        return torch.empty(count, 1, dtype=torch.int64, device=device).unbind()
    numbers = 1 if backend == "aten" else 2
    return torch.randint(0, 2**62, (count, numbers), dtype=torch.int64, device=device).unbind()


class _ThreadState(threading.local):
    """generator: of draw_lanes, which seeds it at every call: about 2x faster than making one."""

    def __init__(self) -> None:
        self.generator = torch.Generator()


_thread_state = _ThreadState()


@contextmanager
def reference_dropout_rule(backend: str) -> Iterator[None]:
    """The reference path drops what this backend would drop, so that the two can be compared."""
    global _reference_rule
    before, _reference_rule = _reference_rule, backend
    try:
        yield
    finally:
        _reference_rule = before


class LaneStream:
    """The lanes that PyTorch's generator draws from a seed, one after the other. rng_state: (seed,), on a CPU."""

    def __init__(self, rng_state: Tensor) -> None:
        self.generator = torch.Generator().manual_seed(int(rng_state.item()))
        self.rest: Tensor | None = None

    def take(self, count: int) -> Tensor:
        """The next lanes, int16 (count,), as if unsigned and moved down by 2^15."""
        rest = 0 if self.rest is None else len(self.rest)
        lanes = _draw(self.generator, (-(-max(count - rest, 0) // 4),))
        if rest:
            lanes = torch.cat([self.rest, lanes])
        self.rest = lanes[count:] if len(lanes) > count else None
        return lanes[:count]


def draw_lanes(rng_state: Tensor, shape: Sequence[int]) -> Tensor:
    """The first lanes of a LaneStream, int16."""
    generator = _thread_state.generator.manual_seed(int(rng_state.item()))
    if shape[-1] % 4 == 0:
        return _draw(generator, (*shape[:-1], shape[-1] // 4))
    count = math.prod(shape)
    return _draw(generator, (-(-count // 4),))[:count].view(shape)


def _draw(generator: torch.Generator, shape: Sequence[int]) -> Tensor:
    """The lanes of whole numbers, four of each."""
    return torch.empty(shape, dtype=torch.int64).random_(-(2**63), None, generator=generator).view(torch.int16)


def philox_lanes(rng_state: Tensor, rows: int, cols: int) -> Tensor:
    """The 16-bit lanes of a (rows, cols) matrix, int16 (rows, cols), as if unsigned."""
    row = torch.arange(rows, dtype=torch.int64, device=rng_state.device)[:, None]
    group = torch.arange(-(-cols // LANES), dtype=torch.int64, device=rng_state.device)[None, :]
    return _lanes_of_groups(rng_state, row, group)[:, :cols]


def _lanes_of_groups(rng_state: Tensor, row: Tensor, group: Tensor) -> Tensor:
    """All lanes of each group of LANES columns. row (.., 1), group (.., groups) -> int16 (.., groups * LANES)."""
    # On a CPU Python computes the key: about 3x faster at the sizes of one sentence batch.
    seed, offset = rng_state.tolist() if can_read_values(rng_state) else rng_state.unbind()
    c0, c1, c2, c3 = group, row & _LOW, row >> 32, offset & _LOW
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for step in range(ROUNDS):
        # 64-bit products: the low half of p becomes the next c1 or c3, whose high half is cut off where it is used.
        if step < 3:  # some words are still one per row or one per column, which is cheap
            p0, p1 = c0 * _M0, c2 * _M1
            c0, c2 = (p1 >> 32) ^ c1, (p0 >> 32) ^ c3
        else:  # in place, because what is left is the price of passing over memory
            p0, p1 = c0.mul_(_M0), c2.mul_(_M1)
            c0, c2 = (p1 >> 32).bitwise_xor_(c1), (p0 >> 32).bitwise_xor_(c3)
        if step == 0:  # under vmap the key may be one per sample, and the counter is not yet
            c0, c2 = (c0 ^ k0) & _LOW, (c2 ^ k1) & _LOW
        else:
            c0.bitwise_xor_(k0).bitwise_and_(_LOW)
            c2.bitwise_xor_(k1).bitwise_and_(_LOW)
        c1, c3 = p1, p0
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    # The halves of each word are stored one by one, because vmap has no view(dtype) before torch 2.13.
    lanes = c0.new_empty(*c0.shape, 4, 2, dtype=torch.int16)
    for n, c in enumerate((c0, c1, c2, c3)):
        lanes[..., n, 0], lanes[..., n, 1] = c, c >> 16
    return lanes.flatten(-3)  # lane = 2 * word + half


def keep_mask(rng_state: Tensor, rows: int, cols: int, dropout_p: float, dtype: torch.dtype = torch.bool) -> Tensor:
    """Which elements of a (rows, cols) matrix survive dropout: True or 1 = keep."""
    is_seed = rng_state.shape[0] == 1
    if is_seed and can_read_values(rng_state):
        return keep_mask_from_lanes(draw_lanes(rng_state, (rows, cols)), dropout_p, dtype)
    if is_seed and torch.compiler.is_compiling():
        if rng_state.is_cpu and not torch.compiler.is_exporting():
            return _kept(rng_state, rows, cols, dropout_p).to(dtype)
        # What it fuses, with its own generator. In an exported program there are PyTorch's operators alone.
        return (torch.rand(rows, cols, device=rng_state.device) >= dropout_p).to(dtype)
    if is_seed:  # drawn as bool, since what the generator gives depends on the dtype
        return rng_state.new_empty(rows, cols, dtype=torch.bool).bernoulli_(1 - dropout_p).to(dtype)
    lanes, limit = philox_lanes(rng_state, rows, cols), dropout_threshold(dropout_p)
    if limit > 65535:
        return torch.zeros_like(lanes, dtype=dtype)
    return (lanes + (-32768) >= limit - 32768).to(dtype)  # unsigned comparison: both sides moved down by 2^15


@torch.library.custom_op(f"{PACKAGE}::dropout_kept", mutates_args=())
def _kept(rng_state: Tensor, rows: int, cols: int, dropout_p: float) -> Tensor:
    """keep_mask for (seed,) on a CPU, as an operator in the graphs of torch.compile. Dropout by Inductor's own random
    numbers takes 3 times as long."""
    return keep_mask_from_lanes(draw_lanes(rng_state, (rows, cols)), dropout_p, torch.bool)


@_kept.register_fake
def _(rng_state: Tensor, rows: int, cols: int, dropout_p: float) -> Tensor:
    return rng_state.new_empty(rows, cols, dtype=torch.bool)


def draw_kept(rng_state: Tensor, shape: Sequence[int], dropout_p: float) -> Tensor:
    """1 where an element is kept, else 0, int16: keep_mask for (seed,) on a CPU, in the memory of the lanes."""
    lanes, limit = draw_lanes(rng_state, shape), dropout_threshold(dropout_p)
    return lanes.zero_() if limit > 65535 else lanes.ge_(limit - 32768)  # int16 has no larger number


def keep_mask_from_lanes(lanes: Tensor, dropout_p: float, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """1 where a lane of a LaneStream is kept, else 0. Written into out where that is given."""
    if (limit := dropout_threshold(dropout_p)) > 65535:  # int16 has no such number
        return lanes.new_zeros(lanes.shape, dtype=dtype) if out is None else out.zero_()
    # A number and no bool: on a CPU a product with a number is about 10x faster than a choice by a bool.
    if out is None and dtype in (torch.float32, torch.float64):  # which hold every lane
        return lanes.to(dtype).ge_(limit - 32768)
    return torch.ge(lanes, limit - 32768, out=lanes.new_empty(lanes.shape, dtype=dtype) if out is None else out)


def keep_factor(rng_state: Tensor, rows: int, cols: int, dropout_p: float, dtype: torch.dtype) -> Tensor:
    """What dropout multiplies each element of a (rows, cols) matrix by: 0 or 1 / (1 - dropout_p)."""
    return keep_mask(rng_state, rows, cols, dropout_p, dtype).mul_(dropout_scale(dropout_p))


def dropout(x: Tensor, dropout_p: float, rng_state: Tensor | None) -> Tensor:
    """x with dropout by the rule; x is taken as the matrix (product of the leading dimensions, last dimension)."""
    if rng_state is None:
        return x
    keep = keep_mask(rng_state, x.numel() // max(x.shape[-1], 1), x.shape[-1], dropout_p).view(x.shape)
    return torch.where(keep, x * dropout_scale(dropout_p), 0.0)
