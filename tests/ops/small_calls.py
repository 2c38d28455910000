"""A small call of every op in each of its variants, for the tests of what all ops have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn import AttentionMask, use_backend

Call = Callable[..., Any]
Shapes = tuple[tuple[int, ...], ...]

PADDING = torch.arange(8) < torch.tensor([[8], [5]])
TOKENS = torch.tensor([[3, 0, 2, 5], [1, 1, 4, 2]])
TARGET = torch.tensor([3, 0, -100, 6, 1, 2])
LENGTHS = torch.tensor([8, 5], dtype=torch.int32)
ANCESTORS = (torch.arange(48).view(2, 3, 8) % 5 % 3).int()


def moved(tensors: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: t.to(device) if isinstance(t, Tensor) else t for name, t in tensors.items()}


def attention(mask: dict[str, Any] | None = None, Hk: int = 2, B: int = 2, **options: Any) -> tuple[Call, Shapes]:
    shapes = ((B, 2, 8, 16), (B, Hk, 8, 16), (B, Hk, 8, 16))
    biased = (mask or {}).get("bias") is not None
    mask = {name: t for name, t in (mask or {}).items() if name != "bias"}
    if biased:
        shapes += ((1, 2, 1, 8),)

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Any:
        given = AttentionMask(bias=bias, **moved(mask, q.device)) if mask or biased else None
        return fastattn.scaled_dot_product_attention(q, k, v, given, enable_gqa=Hk != 2, **options)

    return call, shapes


def decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        return fastattn.decode_attention(q, k, v, LENGTHS.to(q.device), ANCESTORS.to(q.device))


def norm(**options: Any) -> tuple[Call, Shapes]:
    def call(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, x_bias: Tensor) -> Any:
        return fastattn.dropout_add_layer_norm(x, residual, weight, bias, x_bias=x_bias, **options)

    return call, ((2, 3, 16), (2, 3, 16), (16,), (16,), (16,))


def rms_norm(**options: Any) -> tuple[Call, Shapes]:
    def call(x: Tensor, weight: Tensor) -> Any:
        return fastattn.dropout_add_rms_norm(x, None, weight, **options)

    return call, ((2, 3, 16), (16,))


def feed_forward(activation: str, **options: Any) -> tuple[Call, Shapes]:
    rows = 32 if activation == "swiglu" else 16
    shapes = ((2, 3, 16), (rows, 16), (rows,), (16, 16), (16,))
    return lambda *tensors: fastattn.feed_forward(*tensors, activation, **options), shapes


def loss(**options: Any) -> tuple[Call, Shapes]:
    def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return fastattn.linear_cross_entropy(x, weight, TARGET.to(x.device), bias, **options)

    return call, ((6, 16), (9, 16), (9,))


def embed(position: Tensor | None = None, **options: Any) -> tuple[Call, Shapes]:
    def call(embedding: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        dtype = torch.float32 if embedding.dtype in (torch.bfloat16, torch.float16) else embedding.dtype
        table = torch.linspace(-1, 1, 5 * 16, dtype=dtype, device=embedding.device).view(5, 16)
        tokens, places = (None if t is None else t.to(embedding.device) for t in (TOKENS, position))
        return fastattn.embed_layer_norm(tokens, embedding, table, weight, bias, position=places, **options)

    return call, ((6, 16), (16,), (16,))


# The op's call, and the shapes of the tensors that get a gradient.
OPS: dict[str, tuple[Call, Shapes]] = {
    "attention": attention(),
    "attention causal": attention(is_causal=True),
    "attention padded": attention({"key_padding": PADDING}),
    "attention grouped": attention({"key_padding": PADDING}, Hk=1),
    "attention packed": attention({"cu_seqlens_q": torch.tensor([0, 3, 8]), "is_causal": True}, B=1),
    "attention bias, lse": attention({"key_padding": PADDING, "bias": True}, return_lse=True),
    "attention grouped, dropout": attention({"is_causal": True}, Hk=1, dropout_p=0.3),
    "norm": norm(),
    "norm with sum and dropout": norm(return_sum=True, dropout_p=0.4),
    "norm by std": norm(eps_on_std=True),
    "rms norm": rms_norm(dropout_p=0.2),
    "feed-forward": feed_forward("gelu"),
    "feed-forward made again": feed_forward("relu", recompute=True),
    "feed-forward gated": feed_forward("swiglu", dropout_p=0.3, recompute=True),
    "loss": loss(label_smoothing=0.1),
    "loss of each": loss(reduction="none", logit_scale=0.5),
    "embeddings": embed(scale=4.0, padding_idx=0),
    "embeddings placed": embed(position=torch.tensor([[4, 0, 1, 2], [1, 1, 3, 0]]), dropout_p=0.3),
}
WITH_DROPOUT = (
    *("attention grouped, dropout", "norm with sum and dropout", "rms norm", "feed-forward gated"),
    *("embeddings placed", "attention weights"),
)
EVERYDAY = (
    *("attention grouped", "attention packed", "attention bias, lse", "attention grouped, dropout", "norm"),
    *("norm with sum and dropout", "feed-forward gated", "loss", "embeddings placed"),
)
EVERY_OP = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in EVERYDAY else pytest.mark.full) for n in OPS]
)
# Calls with a result that has no gradient in every backend.
WITHOUT_GRADIENT = {
    "decoding": (decode, ((2, 3, 2, 16), (2, 8, 3, 2, 16), (2, 8, 3, 2, 16))),
    "attention weights": attention({"key_padding": PADDING, "bias": True}, dropout_p=0.3, return_weights=True),
}


def inputs_of(shapes: Shapes, device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [t.to(device, dtype).requires_grad_() for t in drawn]


def run(name: str, backend: str, inputs: Sequence[Tensor], seed: int | None = 5) -> tuple[Tensor, ...]:
    """The results. Equal seeds draw equal dropout. Skips where the backend cannot run."""
    call = (OPS | WITHOUT_GRADIENT)[name][0]
    if seed is not None:
        torch.manual_seed(seed)
    with use_backend(backend):
        try:
            results = call(*inputs)
        except RuntimeError as refused:
            pytest.skip(str(refused))
    return (results,) if isinstance(results, Tensor) else results


def scalar(results: Tensor | Sequence[Tensor]) -> Tensor:
    """Something whose derivatives have no zeros by chance."""

    def weighted(t: Tensor) -> Tensor:
        return (t * torch.linspace(0.5, 1.5, t.numel(), dtype=t.dtype, device=t.device).view(t.shape)).sin().sum()

    return sum(weighted(t) for t in ((results,) if isinstance(results, Tensor) else results))
