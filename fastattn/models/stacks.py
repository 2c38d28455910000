"""Encoder and decoder: embeddings with their positions, and a stack of layers.

Modules and parameters have the names of the public implementation (see transformer.py).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fastattn.masks import AttentionMask
from fastattn.masks._checks import check_token_ids
from fastattn.nn import DecoderCache, DecoderLayer, EncoderLayer, Memory, PendingResidual, PositionalEncoding
from fastattn.nn.attention import as_attention_mask
from fastattn.nn.decoding import DecoderParams, DecoderSteps, EmbeddingParams, StepSublayer
from fastattn.nn.fusible import all_can_fuse, can_fuse, check_step, is_unmodified
from fastattn.nn.layers import LayerOptions
from fastattn.nn.linear import joint_linear
from fastattn.nn.params import norm_params
from fastattn.nn.plan import open_plan
from fastattn.nn.residual import HiddenState, add_norm, new_norm
from fastattn.ops import _checks
from fastattn.ops._checks import check_arguments, check_choice, check_flags

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing from Python 3.11 on

# For each decoder layer the keys (B, Ls, n_head_kv * d_k) and values (B, Ls, n_head_kv * d_v) of the encoder's output.
EncoderProjected = dict[nn.Module, tuple[Tensor, Tensor]]
Position = Literal["sine", "learned"]


class _Stack(nn.Module):
    """What encoder and decoder share: the embeddings before the layers, and the norm around them.

    Post-norm: layer_norm follows the embeddings. norm_first: it follows the last layer.
    """

    fused_children = ("src_word_emb", "trg_word_emb", "position_enc", "dropout", "layer_norm")
    side: str  # src or trg
    kind: type[EncoderLayer | DecoderLayer]  # of the layers

    def __init__(
        self,
        n_vocab: int,
        pad_idx: int,
        d_word_vec: int,
        n_layers: int,
        n_position: int,
        scale_emb: bool,
        position: Position,
        sizes: tuple[int, int, int, int, int],
        dropout: float,
        options: LayerOptions,
    ) -> None:
        """sizes: of each layer, d_model first."""
        super().__init__()
        d_model, *_ = sizes
        vocabulary: dict[str, Any] = {f"n_{self.side}_vocab": n_vocab}
        check_arguments(**vocabulary, d_word_vec=d_word_vec, n_layers=n_layers, d_model=d_model, dropout=dropout)
        check_flags(scale_emb=scale_emb)
        check_choice("position", position, get_args(Position))
        if d_word_vec != d_model:
            raise ValueError(f"d_word_vec must equal d_model, got {d_word_vec} and {d_model}")
        factory: dict[str, Any] = {"device": options.get("device"), "dtype": options.get("dtype")}
        embedding = nn.Embedding(n_vocab, d_word_vec, padding_idx=pad_idx, **factory)
        self.add_module(f"{self.side}_word_emb", embedding)
        self.d_model, self.scale_emb = d_model, scale_emb
        self.norm_first, self.backend = options.get("norm_first", False), options.get("backend")
        self.position_enc = PositionalEncoding(d_word_vec, n_position, learned=position == "learned", **factory)
        self.dropout = nn.Dropout(dropout)
        self.layer_stack = nn.ModuleList(self.kind(*sizes, dropout, **options) for _ in range(n_layers))
        self.layer_norm = new_norm(options.get("norm", "layer"), d_model, **factory)

    def grow(self, length: int, name: str = "") -> None:
        """PositionalEncoding.grow, also within a module of the user's."""
        for module in self.position_enc.modules():
            if isinstance(module, PositionalEncoding):
                module.grow(length, name)

    def embed(
        self, name: str, embedding: nn.Embedding, seq: Tensor, position: Tensor | None
    ) -> Tensor | PendingResidual:
        """layer_norm(dropout(embedding [* sqrt(d_model)] + positions)), or with norm_first the sum before dropout.

        Tokens and positions are checked here and nowhere else, unless embedding or positions are a module of the
        user's.     name: the tokens' in error messages.
        """
        check_token_ids(name, seq)
        if can_fuse(embedding):
            _checks.check_indices(name, seq, "the model", embedding.weight)
            _checks.check_range(name, seq, embedding.num_embeddings, "a row of the embedding")
        if position is not None and can_fuse(self.position_enc):
            _checks.check_indices("position", position, name, seq)
            _checks.check_shape("position", position, tuple(seq.shape), f"the shape of {name}")
            _checks.check_range("position", position, self.position_enc.longest(), "a row of pos_table")
        words = embedding(seq)
        words = self.position_enc(words * self.d_model**0.5 if self.scale_emb else words, position)
        pending = PendingResidual(words, None, None, self.dropout)
        return pending if self.norm_first else add_norm(pending, self.dropout, self.layer_norm, self.backend)[0]

    def normalised(self, x: Tensor | PendingResidual) -> Tensor:
        """The stack's output from that of its last layer."""
        if isinstance(x, PendingResidual):
            return add_norm(x, self.dropout, self.layer_norm, self.backend)[0]
        return x


class Encoder(_Stack):
    """Embedding, positions and n_layers EncoderLayers.

    n_src_vocab: rows of the embedding.     pad_idx: the index of padding, whose embedding gets no gradient.
    d_word_vec: width of the embedding. It must equal d_model.     n_layers: how many layers.
    n_head, d_k, d_v, d_model, d_inner: sizes of each layer, see EncoderLayer.
    dropout: after the embeddings and after every sublayer.     n_position: rows of the table of positions.
    scale_emb: multiply the embeddings by sqrt(d_model).     position: "sine" or "learned", see PositionalEncoding.
    options: of each layer, see EncoderLayer. With norm_first, layer_norm follows the last layer, not the embeddings.
    ValueError for sizes and probabilities that make no such module, TypeError for another option.
    """

    side, kind = "src", EncoderLayer

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
        position: Position = "sine",
        **options: Unpack[LayerOptions],
    ) -> None:
        sizes, args = (d_model, d_inner, n_head, d_k, d_v), (d_word_vec, n_layers, n_position, scale_emb, position)
        super().__init__(n_src_vocab, pad_idx, *args, sizes, dropout, options)

    def forward(
        self,
        src_seq: Tensor,
        src_mask: Tensor | AttentionMask | None,
        return_attns: bool = False,
        *,
        position: Tensor | None = None,
    ) -> tuple[Tensor] | tuple[Tensor, list[Tensor]]:
        """src_seq: integer (B, Ls). ValueError where there are fewer positions, see PositionalEncoding.

        src_mask: AttentionMask, None, or bool or integer (B, 1, Ls), (B, Ls, Ls) or (1, Ls, Ls), nonzero = attend.
        position: integer (B, Ls), each token's place in its sequence, for packed sequences (AttentionMask's
            cu_seqlens); 0, 1, .. unless given.
        Returns (output (B, Ls, d_model),), and with return_attns each layer's weights (B, n_head, Ls, Ls) in a list.
        """
        mask, attns = as_attention_mask(src_mask), []
        x = self.embed("src_seq", self.src_word_emb, src_seq, position)
        plan = open_plan(None, x)
        for layer in self.layer_stack:
            known = {"plan": plan} if type(layer) is EncoderLayer else {}
            x, attn = layer(x, mask, return_attns=return_attns, **known)
            attns.append(attn)
        x = self.normalised(x)
        return (x, attns) if return_attns else (x,)


class Decoder(_Stack):
    """Embedding, positions and n_layers DecoderLayers.

    n_trg_vocab: rows of the embedding. The other arguments are those of Encoder, but dropout and n_position are in the
    other order, as in the public implementation: give them by name.
    """

    side, kind = "trg", DecoderLayer

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
        position: Position = "sine",
        **options: Unpack[LayerOptions],
    ) -> None:
        sizes, args = (d_model, d_inner, n_head, d_k, d_v), (d_word_vec, n_layers, n_position, scale_emb, position)
        super().__init__(n_trg_vocab, pad_idx, *args, sizes, dropout, options)

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
        """trg_seq: integer (B, Lt), as src_seq of an Encoder; enc_output: (B, Ls, d_model).

        trg_mask, src_mask: over (Lt, Lt) and (Lt, Ls), each as in Encoder.forward.     position: as there.
        enc_projected: project_encoder(enc_output), where it was computed before: decoding needs it at every step.
        Returns (output (B, Lt, d_model),), and with return_attns two lists of each layer's weights: of the
        self-attention (B, n_head, Lt, Lt), and of the attention to the encoder (B, n_head, Lt, Ls).
        """
        trg_mask, src_mask = as_attention_mask(trg_mask), as_attention_mask(src_mask)
        slf_attns, enc_attns = [], []
        x = self.embed("trg_seq", self.trg_word_emb, trg_seq, position)
        projected = self.project_encoder(enc_output) if enc_projected is None else enc_projected
        plan = open_plan(None, x)
        for layer in self.layer_stack:
            known = {"enc_projected": projected[layer], "plan": plan} if layer in projected else {}
            x, slf_attn, enc_attn = layer(x, enc_output, trg_mask, src_mask, return_attns=return_attns, **known)
            slf_attns.append(slf_attn)
            enc_attns.append(enc_attn)
        x = self.normalised(x)
        return (x, slf_attns, enc_attns) if return_attns else (x,)

    def project_encoder(self, enc_output: Tensor) -> EncoderProjected:
        """Keys and values of each layer's attention to the encoder's output (B, Ls, d_model).

        Layers that are of another class than DecoderLayer are left out, and compute their own. See ``joint_linear``.
        """
        if not isinstance(enc_output, Tensor):
            got = type(enc_output).__name__
            raise TypeError(f"enc_output must be a Tensor, got {got}; encoder(...) gives a tuple that begins with it")
        if enc_output.dim() != 3 or enc_output.shape[2] != self.d_model:
            expected = f"(B, Ls, d_model = {self.d_model})"
            raise ValueError(f"enc_output has shape {tuple(enc_output.shape)}, expected {expected}")
        layers = [layer for layer in self.layer_stack if type(layer) is DecoderLayer]
        modules, names = [layer._modules["enc_attn"] for layer in layers], ("w_ks", "w_vs")
        linears = [module._modules[name] for module in modules for name in names]
        fusible = all([all_can_fuse(module, names) for module in modules]) or None  # if None, each is checked
        projected = joint_linear(enc_output, linears, self.backend, fusible)
        return dict(zip(layers, zip(projected[::2], projected[1::2], strict=True), strict=True))

    def memory(self, enc_output: Tensor, lengths: Tensor) -> Memory:
        """What `step` reads of the encoder's output (B, Ls, d_model): its first lengths (B,) int32 vectors count.

        TypeError where a layer is no DecoderLayer, or the decoder's class overrides forward and not step.
        """
        for layer in self.layer_stack:
            if not isinstance(layer, DecoderLayer):
                kind = type(layer).__name__
                raise TypeError(f"cannot decode by steps: a layer of the decoder is a {kind}, expected a DecoderLayer")
        check_step(self)
        # What does not count is 0: its keys and values are finite whatever it held.
        real = torch.arange(enc_output.shape[1], device=enc_output.device) < lengths[:, None]
        enc_output = enc_output.where(real[..., None], 0)
        projected, memory = self.project_encoder(enc_output), {}
        for layer in self.layer_stack:
            attn = layer.enc_attn
            known = projected.get(layer) or (attn.w_ks(enc_output), attn.w_vs(enc_output))
            memory[attn] = attn.memory(known)
        return Memory(memory, lengths)

    def step(self, tokens: Tensor, cache: DecoderCache) -> Tensor:
        """The decoder's output (B, W, d_model) for one new token a beam, from what the cache holds of those before.

        tokens: integer (B, W).
        cache: with `memory(..)` as its first memory; the step is added to it.
        The same as the last position of forward on all tokens of the beam so far, with a causal mask. For eval mode.
        Raises ValueError where the cache is full or of other sizes.
        """
        if self.training:
            raise ValueError("a decoder steps without dropout: call eval() before")
        if tokens.shape != (cache.batch, cache.rows):
            expected = f"(B, W) = {(cache.batch, cache.rows)} as the cache"
            raise ValueError(f"tokens has shape {tuple(tokens.shape)}, expected {expected}")
        if cache.steps is None:
            cache.steps = DecoderSteps(self.params(cache.capacity), cache)
        x = cache.steps(tokens, cache)
        cache.advance()
        return x

    def params(self, capacity: int) -> DecoderParams:
        """What the steps of decoding.py read, for as many tokens. Modules that are modified are called."""
        fuses = not _has_any_global_hook()
        sublayers: list[StepSublayer] = []
        for layer in self.layer_stack:
            if fuses and is_unmodified(layer, DecoderLayer, ()):
                sublayers += layer.steps()
            else:
                sublayers.append(StepSublayer(None, layer, partial(_call_layer, layer)))
        children = self.trg_word_emb, self.position_enc, self.dropout, self.layer_norm
        if type(self) is not Decoder or self.dropout.training or not all(map(can_fuse, children)):
            final = self.normalised if self.norm_first else None
            embed = partial(self.embed, "tokens", self.trg_word_emb)
            return DecoderParams(embed, final, tuple(sublayers), self.backend)
        norm, scale = norm_params(self.layer_norm, 0.0), self.d_model**0.5 if self.scale_emb else 1.0
        norms = (None, norm) if self.norm_first else (norm, None)
        self.grow(capacity)
        positions = self.position_enc.pos_table[0], self.position_enc.more(capacity)
        embedding = EmbeddingParams(self.trg_word_emb.weight, scale, positions[0], None, norms[0], positions[1])
        return DecoderParams(embedding, norms[1], tuple(sublayers), self.backend)


def _call_layer(layer: nn.Module, x: HiddenState, cache: DecoderCache) -> HiddenState:
    return layer(x, None, cache=cache)[0]
