"""embed_layer_norm as torch.library operators, for torch.compile, torch.export and opcheck. See _library.py.

The kernels make the gradient of each token's row; PyTorch's own operator adds the rows up, in one order, so that equal
inputs give equal bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn._dispatch import load_room


def embed_layer_norm(*inputs: Any) -> Tensor:
    """out, differentiable, as one operator in a traced graph. Takes what embed_layer_norm_op takes."""
    return embed_layer_norm_op(*inputs)[0]


def add_rows(drows: Tensor, index: Tensor, like: Tensor, padding_idx: int | None) -> Tensor:
    """The gradient of the embedding `like` (V, d): row drows[i] is added to row index[i], but for padding's."""
    padding = -1 if padding_idx is None else padding_idx
    return torch.ops.aten.embedding_dense_backward(drows, index, like.shape[0], padding, False)


@torch.library.custom_op("fastattn::embed_layer_norm", mutates_args=())
def embed_layer_norm_op(
    embedding: Tensor,
    weight: Tensor,
    bias: Tensor,
    tokens: Tensor,
    position_table: Tensor,
    position: Tensor | None,
    length: int,
    scale: float,
    padding_idx: int | None,
    eps: float,
    dropout_p: float,
    rng_state: Tensor | None,
    dtype: torch.dtype,
    backend: str,
) -> tuple[Tensor, Tensor]:
    room = load_room("embed_layer_norm", backend)
    places = (tokens, position_table, position, length)
    return room.embed_layer_norm_fwd(embedding, weight, bias, *places, scale, eps, dropout_p, rng_state, dtype)


@embed_layer_norm_op.register_fake
def _(embedding, weight, bias, tokens, *options):
    *_, dtype, backend = options
    rows, tickets = tokens.shape[0], load_room("embed_layer_norm", backend).TICKETS
    statistics = embedding.new_empty(2 * rows + tickets, dtype=torch.float32)
    return embedding.new_empty(rows, embedding.shape[1], dtype=dtype), statistics


@torch.library.custom_op("fastattn::embed_layer_norm_backward", mutates_args=())
def embed_layer_norm_backward_op(
    dout: Tensor,
    embedding: Tensor,
    weight: Tensor,
    bias: Tensor,
    tokens: Tensor,
    position_table: Tensor,
    position: Tensor | None,
    statistics: Tensor,
    length: int,
    scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    room = load_room("embed_layer_norm", backend)
    places = (tokens, position_table, position, length)
    return room.embed_layer_norm_bwd(dout, embedding, weight, bias, *places, scale, statistics, dropout_p, rng_state)


@embed_layer_norm_backward_op.register_fake
def _(dout, embedding, weight, bias, tokens, *options):
    drows = embedding.new_empty(dout.shape)
    return drows, tokens.new_empty(tokens.shape, dtype=torch.int64), torch.empty_like(weight), torch.empty_like(bias)


def _setup(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    embedding, weight, bias, tokens, position_table, position, length, scale, padding_idx, _, dropout_p, *rest = inputs
    rng_state, _, backend = rest
    ctx.save_for_backward(embedding, weight, bias, tokens, position_table, position, output[1], rng_state)
    ctx.options = (length, scale, padding_idx, dropout_p, backend)


def _backward(ctx: Any, dout: Tensor, *_: Tensor) -> tuple:
    *tensors, rng_state = ctx.saved_tensors
    length, scale, padding_idx, dropout_p, backend = ctx.options
    options = (length, scale, dropout_p, rng_state, backend)
    drows, index, dweight, dbias = embed_layer_norm_backward_op(dout.contiguous(), *tensors, *options)
    dembedding = add_rows(drows, index, tensors[0], padding_idx) if ctx.needs_input_grad[0] else None
    return dembedding, dweight, dbias, *(None,) * 11


embed_layer_norm_op.register_autograd(_backward, setup_context=_setup)
