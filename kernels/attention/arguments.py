"""The arguments of the kernels, made from tensors and a PreparedMask.

Values that belong together are one argument: a tuple whose fields a kernel reads by name. Triton compiles another
kernel if an integer in a tuple is 1, and if it is divisible by 16. For strides this is useful, because it allows loads
of 16 bytes. Lengths and bands must not cause a compilation, so they are not in tuples but in DO_NOT_SPECIALIZE.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn.backends.calls import AttentionCall
from fastattn.masks import PreparedMask

from ..common.launch import LIMIT, Launch, Launches, addresses, dot_precision, padded_dim, specialization
from ..common.philox import dropout_constants
from .tile_sizes import Config

DO_NOT_SPECIALIZE = ["seqlen_q", "seqlen_k", "band_lo", "band_hi"]


class StridedTensor(NamedTuple):
    """A tensor (B, H, L, D) whose last dimension is contiguous."""

    ptr: Tensor
    stride_b: int
    stride_h: int
    stride_l: int


class Matrix(NamedTuple):
    """A tensor that broadcasts to (B, H, Lq, Lk): the bias or its gradient. A broadcast stride is 0.

    columns: Lk again. In a tuple Triton learns whether 16 divides it, and can then load and store vectors.
    Of a relative bias (H or 1, R) columns is R, and stride_h the only stride.
    """

    ptr: Tensor
    stride_b: int
    stride_h: int
    stride_m: int
    stride_n: int
    columns: int


class Mask(NamedTuple):
    """The tensors of a PreparedMask, or None. All are contiguous, so their sizes follow from the lengths.

    per_sample, per_head, per_row: 1 if there is an entry for each sample, head or row, 0 if all share one.
    """

    intervals: Tensor | None = None
    intervals_per_sample: int = 0
    columns: Tensor | None = None
    columns_per_sample: int = 0
    bits: Tensor | None = None
    bits_per_sample: int = 0
    bits_per_head: int = 0
    bits_per_row: int = 0
    counts: Tensor | None = None
    tiles: Tensor | None = None
    tiles_per_sample: int = 0
    tiles_per_head: int = 0


class Dropout(NamedTuple):
    """rng_state: int64 (seed, offset). threshold, scale: see dropout_constants()."""

    rng_state: Tensor
    threshold: int
    scale: float


# Below, an argument is a plain tuple with addresses in place of tensors, and comes with what distinguishes it in a key.
NO_MASK = (None, 0, None, 0, None, 0, 0, 0, None, None, 0, 0)


def strided(*tensors: Tensor) -> tuple[list[tuple[int, ...]], Any]:
    """StridedTensors of (B, H, L, D). The key is True if 16 divides all addresses and strides."""
    found: list[tuple[int, ...]] = []
    bits = strides = 0
    for t in tensors:
        address, (stride_b, stride_h, stride_l, _) = t.data_ptr(), t.stride()
        found.append((address, stride_b, stride_h, stride_l))
        strides |= stride_b | stride_h | stride_l
        bits |= address
    if (bits | strides) & 15 or strides >= LIMIT:
        return found, specialization(*itertools.chain(*found))
    return found, True


def moved(addresses: Iterable[int | None], strides: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """StridedTensors of other tensors with the same strides."""
    return [(address, *stride) for address, stride in zip(addresses, strides, strict=False)]


def matrix(t: Tensor, columns: int) -> tuple[tuple[int, ...], Any]:
    """The Matrix of t (b, h, m, n), each dimension full or 1."""
    strides = (stride if size > 1 else 0 for size, stride in zip(t.shape, t.stride(), strict=True))
    found = (t.data_ptr(), *strides, columns)
    return found, (t.dtype, specialization(*found))


def relative_matrix(t: Tensor) -> tuple[tuple[int, ...], Any]:
    """The Matrix of a relative bias t (H or 1, R)."""
    heads, places = t.shape
    found = (t.data_ptr(), 0, t.stride(0) if heads > 1 else 0, 0, 0, places)
    return found, (t.dtype, "relative", specialization(*found))


def masking(mask: PreparedMask) -> tuple[tuple[int | None, ...], tuple[Tensor | None, ...], Any]:
    """The Mask, its tensors, and its key."""
    _, _, intervals, columns, bits, counts, tiles, _ = mask
    if intervals is None and columns is None and bits is None:
        return NO_MASK, (), None
    tensors = intervals, columns, bits, counts, tiles
    (intervals_at, columns_at, bits_at, counts_at, tiles_at), alignment = addresses(*tensors)
    per_sample = per_head = per_row = tiles_per_sample = tiles_per_head = 0
    if bits is not None:
        per_sample, per_head, per_row, _, _ = (int(size > 1) for size in bits.shape)
    if tiles is not None:
        tiles_per_sample, tiles_per_head = int(tiles.shape[0] > 1), int(tiles.shape[1] > 1)
    found = (
        *(intervals_at, 0 if intervals is None else int(intervals.shape[0] > 1)),
        *(columns_at, 0 if columns is None else int(columns.shape[0] > 1)),
        *(bits_at, per_sample, per_head, per_row),
        *(counts_at, tiles_at, tiles_per_sample, tiles_per_head),
    )
    key = (alignment, intervals is None, columns is None, bits is None, tiles is None, found[1], found[3], *found[5:8])
    return found, tensors, (*key, tiles_per_sample, tiles_per_head)


def problem(call: AttentionCall) -> tuple[Any, Any, tuple[int, ...], Any]:
    """What every kernel takes: Matrix of the bias, Dropout, (num_heads, group, seqlen_q, seqlen_k); and the key."""
    q, k, v, bias, rng_state, _, softmax_scale, dropout_p, softcap = call
    (_, H, Lq, Dk), (_, Hk, Lk, Dv) = q.shape, v.shape
    biased = dropout = bias_key = dropout_key = None
    if bias is not None:
        biased, bias_key = matrix(bias, Lk) if bias.dim() == 4 else relative_matrix(bias)
    if rng_state is not None:
        threshold, scale = dropout_constants(dropout_p)
        dropout = address, _, _ = rng_state.data_ptr(), threshold, scale
        dropout_key = not address & 15, not threshold & 15, threshold == 1
    group = H // max(Hk, 1)  # query heads that share a key head
    dtype = q.dtype
    scale_key = softmax_scale > 0, softcap is None
    key = q.get_device(), dtype, H, group, Dk, Dv, dot_precision(dtype), scale_key, bias_key, dropout_key
    return biased, dropout, (H, group, Lq, Lk), key


def constants(call: AttentionCall) -> dict[str, Any]:
    """The constants of every kernel, except its tile."""
    q, v, bias = call.q, call.v, call.bias
    return {
        "HEAD_DIM_K": q.shape[3],
        "HEAD_DIM_V": v.shape[3],
        "BLOCK_DK": padded_dim(q.shape[3]),
        "BLOCK_DV": padded_dim(v.shape[3]),
        "PRECISION": dot_precision(q.dtype),
        # The scale can be part of the exponent's unit if it is positive (the maximum stays the maximum) and nothing is
        # done to the scores after it. It costs one more rounding, too much for float32.
        "FOLD_SCALE": bias is None and call.softcap is None and call.softmax_scale > 0 and q.dtype != torch.float32,
        "RELATIVE_BIAS": bias is not None and bias.dim() == 2,
    }


class Bound(NamedTuple):
    """A launch without a bias of which only addresses change, all divisible by 16.

    strides: (stride_b, stride_h, stride_l) of its StridedTensors. rest: its arguments after the dropout.
    """

    launch: Launch
    programs: int
    strides: tuple[tuple[int, ...], ...]
    masking: tuple[int | None, ...]
    mask_tensors: tuple[Tensor | None, ...]
    rest: tuple[int | float | None, ...]


def run(
    launches: Launches,
    call: AttentionCall,
    made: tuple[Any, Any, tuple[int, ...], Any],
    mask: PreparedMask,
    tile: tuple[int, ...],
    programs: int,
    key: tuple[Any, ...],
    given: tuple[Any, ...],
    tensors: tuple[Tensor | None, ...],
    bind: tuple[dict[str, Any], str, Sequence[tuple[int, ...]]] | None = None,
    own: tuple[int | None, ...] = (),
    **own_constants: Any,
) -> None:
    """Launch a kernel. made: problem(call). tile: a Config. given, tensors: the arguments before the bias. own: those
    after the dropout that other kernels do not have. key: of given and own.

    bind: where the Bound is put, its name there, and the StridedTensors in given."""
    biased, dropout, sizes, problem = made
    placed, mask_tensors, mask_key = masking(mask)
    key = problem, mask_key, tile, *key
    launch = launches.get(key)
    if launch is None:
        launch = launches.add(key, **constants(call), **Config(*tile)._asdict(), **own_constants)
    rest = *own, *sizes, *mask[:2], float(call.softmax_scale), call.softcap
    tensors = *tensors, call.bias, *mask_tensors, call.rng_state
    launch.run(problem[0], programs, (*given, biased, placed, dropout, *rest), tensors)
    if bind is not None and biased is None:
        bound, name, strided = bind
        bound[name] = Bound(launch, programs, tuple(t[1:] for t in strided), placed, mask_tensors, rest)


def empty_like(x: Tensor, head_dim: int) -> Tensor:
    """Uninitialised (B, H, L, head_dim) in x's memory order: (B, L, H, D) when x comes as a view of that."""
    B, H, L, D = x.shape
    _, stride_h, stride_l, _ = x.stride()
    if stride_h >= stride_l:
        return x.new_empty(B, H, L, head_dim)
    if D == head_dim and x.numel() > 0:  # one operator, not two
        return x.new_empty_strided((B, H, L, D), (L * H * D, D, H * D, 1))
    return x.new_empty(B, L, H, head_dim).transpose(1, 2)
