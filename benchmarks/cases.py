"""What can be measured: one class for each kind of case, with the work that the case needs.

`work` gives the FLOPs and the bytes of main memory that any implementation needs, for each direction. Products of
masked pairs do not count, and every tensor is read or written once. Rates and the bound follow from it: no
implementation is faster than max(flop / rate of matrix products, byte / rate of copies), except where tensors stay in a
cache. tables.py lists which cases are measured on which device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

Work = dict[str, dict[str, float]]  # direction -> {"flop", "byte" and, for whole models, "token"}

MULTI30K = 0.31  # the standard deviation of log(words) over Multi30k's 29,000 English training sentences
MEDIAN = 14  # tokens of Multi30k's sentences in a byte-pair encoding of 10,000, with EOS
WITHIN_BATCH = 0.17  # the same of the sources whose targets are equally long
LONG_TAIL = 1.0  # a web corpus: one sequence in 40 is over seven times as long as the median
BLOCK = 64  # rows and columns of a block of the mask "blocks"
ATTENTION_DROPOUT = ", attention dropout "  # in the name of a case where it is not the dropout of the rest
NEW_TOKENS = 32  # that an accelerated model generates
FORWARD, GREEDY, BEAMS, STATIC = "forward", "greedy", "4 beams", ", static cache"
OWN_DROPOUT, NO_DROPOUT, NO_PADDING = "default dropout", "no dropout", ", no padding"


def draw_lengths(batch: int, longest: int, spread: float, seed: int = 0) -> torch.Tensor:
    """(batch,) int64: lengths whose logarithms are normally distributed with standard deviation `spread`.

    This is a typical batch: its sorted lengths are the average over many batches (expected normal order statistics,
    Blom 1958). `seed` gives their order. They are scaled so that the longest is `longest`.
    """
    rank = torch.randperm(batch, generator=torch.Generator().manual_seed(seed)).double()
    logs = spread * torch.special.ndtri((rank + 0.625) / (batch + 0.25))
    return (longest * (logs - logs.max()).exp()).round().long().clamp_min(1)


def label(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def _suffix(case: Any) -> str:
    """The end of a case's name: dropout and dtype."""
    return f"{f' dropout {case.dropout_p}' if case.dropout_p else ''} {label(case.dtype)}"


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
    """q: (batch, n_head, seqlen_q, head_dim); k, v: (batch, n_head_kv, seqlen_k, head_dim).

    mask: "full"; "causal"; "padding", keys beyond draw_lengths(batch, seqlen_k, spread) masked; "blocks", a dense bool
    mask for all heads with the share `masked` of each row's 64 x 64 blocks masked; "alibi", causal with the fixed bias
    -slope_h * (i - j); "bias", a learned bias (1, n_head, seqlen_q, seqlen_k) that gets its gradient.
    """

    batch: int
    n_head: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    mask: str = "full"
    dtype: torch.dtype = torch.float32
    n_head_kv: int | None = None
    dropout_p: float = 0.0
    spread: float = MULTI30K
    masked: float = 0.5

    formula = "FLOPs: 4 x batch x n_head x visible pairs x head_dim forward, x 2.5 backward (five products for two)"

    def __str__(self) -> str:
        heads = f"{self.n_head}" if self.n_head_kv is None else f"{self.n_head}/{self.n_head_kv}"
        return f"b{self.batch} h{heads} {self.seqlen_q}x{self.seqlen_k} {self._kind}{_suffix(self)}"

    @property
    def _kind(self) -> str:
        mask = self.mask
        if mask == "padding":
            mask = {MULTI30K: "padding", LONG_TAIL: "long-tailed padding"}[self.spread]
        elif mask == "blocks":
            mask = f"blocks {self.masked:.0%} masked"
        return f"d{self.head_dim} {mask}"

    @property
    def series(self) -> tuple[str, int] | None:
        """Square problems over their length; those of one series have equally many tokens."""
        if self.seqlen_q != self.seqlen_k or self.n_head_kv is not None or self.dropout_p:
            return None
        return f"attention {self._kind} {label(self.dtype)}", self.seqlen_q

    @cached_property
    def lengths(self) -> torch.Tensor:
        """(batch,) real keys of each sequence; all of them unless the mask is "padding"."""
        if self.mask != "padding":
            return torch.full((self.batch,), self.seqlen_k)
        return draw_lengths(self.batch, self.seqlen_k, self.spread)

    @cached_property
    def blocks(self) -> torch.Tensor:
        """(batch, ceil(seqlen_q / 64), ceil(seqlen_k / 64)) bool: the visible blocks, equally many in each row."""
        shape = (self.batch, -(-self.seqlen_q // BLOCK), -(-self.seqlen_k // BLOCK))
        rank = torch.rand(shape, generator=torch.Generator().manual_seed(0)).argsort(-1).argsort(-1)
        return rank < max(1, round(shape[2] * (1 - self.masked)))

    def dense(self) -> torch.Tensor | None:
        """(batch or 1, 1, seqlen_q, seqlen_k) bool, the visible pairs, or None when all are."""
        if self.mask in ("causal", "alibi"):
            return torch.ones(1, 1, self.seqlen_q, self.seqlen_k, dtype=torch.bool).tril()
        if self.mask == "padding":
            keys = torch.arange(self.seqlen_k) < self.lengths[:, None]
            return keys[:, None, None].expand(-1, 1, self.seqlen_q, -1)
        if self.mask == "blocks":
            full = self.blocks.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
            return full[:, None, : self.seqlen_q, : self.seqlen_k].contiguous()
        return None

    @property
    def slopes(self) -> torch.Tensor:
        """(n_head,) float32: ALiBi's slopes. Source: Press et al. 2022, arXiv:2108.12409."""
        return 2.0 ** (-8.0 * torch.arange(1, self.n_head + 1) / self.n_head)

    @property
    def pairs(self) -> int:
        """Visible pairs of a query and a key, over the batch, for one head."""
        if self.mask in ("causal", "alibi"):
            return self.batch * int((torch.arange(self.seqlen_q) + 1).clamp_max(self.seqlen_k).sum())
        if self.mask == "blocks":
            heights, widths = (
                (length - BLOCK * torch.arange(-(-length // BLOCK))).clamp_max(BLOCK)
                for length in (self.seqlen_q, self.seqlen_k)
            )
            return int((self.blocks * heights[:, None] * widths).sum())
        return self.seqlen_q * int(self.lengths.sum())

    @cached_property
    def work(self) -> Work:
        flop = 4 * self.n_head * self.pairs * self.head_dim
        size = self.dtype.itemsize
        q = self.batch * self.n_head * self.seqlen_q * self.head_dim * size
        kv = 2 * self.batch * (self.n_head_kv or self.n_head) * self.seqlen_k * self.head_dim * size
        bias = self.n_head * self.seqlen_q * self.seqlen_k * size if self.mask == "bias" else 0
        mask = self.batch * self.seqlen_q * self.seqlen_k if self.mask == "blocks" else 0
        forward = {"flop": flop, "byte": 2 * q + kv + bias + mask}  # q, k, v, bias, mask; out
        # q, k, v, bias, mask, out, dout; dq, dk, dv, dbias
        backward = {"flop": 2.5 * flop, "byte": 4 * q + 2 * kv + 2 * bias + mask}
        return _directions(forward, backward)


MASKS = (
    "full",
    "causal",
    "padding",
    "causal + padding",
    "window",
    "causal window",
    "blocks",
    "ALiBi",
    "ALiBi + padding",
    "packed",
    "packed causal",
)


@dataclass(frozen=True)
class MaskCase(Case):
    """Self-attention of 8 heads of width 64 on `tokens` tokens, in sequences of `length`.

    mask: one of MASKS. Padding leaves 100 % to 40 % of a sequence's keys, 70 % where there is one sequence. A window
    has 64 keys on each side. Blocks of 64 positions, in short sequences of length / 16: each sees itself, its
    neighbours and the first. ALiBi is not causal: -slope_h * |i - j|. Packed: one row, six unequal sequences in each
    `length`.
    """

    mask: str
    length: int
    dtype: torch.dtype = torch.float32
    tokens: int = 2048
    dropout_p: float = 0.0

    formula = "no work is counted: the measure is torch's operator"

    def __str__(self) -> str:
        return f"{self.mask}, {self.tokens // self.length}x{self.length} {label(self.dtype)}"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, length, heads, width)"""
        rows = 1 if self.mask.startswith("packed") else self.tokens // self.length
        return rows, self.tokens // rows, 8, 64

    def restrictions(self) -> dict[str, Any]:
        """The arguments of AttentionMask."""
        batch, length, heads, _ = self.shape
        given: dict[str, Any] = {"is_causal": True} if "causal" in self.mask and "window" not in self.mask else {}
        if "padding" in self.mask:
            share = torch.linspace(1.0, 0.4, batch) if batch > 1 else torch.tensor([0.7])
            given["key_padding"] = torch.arange(length) < (share * length).round()[:, None]
        if "window" in self.mask:
            given["window"] = (64, 0 if "causal" in self.mask else 64)
        if self.mask == "blocks":
            block = torch.arange(length) // (64 if length >= 512 else length // 16)
            given["attn_mask"] = (((block - block[:, None]).abs() <= 1) | (block == 0))[None, None]
        if "ALiBi" in self.mask:
            slopes = 2.0 ** -torch.arange(1.0, heads + 1)
            distance = (torch.arange(length) - torch.arange(length)[:, None]).abs()
            given["bias"] = (-slopes[:, None, None] * distance)[None].to(self.dtype)
        if "packed" in self.mask:
            ends = (torch.tensor([102, 307, 819, 860, 1474, 2048]) * self.length / 2048).round().long()
            starts = torch.arange(0, self.tokens, self.length)
            given["cu_seqlens_q"] = torch.cat([starts[:1], (starts[:, None] + ends).flatten()]).int()
        return given

    @cached_property
    def work(self) -> Work:
        return {}  # no bound: it is compared with torch's operator alone


@dataclass(frozen=True)
class DecodeAttentionCase(Case):
    """A step of decoding: q (batch, queries, n_head, head_dim), k and v (batch, length, rows, n_head, head_dim).

    keys: "own", each query has its own; "of beams", the beams are chosen again at random at every position, so most of
    their history is common; "shared", all queries read the same keys, of draw_lengths(batch, length, MULTI30K).
    """

    batch: int
    queries: int
    length: int
    n_head: int
    head_dim: int
    keys: str = "own"
    dtype: torch.dtype = torch.float32
    dropout_p: float = 0.0

    formula = "bytes: each visible key and value once, however many queries attend to it, q and out"

    def __str__(self) -> str:
        shape = f"b{self.batch} w{self.queries} h{self.n_head}"
        return f"{shape} {self.length} keys {self.keys} d{self.head_dim} {label(self.dtype)}"

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
        width = self.n_head * self.head_dim
        byte = 2 * (read + self.batch * self.queries) * width * self.dtype.itemsize
        return {"forward": {"flop": 4 * width * self.queries * visible, "byte": byte}}


@dataclass(frozen=True)
class NormCase(Case):
    """x, residual: (rows, d_model)."""

    rows: int
    d_model: int
    dtype: torch.dtype = torch.float32
    dropout_p: float = 0.0

    formula = (
        "bytes: rows x d_model x (x, residual, sum, out) forward, (dout, sum, dresidual and, with dropout, dx) backward"
    )

    def __str__(self) -> str:
        return f"{self.rows}x{self.d_model}{_suffix(self)}"

    @cached_property
    def work(self) -> Work:
        tensor = self.rows * self.d_model
        forward = {"flop": 8 * tensor, "byte": 4 * tensor * self.dtype.itemsize}
        passes = 4 if self.dropout_p else 3
        return _directions(forward, {"flop": 16 * tensor, "byte": passes * tensor * self.dtype.itemsize})


@dataclass(frozen=True)
class FeedForwardCase(Case):
    """x: (tokens, d_model). weight1 has d_inner rows, and twice as many for a gated activation."""

    tokens: int
    d_model: int
    d_inner: int
    activation: str = "relu"
    dtype: torch.dtype = torch.float32
    dropout_p: float = 0.0

    formula = "FLOPs: 2 x tokens x d_model x (rows of weight1 + d_inner) forward, x 2 backward"

    def __str__(self) -> str:
        return f"{self.tokens}x{self.d_model}x{self.d_inner} {self.activation}{_suffix(self)}"

    @property
    def d_up(self) -> int:
        return 2 * self.d_inner if self.activation.endswith("glu") else self.d_inner

    @cached_property
    def work(self) -> Work:
        weights = self.d_model * (self.d_up + self.d_inner)
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
    """An encoder-decoder on (batch, length) source and target. Source and target have different lengths.

    by_length: the sentences were sorted by the length of their targets, as in the training example: all targets are
        equally long, sources nearly.
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
        """Weights that are multiplied with a source token in an encoder layer (four d x d and the feed-forward) and in
        a decoder layer (keys and values, two d x d). A target token needs as many in a decoder layer."""
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
class SmallStepCase(StepCase):
    """A training step so small that on a CPU what Python does is a large part of it."""


@dataclass(frozen=True)
class EpochCase(StepCase):
    """Training on `batch` pairs of sentences, in batches of at most `tokens` padded source, or target, tokens. Lengths
    have the median, the spread and the correlation of Multi30k's."""

    tokens: int = 8192

    def __str__(self) -> str:
        model = super().__str__().partition(f" {self.batch}x")[0]
        return f"{model}, {self.batch} pairs in batches of {self.tokens} tokens, {label(self.dtype)}"

    @cached_property
    def lengths(self) -> torch.Tensor:
        common, own = torch.randn(2, self.batch, generator=torch.Generator().manual_seed(0))
        part = WITHIN_BATCH / self.spread  # of a source's length, that its target's does not give
        logs = self.spread * torch.stack(((1 - part**2) ** 0.5 * common + part * own, common))
        return (MEDIAN * logs.exp()).round().long().clamp(2, self.length)

    @cached_property
    def work(self) -> Work:
        return {"epoch": super().work["step"]}


@dataclass(frozen=True)
class AccelerateCase(StepCase):
    """The same of another library's model. Lengths are even from half of the longest to the longest. A single sentence
    has no padding, nor has a batch with spread 0.

    dropout_p: None is the default of the model's library.
    attention_dropout_p: of attention weights, where the model sets it apart from dropout_p.
    """

    model: str = "Marian"
    attention_dropout_p: float = 0.1

    def __str__(self) -> str:
        tail = "" if self.attention_dropout_p == self.dropout_p else f"{ATTENTION_DROPOUT}{self.attention_dropout_p:g}"
        return f"{self.model} {super().__str__()}{tail}"

    @cached_property
    def lengths(self) -> torch.Tensor:
        shortest = self.length / 2 if self.batch > 1 and self.spread else self.length
        drawn = torch.linspace(shortest, self.length, self.batch).round().long()
        return torch.stack((drawn, drawn))

    @property
    def new_tokens(self) -> int:
        """How many tokens are generated."""
        return 0

    @property
    def cell(self) -> str:
        """A short name: model, width, sentences x tokens, dtype."""
        return f"{self.model} d{self.d_model} {self.batch}x{self.length} {label(self.dtype)}"

    @cached_property
    def work(self) -> Work:
        """Of BERT, that has as many layers in one stack: what its layers and its head compute of the target."""
        work = super().work
        if self.model == "BERT":
            target, layers = self.lengths[1].double(), 2 * self.n_layers
            weights = layers * (4 * self.d_model**2 + 2 * self.d_model * self.d_inner) + self.d_model * self.n_vocab
            flop = 6 * target.sum() * weights + 12 * self.d_model * layers * (target**2).sum()
            work["step"] |= {"flop": flop.item(), "byte": 28.0 * weights}
        return work


_OF_CALLS = (
    "d256: 3+3 layers, 4 heads; d512: 6+6 layers, 8 heads; 8000 words; a model without encoder or decoder has all "
    f"layers in one stack; a quarter of several sentences is padding; `generate` makes {NEW_TOKENS} tokens of each"
)


@dataclass(frozen=True)
class CallCase(AccelerateCase):
    """A call of another library's model in eval mode, all of it in `dtype`.

    call: FORWARD, or the generation of NEW_TOKENS tokens, GREEDY or with BEAMS. Followed by STATIC, in a
    static cache instead of the library's default.
    """

    dropout_p: float = 0.0
    call: str = FORWARD

    formula = _OF_CALLS

    def __str__(self) -> str:
        return f"{self.call}: {self.cell}"

    @property
    def new_tokens(self) -> int:
        return 0 if self.call == FORWARD else NEW_TOKENS

    @cached_property
    def work(self) -> Work:
        return {}  # no bound: it is compared with the same model alone


@dataclass(frozen=True)
class OwnDropoutCase(AccelerateCase):
    """A training step with the default dropout of the model's library, or without dropout."""

    dropout_p: float | None = None

    formula = _OF_CALLS

    def __str__(self) -> str:
        padding = "" if self.spread else NO_PADDING
        return f"{OWN_DROPOUT if self.dropout_p is None else NO_DROPOUT}{padding}: {self.cell}"

    @cached_property
    def work(self) -> Work:
        return {}  # as above


@dataclass(frozen=True)
class HostTimeCase(ModelCase):
    """The host's part of a training step without its optimizer. The tensors are so small that hardly anything else is
    left."""

    formula = (
        "host time of forward, loss and backward, one thread, 16 target tokens on the CPU; the kernels of triton and "
        "cuda are not launched, PyTorch's operators run"
    )

    @cached_property
    def work(self) -> Work:
        return {}  # no bound: nothing is computed


@dataclass(frozen=True)
class MemoryCase(StepCase):
    """The memory of one training step beyond weights and Adam's state, without padding."""

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
    """Translation of a batch by beam search, or greedily with one beam. Every sentence gets `new_tokens` tokens. All of
    it is in `dtype`."""

    dropout_p: float = 0.0
    new_tokens: int = 32
    beam: int = 1

    formula = (
        "FLOPs: each new token of each beam is multiplied with the decoder's weights once, each source token with the "
        "encoder's; bytes: at each step the decoder's weights, and the keys and values of all beams and of the source"
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
