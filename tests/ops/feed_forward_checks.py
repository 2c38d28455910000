"""One comparison for every feed-forward test: what a backend computes against float64.

    exact(problem)   the formula and its gradients written out in float64: the truth. No autograd.
    plain(problem)   the formula in plain PyTorch at the problem's own dtype: its error decides what is allowed.
    check(problem, backend)   runs a backend, judges every result; AssertionError names the one that is off.

A backend is called as (x, weight1, bias1, weight2, bias2, activation, dropout_p) -> out: backend_call's, or a planted() one
with a bug.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close_as_torch, backends_of
from torch import Tensor

from fastattn import feed_forward
from fastattn._dispatch import refusal
from fastattn.reference import philox

BACKENDS = backends_of("feed_forward")
GATED = {"reglu": "relu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "swiglu": "silu"}
ACTIVATIONS = (*GATED.values(), *GATED)

Backend = Callable[..., Tensor]


class Results(NamedTuple):
    out: Tensor
    dx: Tensor | None
    dweight1: Tensor | None
    dbias1: Tensor | None
    dweight2: Tensor | None
    dbias2: Tensor | None


@dataclass(frozen=True)
class Problem:
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

    def but(self, **changes: Any) -> Problem:
        return replace(self, **changes)


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
        weight1=randn(rows, d, scale=d**-0.5),
        bias1=randn(rows, scale=0.5) if has_bias else None,
        weight2=randn(d_out, d_ff, scale=d_ff**-0.5),
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


def activation_and_slope(z: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """act(z) and act'(z) from their definitions, float64."""
    if name == "relu":
        return z.clamp_min(0), (z > 0).double()
    if name == "gelu":
        below, density = 0.5 * torch.erfc(-z / math.sqrt(2)), torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        return z * below, below + z * density
    if name == "gelu_tanh":
        t = torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))
        inner_slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * z * z)
        return 0.5 * z * (1 + t), 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * inner_slope
    s = 1 / (1 + torch.exp(-z))
    return z * s, s * (1 + z * (1 - s))


def exact(p: Problem) -> Results:
    """z = x W1^T + b1;  h = M act(z), gated M act(z_gate) z_up;  out = h W2^T + b2
    dh = M (dout W2);  dz = dh act'(z), gated (dh z_up act'(z_gate), dh act(z_gate))
    dx = dz W1;  dW1 = dz^T x;  db1 = sum dz;  dW2 = dout^T h;  db2 = sum dout
    """
    M = multiplier(p)
    x, W1, b1, W2, b2 = (None if t is None else t.double() for t in p.inputs)
    dout = p.dout.double()
    z = x @ W1.T + (0 if b1 is None else b1)
    dh = M * (dout @ W2)
    if p.activation in GATED:
        gate, up = z.chunk(2, dim=1)
        value, slope = activation_and_slope(gate, GATED[p.activation])
        h, dz = M * value * up, torch.cat([dh * up * slope, dh * value], 1)
    else:
        value, slope = activation_and_slope(z, p.activation)
        h, dz = M * value, dh * slope
    out = h @ W2.T + (0 if b2 is None else b2)
    return Results(out, dz @ W1, dz.T @ x, dz.sum(0), dout.T @ h, dout.sum(0))


def solve(p: Problem, backend: Backend, needs: str = "x1b2c") -> Results:
    """Forward and backward. needs: which of x, weight1, bias1, weight2, bias2 (x 1 b 2 c) ask for a gradient."""
    inputs = [
        None if t is None else t.detach().requires_grad_(n in needs) for t, n in zip(p.inputs, "x1b2c", strict=True)
    ]
    torch.manual_seed(p.seed)
    out = backend(*inputs, p.activation, p.dropout_p)
    out.backward(p.dout)
    return Results(out.detach(), *(None if t is None else t.grad for t in inputs))


def plain(p: Problem) -> Results:
    """As a person writes it in PyTorch, in the tested dtype throughout: its error decides what is allowed."""
    acts = {"relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"), "silu": F.silu}

    def backend(x, weight1, bias1, weight2, bias2, activation, dropout_p):
        z = F.linear(x, weight1, bias1)
        if activation in GATED:
            gate, up = z.chunk(2, dim=-1)
            h = acts[GATED[activation]](gate) * up
        else:
            h = acts[activation](z)
        return F.linear(h * multiplier(p).to(h.dtype), weight2, bias2)

    return solve(p, backend)


def check(p: Problem, backend: Backend) -> Results:
    got = solve(p, backend)
    for name, actual, truth, low in zip(Results._fields, got, exact(p), plain(p), strict=True):
        if low is not None:
            assert_close_as_torch(actual, truth, low, name)
    return got


def backend_call(backend: str, device: torch.device) -> Backend:
    """The public function held to one backend; skips, in why_not's own words, where this machine has no such backend."""
    probe = torch.zeros(16, 16, device=device)
    if (reason := refusal("feed_forward", backend, (probe, probe, None, probe, None, "relu", 0.0))) is not None:
        pytest.skip(f"{backend}: {reason}")
    return lambda *inputs: feed_forward(*inputs, backend=backend)


class Planted(torch.autograd.Function):
    """The op in plain PyTorch as a fused kernel computes it, tiles in float32, correct or with one bug."""

    @staticmethod
    def forward(ctx, x, weight1, bias1, weight2, bias2, activation, dropout_p, bug):
        rng_state = philox.draw_rng_state(x.device)
        gated, act = activation in GATED, GATED.get(activation, activation)
        act = {"gelu": "gelu_tanh"}.get(act, act) if bug == "tanh for erf" else act
        z = x.float() @ weight1.float().T + (0 if bug == "bias1 missing" else bias1.float())
        gate, up = z.to(x.dtype).float().chunk(2, dim=1) if gated else (z.to(x.dtype).float(), 1)
        if bug == "gate and up exchanged":
            gate, up = up, gate
        value, slope = activation_and_slope(gate, act)
        M = Planted.multiplier(rng_state, value.shape, dropout_p, bug)
        h = (M * value * up).to(x.dtype)
        ctx.save_for_backward(x, weight1, weight2, gate, value, slope, M, h, rng_state)
        ctx.rest = gated, up, dropout_p, bug
        return h @ weight2.T + bias2

    @staticmethod
    def multiplier(rng_state, shape, dropout_p, bug):
        rows, cols = shape
        row, col = bug == "dropout row off by one", bug == "dropout column off by one"
        keep = philox.keep_mask(rng_state, rows + row, cols + col, dropout_p)[row:, col:]
        if bug == "dropout column from the tile":
            keep = keep[:, torch.arange(cols) % 32]
        return keep.float() * (1 if bug == "dropout without rescale" else philox.rescale(dropout_p))

    @staticmethod
    def backward(ctx, dout):
        x, weight1, weight2, gate, value, slope, M, h, rng_state = ctx.saved_tensors
        gated, up, dropout_p, bug = ctx.rest
        if bug == "backward redraws dropout":
            M = Planted.multiplier(rng_state + 1, M.shape, dropout_p, bug)
        if bug == "backward without rescale":
            M = (M > 0).float()
        if bug == "backward without dropout":
            M = 1
        dh = M * (dout.float() @ weight2.float())
        dz = dh * up * (1 if bug == "slope missing" else slope)
        if gated:
            dz = torch.cat([dz, dh * (gate if bug == "up's gradient without act" else value)], 1)
        if bug == "dweight2 of h before dropout":
            h = (value * up).to(h.dtype)
        rows = slice(0, 16) if bug == "dbias1 of one tile" else slice(None)
        dbias1, dz = dz[rows].sum(0), dz.to(x.dtype)
        return dz @ weight1, dz.T @ x, dbias1, dout.T @ h, dout.sum(0), None, None, None


def planted(bug: str | None) -> Backend:
    return lambda *inputs: Planted.apply(*inputs, bug)
