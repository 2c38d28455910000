"""What is measured: the cases of every benchmark in one table each, with the formula of the work that a case must do.

`work(direction)` gives the FLOPs and the bytes of main memory that any implementation needs, not what one happens to
use: products of masked pairs do not count, every tensor is read or written once. The records' rates come from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

Work = dict[str, float]  # "flop", "byte" and, for a training step, "token"


def _label(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


@dataclass(frozen=True)
class AttentionCase:
    """q: (batch, heads, length_q, dim); k, v: (batch, heads_k, length_k, dim).

    mask: "full", "causal", "padding" (lengths uniform in [length_k / 4, length_k]), "bool" (dense, half of it True in
    blocks of 64 x 64, shared by the heads) or "bias" (dense, (1, heads, length_q, length_k), with gradient).
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

    formula = "FLOPs: 4 x batch x heads x visible pairs x dim forward, x 2.5 backward (five products for two)"

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads_k is None else f"{self.heads}/{self.heads_k}"
        dropout = f" dropout {self.dropout_p}" if self.dropout_p else ""
        shape = f"b{self.batch} h{heads} {self.length_q}x{self.length_k} d{self.dim}"
        return f"{shape} {self.mask}{dropout} {_label(self.dtype)}"

    @cached_property
    def lengths(self) -> torch.Tensor:
        """(batch,) real keys of each sequence; all of them unless the mask is "padding"."""
        if self.mask != "padding":
            return torch.full((self.batch,), self.length_k)
        shares = torch.rand(self.batch, generator=torch.Generator().manual_seed(0))
        return (self.length_k * (0.25 + 0.75 * shares)).long().clamp_min(1)

    @cached_property
    def blocks(self) -> torch.Tensor:
        """(batch, ceil(length_q / 64), ceil(length_k / 64)) bool: the visible blocks of the mask "bool"."""
        shape = (self.batch, -(-self.length_q // 64), -(-self.length_k // 64))
        blocks = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.5
        blocks[..., 0] = True  # no query is left without a key
        return blocks

    def dense(self) -> torch.Tensor | None:
        """(batch or 1, 1, length_q, length_k) bool, what may be seen, or None when all may."""
        if self.mask == "causal":
            return torch.ones(1, 1, self.length_q, self.length_k, dtype=torch.bool).tril()
        if self.mask == "padding":
            keys = torch.arange(self.length_k) < self.lengths[:, None]
            return keys[:, None, None].expand(-1, 1, self.length_q, -1)
        if self.mask == "bool":
            full = self.blocks.repeat_interleave(64, 1).repeat_interleave(64, 2)
            return full[:, None, : self.length_q, : self.length_k].contiguous()
        return None

    def work(self, direction: str) -> Work:
        dense = self.dense()
        share = 1.0 if dense is None else dense.double().mean().item()
        flop = 4 * self.batch * self.heads * self.length_q * self.length_k * share * self.dim
        size = self.dtype.itemsize
        q = self.batch * self.heads * self.length_q * self.dim * size
        kv = 2 * self.batch * (self.heads_k or self.heads) * self.length_k * self.dim * size
        bias = self.heads * self.length_q * self.length_k * size if self.mask == "bias" else 0
        forward = {"flop": flop, "byte": 2 * q + kv + bias}  # q, k, v, bias; out
        backward = {
            "flop": 2.5 * flop,
            "byte": 4 * q + 2 * kv + 2 * bias,
        }  # q, k, v, bias, out, dout; dq, dk, dv, dbias
        return _directions(direction, forward, backward)


@dataclass(frozen=True)
class NormCase:
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
        return f"{self.rows}x{self.width}{dropout} {_label(self.dtype)}"

    def work(self, direction: str) -> Work:
        tensor = self.rows * self.width
        forward = {"flop": 8 * tensor, "byte": 4 * tensor * self.dtype.itemsize}
        passes = 4 if self.dropout_p else 3
        backward = {"flop": 16 * tensor, "byte": passes * tensor * self.dtype.itemsize}
        return _directions(direction, forward, backward)


@dataclass(frozen=True)
class FeedForwardCase:
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
        return f"{self.tokens}x{self.d_model}x{self.d_ff} {self.activation}{dropout} {_label(self.dtype)}"

    @property
    def d_up(self) -> int:
        return 2 * self.d_ff if self.activation.endswith("glu") else self.d_ff

    def work(self, direction: str) -> Work:
        weights = self.d_model * (self.d_up + self.d_ff)
        flop = 2 * self.tokens * weights
        forward = {"flop": flop, "byte": (2 * self.tokens * self.d_model + weights) * self.dtype.itemsize}
        backward = {"flop": 2 * flop, "byte": (3 * self.tokens * self.d_model + 2 * weights) * self.dtype.itemsize}
        return _directions(direction, forward, backward)


@dataclass(frozen=True)
class StepCase:
    """One training step of the encoder-decoder: forward, backward and Adam on (batch, length) source and target.

    dtype bfloat16 means float32 parameters under torch.autocast. Lengths are uniform in [length / 2, length].
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

    formula = (
        "FLOPs: 6 x tokens x weights of the products + 12 x batch x (encoder, half decoder, cross) pairs x d_model"
    )

    def __str__(self) -> str:
        shape = f"{self.n_layers}+{self.n_layers} layers d{self.d_model}/{self.d_inner} h{self.n_head} v{self.n_vocab}"
        return f"{shape} {self.batch}x{self.length} {_label(self.dtype)}"

    @cached_property
    def lengths(self) -> torch.Tensor:
        """(2, batch) real tokens of each source and target."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.length // 2, self.length + 1, (2, self.batch), generator=generator)

    def work(self, direction: str) -> Work:
        tokens = self.batch * self.length
        layer = (
            12 * self.d_model**2 + 4 * self.d_model * self.d_inner
        )  # an encoder layer has 4, a decoder layer 8 d x d
        weights = self.n_layers * layer + self.d_model * self.n_vocab
        pairs = self.n_layers * 2.5 * self.length**2  # masked pairs of the padding are counted, the causal half is not
        flop = 6 * tokens * weights + 12 * self.batch * pairs * self.d_model
        return {"flop": flop, "byte": 0.0, "token": float(self.lengths[1].sum())}


def _directions(direction: str, forward: Work, backward: Work) -> Work:
    match direction:
        case "forward":
            return forward
        case "backward":
            return backward
        case "both":
            return {unit: forward[unit] + backward[unit] for unit in forward}
    raise ValueError(f"direction {direction!r} is not forward, backward or both")


F32, BF16 = torch.float32, torch.bfloat16

# Each table: "quick" (seconds on one core, for tests), "cpu" (about a minute on two cores), "cuda" (a data-centre GPU).
ATTENTION = {
    "quick": [AttentionCase(2, 2, 40, 72, 16), AttentionCase(2, 2, 72, 72, 16, "padding", BF16)],
    "cpu": [
        AttentionCase(8, 8, 32, 32, 64, "padding"),
        AttentionCase(4, 8, 128, 128, 64),
        AttentionCase(4, 8, 128, 128, 64, "causal"),
        AttentionCase(4, 8, 128, 128, 64, "bias"),
        AttentionCase(4, 8, 128, 128, 64, "padding", dropout_p=0.1),
        AttentionCase(1, 8, 1024, 1024, 64, "causal"),
    ],
    "cuda": [
        AttentionCase(128, 8, 64, 64, 64, "padding", BF16),
        AttentionCase(128, 8, 64, 64, 64, "padding", BF16, dropout_p=0.1),
        AttentionCase(8, 16, 1024, 1024, 64, "full", BF16),
        AttentionCase(8, 16, 1024, 1024, 64, "causal", BF16),
        AttentionCase(8, 16, 1024, 1024, 64, "padding", BF16),
        AttentionCase(8, 16, 1024, 1024, 64, "bool", BF16),
        AttentionCase(8, 16, 1024, 1024, 64, "bias", BF16),
        AttentionCase(1, 16, 8192, 8192, 128, "full", BF16),
        AttentionCase(1, 16, 8192, 8192, 128, "causal", BF16),
        AttentionCase(1, 16, 8192, 8192, 128, "causal", BF16, heads_k=4),
    ],
}
NORM = {
    "quick": [NormCase(40, 96), NormCase(40, 96, dropout_p=0.1)],
    "cpu": [NormCase(1024, 512), NormCase(1024, 512, dropout_p=0.1), NormCase(4096, 1024)],
    "cuda": [
        NormCase(8192, 512, BF16, 0.1),
        NormCase(8192, 1024, BF16, 0.1),
        NormCase(65536, 512, BF16, 0.1),
        NormCase(65536, 1024, BF16),
        NormCase(65536, 1024, BF16, 0.1),
        NormCase(16384, 4096, BF16, 0.1),
        NormCase(65536, 1024, F32, 0.1),
    ],
}
FEED_FORWARD = {
    "quick": [FeedForwardCase(40, 48, 96), FeedForwardCase(40, 48, 96, "swiglu")],
    "cpu": [
        FeedForwardCase(512, 512, 2048),
        FeedForwardCase(512, 512, 2048, dropout_p=0.1),
        FeedForwardCase(512, 512, 1376, "swiglu"),
    ],
    "cuda": [
        FeedForwardCase(8192, 512, 2048, "relu", BF16, 0.1),
        FeedForwardCase(8192, 1024, 4096, "relu", BF16, 0.1),
        FeedForwardCase(8192, 1024, 4096, "gelu", BF16),
        FeedForwardCase(8192, 1024, 2752, "swiglu", BF16),
        FeedForwardCase(65536, 512, 2048, "relu", BF16, 0.1),
    ],
}
STEP = {
    "quick": [StepCase(2, 12, 1, 32, 64, 2, 50), StepCase(2, 12, 1, 32, 64, 2, 50, BF16)],
    "cpu": [StepCase(32, 24, 4, 128, 256, 4, 8000), StepCase(8, 32, 2, 512, 2048, 8, 8000)],
    "cuda": [
        StepCase(256, 32, 6, 512, 2048, 8, 32000, BF16),
        StepCase(64, 128, 6, 512, 2048, 8, 32000, BF16),
        StepCase(64, 128, 6, 1024, 4096, 16, 32000, BF16),
    ],
}
