"""Backward of embedding + positions + dropout + LayerNorm.

Specification: fastattn/backends/reference/embed_layer_norm.py

    normal = (z - mean) * rstd;    g = dout * weight
    drow = dropout((g - mean(g) - normal * mean(g * normal)) * rstd) * scale        means along the row
    dweight = sum over rows of dout * normal;    dbias = sum over rows of dout

and drow[i] is what row i adds to the gradient of embedding[tokens[i]]; the public op adds the rows up, by PyTorch's
operator in its deterministic mode, which sorts the tokens: equal inputs give equal bits.

Grid, registers and the weight gradients: as in add_layer_norm/backward.py. z is gathered from embedding and positions
again, dropout included.
Floor: read dout and an embedding's row, write drow: 10 bytes an element with a float32 embedding and a 16-bit dout.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import norm
from ..common.launch import LIMIT, Launches, addresses
from ..common.philox import dropout_constants, dropout_keep
from .forward import embedded


@triton.jit(do_not_specialize=["rows", "length", "threshold"])
def embed_layer_norm_bwd_kernel(
    dout, tokens, embedding, table, position, weight, statistics,
    drows, index, partial, dweight, dbias, rng_state,
    rows, hidden, width, n_vocab, n_position, length, scale, threshold, keep_scale,
    HAS_POSITION: tl.constexpr, HAS_DROPOUT: tl.constexpr, FINISH: tl.constexpr, SPAN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, BLOCK_N)
    in_row = col < hidden
    gain = tl.load(weight + col, mask=in_row, other=0.0).to(tl.float32)
    dgain = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    dshift = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)

    for turn in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        row = turn * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        inside = (row < rows)[:, None] & in_row[None, :]
        place = row[:, None] * hidden + col[None, :]
        center, inverse = norm.load_statistics(statistics, row, rows)
        grad = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
        normal, token = embedded(
            tokens, embedding, table, position, row, rows, col, hidden, n_vocab, n_position, length, scale, HAS_POSITION
        )
        if HAS_DROPOUT:
            factor = tl.where(dropout_keep(rng_state, threshold, row, 0, BLOCK_N), keep_scale, 0.0)
            normal *= factor
        normal = tl.where(inside, (normal - center[:, None]) * inverse[:, None], 0.0)

        dgain += grad * normal
        dshift += grad
        dot_mean, grad_mean = norm.gradient_means(grad, normal, gain, hidden, False)
        grad = norm.norm_gradient(grad, normal, gain, inverse, dot_mean, grad_mean) * scale
        if HAS_DROPOUT:
            grad *= factor
        tl.store(drows + place, grad.to(drows.dtype.element_ty), mask=inside)
        tl.store(index + row, token, mask=row < rows)

    norm.store_partial(partial, 0, dgain, col, width, hidden)
    norm.store_partial(partial, hidden, dshift, col, width, hidden)
    if FINISH:
        COLS: tl.constexpr = 512 if BLOCK_N > 512 else BLOCK_N  # as in add_layer_norm/backward.py
        norm.finish_sums(partial, statistics, rows, dweight, dbias, None, width, hidden, False, False, SPAN, COLS)


_LAUNCHES = Launches(embed_layer_norm_bwd_kernel, *[Tensor] * 13)


def embed_layer_norm_bwd(
    dout: Tensor,
    embedding: Tensor,
    weight: Tensor,
    bias: Tensor,
    tokens: Tensor,
    position_table: Tensor,
    position: Tensor | None,
    length: int,
    scale: float,
    statistics: Tensor,
    dropout_p: float,
    rng_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dout (rows, d) contiguous. Returns drows (rows, d) in embedding's dtype, index, dweight, dbias.

    index (rows,) int64: tokens, with 0 for those out of range, whose drow is NaN.
    """
    rows, hidden = dout.shape
    drows = torch.empty((rows, hidden), dtype=embedding.dtype, device=embedding.device)
    index = torch.empty(rows, dtype=torch.int64, device=embedding.device)
    if rows == 0:
        return drows, index, torch.zeros_like(weight), torch.zeros_like(bias)
    inputs = dout, tokens, embedding, position_table, position, weight, statistics
    (*found, rng_place), alignment = addresses(*inputs, rng_state)
    device, has_dropout = embedding.get_device(), dropout_p > 0
    n_vocab, n_position = embedding.shape[0], position_table.shape[0]
    key = (
        *(device, dout.dtype, tokens.dtype, embedding.dtype, position_table.dtype),
        *(None if position is None else position.dtype, weight.dtype, bias.dtype, alignment, rng_state is None),
        *(rows < LIMIT, length < LIMIT, hidden, n_vocab, n_position, has_dropout),
    )
    launch = _LAUNCHES.get(key)
    if launch is None:
        block_m, block_n, num_warps, stages = norm.backward_tile(hidden, halved=True)
        constants = {"HAS_POSITION": position is not None, "HAS_DROPOUT": has_dropout, "SPAN": norm.SPAN}
        constants |= {"FINISH": hidden <= norm.FINISH_HIDDEN, "BLOCK_M": block_m, "BLOCK_N": block_n}
        launch = _LAUNCHES.add(key, block_m, **constants, STAGES=stages, num_warps=num_warps)
    programs, width, sums = norm.empty_sums(drows, launch.tile, weight, bias)
    results = drows, index, *sums[:3]
    sizes = rows, hidden, width, n_vocab, n_position, length
    arguments = *found, *addresses(*results)[0], rng_place, *sizes, float(scale), *dropout_constants(dropout_p)
    launch.run(device, programs, arguments, (*inputs, *results, rng_state))
    if hidden > norm.FINISH_HIDDEN:
        norm.add_sums(device, programs, width, hidden, *sums)
    return drows, index, *sums[1:3]
