"""The attention weights on request, of chosen heads or their mean, from q, k and the forward's lse:

    weights = keep / (1 - dropout_p) * exp(S - lse)

For looking at, not for training: the only kernel here that may write something as large as the scores. What it writes
of a head is what the forward multiplied with v, rounded to q's dtype; a mean is summed in float32 and rounded once.
Grid: one program per (batch, head, BLOCK_M queries, BLOCK_N keys), or, of the mean, one for all heads of a tile, which
meet in its registers. Bytes: the weights once, and q and k once a tile of the other, from L2.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.masks import AttentionMask

from ..common.launch import current_arch, on_device
from ..common.philox import dropout_keep
from . import arguments
from .alignment import alignment
from .config import config
from .rows import row_statistics
from .tiles import LOG2E, exponential, keep_elements, key_interval, load_bias, load_rows, program_place


@triton.jit(do_not_specialize=["first_head", "head_step"])
def attention_weights_kernel(
    # weights (B, num_places, Lq, Lk), its matrices contiguous; place i holds head first_head + i * head_step.
    # MEAN: (B, Lq, Lk), the mean over all heads.
    q_ptr, k_ptr, lse_ptr, remainder_ptr, weights_ptr,
    weights_stride_b, first_head, head_step, num_places,
    q_stride_b, q_stride_h, q_stride_m,
    k_stride_b, k_stride_h, k_stride_n,
    num_heads, group, seqlen_q, seqlen_k, softmax_scale,
    band_lo, band_hi,
    k_start_ptr, k_end_ptr, interval_stride_b,
    seen_ptr, seen_stride_b, seen_stride_h,
    attn_mask_ptr, attn_mask_stride_b, attn_mask_stride_h, attn_mask_stride_m, attn_mask_stride_n,
    bias_ptr, bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n,
    rng_state_ptr, dropout_threshold, dropout_scale,
    HEAD_DIM_K: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    FOLD_SCALE: tl.constexpr, LISTS: tl.constexpr, HAS_ATTN_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_REMAINDER: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    MEAN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    key_tiles = tl.cdiv(seqlen_k, BLOCK_N)
    tile, b, place = program_place(tl.cdiv(seqlen_q, BLOCK_M) * key_tiles, num_places)
    m0, n0 = tile // key_tiles * BLOCK_M, tile % key_tiles * BLOCK_N
    m, n = m0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N)
    real = n < seqlen_k
    if LISTS:
        k_start_ptr += b * interval_stride_b
        k_end_ptr += b * interval_stride_b
    start, end = key_interval(m[:, None], seqlen_q, seqlen_k, band_lo, band_hi, k_start_ptr, k_end_ptr, LISTS)
    unit = softmax_scale * LOG2E if FOLD_SCALE else LOG2E

    weights = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i in range(num_heads if MEAN else 1):
        h = place * 0 + i if MEAN else first_head + place * head_step
        row = (b * num_heads + h) * seqlen_q + m
        shift = tl.load(lse_ptr + row, mask=m < seqlen_q, other=0.0)
        if FOLD_SCALE:
            shift *= LOG2E
        remainder = 0.0
        if HAS_REMAINDER:
            remainder = tl.load(remainder_ptr + row, mask=m < seqlen_q, other=0.0)[:, None]
        seen = real
        if LISTS or HAS_BIAS:
            seen = tl.load(seen_ptr + b * seen_stride_b + h * seen_stride_h + n, mask=real, other=0) != 0
        q_of_head = q_ptr + b * q_stride_b + h * q_stride_h
        k_of_head = k_ptr + b * k_stride_b + h // group * k_stride_h
        q = load_rows(q_of_head, m0, q_stride_m, m < seqlen_q, BLOCK_M, HEAD_DIM_K, BLOCK_DK)
        k = load_rows(k_of_head, n0, k_stride_n, seen, BLOCK_N, HEAD_DIM_K, BLOCK_DK)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if not FOLD_SCALE:
            scores *= softmax_scale
        mask_of_head = attn_mask_ptr
        if HAS_ATTN_MASK:
            mask_of_head += b * attn_mask_stride_b + h * attn_mask_stride_h
        keep = seen[None, :] & keep_elements(
            m[:, None], n[None, :], start, end, seqlen_q, seqlen_k,
            mask_of_head, attn_mask_stride_m, attn_mask_stride_n, HAS_ATTN_MASK,
        )  # fmt: skip
        if HAS_BIAS:
            bias_of_head = bias_ptr + b * bias_stride_b + h * bias_stride_h
            bias = load_bias(m[:, None], n[None, :], seqlen_q, seqlen_k, bias_of_head, bias_stride_m, bias_stride_n)
            scores += bias
            keep = keep & (bias != float("-inf"))
        p = tl.where(keep, exponential(scores, shift[:, None], remainder, unit, FOLD_SCALE), 0.0)
        if HAS_DROPOUT:
            kept = dropout_keep(rng_state_ptr, dropout_threshold, row, n0, BLOCK_N)
            p = tl.where(kept, p * dropout_scale, 0.0)
        weights += p
    if MEAN:
        weights /= num_heads
    ptrs = weights_ptr + b * weights_stride_b + (place * seqlen_q + m[:, None]) * seqlen_k + n[None, :]
    tl.store(ptrs, weights.to(weights_ptr.dtype.element_ty), mask=(m < seqlen_q)[:, None] & real[None, :])


def attention_weights(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    mask: AttentionMask | None,
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
    wanted: tuple[range, ...] | Literal["mean", "argmax"],
) -> Tensor:
    """q (B, H, Lq, Dk), k (B, Hk, Lk, Dk), lse (B, H, Lq) of the forward -> weights after dropout, (B, heads, Lq, Lk)
    of the heads in the ranges, or (B, Lq, Lk), their mean; or int64 (B, H, Lq), the key of the largest weight."""
    if wanted == "argmax":
        return alignment(q, k, mask, softmax_scale)
    (B, _, Lq, Dk), Lk, mean = q.shape, k.shape[2], wanted == "mean"
    weights = torch.empty(B, *([] if mean else [sum(map(len, wanted))]), Lq, Lk, dtype=q.dtype, device=q.device)
    if weights.numel() == 0:
        return weights
    with on_device(q):
        c = config("weights", current_arch(), q.dtype, Dk, Lq)
        inputs = {
            "q_ptr": q, "k_ptr": k, "lse_ptr": lse.contiguous(),
            **arguments.strides("m", q=q), **arguments.strides("n", k=k),
        }  # fmt: skip
        shared = {
            **arguments.problem(q, k, k, softmax_scale),
            **arguments.visibility(q, k, mask, softmax_scale),
            **arguments.dropout(dropout_p, rng_state),
        }
        rows = row_statistics(inputs, shared)
        tiles, place = triton.cdiv(Lq, c.BLOCK_M) * triton.cdiv(Lk, c.BLOCK_N), 0
        for heads in (range(1),) if mean else wanted:
            attention_weights_kernel[(B * len(heads) * tiles,)](
                weights_ptr=weights if mean else weights[:, place:], weights_stride_b=weights.stride(0),
                first_head=heads.start, head_step=heads.step, num_places=len(heads), MEAN=mean,
                remainder_ptr=rows.remainder, HAS_REMAINDER=rows.remainder is not None,
                **inputs, **shared, **c._asdict(),
            )  # fmt: skip
            place += len(heads)
    return weights
