"""The attention weights on request, from q, k and the forward's lse:

    weights = keep / (1 - dropout_p) * exp(S - lse)

For looking at, not for training: the only kernel here that may write something as large as the scores. It writes the
weights that the forward multiplied with v, rounded to q's dtype.
Grid: one program per (batch, head, BLOCK_M queries, BLOCK_N keys). Bytes: the weights once, and q and k once a tile of
the other, from L2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.masks import PreparedMask

from ..common.launch import Launches, gpu_arch, specialization
from ..common.philox import dropout_keep_in_product
from ..common.softcap import cap
from . import arguments
from . import masked_tiles as tiles
from .arguments import Dropout, Mask, Matrix, StridedTensor
from .tile_sizes import config


@triton.jit(do_not_specialize=arguments.DO_NOT_SPECIALIZE)
def attention_weights_kernel(
    # StridedTensors q, k; lse (B, H, Lq) float32, contiguous; weights a Matrix.
    q, k, lse_ptr, weights, bias, mask, dropout,
    num_heads, group, seqlen_q, seqlen_k, band_lo, band_hi, softmax_scale, softcap,
    HEAD_DIM_K: tl.constexpr, BLOCK_DK: tl.constexpr, FOLD_SCALE: tl.constexpr, RELATIVE_BIAS: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    key_tiles = tl.cdiv(seqlen_k, BLOCK_N)
    tile, b, h = tiles.program_coords(tl.cdiv(seqlen_q, BLOCK_M) * key_tiles, num_heads)
    m0, n0 = tile // key_tiles * BLOCK_M, tile % key_tiles * BLOCK_N
    m_last = tl.minimum(m0 + BLOCK_M, seqlen_q) - 1
    m, n = m0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N)
    begin, end = tiles.row_intervals(mask, b, m, seqlen_q, seqlen_k, band_lo, band_hi)
    n_begin, n_end = tiles.tile_columns(mask, begin, end, m0, m_last, seqlen_k, band_lo, band_hi)
    inside = tiles.readable_columns(mask, b, n0, n_begin, n_end, seqlen_k, BLOCK_N)
    unit = softmax_scale * tiles.LOG2E if FOLD_SCALE else tiles.LOG2E

    row = (b * num_heads + h) * seqlen_q + m
    lse = tl.load(lse_ptr + row, mask=m < seqlen_q, other=float("-inf"))
    q_tile = tiles.load_rows(q, b, h, m0, m < seqlen_q, BLOCK_M, HEAD_DIM_K, BLOCK_DK)
    k_tile = tiles.load_rows(k, b, h // group, n0, inside, BLOCK_N, HEAD_DIM_K, BLOCK_DK)
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
    if not FOLD_SCALE:
        scores *= softmax_scale
    if softcap is not None:
        scores, slope = cap(scores, softcap)
    if bias is not None:
        scores += tiles.load_bias(bias, b, h, m[:, None], n[None, :], seqlen_q, seqlen_k, RELATIVE_BIAS)
    keep = tiles.visible_elements(mask, b, h, num_heads, begin, end, inside, m, n0, seqlen_q, seqlen_k, BLOCK_N)
    p = tiles.exponential(scores, tiles.exponent_shift(lse, FOLD_SCALE)[:, None], unit, FOLD_SCALE)
    p = tl.where(keep, p, 0.0)
    if dropout is not None:
        kept = dropout_keep_in_product(dropout.rng_state, dropout.threshold, row, n0, BLOCK_N)
        p = tl.where(kept, p * dropout.scale, 0.0)
    ptrs = weights.ptr + b * weights.stride_b + h * weights.stride_h
    ptrs += m.to(tl.int64)[:, None] * weights.stride_m + n[None, :]
    tl.store(ptrs, p.to(weights.ptr.dtype.element_ty), mask=(m < seqlen_q)[:, None] & (n < weights.columns)[None, :])


_LAUNCHES = Launches(attention_weights_kernel, *[StridedTensor] * 2, Tensor, *[Matrix] * 2, Mask, Dropout)


def attention_weights(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    mask: PreparedMask,
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
    softcap: float | None = None,
) -> Tensor:
    """q (B, H, Lq, Dk), k (B, Hk, Lk, Dk), lse (B, H, Lq) of the forward -> weights after dropout, (B, H, Lq, Lk), in
    q's dtype. mask: in Layout()."""
    (B, H, Lq, Dk), Lk = q.shape, k.shape[2]
    weights = torch.empty(B, H, Lq, Lk, dtype=q.dtype, device=q.device)
    tile = config("weights", gpu_arch(q), q.dtype, Dk, Lq)
    programs = B * H * triton.cdiv(Lq, tile.BLOCK_M) * triton.cdiv(Lk, tile.BLOCK_N)
    if programs > 0:
        lse = lse.contiguous()
        strided, strides = arguments.strided(q, k)
        result, result_key = arguments.matrix(weights, Lk)
        masking, mask_tensors, mask_key = arguments.masking(mask)
        biased, dropout, sizes, problem = arguments.problem(q, k, bias, softmax_scale, softcap, dropout_p, rng_state)
        key = problem, strides, specialization(lse.data_ptr()), mask_key, result_key, tile
        launch = _LAUNCHES.get(key)
        if launch is None:
            launch = _LAUNCHES.add(key, **arguments.constants(q, bias, softmax_scale, softcap), **tile._asdict())
        given = (
            *strided,
            lse.data_ptr(),
            result,
            biased,
            masking,
            dropout,
            *sizes,
            *mask[:2],
            float(softmax_scale),
            softcap,
        )
        tensors = q, k, lse, weights, bias, *mask_tensors, rng_state
        launch.run(problem[0], programs, given, tensors)
    return weights
