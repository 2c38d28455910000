"""Public op: the way into a Transformer: embedding * scale + positions, dropout, layer normalisation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastattn import _dispatch
from fastattn.ops import _arguments as arguments
from fastattn.ops import _library_embed as _library
from fastattn.reference.philox import draw_rng_state


def _query(
    tokens: Tensor,
    embedding: Tensor,
    position_table: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    *,
    scale: float = 1.0,
    position: Tensor | None = None,
    padding_idx: int | None = None,
    **options: Any,
) -> tuple[torch.device, tuple[Any, ...]]:
    """Check a call's arguments and bring them into the form that backends take: (device, why_not's arguments)."""
    arguments.check_float("embedding", embedding)
    if embedding.dim() != 2 or 0 in embedding.shape:
        raise ValueError(f"embedding has shape {tuple(embedding.shape)}, expected (tokens of the vocabulary, d)")
    vocabulary, d = embedding.shape
    dtype = embedding.dtype
    if dtype != torch.float64:
        dtype = arguments.autocast_dtype(embedding.device) or dtype
    arguments.check_indices("tokens", tokens, "embedding", embedding)
    if tokens.dim() == 0:
        raise ValueError("tokens has no dimensions, expected (..., L)")
    arguments.check_range("tokens", tokens, vocabulary, "a row of embedding")
    arguments.check_like("position_table", position_table, "embedding", embedding, dtype=False)
    if position_table.dtype not in (torch.float32, embedding.dtype):
        expected = f"float32 or {embedding.dtype} as embedding"
        raise TypeError(f"position_table has dtype {position_table.dtype}, expected {expected}")
    if position_table.dim() != 2 or position_table.shape[1] != d:
        raise ValueError(f"position_table has shape {tuple(position_table.shape)}, expected (n_position, d = {d})")
    if position_table.requires_grad:
        raise ValueError("position_table has no gradient: it must not require one")
    if position is not None:
        arguments.check_indices("position", position, "embedding", embedding)
        arguments.check_shape("position", position, tuple(tokens.shape), "the shape of tokens")
        arguments.check_range("position", position, position_table.shape[0], "a row of position_table")
    elif tokens.shape[-1] > position_table.shape[0]:
        rows = position_table.shape[0]
        raise ValueError(f"position_table has {rows} rows, too few for {tokens.shape[-1]} tokens a sequence")
    for name, t in (("weight", weight), ("bias", bias)):
        arguments.check_like(name, t, "embedding", embedding, dtype=False)
        arguments.check_shape(name, t, (d,), "(d,)")
    arguments.check_like("bias", bias, "weight", weight)
    if weight.dtype not in (torch.float32, embedding.dtype):
        raise TypeError(f"weight has dtype {weight.dtype}, expected float32 or {embedding.dtype} as embedding")
    if not eps >= 0:
        raise ValueError(f"eps must not be negative, got {eps}")
    arguments.check_dropout(dropout_p)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale must be a number, got {type(scale).__name__}")
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    if padding_idx is not None:
        if isinstance(padding_idx, bool) or not isinstance(padding_idx, int):
            raise TypeError(f"padding_idx must be an integer or None, got {type(padding_idx).__name__}")
        if not -vocabulary <= padding_idx < vocabulary:
            raise ValueError(f"padding_idx must be a row of embedding, of {vocabulary}, got {padding_idx}")
        padding_idx %= vocabulary
    tensors = (tokens, embedding, position_table, weight, bias, position)
    return embedding.device, (*tensors, float(scale), padding_idx, float(dropout_p), dtype)


@_dispatch.register("embed_layer_norm", _query)
def embed_layer_norm(
    tokens: Tensor,
    embedding: Tensor,
    position_table: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    *,
    scale: float = 1.0,
    position: Tensor | None = None,
    padding_idx: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """out = layer_norm(dropout(embedding[tokens] * scale + position_table[position])) * weight + bias, in one pass.

    tokens (..., L): int64 or int32, rows of embedding. One out of range is a ValueError on a CPU; on a GPU its row of
        the result is NaN.
    embedding (V, d): float32, bfloat16, float16 (float64 in the backends reference and aten).
    position_table (n_position, d): float32 or embedding's dtype; without a gradient.
    weight, bias (d,): of the normalisation, float32 or embedding's dtype.      eps: added to the variance.
    dropout_p: the probability of dropping an element of the sum, by the rule of fastattn/reference/philox.py: the bits
        that ``dropout_add_layer_norm`` would draw for it; 0.0 in eval.
    scale: of the embedding; the paper has sqrt(d).
    position (..., L): int64 or int32, each token's row of position_table; 0, 1, .., L - 1 unless given.
    padding_idx: the token whose embedding gets no gradient.
    backend: "reference", "aten", "triton" or "cuda"; default the first that can serve, see ``explain``.

    Returns (..., L, d) in embedding's dtype or, under torch.autocast, in its dtype. The sum is never rounded.
    Raises TypeError or ValueError naming the argument, RuntimeError if the backend asked for cannot serve.
    Source: Vaswani et al. 2017, sections 3.4, 3.5 and 5.4; Ba et al. 2016, "Layer Normalization", arXiv:1607.06450.
    """
    options = {"scale": scale, "position": position, "padding_idx": padding_idx}
    device, call = _query(tokens, embedding, position_table, weight, bias, eps, dropout_p, **options)
    name, module = _dispatch.choose("embed_layer_norm", device, call, backend)
    *tensors, scale, padding_idx, dropout_p, dtype = call
    rng_state = draw_rng_state(device) if dropout_p > 0 else None
    with arguments.no_autocast(device):
        if hasattr(module, "embed_layer_norm"):
            return module.embed_layer_norm(*tensors, scale, padding_idx, float(eps), dropout_p, rng_state, dtype)
        tokens, embedding, position_table, weight, bias, position = (
            t if t is None else t.contiguous() for t in tensors
        )
        places = (tokens.view(-1), position_table, position if position is None else position.view(-1))
        inputs = (embedding, weight, bias, *places, tokens.shape[-1], scale, padding_idx, float(eps), dropout_p)
        if torch.compiler.is_compiling():
            out = _library.embed_layer_norm(*inputs, rng_state, dtype, name)
        else:
            out = _EmbedLayerNorm.apply(*inputs, rng_state, dtype, module)
    return out.view(*tokens.shape, out.shape[-1])


class _EmbedLayerNorm(torch.autograd.Function):
    """Straight from autograd to the launch. Saved are the inputs and the statistics: backward gathers the sum again."""

    @staticmethod
    def forward(
        ctx: Any,
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
        module: Any,
    ) -> Tensor:
        inputs = (embedding, weight, bias, tokens, position_table, position, length, scale)
        out, statistics = module.embed_layer_norm_fwd(*inputs, eps, dropout_p, rng_state, dtype)
        ctx.save_for_backward(*inputs[:6], statistics, rng_state)
        ctx.options = (length, scale, padding_idx, dropout_p, module)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, statistics, rng_state = ctx.saved_tensors
        length, scale, padding_idx, dropout_p, module = ctx.options
        drows, index, dweight, dbias = module.embed_layer_norm_bwd(
            dout.contiguous(), *inputs, length, scale, statistics, dropout_p, rng_state
        )
        needs = ctx.needs_input_grad[0]  # a frozen embedding saves the largest gradient of all
        dembedding = _library.add_rows(drows, index, inputs[0], padding_idx) if needs else None
        return dembedding, dweight, dbias, *(None,) * 11
