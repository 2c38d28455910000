"""Attention of new tokens to a cache, one pass over the keys.

Specification: fastattn/backends/reference/decode_attention.py

    S_j = softmax_scale * q_bwh k[b, j, row_j, h / group],  row_j = ancestors[b, w, j], or w, or 0 where R = 1
    out_bwh = sum_j exp(S_j - lse) v[b, j, row_j, h / group],  lse = log sum_j exp(S_j), over the visible j

Source: Dao et al. 2023, "Flash-Decoding for long-context inference": where there are few sequences, the keys of each
are split among several programs, and a second kernel merges their results.

Grid: one program per (batch, key head, split, 16 queries that have the same keys), in one dimension. With ancestors, or
where each query reads its own row, those are the heads of a group; where R = 1, all W queries are together, so that
their keys are read once. Beams read their common history from memory once, and then from the L2 cache, because the
programs of a head are neighbours. The merge has one program per (row of out, 64 columns) and adds in a fixed order.
How many splits there are follows from shapes and the device alone, so a CUDA graph may repeat a launch with other
lengths; each sequence's own length is then divided evenly among them.
Registers: the accumulator [16, BLOCK_DV], the running maximum and sum of 16 rows, in float32. Shared memory: tiles of
keys and values, two deep, or one deep with ancestors, whose rows have to be known first.
Bytes: the visible keys and values once, q and out; of each split, Dv + 1 float32 a row, written and read. FLOPs:
2 * (Dk + Dv) a query, head and visible position; empty rows of a tile add more, but the time is that of the bytes.
Compiled offline with triton 3.6, bf16 (no GPU has timed it yet), registers at sm_80 / sm_90a with ancestors: D 64
128 / 116, D 128 118 / 120, D 256 153 / 155; shared keys 70 / 72, 80 / 92, 140 / 117; the merge 56. Nothing spills here,
nor in float32. A head dimension that 16 does not divide is read in narrow loads: D 72 with ancestors has 12 accesses of
spilled registers at sm_80.
Tried and dropped, same compiler:
    tiles of 64 queries, for 5 beams of 8 heads on shared keys: at sm_80 19 accesses of spilled registers at D 128 with
    64 keys, 43 at D 256 with 32, 253 in float32 at D 64 with 32;
    with ancestors, 64 keys a tile at D 128 (200 / 188 registers) and 2 warps at D 64 (156 / 168);
    in float32, 8 warps at D 256 (9 accesses of spilled registers at sm_90a).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import LIMIT, Launches, addresses, dot_precision, multiprocessors, padded_dim, specialization


class Queries(NamedTuple):
    """q (B, W, H, Dk), whose last dimension is contiguous."""

    ptr: Tensor
    stride_b: int
    stride_w: int
    stride_h: int


class Cache(NamedTuple):
    """k (B, M, R, Hk, Dk) or v (B, M, R, Hk, Dv), whose last dimension is contiguous."""

    ptr: Tensor
    stride_b: int
    stride_m: int
    stride_r: int
    stride_h: int


class Ancestors(NamedTuple):
    """ancestors (B, W, M) int32, of a cache with R rows."""

    ptr: Tensor
    stride_b: int
    stride_w: int
    stride_m: int
    rows: int


@triton.jit
def load_keys(cache, b, n, row, h, visible, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """[BLOCK_N, BLOCK_D]: positions n [BLOCK_N] of head h, each in its row. What is not visible reads as 0: the memory
    there may hold NaN, and 0 * NaN is NaN."""
    ptrs = cache.ptr + b * cache.stride_b + h * cache.stride_h
    ptrs += n.to(tl.int64) * cache.stride_m + tl.cast(row, tl.int64) * cache.stride_r
    col = tl.arange(0, BLOCK_D)
    inside = visible[:, None]
    if HEAD_DIM < BLOCK_D:
        inside = inside & (col < HEAD_DIM)[None, :]
    return tl.load(ptrs[:, None] + col[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["seqlen_k", "num_splits", "num_rows"])
def decode_attention_kernel(
    # Queries q, Cache k and v; lengths (B,) int32 or None; Ancestors or None; out (splits, B, W, H, Dv) contiguous;
    # lse (splits, B, W, H) float32 contiguous, or None with one split.
    q, k, v, lengths, ancestors, out, lse_ptr,
    num_queries, together, num_heads_k, group, seqlen_k, num_splits, num_rows, softmax_scale,
    HEAD_DIM_K: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Programs that read the same keys are neighbours: `together` queries share a tile, the other ones the L2 cache.
    tiles = tl.cdiv(together * group, BLOCK_M)
    parts = num_queries // together * tiles
    part, split = tl.program_id(0) % parts, tl.program_id(0) // parts % num_splits
    head = tl.program_id(0) // parts // num_splits
    b, h_k = (head // num_heads_k).to(tl.int64), (head % num_heads_k).to(tl.int64)
    first_query = part // tiles * together
    m = part % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    w, h = (first_query + m // group).to(tl.int64), h_k * group + m % group
    is_query = m < together * group

    col = tl.arange(0, BLOCK_DK)[None, :]
    q_ptrs = q.ptr + (b * q.stride_b + w * q.stride_w + h * q.stride_h)[:, None] + col
    q_tile = tl.load(q_ptrs, mask=is_query[:, None] & (col < HEAD_DIM_K), other=0.0)

    seqlen = seqlen_k
    if lengths is not None:
        seqlen = tl.minimum(tl.load(lengths + b), seqlen_k)
    span = tl.cdiv(tl.cdiv(seqlen, num_splits), BLOCK_N) * BLOCK_N
    begin = split * span
    end = tl.minimum(begin + span, seqlen)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for n0 in range(begin, end, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        visible = n < end
        row = first_query  # 0 where all queries are together
        if ancestors is not None:
            ptrs = ancestors.ptr + (b * ancestors.stride_b + tl.cast(first_query, tl.int64) * ancestors.stride_w)
            row = tl.load(ptrs + n.to(tl.int64) * ancestors.stride_m, mask=visible, other=-1)
            visible = (row >= 0) & (row < ancestors.rows)
        k_tile = load_keys(k, b, n, row, h_k, visible, HEAD_DIM_K, BLOCK_DK)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * softmax_scale
        scores = tl.where(visible[None, :], scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        # A row without a visible key so far has the maximum -inf. 0 instead avoids -inf - -inf.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp(row_max - shift)
        p = tl.exp(scores - shift[:, None])
        row_sum = row_sum * rescale + tl.sum(p, axis=1)
        v_tile = load_keys(v, b, n, row, h_k, visible, HEAD_DIM_V, BLOCK_DV)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision=PRECISION)
        row_max = new_max

    empty = row_sum == 0.0
    row_sum = tl.where(empty, 1.0, row_sum)  # acc is 0 there
    place = split * num_rows.to(tl.int64) + (b * num_queries + w) * (num_heads_k * group) + h
    col = tl.arange(0, BLOCK_DV)[None, :]
    out_ptrs = out + place[:, None] * HEAD_DIM_V + col
    tl.store(out_ptrs, (acc / row_sum[:, None]).to(out.dtype.element_ty), mask=is_query[:, None] & (col < HEAD_DIM_V))
    if lse_ptr is not None:
        lse = tl.where(empty, float("-inf"), row_max + tl.log(row_sum))
        tl.store(lse_ptr + place, lse, mask=is_query)


@triton.jit(do_not_specialize=["num_splits", "num_rows"])
def merge_splits_kernel(
    # partial (splits, rows, Dv), lse (splits, rows), both float32; out (rows, Dv). All contiguous.
    partial, lse_ptr, out, num_splits, num_rows,
    HEAD_DIM_V: tl.constexpr, MAX_SPLITS: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, MAX_SPLITS)
    col = tl.program_id(1) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    place = split * num_rows.to(tl.int64) + row
    lse = tl.load(lse_ptr + place, mask=split < num_splits, other=float("-inf"))
    top = tl.max(lse, axis=0)
    weight = tl.exp(lse - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight, axis=0)
    weight /= tl.where(total == 0.0, 1.0, total)
    inside = (split < num_splits)[:, None] & (col < HEAD_DIM_V)[None, :]
    found = tl.load(partial + place[:, None] * HEAD_DIM_V + col[None, :], mask=inside, other=0.0)
    merged = tl.sum(weight[:, None] * found, axis=0)
    tl.store(out + row * HEAD_DIM_V + col, merged.to(out.dtype.element_ty), mask=col < HEAD_DIM_V)


# Chosen offline, see the top of the file. Nothing is tuned at call time.
_BLOCK_M = 16  # queries in a tile, counted per head: the minimum of tl.dot
_TILE_BYTES = 8192  # of keys, or of values
_SPLIT_KEYS = 256  # at least, for a program to be worth the merge
_PROGRAMS = 4  # that a multiprocessor can run at once
_MAX_SPLITS = 64


_DECODE = Launches(decode_attention_kernel, Queries, Cache, Cache, Tensor, Ancestors, Tensor, Tensor)
_MERGE = Launches(merge_splits_kernel, *[Tensor] * 3)


def decode_attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, ancestors: Tensor | None, softmax_scale: float
) -> Tensor:
    """q (B, W, H, Dk), k (B, M, R, Hk, Dk), v (B, M, R, Hk, Dv), lengths (B,), ancestors (B, W, M) -> (B, W, H, Dv)."""
    (B, W, H, Dk), (_, M, R, Hk, Dv) = q.shape, v.shape
    out = torch.empty(B, W, H, Dv, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    together = W if ancestors is None and R == 1 else 1  # queries that have the same keys
    programs = B * Hk * (W // together) * -(-together * H // (Hk * _BLOCK_M))
    # From shapes alone: lengths are on the device, and may differ when a CUDA graph repeats the launch.
    splits = max(1, min(M // _SPLIT_KEYS, _PROGRAMS * multiprocessors(q) // programs, _MAX_SPLITS))
    result, lse = out, None
    if splits > 1:
        result = torch.empty(splits, *out.shape, dtype=torch.float32, device=q.device)
        lse = torch.empty(splits, B, W, H, dtype=torch.float32, device=q.device)
    lengths = None if lengths is None else lengths.contiguous()
    (q_at, k_at, v_at, lengths_at, ancestors_at, result_at, lse_at), alignment = addresses(
        q, k, v, lengths, ancestors, result, lse
    )
    strides = *q.stride()[:3], *k.stride()[:4], *v.stride()[:4]
    history = None if ancestors is None else (ancestors_at, *ancestors.stride(), R)
    num_rows, device, precision = B * W * H, q.get_device(), dot_precision(q.dtype)
    key = (
        *(device, q.dtype, None if lengths is None else lengths.dtype, splits > 1, alignment, specialization(*strides)),
        *(None if history is None else (ancestors.dtype, specialization(*history[1:])), W, together, Hk, H // Hk),
        *(num_rows < LIMIT, Dk, Dv, precision),
    )
    launch = _DECODE.get(key)
    if launch is None:
        BLOCK_DK, BLOCK_DV = padded_dim(Dk), padded_dim(Dv)
        constants = {"HEAD_DIM_K": Dk, "HEAD_DIM_V": Dv, "BLOCK_DK": BLOCK_DK, "BLOCK_DV": BLOCK_DV}
        constants |= {"PRECISION": precision, "BLOCK_M": _BLOCK_M, "num_warps": 4, "num_stages": 3}
        BLOCK_N = max(_TILE_BYTES // (max(BLOCK_DK, BLOCK_DV, 64) * q.itemsize), 16)
        launch = _DECODE.add(key, **constants, BLOCK_N=BLOCK_N)
    arguments = (
        *((q_at, *strides[:3]), (k_at, *strides[3:7]), (v_at, *strides[7:]), lengths_at, history, result_at, lse_at),
        *(W, together, Hk, H // Hk, M, splits, num_rows, float(softmax_scale)),
    )
    launch.run(device, programs * splits, arguments, (q, k, v, lengths, ancestors, result, lse))
    if splits > 1:
        block_dv = min(padded_dim(Dv), 64)
        key = device, q.dtype, alignment, num_rows < LIMIT, Dv
        launch = _MERGE.get(key)
        if launch is None:
            constants = {"HEAD_DIM_V": Dv, "MAX_SPLITS": _MAX_SPLITS, "BLOCK_DV": block_dv, "num_warps": 4}
            launch = _MERGE.add(key, **constants)
        arguments = result_at, lse_at, out.data_ptr(), splits, num_rows
        launch.run(device, num_rows, arguments, (result, lse, out), triton.cdiv(Dv, block_dv))
    return out
