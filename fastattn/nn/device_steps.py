"""The steps of an unmodified decoder by the public ops: on every device and with every backend.

They read no number of the host, so that a CUDA graph can repeat them (fastattn/generate/kept_graphs.py). On a CPU with
the backend aten those of decoding.py are faster. Both have the same numbers up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch.nn.functional as F
from torch import Tensor

from fastattn.backends import Backend
from fastattn.nn.decoding import DecoderParams
from fastattn.nn.kv_cache import DecoderCache
from fastattn.nn.linear import LinearMap
from fastattn.nn.params import AttentionParams, FeedForwardParams, NormParams, Params
from fastattn.nn.residual import HiddenState, PendingResidual, connect
from fastattn.ops import _autocast
from fastattn.ops.add_layer_norm import dropout_add_layer_norm
from fastattn.ops.decode_attention import decode_attention
from fastattn.ops.feed_forward import Activation, feed_forward


class DeviceSteps:
    """Steps the decoder of these params. What a step changes is in the cache."""

    def __init__(self, params: DecoderParams) -> None:
        self.params = params

    def select(self, sequences: Tensor, cache: DecoderCache) -> None:
        """As StraightSteps.select. Here nothing is kept of sequences."""

    def step(self, tokens: Tensor, cache: DecoderCache) -> Tensor:
        """The output of the decoder's last layer (B, W, d_model), for tokens (B, W). The cache is not advanced."""
        params, embedded = self.params, self._embed(tokens, cache.position)
        x: HiddenState = embedded if params.final_norm is None else PendingResidual(embedded, None)
        for layer in params.layers:
            slf_attn, enc_attn, ffn, key = layer
            x = _run(x, slf_attn, partial(_attend, slf_attn, partial(cache.attend, key), cache))
            x = _run(x, enc_attn, partial(_attend, enc_attn, partial(cache.attend_memory, key), cache))
            x = _run(x, ffn, partial(_feed_forward, ffn, cache))
        return x if isinstance(x, Tensor) else _add_norm(cast(NormParams, params.final_norm), x)[0]

    def _embed(self, tokens: Tensor, place: Tensor) -> Tensor:
        """The input of the first layer. place: (1,), of the tokens."""
        params = self.params
        words, position = F.embedding(tokens, params.embedding), params.positions.index_select(0, place)
        if params.unplaced_token is not None:
            position = position.masked_fill((tokens == params.unplaced_token)[..., None], 0)
        x = (words if params.scale == 1 else words * params.scale) + position
        return x if params.embedding_norm is None else _add_norm(params.embedding_norm, PendingResidual(x, None))[0]


def _run(x: HiddenState, params: Params, branch: Callable[[Tensor], Tensor]) -> HiddenState:
    """A sublayer. Under torch.autocast its input is cast once for all products that read it."""

    def compute(normed: Tensor, residual: Tensor) -> PendingResidual:
        return PendingResidual(branch(*_autocast.autocast_inputs(normed)), residual)

    return connect(x, compute, partial(_add_norm, params.norm, backend=params.backend))


def _add_norm(norm: NormParams, pending: PendingResidual, backend: Backend | None = None) -> tuple[Tensor, Tensor]:
    """(norm(z), z) of a pending sum z."""
    tensors = pending.branch, pending.residual, norm.weight, norm.bias
    out, z = dropout_add_layer_norm(*tensors, eps=norm.eps, return_sum=True, backend=backend)
    return out, z


def _attend(params: AttentionParams, attend: Callable[..., Tensor], cache: DecoderCache, x: Tensor) -> Tensor:
    """attend: of the cache, without its last arguments: the heads (B, W, heads, width) and how they attend."""
    maps = zip(params.weights, params.biases, (params.d_k, params.d_k, params.d_v), strict=False)
    heads = [_linear(cache, x, weight, bias).unflatten(2, (-1, width)) for weight, bias, width in maps]
    out = attend(*heads, partial(decode_attention, scale=params.softmax_scale, backend=params.backend))
    return _linear(cache, out.flatten(2), params.fc, params.fc_bias)


def _feed_forward(params: FeedForwardParams, cache: DecoderCache, x: Tensor) -> Tensor:
    weight1, bias1 = cache.linear.weights(LinearMap(params.weight1, params.bias1), x.device)
    weight2, bias2 = cache.linear.weights(LinearMap(params.weight2, params.bias2), x.device)
    activation = cast(Activation, params.activation)
    return feed_forward(x, weight1, bias1, weight2, bias2, activation, backend=params.backend)


def _linear(cache: DecoderCache, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, *cache.linear.weights(LinearMap(weight, bias), x.device))
