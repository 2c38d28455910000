"""Backward of attention: the gradients of q, k and v. Specification: fastattn/reference/attention.py

    P = exp(S - lse);  Z = keep / (1 - dropout_p);  dP = Z * (dout v^T);  delta_i = sum_d out_id dout_id - dlse_i
    dS = P * (dP - delta);  dq = softmax_scale * dS k;  dk = softmax_scale * dS^T q;  dv = (P * Z)^T dout

Source: Dao 2023, FlashAttention-2, arXiv:2307.08691, Algorithm 2, in two kernels: one owns query tiles and writes dq
and delta, the other owns key tiles and writes dk and dv. S and dP are computed twice, 7 products where one kernel needs
5, but nobody adds into memory that another program writes: no atomics, no float32 copy of dq, equal results run to run.
lse is differentiable at no cost: its gradient only shifts delta.
Compiled offline, triton 3.6, bf16 causal, sm_90a: dq 128 registers at D 64 and 207 at D 128, dk and dv 255 at both;
nothing spills. With dropout, bias and attn_mask together, D 128: 8 and 39 stores spill.
Tried and dropped for dk and dv, D 128: 64 queries by 128 keys, 59 stores spilled without a mask; 128 by 64, 244.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn._attention_delta import wants_exact_delta
from fastattn.masks import AttentionMask

from ..common.launch import current_arch, on_device
from ..common.philox import dropout_keep
from . import arguments
from .bias_gradient import bias_gradient
from .config import config
from .rows import delta_of_tile, row_statistics
from .tiles import (
    LOG2E,
    exponential,
    keep_elements,
    key_interval,
    load_bias,
    load_rows,
    plan_visits,
    program_place,
    store_rows,
    tile_at,
)


@triton.jit
def attention_dq_kernel(
    # dout and out (B, H, Lq, Dv), dq as q; lse, dlse, remainder (or None) and delta (B, H, Lq) float32,
    # contiguous. HAS_DELTA: dlse is what delta lacks of it, all or None.
    q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr, lse_ptr, remainder_ptr, dlse_ptr, dq_ptr, delta_ptr,
    q_stride_b, q_stride_h, q_stride_m,
    k_stride_b, k_stride_h, k_stride_n,
    v_stride_b, v_stride_h, v_stride_n,
    out_stride_b, out_stride_h, out_stride_m,
    dout_stride_b, dout_stride_h, dout_stride_m,
    dq_stride_b, dq_stride_h, dq_stride_m,
    num_heads, group, seqlen_q, seqlen_k, softmax_scale,
    band_lo, band_hi,
    k_start_ptr, k_end_ptr, interval_stride_b,
    seen_ptr, seen_stride_b, seen_stride_h,
    attn_mask_ptr, attn_mask_stride_b, attn_mask_stride_h, attn_mask_stride_m, attn_mask_stride_n,
    bias_ptr, bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n,
    num_partial_ptr, partial_ptr, num_full_ptr, full_ptr, tiles_stride_b, tiles_stride_h,
    rng_state_ptr, dropout_threshold, dropout_scale,
    HEAD_DIM_K: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    FOLD_SCALE: tl.constexpr, LISTS: tl.constexpr, HAS_ATTN_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_REMAINDER: tl.constexpr, HAS_DELTA: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid and walk as in the forward: one program per (batch, head, BLOCK_M queries), along the keys.

    In registers: dq [BLOCK_M, BLOCK_DK] and a tile each of S and dP, float32. q and dout are read once, k and v stream.
    """
    num_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    tile, b, h = program_place(num_tiles, num_heads)
    tile = num_tiles - 1 - tile
    m0 = tile * BLOCK_M
    m_last = tl.minimum(m0 + BLOCK_M, seqlen_q) - 1
    m = m0 + tl.arange(0, BLOCK_M)
    row = (b * num_heads + h) * seqlen_q + m

    q_ptr += b * q_stride_b + h * q_stride_h
    k_ptr += b * k_stride_b + h // group * k_stride_h
    v_ptr += b * v_stride_b + h // group * v_stride_h
    out_ptr += b * out_stride_b + h * out_stride_h
    dout_ptr += b * dout_stride_b + h * dout_stride_h
    if LISTS:
        k_start_ptr += b * interval_stride_b
        k_end_ptr += b * interval_stride_b
        place = b * tiles_stride_b + h * tiles_stride_h + tile
        num_partial, num_full = tl.load(num_partial_ptr + place), tl.load(num_full_ptr + place)
        partial_ptr += place * tl.cdiv(seqlen_k, BLOCK_N)
        full_ptr += place * tl.cdiv(seqlen_k, BLOCK_N)
        first, num_left = 0, 0
    else:
        n_first = tl.maximum(m0 + band_lo, 0)
        n_end = tl.maximum(tl.minimum(m_last + band_hi + 1, seqlen_k), 0)
        first, num_left, num_partial, num_full = plan_visits(
            n_first,
            tl.maximum(m_last + band_lo, 0),
            tl.maximum(tl.minimum(m0 + band_hi + 1, seqlen_k), 0),
            n_end,
            BLOCK_N,
        )
    if LISTS or HAS_BIAS:
        seen_ptr += b * seen_stride_b + h * seen_stride_h
    if HAS_ATTN_MASK:
        attn_mask_ptr += b * attn_mask_stride_b + h * attn_mask_stride_h
    if HAS_BIAS:
        bias_ptr += b * bias_stride_b + h * bias_stride_h

    dout = load_rows(dout_ptr, m0, dout_stride_m, m < seqlen_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + row, mask=m < seqlen_q, other=0.0)
        if dlse_ptr is not None:
            dlse_apart = tl.load(dlse_ptr + row, mask=m < seqlen_q, other=0.0)[:, None]
    else:
        out = load_rows(out_ptr, m0, out_stride_m, m < seqlen_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV)
        delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), axis=1)
        dlse = 0.0
        if dlse_ptr is not None:
            dlse = tl.load(dlse_ptr + row, mask=m < seqlen_q, other=0.0)
        delta -= dlse
        if not HAS_DROPOUT:
            tl.store(delta_ptr + row, delta, mask=m < seqlen_q)

    unit = softmax_scale * LOG2E if FOLD_SCALE else LOG2E
    shift = tl.load(lse_ptr + row, mask=m < seqlen_q, other=0.0)
    if FOLD_SCALE:
        shift *= LOG2E
    remainder = 0.0
    if HAS_REMAINDER:
        remainder = tl.load(remainder_ptr + row, mask=m < seqlen_q, other=0.0)[:, None]
    start, end = key_interval(m[:, None], seqlen_q, seqlen_k, band_lo, band_hi, k_start_ptr, k_end_ptr, LISTS)
    q = load_rows(q_ptr, m0, q_stride_m, m < seqlen_q, BLOCK_M, HEAD_DIM_K, BLOCK_DK)
    dq = tl.zeros([BLOCK_M, BLOCK_DK], tl.float32)

    for FULL in tl.static_range(2):
        for i in range(num_full if FULL else num_partial):
            n0 = BLOCK_N * tile_at(i, full_ptr if FULL else partial_ptr, first, num_left, num_full, FULL, LISTS)
            n = n0 + tl.arange(0, BLOCK_N)
            if FULL and not HAS_BIAS:
                seen = None
            elif LISTS or HAS_BIAS:
                seen = tl.load(seen_ptr + n, mask=n < seqlen_k, other=0) != 0
            else:
                seen = (n >= n_first) & (n < n_end)
            k = load_rows(k_ptr, n0, k_stride_n, seen, BLOCK_N, HEAD_DIM_K, BLOCK_DK)
            v = load_rows(v_ptr, n0, v_stride_n, seen, BLOCK_N, HEAD_DIM_V, BLOCK_DV)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if not FOLD_SCALE:
                scores *= softmax_scale
            if not FULL:
                keep = seen[None, :] & keep_elements(
                    m[:, None], n[None, :], start, end, seqlen_q, seqlen_k,
                    attn_mask_ptr, attn_mask_stride_m, attn_mask_stride_n, HAS_ATTN_MASK,
                )  # fmt: skip
            if HAS_BIAS:
                bias = load_bias(m[:, None], n[None, :], seqlen_q, seqlen_k, bias_ptr, bias_stride_m, bias_stride_n)
                scores += bias
                keep = bias != float("-inf") if FULL else keep & (bias != float("-inf"))
            p = exponential(scores, shift[:, None], remainder, unit, FOLD_SCALE)
            dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
            if HAS_DROPOUT:
                kept = dropout_keep(rng_state_ptr, dropout_threshold, row, n0, BLOCK_N)
                dp = tl.where(kept, dp * dropout_scale, 0.0)
                if not HAS_DELTA:
                    seen_p = tl.where(keep, p, 0.0) if HAS_BIAS or not FULL else p
                    delta = delta_of_tile(delta, seen_p, dp, dlse, num_partial + num_full == 1)
            ds = p * (dp - delta[:, None])
            if HAS_DELTA and dlse_ptr is not None:
                ds += p * dlse_apart
            if HAS_BIAS or not FULL:
                ds = tl.where(keep, ds, 0.0)
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)

    if HAS_DROPOUT and not HAS_DELTA:
        tl.store(delta_ptr + row, delta, mask=m < seqlen_q)
    dq_ptr += b * dq_stride_b + h * dq_stride_h
    store_rows(dq_ptr, m0, dq_stride_m, m < seqlen_q, dq * softmax_scale, BLOCK_M, HEAD_DIM_K, BLOCK_DK)


@triton.jit
def attention_dkv_kernel(
    # dlse: what delta lacks of it, all or None.
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, remainder_ptr, dlse_ptr, delta_ptr, dk_ptr, dv_ptr,
    q_stride_b, q_stride_h, q_stride_m,
    k_stride_b, k_stride_h, k_stride_n,
    v_stride_b, v_stride_h, v_stride_n,
    dout_stride_b, dout_stride_h, dout_stride_m,
    dk_stride_b, dk_stride_h, dk_stride_n,
    dv_stride_b, dv_stride_h, dv_stride_n,
    num_heads, group, seqlen_q, seqlen_k, softmax_scale,
    # Lists are of query tiles, one per key tile.
    band_lo, band_hi,
    k_start_ptr, k_end_ptr, interval_stride_b,
    seen_ptr, seen_stride_b, seen_stride_h,
    attn_mask_ptr, attn_mask_stride_b, attn_mask_stride_h, attn_mask_stride_m, attn_mask_stride_n,
    bias_ptr, bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n,
    num_partial_ptr, partial_ptr, num_full_ptr, full_ptr, tiles_stride_b, tiles_stride_h,
    rng_state_ptr, dropout_threshold, dropout_scale,
    HEAD_DIM_K: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    FOLD_SCALE: tl.constexpr, LISTS: tl.constexpr, HAS_ATTN_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_REMAINDER: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: one program per (batch, key head, BLOCK_N keys); it walks along the queries of every head of its group.

    Tiles of scores are transposed, [BLOCK_N, BLOCK_M], so that P^T and dS^T enter their products from registers.
    In registers: dk and dv [BLOCK_N, BLOCK_D*] and a tile each of S and dP, float32. k and v are read once, q and dout
    stream.
    """
    num_key_heads = num_heads // group
    tile, b, h_k = program_place(tl.cdiv(seqlen_k, BLOCK_N), num_key_heads)
    n0 = tile * BLOCK_N
    n_last = tl.minimum(n0 + BLOCK_N, seqlen_k) - 1
    n = n0 + tl.arange(0, BLOCK_N)
    num_query_tiles = tl.cdiv(seqlen_q, BLOCK_M)

    if LISTS:
        k_start_ptr += b * interval_stride_b
        k_end_ptr += b * interval_stride_b
        first, num_left = 0, 0
    else:
        first, num_left, num_partial, num_full = plan_visits(
            tl.maximum(n0 - band_hi, 0),
            tl.maximum(n_last - band_hi, 0),
            tl.maximum(tl.minimum(n0 - band_lo + 1, seqlen_q), 0),
            tl.maximum(tl.minimum(n_last - band_lo + 1, seqlen_q), 0),
            BLOCK_M,
        )

    unit = softmax_scale * LOG2E if FOLD_SCALE else LOG2E
    k_ptr += b * k_stride_b + h_k * k_stride_h
    v_ptr += b * v_stride_b + h_k * v_stride_h
    k = load_rows(k_ptr, n0, k_stride_n, n < seqlen_k, BLOCK_N, HEAD_DIM_K, BLOCK_DK)
    v = load_rows(v_ptr, n0, v_stride_n, n < seqlen_k, BLOCK_N, HEAD_DIM_V, BLOCK_DV)
    dk = tl.zeros([BLOCK_N, BLOCK_DK], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    for g in range(group):
        h = h_k * group + g
        row0 = (b * num_heads + h) * seqlen_q
        q_head = q_ptr + b * q_stride_b + h * q_stride_h
        dout_head = dout_ptr + b * dout_stride_b + h * dout_stride_h
        attn_mask_head, bias_head, partial, full = attn_mask_ptr, bias_ptr, partial_ptr, full_ptr
        if LISTS:
            place = b * tiles_stride_b + h * tiles_stride_h + tile
            num_partial, num_full = tl.load(num_partial_ptr + place), tl.load(num_full_ptr + place)
            partial = partial_ptr + place * num_query_tiles
            full = full_ptr + place * num_query_tiles
        if LISTS or HAS_BIAS:
            seen = tl.load(seen_ptr + b * seen_stride_b + h * seen_stride_h + n, mask=n < seqlen_k, other=0) != 0
        else:
            seen = n < seqlen_k
        if HAS_ATTN_MASK:
            attn_mask_head = attn_mask_ptr + b * attn_mask_stride_b + h * attn_mask_stride_h
        if HAS_BIAS:
            bias_head = bias_ptr + b * bias_stride_b + h * bias_stride_h

        for FULL in tl.static_range(2):
            for i in range(num_full if FULL else num_partial):
                m0 = BLOCK_M * tile_at(i, full if FULL else partial, first, num_left, num_full, FULL, LISTS)
                m = m0 + tl.arange(0, BLOCK_M)
                # A query that sees nothing may hold anything, and its gradient too: neither is loaded.
                if FULL and not HAS_BIAS:
                    sees = None
                    lse = tl.load(lse_ptr + row0 + m)
                    delta = tl.load(delta_ptr + row0 + m)
                else:
                    lse = tl.load(lse_ptr + row0 + m, mask=m < seqlen_q, other=float("-inf"))
                    sees = lse != float("-inf")
                    delta = tl.load(delta_ptr + row0 + m, mask=sees, other=0.0)
                if dlse_ptr is not None:
                    dlse_apart = tl.load(dlse_ptr + row0 + m, mask=lse != float("-inf"), other=0.0)[None, :]
                shift = lse * LOG2E if FOLD_SCALE else lse
                remainder = 0.0
                if HAS_REMAINDER:
                    remainder = tl.load(remainder_ptr + row0 + m, mask=m < seqlen_q, other=0.0)[None, :]
                q = load_rows(q_head, m0, q_stride_m, sees, BLOCK_M, HEAD_DIM_K, BLOCK_DK)
                dout = load_rows(dout_head, m0, dout_stride_m, sees, BLOCK_M, HEAD_DIM_V, BLOCK_DV)
                scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
                if not FOLD_SCALE:
                    scores *= softmax_scale
                if not FULL:
                    start, end = key_interval(
                        m[None, :], seqlen_q, seqlen_k, band_lo, band_hi, k_start_ptr, k_end_ptr, LISTS
                    )
                    keep = seen[:, None] & keep_elements(
                        m[None, :], n[:, None], start, end, seqlen_q, seqlen_k,
                        attn_mask_head, attn_mask_stride_m, attn_mask_stride_n, HAS_ATTN_MASK,
                    )  # fmt: skip
                if HAS_BIAS:
                    bias = load_bias(
                        m[None, :], n[:, None], seqlen_q, seqlen_k, bias_head, bias_stride_m, bias_stride_n
                    )
                    scores += bias
                    keep = bias != float("-inf") if FULL else keep & (bias != float("-inf"))
                p = exponential(scores, shift[None, :], remainder, unit, FOLD_SCALE)
                if HAS_BIAS or not FULL:
                    p = tl.where(keep, p, 0.0)
                dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
                z = p
                if HAS_DROPOUT:
                    kept = tl.trans(dropout_keep(rng_state_ptr, dropout_threshold, row0 + m, n0, BLOCK_N))
                    z = tl.where(kept, p * dropout_scale, 0.0)
                    dp = tl.where(kept, dp * dropout_scale, 0.0)
                dv = tl.dot(z.to(dout.dtype), dout, dv, input_precision=PRECISION)
                ds = p * (dp - delta[None, :])
                if dlse_ptr is not None:
                    ds += p * dlse_apart
                if HAS_BIAS or not FULL:
                    ds = tl.where(keep, ds, 0.0)
                dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)

    dk_ptr += b * dk_stride_b + h_k * dk_stride_h
    dv_ptr += b * dv_stride_b + h_k * dv_stride_h
    store_rows(dk_ptr, n0, dk_stride_n, n < seqlen_k, dk * softmax_scale, BLOCK_N, HEAD_DIM_K, BLOCK_DK)
    store_rows(dv_ptr, n0, dv_stride_n, n < seqlen_k, dv, BLOCK_N, HEAD_DIM_V, BLOCK_DV)


def attention_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: AttentionMask | None,
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
    needs_dbias: bool,
    grads: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dout as out (B, H, Lq, Dv), any strides; dlse (B, H, Lq) float32 or None; the rest as the forward took and gave
    it. grads: memory for dq, dk, dv. Returns them, in the inputs' dtypes and unless given in their memory order, and
    dbias, as mask.bias, if needed."""
    B, H, Lq, Dk = q.shape
    Hk, Lk, Dv = v.shape[1:]
    dout = dout if dout.stride(3) == 1 else dout.contiguous()
    out = out if out.stride(3) == 1 else out.contiguous()
    lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
    dq, dk, dv = grads or (arguments.empty_like(q, Dk), arguments.empty_like(k, Dk), arguments.empty_like(v, Dv))
    delta = torch.empty_like(lse)
    dbias = None
    with on_device(q):
        shared = {
            **arguments.problem(q, k, v, softmax_scale),
            **arguments.visibility(q, k, mask, softmax_scale),
            **arguments.dropout(dropout_p, rng_state),
        }
        inputs = {
            "q_ptr": q, "k_ptr": k, "v_ptr": v, "dout_ptr": dout, "lse_ptr": lse, "delta_ptr": delta,
            **arguments.strides("m", q=q, dout=dout), **arguments.strides("n", k=k, v=v),
        }  # fmt: skip
        rows = row_statistics(inputs, shared, dlse, exact_delta=wants_exact_delta(q, dropout_p))
        shared |= {"remainder_ptr": rows.remainder, "HAS_REMAINDER": rows.remainder is not None}
        head_dim = max(Dk, Dv)
        c = config("dq", current_arch(), q.dtype, head_dim, Lq)
        programs = B * H * triton.cdiv(Lq, c.BLOCK_M)
        if programs > 0:
            attention_dq_kernel[(programs,)](
                out_ptr=out, dlse_ptr=rows.dlse_apart if rows.has_delta else dlse, dq_ptr=dq, HAS_DELTA=rows.has_delta,
                **arguments.strides("m", out=out, dq=dq),
                **inputs, **shared, **arguments.visits(mask, q, k, c, by_key=False), **c._asdict(),
            )  # fmt: skip
        c = config("dkv", current_arch(), q.dtype, head_dim, Lk)
        programs = B * Hk * triton.cdiv(Lk, c.BLOCK_N)
        if programs > 0:
            attention_dkv_kernel[(programs,)](
                dlse_ptr=rows.dlse_apart, dk_ptr=dk, dv_ptr=dv, **arguments.strides("n", dk=dk, dv=dv),
                **inputs, **shared, **arguments.visits(mask, q, k, c, by_key=True), **c._asdict(),
            )  # fmt: skip
        if needs_dbias:
            dbias = bias_gradient(mask.bias, dlse, rows.dlse_apart, inputs, shared)
    return dq, dk, dv, dbias
