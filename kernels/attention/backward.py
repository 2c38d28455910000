"""Backward of attention: the gradients of q, k and v. Specification: fastattn/backends/reference/attention.py

    P = exp(S - lse);  Z = keep / (1 - dropout_p);  dP = Z * (dout v^T);  delta_i = sum_d out_id dout_id - dlse_i
    dS = P * (dP - delta);  dq = softmax_scale * dS k;  dk = softmax_scale * dS^T q;  dv = (P * Z)^T dout
    with a softcap dS is multiplied by 1 - tanh^2 in dq and dk

Source: Dao 2023, FlashAttention-2, arXiv:2307.08691, Algorithm 2, in two kernels: one owns query tiles and writes dq
and delta, the other owns key tiles and writes dk and dv. S and dP are computed twice, 7 products where one kernel needs
5, but no program adds into memory that another one writes: no atomics, no float32 copy of dq, equal results run to run.
lse is differentiable at no cost: its gradient only shifts delta.
Compiled offline, triton 3.6, bf16 causal, sm_90a: dq 128 registers at D 64 and 209 at D 128, dk and dv 254 and 239;
nothing spills. With dropout, bias and a bool matrix together, D 128: 10 and 2 accesses spill. With a relative bias dq
184 and 236, dk and dv 254 and 254, with a softcap 128 and 179, 220 and 241, at sm_80 no more than 254; nothing spills.
dq has no more live tiles with a softcap, as P is not needed after it is multiplied by the slope of tanh.
H200, bf16, ms, CUDA's in brackets: 2 x 16 heads, 8192 tokens, D 128 8.18 (5.13), 336 TFLOP/s, causal 4.22 (2.56); 2 x
32 heads, D 64 8.18 (5.59), 336 TFLOP/s; 16 x 32 heads, 1024 tokens, D 64, padding 1.26 (0.682).
Tried and dropped:
    for dk and dv, D 128: 64 queries by 128 keys, 59 stores spilled without a mask; 128 by 64, 244;
    in dq, to test elements only after dP: 154 registers at D 64, so one program an SM where there are two.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.backends.calls import AttentionCall

from ..common.launch import Launches, addresses, specialization
from ..common.philox import dropout_keep_in_product
from ..common.softcap import cap
from . import arguments
from . import masked_tiles as tiles
from .arguments import Dropout, Mask, Matrix, StridedTensor
from .bias_gradient import bias_gradient
from .relative_bias_gradient import relative_bias_gradient
from .short import short_backward


@triton.jit(do_not_specialize=arguments.DO_NOT_SPECIALIZE)
def attention_dq_kernel(
    # StridedTensors q, k, v, out, dout, dq; lse, dlse (or None) and delta (B, H, Lq) float32, contiguous.
    q, k, v, out, dout, dq, lse_ptr, dlse_ptr, delta_ptr, bias, mask, dropout,
    num_heads, group, seqlen_q, seqlen_k, band_lo, band_hi, softmax_scale, softcap,
    HEAD_DIM_K: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    FOLD_SCALE: tl.constexpr, RELATIVE_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid and loops as in the forward: one program per (batch, head, BLOCK_M queries), over the key tiles.

    Registers: dq [BLOCK_M, BLOCK_DK] and a tile each of S and dP, float32. q and dout are read once, k and v stream
    through shared memory.
    """
    num_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    tile, b, h = tiles.program_coords(num_tiles, num_heads)
    tile = num_tiles - 1 - tile
    m0 = tile * BLOCK_M
    m_last = tl.minimum(m0 + BLOCK_M, seqlen_q) - 1
    m = m0 + tl.arange(0, BLOCK_M)
    row = (b * num_heads + h) * seqlen_q + m

    begin, end = tiles.row_intervals(mask, b, m, seqlen_q, seqlen_k, band_lo, band_hi)
    n_begin, n_end = tiles.tile_columns(mask, begin, end, m0, m_last, seqlen_k, band_lo, band_hi)
    first, num_left, num_partial, num_visited = tiles.plan_tiles(
        mask, b, h, num_heads, tile, n_begin, n_end, m_last, seqlen_q, seqlen_k, band_lo, band_hi, BLOCK_M, BLOCK_N
    )

    lse = tl.load(lse_ptr + row, mask=m < seqlen_q, other=float("-inf"))
    dout_tile = tiles.load_rows(dout, b, h, m0, m < seqlen_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV)
    out_tile = tiles.load_rows(out, b, h, m0, m < seqlen_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV)
    delta = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), axis=1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + row, mask=m < seqlen_q, other=0.0)
    # A query that attends to nothing has gradient 0, even if dout or dlse is NaN there.
    delta = tl.where(lse == float("-inf"), 0.0, delta)
    tl.store(delta_ptr + row, delta, mask=m < seqlen_q)
    # After reading it back, delta has the layout that the loops need. Otherwise the loops would have the layout of the
    # sum above: 190 registers in float32 at D 64, instead of 71.
    tl.debug_barrier()
    delta = tl.load(delta_ptr + row, mask=m < seqlen_q, other=0.0)

    unit = softmax_scale * tiles.LOG2E if FOLD_SCALE else tiles.LOG2E
    shift = tiles.exponent_shift(lse, FOLD_SCALE)
    q_tile = tiles.load_rows(q, b, h, m0, m < seqlen_q, BLOCK_M, HEAD_DIM_K, BLOCK_DK)
    acc = tl.zeros([BLOCK_M, BLOCK_DK], tl.float32)

    for FULL in tl.static_range(2):
        for i in range(num_partial if FULL else 0, num_visited if FULL else num_partial):
            n0 = BLOCK_N * tiles.tile_at(mask, i, first, num_left, num_partial, num_visited, FULL)
            inside = None if FULL else tiles.readable_columns(mask, b, n0, n_begin, n_end, seqlen_k, BLOCK_N)
            k_tile = tiles.load_rows(k, b, h // group, n0, inside, BLOCK_N, HEAD_DIM_K, BLOCK_DK)
            v_tile = tiles.load_rows(v, b, h // group, n0, inside, BLOCK_N, HEAD_DIM_V, BLOCK_DV)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            if not FOLD_SCALE:
                scores *= softmax_scale
            if softcap is not None:
                scores, slope = cap(scores, softcap)
            if bias is not None:
                scores += tiles.load_bias(
                    bias, b, h, m[:, None], (n0 + tl.arange(0, BLOCK_N))[None, :], seqlen_q, seqlen_k, RELATIVE_BIAS
                )
            if not FULL:
                keep = tiles.visible_elements(
                    mask, b, h, num_heads, begin, end, inside, m, n0, seqlen_q, seqlen_k, BLOCK_N
                )
            p = tiles.exponential(scores, shift[:, None], unit, FOLD_SCALE)
            if softcap is not None:
                p *= slope
            dp = tl.dot(dout_tile, tl.trans(v_tile), input_precision=PRECISION)
            if dropout is not None:
                kept = dropout_keep_in_product(dropout.rng_state, dropout.threshold, row, n0, BLOCK_N)
                dp = tl.where(kept, dp * dropout.scale, 0.0)
            ds = p * (dp - delta[:, None])
            if not FULL:
                ds = tl.where(keep, ds, 0.0)
            acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)

    tiles.store_rows(dq, b, h, m0, m < seqlen_q, acc * softmax_scale, BLOCK_M, HEAD_DIM_K, BLOCK_DK)


# seqlen_q is specialised here: if 16 divides it, lse and delta are loaded as vectors. With a bias, a bool matrix and
# dropout at D 128, 13 stores spill instead of 45. This is worth a second compilation.
@triton.jit(do_not_specialize=["seqlen_k", "band_lo", "band_hi"])
def attention_dkv_kernel(
    # StridedTensors q, k, v, dout, dk, dv; lse and delta (B, H, Lq) float32, contiguous; mask: its rows are keys.
    q, k, v, dout, dk, dv, lse_ptr, delta_ptr, bias, mask, dropout,
    num_heads, group, seqlen_q, seqlen_k, band_lo, band_hi, softmax_scale, softcap,
    HEAD_DIM_K: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    FOLD_SCALE: tl.constexpr, RELATIVE_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: one program per (batch, key head, BLOCK_N keys), over the heads of its group and their query tiles.

    Tiles of scores are transposed, [BLOCK_N, BLOCK_M], so that P^T and dS^T enter their products from registers.
    Registers: dk and dv [BLOCK_N, BLOCK_D*] and a tile each of S and dP, float32. k and v are read once, q and dout
    stream through shared memory.
    """
    tile, b, h_k = tiles.program_coords(tl.cdiv(seqlen_k, BLOCK_N), num_heads // group)
    n0 = tile * BLOCK_N
    n_last = tl.minimum(n0 + BLOCK_N, seqlen_k) - 1
    n = n0 + tl.arange(0, BLOCK_N)

    begin, end = tiles.row_intervals(mask, b, n, seqlen_k, seqlen_q, band_lo, band_hi)
    m_begin, m_end = tiles.tile_columns(mask, begin, end, n0, n_last, seqlen_q, band_lo, band_hi)

    unit = softmax_scale * tiles.LOG2E if FOLD_SCALE else tiles.LOG2E
    real = (n < seqlen_k) & (begin < end)  # the other keys may hold NaN
    k_tile = tiles.load_rows(k, b, h_k, n0, real, BLOCK_N, HEAD_DIM_K, BLOCK_DK)
    v_tile = tiles.load_rows(v, b, h_k, n0, real, BLOCK_N, HEAD_DIM_V, BLOCK_DV)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_DK], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    for g in range(group):
        h = h_k * group + g
        row0 = (b * num_heads + h) * seqlen_q
        first, num_left, num_partial, num_visited = tiles.plan_tiles(
            mask, b, h, num_heads, tile, m_begin, m_end, n_last, seqlen_k, seqlen_q, band_lo, band_hi, BLOCK_N, BLOCK_M
        )
        for FULL in tl.static_range(2):
            for i in range(num_partial if FULL else 0, num_visited if FULL else num_partial):
                m0 = BLOCK_M * tiles.tile_at(mask, i, first, num_left, num_partial, num_visited, FULL)
                m = m0 + tl.arange(0, BLOCK_M)
                if FULL:
                    inside = None
                    lse = tl.load(lse_ptr + row0 + m)
                    delta = tl.load(delta_ptr + row0 + m)
                else:
                    inside = tiles.readable_columns(mask, b, m0, m_begin, m_end, seqlen_q, BLOCK_M)
                    lse = tl.load(lse_ptr + row0 + m, mask=m < seqlen_q, other=float("-inf"))
                    delta = tl.load(delta_ptr + row0 + m, mask=m < seqlen_q, other=0.0)
                q_tile = tiles.load_rows(q, b, h, m0, inside, BLOCK_M, HEAD_DIM_K, BLOCK_DK)
                dout_tile = tiles.load_rows(dout, b, h, m0, inside, BLOCK_M, HEAD_DIM_V, BLOCK_DV)
                scores = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
                if not FOLD_SCALE:
                    scores *= softmax_scale
                if softcap is not None:
                    scores, slope = cap(scores, softcap)
                if bias is not None:
                    scores += tiles.load_bias(bias, b, h, m[None, :], n[:, None], seqlen_q, seqlen_k, RELATIVE_BIAS)
                p = tiles.exponential(scores, tiles.exponent_shift(lse, FOLD_SCALE)[None, :], unit, FOLD_SCALE)
                if not FULL:
                    keep = tiles.visible_elements(
                        mask, b, h, num_heads, begin, end, inside, n, m0, seqlen_k, seqlen_q, BLOCK_M
                    )
                    p = tl.where(keep, p, 0.0)
                dp = tl.dot(v_tile, tl.trans(dout_tile), input_precision=PRECISION)
                z = p
                if dropout is not None:
                    kept = dropout_keep_in_product(dropout.rng_state, dropout.threshold, row0 + m, n0, BLOCK_N)
                    kept = tl.trans(kept)
                    z = tl.where(kept, p * dropout.scale, 0.0)
                    dp = tl.where(kept, dp * dropout.scale, 0.0)
                dv_acc = tl.dot(z.to(dout_tile.dtype), dout_tile, dv_acc, input_precision=PRECISION)
                ds = p * (dp - delta[None, :])
                if softcap is not None:
                    ds *= slope
                dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc, input_precision=PRECISION)

    tiles.store_rows(dk, b, h_k, n0, n < seqlen_k, dk_acc * softmax_scale, BLOCK_N, HEAD_DIM_K, BLOCK_DK)
    tiles.store_rows(dv, b, h_k, n0, n < seqlen_k, dv_acc, BLOCK_N, HEAD_DIM_V, BLOCK_DV)


_DQ = Launches(attention_dq_kernel, *[StridedTensor] * 6, *[Tensor] * 3, Matrix, Mask, Dropout)
_DKV = Launches(attention_dkv_kernel, *[StridedTensor] * 6, *[Tensor] * 2, Matrix, Mask, Dropout)


def attention_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    call: AttentionCall,
    out: Tensor,
    lse: Tensor,
    needs_dbias: bool,
    grads: tuple[Tensor, Tensor, Tensor] | None = None,
    bound: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dout as out (B, H, Lq, Dv), any strides; dlse (B, H, Lq) float32 or None; out, lse: from the forward. The masks'
    layouts have the tiles. grads: memory for dq, dk, dv whose last dimension is contiguous; without it they are
    allocated in the inputs' memory order. Returns dq, dk, dv, and dbias, as bias, if needed. bound: gets the launches
    as "dq" and "dkv", or "short", as in attention_fwd."""
    dout = dout if dout.stride(3) == 1 else dout.contiguous()
    out = out if out.stride(3) == 1 else out.contiguous()
    lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
    if grads is None:
        dq, dk, dv = [arguments.empty_like(t, t.shape[3]) for t in call[:3]]
        grads = dq, dk, dv
    if len(call.masks) == 1:
        delta = torch.empty_like(lse) if needs_dbias else None
        short_backward(dout, dlse, call, lse, delta, grads, bound)
    else:
        delta = _by_tiles(dout, dlse, call, out, lse, grads, bound)
    dbias = None
    if needs_dbias:
        relative = call.bias.dim() == 2
        dbias = (relative_bias_gradient if relative else bias_gradient)(dout, dlse, call, lse, delta)
    return *grads, dbias


def _by_tiles(
    dout: Tensor, dlse: Tensor | None, call: AttentionCall, out: Tensor, lse: Tensor, grads: Any, bound: Any
) -> Tensor:
    """Writes grads, in two launches. Returns delta."""
    q, k, v, (dq, dk, dv), (by_query, by_key) = *call[:3], grads, call.masks
    (B, H, Lq, _), (_, Hk, Lk, _) = q.shape, v.shape
    (*heads, out_at, dout_at, dq_at, dk_at, dv_at), strides = arguments.strided(q, k, v, out, dout, dq, dk, dv)
    delta = torch.empty_like(lse)
    (lse_at, dlse_at, delta_at), alignment = addresses(lse, dlse, delta)
    made = arguments.problem(call)
    can_bind = bound is not None and dlse is None and strides is True and alignment is True

    if lse.numel() > 0:
        strided, tile = (*heads, out_at, dout_at, dq_at), by_query.layout.launch
        key, programs = (strides, alignment, dlse is None), B * H * -(-Lq // tile[0])
        bind = (bound, "dq", strided) if can_bind else None
        given, tensors = (*strided, lse_at, dlse_at, delta_at), (q, k, v, out, dout, dq, lse, dlse, delta)
        arguments.run(_DQ, call, made, by_query, tile, programs, key, given, tensors, bind)
    if B * Hk * Lk > 0:
        strided, tile = (*heads, dout_at, dk_at, dv_at), by_key.layout.launch
        key, programs = (strides, alignment, specialization(Lq)), B * Hk * -(-Lk // tile[1])
        bind = (bound, "dkv", strided) if can_bind else None
        given, tensors = (*strided, lse_at, delta_at), (q, k, v, dout, dk, dv, lse, delta)
        arguments.run(_DKV, call, made, by_key, tile, programs, key, given, tensors, bind)
    return delta
