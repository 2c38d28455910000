"""Attention of new tokens to a cache, one pass over the keys.

Specification: fastattn/backends/reference/decode_attention.py

    S_j = cap(softmax_scale * q_bwh k[b, j, row_j, h / group]) + bias_hj
    row_j = ancestors[b, w, j], or w, or 0 where R = 1
    out_bwh = sum_j exp(S_j - lse) v[b, j, row_j, h / group],  lse = log sum_j exp(S_j), over the visible j

Source: Dao et al. 2023, "Flash-Decoding for long-context inference": where there are few sequences, the keys of each
are split among several programs, and a second kernel merges their results.

Grid: one program per (batch, key head, split, 16 queries that have the same keys; in float32 1, 2 or 4), in one
dimension. With ancestors, or where each query reads its own row, those are the heads of a group; where R = 1, all W
queries are together, so that their keys are read once. Beams read their common history from memory once, and then from
the L2 cache, because the programs of a head are neighbours. The merge has one program per (row of out, 64 columns) and
adds in a fixed order.
Keys and values of the last position may come as an input: each program reads them there, and the one whose split ends
with it writes them to the cache, in its row. So a step has no launch that writes, and no program waits for another one.
How many splits there are follows from shapes and the device alone, so a CUDA graph may repeat a launch with other
lengths; each sequence's own length is then divided evenly among them.
16 bits: products by tl.dot, whose least tile has 16 queries. Registers: the accumulator [16, BLOCK_DV], the running
maximum and sum of 16 rows, in float32. Shared memory: tiles of keys and values, two deep, or one deep with ancestors,
whose rows have to be known first.
float32: exact products have no tensor core. tl.dot makes them of scalar FMAs for all 16 queries, of which 1 is real
with ancestors. So they are sums here, exact also where torch allows TF32. At D 64 16 lanes have a key, 16 bytes each;
such a place has its own accumulator, maximum and sum for each query. Shared memory: 16 KiB, tiles one deep.
Bytes: the visible keys and values once, q and out; of each split, Dv + 1 float32 a row, written and read. FLOPs:
2 * (Dk + Dv) a query, head and visible position; empty rows of a tile add more, but the time is that of the bytes.
Compiled offline with triton 3.6, registers at sm_80 / sm_90a; nothing spills,
    bf16       with ancestors D 64 128 / 116, D 128 118 / 120, D 256 153 / 155; shared keys 70 / 72, 80 / 92, 140 / 117
    float32    with ancestors 64 / 60, 64 / 64, 80 / 72, and 4 heads a group 117 / 128, 116 / 121, 128 / 132;
               shared keys of 1 query 62 / 56, 62 / 72, 72 / 72, of 2 88 / 80, 80 / 80, 86 / 103, of more 119 / 127,
               119 / 127, 128 / 134
    the merge  56; written, with ancestors D 64, bf16 128 / 134 and float32 64 / 64, and 200 instructions more
but 2 accesses of spilled registers, outside of the loop, of float32 at D 256 with shared keys at sm_80. A head
dimension that 16 does not divide is read in narrow loads: with ancestors, at sm_80, D 72 in bf16 has 12, and D 40 in
float32 with 4 heads a group 88.
H200, 8 heads of D 64, ms, each query with its own rows; in brackets a kernel in CUDA C++ that was dropped. bf16: 32 x 5
of 64 keys 0.0094 (0.0131), of 2048 0.168 (0.171), 4.0 TB/s; 256 x 5 of 64 keys 0.0558 (0.0878), 3.0 TB/s; one of 4096
keys 0.0087 (0.0099); 32 x 8 of 64 shared keys 0.0082 (0.0102). float32 as it is now is not timed; by tl.dot 32 x 5 of
64 keys took 0.0566 (0.0141), of 2048 1.62 (0.303), one of 512 0.0268 (0.0100).
Tried and dropped, same compiler:
    tiles of 64 queries, for 5 beams of 8 heads on shared keys: at sm_80 19 accesses of spilled registers at D 128 with
    64 keys, 43 at D 256 with 32;
    with ancestors, 64 keys a tile at D 128 (200 / 188 registers) and 2 warps at D 64 (156 / 168);
    in float32 an accumulator for each position of a tile: 168 registers for 4 queries at D 64;
    in float32 tiles two deep: with ancestors 1617 instructions and 92 registers, and 2 to 4 accesses of spilled ones
    for 4 queries at sm_90a; without shared memory 933 and 68, but a warp has only two or three loads in flight;
    keys and scores by place before the softmax: 83 registers and 1527 instructions with ancestors.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import LIMIT, Launches, addresses, multiprocessors, padded_dim, specialization
from ..common.softcap import cap


class Queries(NamedTuple):
    """q (B, W, H, Dk), whose last dimension is contiguous; or keys and values of the last position, with Hk heads."""

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


class Bias(NamedTuple):
    """bias (H or 1, M), whose last dimension is contiguous; stride_h is 0 for one row."""

    ptr: Tensor
    stride_h: int


@triton.jit
def load_keys(cache, new, b, n, row, h, last, visible, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """[..., BLOCK_D]: positions n [...] of head h, each in its row, the last of `new` if that is given. What is not
    visible reads as 0: the memory there may hold NaN, and 0 * NaN is NaN."""
    ptrs = cache.ptr + b * cache.stride_b + h * cache.stride_h
    ptrs += n.to(tl.int64) * cache.stride_m + tl.cast(row, tl.int64) * cache.stride_r
    if new is not None:
        given = new.ptr + b * new.stride_b + tl.cast(row, tl.int64) * new.stride_w + h * new.stride_h
        ptrs = tl.where(n == last, given, ptrs)
    col = tl.arange(0, BLOCK_D)
    inside = tl.expand_dims(visible, -1)
    if HEAD_DIM < BLOCK_D:
        inside = inside & (col < HEAD_DIM)
    return tl.load(tl.expand_dims(ptrs, -1) + col, mask=inside, other=0.0)


@triton.jit
def write_row(cache, new, b, w, h, last, is_writer, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    col = tl.arange(0, BLOCK_D)
    inside = col < tl.where(is_writer, HEAD_DIM, 0)
    row = tl.load(new.ptr + b * new.stride_b + w * new.stride_w + h * new.stride_h + col, mask=inside)
    place = b * cache.stride_b + tl.cast(last, tl.int64) * cache.stride_m + w * cache.stride_r + h * cache.stride_h
    tl.store(cache.ptr + place + col, row, mask=inside)


@triton.jit(do_not_specialize=["seqlen_k", "num_splits", "num_rows"])
def decode_attention_kernel(
    # Queries q, Cache k and v; of the last position Queries new_k and new_v, which are written there, or None; lengths
    # (B,) int32 or None; Ancestors or None; Bias or None; out (splits, B, W, H, Dv) contiguous; lse (splits, B, W, H)
    # float32 contiguous, or None with one split.
    q, k, v, new_k, new_v, lengths, ancestors, bias, out, lse_ptr,
    num_queries, together, num_heads_k, group, seqlen_k, num_splits, num_rows, softmax_scale, softcap,
    HEAD_DIM_K: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PLACES: tl.constexpr,
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
    last = seqlen - 1
    if new_k is not None:  # no program reads the cache there
        w_0, is_writer = tl.cast(first_query, tl.int64), (part % tiles == 0) & (begin <= last) & (last < end)
        write_row(k, new_k, b, w_0, h_k, last, is_writer, HEAD_DIM_K, BLOCK_DK)
        write_row(v, new_v, b, w_0, h_k, last, is_writer, HEAD_DIM_V, BLOCK_DV)
    # PLACES = 0: products by tl.dot. Otherwise, for a few queries in float32, they are sums. A tile has so many places,
    # each with some positions, a softmax of its own and a lane for every four columns. Up to D 128 the places need no
    # other warp before the end, where they meet.
    in_tile = tl.arange(0, BLOCK_N)
    if PLACES:
        in_tile = in_tile[None, :]
    row_max = tl.full([BLOCK_M, PLACES] if PLACES else [BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros_like(row_max)
    acc = tl.zeros([BLOCK_M, PLACES, BLOCK_DV] if PLACES else [BLOCK_M, BLOCK_DV], tl.float32)
    for n0 in tl.range(begin, end, BLOCK_N, num_stages=2 if PLACES else 3):
        n = n0 + in_tile
        visible = n < end
        row = first_query  # 0 where all queries are together
        if ancestors is not None:
            ptrs = ancestors.ptr + (b * ancestors.stride_b + tl.cast(first_query, tl.int64) * ancestors.stride_w)
            row = tl.load(ptrs + n.to(tl.int64) * ancestors.stride_m, mask=visible, other=-1)
            visible = (row >= 0) & (row < ancestors.rows)
        k_tile = load_keys(k, new_k, b, n, row, h_k, last, visible, HEAD_DIM_K, BLOCK_DK)
        scores = tl.sum(q_tile[:, None, :] * k_tile, axis=2) if PLACES else tl.dot(q_tile, tl.trans(k_tile))
        scores *= softmax_scale
        if softcap is not None:
            scores, _ = cap(scores, softcap)
        if bias is not None:
            ptrs = bias.ptr + h[:, None] * bias.stride_h + tl.reshape(n, 1, BLOCK_N)
            scores += tl.load(ptrs, mask=tl.reshape(n < end, 1, BLOCK_N), other=0.0).to(tl.float32)
        scores = tl.where(visible, scores, float("-inf"))
        if PLACES:
            # Not before: Triton would load the positions of a place by several lanes.
            scores = tl.reshape(scores, BLOCK_M, BLOCK_N // PLACES, PLACES)

        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        # A row without a visible key so far has the maximum -inf. 0 instead avoids -inf - -inf.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp(row_max - shift)
        p = tl.exp(scores - tl.expand_dims(shift, 1))
        row_sum = row_sum * rescale + tl.sum(p, axis=1)
        v_tile = load_keys(v, new_v, b, n, row, h_k, last, visible, HEAD_DIM_V, BLOCK_DV)
        acc *= tl.expand_dims(rescale, -1)
        if PLACES:
            v_tile = tl.reshape(v_tile, 1, BLOCK_N // PLACES, PLACES, BLOCK_DV)
            acc += tl.sum(p[:, :, :, None] * v_tile, axis=1)
        else:
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc)
        row_max = new_max

    if PLACES:
        top = tl.max(row_max, axis=1)
        weight = tl.exp(row_max - tl.where(top == float("-inf"), 0.0, top)[:, None])
        row_max, row_sum = top, tl.sum(row_sum * weight, axis=1)
        acc = tl.sum(acc * weight[:, :, None], axis=1)
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
_DOT_QUERIES = 16  # in a tile, counted per head: the minimum of tl.dot
_FLOAT32_QUERIES = 4  # in a tile in float32, at most
_WARPS = 4
_TILE_BYTES = 8192  # of keys, or of values
_SPLIT_KEYS = 256  # at least, for a program to be worth the merge
_PROGRAMS = 4  # that a multiprocessor can run at once
_MAX_SPLITS = 64


_TYPES = Queries, Cache, Cache, Queries, Queries, Tensor, Ancestors, Bias, Tensor, Tensor
_DECODE = Launches(decode_attention_kernel, *_TYPES)
_MERGE = Launches(merge_splits_kernel, *[Tensor] * 3)


def decode_attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    ancestors: Tensor | None,
    softmax_scale: float,
    bias: Tensor | None = None,
    softcap: float | None = None,
    new: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """q (B, W, H, Dk), k (B, M, R, Hk, Dk), v (B, M, R, Hk, Dv), lengths (B,), ancestors (B, W, M), bias (H or 1, M) in
    any floating-point dtype -> (B, W, H, Dv).

    new: k (B, W, Hk, Dk) and v (B, W, Hk, Dv) of position lengths - 1, for a cache with W rows, which is written.
    """
    (B, W, H, Dk), (_, M, R, Hk, Dv) = q.shape, v.shape
    out = torch.empty(B, W, H, Dv, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    together = W if ancestors is None and R == 1 else 1  # queries that have the same keys
    is_float32 = q.dtype == torch.float32
    BLOCK_M = min(triton.next_power_of_2(together * H // Hk), _FLOAT32_QUERIES) if is_float32 else _DOT_QUERIES
    programs = B * Hk * (W // together) * -(-together * H // (Hk * BLOCK_M))
    # From shapes alone: lengths are on the device, and may differ when a CUDA graph repeats the launch.
    splits = max(1, min(M // _SPLIT_KEYS, _PROGRAMS * multiprocessors(q) // programs, _MAX_SPLITS))
    result, lse = out, None
    if splits > 1:
        result = torch.empty(splits, *out.shape, dtype=torch.float32, device=q.device)
        lse = torch.empty(splits, B, W, H, dtype=torch.float32, device=q.device)
    lengths = None if lengths is None else lengths.contiguous()
    bias = bias if bias is None or bias.stride(1) == 1 else bias.contiguous()
    new_k, new_v = (None, None) if new is None else (t if t.stride(3) == 1 else t.contiguous() for t in new)
    tensors = q, k, v, new_k, new_v, lengths, ancestors, bias, result, lse
    found, alignment = addresses(*tensors)
    q_at, k_at, v_at, new_k_at, new_v_at, lengths_at, ancestors_at, bias_at, result_at, lse_at = found
    strides = *q.stride()[:3], *k.stride()[:4], *v.stride()[:4]
    if new is not None:
        strides += *new_k.stride()[:3], *new_v.stride()[:3]
    history = None if ancestors is None else (ancestors_at, *ancestors.stride(), R)
    added = bias_key = None
    if bias is not None:
        added = bias_at, bias.stride(0) if bias.shape[0] > 1 else 0
        bias_key = bias.dtype, specialization(added[1])
    num_rows, device = B * W * H, q.get_device()
    key = (
        *(device, q.dtype, None if lengths is None else lengths.dtype, splits > 1, alignment, specialization(*strides)),
        *(None if history is None else (ancestors.dtype, specialization(*history[1:])), W, together, Hk, H // Hk),
        *(num_rows < LIMIT, Dk, Dv, bias_key, softcap is None),
    )
    launch = _DECODE.get(key)
    if launch is None:
        BLOCK_DK, BLOCK_DV = padded_dim(Dk), padded_dim(Dv)
        constants = {"HEAD_DIM_K": Dk, "HEAD_DIM_V": Dv, "BLOCK_DK": BLOCK_DK, "BLOCK_DV": BLOCK_DV}
        constants |= {"BLOCK_M": BLOCK_M, "BLOCK_N": _TILE_BYTES // (max(BLOCK_DK, BLOCK_DV, 64) * q.itemsize)}
        # A lane has four columns of a place: 16 bytes, as it loads them.
        PLACES = 32 * _WARPS * 4 // max(BLOCK_DK, BLOCK_DV) if is_float32 else 0
        launch = _DECODE.add(key, **constants, PLACES=PLACES, num_warps=_WARPS)
    given = (q_at, *strides[:3]), (k_at, *strides[3:7]), (v_at, *strides[7:11])
    given += (None, None) if new is None else ((new_k_at, *strides[11:14]), (new_v_at, *strides[14:]))
    numbers = W, together, Hk, H // Hk, M, splits, num_rows, float(softmax_scale), softcap
    arguments = *given, lengths_at, history, added, result_at, lse_at, *numbers
    launch.run(device, programs * splits, arguments, tensors)
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
