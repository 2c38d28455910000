"""What can be measured: the problem of each case, and the work that it needs.

`work` gives the FLOPs and the bytes of main memory that any implementation needs, for each direction. Products of
masked pairs and of padding do not count, and every tensor is read or written once. Rates and the bound follow from it:
no implementation is faster than max(flop / rate of matrix products, byte / rate of copies), except where tensors stay
in a cache. It is empty where a case is only compared with its rivals. `op` names the benchmark that measures a case.
tables.py lists which cases are measured on which device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

import fastattn
from fastattn.check import cases as catalogue
from fastattn.check.cases import Problem

Work = dict[str, dict[str, float]]  # direction -> {"flop", "byte" and, for whole models, "token"}

MULTI30K = 0.31  # the standard deviation of log(words) over Multi30k's 29,000 English training sentences
LONG_TAIL = 1.0  # a web corpus: one sequence in 40 is over seven times as long as the median
MASKS = ("full", "causal", "padding", "causal + padding", "window", "causal window", "blocks", "bias")
MASKS += ("bias by distance", "softcap", "sinks", "packed", "packed causal")
LEARNED = ("bias", "bias by distance", "sinks")  # of MASKS: what has a gradient
BLOCK, WINDOW = 64, 64  # rows and columns of a block of the mask "blocks"; keys on each side of a query
SOFTCAP = 30.0
NEW_TOKENS = 32  # that an accelerated model generates
FORWARD, GREEDY, BEAMS, STATIC = "forward", "greedy", "4 beams", ", static cache"
OWN_DROPOUT, NO_DROPOUT, NO_PADDING = "default dropout", "no dropout", ", no padding"


def draw_lengths(batch: int, longest: int, spread: float, seed: int = 0) -> Tensor:
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


class Case:
    op: str
    dtype: torch.dtype
    dropout_p: float
    work: Work = {}

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """The part of an input, of the result "out" or of a gradient that is compared, where all would be too much."""
        return tensor


def attention(*, sinks: Tensor | None = None, **given: Any) -> Tensor:
    """scaled_dot_product_attention, with one sink for each head if they are given."""
    if sinks is None:
        return fastattn.scaled_dot_product_attention(**given)
    return fastattn.add_sinks(*fastattn.scaled_dot_product_attention(**given, return_lse=True), sinks)[0]


@dataclass(frozen=True)
class AttentionCase(Case):
    """q: (batch, n_head, seqlen_q, head_dim); k, v: (batch, n_head_kv, seqlen_k, head_dim).

    mask: one of MASKS. padding: keys beyond draw_lengths(batch, seqlen_k, spread) are masked. blocks: a dense bool mask
    for all heads with the share `masked` of each row's 64 x 64 blocks masked. bias: a learned one (1, n_head, seqlen_q,
    seqlen_k) that gets its gradient. bias by distance: a learned one, (n_head, seqlen_q + seqlen_k - 1). softcap:
    scores stay within SOFTCAP. sinks: a learned one for each head. window: WINDOW keys on each side. packed: sequences
    of seqlen_q / 16 to 7 / 16 of it in each row, which is the only one.
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

    op: ClassVar[str] = "attention"
    function: ClassVar[Any] = staticmethod(attention)

    def __str__(self) -> str:
        heads = f"{self.n_head}" if self.n_head_kv is None else f"{self.n_head}/{self.n_head_kv}"
        tail = "long-tailed " if self.spread == LONG_TAIL else ""
        mask = f"{tail}{self.mask}" + (f" {self.masked:.0%} masked" if self.mask == "blocks" else "")
        return f"b{self.batch} h{heads} {self.seqlen_q}x{self.seqlen_k} d{self.head_dim} {mask}{_suffix(self)}"

    @cached_property
    def lengths(self) -> Tensor:
        """(batch,) real keys of each sequence; all of them without padding."""
        return draw_lengths(self.batch, self.seqlen_k, self.spread if "padding" in self.mask else 0.0)

    def _blocks(self) -> Tensor:
        """(batch, 1, seqlen_q, seqlen_k) bool, equally many visible blocks in each row of blocks."""
        shape = (self.batch, -(-self.seqlen_q // BLOCK), -(-self.seqlen_k // BLOCK))
        rank = torch.rand(shape, generator=torch.Generator().manual_seed(0)).argsort(-1).argsort(-1)
        blocks = rank < max(1, round(shape[2] * (1 - self.masked)))
        full = blocks.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
        return full[:, None, : self.seqlen_q, : self.seqlen_k].contiguous()

    @cached_property
    def restrictions(self) -> dict[str, Any]:
        """The arguments of AttentionMask."""
        given: dict[str, Any] = {}
        if self.mask in ("causal + padding", "packed causal"):
            given["is_causal"] = True
        if "padding" in self.mask:
            given["key_padding"] = torch.arange(self.seqlen_k) < self.lengths[:, None]
        if "window" in self.mask:
            given["window"] = (WINDOW, 0 if "causal" in self.mask else WINDOW)
        if self.mask == "blocks":
            given["attn_mask"] = self._blocks()
        if "packed" in self.mask:
            given["cu_seqlens_q"] = (torch.tensor([0, 1, 2, 6, 9, 16]) * self.seqlen_q // 16).int()
        return given

    def problem(self, device: torch.device) -> Problem:
        sizes = {"B": self.batch, "H": self.n_head, "Lq": self.seqlen_q, "Lk": self.seqlen_k, "D": self.head_dim}
        options: dict[str, Any] = {"Hk": self.n_head_kv, "mask": self.restrictions or None}
        if self.mask == "causal":
            options["is_causal"] = True
        if self.mask == "bias":
            options["bias"] = (1, self.n_head, self.seqlen_q, self.seqlen_k)
        if self.mask == "bias by distance":
            options["relative_bias"] = (self.n_head, self.seqlen_q + self.seqlen_k - 1)
        if self.mask == "softcap":
            options["softcap"] = SOFTCAP
        problem = catalogue.attention(**sizes, **options, dtype=self.dtype, device=device)
        if self.mask == "sinks":
            sinks = torch.linspace(-1, 1, self.n_head, dtype=self.dtype, device=device)
            problem = problem._replace(tensors=problem.tensors | {"sinks": sinks})
        return problem

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """The first key-value head and its queries; of the last sequence only, unless a gradient sums over all."""
        group = self.n_head // (self.n_head_kv or self.n_head)
        if name in ("relative_bias", "sinks"):
            return tensor[:group]
        if tensor.dim() == 1:
            return tensor  # offsets of packed sequences
        tensor = tensor if self.mask in LEARNED else tensor[-1:]
        return tensor if tensor.dim() == 2 else tensor[:, : group if name in ("query", "out", "bias") else 1]

    @property
    def pairs(self) -> int:
        """Visible pairs of a query and a key, over the batch, for one head."""
        if self.mask == "causal":
            return self.batch * int((torch.arange(self.seqlen_q) + 1).clamp_max(self.seqlen_k).sum())
        if self.mask in ("full", "padding", "softcap", *LEARNED):
            return self.seqlen_q * int(self.lengths.sum())
        mask = fastattn.AttentionMask(**self.restrictions)
        return int(mask.dense(self.batch, 1, self.seqlen_q, self.seqlen_k, "cpu").sum())

    @cached_property
    def work(self) -> Work:
        flop = 4 * self.n_head * self.pairs * self.head_dim
        size = self.dtype.itemsize
        q = self.batch * self.n_head * self.seqlen_q * self.head_dim * size
        kv = 2 * self.batch * (self.n_head_kv or self.n_head) * self.seqlen_k * self.head_dim * size
        m, n = self.seqlen_q, self.seqlen_k
        bias = self.n_head * {"bias": m * n, "bias by distance": m + n - 1, "sinks": 1}.get(self.mask, 0) * size
        mask = self.batch * self.seqlen_q * self.seqlen_k if self.mask == "blocks" else 0
        forward = {"flop": flop, "byte": 2 * q + kv + bias + mask}  # q, k, v, bias, mask; out
        # q, k, v, bias, mask, out, dout; dq, dk, dv, dbias
        backward = {"flop": 2.5 * flop, "byte": 4 * q + 2 * kv + 2 * bias + mask}
        return _directions(forward, backward)


@dataclass(frozen=True)
class DecodeAttentionCase(Case):
    """A step of decoding: q (batch, queries, n_head, head_dim), k and v (batch, length, rows, n_head, head_dim).

    keys: "own", each query has its own; "of beams", half of their history is common; "shared", all queries read the
    same keys, of draw_lengths(batch, length, MULTI30K).
    """

    batch: int
    queries: int
    length: int
    n_head: int
    head_dim: int
    keys: str = "own"
    dtype: torch.dtype = torch.float32
    dropout_p: float = 0.0

    op: ClassVar[str] = "decode_attention"
    function: ClassVar[Any] = staticmethod(fastattn.decode_attention)

    def __str__(self) -> str:
        shape = f"b{self.batch} w{self.queries} h{self.n_head}"
        return f"{shape} {self.length} keys {self.keys} d{self.head_dim} {label(self.dtype)}"

    @cached_property
    def lengths(self) -> Tensor:
        """(batch,) visible positions of each sequence."""
        return draw_lengths(self.batch, self.length, MULTI30K if self.keys == "shared" else 0.0)

    def problem(self, device: torch.device) -> Problem:
        sizes = {"queries": self.queries, "heads": self.n_head, "heads_k": self.n_head, "positions": self.length}
        sizes |= {"ancestors": True} if self.keys == "of beams" else {}
        sizes |= {"rows": 1, "lengths": self.lengths.tolist()} if self.keys == "shared" else {}
        return catalogue.decode_attention(
            batch=self.batch, head_dim=self.head_dim, **sizes, dtype=self.dtype, device=device
        )

    @cached_property
    def work(self) -> Work:
        visible = int(self.lengths.sum())
        read = visible * (1 if self.keys == "shared" else self.queries)  # pairs of a position and a row that is read
        if self.keys == "of beams":
            ancestors = self.problem(torch.device("cpu")).options["ancestors"]
            read = int((ancestors[..., None] == torch.arange(self.queries)).any(dim=1).sum())
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

    op: ClassVar[str] = "add_layer_norm"
    function: ClassVar[Any] = staticmethod(fastattn.dropout_add_layer_norm)

    def __str__(self) -> str:
        return f"{self.rows}x{self.d_model}{_suffix(self)}"

    def problem(self, device: torch.device) -> Problem:
        return catalogue.add_layer_norm(rows=(self.rows,), hidden=self.d_model, dtype=self.dtype, device=device)

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

    op: ClassVar[str] = "feed_forward"
    function: ClassVar[Any] = staticmethod(fastattn.feed_forward)

    def __str__(self) -> str:
        return f"{self.tokens}x{self.d_model}x{self.d_inner} {self.activation}{_suffix(self)}"

    def problem(self, device: torch.device) -> Problem:
        sizes = {"tokens": (self.tokens,), "d": self.d_model, "d_ff": self.d_inner, "d_out": self.d_model}
        return catalogue.feed_forward(self.activation, **sizes, dtype=self.dtype, device=device)

    @cached_property
    def work(self) -> Work:
        weights = self.d_model * self.d_inner * (3 if self.activation.endswith("glu") else 2)
        flop, x, size = 2 * self.tokens * weights, self.tokens * self.d_model, self.dtype.itemsize
        forward = {"flop": flop, "byte": (2 * x + weights) * size}
        return _directions(forward, {"flop": 2 * flop, "byte": (3 * x + 2 * weights) * size})


@dataclass(frozen=True)
class CrossEntropyCase(Case):
    """x: (tokens, d_model), weight: (n_vocab, d_model); the mean loss. One target in four is padding."""

    tokens: int
    d_model: int
    n_vocab: int
    dtype: torch.dtype = torch.float32
    smoothing: float = 0.1
    dropout_p: float = 0.0

    op: ClassVar[str] = "linear_cross_entropy"
    function: ClassVar[Any] = staticmethod(fastattn.linear_cross_entropy)

    def __str__(self) -> str:
        smoothing = f" smoothing {self.smoothing}" if self.smoothing else ""
        return f"{self.tokens}x{self.d_model}x{self.n_vocab}{smoothing} {label(self.dtype)}"

    def problem(self, device: torch.device) -> Problem:
        options = {"has_bias": False, "ignore_index": -100, "label_smoothing": self.smoothing}
        sizes = {"tokens": (self.tokens,), "d": self.d_model, "classes": self.n_vocab}
        return catalogue.linear_cross_entropy(**sizes, **options, dtype=self.dtype, device=device)

    @cached_property
    def work(self) -> Work:
        real = self.tokens - (self.tokens + 2) // 4
        flop = 2 * real * self.d_model * self.n_vocab
        tensors = (real + self.n_vocab) * self.d_model * self.dtype.itemsize  # x and weight; read, then their gradients
        return _directions({"flop": flop, "byte": tensors}, {"flop": 2 * flop, "byte": 2 * tensors})


@dataclass(frozen=True)
class ModelCase(Case):
    """A training step of an encoder-decoder on (batch, length) source and target, whose lengths differ: forward, loss,
    backward and Adam. bfloat16 means float32 parameters under torch.autocast.
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
    op: str = "transformer"

    def __str__(self) -> str:
        shape = f"{self.n_layers}+{self.n_layers} layers d{self.d_model}/{self.d_inner} h{self.n_head} v{self.n_vocab}"
        tail = " long-tailed" if self.spread == LONG_TAIL else ""
        padding = f", {self.padding:.0%}{tail} padding," if self.padding else ""
        return f"{shape} {self.batch}x{self.length}{padding} {label(self.dtype)}"

    @cached_property
    def lengths(self) -> Tensor:
        """(2, batch) real tokens of each source and target."""
        return torch.stack([draw_lengths(self.batch, self.length, self.spread, seed) for seed in (0, 1)])

    @property
    def padding(self) -> float:
        """The share of padding in source and target."""
        return 1 - self.lengths.double().mean().item() / self.length

    @property
    def layer(self) -> int:
        """Weights that are multiplied with a source token in an encoder layer (four d x d and the feed-forward) and in
        a decoder layer (keys and values, two d x d). A target token needs as many in a decoder layer."""
        return 6 * self.d_model**2 + 2 * self.d_model * self.d_inner

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
class AccelerateCase(ModelCase):
    """Another library's model. Lengths are even from half of the longest to the longest. A single sentence has no
    padding, nor has a batch with spread 0.

    op: "accelerate_training", a training step with dropout_p, where None is the default of the model's library;
        "accelerate_inference", a call in eval mode, all of it in `dtype`.
    call: FORWARD, or the generation of NEW_TOKENS tokens, GREEDY or with BEAMS. Followed by STATIC, in a static cache
        instead of the library's default.
    """

    dropout_p: float | None = None
    op: str = "accelerate_training"
    model: str = "Marian"
    call: str = FORWARD
    work: ClassVar[Work] = {}  # no bound: it is compared with the same model alone

    def __str__(self) -> str:
        kind = self.call
        if self.op == "accelerate_training":
            kind = (OWN_DROPOUT if self.dropout_p is None else NO_DROPOUT) + ("" if self.spread else NO_PADDING)
        return f"{kind}: {self.model} d{self.d_model} {self.batch}x{self.length} {label(self.dtype)}"

    @cached_property
    def lengths(self) -> Tensor:
        shortest = self.length / 2 if self.batch > 1 and self.spread else self.length
        drawn = torch.linspace(shortest, self.length, self.batch).round().long()
        return torch.stack((drawn, drawn))

    @property
    def new_tokens(self) -> int:
        """How many tokens are generated."""
        return 0 if self.call == FORWARD else NEW_TOKENS


@dataclass(frozen=True)
class DecodingCase(ModelCase):
    """Translation of a batch by beam search, or greedily with one beam. Every sentence gets `new_tokens` tokens. All of
    it is in `dtype`."""

    dropout_p: float = 0.0
    op: str = "decoding"
    new_tokens: int = 32
    beam: int = 1

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
