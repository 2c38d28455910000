"""The encoder-decoder Transformer of "Attention Is All You Need" (Vaswani et al. 2017, arXiv:1706.03762).

Architecture, argument order and the names of modules and parameters are those of the widely used PyTorch
implementation attention-is-all-you-need-pytorch, so a state_dict of one loads strictly into the other. Fusion shows
in no parameter: use_backend("reference") runs the same object by the plain formulas.

Differences, all on purpose: attention weights are made only where they are asked for; a query that may attend to
nothing gets 0 instead of the mean of all values; norm_first, activation and n_head_kv, off by default, vary the
sublayers as fastattn.nn describes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fastattn.masks import AttentionMask
from fastattn.models.packing import Packed, worth_it
from fastattn.nn import DecoderLayer, EncoderLayer, OpenSum, PositionalEncoding
from fastattn.nn.attention import as_attention_mask
from fastattn.nn.joint_linear import join, joint_linear
from fastattn.nn.plain import plain
from fastattn.nn.recompute import recomputed
from fastattn.nn.residual import Stream, active, add_norm
from fastattn.ops.embed_layer_norm import embed_layer_norm
from fastattn.ops.linear_cross_entropy import linear_cross_entropy

SCALE_MODES = ("emb", "prj", "none")

# For each decoder layer w_ks and w_vs of the encoder's output, (B, Ls, heads * d_k) and (B, Ls, heads * d_v).
EncoderProjected = dict[nn.Module, tuple[Tensor, Tensor]]


class _Stack(nn.Module):
    """What encoder and decoder share: the way from words into the layers, and out of them.

    Post-norm: layer_norm follows the embeddings. norm_first: it follows the last layer, and closes its sum.
    """

    def enter(self, embedding: nn.Embedding, seq: Tensor, position: Tensor | None) -> Stream:
        """layer_norm(dropout(embedding [* sqrt(d_model)] + positions)); with norm_first the sum before both."""
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
        x = self.enter(self.src_word_emb, src_seq, position)
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
        x = self.enter(self.trg_word_emb, trg_seq, position)
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


class FusedTransformer(nn.Module):
    """Sequence to sequence by attention alone. All arguments but the last seven are the public implementation's.

    n_src_vocab, n_trg_vocab, src_pad_idx, trg_pad_idx: vocabulary sizes, and the index of padding in each.
    d_word_vec = d_model: width of embeddings and of the stream; d_inner: of the feed-forward's hidden layer.
    n_layers: of the encoder, and as many of the decoder.  n_head, d_k, d_v: attention heads and their widths.
    dropout: after the embeddings and after every sublayer.     n_position: the longest sequence.
    trg_emb_prj_weight_sharing: target embedding and output projection are one weight (section 3.4), and then
        scale_emb_or_prj says where its scale is set right: "emb" multiplies embeddings by sqrt(d_model), "prj" the
        logits by 1 / sqrt(d_model), "none" neither. Without sharing it has no effect.
    emb_src_trg_weight_sharing: source and target embedding are one weight; for a joint vocabulary.
    attn_dropout: on attention weights. 0.1 whatever dropout is, as in the public implementation.
    norm_first, activation, n_head_kv: see OpenSum, PositionwiseFeedForward and MultiHeadAttention in fastattn.nn.
    pack_padding: True: drop padding once for both stacks, so that all work is done on real tokens, whose results stay
        the same. Logits of padding are 0. It costs a gather and, on a GPU, two waits for the device a batch, and pays
        from about a quarter of padding on. None: where packing.worth_it says so, which is in ``loss`` on a CPU.
    recompute: keep neither the feed-forwards' hidden layers nor the norms' outputs for the backward, which makes them
        again: two fifths less memory between the two (gated forms two thirds), for a sixth more of the feed-forward's
        work. Gradients stay the same; under torch.autocast they are rounded elsewhere.
    backend: given to every op; None leaves the choice to use_backend, FASTATTN_BACKEND and each op's own order.
    ValueError where the arguments contradict each other.

    Every weight matrix starts from Glorot's uniform distribution. Parameters may stay in float32 under
    torch.autocast: matrix products and the stream between sublayers then run in its dtype, statistics in float32.
    """

    def __init__(
        self,
        n_src_vocab: int,
        n_trg_vocab: int,
        src_pad_idx: int,
        trg_pad_idx: int,
        d_word_vec: int = 512,
        d_model: int = 512,
        d_inner: int = 2048,
        n_layers: int = 6,
        n_head: int = 8,
        d_k: int = 64,
        d_v: int = 64,
        dropout: float = 0.1,
        n_position: int = 200,
        trg_emb_prj_weight_sharing: bool = True,
        emb_src_trg_weight_sharing: bool = True,
        scale_emb_or_prj: str = "prj",
        *,
        attn_dropout: float = 0.1,
        norm_first: bool = False,
        activation: str = "relu",
        n_head_kv: int | None = None,
        pack_padding: bool | None = None,
        recompute: bool = False,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        if scale_emb_or_prj not in SCALE_MODES:
            raise ValueError(f"scale_emb_or_prj must be one of {', '.join(SCALE_MODES)}, got {scale_emb_or_prj!r}")
        if d_word_vec != d_model:
            raise ValueError(
                f"embeddings join the residual stream, so d_word_vec must equal d_model, got {d_word_vec} and {d_model}"
            )
        if emb_src_trg_weight_sharing and n_src_vocab > n_trg_vocab:
            raise ValueError(
                f"a shared embedding has n_trg_vocab={n_trg_vocab} rows, too few for n_src_vocab={n_src_vocab}; "
                "use a joint vocabulary or emb_src_trg_weight_sharing=False"
            )
        self.src_pad_idx, self.trg_pad_idx, self.d_model = src_pad_idx, trg_pad_idx, d_model
        self.pack_padding, self.recompute = pack_padding, recompute
        self.scale_prj = trg_emb_prj_weight_sharing and scale_emb_or_prj == "prj"
        stack = {
            "d_word_vec": d_word_vec, "n_layers": n_layers, "n_head": n_head, "d_k": d_k, "d_v": d_v,
            "d_model": d_model, "d_inner": d_inner, "dropout": dropout, "n_position": n_position,
            "scale_emb": trg_emb_prj_weight_sharing and scale_emb_or_prj == "emb",
            "attn_dropout": attn_dropout, "n_head_kv": n_head_kv, "activation": activation,
            "norm_first": norm_first, "backend": backend,
        }  # fmt: skip
        self.encoder = Encoder(n_src_vocab, pad_idx=src_pad_idx, **stack)
        self.decoder = Decoder(n_trg_vocab, pad_idx=trg_pad_idx, **stack)
        self.trg_word_prj = nn.Linear(d_model, n_trg_vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        if trg_emb_prj_weight_sharing:
            self.trg_word_prj.weight = self.decoder.trg_word_emb.weight
        if emb_src_trg_weight_sharing:
            self.encoder.src_word_emb.weight = self.decoder.trg_word_emb.weight

    def forward(self, src_seq: Tensor, trg_seq: Tensor) -> Tensor:
        """src_seq: integer (B, Ls); trg_seq: integer (B, Lt), the target without its last token.

        Returns logits (B * Lt, n_trg_vocab): row b * Lt + t scores the token that follows trg_seq[b, t].
        """
        dec_output, packed = self.decode(src_seq, trg_seq, bool(self.pack_padding))
        logits = self.project(dec_output)
        return (logits if packed is None else packed.unpack(logits)).flatten(0, 1)

    def loss(
        self,
        src_seq: Tensor,
        trg_seq: Tensor,
        gold: Tensor,
        label_smoothing: float = 0.0,
        *,
        smooth_over: str = "all",
        reduction: str = "mean",
    ) -> Tensor:
        """Cross-entropy of forward(src_seq, trg_seq) and gold, a float32 scalar; the logits are never kept.

        gold: integer (B, Lt) or (B * Lt,), the token that follows each of trg_seq; where it is padding it is ignored,
            and so is, with pack_padding, what follows padding in trg_seq.
        label_smoothing, smooth_over: as in ``linear_cross_entropy``: torch's smoothing, or with "others" the public
            implementation's.     reduction: "mean" over the tokens that are not ignored, or "sum".
        Wrappers that act on forward, as DistributedDataParallel does, want a module whose forward calls this.
        """
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction must be one of mean, sum, got {reduction!r}")
        if gold.shape not in (trg_seq.shape, (trg_seq.numel(),)):
            expected = f"{tuple(trg_seq.shape)} as trg_seq, or {(trg_seq.numel(),)}"
            raise ValueError(f"gold has shape {tuple(gold.shape)}, expected {expected}")
        gold, pack = gold.reshape(trg_seq.shape), self.pack_padding
        if pack is None:
            pads = (self.src_pad_idx, self.trg_pad_idx)
            pack = worth_it(src_seq, trg_seq, gold, *pads, backend=self.decoder.backend)
        dec_output, packed = self.decode(src_seq, trg_seq, pack)
        return linear_cross_entropy(
            dec_output,
            self.trg_word_prj.weight,
            gold if packed is None else packed.pack(gold),
            self.trg_word_prj.bias,
            label_smoothing=label_smoothing,
            smooth_over=smooth_over,
            ignore_index=self.trg_pad_idx,
            logit_scale=self.d_model**-0.5 if self.scale_prj else 1.0,
            reduction=reduction,
            backend=self.decoder.backend,
        )

    def decode(self, src_seq: Tensor, trg_seq: Tensor, pack: bool) -> tuple[Tensor, Packed | None]:
        """The decoder's output (B, Lt, d_model) and None; or as decode_packed."""
        with recomputed(self.recompute):
            if pack:
                return self.decode_packed(src_seq, trg_seq)
            src_mask, trg_mask = self.src_mask(src_seq), self.trg_mask(trg_seq)
            enc_output, *_ = self.encoder(src_seq, src_mask)
            return self.decoder(trg_seq, trg_mask, enc_output, src_mask)[0], None

    def decode_packed(self, src_seq: Tensor, trg_seq: Tensor) -> tuple[Tensor, Packed]:
        """The decoder's output (1, T, d_model) on the T real tokens of trg_seq, and how to bring them back in place."""
        self.encoder.position_enc.check(max(src_seq.size(1), trg_seq.size(1)))
        src, trg = Packed(src_seq, self.src_pad_idx), Packed(trg_seq, self.trg_pad_idx)
        src_mask = AttentionMask(cu_seqlens_q=src.cu_seqlens)
        trg_mask = AttentionMask(cu_seqlens_q=trg.cu_seqlens, is_causal=True)
        trg_src_mask = AttentionMask(cu_seqlens_q=trg.cu_seqlens, cu_seqlens_k=src.cu_seqlens)
        enc_output, *_ = self.encoder(src.tokens, src_mask, position=src.position)
        dec_output, *_ = self.decoder(trg.tokens, trg_mask, enc_output, trg_src_mask, position=trg.position)
        return dec_output, trg

    # One mask a batch for each role: the layers share what it prepares.

    def src_mask(self, src_seq: Tensor) -> AttentionMask:
        """Real source tokens are seen: by the encoder, and by the decoder's attention to it. src_seq: (B, Ls)."""
        return AttentionMask(key_padding=src_seq != self.src_pad_idx)

    def trg_mask(self, trg_seq: Tensor) -> AttentionMask:
        """A target token sees real tokens up to itself. trg_seq: (B, Lt)."""
        return AttentionMask(key_padding=trg_seq != self.trg_pad_idx, is_causal=True)

    def project(self, dec_output: Tensor) -> Tensor:
        """Logits (..., n_trg_vocab) of the decoder's output (..., d_model), scaled as scale_emb_or_prj says."""
        # Scaling d_model numbers a token instead of n_trg_vocab logits.
        return self.trg_word_prj(dec_output * self.d_model**-0.5 if self.scale_prj else dec_output)

    def extra_repr(self) -> str:
        return f"src_pad_idx={self.src_pad_idx}, trg_pad_idx={self.trg_pad_idx}, scale_prj={self.scale_prj}"
