"""A captioner with two decoders: right to left first, then left to right, which attends to the first one's states.

Architecture, arguments and the names of modules and parameters are those of the public ABDTransformer for video
captioning, so a state_dict of one loads strictly into the other. Differences, all on purpose: a query that may attend
to nothing gives 0 instead of the mean of all values; decoding keeps keys and values, and the left-to-right decoder
attends to the states of the best right-to-left sentence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fastattn.backends import Backend
from fastattn.generate import beam_search
from fastattn.generate.loop import check_limits, inference
from fastattn.masks import AttentionMask, get_pad_mask, get_subsequent_mask
from fastattn.masks._checks import check_token_ids
from fastattn.models.captioner.layers import (
    FeatEmbedding,
    Generator,
    MultiHeadAttention,
    PositionalEncoding,
    Positions,
    PositionWiseFeedForward,
    SublayerConnection,
    TextEmbedding,
)
from fastattn.nn.attention import as_attention_mask
from fastattn.nn.fusible import check_step, is_unmodified
from fastattn.nn.kv_cache import DecoderCache, Memory, move_padding_to_end
from fastattn.ops._checks import check_arguments, check_choice, check_float

FEATURES = {
    "one": ("src",),
    "two": ("image_src", "motion_src"),
    "three": ("image_src", "motion_src", "object_src"),
    "four": ("image_src", "motion_src", "object_src", "rel_src"),
}
FeatureMode = Literal["one", "two", "three", "four"]
Mask = Tensor | AttentionMask | None


class Hypothesis(NamedTuple):
    """value: the words of a caption. score: their log-probability."""

    value: list[str]
    score: float


class _Layer(nn.Module):
    """All layers have one attention module, a feed-forward, and the residual connections around them."""

    def __init__(
        self, d_model: int, d_ff: int, n_heads: int, dropout: float, connections: int, *, backend: Backend | None
    ) -> None:
        super().__init__()
        self.attn = MultiHeadAttention(n_heads, d_model, dropout, backend=backend)
        self.feed_forward = PositionWiseFeedForward(d_model, d_ff, backend=backend)
        self.sublayer_connection = nn.ModuleList(
            SublayerConnection(d_model, dropout, backend=backend) for _ in range(connections)
        )

    def feed(self, x: Tensor) -> Tensor:
        """The feed-forward, through the last connection."""
        return self.sublayer_connection[-1](x, self.feed_forward(x))


class EncoderLayer(_Layer):
    """Self-attention, then feed-forward."""

    def forward(self, x: Tensor, mask: AttentionMask | None) -> Tensor:
        """x (B, L, d_model)."""
        return self.feed(self.sublayer_connection[0](x, self.attn(x, x, mask)))


class EncoderLayerNoAttention(_Layer):
    """Feed-forward alone. The other modules are there for the state_dict."""

    def forward(self, x: Tensor, mask: AttentionMask | None) -> Tensor:
        """x (B, L, d_model)."""
        return self.feed(x)


class DecoderLayer(_Layer):
    """Self-attention, attention to the encoder's output, with four connections also to the other decoder's output, then
    feed-forward."""

    def forward(
        self,
        x: Tensor,
        mask: AttentionMask | None,
        memories: Sequence[tuple[Tensor | None, Mask]],
        cache: DecoderCache | None = None,
    ) -> Tensor:
        """x (B, L, d_model). memories: (states (B, Lk, d_model), mask) of the encoder, and of the other decoder.

        cache: of decoding: x (B, W, d_model) is one new token a beam, which attends to what the cache holds.
        """
        if cache is not None:
            memories = [(None, None)] * len(cache.memories)
        x = self.sublayer_connection[0](x, self.attn(x, x if cache is None else None, mask, cache))
        attended = zip(self.sublayer_connection[1:-1], memories, strict=False)
        for which, (connection, (memory, memory_mask)) in enumerate(attended):
            x = connection(x, self.attn(x, memory, memory_mask, cache, which))
        return self.feed(x)


class Encoder(nn.Module):
    """A stack of encoder layers."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.encoder_layer = nn.ModuleList(layers)

    def forward(self, x: Tensor, src_mask: Mask) -> Tensor:
        """x (B, Ls, d_model); src_mask (B, 1, Ls) or (B, Ls, Ls), nonzero = attend."""
        mask = as_attention_mask(src_mask)
        for layer in self.encoder_layer:
            x = layer(x, mask)
        return x


class Decoder(nn.Module):
    """A stack of decoder layers, of either direction."""

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        super().__init__()
        self.decoder_layer = nn.ModuleList(layers)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        src_mask: Mask,
        trg_mask: Mask,
        r2l_memory: Tensor | None = None,
        r2l_trg_mask: Mask = None,
    ) -> Tensor:
        """x (B, L, d_model); memory (B, Ls, d_model), r2l_memory (B, Lr, d_model): what it attends to, with masks."""
        mask, memories = as_attention_mask(trg_mask), [(memory, as_attention_mask(src_mask))]
        if r2l_memory is not None:
            memories.append((r2l_memory, as_attention_mask(r2l_trg_mask)))
        for layer in self.decoder_layer:
            x = layer(x, mask, memories)
        return x

    def memory(self, states: Tensor, mask: Tensor | None) -> Memory:
        """States (B, L, d_model) that `step` attends to. mask: (B, 1, L), nonzero = attend, or None for all.

        TypeError where the class overrides forward and not step.
        """
        real = states.new_ones(states.shape[:2], dtype=torch.bool) if mask is None else mask[:, 0] != 0
        check_step(self)
        states, lengths = move_padding_to_end(states, real)
        return Memory({layer.attn: layer.attn.memory(states) for layer in self.decoder_layer}, lengths)

    def step(self, x: Tensor, cache: DecoderCache) -> Tensor:
        """The output (B, W, d_model) for one new token a beam, x (B, W, d_model)."""
        for cache.depth, layer in enumerate(self.decoder_layer):
            x = layer(x, None, (), cache)
        cache.advance()
        return x


class ABDTransformer(nn.Module):
    """Captions of videos, decoded right to left, and then left to right with attention to the first result.

    vocab: has n_vocabs, word2idx with ``<PAD>`` and ``<S>``, which begins and ends a caption, and idx2word.
    d_feat: numbers a frame; with several features a sequence of as many.     d_model: even.
    n_heads: must divide d_model, and so must n_heads_big, the heads of encoder_big.
    dropout: of attention weights, embeddings and sublayers; the feed-forwards have their own, 0.1.
    feature_mode: "one" feature; "two", image and motion; "three", and objects; "four", and relations.
    device: kept as an attribute; the model works where its parameters are.
    positions: see PositionalEncoding in layers.py.     backend: given to every op, as FusedTransformer's.
    ValueError for arguments that make no model.

    src: (B, Ls, d_feat), or a tuple of such with as many frames. Masks are bool or integer, nonzero = attend.

    Source: the public ABDTransformer for video captioning. A state_dict of one loads strictly into the other.
    """

    def __init__(
        self,
        vocab: Any,
        d_feat: int | Sequence[int],
        d_model: int,
        d_ff: int,
        n_heads: int,
        n_layers: int,
        dropout: float,
        feature_mode: FeatureMode,
        device: Any = "cuda",
        n_heads_big: int = 128,
        *,
        positions: Positions = "batch",
        backend: Backend | None = None,
    ) -> None:
        super().__init__()
        check_choice("feature_mode", feature_mode, tuple(FEATURES))
        names = FEATURES[feature_mode]
        widths = tuple(d_feat) if isinstance(d_feat, Iterable) else (d_feat,)
        if len(widths) != len(names):
            raise ValueError(f"d_feat must have {len(names)} widths for feature_mode {feature_mode!r}, got {d_feat}")
        heads = {"n_heads": n_heads, "n_heads_big": n_heads_big}
        check_arguments(d_model=d_model, d_ff=d_ff, n_layers=n_layers, **heads, dropout=dropout, backend=backend)
        for width in widths:
            check_arguments(d_feat=width)
        self.vocab, self.feature_mode, self.device = vocab, feature_mode, device
        for name, width in zip(names, widths, strict=True):
            self.add_module(f"{name}_embed", FeatEmbedding(width, d_model, dropout, backend=backend))
        self.trg_embed = TextEmbedding(vocab.n_vocabs, d_model)
        self.pos_embed = PositionalEncoding(d_model, dropout, positions)

        def layers(kind: type[_Layer], heads: int, connections: int) -> list[Any]:
            return [kind(d_model, d_ff, heads, dropout, connections, backend=backend) for _ in range(n_layers)]

        self.encoder = Encoder(layers(EncoderLayer, n_heads, 2))
        self.encoder_big = Encoder(layers(EncoderLayer, n_heads_big, 2))
        self.encoder_no_attention = Encoder(layers(EncoderLayerNoAttention, n_heads, 2))
        self.r2l_decoder = Decoder(layers(DecoderLayer, n_heads, 3))
        self.l2r_decoder = Decoder(layers(DecoderLayer, n_heads, 4))
        self.generator = Generator(d_model, vocab.n_vocabs)

    def forward(self, src: Any, r2l_trg: Tensor, trg: Tensor, mask: tuple[Any, Tensor, Tensor, Tensor]) -> Any:
        """Log-probabilities (B, L, n_vocabs) of what follows each of r2l_trg (B, Lr) and of trg (B, L).

        mask: (src_mask, r2l_pad_mask, r2l_trg_mask, trg_mask), as `src_trg_mask` makes them. r2l_trg: the caption
            backwards. Both begin with ``<S>`` and lack the last one.
        """
        src_mask, r2l_pad_mask, r2l_trg_mask, trg_mask = mask
        r2l_memory, memory, decoder_mask = self._encodings(src, src_mask)
        decoder_mask = as_attention_mask(decoder_mask)
        r2l_states = self.r2l_decode(r2l_trg, r2l_memory, decoder_mask, r2l_trg_mask)
        states = self.l2r_decode(trg, memory, decoder_mask, trg_mask, r2l_states, r2l_pad_mask)
        return self.generator(r2l_states), self.generator(states)

    def encode(self, src: Any, src_mask: Any, feature_mode_two: bool = False) -> Tensor:
        """The sum of the encoded features, (B, Ls, d_model). src_mask: of each feature, (B, 1, Ls), a tuple as src.

        feature_mode_two: encode image and motion by encoder_big, as mode two does, in any mode.
        """
        names = FEATURES[self.feature_mode]
        src, src_mask = ((src,), (src_mask,)) if self.feature_mode == "one" else (src, src_mask)
        self._check_source(src, names)
        if feature_mode_two or self.feature_mode == "two":
            names = FEATURES["two"]
        total = None
        for name, features, mask in zip(names, src, src_mask, strict=False):
            x = self.get_submodule(f"{name}_embed")(features)
            if name != "rel_src" and not (name == "object_src" and self.feature_mode == "four"):
                x = self.pos_embed(x)
            encoder = self.encoder_big if len(names) == 2 else self.encoder
            x = (self.encoder_no_attention if name == "rel_src" else encoder)(x, mask)
            total = x if total is None else total + x
        return total

    def r2l_decode(self, r2l_trg: Tensor, memory: Tensor, src_mask: Mask, r2l_trg_mask: Mask) -> Tensor:
        """States (B, Lr, d_model) of the right-to-left decoder for all tokens of r2l_trg (B, Lr)."""
        return self.r2l_decoder(self.pos_embed(self.trg_embed(r2l_trg)), memory, src_mask, r2l_trg_mask)

    def l2r_decode(
        self, trg: Tensor, memory: Tensor, src_mask: Mask, trg_mask: Mask, r2l_memory: Tensor | None, r2l_trg_mask: Mask
    ) -> Tensor:
        """States (B, L, d_model) of the left-to-right decoder for all tokens of trg (B, L)."""
        x = self.pos_embed(self.trg_embed(trg))
        return self.l2r_decoder(x, memory, src_mask, trg_mask, r2l_memory, r2l_trg_mask)

    def greedy_decode(
        self, batch_size: int, src_mask: Tensor | None, memory: Tensor, max_len: int
    ) -> tuple[Tensor, Tensor]:
        """max_len + 1 steps of the right-to-left decoder, the likeliest word at each, also after the last ``<S>``.

        Returns its states (B, max_len + 1, d_model) and the tokens (B, max_len + 2), ``<S>`` first.
        """
        check_limits(max_len=max_len)
        if batch_size != len(memory):
            raise ValueError(f"batch_size is {batch_size}, and memory holds {len(memory)} sources")
        with inference(self):
            direction = _Direction(self, self.r2l_decoder)
            cache = direction.start_decoding([(memory, src_mask)], 1, max_len + 1)
            tokens = [torch.full((batch_size, 1), self._ends, device=memory.device)]
            states = []
            for _ in range(max_len + 1):
                states.append(direction.step(tokens[-1], cache))
                tokens.append(self.generator(states[-1]).argmax(-1))
        return torch.cat(states, 1), torch.cat(tokens, 1)

    def beam_search_decode(
        self, src: Any, beam_size: int, max_len: int
    ) -> tuple[list[list[Hypothesis]], list[list[Hypothesis]]]:
        """For each source the beam_size best captions of up to max_len words, right to left and left to right.

        The search is fastattn.generate.beam_search's, with the log-probability as score. The left-to-right decoder
        attends to the right-to-left decoder's states for its best caption. Captions without a last ``<S>`` come last.
        """
        check_limits(max_len=max_len)
        with inference(self):
            src_mask = src_trg_mask(src, None, None, self.vocab.word2idx["<PAD>"])
            r2l_memory, memory, mask = self._encodings(src, src_mask)
            search = partial(beam_search, beam_size=beam_size, n_best=beam_size, max_len=max_len + 1)
            search = partial(search, length_penalty=0.0, bos_idx=self._ends, eos_idx=self._ends)
            r2l = search(_Direction(self, self.r2l_decoder), [(r2l_memory, mask)])
            best = [[self._ends, *found[0].tokens] if found else [self._ends] for found in r2l]
            captions = [torch.tensor(tokens, device=memory.device) for tokens in best]
            r2l_trg = pad_sequence(captions, batch_first=True, padding_value=self.vocab.word2idx["<PAD>"])
            real = pad_sequence([torch.ones_like(t, dtype=torch.bool) for t in captions], batch_first=True)[:, None]
            states = self.r2l_decode(r2l_trg, r2l_memory, mask, get_subsequent_mask(r2l_trg))
            l2r = search(_Direction(self, self.l2r_decoder), [(memory, mask), (states, real)])
        return self._words(r2l), self._words(l2r)

    @property
    def _ends(self) -> int:
        """The index of '<S>', which begins and ends a caption."""
        return self.vocab.word2idx["<S>"]

    def _encodings(self, src: Any, src_mask: Any) -> tuple[Tensor, Tensor, Any]:
        """What the right-to-left and the left-to-right decoder attend to, (B, Ls, d_model) each, and the mask of it."""
        if self.feature_mode == "one":
            memory = self.encode(src, src_mask)
            return memory, memory, src_mask
        feature_masks, decoder_mask = src_mask
        memory = self.encode(src, feature_masks)
        r2l_memory = memory if self.feature_mode == "two" else self.encode(src, feature_masks, feature_mode_two=True)
        return r2l_memory, memory, decoder_mask

    def _check_source(self, src: Any, names: tuple[str, ...]) -> None:
        if not isinstance(src, (tuple, list)) or len(src) != len(names):
            what = f"{len(src)} tensors" if isinstance(src, (tuple, list)) else type(src).__name__
            raise ValueError(f"src must be a tuple of {len(names)} features: {', '.join(names)}, got {what}")
        for name, features in zip(names, src, strict=True):
            width = self.get_submodule(f"{name}_embed").d_feat
            if not isinstance(features, Tensor):
                raise TypeError(f"src: the features of {name} must be a Tensor, got {type(features).__name__}")
            if features.dim() != 3 or features.shape[2] != width or features.shape[:2] != src[0].shape[:2]:
                expected = f"(B, Ls, {width}) = {(*src[0].shape[:2], width)}"
                raise ValueError(f"src: the features of {name} have shape {tuple(features.shape)}, expected {expected}")

    def _words(self, found: list[list[Any]]) -> list[list[Hypothesis]]:
        idx2word = self.vocab.idx2word
        return [[Hypothesis([idx2word[i] for i in h.tokens], h.score) for h in captions] for captions in found]


class _Direction(nn.Module):
    """One decoder of a captioner, with the methods that fastattn.generate needs."""

    def __init__(self, model: ABDTransformer, decoder: Decoder) -> None:
        super().__init__()
        self.model, self.decoder = model, decoder

    def start_decoding(self, source: list[tuple[Tensor, Tensor | None]], beams: int, capacity: int) -> DecoderCache:
        """source: (states (B, L, d_model), mask (B, 1, L) or None) of all that the decoder attends to."""
        memories = tuple(self.decoder.memory(*memory) for memory in source)
        return DecoderCache(len(source[0][0]), beams, capacity, source[0][0].device, memories)

    def step(self, tokens: Tensor, cache: DecoderCache) -> Tensor:
        """States (B, W, d_model) of one new token a beam, (B, W)."""
        pos_embed = self.model.pos_embed
        place = cache.sentences[:, None] if pos_embed.by_batch else cache.position
        return self.decoder.step(pos_embed(self.model.trg_embed(tokens), place), cache)

    def next_logits(self, tokens: Tensor, cache: DecoderCache) -> Tensor:
        states, generator = self.step(tokens, cache), self.model.generator
        if not is_unmodified(generator, Generator, ()):
            return generator(states)
        return F.log_softmax(cache.linear(generator.linear, states, None), dim=-1)


def src_trg_mask(src: Any, r2l_trg: Tensor | None, trg: Tensor | None, pad_idx: int) -> Any:
    """The masks of ABDTransformer.forward: (src_mask, r2l_pad_mask, r2l_trg_mask, trg_mask), bool, True = attend.

    src: (B, Ls, d_feat) or a tuple of such; a frame whose first feature is pad_idx is padding.
    Returns src_mask: (B, 1, Ls), or of a tuple ((of each feature), of image and motion together); r2l_pad_mask:
    (B, 1, Lr); r2l_trg_mask, trg_mask: (B, L, L), real tokens up to each itself. Where trg is None src_mask alone.
    TypeError or ValueError naming what is not that.
    """
    is_one = not isinstance(src, (tuple, list))
    for features in (src,) if is_one else src:
        check_float("src", features)
        if features.dim() != 3:
            raise ValueError(f"src has features of shape {tuple(features.shape)}, expected (B, Ls, d_feat)")
    masks = tuple(get_pad_mask(features[:, :, 0], pad_idx) for features in ((src,) if is_one else src))
    if len(masks) < 2 and not is_one:
        raise ValueError(f"src must have features of image and motion, or be a Tensor, got {len(masks)} features")
    src_mask: Any = masks[0] if is_one else (masks, masks[0] & masks[1])
    if trg is None:
        return src_mask
    for name, t in (("r2l_trg", r2l_trg), ("trg", trg)):
        check_token_ids(name, t)
    r2l_pad_mask, trg_pad_mask = (get_pad_mask(t, pad_idx) for t in (r2l_trg, trg))
    r2l_trg_mask, trg_mask = r2l_pad_mask & get_subsequent_mask(r2l_trg), trg_pad_mask & get_subsequent_mask(trg)
    return src_mask, r2l_pad_mask, r2l_trg_mask, trg_mask
