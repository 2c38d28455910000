"""Backward of the feed-forward network.          Specification: fastattn/backends/reference/feed_forward.py

    dh = dropout(dout weight2);    dz = dh * act'(z), gated: (dh * up * act'(gate), dh * act(gate))
    dx = dz weight1;    dweight1 = dz^T x;    dbias1 = column sums of dz;    dweight2 = dout^T h;    dbias2 = of dout

Grid: one program for a tile of dh, in the grouped order of matmul.py. Dropout (Philox once more) and act' happen on the
tile in registers, one half after the other, and dz is what is written; relu needs only the sign of h, so neither z
nor Philox. The others also write h again, for dweight2: one write here saves holding h from forward to backward.
Each program adds the columns of its dz in float32, before rounding, into one row of `partial`; their sum over the row
tiles has one order, so equal inputs give equal bits. The three plain products are cuBLAS's. Offline at sm_90, bfloat16,
no spills but for the gated forms with dropout, 16 to 28 outside the loop; the tiles that were dropped: matmul.py.

Floor, n tokens, hidden f, width d: 8 n d f FLOP (gated 12); beyond what the products read and write, relu reads h once,
the others read z and write h. `partial` is one float a column for 128 rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.backends.calls import FeedForwardCall

from ..common.launch import LIMIT, Launches, addresses, dot_precision, gpu_arch
from ..common.philox import dropout_constants, dropout_keep_in_product
from .activations import GATED_FORMS, activate_and_slope
from .matmul import FEW_TOKENS, GROUP_M, grouped_tile, halves, multiply, tile_for


@triton.jit(do_not_specialize=["tokens", "threshold"])
def feed_forward_bwd_kernel(
    dout, weight2, saved, dz, h, partial, rng_state,
    tokens, depth, d_inner, stride_wk, stride_wn, threshold, scale,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    m, n = grouped_tile(tl.program_id(0), tl.cdiv(tokens, BLOCK_M), tl.cdiv(d_inner, BLOCK_N), GROUP_M)
    row = m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    in_rows, in_cols = (row < tokens)[:, None], (col < d_inner)[None, :]

    a = dout + row[:, None] * depth + inner[None, :]
    b = weight2 + col.to(tl.int64)[None, :] * stride_wn + inner.to(tl.int64)[:, None] * stride_wk
    dhidden, _ = multiply(
        a, b, b, in_rows, in_cols, 1, stride_wk, depth, BLOCK_M, BLOCK_N, BLOCK_K, False, EVEN_K, PRECISION
    )

    dhiddens = halves(dhidden)
    z_width = 2 * d_inner if GATED else d_inner
    for half in tl.static_range(2):
        first_col = n * BLOCK_N + half * (BLOCK_N // 2)
        col = first_col + tl.arange(0, BLOCK_N // 2)
        inside = in_rows & (col < d_inner)[None, :]
        place = row[:, None] * d_inner + col[None, :]
        z_place = row[:, None] * z_width + col[None, :]
        grad = dhiddens[half]
        gate = tl.load(saved + z_place, mask=inside, other=0.0).to(tl.float32)
        if ACTIVATION == "relu" and not GATED:  # saved is h: positive where relu and dropout both let through
            grad = tl.where(gate <= 0, 0.0, grad * scale)  # NaN passes
        else:
            value, slope = activate_and_slope(gate, ACTIVATION)
            hidden = value
            if GATED:
                up = tl.load(saved + d_inner + z_place, mask=inside, other=0.0).to(tl.float32)
                hidden = value * up
                slope *= up
            if HAS_DROPOUT:
                keep = dropout_keep_in_product(rng_state, threshold, row, first_col, BLOCK_N // 2)
                hidden = tl.where(keep, hidden * scale, 0.0)
                grad = tl.where(keep, grad * scale, 0.0)
            tl.store(h + place, hidden.to(h.dtype.element_ty), mask=inside)
            if GATED:
                dup = grad * value
                tl.store(dz + d_inner + z_place, dup.to(dz.dtype.element_ty), mask=inside)
                if HAS_BIAS:
                    tl.store(
                        partial + m.to(tl.int64) * z_width + d_inner + col, tl.sum(dup, axis=0), mask=col < d_inner
                    )
            grad *= slope
        tl.store(dz + z_place, grad.to(dz.dtype.element_ty), mask=inside)
        if HAS_BIAS:
            tl.store(partial + m.to(tl.int64) * z_width + col, tl.sum(grad, axis=0), mask=col < d_inner)


_LAUNCHES = Launches(feed_forward_bwd_kernel, *[Tensor] * 7)


def feed_forward_dz(dout: Tensor, call: FeedForwardCall, z: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """dout: (tokens, d_out) contiguous; z: from feed_forward_fwd, with relu it is h.

    Returns dz, the gradient of x weight1^T + bias1; h, which weight2 multiplies; and dbias1 in float32, or None.
    """
    x, _, bias1, weight2, _, rng_state, activation, dropout_p = call
    (tokens, d_out), d_inner = dout.shape, weight2.shape[1]
    h = z if activation == "relu" else x.new_empty(tokens, d_inner)
    dz = torch.empty_like(z)
    (*found, rng_place), alignment = addresses(dout, weight2, z, rng_state)
    device, strides, precision = x.get_device(), weight2.stride(), dot_precision(x.dtype)
    key = (
        *(device, x.dtype, dout.dtype, weight2.dtype, bias1 is None, alignment),
        *(rng_state is None, dropout_p > 0, tokens < LIMIT, tokens <= FEW_TOKENS, d_out, d_inner, *strides),
        *(activation, precision),
    )
    launch = _LAUNCHES.get(key)
    if launch is None:
        tile = tile_for(x.dtype, gpu_arch(x), tokens, wide=activation == "relu")
        constants = {"ACTIVATION": GATED_FORMS.get(activation, activation), "GATED": activation in GATED_FORMS}
        constants |= {"HAS_BIAS": bias1 is not None, "HAS_DROPOUT": dropout_p > 0, "GROUP_M": GROUP_M}
        constants |= {"EVEN_K": d_out % tile.BLOCK_K == 0, "PRECISION": precision} | tile._asdict()
        launch = _LAUNCHES.add(key, (tile.BLOCK_M, triton.cdiv(d_inner, tile.BLOCK_N)), **constants)
    block_m, n_tiles = launch.tile
    m_tiles = -(-tokens // block_m)
    partial = x.new_empty(0 if bias1 is None else m_tiles, dz.shape[1], dtype=torch.float32)
    if h.numel() > 0:
        results = dz, h, partial
        sizes = tokens, d_out, d_inner, *strides
        arguments = *found, *addresses(*results)[0], rng_place, *sizes, *dropout_constants(dropout_p)
        launch.run(device, m_tiles * n_tiles, arguments, (dout, weight2, z, *results, rng_state))
    return dz, h, None if bias1 is None else partial.sum(0)
