"""The first layer of a Transformer: embedding * scale + positions, dropout, layer normalisation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattn import backends
from fastattn.backends import Backend, Implementation, timings
from fastattn.backends.reference import embed_layer_norm as reference
from fastattn.backends.reference.philox import draw_rng_state
from fastattn.ops import _autocast, _checks, _watch
from fastattn.ops._autograd import Operator


def _validate(
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
    known_indices: bool = False,
    **options: Any,
) -> tuple[torch.device, tuple[Any, ...]]:
    """Check a call's arguments. Returns (device, inputs): the inputs are what unsupported_reason takes."""
    _checks.check_float("embedding", embedding)
    if embedding.dim() != 2 or 0 in embedding.shape:
        raise ValueError(f"embedding has shape {tuple(embedding.shape)}, expected (tokens of the vocabulary, d)")
    vocabulary, d = embedding.shape
    is_alike = _checks.same_dtype_and_device(embedding, position_table, weight, bias)
    if not (is_alike and position_table.shape[1:] == weight.shape == bias.shape == (d,)):
        _checks.check_float("position_table", position_table)
        shape = (position_table.shape[0] if position_table.dim() > 0 else 0, d)
        _checks.check_parameter("position_table", position_table, shape, "(n_position, d)", "embedding", embedding)
        for name, t in (("weight", weight), ("bias", bias)):
            _checks.check_parameter(name, t, (d,), "(d,)", "embedding", embedding)
        _checks.check_like("bias", bias, "weight", weight)
    if position_table.requires_grad:
        raise ValueError("position_table has no gradient: it must not require one")
    if not known_indices:
        _check_indices(tokens, embedding, position_table, position)
    _checks.check_eps(eps)
    _checks.check_dropout(dropout_p)
    _checks.check_finite("scale", scale)
    if padding_idx is not None:
        if isinstance(padding_idx, bool) or not isinstance(padding_idx, int):
            raise TypeError(f"padding_idx must be an integer or None, got {type(padding_idx).__name__}")
        if not -vocabulary <= padding_idx < vocabulary:
            raise ValueError(f"padding_idx must be a row of embedding, of {vocabulary}, got {padding_idx}")
        padding_idx %= vocabulary
    tensors = (tokens, embedding, position_table, weight, bias, position)
    return embedding.device, (*tensors, float(scale), padding_idx, float(dropout_p))


def _check_indices(tokens: Tensor, embedding: Tensor, position_table: Tensor, position: Tensor | None) -> None:
    _checks.check_indices("tokens", tokens, "embedding", embedding)
    if tokens.dim() == 0:
        raise ValueError("tokens has no dimensions, expected (..., L)")
    _checks.check_range("tokens", tokens, embedding.shape[0], "a row of embedding")
    rows = position_table.shape[0]
    if position is not None:
        _checks.check_indices("position", position, "embedding", embedding)
        _checks.check_shape("position", position, tuple(tokens.shape), "the shape of tokens")
        _checks.check_range("position", position, rows, "a row of position_table")
    elif tokens.shape[-1] > rows:
        raise ValueError(f"position_table has {rows} rows, too few for {tokens.shape[-1]} tokens a sequence")


def _call_class(tokens: Tensor, embedding: Tensor, *options: Any) -> str:
    return timings.call_class(embedding.dtype, options[-1])


@backends.register("embed_layer_norm", _validate, _call_class)
def embed_layer_norm(
    tokens: Tensor,
    embedding: Tensor,
    position_table: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    scale: float = 1.0,
    position: Tensor | None = None,
    padding_idx: int | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """out = layer_norm(dropout(embedding[tokens] * scale + position_table[position])) * weight + bias, in one pass.

    tokens (..., L): int64 or int32, rows of embedding. One out of range is a ValueError on a CPU. On a GPU triton makes
        its row of the result NaN; in aten and reference an assertion of PyTorch stops the process.
    embedding (V, d): float32, bfloat16, float16 (float64 in the backends reference and aten).
    position_table (n_position, d): float32 or embedding's dtype; without a gradient.
    weight, bias (d,): of the normalisation, float32 or embedding's dtype.      eps: added to the variance.
    dropout_p: the probability of dropping an element of the sum; 0.0 in eval. The bits are those that
        ``dropout_add_layer_norm`` would draw for it (fastattn/backends/reference/philox.py).
    scale: of the embedding; the paper has sqrt(d).
    position (..., L): int64 or int32, each token's row of position_table; 0, 1, .., L - 1 unless given.
    padding_idx: the token whose embedding gets no gradient.
    backend: "reference", "aten" or "triton"; default the first that supports the call, see ``explain``.

    Returns (..., L, d) in embedding's dtype, also under torch.autocast. The sum is never rounded.
    Raises TypeError or ValueError naming the argument, RuntimeError if the backend asked for does not support it.
    Source: Vaswani et al. 2017, sections 3.4, 3.5 and 5.4; Ba et al. 2016, "Layer Normalization", arXiv:1607.06450.
    """
    tensors = tokens, embedding, position_table, weight, bias
    device, inputs = _validate(*tensors, eps, dropout_p, scale=scale, position=position, padding_idx=padding_idx)
    return _embed(device, inputs, eps, backend)


def embed_known_tokens(
    tokens: Tensor,
    embedding: Tensor,
    position_table: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
    backend: Backend | None,
    **options: Any,
) -> Tensor:
    """``embed_layer_norm`` of tokens and positions that the caller, a model with this backend, has checked."""
    device, inputs = _validate(tokens, embedding, position_table, weight, bias, eps, known_indices=True, **options)
    return _embed(device, inputs, eps, backend)


def _embed(device: torch.device, inputs: tuple[Any, ...], eps: float, backend: Backend | None) -> Tensor:
    chosen = backends.choose("embed_layer_norm", device, inputs, backend)
    *tensors, scale, padding_idx, dropout_p = inputs
    rng_state = draw_rng_state(device, chosen.name) if dropout_p > 0 else None
    op_args = (*tensors, scale, padding_idx, float(eps), dropout_p, rng_state)
    with _autocast.no_autocast(device):
        return _watch.run("embed_layer_norm", _embed_by, chosen, reference.embed_layer_norm, op_args)


def _embed_by(
    chosen: Implementation,
    tokens: Tensor,
    embedding: Tensor,
    position_table: Tensor,
    weight: Tensor,
    bias: Tensor,
    position: Tensor | None,
    *options: Any,
) -> Tensor:
    tensors = tokens, embedding, position_table, weight, bias, position
    if chosen.differentiable:
        return chosen.module.embed_layer_norm(*tensors, *options)
    tokens, embedding, position_table, weight, bias, position = [t if t is None else t.contiguous() for t in tensors]
    places = (tokens.view(-1), position_table, position if position is None else position.view(-1))
    (out,) = _EmbedLayerNorm.apply(embedding, weight, bias, *places, tokens.shape[-1], *options, chosen)
    return out.view(*tokens.shape, out.shape[-1])


class _EmbedLayerNorm(Operator, name="embed_layer_norm"):
    """Kept are the inputs and the statistics of the rows: the backward gathers the sum again."""

    results, outputs, inputs = 1, 2, 3

    @staticmethod
    def forward(
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
        backend: Implementation,
    ) -> tuple[Tensor, Tensor]:
        places = (tokens, position_table, position, length, scale)
        return backend.module.embed_layer_norm_fwd(embedding, weight, bias, *places, eps, dropout_p, rng_state)

    @staticmethod
    def forward_fake(embedding: Tensor, *op_args: Any) -> tuple[Tensor, Tensor]:
        _, _, tokens, *_, backend = op_args
        rows = tokens.shape[0]
        statistics = embedding.new_empty(2 * rows + backend.module.TICKETS, dtype=torch.float32)
        return embedding.new_empty(rows, embedding.shape[1]), statistics

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> None:
        *tensors, length, scale, padding_idx, _, dropout_p, rng_state, backend = inputs
        ctx.save_for_backward(*tensors, outputs[1], rng_state)
        ctx.options = (length, scale, padding_idx, dropout_p, backend)

    @staticmethod
    def backward(ctx: Any, gradients: Callable[..., Any], dout: Tensor) -> tuple[Tensor | None, ...]:
        needs_dembedding = ctx.needs_input_grad[0]  # a frozen embedding saves the largest gradient of all
        return gradients(dout.contiguous(), *ctx.saved_tensors, needs_dembedding, *ctx.options)

    @staticmethod
    def gradients(
        dout: Tensor,
        embedding: Tensor,
        weight: Tensor,
        bias: Tensor,
        tokens: Tensor,
        position_table: Tensor,
        position: Tensor | None,
        statistics: Tensor,
        rng_state: Tensor | None,
        needs_dembedding: bool,
        length: int,
        scale: float,
        padding_idx: int | None,
        dropout_p: float,
        backend: Implementation,
    ) -> tuple[Tensor | None, ...]:
        inputs = (dout, embedding, weight, bias, tokens, position_table, position, length, scale, statistics)
        drows, index, dweight, dbias = backend.module.embed_layer_norm_bwd(*inputs, dropout_p, rng_state)
        return _sum_by_token(drows, index, embedding, padding_idx) if needs_dembedding else None, dweight, dbias

    @staticmethod
    def gradients_fake(
        dout: Tensor, embedding: Tensor, weight: Tensor, bias: Tensor, *op_args: Any
    ) -> tuple[Tensor | None, ...]:
        needs_dembedding = op_args[5]
        dembedding = embedding.new_empty(embedding.shape) if needs_dembedding else None
        return dembedding, torch.empty_like(weight), torch.empty_like(bias)


def _sum_by_token(drows: Tensor, index: Tensor, like: Tensor, padding_idx: int | None) -> Tensor:
    """The gradient of the embedding `like` (V, d): row drows[i] is added to row index[i], but for padding's."""
    op_args = (drows, index, like.shape[0], -1 if padding_idx is None else padding_idx, False)
    if not drows.is_cuda:
        return torch.ops.aten.embedding_dense_backward(*op_args)
    # Left to itself, torch since 2.11 adds atomically where few tokens come often, and bits differ from run to run.
    with _deterministic_mode:  # the mode is the whole process's, and autograd has a thread for each GPU
        if torch.are_deterministic_algorithms_enabled():
            return torch.ops.aten.embedding_dense_backward(*op_args)
        # PyTorch makes this attribute at run time: a type checker cannot see it.
        filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        torch.set_deterministic_debug_mode(1)
        # the other half of that mode, of no use here
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        try:
            return torch.ops.aten.embedding_dense_backward(*op_args)
        finally:
            torch.set_deterministic_debug_mode(0)
            torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


_deterministic_mode = threading.Lock()
