"""One comparison for every test of embedding + positions + dropout + LayerNorm: a backend against float64.

plain(problem, dtype)   the formula in plain PyTorch: in float64 the truth, in the tested dtype what is allowed.
check(problem, backend)   runs a backend, judges every result; AssertionError names the one that is off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers import ProblemBase, backends_of, compare
from torch import Tensor

from fastattn import embed_layer_norm
from fastattn.backends import unsupported_reason
from fastattn.backends.reference import philox

BACKENDS = backends_of("embed_layer_norm")
EPS = 1e-6

Backend = Callable[..., Tensor]  # called as embed_layer_norm is


class Results(NamedTuple):
    out: Tensor
    dembedding: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None


@dataclass(frozen=True)
class Problem(ProblemBase):
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
    """Forward and backward. needs: which of embedding, weight, bias require a gradient."""
    tensors = zip((p.embedding, p.weight, p.bias), "ewb", strict=True)
    embedding, weight, bias = (t.detach().requires_grad_(name in needs) for t, name in tensors)
    torch.manual_seed(p.seed)
    options = {"eps": EPS, "dropout_p": p.dropout_p}
    options |= {"scale": p.scale, "position": p.position, "padding_idx": p.padding_idx}
    out = backend(p.tokens, embedding, p.table, weight, bias, **options)
    out.backward(p.dout.to(out.dtype))
    return Results(out.detach(), embedding.grad, weight.grad, bias.grad)


def plain(p: Problem, dtype: torch.dtype | None = None) -> Results:
    """As a person writes it in PyTorch, in `dtype`, or that of the embedding, throughout."""
    dtype = dtype or p.embedding.dtype

    def formula(tokens, embedding, table, weight, bias, *, eps, dropout_p, scale, position, padding_idx):
        words = F.embedding(tokens, embedding.to(dtype), padding_idx) * scale
        z = (words + table.to(dtype)[positions(p)]) * multiplier(p).view(words.shape).to(dtype)
        return F.layer_norm(z, z.shape[-1:], weight.to(dtype), bias.to(dtype), eps)

    return solve(p, formula)


def positions(p: Problem) -> Tensor:
    in_order = torch.arange(p.tokens.shape[1], device=p.tokens.device).expand(p.tokens.shape)
    return in_order if p.position is None else p.position


def multiplier(p: Problem) -> Tensor:
    """(rows, hidden) float64: 0 where dropped, 1 / (1 - dropout_p) elsewhere, for the draw of this problem's seed."""
    rows, hidden, device = p.tokens.numel(), p.embedding.shape[1], p.tokens.device
    torch.manual_seed(p.seed)
    return philox.keep_factor(philox.draw_rng_state(device), rows, hidden, p.dropout_p, torch.float64)


def check(p: Problem, backend: Backend) -> Results:
    got = solve(p, backend)
    compare(got, p, plain, p.embedding.dtype)
    return got


def backend_call(backend: str, device: torch.device) -> Backend:
    """The public function with one backend. Skips, with the reason, where that cannot run here."""
    p = make(device=device)
    arguments = (p.tokens, p.embedding, p.table, p.weight, p.bias, None, 1.0, None, 0.0, torch.float32)
    if (reason := unsupported_reason("embed_layer_norm", backend, arguments)) is not None:
        pytest.skip(f"{backend}: {reason}")
    return partial(embed_layer_norm, backend=backend)
