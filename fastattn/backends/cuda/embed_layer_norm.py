"""The CUDA backend of embedding + positions + dropout + LayerNorm. Formula, shapes and grid: csrc/embed_layer_norm/."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fastattn.backends.constants import dropout_constants
from fastattn.backends.cuda import (
    DTYPES,
    address,
    device_index,
    extension,
    refuse_device,
    stream,
    typed,
)
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
    """None, or what is refused and what was got."""
    if reason := refuse_device(embedding):
        return reason
    if embedding.dtype not in DTYPES:
        return f"the CUDA embedding takes float32, bfloat16 and float16, got embedding of dtype {embedding.dtype}"
    if embedding.shape[1] > MAX_HIDDEN:
        return f"the CUDA embedding keeps a row in registers, d <= {MAX_HIDDEN}, got {embedding.shape[1]}"
    return None


def _source(
    module: ModuleType,
    embedding: Tensor,
    tokens: Tensor,
    position_table: Tensor,
    position: Tensor | None,
    length: int,
    scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
) -> Any:
    """What both directions gather rows by."""
    return module.EmbedLayerNormSource(
        typed(tokens), typed(position), typed(embedding), typed(position_table),
        embedding.shape[0], position_table.shape[0], length, scale,
        address(rng_state), *dropout_constants(dropout_p),
    )  # fmt: skip


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
    module = extension(embedding.device)
    out = torch.empty((rows, hidden), dtype=dtype, device=embedding.device)
    statistics = torch.empty(2 * rows + TICKETS, dtype=torch.float32, device=embedding.device)
    source = _source(module, embedding, tokens, position_table, position, length, scale, dropout_p, rng_state)
    module.embed_layer_norm_fwd(
        source, typed(weight), typed(bias), typed(out), address(statistics),
        rows, hidden, eps, device_index(embedding), stream(embedding),
    )  # fmt: skip
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
    module, device = extension(dout.device), device_index(dout)
    drows = torch.empty((rows, hidden), dtype=embedding.dtype, device=dout.device)
    index = torch.empty(rows, dtype=torch.int64, device=dout.device)
    dweight, dbias = torch.empty_like(weight), torch.empty_like(bias)
    blocks = module.embed_layer_norm_bwd_blocks(rows, hidden, device)
    rows_of_sums = module.add_layer_norm_bwd_partials(blocks)
    partial = torch.empty((rows_of_sums, 2 * hidden), dtype=torch.float32, device=dout.device)
    source = _source(module, embedding, tokens, position_table, position, length, scale, dropout_p, rng_state)
    module.embed_layer_norm_bwd(
        source, typed(dout), typed(weight), address(statistics), typed(drows), address(index),
        typed(dweight), typed(dbias), address(partial),
        rows, hidden, blocks, device, stream(dout),
    )  # fmt: skip
    return drows, index, dweight, dbias
