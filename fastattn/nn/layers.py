"""One layer of the encoder and one of the decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn

from fastattn.backends import Backend
from fastattn.masks import AttentionMask
from fastattn.nn.attention import MultiHeadAttention
from fastattn.nn.decoding import StepSublayer
from fastattn.nn.feed_forward import PositionwiseFeedForward
from fastattn.nn.kv_cache import DecoderCache
from fastattn.nn.params import Params
from fastattn.nn.plan import Plan, Sublayer, open_plan
from fastattn.nn.residual import HiddenStateT, Norm
from fastattn.nn.run_layer import run_layer
from fastattn.ops._checks import check_arguments, check_flags
from fastattn.ops.feed_forward import Activation

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing from Python 3.11 on


class LayerOptions(TypedDict, total=False):
    """Keyword arguments of a layer, which a stack passes on to its layers. They are described at EncoderLayer."""

    attn_dropout: float
    n_head_kv: int | None
    activation: Activation
    norm_first: bool
    norm: Norm
    qk_norm: bool
    softcap: float | None
    attention_bias: bool
    backend: Backend | None
    device: torch.device | str | int | None
    dtype: torch.dtype | None


_SHARED = frozenset(("norm_first", "norm", "backend", "device", "dtype"))  # options of both kinds of sublayer


class _Layer(nn.Module):
    """A layer's attention sublayers, by their names, and its feed-forward."""

    attentions: tuple[str, ...]
    slf_attn: MultiHeadAttention

    def __init__(
        self,
        d_model: int,
        d_inner: int,
        n_head: int,
        d_k: int,
        d_v: int,
        dropout: float = 0.1,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        if unknown := options.keys() - LayerOptions.__annotations__:
            raise TypeError(f"{type(self).__name__} got an unexpected keyword argument {min(unknown)!r}")
        heads: dict[str, Any] = dict(options)
        activation, bias = heads.pop("activation", "relu"), heads.pop("attention_bias", False)
        check_arguments(d_inner=d_inner)
        check_flags(attention_bias=bias)
        for name in self.attentions:
            self.add_module(name, MultiHeadAttention(n_head, d_model, d_k, d_v, dropout, bias=bias, **heads))
        shared = {name: heads[name] for name in _SHARED & heads.keys()}
        self.pos_ffn = PositionwiseFeedForward(d_model, d_inner, dropout, activation=activation, **shared)
        self.norm_first = self.pos_ffn.norm_first

    def _self_attention(self, mask: Tensor | AttentionMask | None) -> Sublayer:
        attn = self._modules["slf_attn"]
        return Sublayer(_params(attn, self.norm_first, False), lambda x: attn(x, x, x, mask)[0], mask)

    def _feed_forward(self) -> Sublayer:
        ffn = self._modules["pos_ffn"]
        return Sublayer(_params(ffn, self.norm_first), ffn)


def _params(sublayer: nn.Module, *options: bool) -> Params | None:
    """Of a sublayer; None of a module of the user's in its place."""
    return sublayer.params(*options) if isinstance(sublayer, (MultiHeadAttention, PositionwiseFeedForward)) else None


class EncoderLayer(_Layer):
    """Self-attention, then feed-forward.

    d_model: width of the input and of the output.
    d_inner: width of the feed-forward's hidden layer.
    n_head, d_k, d_v: attention heads, the width of each for queries and keys, and for values.
    dropout: after each sublayer.
    attn_dropout: on the attention weights. 0.1 whatever dropout is, as in the public implementation.
    n_head_kv, norm, qk_norm, softcap: see MultiHeadAttention.     attention_bias: its bias.
    activation: see PositionwiseFeedForward.
    norm_first: a layer gives the sum of its last residual connection, without a norm, as
        torch.nn.TransformerEncoderLayer(norm_first=True) does. PendingResidual says how a stack is built and ended.
    backend: given to every op.
    device, dtype: of the parameters, as in torch.nn.
    ValueError for an argument that makes no such module.
    Source: Vaswani et al. 2017, section 3.1.
    """

    attentions = ("slf_attn",)

    def forward(
        self,
        enc_input: HiddenStateT,
        slf_attn_mask: Tensor | AttentionMask | None = None,
        *,
        return_attns: bool = False,
        plan: Plan | None = None,
    ) -> tuple[HiddenStateT, Tensor | None]:
        """enc_input: (B, L, d_model), or with norm_first also a PendingResidual of such, else TypeError.

        slf_attn_mask: see as_attention_mask.     plan: what the forward has decided, shared by its layers.
        Returns (output, of enc_input's type; attention weights (B, n_head, L, L) or None).
        """
        if return_attns or (plan := open_plan(plan, enc_input)) is None:
            x, slf_attn = self.slf_attn(enc_input, enc_input, enc_input, slf_attn_mask, return_attn=return_attns)
            return self.pos_ffn(x), slf_attn
        sublayers = self._self_attention(slf_attn_mask), self._feed_forward()
        return run_layer(plan, self.norm_first, enc_input, sublayers), None


class DecoderLayer(_Layer):
    """Self-attention, attention to the encoder's output, then feed-forward.

    d_model: width of the input, of the encoder's output and of the output.
    d_inner: width of the feed-forward's hidden layer.
    n_head, d_k, d_v: heads of each attention, the width of each head for queries and keys, and for values.
    The other arguments are those of EncoderLayer.

    A subclass that overrides forward has to hand `cache` on to its attentions, for decoding.
    Source: Vaswani et al. 2017, section 3.1.
    """

    attentions = ("slf_attn", "enc_attn")
    enc_attn: MultiHeadAttention

    def forward(
        self,
        dec_input: HiddenStateT,
        enc_output: Tensor | None,
        slf_attn_mask: Tensor | AttentionMask | None = None,
        dec_enc_attn_mask: Tensor | AttentionMask | None = None,
        *,
        return_attns: bool = False,
        enc_projected: tuple[Tensor, Tensor] | None = None,
        plan: Plan | None = None,
        cache: DecoderCache | None = None,
    ) -> tuple[HiddenStateT, Tensor | None, Tensor | None]:
        """dec_input: (B, Lt, d_model), or with norm_first also a PendingResidual of such, else TypeError.
        enc_output: (B, Ls, d_model).

        Masks: see as_attention_mask. enc_projected: enc_attn's keys and values, (w_ks(enc_output), w_vs(enc_output)),
        where they were computed before.     plan: as of an EncoderLayer.
        cache: of decoding step by step: dec_input is the newest token of each beam, (B, W, d_model), see
        MultiHeadAttention. enc_output and masks are not read: `layer(x, None, cache=cache)`.
        Returns (output, of dec_input's type; weights of the self-attention (B, n_head, Lt, Lt) and of the
        attention to the encoder (B, n_head, Lt, Ls), or None).
        """
        if cache is not None:
            x: Any = dec_input
            for sublayer in self.steps():
                x = sublayer.call(x, cache)
            return x, None, None
        if return_attns or (plan := open_plan(plan, dec_input)) is None:
            x, slf_attn = self.slf_attn(dec_input, dec_input, dec_input, slf_attn_mask, return_attn=return_attns)
            options = {"return_attn": return_attns, "projected": enc_projected}
            x, enc_attn = self.enc_attn(x, enc_output, enc_output, dec_enc_attn_mask, **options)
            return self.pos_ffn(x), slf_attn, enc_attn
        attn, mask, projected = self._modules["enc_attn"], dec_enc_attn_mask, enc_projected
        to_memory = Sublayer(
            None if projected is None else _params(attn, self.norm_first, True),
            lambda x: attn(x, enc_output, enc_output, mask, projected=projected)[0],
            mask,
            projected or (),
        )
        sublayers = self._self_attention(slf_attn_mask), to_memory, self._feed_forward()
        return run_layer(plan, self.norm_first, dec_input, sublayers), None, None

    def steps(self) -> list[StepSublayer]:
        """The sublayers, as steps of decoding compute them."""
        attn, to_memory, ffn = (self._modules[name] for name in (*self.attentions, "pos_ffn"))
        params = [_params(attn, self.norm_first, False), _params(to_memory, self.norm_first, True)]
        read = {"reads_memory": True}
        return [
            StepSublayer(params[0], attn, lambda x, cache: attn(x, None, None, cache=cache)[0]),
            StepSublayer(params[1], to_memory, lambda x, cache: to_memory(x, None, None, cache=cache, **read)[0], True),
            StepSublayer(_params(ffn, self.norm_first), ffn, lambda x, cache: ffn(x)),
        ]
