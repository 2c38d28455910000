"""One comparison for every test of embedding + positions + dropout + LayerNorm: what a backend computes against float64.

formula(problem, dtype)   plain PyTorch and its autograd: in float64 the truth, in the tested dtype what is allowed.
check(problem, backend)      runs a backend, judges every result; AssertionError names the one that is off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close_as_torch, backends_of
from torch import Tensor

from fastattn import embed_layer_norm
from fastattn._dispatch import refusal
from fastattn.reference import philox

BACKENDS = backends_of("embed_layer_norm")
EPS = 1e-6

Backend = Callable[..., Tensor]  # called as embed_layer_norm is


class Results(NamedTuple):
    out: Tensor
    dembedding: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None


@dataclass(frozen=True)
class Problem:
    tokens: Tensor  # (B, L)
    embedding: Tensor
    table: Tensor
    weight: Tensor
    bias: Tensor
    dout: Tensor
    dropout_p: float
    scale: float
    position: Tensor | None
    padding_idx: int | None
    seed: int = 5

    def but(self, **changes: Any) -> Problem:
        return replace(self, **changes)


def make(
    batch: int = 3,
    length: int = 7,
    hidden: int = 48,
    dropout_p: float = 0.0,
    *,
    scale: float = 1.0,
    packed: bool = False,
    padding_idx: int | None = 2,
    dtype: torch.dtype = torch.float32,
    table_dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Problem:
    """Random inputs; most tokens of the small vocabulary come several times. packed: with positions of its own."""
    g = torch.Generator().manual_seed(batch * 1000 + hidden)
    vocabulary, n_position = 11, length + 5

    def randn(*shape: int, dtype: torch.dtype = dtype, shift: float = 0.0) -> Tensor:
        return (torch.randn(*shape, generator=g, dtype=torch.float64) + shift).to(device, dtype)

    def integers(high: int) -> Tensor:
        return torch.randint(0, high, (batch, length), generator=g).to(device)

    return Problem(
        tokens=integers(vocabulary),
        embedding=randn(vocabulary, hidden),
        table=randn(n_position, hidden, dtype=table_dtype or dtype),
        weight=randn(hidden, dtype=weight_dtype or dtype, shift=1.0),
        bias=randn(hidden, dtype=weight_dtype or dtype),
        dout=randn(batch, length, hidden),
        dropout_p=dropout_p,
        scale=scale,
        position=integers(n_position) if packed else None,
        padding_idx=padding_idx,
    )


def solve(p: Problem, backend: Backend, needs: str = "ewb") -> Results:
    """Forward and backward. needs: which of embedding, weight, bias ask for a gradient."""
    tensors = zip((p.embedding, p.weight, p.bias), "ewb", strict=True)
    embedding, weight, bias = (t.detach().requires_grad_(name in needs) for t, name in tensors)
    torch.manual_seed(p.seed)
    options = {"scale": p.scale, "position": p.position, "padding_idx": p.padding_idx}
    out = backend(p.tokens, embedding, p.table, weight, bias, EPS, p.dropout_p, **options)
    out.backward(p.dout.to(out.dtype))
    return Results(out.detach(), embedding.grad, weight.grad, bias.grad)


def plain(dtype: torch.dtype, bug: str | None = None) -> Backend:
    """As a person writes it in PyTorch, in `dtype` throughout; bug: with this mistake."""

    def backend(
        tokens: Tensor,
        embedding: Tensor,
        table: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        dropout_p: float,
        *,
        scale: float,
        position: Tensor | None,
        padding_idx: int | None,
    ) -> Tensor:
        places = (
            torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape) if position is None else position
        )
        places = places + (bug == "positions from one on")
        words = F.embedding(tokens, embedding.to(dtype), None if bug == "padding learns" else padding_idx)
        words = words * (1.0 if bug == "scale forgotten" else scale)
        if bug == "scale forgotten in the backward":
            words = words.detach() + (words - words.detach()) / scale
        z = words + table.to(dtype)[places]
        if bug == "each token learns once":
            first = torch.ones_like(tokens, dtype=torch.bool)
            for i, token in enumerate(seen := tokens.flatten().tolist()):
                first.view(-1)[i] = token not in seen[:i]
            z = torch.where(first[..., None], z, z.detach())
        if dropout_p > 0:
            rng_state = philox.draw_rng_state(tokens.device)
            rows = tokens.shape[1] if bug == "dropout counted in each sequence" else tokens.numel()
            keep = philox.keep_mask(rng_state, rows, z.shape[-1], dropout_p)
            z = z * keep.view(-1, *z.shape[1:]) / (1 - dropout_p)
        return F.layer_norm(z, z.shape[-1:], weight.to(dtype), bias.to(dtype), eps)

    return backend


def check(p: Problem, backend: Backend) -> Results:
    """At most twice the error of the less exact of two plain ways, and one rounding; see fastattn.doctor.judge."""
    got = solve(p, backend)
    truth = solve(
        p.but(embedding=p.embedding.double(), weight=p.weight.double(), bias=p.bias.double()), plain(torch.float64)
    )
    ways = solve(p, plain(got.out.dtype)), solve(p, partial(embed_layer_norm, backend="reference"))
    for name, actual, true, *lows in zip(Results._fields, got, truth, *ways, strict=True):
        low = max(lows, key=lambda low: (low.double() - true).abs().sum())
        assert_close_as_torch(actual, true, low.to(actual.dtype), name)
    return got


def backend_call(backend: str, device: torch.device) -> Backend:
    """The public function held to one backend; skips, in why_not's own words, where this machine has no such backend."""
    p = make(device=device)
    arguments = (p.tokens, p.embedding, p.table, p.weight, p.bias, None, 1.0, None, 0.0, torch.float32)
    if (reason := refusal("embed_layer_norm", backend, arguments)) is not None:
        pytest.skip(f"{backend}: {reason}")
    return partial(embed_layer_norm, backend=backend)
