"""The attention weights on request, from q, k and the forward's lse: weights = keep / (1 - dropout_p) * exp(S - lse).

For looking at, not for training: the only kernel here that writes something as large as the scores. What it writes is
what the forward multiplied with v, rounded to q's dtype.
Grid: one program per (batch, head, BLOCK_M queries), along all keys; bytes: the weights once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.masks import AttentionMask

from ..common.launch import current_arch, on_device
from ..common.philox import dropout_keep
from . import arguments
from .config import config
from .rows import row_statistics
from .tiles import LOG2E, exponential, keep_elements, key_interval, load_bias, load_rows, program_place


@triton.jit
def attention_weights_kernel(
    # weights (B, H, Lq, Lk) contiguous.
    q_ptr, k_ptr, lse_ptr, remainder_ptr, weights_ptr,
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
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile, b, h = program_place(tl.cdiv(seqlen_q, BLOCK_M), num_heads)
    m0 = tile * BLOCK_M
    m = m0 + tl.arange(0, BLOCK_M)
    row = (b * num_heads + h) * seqlen_q + m
    q_ptr += b * q_stride_b + h * q_stride_h
    k_ptr += b * k_stride_b + h // group * k_stride_h
    if LISTS:
        k_start_ptr += b * interval_stride_b
        k_end_ptr += b * interval_stride_b
    if LISTS or HAS_BIAS:
        seen_ptr += b * seen_stride_b + h * seen_stride_h
    if HAS_ATTN_MASK:
        attn_mask_ptr += b * attn_mask_stride_b + h * attn_mask_stride_h
    if HAS_BIAS:
        bias_ptr += b * bias_stride_b + h * bias_stride_h

    unit = softmax_scale * LOG2E if FOLD_SCALE else LOG2E
    shift = tl.load(lse_ptr + row, mask=m < seqlen_q, other=0.0)
    if FOLD_SCALE:
        shift *= LOG2E
    remainder = 0.0
    if HAS_REMAINDER:
        remainder = tl.load(remainder_ptr + row, mask=m < seqlen_q, other=0.0)[:, None]
    start, end = key_interval(m[:, None], seqlen_q, seqlen_k, band_lo, band_hi, k_start_ptr, k_end_ptr, LISTS)
    q = load_rows(q_ptr, m0, q_stride_m, m < seqlen_q, BLOCK_M, HEAD_DIM_K, BLOCK_DK)

    for n0 in range(0, seqlen_k, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        seen = n < seqlen_k
        if LISTS or HAS_BIAS:
            seen = tl.load(seen_ptr + n, mask=seen, other=0) != 0
        k = load_rows(k_ptr, n0, k_stride_n, seen, BLOCK_N, HEAD_DIM_K, BLOCK_DK)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if not FOLD_SCALE:
            scores *= softmax_scale
        keep = seen[None, :] & keep_elements(
            m[:, None], n[None, :], start, end, seqlen_q, seqlen_k,
            attn_mask_ptr, attn_mask_stride_m, attn_mask_stride_n, HAS_ATTN_MASK,
        )  # fmt: skip
        if HAS_BIAS:
            bias = load_bias(m[:, None], n[None, :], seqlen_q, seqlen_k, bias_ptr, bias_stride_m, bias_stride_n)
            scores += bias
            keep = keep & (bias != float("-inf"))
        p = tl.where(keep, exponential(scores, shift[:, None], remainder, unit, FOLD_SCALE), 0.0)
        if HAS_DROPOUT:
            kept = dropout_keep(rng_state_ptr, dropout_threshold, row, n0, BLOCK_N)
            p = tl.where(kept, p * dropout_scale, 0.0)
        ptrs = weights_ptr + row[:, None] * seqlen_k + n[None, :]
        tl.store(ptrs, p.to(weights_ptr.dtype.element_ty), mask=(m < seqlen_q)[:, None] & (n < seqlen_k)[None, :])


def attention_weights(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    mask: AttentionMask | None,
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
) -> Tensor:
    """q (B, H, Lq, Dk), k (B, Hk, Lk, Dk), lse (B, H, Lq) of the forward -> weights (B, H, Lq, Lk) after dropout."""
    B, H, Lq, Dk = q.shape
    weights = torch.empty(B, H, Lq, k.shape[2], dtype=q.dtype, device=q.device)
    with on_device(q):
        c = config("weights", current_arch(), q.dtype, Dk, Lq)
        if weights.numel() > 0:
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
            attention_weights_kernel[(B * H * triton.cdiv(Lq, c.BLOCK_M),)](
                weights_ptr=weights, remainder_ptr=rows.remainder, HAS_REMAINDER=rows.remainder is not None,
                **inputs, **shared, **c._asdict(),
            )  # fmt: skip
    return weights
