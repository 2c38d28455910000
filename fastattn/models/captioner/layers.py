"""The sublayers of the captioner fastattn.models.ABDTransformer, by its own definitions and parameter names.

They differ from those of "Attention Is All You Need": LayerNorm adds eps to an unbiased standard deviation, follows the
residual connection and is followed by dropout; linear maps have biases; the feed-forward has a norm and a dropout
inside; a decoder layer uses one attention module for everything that it attends to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn.backends import Backend
from fastattn.masks import AttentionMask
from fastattn.nn.attention import attend_with_dropout
from fastattn.nn.fusible import can_fuse
from fastattn.nn.kv_cache import DecoderCache
from fastattn.nn.linear import joint_linear
from fastattn.nn.residual import PendingResidual, add_norm, current_dropout_p
from fastattn.ops._checks import check_choice
from fastattn.ops.add_layer_norm import dropout_add_layer_norm
from fastattn.ops.decode_attention import decode_attention
from fastattn.ops.feed_forward import feed_forward

MAX_POSITIONS = 5000
Positions = Literal["batch", "sequence"]


class LayerNorm(nn.Module):
    """a_2 * (x - mean) / (std + eps) + b_2, std with Bessel's correction. Parameters a_2, b_2: (features,)."""

    def __init__(self, features: int, eps: float = 1e-6, *, backend: Backend | None = None) -> None:
        super().__init__()
        self.a_2, self.b_2 = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
        self.eps, self.backend = eps, backend

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x (..., features): of x, or of x + residual."""
        return dropout_add_layer_norm(
            x, residual, self.a_2, self.b_2, eps=self.eps, eps_on_std=True, backend=self.backend
        )


class SublayerConnection(nn.Module):
    """dropout(layer_norm(x + branch)), where branch is a sublayer's output for x."""

    def __init__(self, size: int, dropout: float, *, backend: Backend | None = None) -> None:
        super().__init__()
        self.layer_norm = LayerNorm(size, backend=backend)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        return self.dropout(self.layer_norm(branch, x))


class MultiHeadAttention(nn.Module):
    """linear_out(attention(linear_query(q), linear_key(k), linear_value(v))); all linear maps have biases.

    n_heads must divide d_model, else ValueError. dropout: on the attention weights.
    """

    fused_children = ("linear_query", "linear_key", "linear_value", "dropout")

    def __init__(self, n_heads: int, d_model: int, dropout: float, *, backend: Backend | None = None) -> None:
        super().__init__()
        if n_heads < 1 or d_model % n_heads:
            raise ValueError(f"d_model must be a multiple of the number of heads, got {d_model} and {n_heads} heads")
        self.n_heads, self.d_model, self.backend = n_heads, d_model, backend
        self.linear_query, self.linear_key, self.linear_value, self.linear_out = (
            nn.Linear(d_model, d_model) for _ in range(4)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        query: Tensor,
        memory: Tensor | None,
        mask: AttentionMask | None,
        cache: DecoderCache | None = None,
        which: int | None = None,
    ) -> Tensor:
        """query (B, Lq, d_model); memory (B, Lk, d_model): keys and values, query itself for self-attention.

        cache: of decoding: query (B, W, d_model) is one new token a beam. Its keys and values are added to the cache;
        or, with `which`, it attends to that memory of the cache. memory and mask are not read.
        """
        if cache is not None:
            return self._step(query, cache, which)
        if memory is query:
            maps = (self.linear_query, self.linear_key, self.linear_value)
            q, k, v = joint_linear(query, maps, self.backend)
        else:
            q, k, v = self.linear_query(query), self.linear_key(memory), self.linear_value(memory)
        q, k, v = (self._heads(t).transpose(1, 2) for t in (q, k, v))
        out, _ = attend_with_dropout(q, k, v, mask, self.dropout, self._scale, backend=self.backend)
        return self.linear_out(out.transpose(1, 2).flatten(2))

    def _step(self, x: Tensor, cache: DecoderCache, which: int | None) -> Tensor:
        maps = (self.linear_query, self.linear_key, self.linear_value) if which is None else (self.linear_query,)
        heads = [self._heads(cache.linear(linear, x, self.backend)) for linear in maps]
        attention = partial(decode_attention, scale=self._scale, backend=self.backend)
        attend: Callable[..., Tensor] = cache.attend if which is None else partial(cache.attend_memory, which=which)
        return cache.linear(self.linear_out, attend(self, *heads, attention).flatten(2), self.backend)

    def memory(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of x (B, Lk, d_model) as a cache's Memory holds them, (B, H, Lk, D)."""
        k, v = self._heads(self.linear_key(x)), self._heads(self.linear_value(x))
        return k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()

    @property
    def _scale(self) -> float:
        return (self.d_model // self.n_heads) ** -0.5

    def _heads(self, x: Tensor) -> Tensor:
        """(B, L, d_model) -> (B, L, H, D), a view."""
        return x.unflatten(2, (self.n_heads, -1))


class PositionWiseFeedForward(nn.Module):
    """dropout_2(w_2(dropout_1(relu(w_1(layer_norm(x)))))); layer_norm is torch's."""

    fused_children = ("layer_norm", "w_1", "dropout_1", "w_2")

    def __init__(self, d_model: int, d_ff: int, dropout: float = 0.1, *, backend: Backend | None = None) -> None:
        super().__init__()
        self.w_1, self.w_2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        self.layer_norm = nn.LayerNorm(d_model, eps=1e-6)
        self.dropout_1, self.dropout_2 = nn.Dropout(dropout), nn.Dropout(dropout)
        self.backend = backend

    def forward(self, x: Tensor) -> Tensor:
        """x (B, L, d_model)."""
        normed, _ = add_norm(PendingResidual(x, None), 0.0, self.layer_norm, self.backend)
        if not all(map(can_fuse, (self.w_1, self.dropout_1, self.w_2))):
            return self.dropout_2(self.w_2(self.dropout_1(F.relu(self.w_1(normed)))))
        maps = self.w_1.weight, self.w_1.bias, self.w_2.weight, self.w_2.bias
        dropout_p = current_dropout_p(self.dropout_1)
        return self.dropout_2(feed_forward(normed, *maps, "relu", dropout_p, backend=self.backend))


class FeatEmbedding(nn.Module):
    """video_embeddings: LayerNorm, dropout and a linear map of each frame's features (B, L, d_feat)."""

    def __init__(self, d_feat: int, d_model: int, dropout: float, *, backend: Backend | None = None) -> None:
        super().__init__()
        self.d_feat, norm = d_feat, LayerNorm(d_feat, backend=backend)
        self.video_embeddings = nn.Sequential(norm, nn.Dropout(dropout), nn.Linear(d_feat, d_model))

    def forward(self, x: Tensor) -> Tensor:
        return self.video_embeddings(x)


class TextEmbedding(nn.Module):
    """embed(tokens) * sqrt(d_model)."""

    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, d_model)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens) * math.sqrt(self.embed.embedding_dim)


class PositionalEncoding(nn.Module):
    """dropout(x * sqrt(d_model) + pe): pe (5000, 1, d_model), sines in the even columns, cosines in the odd ones.

    positions: "batch" reads the row of pe by the place in the batch, as the original does on batch-first input: all
        tokens of a sentence get the same row. "sequence" reads it by the place in the sequence.
    ValueError for an odd d_model, and for more than 5000 places.
    """

    pe: Tensor

    def __init__(self, d_model: int, dropout: float, positions: Positions = "batch") -> None:
        super().__init__()
        if d_model % 2:
            raise ValueError(f"d_model must be even, for pairs of sine and cosine, got {d_model}")
        check_choice("positions", positions, get_args(Positions))
        frequency = torch.exp(torch.arange(0, d_model, 2).float() * -(math.log(10000.0) / d_model))
        angle = torch.arange(MAX_POSITIONS).float()[:, None] * frequency
        self.register_buffer("pe", torch.stack([angle.sin(), angle.cos()], -1).view(MAX_POSITIONS, 1, d_model))
        self.dropout = nn.Dropout(dropout)
        self.by_batch = positions == "batch"

    def forward(self, x: Tensor, place: Tensor | None = None) -> Tensor:
        """x (B, L, d_model). place: integer, broadcastable to (B, L), rows of pe in place of those of the batch."""
        if place is None:
            places = x.shape[0 if self.by_batch else 1]
            if places > MAX_POSITIONS:
                what = "sentences in a batch" if self.by_batch else "positions in a sequence"
                raise ValueError(f"there are {places} {what}, and pe has rows for {MAX_POSITIONS}")
            rows = self.pe[:places] if self.by_batch else self.pe[:places, 0]
        else:
            rows = self.pe[:, 0][place]
        return self.dropout(torch.add(rows, x, alpha=math.sqrt(x.shape[2])))


class Generator(nn.Module):
    """log_softmax(linear(x)): log-probabilities of the words."""

    def __init__(self, d_model: int, vocab_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(d_model, vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.linear(x), dim=-1)
