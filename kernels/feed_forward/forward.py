"""Forward of the feed-forward network.          Specification: fastattn/backends/reference/feed_forward.py

    z = x weight1^T + bias1;    h = dropout(act(z)), gated: dropout(act(gate) * up);    out = h weight2^T + bias2

Grid: one program for a tile of h, in the grouped order of matmul.py. Bias, activation and dropout happen on the tile in
registers (float32, BLOCK_M * BLOCK_N / 256 values a thread), one half after the other: as a whole the tile and the
activation's temporaries do not fit (gelu at 128 x 256: 84 spills whole, none in halves). A gated program multiplies its
rows of x with the gate's and with the value's columns, so that both halves of z meet in registers.
The second product has nothing to fuse and is cuBLAS's.

Saved for the backward: with relu only h, which is positive exactly where z is positive and dropout keeps it. With the
other activations z, rounded, from which act, act' and h are computed again. No dropout mask exists in memory.

Floor, n tokens, hidden f, width d: 4 n d f FLOP (gated 6); the fused tile adds to cuBLAS's traffic nothing for relu and
one write of z for the others, where separate operators read and write h twice more and store a mask.
"""

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fastattn.backends.calls import FeedForwardCall

from ..common.launch import LIMIT, Launches, addresses, dot_precision, gpu_arch
from ..common.philox import dropout_constants, dropout_keep_in_product
from .activations import GATED_FORMS, activate
from .matmul import FEW_TOKENS, GROUP_M, grouped_tile, halves, multiply, tile_for


@triton.jit(do_not_specialize=["tokens", "threshold"])
def feed_forward_fwd_kernel(
    x, weight1, bias1, z, h, rng_state,
    tokens, depth, d_inner, stride_wn, stride_wk, threshold, scale,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, STORE_Z: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    m, n = grouped_tile(tl.program_id(0), tl.cdiv(tokens, BLOCK_M), tl.cdiv(d_inner, BLOCK_N), GROUP_M)
    row = m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    in_rows, in_cols = (row < tokens)[:, None], (col < d_inner)[None, :]

    a = x + row[:, None] * depth + inner[None, :]
    b = weight1 + col.to(tl.int64)[None, :] * stride_wn + inner[:, None] * stride_wk
    b_up = weight1 + (col.to(tl.int64) + d_inner)[None, :] * stride_wn + inner[:, None] * stride_wk
    gate, up = multiply(
        a, b, b_up, in_rows, in_cols, 1, stride_wk, depth, BLOCK_M, BLOCK_N, BLOCK_K, GATED, EVEN_K, PRECISION
    )
    gates = halves(gate)
    ups = halves(up)
    for half in tl.static_range(2):
        col = n * BLOCK_N + half * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        inside = in_rows & (col < d_inner)[None, :]
        place = row[:, None] * d_inner + col[None, :]
        z_place = row[:, None] * (2 * d_inner) + col[None, :] if GATED else place
        gate, up = gates[half], ups[half]
        if HAS_BIAS:
            gate += tl.load(bias1 + col, mask=col < d_inner, other=0.0).to(tl.float32)[None, :]
        if STORE_Z:
            gate = gate.to(z.dtype.element_ty)
            tl.store(z + z_place, gate, mask=inside)
            gate = gate.to(tl.float32)
        value = activate(gate, ACTIVATION)
        if GATED:
            if HAS_BIAS:
                up += tl.load(bias1 + d_inner + col, mask=col < d_inner, other=0.0).to(tl.float32)[None, :]
            up = up.to(z.dtype.element_ty)
            tl.store(z + d_inner + z_place, up, mask=inside)
            value *= up.to(tl.float32)
        if HAS_DROPOUT:
            keep = dropout_keep_in_product(rng_state, threshold, row, n * BLOCK_N + half * (BLOCK_N // 2), BLOCK_N // 2)
            value = tl.where(keep, value * scale, 0.0)
        tl.store(h + place, value.to(h.dtype.element_ty), mask=inside)


_LAUNCHES = Launches(feed_forward_fwd_kernel, *[Tensor] * 6)


def feed_forward_hidden(call: FeedForwardCall) -> tuple[Tensor, Tensor]:
    """h (tokens, d_inner) and what the backward needs: with relu h itself, else z, as wide as weight1."""
    x, weight1, bias1, _, _, rng_state, activation, dropout_p = call
    gated, (tokens, d), width = activation in GATED_FORMS, x.shape, weight1.shape[0]
    d_inner = width // 2 if gated else width
    h = x.new_empty(tokens, d_inner)
    z = h if activation == "relu" else x.new_empty(tokens, width)
    if h.numel() == 0:
        return h, z
    bias1 = None if bias1 is None else bias1.contiguous()
    tensors = x, weight1, bias1, z, h, rng_state
    found, alignment = addresses(*tensors)
    device, strides, precision = x.get_device(), weight1.stride(), dot_precision(x.dtype)
    key = (
        *(device, x.dtype, weight1.dtype, None if bias1 is None else bias1.dtype, alignment),
        *(rng_state is None, dropout_p > 0, tokens < LIMIT, tokens <= FEW_TOKENS, d, d_inner, *strides),
        *(activation, precision),
    )
    launch = _LAUNCHES.get(key)
    if launch is None:
        tile = tile_for(x.dtype, gpu_arch(x), tokens, wide=not gated)
        constants = {"ACTIVATION": GATED_FORMS.get(activation, activation), "GATED": gated, "GROUP_M": GROUP_M}
        constants |= {"HAS_BIAS": bias1 is not None, "HAS_DROPOUT": dropout_p > 0, "STORE_Z": activation != "relu"}
        constants |= {"EVEN_K": d % tile.BLOCK_K == 0, "PRECISION": precision} | tile._asdict()
        launch = _LAUNCHES.add(key, (tile.BLOCK_M, triton.cdiv(d_inner, tile.BLOCK_N)), **constants)
    block_m, n_tiles = launch.tile
    arguments = *found, tokens, d, d_inner, *strides, *dropout_constants(dropout_p)
    launch.run(device, -(-tokens // block_m) * n_tiles, arguments, tensors)
    return h, z


def feed_forward_fwd(call: FeedForwardCall) -> tuple[Tensor, Tensor]:
    """out (tokens, d_out), and the tensor that the backward needs."""
    h, saved = feed_forward_hidden(call)
    return F.linear(h, call.weight2, call.bias2), saved
