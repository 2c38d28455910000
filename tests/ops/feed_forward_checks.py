"""One comparison for every feed-forward test: what a backend computes against float64.

    plain(problem)   the formula in plain PyTorch: in float64 the truth, in the tested dtype what is allowed.
    check(problem, backend)   runs a backend, judges every result; AssertionError names the one that is off.

A backend is called as (x, weight1, bias1, weight2, bias2, activation, dropout_p) -> out.
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

from fastattn import feed_forward
from fastattn.backends import unsupported_reason
from fastattn.backends.reference import philox

BACKENDS = backends_of("feed_forward")
GATED = {"reglu": "relu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "swiglu": "silu"}
ACTIVATIONS = (*GATED.values(), *GATED)
FUNCTIONS = {"relu": F.relu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "silu": F.silu}

Backend = Callable[..., Tensor]


class Results(NamedTuple):
    out: Tensor
    dx: Tensor | None
    dweight1: Tensor | None
    dbias1: Tensor | None
    dweight2: Tensor | None
    dbias2: Tensor | None


@dataclass(frozen=True)
class Problem(ProblemBase):
    x: Tensor  # (tokens, d)
    weight1: Tensor  # (d_ff, d), gated (2 * d_ff, d)
    bias1: Tensor | None
    weight2: Tensor  # (d_out, d_ff)
    bias2: Tensor | None
    dout: Tensor  # (tokens, d_out)
    activation: str
    dropout_p: float
    seed: int = 5

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        return self.x, self.weight1, self.bias1, self.weight2, self.bias2


def make(
    activation: str = "relu",
    dropout_p: float = 0.0,
    *,
    tokens: int = 21,
    d: int = 32,
    d_ff: int = 56,
    d_out: int = 24,
    has_bias: bool = True,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Problem:
    g = torch.Generator().manual_seed(tokens * 1000 + d_ff)

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=g, dtype=torch.float64) * scale).to(device, dtype)

    rows = 2 * d_ff if activation in GATED else d_ff
    return Problem(
        x=randn(tokens, d),
        weight1=randn(rows, d, scale=max(d, 1) ** -0.5),
        bias1=randn(rows, scale=0.5) if has_bias else None,
        weight2=randn(d_out, d_ff, scale=max(d_ff, 1) ** -0.5),
        bias2=randn(d_out) if has_bias else None,
        dout=randn(tokens, d_out),
        activation=activation,
        dropout_p=dropout_p,
    )


def multiplier(p: Problem) -> Tensor:
    """(tokens, d_ff) float64: 0 where dropped, 1 / (1 - dropout_p) elsewhere, for the draw of this problem's seed."""
    tokens, d_ff = p.x.shape[0], p.weight2.shape[1]
    if p.dropout_p == 0:
        return torch.ones(tokens, d_ff, dtype=torch.float64, device=p.x.device)
    torch.manual_seed(p.seed)
    keep = philox.keep_mask(philox.draw_rng_state(p.x.device), tokens, d_ff, p.dropout_p)
    return keep.double() * (0.0 if p.dropout_p == 1 else 1 / (1 - p.dropout_p))


def solve(p: Problem, backend: Backend, needs: str = "x1b2c") -> Results:
    """Forward and backward. needs: which of x, weight1, bias1, weight2, bias2 (x 1 b 2 c) require a gradient."""
    inputs = [
        None if t is None else t.detach().requires_grad_(n in needs) for t, n in zip(p.inputs, "x1b2c", strict=True)
    ]
    torch.manual_seed(p.seed)
    out = backend(*inputs, p.activation, p.dropout_p)
    out.backward(p.dout)
    return Results(out.detach(), *(None if t is None else t.grad for t in inputs))


def plain(p: Problem) -> Results:
    """As a person writes it in PyTorch, in x's dtype throughout."""

    def formula(x, weight1, bias1, weight2, bias2, activation, dropout_p):
        z = F.linear(x, weight1, bias1)
        if activation in GATED:
            gate, up = z.chunk(2, dim=-1)
            h = FUNCTIONS[GATED[activation]](gate) * up
        else:
            h = FUNCTIONS[activation](z)
        return F.linear(h * multiplier(p).to(h.dtype), weight2, bias2)

    return solve(p, formula)


def check(p: Problem, backend: Backend) -> Results:
    got = solve(p, backend)
    compare(got, p, plain, p.x.dtype)
    return got


def backend_call(backend: str, device: torch.device) -> Backend:
    """The public function with one backend. Skips, with the reason, where that cannot run here."""
    probe = torch.zeros(16, 16, device=device)
    if (
        reason := unsupported_reason("feed_forward", backend, (probe, probe, None, probe, None, "relu", 0.0))
    ) is not None:
        pytest.skip(f"{backend}: {reason}")
    return lambda *inputs: feed_forward(*inputs, backend=backend)
