"""Which keys somebody sees. A key that no query sees may hold anything, NaN included; the other kernels never load it.

Padded keys are among them, so this one vector also stands for key_padding. It is exact, and no tensor as large as the
scores is made: a program owns BLOCK_N keys of a (batch, head) and walks along the queries until it has seen all of its
real keys seen, after one tile as a rule. Bytes: the mask or bias once at most; nothing where it is cached.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.masks import AttentionMask

from .tiles import keep_elements, key_interval, load_bias, program_place

_BLOCK_M, _BLOCK_N = 64, 128


@triton.jit
def seen_keys_kernel(
    seen_ptr, num_heads, seqlen_q, seqlen_k,
    band_lo, band_hi,
    k_start_ptr, k_end_ptr, interval_stride_b,
    key_padding_ptr, key_padding_stride_b,
    attn_mask_ptr, attn_mask_stride_b, attn_mask_stride_h, attn_mask_stride_m, attn_mask_stride_n,
    bias_ptr, bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n,
    LISTS: tl.constexpr, HAS_KEY_PADDING: tl.constexpr, HAS_ATTN_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """seen (B or 1, H or 1, Lk) bool, contiguous. num_heads: its H or 1."""
    tile, b, h = program_place(tl.cdiv(seqlen_k, BLOCK_N), num_heads)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if LISTS:
        k_start_ptr += b * interval_stride_b
        k_end_ptr += b * interval_stride_b
    if HAS_ATTN_MASK:
        attn_mask_ptr += b * attn_mask_stride_b + h * attn_mask_stride_h
    if HAS_BIAS:
        bias_ptr += b * bias_stride_b + h * bias_stride_h
    real = n < seqlen_k
    if HAS_KEY_PADDING:
        real = real & (tl.load(key_padding_ptr + b * key_padding_stride_b + n, mask=real, other=0) != 0)

    unseen = real.to(tl.int32)
    m0 = tl.maximum(tile * BLOCK_N - band_hi, 0)  # no query before it may see this tile
    while (m0 < seqlen_q) & (tl.max(unseen, axis=0) > 0):
        m = m0 + tl.arange(0, BLOCK_M)
        start, end = key_interval(m[:, None], seqlen_q, seqlen_k, band_lo, band_hi, k_start_ptr, k_end_ptr, LISTS)
        keep = keep_elements(
            m[:, None], n[None, :], start, end, seqlen_q, seqlen_k,
            attn_mask_ptr, attn_mask_stride_m, attn_mask_stride_n, HAS_ATTN_MASK,
        )  # fmt: skip
        if HAS_BIAS:
            bias = load_bias(m[:, None], n[None, :], seqlen_q, seqlen_k, bias_ptr, bias_stride_m, bias_stride_n)
            keep = keep & (bias != float("-inf"))
        unseen = tl.where(tl.max(keep.to(tl.int32), axis=0) > 0, 0, unseen)
        m0 += BLOCK_M
    seen = real & (unseen == 0)
    tl.store(seen_ptr + (b * num_heads + h) * seqlen_k + n, seen, mask=n < seqlen_k)


def seen_keys(mask: AttentionMask, Lq: int, Lk: int, device: torch.device, who: dict[str, Any]) -> Tensor:
    """Bool (B or 1, H or 1, Lk): keys that some query sees. who: the mask as arguments.visibility spells it."""

    def build() -> Tensor:
        per_head = [t for t in (mask.attn_mask, mask.bias) if t is not None]
        per_batch = [t for t in (who["k_start_ptr"], mask.key_padding, *per_head) if t is not None]
        B, H = max(t.shape[0] for t in per_batch), max((t.shape[1] for t in per_head), default=1)
        seen = torch.empty(B, H, Lk, dtype=torch.bool, device=device)
        programs = B * H * triton.cdiv(Lk, _BLOCK_N)
        if programs > 0:
            seen_keys_kernel[(programs,)](
                seen_ptr=seen, num_heads=H, seqlen_q=Lq, seqlen_k=Lk,
                key_padding_ptr=mask.key_padding,
                key_padding_stride_b=0 if mask.key_padding is None or len(mask.key_padding) == 1 else Lk,
                HAS_KEY_PADDING=mask.key_padding is not None,
                BLOCK_M=_BLOCK_M, BLOCK_N=_BLOCK_N, **who,
            )  # fmt: skip
        return seen

    # A bias may be another one at every call.
    return build() if mask.bias is not None else mask.cached(("seen_keys", Lq, Lk, device), build)
