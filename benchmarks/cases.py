"""What can be measured: a class for each kind of case, with the formula of the work that it must do.

`work` gives, for each direction, the FLOPs and the bytes of main memory that any implementation needs, not what one
happens to use: products of masked pairs do not count, every tensor is read or written once. Rates come from them, and
so does the bound: no implementation is faster than max(flop / matrix product rate, byte / copy rate). (Tensors that fit
into a cache can be: their bytes never reach main memory.) Which cases are measured where, tables.py says.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

Work = dict[str, dict[str, float]]  # direction -> {"flop", "byte" and, for whole models, "token"}

MULTI30K = 0.31  # the standard deviation of log(words) over Multi30k's 29,000 English training sentences
WITHIN_BATCH = 0.17  # there, of log(words) of the sources whose targets are equally long
LONG_TAIL = 1.0  # a web corpus: one sequence in 40 is over seven times as long as the median
BLOCK = 64  # rows and columns of a block of the mask "blocks"


def draw_lengths(batch: int, longest: int, spread: float, seed: int = 0) -> torch.Tensor:
    """(batch,) int64: lengths whose logarithms are normally distributed with standard deviation `spread`.

    A typical batch rather than a drawn one: its sorted lengths are what those of many batches are on average (expected
    normal order statistics by Blom 1958). They come in an order drawn from `seed`, and scaled so that the longest is
    `longest`, as a batch is padded to its longest sequence.
    """
    rank = torch.randperm(batch, generator=torch.Generator().manual_seed(seed)).double()
    logs = spread * torch.special.ndtri((rank + 0.625) / (batch + 0.25))
    return (longest * (logs - logs.max()).exp()).round().long().clamp_min(1)


def label(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def _directions(forward: dict[str, float], backward: dict[str, float]) -> Work:
    both = {unit: forward[unit] + backward[unit] for unit in forward}
    return {"forward": forward, "backward": backward, "both": both}


@dataclass(frozen=True)
class Case:
    """series: (name, x) where the case is one point of a curve over x, else None."""

    @property
    def series(self) -> tuple[str, int] | None:
        return None


@dataclass(frozen=True)
class AttentionCase(Case):
    """q: (batch, heads, length_q, dim); k, v: (batch, heads_k, length_k, dim).

    mask: "full"; "causal"; "padding", keys beyond draw_lengths(batch, length_k, spread) masked; "blocks", a dense bool
    mask for all heads with the share `masked` of each row's 64 x 64 blocks masked; "alibi", causal with the fixed bias
    -slope_h * (i - j); "bias", a learned bias (1, heads, length_q, length_k) that gets its gradient.
    """

    batch: int
    heads: int
    length_q: int
    length_k: int
    dim: int
    mask: str = "full"
    dtype: torch.dtype = torch.float32
    heads_k: int | None = None
    dropout_p: float = 0.0
    spread: float = MULTI30K
    masked: float = 0.5

    formula = "FLOPs: 4 x batch x heads x visible pairs x dim forward, x 2.5 backward (five products for two)"

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads_k is None else f"{self.heads}/{self.heads_k}"
        dropout = f" dropout {self.dropout_p}" if self.dropout_p else ""
        return f"b{self.batch} h{heads} {self.length_q}x{self.length_k} {self._kind}{dropout} {label(self.dtype)}"

    @property
    def _kind(self) -> str:
        mask = self.mask
        if mask == "padding":
            mask = {MULTI30K: "padding", LONG_TAIL: "long-tailed padding"}[self.spread]
        elif mask == "blocks":
            mask = f"blocks {self.masked:.0%} masked"
        return f"d{self.dim} {mask}"

    @property
    def series(self) -> tuple[str, int] | None:
        """Square problems over their length; those of one series have equally many tokens."""
        if self.length_q != self.length_k or self.heads_k is not None or self.dropout_p:
            return None
        return f"attention {self._kind} {label(self.dtype)}", self.length_q

    @cached_property
    def lengths(self) -> torch.Tensor:
        """(batch,) real keys of each sequence; all of them unless the mask is "padding"."""
        if self.mask != "padding":
            return torch.full((self.batch,), self.length_k)
        return draw_lengths(self.batch, self.length_k, self.spread)

    @cached_property
    def blocks(self) -> torch.Tensor:
        """(batch, ceil(length_q / 64), ceil(length_k / 64)) bool: the visible blocks, equally many in each row."""
        shape = (self.batch, -(-self.length_q // BLOCK), -(-self.length_k // BLOCK))
        rank = torch.rand(shape, generator=torch.Generator().manual_seed(0)).argsort(-1).argsort(-1)
        return rank < max(1, round(shape[2] * (1 - self.masked)))

    def dense(self) -> torch.Tensor | None:
        """(batch or 1, 1, length_q, length_k) bool, the visible pairs, or None when all are."""
        if self.mask in ("causal", "alibi"):
            return torch.ones(1, 1, self.length_q, self.length_k, dtype=torch.bool).tril()
        if self.mask == "padding":
            keys = torch.arange(self.length_k) < self.lengths[:, None]
            return keys[:, None, None].expand(-1, 1, self.length_q, -1)
        if self.mask == "blocks":
            full = self.blocks.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
            return full[:, None, : self.length_q, : self.length_k].contiguous()
        return None

    @property
    def slopes(self) -> torch.Tensor:
        """(heads,) float32: ALiBi's slopes. Source: Press et al. 2022, arXiv:2108.12409."""
        return 2.0 ** (-8.0 * torch.arange(1, self.heads + 1) / self.heads)

    @property
    def pairs(self) -> int:
        """Visible pairs of a query and a key, over the batch, for one head."""
        if self.mask in ("causal", "alibi"):
            return self.batch * int((torch.arange(self.length_q) + 1).clamp_max(self.length_k).sum())
        if self.mask == "blocks":
            heights, widths = (
                (length - BLOCK * torch.arange(-(-length // BLOCK))).clamp_max(BLOCK)
                for length in (self.length_q, self.length_k)
            )
            return int((self.blocks * heights[:, None] * widths).sum())
        return self.length_q * int(self.lengths.sum())

    @cached_property
    def work(self) -> Work:
        flop = 4 * self.heads * self.pairs * self.dim
        size = self.dtype.itemsize
        q = self.batch * self.heads * self.length_q * self.dim * size
        kv = 2 * self.batch * (self.heads_k or self.heads) * self.length_k * self.dim * size
        bias = self.heads * self.length_q * self.length_k * size if self.mask == "bias" else 0
        mask = self.batch * self.length_q * self.length_k if self.mask == "blocks" else 0
        forward = {"flop": flop, "byte": 2 * q + kv + bias + mask}  # q, k, v, bias, mask; out
        # q, k, v, bias, mask, out, dout; dq, dk, dv, dbias
        backward = {"flop": 2.5 * flop, "byte": 4 * q + 2 * kv + 2 * bias + mask}
        return _directions(forward, backward)


@dataclass(frozen=True)
class DecodeAttentionCase(Case):
    """A step of decoding: q (batch, queries, heads, dim), k and v (batch, length, rows, heads, dim).

    keys: "own", of each query; "of beams" that were chosen anew, at random, at every position, so that most of their
    history is common; "shared" by all queries, of draw_lengths(batch, length, MULTI30K), as an encoder's output is.
    """

    batch: int
    queries: int
    length: int
    heads: int
    dim: int
    keys: str = "own"
    dtype: torch.dtype = torch.float32
    dropout_p: float = 0.0

    formula = "bytes: each visible key and value once, however many queries attend to it, q and out"

    def __str__(self) -> str:
        shape = f"b{self.batch} w{self.queries} h{self.heads}"
        return f"{shape} {self.length} keys {self.keys} d{self.dim} {label(self.dtype)}"

    @cached_property
    def lengths(self) -> torch.Tensor:
        """(batch,) visible positions of each sequence."""
        if self.keys != "shared":
            return torch.full((self.batch,), self.length)
        return draw_lengths(self.batch, self.length, MULTI30K)

    @cached_property
    def ancestors(self) -> torch.Tensor:
        """(batch, queries, length) int32: the row in which each query finds each position."""
        generator = torch.Generator().manual_seed(0)
        found = torch.arange(self.queries)[:, None].repeat(self.batch, 1, self.length)
        if self.keys == "of beams":
            for position in range(1, self.length):
                parents = torch.randint(self.queries, (self.batch, self.queries, 1), generator=generator)
                past = found[..., :position]
                past.copy_(past.gather(1, parents.expand_as(past)))
        return found.int()

    @cached_property
    def work(self) -> Work:
        visible = int(self.lengths.sum())
        read = visible  # pairs of a position and a row that some query attends to
        if self.keys != "shared":
            read = int((self.ancestors[..., None] == torch.arange(self.queries)).any(dim=1).sum())
        width = self.heads * self.dim
        byte = 2 * (read + self.batch * self.queries) * width * self.dtype.itemsize
        return {"forward": {"flop": 4 * width * self.queries * visible, "byte": byte}}


@dataclass(frozen=True)
class NormCase(Case):
    """x, residual: (rows, width)."""

    rows: int
    width: int
    dtype: torch.dtype = torch.float32
    dropout_p: float = 0.0

    formula = (
        "bytes: rows x width x (x, residual, sum, out) forward, (dout, sum, dresidual and, with dropout, dx) backward"
    )

    def __str__(self) -> str:
        dropout = f" dropout {self.dropout_p}" if self.dropout_p else ""
        return f"{self.rows}x{self.width}{dropout} {label(self.dtype)}"

    @cached_property
    def work(self) -> Work:
        tensor = self.rows * self.width
        forward = {"flop": 8 * tensor, "byte": 4 * tensor * self.dtype.itemsize}
        passes = 4 if self.dropout_p else 3
        return _directions(forward, {"flop": 16 * tensor, "byte": passes * tensor * self.dtype.itemsize})


@dataclass(frozen=True)
class EmbedCase(Case):
    """tokens: (batch, length), uniformly drawn; embedding: (n_vocab, width)."""

    batch: int
    length: int
    width: int
    n_vocab: int
    dtype: torch.dtype = torch.float32
    dropout_p: float = 0.0

    formula = (
        "bytes: tokens x width (the embedding's rows, out) forward, (dout, the embedding's rows) backward, "
        "and the embedding's gradient"
    )

    def __str__(self) -> str:
        dropout = f" dropout {self.dropout_p}" if self.dropout_p else ""
        return f"{self.batch}x{self.length}x{self.width} v{self.n_vocab}{dropout} {label(self.dtype)}"

    @cached_property
    def work(self) -> Work:
        out, row = self.batch * self.length * self.width, self.width * self.dtype.itemsize
        words = min(self.batch * self.length, self.n_vocab) * row  # a row that several tokens share is read once
        forward = {"flop": 8 * out, "byte": words + out * self.dtype.itemsize}
        return _directions(forward, {"flop": 16 * out, "byte": forward["byte"] + self.n_vocab * row})


@dataclass(frozen=True)
class FeedForwardCase(Case):
    """x: (tokens, d_model); the hidden layer has d_ff units, and weight1 twice as many rows for a gated activation."""

    tokens: int
    d_model: int
    d_ff: int
    activation: str = "relu"
    dtype: torch.dtype = torch.float32
    dropout_p: float = 0.0

    formula = "FLOPs: 2 x tokens x d_model x (rows of weight1 + d_ff) forward, x 2 backward"

    def __str__(self) -> str:
        dropout = f" dropout {self.dropout_p}" if self.dropout_p else ""
        return f"{self.tokens}x{self.d_model}x{self.d_ff} {self.activation}{dropout} {label(self.dtype)}"

    @property
    def d_up(self) -> int:
        return 2 * self.d_ff if self.activation.endswith("glu") else self.d_ff

    @cached_property
    def work(self) -> Work:
        weights = self.d_model * (self.d_up + self.d_ff)
        flop, x, size = 2 * self.tokens * weights, self.tokens * self.d_model, self.dtype.itemsize
        forward = {"flop": flop, "byte": (2 * x + weights) * size}
        return _directions(forward, {"flop": 2 * flop, "byte": (3 * x + 2 * weights) * size})


@dataclass(frozen=True)
class CrossEntropyCase(Case):
    """x: (tokens, d_model), weight: (n_vocab, d_model); the mean loss. One target in eight is padding."""

    tokens: int
    d_model: int
    n_vocab: int
    dtype: torch.dtype = torch.float32
    smoothing: float = 0.1
    dropout_p: float = 0.0

    formula = "FLOPs: 2 x targets that are not padding x d_model x n_vocab forward, x 2 backward"

    def __str__(self) -> str:
        smoothing = f" smoothing {self.smoothing}" if self.smoothing else ""
        return f"{self.tokens}x{self.d_model}x{self.n_vocab}{smoothing} {label(self.dtype)}"

    @cached_property
    def work(self) -> Work:
        real = self.tokens - self.tokens // 8
        flop = 2 * real * self.d_model * self.n_vocab
        tensors = (real + self.n_vocab) * self.d_model * self.dtype.itemsize  # x and weight; read, then their gradients
        return _directions({"flop": flop, "byte": tensors}, {"flop": 2 * flop, "byte": 2 * tensors})


@dataclass(frozen=True)
class ModelCase(Case):
    """An encoder-decoder on (batch, length) source and target. Lengths are drawn apart for source and target.

    by_length: a batch of sentences that were sorted by the length of their targets, as the training example sorts them:
        targets are equally long, sources nearly.
    """

    batch: int
    length: int
    n_layers: int
    d_model: int
    d_inner: int
    n_head: int
    n_vocab: int
    dtype: torch.dtype = torch.float32
    dropout_p: float = 0.1
    spread: float = MULTI30K
    by_length: bool = False

    def __str__(self) -> str:
        shape = f"{self.n_layers}+{self.n_layers} layers d{self.d_model}/{self.d_inner} h{self.n_head} v{self.n_vocab}"
        tail = " long-tailed" if self.spread == LONG_TAIL else ""
        tail = " sorted" if self.by_length else tail
        padding = f", {self.padding:.0%}{tail} padding," if self.padding else ""
        return f"{shape} {self.batch}x{self.length}{padding} {label(self.dtype)}"

    @cached_property
    def lengths(self) -> torch.Tensor:
        """(2, batch) real tokens of each source and target."""
        spreads = (WITHIN_BATCH, 0.0) if self.by_length else (self.spread, self.spread)
        drawn = [draw_lengths(self.batch, self.length, spread, seed) for seed, spread in enumerate(spreads)]
        return torch.stack(drawn)

    @property
    def padding(self) -> float:
        """The share of padding in source and target."""
        return 1 - self.lengths.double().mean().item() / self.length

    @property
    def layer(self) -> int:
        """Weights that a source token meets in one encoder layer and, by its keys and values, one decoder layer: four
        and two d x d and the feed-forward's. A target token meets as many in a decoder layer."""
        return 6 * self.d_model**2 + 2 * self.d_model * self.d_inner


@dataclass(frozen=True)
class StepCase(ModelCase):
    """One training step: forward, loss, backward and Adam. bfloat16 means float32 parameters under torch.autocast."""

    formula = (
        "FLOPs of real tokens: 6 x tokens x weights of the products + 12 x d_model x layers x visible pairs (encoder, "
        "half decoder, cross); bytes: Adam's alone, 28 a parameter"
    )

    @cached_property
    def work(self) -> Work:
        source, target = self.lengths.double()
        vocabulary = self.d_model * self.n_vocab
        products = (source + target).sum() * self.n_layers * self.layer + target.sum() * vocabulary
        pairs = (source**2 + target * (target + 1) / 2 + source * target).sum() * self.n_layers
        flop = 6 * products + 12 * self.d_model * pairs
        weights = self.n_layers * (12 * self.d_model**2 + 4 * self.d_model * self.d_inner) + vocabulary
        return {"step": {"flop": flop.item(), "byte": 28.0 * weights, "token": target.sum().item()}}


@dataclass(frozen=True)
class MemoryCase(StepCase):
    """The memory of one training step beyond weights and Adam's state. No padding: what grows, grows with length."""

    spread: float = 0.0

    formula = "memory beyond weights and Adam's state: activations, gradients and what is temporary, at their peak"

    @property
    def series(self) -> tuple[str, int]:
        """Over length; those of one series have equally many tokens."""
        shape = f"{self.n_layers}+{self.n_layers} layers, d_model {self.d_model}, {self.n_vocab} words"
        return f"training step, {shape}, {self.batch * self.length} tokens {label(self.dtype)}", self.length

    @cached_property
    def work(self) -> Work:
        return {}  # nothing is timed


@dataclass(frozen=True)
class DecodingCase(ModelCase):
    """Translation of a batch by beam search, greedy with one beam: `new_tokens` for each sentence, whatever is
    predicted. All of it in `dtype`."""

    dropout_p: float = 0.0
    new_tokens: int = 32
    beam: int = 1

    formula = (
        "FLOPs: each new token of each beam meets the decoder's weights once, each source token the encoder's; "
        "bytes: the decoder's weights, the keys and values of each beam so far and those of the source, once a step"
    )

    def __str__(self) -> str:
        how = "greedy" if self.beam == 1 else f"beam {self.beam}"
        return f"{super().__str__()}, {how}, {self.new_tokens} new tokens"

    @cached_property
    def work(self) -> Work:
        lengths, new, size = self.lengths[0].double(), self.new_tokens, self.dtype.itemsize
        source = lengths.sum().item()
        decoder = self.n_layers * self.layer + self.d_model * self.n_vocab
        own = self.beam * self.batch * new * (new + 1) / 2  # a beam's own keys, of all steps, in one layer
        flop = 2 * (self.beam * self.batch * new * decoder + source * self.n_layers * self.layer)
        flop += 4 * self.d_model * self.n_layers * (own + self.beam * source * new + (lengths**2).sum().item())
        byte = (new * decoder + 2 * self.d_model * self.n_layers * (own + source * new)) * size
        return {"decode": {"flop": flop, "byte": byte, "token": float(self.batch * new)}}
