"""The steps of an unmodified decoder on a CPU, by PyTorch's operators and without calling its modules.

One token of a small model is 0.5 ms of work for a CPU. Module calls, checks and the choice of a backend for each op
would take as long again. So everything is decided once for a generation, at its first step: that no module is modified,
that the backend aten is used, the dtype, which weights are concatenated or packed, all shapes.
A step is then some 25 operators and views a layer. If `StraightSteps.of` returns None, the decoder steps op by op, with
the same numbers up to rounding: by the `step` methods of fastattn's modules, or by device_steps.py.

B sequences with W beams, rows = B * W, the newest tokens of all beams. Hidden states are matrices (rows, d_model).
Sublayers add their input in the product that ends them: it saves an operator and, in 16 bits, a rounding.
Memory: the cache, the query, key and value weights of self-attention once more, and what is packed or cast. What is
packed is kept for the next generation, with a plain copy of the weight to compare with, see kept_weight.py.
Between two steps of a generation weights must not change: a step reads the copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn._tracing import is_transformed
from fastattn.backends import Backend, cpu_matmul, likely_backend, load_backend
from fastattn.nn.kv_cache import DecoderCache
from fastattn.nn.leaves import keep
from fastattn.nn.linear import without_gaps
from fastattn.nn.params import AttentionParams, FeedForwardParams, NormParams
from fastattn.nn.residual import HiddenState, PendingResidual, connect
from fastattn.ops import _autocast, _checks
from fastattn.ops.feed_forward import activate

_OPS = ("linear", "add_layer_norm", "decode_attention", "feed_forward")
PLAIN = (nn.Parameter, Tensor)


class DecoderLayerParams(NamedTuple):
    """A decoder layer.     memory: the key of its keys and values in a Memory."""

    slf_attn: AttentionParams
    enc_attn: AttentionParams
    ffn: FeedForwardParams
    memory: nn.Module


class DecoderParams(NamedTuple):
    """An unmodified decoder in eval mode. Its input is norm(embedding * scale + position).

    embedding: (n_vocab, d_model).
    positions: (n_position, d_model), the first row that of the first token.
    unplaced_token: a token that gets no position, or None.
    embedding_norm: None where the input has no norm.     final_norm: of a pre-norm decoder's output; None of post-norm.
    backends: that its modules ask for.
    """

    embedding: Tensor
    scale: float
    positions: Tensor
    unplaced_token: int | None
    embedding_norm: NormParams | None
    final_norm: NormParams | None
    layers: tuple[DecoderLayerParams, ...]
    backends: frozenset[Backend | None]


class StraightSteps:
    """Steps the decoder that it was made for. It is an attribute of the cache that it was made for."""

    def __init__(self, params: DecoderParams, cache: DecoderCache, dtype: torch.dtype) -> None:
        """dtype: of products, keys and values; hidden states keep that of the embedding."""
        self.dtype, self.device, self.params = dtype, cache.position.device, params
        self.final_norm = None if params.final_norm is None else _Norm.of(params.final_norm)
        self.aten = load_backend("decode_attention", "aten")
        self.now = _Now()
        rows = cache.batch * cache.rows
        self.layers = []
        for layer in params.layers:
            qkv, slf_fc, w_qs, enc_fc, w_1, w_2 = _products(layer, rows, dtype)
            slf_attn = _SelfAttention(layer.slf_attn, qkv, slf_fc, self.now, cache, dtype)
            enc_attn = _MemoryAttention(layer.memory, layer.enc_attn, w_qs, enc_fc, self.now)
            self.layers.append((slf_attn, enc_attn, _FeedForward(layer.ffn, w_1, w_2)))
        self.now.attend = self.aten.attend
        self.bind(cache)

    @staticmethod
    def of(params: DecoderParams | None, cache: DecoderCache) -> StraightSteps | None:
        """None where params are None, where it is not on a CPU with the backend aten, or dtypes differ."""
        device = cache.position.device
        if (
            params is None
            or device.type != "cpu"
            or torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or is_transformed()
        ):
            return None
        if any(likely_backend(op, device, backend) != "aten" for op in _OPS for backend in params.backends):
            return None
        weight = params.embedding
        dtype = _autocast.dtype_under_autocast(weight)
        own, keys_and_values = [*tensors_of(params)], [t for pair in cache.memories[0].projected.values() for t in pair]
        if any(type(t) not in PLAIN or t.device != device or t.numel() == 0 for t in (*own, *keys_and_values)):
            return None
        if any(t.dtype != weight.dtype for t in own) or any(t.dtype != dtype for t in keys_and_values):
            return None
        return StraightSteps(params, cache, dtype)

    def bind(self, cache: DecoderCache) -> None:
        """Views and masks for the sequences that the cache holds now."""
        memory, lengths = cache.memories[0]
        for slf_attn, enc_attn, _ in self.layers:
            slf_attn.bind(cache)
            enc_attn.bind(cache, memory)
        # A source without tokens attends to one key. It is 0 there, see Decoder.memory, and so is its value.
        lengths, longest = lengths.clamp_min(1), next(iter(memory.values()))[0].shape[2]
        self.now.memory_bias = None
        if not (lengths >= longest).all():
            visible = self.aten.visible_keys(cache.batch, 1, longest, 1, self.device, lengths, None)
            self.now.memory_bias = self.aten.as_bias(visible, self.dtype)

    def select(self, sequences: Tensor, cache: DecoderCache) -> None:
        """Keep these sequences, as the cache has done already."""
        for slf_attn, _, _ in self.layers:
            slf_attn.past = slf_attn.past[sequences]
        self.bind(cache)

    def step(self, tokens: Tensor, cache: DecoderCache) -> Tensor:
        """The output of the decoder's last layer (B, W, d_model), for tokens (B, W). The cache is not advanced."""
        if torch.is_grad_enabled():
            raise ValueError("the first step of this cache recorded no gradient: call all of them under no_grad()")
        with _autocast.no_autocast(self.device):
            now, place, (B, W) = self.now, cache.length, tokens.shape
            now.place, now.past_bias = place, None
            if W > 1:
                ancestors = None if cache.ancestors is None else cache.ancestors[:, :, : place + 1]
                visible = self.aten.visible_keys(B, W, place + 1, W, self.device, None, ancestors)
                now.past_bias = self.aten.as_bias(visible, self.dtype)
            embedded = self._embed(tokens, place)
            x: HiddenState = embedded if self.final_norm is None else PendingResidual(embedded, None)
            for layer in self.layers:
                for sublayer in layer:
                    x = connect(x, sublayer.compute, sublayer.norm)
            out = self.final_norm(x)[0] if isinstance(x, PendingResidual) else x
            return out.view(B, W, -1)

    def _embed(self, tokens: Tensor, place: int) -> Tensor:
        """(rows, d_model): the input of the first layer."""
        params, tokens = self.params, tokens.reshape(-1, 1)
        table, scale, norm, position = *params[:2], params.embedding_norm, params.positions[place : place + 1]
        if params.unplaced_token is not None:
            position = position.where((tokens != params.unplaced_token)[..., None], 0)
        try:
            words = F.embedding(tokens, table)
        except (IndexError, RuntimeError):
            _checks.check_indices("tokens", tokens, "the model", table)
            _checks.check_range("tokens", tokens, len(table), "a row of the embedding")
            raise
        x = (words if scale == 1 else words * scale).add_(position)[:, 0]
        return x if norm is None else F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, norm.eps)


def tensors_of(params: Any) -> Iterator[Tensor]:
    """All tensors of params."""
    for value in params:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from tensors_of(value)


class _Product:
    """x weight^T + bias + residual for x (rows, k) of each step, weight (n, k): cast and packed once.

    x is cast too. The result has the dtype of residual.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        parts: Sequence[Tensor],
        bias: Tensor | None,
        rows: int,
        dtype: torch.dtype,
        join: Callable[..., Tensor] = lambda weight: weight,
    ) -> None:
        """parts: of which `join` makes the weight. module, name: for which a packed weight is kept."""
        self.dtype, self.bias = dtype, None if bias is None else bias.to(dtype)
        sizes = sum([len(part) for part in parts]), parts[0].shape[1]
        kind = cpu_matmul.packing(rows, parts[0].new_empty(()).expand(sizes), dtype)
        self.is_prepacked = kind == "prepacked"
        if kind is None:
            self.weight = join(*parts).detach().to(dtype).t()
            return
        pack = cpu_matmul.prepack if self.is_prepacked else cpu_matmul.transposed
        packed = keep(module, name, (kind, dtype), parts, lambda *copies: pack(join(*copies).to(dtype)))
        self.weight = packed if self.is_prepacked else packed.t()

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        bias = self.bias
        if x.dtype is not self.dtype:
            x = x.to(self.dtype)
        if residual is not None and residual.dtype is not self.dtype:
            return residual + self(x)
        if self.is_prepacked:
            return cpu_matmul.prepacked_product(x, self.weight, bias, residual)
        if bias is None:
            return torch.mm(x, self.weight) if residual is None else torch.addmm(residual, x, self.weight)
        out = torch.addmm(bias, x, self.weight)
        return out if residual is None else out.add_(residual)


def _products(layer: DecoderLayerParams, rows: int, dtype: torch.dtype) -> Sequence[_Product]:
    (weights, biases, fc, fc_bias), ((w_qs,), (b_qs,), enc_fc, enc_fc_bias) = layer.slf_attn[:4], layer.enc_attn[:4]
    join = partial(_joined, d_k=layer.slf_attn.d_k, d_v=layer.slf_attn.d_v)
    all_biases = without_gaps(weights, biases)
    product, ffn = partial(_Product, layer.memory, rows=rows, dtype=dtype), layer.ffn
    return [
        product("qkv", weights, None if all_biases[0] is None else join(*all_biases), join=join),
        product("fc", [fc], fc_bias),
        product("w_qs", [w_qs], b_qs),
        product("enc_fc", [enc_fc], enc_fc_bias),
        product("w_1", [ffn.weight1], ffn.bias1),
        product("w_2", [ffn.weight2], ffn.bias2),
    ]


def _joined(queries: Any, keys: Any, values: Any, d_k: int, d_v: int) -> Tensor:
    """The rows of all queries, then for each head those of its keys and its values."""
    return torch.cat([queries, *chain.from_iterable(zip(keys.split(d_k), values.split(d_v), strict=True))])


class _Norm(NamedTuple):
    """The norm of a sum that a product has made."""

    shape: list[int]
    weight: Tensor
    bias: Tensor
    eps: float

    @staticmethod
    def of(norm: NormParams) -> _Norm:
        return _Norm(list(norm.weight.shape), norm.weight, norm.bias, norm.eps)

    def __call__(self, pending: PendingResidual) -> tuple[Tensor, Tensor]:
        z = pending.branch
        return torch.layer_norm(z, *self), z


class _Now:
    """What all attentions of a step read. place: of the step, from 0. A bias hides keys, or is None."""

    attend: Callable[..., Tensor]
    place: int
    past_bias: Tensor | None
    memory_bias: Tensor | None


class _SelfAttention:
    """past: (B, Hk, capacity, W, Dk + Dv): keys and values next to each other, so that one operator writes both. So are
    their rows in the weight of `qkv`, see `_joined`."""

    def __init__(
        self, params: AttentionParams, qkv: _Product, fc: _Product, now: _Now, cache: DecoderCache, dtype: torch.dtype
    ) -> None:
        self.now, self.d_k, self.d_v, self.scale = now, params.d_k, params.d_v, params.softmax_scale
        self.n_head, self.n_head_kv = (len(weight) // self.d_k for weight in params.weights[:2])
        self.qkv, self.fc, self.norm = qkv, fc, _Norm.of(params.norm)
        sizes = (cache.batch, self.n_head_kv, cache.capacity, cache.rows, self.d_k + self.d_v)
        self.past = torch.empty(sizes, dtype=dtype)

    def bind(self, cache: DecoderCache) -> None:
        B, W, H, Hk, D = cache.batch, cache.rows, self.n_head, self.n_head_kv, self.d_k + self.d_v
        self.rows, row, head = W, H * self.d_k + Hk * D, cache.capacity * W * D
        # Sizes and strides of views: of a step's qkv (rows, row) as q (B, H, W, Dk) and as a position of past; of past
        # as keys (B, Hk, num_keys, Dk) and values.
        self.q = (B, H, W, self.d_k), (W * row, self.d_k, row, 1)
        self.new = (B, Hk, W, D), (W * row, D, row, 1), H * self.d_k
        self.keys_and_values = (B, Hk), (Hk * head, head, D, 1), self.d_k, self.d_v

    def compute(self, x: Tensor, residual: Tensor) -> PendingResidual:
        """Attention to all tokens so far."""
        now, qkv, past = self.now, self.qkv(x), self.past
        past.select(2, now.place).copy_(qkv.as_strided(*self.new))
        (size, stride, d_k, d_v), num_keys = self.keys_and_values, (now.place + 1) * self.rows
        keys = past.as_strided((*size, num_keys, d_k), stride)
        values = past.as_strided((*size, num_keys, d_v), stride, d_k)
        out = now.attend(qkv.as_strided(*self.q), keys, values, now.past_bias, self.scale)
        out = (out if self.rows == 1 else out.transpose(1, 2)).reshape(len(x), -1)
        return PendingResidual(self.fc(out, residual), None)


class _MemoryAttention:
    """Attention to the encoder's output."""

    def __init__(self, key: nn.Module, params: AttentionParams, w_qs: _Product, fc: _Product, now: _Now) -> None:
        self.key, self.now, self.d_k, self.scale = key, now, params.d_k, params.softmax_scale
        self.n_head = len(params.weights[0]) // params.d_k
        self.w_qs, self.fc, self.norm = w_qs, fc, _Norm.of(params.norm)

    def bind(self, cache: DecoderCache, memory: dict[nn.Module, tuple[Tensor, Tensor]]) -> None:
        self.keys_and_values = memory[self.key]
        B, W, H, d_k = cache.batch, cache.rows, self.n_head, self.d_k
        self.rows, self.q = W, ((B, H, W, d_k), (W * H * d_k, d_k, H * d_k, 1))

    def compute(self, x: Tensor, residual: Tensor) -> PendingResidual:
        q = self.w_qs(x).as_strided(*self.q)
        out = self.now.attend(q, *self.keys_and_values, self.now.memory_bias, self.scale)
        out = (out if self.rows == 1 else out.transpose(1, 2)).reshape(len(x), -1)
        return PendingResidual(self.fc(out, residual), None)


class _FeedForward:
    def __init__(self, params: FeedForwardParams, w_1: _Product, w_2: _Product) -> None:
        self.w_1, self.w_2 = w_1, w_2
        self.activation, self.norm = params.activation, _Norm.of(params.norm)

    def compute(self, x: Tensor, residual: Tensor) -> PendingResidual:
        hidden = self.w_1(x)
        hidden = hidden.relu_() if self.activation == "relu" else activate(hidden, self.activation)
        return PendingResidual(self.w_2(hidden, residual), None)
