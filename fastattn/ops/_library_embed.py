"""embed_layer_norm as torch.library operators, for torch.compile, torch.export and opcheck. See _library.py.

The kernels make the gradient of each token's row; PyTorch's own operator adds the rows up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn._dispatch import load_backend


def embed_layer_norm(*inputs: Any) -> Tensor:
    """out, differentiable, as one operator in a traced graph. Takes what embed_layer_norm_op takes."""
    return embed_layer_norm_op(*inputs)[0]


def add_rows(drows: Tensor, index: Tensor, like: Tensor, padding_idx: int | None) -> Tensor:
    """The gradient of the embedding `like` (V, d): row drows[i] is added to row index[i], but for padding's."""
    arguments = (drows, index, like.shape[0], -1 if padding_idx is None else padding_idx, False)
    if not drows.is_cuda or torch.are_deterministic_algorithms_enabled():
        return torch.ops.aten.embedding_dense_backward(*arguments)
    # Left to itself, torch since 2.11 adds atomically where few tokens come often, and bits differ from run to run.
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.set_deterministic_debug_mode(1)
    torch.utils.deterministic.fill_uninitialized_memory = False  # the other half of that mode, of no use here
    try:
        return torch.ops.aten.embedding_dense_backward(*arguments)
    finally:
        torch.set_deterministic_debug_mode(0)
        torch.utils.deterministic.fill_uninitialized_memory = filled


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
    module = load_backend("embed_layer_norm", backend)
    places = (tokens, position_table, position, length)
    return module.embed_layer_norm_fwd(embedding, weight, bias, *places, scale, eps, dropout_p, rng_state, dtype)


@embed_layer_norm_op.register_fake
def _(embedding, weight, bias, tokens, *options):
    *_, dtype, backend = options
    rows, tickets = tokens.shape[0], load_backend("embed_layer_norm", backend).TICKETS
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
    padding_idx: int | None,
    needs_dembedding: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    module = load_backend("embed_layer_norm", backend)
    inputs = (dout, embedding, weight, bias, tokens, position_table, position, length, scale, statistics)
    drows, index, dweight, dbias = module.embed_layer_norm_bwd(*inputs, dropout_p, rng_state)
    dembedding = add_rows(drows, index, embedding, padding_idx) if needs_dembedding else embedding.new_empty(0)
    return dembedding, dweight, dbias


@embed_layer_norm_backward_op.register_fake
def _(dout, embedding, weight, bias, *options):
    needs_dembedding = options[-2]
    dembedding = embedding.new_empty(embedding.shape if needs_dembedding else 0)
    return dembedding, torch.empty_like(weight), torch.empty_like(bias)


def _setup(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    embedding, weight, bias, tokens, position_table, position, length, scale, padding_idx, _, dropout_p, *rest = inputs
    rng_state, _, backend = rest
    ctx.save_for_backward(embedding, weight, bias, tokens, position_table, position, output[1], rng_state)
    ctx.options = (length, scale, padding_idx, dropout_p, backend)


def _backward(ctx: Any, dout: Tensor, *_: Tensor) -> tuple:
    *tensors, rng_state = ctx.saved_tensors
    length, scale, padding_idx, dropout_p, backend = ctx.options
    needs_dembedding = ctx.needs_input_grad[0]
    options = (length, scale, dropout_p, rng_state, padding_idx, needs_dembedding, backend)
    dembedding, dweight, dbias = embed_layer_norm_backward_op(dout.contiguous(), *tensors, *options)
    return dembedding if needs_dembedding else None, dweight, dbias, *(None,) * 11


embed_layer_norm_op.register_autograd(_backward, setup_context=_setup)
