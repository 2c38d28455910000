"""Forward of embedding + positions + dropout + LayerNorm.

Specification: fastattn/backends/reference/embed_layer_norm.py

    z = dropout(embedding[tokens] * scale + position_table[position])
    out = (z - mean) * rstd * weight + bias;    rstd = 1 / sqrt(var + eps)

Grid: one program for BLOCK_M tokens, as in add_layer_norm: rows of z in registers, as float32, 32 values a lane. z is
never stored, and never rounded: the backward gathers it again.

Floor: read an embedding's row, write out. Frequent tokens and positions come from L2. With a float32 embedding and a
16-bit result at most 6 bytes an element; PyTorch's operators, with scale and dropout, move 38.
Dropped: the same in CUDA C++. H200, bf16, forward and backward, ms here / in CUDA: 256x32 tokens, d 512: 0.202/0.198;
256x64: 0.272/0.276, with dropout 0.278/0.288; 64x128, d 1024: 0.294/0.305; slower only at 1,024 tokens: 0.069/0.060.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import LIMIT, Launches, addresses
from ..common.norm import TICKETS, empty_statistics, forward_tile, normalize
from ..common.philox import dropout_constants, dropout_keep


@triton.jit
def embedded(
    tokens, embedding, table, position, row, rows, col, hidden, n_vocab, n_position, length, scale,
    HAS_POSITION: tl.constexpr,
):  # fmt: skip
    """(embedding[token] * scale + table[place], token) of these rows, float32; NaN, 0 where out of range."""
    token = tl.load(tokens + row, mask=row < rows, other=0).to(tl.int64)
    place = tl.load(position + row, mask=row < rows, other=0).to(tl.int64) if HAS_POSITION else row % length
    known = (token >= 0) & (token < n_vocab) & (place >= 0) & (place < n_position)
    inside = (known & (row < rows))[:, None] & (col < hidden)[None, :]
    word = tl.load(embedding + token[:, None] * hidden + col[None, :], mask=inside, other=0.0).to(tl.float32)
    spot = tl.load(table + place[:, None] * hidden + col[None, :], mask=inside, other=0.0).to(tl.float32)
    value = word * scale + spot + tl.where(known, 0.0, float("nan"))[:, None]
    return value, tl.where(known, token, 0)


@triton.jit(do_not_specialize=["rows", "length", "threshold"])
def embed_layer_norm_fwd_kernel(
    tokens, embedding, table, position, weight, bias, out, statistics, rng_state,
    rows, hidden, n_vocab, n_position, length, scale, eps, threshold, keep_scale,
    HAS_POSITION: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TICKETS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_N)
    value, _ = embedded(
        tokens, embedding, table, position, row, rows, col, hidden, n_vocab, n_position, length, scale, HAS_POSITION
    )
    if HAS_DROPOUT:
        value = tl.where(dropout_keep(rng_state, threshold, row, 0, BLOCK_N), value * keep_scale, 0.0)
    value = normalize(value, weight, bias, statistics, row, rows, col, hidden, eps, False, TICKETS)
    inside = (row < rows)[:, None] & (col < hidden)[None, :]
    tl.store(out + row[:, None] * hidden + col[None, :], value.to(out.dtype.element_ty), mask=inside)


_LAUNCHES = Launches(embed_layer_norm_fwd_kernel, *[Tensor] * 9)


def embed_layer_norm_fwd(
    embedding: Tensor,
    weight: Tensor,
    bias: Tensor,
    tokens: Tensor,
    position_table: Tensor,
    position: Tensor | None,
    length: int,
    scale: float,
    eps: float,
    dropout_p: float,
    rng_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """tokens, position: (rows,) contiguous integers; without position row r is at r % length. embedding (V, d).

    Returns out (rows, d) in embedding's dtype, and the statistics for the backward.
    """
    rows, hidden = tokens.shape[0], embedding.shape[1]
    out = torch.empty((rows, hidden), dtype=embedding.dtype, device=embedding.device)
    statistics = empty_statistics(rows, embedding)
    if rows == 0:
        return out, statistics
    tensors = tokens, embedding, position_table, position, weight, bias, out, statistics, rng_state
    found, alignment = addresses(*tensors)
    device, has_dropout = embedding.get_device(), dropout_p > 0
    n_vocab, n_position = embedding.shape[0], position_table.shape[0]
    key = (
        *(device, tokens.dtype, embedding.dtype, position_table.dtype, None if position is None else position.dtype),
        *(weight.dtype, bias.dtype, alignment, rng_state is None, rows < LIMIT, length < LIMIT),
        *(hidden, n_vocab, n_position, has_dropout),
    )
    launch = _LAUNCHES.get(key)
    if launch is None:
        block_m, block_n, num_warps = forward_tile(hidden)
        constants = {"HAS_POSITION": position is not None, "HAS_DROPOUT": has_dropout, "TICKETS": TICKETS}
        constants |= {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps}
        launch = _LAUNCHES.add(key, block_m, **constants)
    sizes = rows, hidden, n_vocab, n_position, length
    arguments = *found, *sizes, float(scale), float(eps), *dropout_constants(dropout_p)
    launch.run(device, -(-rows // launch.tile), arguments, tensors)
    return out, statistics
