"""The steps of a decoder: own models and accelerated ones, on every device and with every backend.

A decoder is a list of sublayers, described by the same params as in run_layer.py. What is decided for a generation is
decided once, at its first step. A sublayer is computed by one of three routes:

    straight   on a CPU with the backend aten, where all sublayers are unmodified: PyTorch's operators
    by ops     elsewhere: the public ops. They read no number of the host, so that a CUDA graph can repeat them
               (fastattn/generate/kept_graphs.py)
    called     where it is modified: its module's forward, which reads keys and values in the cache

All have the same numbers up to rounding. Straight: one token of a small model is 0.5 ms of work for a CPU, and checks
and the choice of a backend for each op would take as long again. A step is then some 25 operators and views a layer.

B sequences with W beams, rows = B * W, the newest tokens of all beams. Straight, hidden states are matrices
(rows, d_model), and sublayers add their input in the product that ends them: it saves an operator and, in 16 bits, a
rounding. Elsewhere they are (B, W, d_model).
Memory: the cache, and what is packed, cast or, straight, concatenated of the weights. Between two steps of a generation
weights must not change: a step reads the copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastattn._tracing import is_transformed
from fastattn.backends import Backend, likely_backend, load_backend
from fastattn.nn.kv_cache import DecoderCache
from fastattn.nn.linear import Product
from fastattn.nn.params import FeedForwardParams, NormParams
from fastattn.nn.residual import AddNorm, HiddenState, PendingResidual, connect, fused_add_norm
from fastattn.ops import _autocast, _checks
from fastattn.ops.decode_attention import decode_attention, write_and_attend
from fastattn.ops.feed_forward import activate, feed_forward

_OPS = ("linear", "add_layer_norm", "decode_attention", "feed_forward")
PLAIN = (nn.Parameter, Tensor)
Run = Callable[[HiddenState, DecoderCache], HiddenState]


class StepSublayer(NamedTuple):
    """A sublayer, or a whole layer that is called.

    params: Params, or None where something is modified.     module: for which keys, values and packed weights are kept.
    call: what computes it from (B, W, d_model) where it is not fused. A model whose params are all known needs none.
    bias: which of cache.relative_bias is this attention's, if the model has one.
    """

    params: Any
    module: nn.Module
    call: Run | None = None
    reads_memory: bool = False
    bias: int = 0


class EmbeddingParams(NamedTuple):
    """The input of the first layer, norm(embedding * scale + position).

    table: (n_vocab, d_model).     positions: (n_position, d_model), the first row that of the first token, or None.
    unplaced_token: a token that gets no position, or None.     norm: None where the input has none.
    more_positions: the rows after positions, or None. Both are read in place: a CUDA graph may be kept.
    """

    table: Tensor
    scale: float
    positions: Tensor | None
    unplaced_token: int | None
    norm: NormParams | None
    more_positions: Tensor | None = None


class DecoderParams(NamedTuple):
    """A decoder in eval mode.

    embedding: EmbeddingParams, or what is called in its place, of tokens and positions (B, W).
    final_norm: NormParams of a pre-norm decoder's output, or what is called in its place; None of post-norm.
    backend: of the norms that are in no sublayer.     output_scale: of the decoder's output.
    relative_bias: of a capacity, what cache.relative_bias is; None of a model without a bias by distance.
    """

    embedding: Any
    final_norm: Any
    sublayers: tuple[StepSublayer, ...]
    backend: Backend | None = None
    output_scale: float = 1.0
    relative_bias: Callable[[int], Tensor] | None = None


class DecoderSteps:
    """The steps of a decoder, with a cache of one shape and device: `cache.steps`."""

    def __init__(self, params: DecoderParams, cache: DecoderCache) -> None:
        self.params, self.is_straight = params, _is_straight(params, cache)
        self.now = _Now(params, cache) if self.is_straight else None
        self.bias: Tensor | None = None  # by ops, of this step
        norm: Any = _straight_norm if self.is_straight else partial(_norm_by_op, backend=params.backend)
        embedding, final = params.embedding, params.final_norm
        start = embedding.norm if isinstance(embedding, EmbeddingParams) else None
        self.embedding_norm: Any = None if start is None else norm(start)
        self.final_norm: Any = norm(final) if isinstance(final, NormParams) else None
        self.attentions: list[_Attention] = []
        self.runs: list[Any] = [self._run_of(depth, sublayer, cache) for depth, sublayer in enumerate(params.sublayers)]

    def _run_of(self, depth: int, sublayer: StepSublayer, cache: DecoderCache) -> Any:
        params = sublayer.params
        if self.is_straight:
            if isinstance(params, FeedForwardParams):
                compute = _FeedForward(sublayer, self.now, cache).compute
            else:
                self.attentions.append(_Attention(sublayer, self.now, cache, depth))
                compute = self.attentions[-1].compute
            return _connected(compute, _straight_norm(params.norm), self.params.final_norm is not None)
        # Dropout may be in training mode in a decoder that is not, for samples of its uncertainty.
        is_fused = params is not None and (sublayer.call is None or params.norm.dropout_p == 0)
        return _run_by_ops(sublayer) if is_fused else sublayer.call

    def __call__(self, tokens: Tensor, cache: DecoderCache) -> Tensor:
        """The output of the decoder's last layer (B, W, d_model), for tokens (B, W). The cache is not advanced."""
        if cache.length >= cache.capacity:
            raise ValueError(f"the cache is full: it holds {cache.capacity} tokens")
        if self.is_straight:
            if torch.is_grad_enabled():
                raise ValueError("the first step of this cache recorded no gradient: call all of them under no_grad()")
            with _autocast.no_autocast(tokens.device):
                x = self._straight(tokens, cache)
        else:
            self.bias = cache.step_bias()
            x = self._embed(tokens, cache)
            if self.embedding_norm is not None:
                x = self.embedding_norm(PendingResidual(x, None))[0]
            if self.params.final_norm is not None and isinstance(x, Tensor):
                x = PendingResidual(x, None)
            for cache.depth, run in enumerate(self.runs):
                x = run(x, cache)
            if isinstance(x, PendingResidual):
                x = self.params.final_norm(x) if self.final_norm is None else self.final_norm(x)[0]
        if (scale := self.params.output_scale) != 1:
            x = x * scale
        return x.view(*tokens.shape, -1)

    def _straight(self, tokens: Tensor, cache: DecoderCache) -> Tensor:
        if self.now.memories is not cache.memories:
            for attention in self.attentions:
                attention.bind(cache)
        self.now.look_at(cache)
        x = self._embed(tokens, cache).view(tokens.numel(), -1)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        for run in self.runs:
            x = run(x)
        return x if self.final_norm is None else self.final_norm(x)

    def _embed(self, tokens: Tensor, cache: DecoderCache) -> Any:
        """The input of the first layer, before its norm."""
        embedding = self.params.embedding
        if not isinstance(embedding, EmbeddingParams):
            return embedding(tokens, cache.position.expand_as(tokens))
        table, scale, positions, unplaced_token, _, more = embedding
        try:
            words = torch.embedding(table, tokens)
        except (IndexError, RuntimeError):
            _checks.check_indices("tokens", tokens, "the model", table)
            _checks.check_range("tokens", tokens, len(table), "a row of the embedding")
            raise
        if positions is None:
            return words if scale == 1 else words * scale
        if self.is_straight:
            place = cache.length - positions.size(0)
            position = positions[cache.length] if place < 0 else more[place]
        else:
            rows = positions if more is None else torch.cat([positions, more])
            position = rows.index_select(0, cache.position)
        if unplaced_token is not None:
            position = position.masked_fill((tokens == unplaced_token)[..., None], 0)
        return torch.add(position, words, alpha=scale)


def tensors_of(params: Any) -> Iterator[Tensor]:
    """All tensors of params."""
    for value in params:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from tensors_of(value)


# By ops.


def _run_by_ops(sublayer: StepSublayer) -> Run:
    """Under torch.autocast the sublayer's input is cast once for all products that read it."""
    params = sublayer.params
    branch = _feed if isinstance(params, FeedForwardParams) else _attend
    norm = _norm_by_op(params.norm, params.backend)

    def run(x: HiddenState, cache: DecoderCache) -> HiddenState:
        def compute(normed: Tensor, residual: Tensor) -> PendingResidual:
            return PendingResidual(branch(sublayer, cache, *_autocast.autocast_inputs(normed)), residual)

        return connect(x, compute, norm)

    return run


def _norm_by_op(norm: NormParams, backend: Backend | None) -> AddNorm:
    return lambda pending: fused_add_norm(*pending[:2], norm, backend=backend)


def _attend(sublayer: StepSublayer, cache: DecoderCache, x: Tensor) -> Tensor:
    params, module, _, reads_memory, bias = sublayer
    product = partial(cache.linear.product, module)
    options: dict[str, Any] = {"scale": params.softmax_scale, "backend": params.backend}
    if cache.steps.bias is not None and not reads_memory:
        options["bias"] = cache.steps.bias[bias]
    # Not by the name that the straight step has: its rows are in another order, and the kept copy too.
    rows = product("w_qs" if reads_memory else "q k v", params.weights, params.biases, x, params.backend)(x)
    parts, widths = rows.split([len(weight) for weight in params.weights], 2), (params.d_k, params.d_k, params.d_v)
    heads = [part.unflatten(2, (-1, width)) for part, width in zip(parts, widths, strict=False)]
    attend: Any = cache.attend_memory
    if not reads_memory:
        attend = partial(cache.attend, write_and_attend=partial(write_and_attend, **options))
    out = attend(module, *heads, partial(decode_attention, **options)).flatten(2)
    return product(_fc(sublayer), params.fc, params.fc_bias, out, params.backend)(out)


def _feed(sublayer: StepSublayer, cache: DecoderCache, x: Tensor) -> Tensor:
    params, product = sublayer.params, partial(cache.linear.product, sublayer.module)
    first = product("w_1", params.weights1, params.biases1, x, params.backend)
    second = product("w_2", params.weight2, params.bias2, x, params.backend)
    if first.is_prepacked:
        return second(activate(first(x), params.activation))
    weights = first.weight, first.bias, second.weight, second.bias
    return feed_forward(x, *weights, params.activation, backend=params.backend)


def _fc(sublayer: StepSublayer) -> str:
    """The name of the map after the heads: two attentions may have one module."""
    return "enc_fc" if sublayer.reads_memory else "fc"


# Straight.


def _is_straight(params: DecoderParams, cache: DecoderCache) -> bool:
    """Where all is known, on a CPU with the backend aten, and the dtypes are one."""
    device, embedding = cache.position.device, params.embedding
    if (
        not isinstance(embedding, EmbeddingParams)
        or not isinstance(params.final_norm, (NormParams, type(None)))
        or any(sublayer.params is None or sublayer.params.norm.dropout_p for sublayer in params.sublayers)
        or device.type != "cpu"
        or cache.on_device
        or torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or is_transformed()
    ):
        return False
    backends = {params.backend, *[sublayer.params.backend for sublayer in params.sublayers]}
    if any(likely_backend(op, device, backend) != "aten" for op in _OPS for backend in backends):
        return False
    dtype, keys_and_values = _dtype(params), [*chain(*cache.memories[0].projected.values())]
    own = [*tensors_of(params)]
    if any(type(t) not in PLAIN or t.device != device or t.numel() == 0 for t in (*own, *keys_and_values)):
        return False
    return all(t.dtype is embedding.table.dtype for t in own) and all(t.dtype is dtype for t in keys_and_values)


def _straight_norm(norm: NormParams) -> Callable[[Tensor], Tensor]:
    """Of a sum that a product has made."""
    if norm.bias is None:
        return _straight_rms_norm(norm)
    sizes, weight, bias, eps = [len(norm.weight)], norm.weight, norm.bias, norm.eps
    return lambda x: torch.layer_norm(x, sizes, weight, bias, eps)


def _connected(compute: Any, norm: Callable[[Tensor], Tensor], norm_first: bool) -> Callable[[Tensor], Tensor]:
    """A sublayer with its residual connection, see residual.connect. compute: of its input and what is added to it."""
    return (lambda x: compute(norm(x), x)) if norm_first else (lambda x: norm(compute(x, x)))


def _straight_rms_norm(norm: NormParams) -> Callable[[Tensor], Tensor]:
    """x / sqrt(|x|^2 + d eps) * sqrt(d) weight, in float32 or float64. A row of 256 and 32 of 512 take 6 and 11 us on
    an AMD EPYC, by torch.rms_norm, which is several operators on a CPU, 9 and 14; in bfloat16 9 and 18, 12 and 30."""
    d, dtype = len(norm.weight), torch.promote_types(norm.weight.dtype, torch.float32)
    weight, least = norm.weight.to(dtype) * d**0.5, torch.tensor((d * norm.eps) ** 0.5, dtype=dtype)

    def run(x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, 2, -1, True, dtype=dtype).hypot_(least)
        return (x / length).mul_(weight).to(x.dtype)

    return run


class _Now:
    """What all straight sublayers of a step read. place: of the step, from 0.

    past_biases: added to the scores of a decoder's past, one for all its attentions or one for each, or None.
    memory_bias: hides the padding of a memory, or None.
    """

    place: int
    past_biases: Sequence[Tensor | None]
    memory_bias: Tensor | None

    def __init__(self, params: DecoderParams, cache: DecoderCache) -> None:
        self.dtype = _dtype(params)  # of products, keys and values; hidden states keep that of the embedding
        self.stream_dtype = params.embedding.table.dtype
        self.aten = load_backend("decode_attention", "aten")
        self.memories: Any = None
        self.of_row = self._bias(torch.eye(cache.rows, dtype=torch.bool))[:, 0]  # hides all rows of a position but one
        self.by_distance = cache.relative_bias
        if self.by_distance is not None:  # (.., 1, H, 1, keys of all beams)
            seen = self.by_distance[:, :, : cache.capacity].to(self.dtype)
            self.by_distance = seen.repeat_interleave(cache.rows, 2)[:, None, :, None]

    def look_at(self, cache: DecoderCache) -> None:
        B, W, length, device = cache.batch, cache.rows, cache.length + 1, cache.position.device
        self.place, hidden = cache.length, None
        if W > 1:
            if cache.ancestors is None:
                hidden = self.of_row.repeat(1, length)[None, None]
            else:  # looking it up takes 52 us for 64 sentences with 5 beams of 50 tokens, computing it 930
                hidden = torch.embedding(self.of_row, cache.ancestors[:, :, :length]).flatten(2)[:, None]
        self.past_biases = (hidden,)
        if self.by_distance is not None:
            bias = self.by_distance[..., (cache.capacity - length) * W :]
            self.past_biases = (bias if hidden is None else bias + hidden).unbind()
        if self.memories is not cache.memories:
            self.memories, self.memory_bias = cache.memories, None
            memory, lengths = cache.memories[0]
            # A source without tokens attends to one key. It is 0 there, see Decoder.memory, and so is its value.
            lengths, longest = lengths.clamp_min(1), next(iter(memory.values()))[0].shape[2]
            if not (lengths >= longest).all():
                self.memory_bias = self._bias(self.aten.visible_keys(B, 1, longest, 1, device, lengths, None))

    def functions(self, first: Product, last: Product) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        """A sublayer's first product of a matrix, and its last with what is added to it."""
        return (first.of_rows, last.added) if self.dtype is self.stream_dtype else (first, last)

    def _bias(self, visible: Tensor) -> Tensor:
        return self.aten.as_bias(visible, self.dtype)


def _dtype(params: DecoderParams) -> torch.dtype:
    return _autocast.dtype_under_autocast(params.embedding.table)


def _joined(queries: Any, keys: Any, values: Any, d_k: int, d_v: int) -> Tensor:
    """The rows of all queries, then for each head those of its keys and its values."""
    return torch.cat([queries, *chain.from_iterable(zip(keys.split(d_k), values.split(d_v), strict=True))])


class _Attention:
    """Self-attention, or attention to the encoder's output.

    past: (B, Hk, capacity, W, Dk + Dv): keys and values next to each other, so that one operator writes both. So are
    their rows in the weight of the projection, see `_joined`.
    """

    def __init__(self, sublayer: StepSublayer, now: _Now, cache: DecoderCache, depth: int) -> None:
        params, self.module, _, self.reads_memory, self.bias = sublayer
        weights, d_k, d_v, self.n_head_kv = params.weights, params.d_k, params.d_v, params.n_head_kv
        self.now, self.d_k, self.d_v, self.scale = now, d_k, d_v, params.softmax_scale
        self.n_head, self.rows, self.place = len(weights[0]) // d_k, cache.rows, (depth, self.module)
        product = partial(Product, self.module, rows=cache.batch * cache.rows, dtype=now.dtype)
        fc = product(_fc(sublayer), [params.fc], params.fc_bias)
        if self.reads_memory:
            self.project, self.fc = now.functions(product("w_qs", weights, *params.biases), fc)
            return
        project = product("qkv", weights, params.biases, join=partial(_joined, d_k=d_k, d_v=d_v))
        self.project, self.fc = now.functions(project, fc)
        sizes = cache.batch, self.n_head_kv, cache.capacity, cache.rows, d_k + d_v
        cache.past[self.place] = (torch.empty(sizes, dtype=now.dtype),)

    def bind(self, cache: DecoderCache) -> None:
        """Sizes and strides of views, for the sequences that the cache holds now."""
        B, W, H, Hk, D = cache.batch, cache.rows, self.n_head, self.n_head_kv, self.d_k + self.d_v
        # Of what the projection makes, (rows, row), as q (B, H, W, Dk).
        row = H * self.d_k + (0 if self.reads_memory else Hk * D)
        self.q = (B, H, W, self.d_k), (W * row, self.d_k, row, 1)
        self.attend = self.now.aten.attention_of(B, H, Hk, W, self.scale)
        self.joined = B * W, H * self.d_v
        if self.reads_memory:
            self.memory = cache.memories[0].projected[self.module]
            return
        # Of the rest of it as a position of past; of past as keys (B, Hk, num_keys, Dk) and values.
        (self.past,), head = cache.past[self.place], cache.capacity * W * D
        self.new = (B, Hk, W, D), (W * row, D, row, 1), H * self.d_k
        self.keys_and_values = (B, Hk), (Hk * head, head, D, 1), self.d_k, self.d_v

    def compute(self, x: Tensor, residual: Tensor) -> Tensor:
        now, made = self.now, self.project(x)
        if self.reads_memory:
            (keys, values), bias = self.memory, now.memory_bias
        else:
            past, bias = self.past, now.past_biases[self.bias]
            past.select(2, now.place).copy_(made.as_strided(*self.new))
            (size, stride, d_k, d_v), num_keys = self.keys_and_values, (now.place + 1) * self.rows
            keys = past.as_strided((*size, num_keys, d_k), stride)
            values = past.as_strided((*size, num_keys, d_v), stride, d_k)
        out = self.attend(made.as_strided(*self.q), keys, values, bias)
        out = out.view(self.joined) if self.rows == 1 else out.transpose(1, 2).reshape(self.joined)
        return self.fc(out, residual)


class _FeedForward:
    def __init__(self, sublayer: StepSublayer, now: _Now, cache: DecoderCache) -> None:
        params, module, *_ = sublayer
        product = partial(Product, module, rows=cache.batch * cache.rows, dtype=now.dtype)
        w_1, w_2 = product("w_1", params.weights1, params.biases1), product("w_2", [params.weight2], params.bias2)
        self.w_1, self.w_2 = now.functions(w_1, w_2)
        self.activation = params.activation

    def compute(self, x: Tensor, residual: Tensor) -> Tensor:
        hidden = self.w_1(x)
        hidden = hidden.relu_() if self.activation == "relu" else activate(hidden, self.activation)
        return self.w_2(hidden, residual)
