"""Encoder and decoder: embeddings with their positions, and a stack of layers.

Modules and parameters are named as in the public implementation that transformer.py speaks of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fastattn.masks import AttentionMask
from fastattn.nn import DecoderLayer, EncoderLayer, OpenSum, PositionalEncoding
from fastattn.nn.attention import as_attention_mask
from fastattn.nn.joint_linear import join, joint_linear
from fastattn.nn.plain import plain
from fastattn.nn.residual import Stream, active, add_norm
from fastattn.ops import _arguments as arguments
from fastattn.ops.embed_layer_norm import embed_layer_norm

# For each decoder layer w_ks and w_vs of the encoder's output, (B, Ls, heads * d_k) and (B, Ls, heads * d_v).
EncoderProjected = dict[nn.Module, tuple[Tensor, Tensor]]


class _Stack(nn.Module):
    """What encoder and decoder share: the way from words into the layers, and out of them.

    Post-norm: layer_norm follows the embeddings. norm_first: it follows the last layer, and closes its sum.
    """

    def enter(self, name: str, embedding: nn.Embedding, seq: Tensor, position: Tensor | None) -> Stream:
        """layer_norm(dropout(embedding [* sqrt(d_model)] + positions)); with norm_first the sum before both.

        name: of the argument that seq came as.
        """
        arguments.check_indices(name, seq, "the model", embedding.weight)
        if seq.dim() != 2:
            raise ValueError(f"{name} has shape {tuple(seq.shape)}, expected (B, L)")
        arguments.check_range(name, seq, embedding.num_embeddings, "a row of the embedding")
        scale = self.d_model**0.5 if self.scale_emb else 1.0
        if self.norm_first or not (plain(embedding) and plain(self.position_enc)):
            words = embedding(seq) if scale == 1 else embedding(seq) * scale
            total = OpenSum(self.position_enc(words, position), None)
            return total if self.norm_first else add_norm(total, self.dropout, self.layer_norm, self.backend)
        if position is None:
            self.position_enc.check(seq.shape[1])
        return embed_layer_norm(
            seq,
            embedding.weight,
            self.position_enc.pos_table[0],
            self.layer_norm.weight,
            self.layer_norm.bias,
            self.layer_norm.eps,
            active(self.dropout),
            scale=scale,
            position=position,
            padding_idx=embedding.padding_idx,
            backend=self.backend,
        )

    def leave(self, x: Stream) -> Tensor:
        """The stack's output."""
        return add_norm(x, self.dropout, self.layer_norm, self.backend) if self.norm_first else x


class Encoder(_Stack):
    """Embedding, positions and n_layers EncoderLayers. scale_emb: embeddings are multiplied by sqrt(d_model)."""

    def __init__(
        self,
        n_src_vocab: int,
        d_word_vec: int,
        n_layers: int,
        n_head: int,
        d_k: int,
        d_v: int,
        d_model: int,
        d_inner: int,
        pad_idx: int,
        dropout: float = 0.1,
        n_position: int = 200,
        scale_emb: bool = False,
        *,
        attn_dropout: float = 0.1,
        n_head_kv: int | None = None,
        activation: str = "relu",
        norm_first: bool = False,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        variant = {"attn_dropout": attn_dropout, "n_head_kv": n_head_kv, "activation": activation}
        variant |= {"norm_first": norm_first, "backend": backend}
        self.d_model, self.scale_emb, self.norm_first, self.backend = d_model, scale_emb, norm_first, backend
        self.src_word_emb = nn.Embedding(n_src_vocab, d_word_vec, padding_idx=pad_idx)
        self.position_enc = PositionalEncoding(d_word_vec, n_position)
        self.dropout = nn.Dropout(dropout)
        self.layer_stack = nn.ModuleList(
            EncoderLayer(d_model, d_inner, n_head, d_k, d_v, dropout, **variant) for _ in range(n_layers)
        )
        self.layer_norm = nn.LayerNorm(d_model, eps=1e-6)

    def forward(
        self,
        src_seq: Tensor,
        src_mask: Tensor | AttentionMask | None,
        return_attns: bool = False,
        *,
        position: Tensor | None = None,
    ) -> tuple[Tensor] | tuple[Tensor, list[Tensor]]:
        """src_seq: integer (B, Ls), Ls <= n_position, else ValueError.

        src_mask: AttentionMask, None, or bool or integer (B, 1, Ls), (B, Ls, Ls) or (1, Ls, Ls), nonzero = attend.
        position: integer (B, Ls), each token's place in its sequence, for packed sequences (AttentionMask's
            cu_seqlens); 0, 1, .. unless given.
        Returns (output (B, Ls, d_model),), and with return_attns each layer's weights (B, n_head, Ls, Ls) in a list.
        """
        mask, attns = as_attention_mask(src_mask), []
        x = self.enter("src_seq", self.src_word_emb, src_seq, position)
        for layer in self.layer_stack:
            x, attn = layer(x, mask, return_attns=return_attns)
            attns.append(attn)
        x = self.leave(x)
        return (x, attns) if return_attns else (x,)


class Decoder(_Stack):
    """Embedding, positions and n_layers DecoderLayers. scale_emb: embeddings are multiplied by sqrt(d_model)."""

    def __init__(
        self,
        n_trg_vocab: int,
        d_word_vec: int,
        n_layers: int,
        n_head: int,
        d_k: int,
        d_v: int,
        d_model: int,
        d_inner: int,
        pad_idx: int,
        n_position: int = 200,
        dropout: float = 0.1,
        scale_emb: bool = False,
        *,
        attn_dropout: float = 0.1,
        n_head_kv: int | None = None,
        activation: str = "relu",
        norm_first: bool = False,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        variant = {"attn_dropout": attn_dropout, "n_head_kv": n_head_kv, "activation": activation}
        variant |= {"norm_first": norm_first, "backend": backend}
        self.d_model, self.scale_emb, self.norm_first, self.backend = d_model, scale_emb, norm_first, backend
        self.trg_word_emb = nn.Embedding(n_trg_vocab, d_word_vec, padding_idx=pad_idx)
        self.position_enc = PositionalEncoding(d_word_vec, n_position)
        self.dropout = nn.Dropout(dropout)
        self.layer_stack = nn.ModuleList(
            DecoderLayer(d_model, d_inner, n_head, d_k, d_v, dropout, **variant) for _ in range(n_layers)
        )
        self.layer_norm = nn.LayerNorm(d_model, eps=1e-6)
        self.join_weights()

    def forward(
        self,
        trg_seq: Tensor,
        trg_mask: Tensor | AttentionMask | None,
        enc_output: Tensor,
        src_mask: Tensor | AttentionMask | None,
        return_attns: bool = False,
        *,
        position: Tensor | None = None,
        enc_projected: EncoderProjected | None = None,
    ) -> tuple[Tensor] | tuple[Tensor, list[Tensor], list[Tensor]]:
        """trg_seq: integer (B, Lt), Lt <= n_position, else ValueError; enc_output: (B, Ls, d_model).

        trg_mask, src_mask: over (Lt, Lt) and (Lt, Ls), each as in Encoder.forward.     position: as there.
        enc_projected: project_encoder(enc_output), where it was made before: decoding needs it at every step.
        Returns (output (B, Lt, d_model),), and with return_attns two lists of each layer's weights: of the
        self-attention (B, n_head, Lt, Lt), and of the attention to the encoder (B, n_head, Lt, Ls).
        """
        trg_mask, src_mask = as_attention_mask(trg_mask), as_attention_mask(src_mask)
        slf_attns, enc_attns = [], []
        x = self.enter("trg_seq", self.trg_word_emb, trg_seq, position)
        projected = self.project_encoder(enc_output) if enc_projected is None else enc_projected
        for layer in self.layer_stack:
            known = {"enc_projected": projected[layer]} if layer in projected else {}
            x, slf_attn, enc_attn = layer(x, enc_output, trg_mask, src_mask, return_attns=return_attns, **known)
            slf_attns.append(slf_attn)
            enc_attns.append(enc_attn)
        x = self.leave(x)
        return (x, slf_attns, enc_attns) if return_attns else (x,)

    def project_encoder(self, enc_output: Tensor) -> EncoderProjected:
        """Keys and values of each layer's attention to the encoder's output (B, Ls, d_model), by one product."""
        if not isinstance(enc_output, Tensor):
            got = type(enc_output).__name__
            raise TypeError(f"enc_output must be a Tensor, got {got}; encoder(...) gives a tuple that begins with it")
        if enc_output.dim() != 3 or enc_output.shape[2] != self.d_model:
            expected = f"(B, Ls, d_model = {self.d_model})"
            raise ValueError(f"enc_output has shape {tuple(enc_output.shape)}, expected {expected}")
        layers = self.joined_layers()
        linears = [w for layer in layers for w in (layer.enc_attn.w_ks, layer.enc_attn.w_vs)]
        projected = joint_linear(enc_output, linears, backend=self.backend)
        return dict(zip(layers, zip(projected[::2], projected[1::2], strict=True), strict=True))

    def join_weights(self) -> None:
        """Lay those linear maps' weights side by side, and w_qs before them, so that nothing stays of older blocks."""
        attentions = [layer.enc_attn for layer in self.joined_layers()]
        linears = [a.w_qs for a in attentions] + [w for a in attentions for w in (a.w_ks, a.w_vs)]
        join(linear.weight for linear in linears)

    def joined_layers(self) -> list[DecoderLayer]:
        """All layers but those that somebody has wrapped or replaced."""
        return [layer for layer in self.layer_stack if type(layer) is DecoderLayer]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Decoder:
        super()._apply(fn, recurse)  # a cast or a move gives each parameter memory of its own
        self.join_weights()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.join_weights()  # so does a copy
