"""One layer of the encoder and one of the decoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastattn.backends import Backend
from fastattn.masks import AttentionMask
from fastattn.nn._checks import check_arguments
from fastattn.nn.attention import MultiHeadAttention
from fastattn.nn.feed_forward import PositionwiseFeedForward
from fastattn.nn.kv_cache import DecoderCache
from fastattn.nn.residual import HiddenState
from fastattn.nn.straight import Parts, Plan, attention_parts, feed_forward_parts, run_layer
from fastattn.ops.feed_forward import Activation


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
        *,
        attn_dropout: float = 0.1,
        n_head_kv: int | None = None,
        activation: Activation = "relu",
        norm_first: bool = False,
        backend: Backend | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_arguments(d_inner=d_inner)
        common = {"dropout": dropout, "norm_first": norm_first, "backend": backend, "device": device, "dtype": dtype}
        heads = {"attn_dropout": attn_dropout, "n_head_kv": n_head_kv}
        for name in self.attentions:
            self.add_module(name, MultiHeadAttention(n_head, d_model, d_k, d_v, **heads, **common))
        self.norm_first = norm_first
        self.pos_ffn = PositionwiseFeedForward(d_model, d_inner, activation=activation, **common)

    def parts(self) -> list[Parts] | None:
        """What the straight path reads, or None: something is modified. An attention after the first has a memory."""
        parts: list[Parts] = []
        for name in (*self.attentions, "pos_ffn"):
            if name == "pos_ffn":
                part = feed_forward_parts(self._modules[name], self.norm_first)
            else:
                part = attention_parts(self._modules[name], self.norm_first, bool(parts))
            if part is None:
                return None
            parts.append(part)
        return parts


class EncoderLayer(_Layer):
    """Self-attention, then feed-forward.

    d_model: width of the input and of the output.
    d_inner: width of the feed-forward's hidden layer.
    n_head, d_k, d_v: attention heads, the width of each for queries and keys, and for values.
    dropout: after each sublayer.
    attn_dropout: on the attention weights. 0.1 whatever dropout is, as in the public implementation.
    n_head_kv: see MultiHeadAttention.
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
        enc_input: HiddenState,
        slf_attn_mask: Tensor | AttentionMask | None = None,
        *,
        return_attns: bool = False,
        plan: Plan | None = None,
    ) -> tuple[HiddenState, Tensor | None]:
        """enc_input: (B, L, d_model), or with norm_first also a PendingResidual of such, else TypeError.

        slf_attn_mask: see as_attention_mask.     plan: what the forward has decided, shared by its layers.
        Returns (output, of enc_input's type; attention weights (B, n_head, L, L) or None).
        """
        if not return_attns and (out := run_layer(plan, self, enc_input, (slf_attn_mask,))) is not None:
            return out, None
        x, slf_attn = self.slf_attn(enc_input, enc_input, enc_input, slf_attn_mask, return_attn=return_attns)
        return self.pos_ffn(x), slf_attn


class DecoderLayer(_Layer):
    """Self-attention, attention to the encoder's output, then feed-forward.

    d_model: width of the input, of the encoder's output and of the output.
    d_inner: width of the feed-forward's hidden layer.
    n_head, d_k, d_v: heads of each attention, the width of each head for queries and keys, and for values.
    The other arguments are those of EncoderLayer.

    A subclass that overrides forward has to override step too, for decoding.
    Source: Vaswani et al. 2017, section 3.1.
    """

    attentions = ("slf_attn", "enc_attn")
    enc_attn: MultiHeadAttention

    def forward(
        self,
        dec_input: HiddenState,
        enc_output: Tensor,
        slf_attn_mask: Tensor | AttentionMask | None = None,
        dec_enc_attn_mask: Tensor | AttentionMask | None = None,
        *,
        return_attns: bool = False,
        enc_projected: tuple[Tensor, Tensor] | None = None,
        plan: Plan | None = None,
    ) -> tuple[HiddenState, Tensor | None, Tensor | None]:
        """dec_input: (B, Lt, d_model), or with norm_first also a PendingResidual of such, else TypeError.
        enc_output: (B, Ls, d_model).

        Masks: see as_attention_mask. enc_projected: enc_attn's keys and values, (w_ks(enc_output), w_vs(enc_output)),
        where they were computed before.     plan: as of an EncoderLayer.
        Returns (output, of dec_input's type; weights of the self-attention (B, n_head, Lt, Lt) and of the
        attention to the encoder (B, n_head, Lt, Ls), or None).
        """
        if not return_attns and enc_projected is not None:
            masks = slf_attn_mask, dec_enc_attn_mask
            if (out := run_layer(plan, self, dec_input, masks, *enc_projected)) is not None:
                return out, None, None
        x, slf_attn = self.slf_attn(dec_input, dec_input, dec_input, slf_attn_mask, return_attn=return_attns)
        x, enc_attn = self.enc_attn(
            x, enc_output, enc_output, dec_enc_attn_mask, return_attn=return_attns, projected=enc_projected
        )
        return self.pos_ffn(x), slf_attn, enc_attn

    def step(self, x: HiddenState, cache: DecoderCache) -> HiddenState:
        """The layer for one new token a beam, as MultiHeadAttention.step. x: (B, W, d_model)."""
        return self.pos_ffn.step(self.enc_attn.step_to_memory(self.slf_attn.step(x, cache), cache), cache)
