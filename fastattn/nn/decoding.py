"""The steps of an unmodified decoder on a CPU, by PyTorch's operators and without calling its modules.

One token of a small model is 0.5 ms of work for a CPU. Module calls, checks and the choice of a backend for each op
would take as long again. So everything is decided once for a generation, at its first step: that no module is modified,
that the backend aten is used, the dtype, which weights are concatenated or packed, all shapes.
A step is then some 25 operators and views a layer. If `StraightSteps.of` returns None, the modules step op by op, by
their `step` methods, with the same numbers up to rounding.

B sequences with W beams, rows = B * W, the newest tokens of all beams. Hidden states are matrices (rows, d_model).
Sublayers add their input in the product that ends them: it saves an operator and, in 16 bits, a rounding.
Memory: the cache, the query, key and value weights of self-attention once more, and what is packed or cast.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn._tracing import is_transformed
from fastattn.backends import cpu_matmul, likely_backend, load_backend
from fastattn.nn.attention import READ_BY_OPS, MultiHeadAttention, ScaledDotProductAttention
from fastattn.nn.feed_forward import PositionwiseFeedForward
from fastattn.nn.fusible import all_can_fuse, can_fuse, is_unmodified
from fastattn.nn.kv_cache import DecoderCache
from fastattn.nn.layers import DecoderLayer
from fastattn.nn.linear import without_gaps
from fastattn.ops import _autocast, _checks
from fastattn.ops.feed_forward import activate

_OPS = ("linear", "embed_layer_norm", "add_layer_norm", "decode_attention", "feed_forward")
_PLAIN = (nn.Parameter, Tensor)


class StraightSteps:
    """Steps the decoder that it was made for. It is an attribute of the cache that it was made for."""

    def __init__(self, decoder: Any, cache: DecoderCache, dtype: torch.dtype) -> None:
        """dtype: of products, keys and values; hidden states keep that of the embedding."""
        self.dtype, self.norm_first, self.device = dtype, decoder.norm_first, cache.position.device
        embedding, norm = decoder.trg_word_emb, _Norm.of(decoder.layer_norm)
        self.embedding, self.padding_idx, self.norm = embedding.weight, embedding.padding_idx, norm
        self.positions = decoder.position_enc.pos_table[0]
        self.embedding_scale = decoder.d_model**0.5 if decoder.scale_emb else 1.0
        self.embed_layer_norm = load_backend("embed_layer_norm", "aten").embed_layer_norm
        self.aten = load_backend("decode_attention", "aten")
        rows = cache.batch * cache.rows
        self.layers = [
            (
                _SelfAttention(layer.slf_attn, cache, dtype),
                _MemoryAttention(layer.enc_attn, rows, dtype),
                _FeedForward(layer.pos_ffn, rows, dtype),
            )
            for layer in decoder.layer_stack
        ]
        self.bind(cache)

    @staticmethod
    def of(decoder: Any, cache: DecoderCache) -> StraightSteps | None:
        """For a models.Decoder. Returns None if it is modified, or not on a CPU with the backend aten."""
        device = cache.position.device
        if (
            device.type != "cpu"
            or cache.on_device
            or torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or is_transformed()
            or not _is_unmodified(decoder)
        ):
            return None
        backends = {module.backend for module in decoder.modules() if hasattr(module, "backend")}
        if any(likely_backend(op, device, backend) != "aten" for op in _OPS for backend in backends):
            return None
        weight = decoder.trg_word_emb.weight
        dtype = _autocast.dtype_under_autocast(weight)
        keys_and_values = [t for pair in cache.memories[0].projected.values() for t in pair]
        own = [*decoder.parameters(), *decoder.buffers()]
        if any(type(t) not in _PLAIN or t.device != device or t.numel() == 0 for t in (*own, *keys_and_values)):
            return None
        if any(t.dtype != weight.dtype for t in own) or any(t.dtype != dtype for t in keys_and_values):
            return None
        return StraightSteps(decoder, cache, dtype)

    def bind(self, cache: DecoderCache) -> None:
        """Views and masks for the sequences that the cache holds now."""
        memory, lengths = cache.memories[0]
        for slf_attn, enc_attn, _ in self.layers:
            slf_attn.bind(cache)
            enc_attn.bind(cache, memory)
        # A source without tokens attends to one key. It is 0 there, see Decoder.memory, and so is its value.
        lengths, longest = lengths.clamp_min(1), next(iter(memory.values()))[0].shape[2]
        self.memory_bias = None
        if not (lengths >= longest).all():
            visible = self.aten.visible_keys(cache.batch, 1, longest, 1, self.device, lengths, None)
            self.memory_bias = self.aten.as_bias(visible, self.dtype)

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
            attend, place, (B, W) = self.aten.attend, cache.length, tokens.shape
            num_keys, past_bias = (place + 1) * W, None
            if W > 1:
                ancestors = None if cache.ancestors is None else cache.ancestors[:, :, : place + 1]
                visible = self.aten.visible_keys(B, W, place + 1, W, self.device, None, ancestors)
                past_bias = self.aten.as_bias(visible, self.dtype)
            x = self._embed(tokens, place)
            for slf_attn, enc_attn, pos_ffn in self.layers:
                # Self-attention, on all tokens so far.
                y = slf_attn.norm(x) if self.norm_first else x
                qkv, past = slf_attn.qkv(y), slf_attn.past
                past.select(2, place).copy_(qkv.as_strided(*slf_attn.new))
                size, stride, d_k, d_v = slf_attn.keys_and_values
                keys = past.as_strided((*size, num_keys, d_k), stride)
                values = past.as_strided((*size, num_keys, d_v), stride, d_k)
                out = attend(qkv.as_strided(*slf_attn.q), keys, values, past_bias, slf_attn.scale)
                x = slf_attn.fc((out if W == 1 else out.transpose(1, 2)).reshape(B * W, -1), x)
                x = x if self.norm_first else slf_attn.norm(x)
                # Attention to the encoder's output.
                y = enc_attn.norm(x) if self.norm_first else x
                q = enc_attn.w_qs(y).as_strided(*enc_attn.q)
                out = attend(q, *enc_attn.keys_and_values, self.memory_bias, enc_attn.scale)
                x = enc_attn.fc((out if W == 1 else out.transpose(1, 2)).reshape(B * W, -1), x)
                x = x if self.norm_first else enc_attn.norm(x)
                # Feed-forward.
                y = pos_ffn.norm(x) if self.norm_first else x
                hidden = pos_ffn.w_1(y)
                hidden = hidden.relu_() if pos_ffn.activation == "relu" else activate(hidden, pos_ffn.activation)
                x = pos_ffn.w_2(hidden, x)
                x = x if self.norm_first else pos_ffn.norm(x)
            return (self.norm(x) if self.norm_first else x).view(B, W, -1)

    def _embed(self, tokens: Tensor, place: int) -> Tensor:
        """(rows, d_model): embeddings with their positions, normalised unless norm_first."""
        tokens, position = tokens.reshape(-1, 1), self.positions[place : place + 1]
        table, scale, norm = self.embedding, self.embedding_scale, self.norm
        try:
            if self.norm_first:
                words = F.embedding(tokens, table)
                x = (words if scale == 1 else words * scale).add_(position)
            else:
                options = (None, scale, self.padding_idx, norm.eps, 0.0, None)
                x = self.embed_layer_norm(tokens, table, position, norm.weight, norm.bias, *options)
        except (IndexError, RuntimeError):
            _checks.check_indices("tokens", tokens, "the model", table)
            _checks.check_range("tokens", tokens, len(table), "a row of the embedding")
            raise
        return x[:, 0]


class _Product:
    """x weight^T + bias + residual for x (rows, k) of each step, weight (n, k): cast and packed once.

    x is cast too. The result has the dtype of residual.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: int, dtype: torch.dtype) -> None:
        self.dtype, weight, self.bias = dtype, weight.to(dtype), None if bias is None else bias.to(dtype)
        kind = cpu_matmul.packing(rows, weight, dtype)
        self.is_prepacked = kind == "prepacked"
        weight = cpu_matmul.transposed(weight) if kind == "transposed" else weight
        self.weight = cpu_matmul.prepack(weight) if self.is_prepacked else weight.t()

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


class _Norm(NamedTuple):
    shape: list[int]
    weight: Tensor
    bias: Tensor
    eps: float

    @staticmethod
    def of(norm: nn.LayerNorm) -> _Norm:
        return _Norm(list(norm.normalized_shape), norm.weight, norm.bias, norm.eps)

    def __call__(self, z: Tensor) -> Tensor:
        return torch.layer_norm(z, *self)


class _SelfAttention:
    """past: (B, Hk, capacity, W, Dk + Dv): keys and values next to each other, so that one operator writes both. So are
    their rows in the weight of `qkv`: first those of all queries, then for each head its keys and its values."""

    def __init__(self, attn: MultiHeadAttention, cache: DecoderCache, dtype: torch.dtype) -> None:
        self.d_k, self.d_v, self.scale, rows = (
            attn.d_k,
            attn.d_v,
            1 / attn.attention.temperature,
            cache.batch * cache.rows,
        )
        maps = attn.w_qs, attn.w_ks, attn.w_vs
        weights = [w.weight for w in maps]
        self.n_head, self.n_head_kv = (len(weight) // attn.d_k for weight in weights[:2])
        biases = without_gaps(weights, tuple([w.bias for w in maps]))
        weight, bias = self._joined(*weights), None if biases[0] is None else self._joined(*biases)
        self.qkv, self.fc = _Product(weight, bias, rows, dtype), _Product(attn.fc.weight, attn.fc.bias, rows, dtype)
        self.norm = _Norm.of(attn.layer_norm)
        sizes = (cache.batch, self.n_head_kv, cache.capacity, cache.rows, self.d_k + self.d_v)
        self.past = torch.empty(sizes, dtype=dtype)

    def _joined(self, queries: Tensor, *keys_and_values: Tensor) -> Tensor:
        of_heads = [t.unflatten(0, (self.n_head_kv, -1)) for t in keys_and_values]
        return torch.cat([queries, torch.cat(of_heads, 1).flatten(0, 1)])

    def bind(self, cache: DecoderCache) -> None:
        B, W, H, Hk, D = cache.batch, cache.rows, self.n_head, self.n_head_kv, self.d_k + self.d_v
        row, head = H * self.d_k + Hk * D, cache.capacity * W * D
        # Sizes and strides of views: of a step's qkv (rows, row) as q (B, H, W, Dk) and as a position of past; of past
        # as keys (B, Hk, num_keys, Dk) and values.
        self.q = (B, H, W, self.d_k), (W * row, self.d_k, row, 1)
        self.new = (B, Hk, W, D), (W * row, D, row, 1), H * self.d_k
        self.keys_and_values = (B, Hk), (Hk * head, head, D, 1), self.d_k, self.d_v


class _MemoryAttention:
    def __init__(self, attn: MultiHeadAttention, rows: int, dtype: torch.dtype) -> None:
        self.attn, self.scale, self.norm = attn, 1 / attn.attention.temperature, _Norm.of(attn.layer_norm)
        self.w_qs, self.fc = (_Product(w.weight, w.bias, rows, dtype) for w in (attn.w_qs, attn.fc))

    def bind(self, cache: DecoderCache, memory: dict[nn.Module, tuple[Tensor, Tensor]]) -> None:
        self.keys_and_values = memory[self.attn]
        B, W, row, d_k = cache.batch, cache.rows, len(self.attn.w_qs.weight), self.attn.d_k
        self.q = (B, row // d_k, W, d_k), (W * row, d_k, row, 1)


class _FeedForward:
    def __init__(self, ffn: PositionwiseFeedForward, rows: int, dtype: torch.dtype) -> None:
        self.w_1, self.w_2 = (_Product(w.weight, w.bias, rows, dtype) for w in (ffn.w_1, ffn.w_2))
        self.activation, self.norm = ffn.activation, _Norm.of(ffn.layer_norm)


def _is_unmodified(decoder: Any) -> bool:
    """Whether its steps compute what the classes of the modules do. Hooks of modules that no step calls do not count.

    Dropout may be in training mode in a module that is not, for samples of a decoder's uncertainty.
    """
    if any(module.training for module in decoder.modules()):
        return False
    if not all(map(can_fuse, (decoder.trg_word_emb, decoder.position_enc, decoder.dropout, decoder.layer_norm))):
        return False
    for layer in decoder.layer_stack:
        if type(layer) is not DecoderLayer:
            return False
        attns, ffn = (layer.slf_attn, layer.enc_attn), layer.pos_ffn
        if any(type(attn) is not MultiHeadAttention or not all_can_fuse(attn, READ_BY_OPS) for attn in attns):
            return False
        core = ScaledDotProductAttention, ScaledDotProductAttention.fused_children
        if not all(is_unmodified(attn.attention, *core) for attn in attns):
            return False
        if type(ffn) is not PositionwiseFeedForward or not all_can_fuse(ffn, ffn.fused_children):
            return False
        if any("step" in vars(module) for module in (layer, *attns, ffn)):
            return False
        # Layers made for another model may differ from the stack.
        if any(module.norm_first is not decoder.norm_first for module in (*attns, ffn)):
            return False
    return True
