"""The CUDA backend of embedding + positions + dropout + LayerNorm. Formula, shapes and grid: csrc/embed_layer_norm/."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.backends.constants import DTYPES
from fastattn.backends.cuda import device_index, extension, refuse_device
from fastattn.backends.cuda.add_layer_norm import MAX_HIDDEN, TICKETS


def unsupported_reason(
    tokens: Tensor,
    embedding: Tensor,
    position_table: Tensor,
    weight: Tensor,
    bias: Tensor,
    position: Tensor | None,
    scale: float,
    padding_idx: int | None,
    dropout_p: float,
    dtype: torch.dtype,
) -> str | None:
    """None, or what is not supported and what the call has."""
    if reason := refuse_device(embedding):
        return reason
    if embedding.dtype not in DTYPES:
        return f"the CUDA embedding takes float32, bfloat16 and float16, got embedding of dtype {embedding.dtype}"
    if embedding.shape[1] > MAX_HIDDEN:
        return f"the CUDA embedding keeps a row in registers, d <= {MAX_HIDDEN}, got {embedding.shape[1]}"
    return None


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
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """tokens, position: (rows,) contiguous integers; without position row r is at r % length. embedding (V, d).

    Returns out (rows, d) in dtype, and the statistics for the backward, as those of add_layer_norm_fwd.
    """
    rows, hidden = tokens.shape[0], embedding.shape[1]
    out = torch.empty(rows, hidden, dtype=dtype, device=embedding.device)
    statistics = torch.empty(2 * rows + TICKETS, dtype=torch.float32, device=embedding.device)
    tensors = embedding, weight, bias, tokens, position_table, position
    sizes = rows, hidden, eps, dropout_p, rng_state
    extension(embedding.is_cuda).embed_layer_norm_fwd(*tensors, length, scale, out, statistics, *sizes)
    return out, statistics


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
    module = extension(dout.is_cuda)
    drows = torch.empty(rows, hidden, dtype=embedding.dtype, device=dout.device)
    index = torch.empty(rows, dtype=torch.int64, device=dout.device)
    dweight, dbias = torch.empty_like(weight), torch.empty_like(bias)
    blocks, partial_rows = module.embed_layer_norm_bwd_grid(rows, hidden, device_index(dout))
    partial = torch.empty(partial_rows * 2 * hidden, dtype=torch.float32, device=dout.device)
    inputs = dout, embedding, weight, tokens, position_table, position, length, scale, statistics
    outputs = drows, index, dweight, dbias, partial
    module.embed_layer_norm_bwd(*inputs, *outputs, rows, hidden, blocks, dropout_p, rng_state)
    return drows, index, dweight, dbias
