"""One comparison for every test of dropout + residual + LayerNorm or RMSNorm: what a backend computes against float64.

    exact(problem)   the formula and its gradients written out in float64: the truth. No autograd.
    less_exact(problem, truth)   plain PyTorch at the problem's own dtype: its error decides what is allowed.
    check(problem, backend)   runs a backend, judges every result; AssertionError names the one that is off.

A backend is called as (x, residual, weight, bias, eps, dropout_p, x_bias=) -> (out, z): backend_call's, or a planted() one
with a bug. A problem without bias is RMSNorm's.
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

from fastattn import dropout_add_layer_norm, dropout_add_rms_norm
from fastattn._dispatch import refusal
from fastattn.reference import philox

BACKENDS = backends_of("add_layer_norm")
EPS = 1e-6

Backend = Callable[..., tuple[Tensor, Tensor]]


class Results(NamedTuple):
    out: Tensor
    z: Tensor
    dx: Tensor | None
    dresidual: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None
    dx_bias: Tensor | None


@dataclass(frozen=True)
class Problem:
    x: Tensor  # (rows, hidden)
    residual: Tensor | None
    weight: Tensor
    bias: Tensor | None
    dout: Tensor
    dz: Tensor
    dropout_p: float
    seed: int = 5
    x_bias: Tensor | None = None

    def but(self, **changes: Any) -> Problem:
        return replace(self, **changes)


def make(
    rows: int = 37,
    hidden: int = 48,
    dropout_p: float = 0.0,
    *,
    has_residual: bool = True,
    has_x_bias: bool = False,
    rms: bool = False,
    dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    mean: float = 0.0,
) -> Problem:
    """Random inputs. The residual is not as large as x, and the gradients differ, so that no mix-up goes unseen."""
    g = torch.Generator().manual_seed(rows * 1000 + hidden)

    def randn(*shape: int, dtype: torch.dtype = dtype, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        return (torch.randn(*shape, generator=g, dtype=torch.float64) * scale + shift).to(device, dtype)

    shape, weight_dtype = (rows, hidden), weight_dtype or dtype
    return Problem(
        x=randn(*shape, shift=mean),
        residual=randn(*shape, scale=0.7) if has_residual else None,
        weight=randn(hidden, dtype=weight_dtype, scale=0.3, shift=1.0),
        bias=None if rms else randn(hidden, dtype=weight_dtype),
        dout=randn(*shape),
        dz=randn(*shape, scale=0.5),
        dropout_p=dropout_p,
        x_bias=randn(hidden, scale=0.6, shift=0.3) if has_x_bias else None,
    )


def multiplier(p: Problem) -> Tensor:
    """(rows, hidden) float64: 0 where dropped, 1 / (1 - dropout_p) elsewhere, for the draw of this problem's seed."""
    if p.dropout_p == 0:
        return torch.ones_like(p.x, dtype=torch.float64)
    torch.manual_seed(p.seed)
    keep = philox.keep_mask(philox.draw_rng_state(p.x.device), *p.x.shape, p.dropout_p)
    return keep.double() * (0.0 if p.dropout_p == 1 else 1 / (1 - p.dropout_p))


def exact(p: Problem) -> Results:
    """The formula and its gradients, written out in float64.

    z = M (x + x_bias) + residual;  n = (z - mean) rstd;  out = n weight + bias;  g = dout weight
    dresidual = rstd (g - mean(g) - n mean(g n)) + dz;  dx = M dresidual;  dweight = sum dout n;  dbias = sum dout
    dx_bias = sum dx;  RMSNorm: both means of z and of g are 0, and so is the bias.
    """
    rms = p.bias is None
    M, x, weight, dout = multiplier(p), p.x.double(), p.weight.double(), p.dout.double()
    x = x if p.x_bias is None else x + p.x_bias.double()
    z = M * x + (0 if p.residual is None else p.residual.double())
    centred = z if rms else z - z.mean(1, keepdim=True)
    rstd = (centred.square().mean(1, keepdim=True) + EPS) ** -0.5
    n, g = centred * rstd, dout * weight
    g_mean = 0 if rms else g.mean(1, keepdim=True)
    dresidual = rstd * (g - g_mean - n * (g * n).mean(1, keepdim=True)) + p.dz.double()
    out = n * weight + (0 if rms else p.bias.double())
    dweight, dbias = (dout * n).sum(0), None if rms else dout.sum(0)
    dx, dresidual = M * dresidual, None if p.residual is None else dresidual
    return Results(out, z, dx, dresidual, dweight, dbias, None if p.x_bias is None else dx.sum(0))


def solve(p: Problem, backend: Backend, needs: str = "xrwbi") -> Results:
    """Forward and backward. needs: which of x, residual, weight, bias, x_bias (i) ask for a gradient."""
    tensors = zip((p.x, p.residual, p.weight, p.bias, p.x_bias), "xrwbi", strict=True)
    x, residual, weight, bias, x_bias = leaves = [
        None if t is None else t.detach().requires_grad_(n in needs) for t, n in tensors
    ]
    torch.manual_seed(p.seed)
    out, z = backend(x, residual, weight, bias, EPS, p.dropout_p, x_bias=x_bias)
    losses = [(t, dt) for t, dt in ((out, p.dout), (z, p.dz)) if t.requires_grad]
    torch.autograd.backward(*zip(*losses, strict=True))
    grads = (None if t is None else t.grad for t in leaves)
    return Results(out.detach(), z.detach(), *grads)


def plain(p: Problem, backwards: bool = False) -> Results:
    """As a person writes it in PyTorch, in the tested dtype throughout: its error decides what is allowed.

    backwards: with rows and columns in reverse order, so that every sum runs the other way.
    """

    def turned(t: Tensor) -> Tensor:
        return t.flip(tuple(range(t.dim()))) if backwards else t

    def backend(x, residual, weight, bias, eps, dropout_p, x_bias):
        z = x if x_bias is None else x + x_bias.to(x.dtype)
        z = z * multiplier(p).to(x.dtype)
        z = turned(z if residual is None else residual + z)
        if bias is None:
            out = F.rms_norm(z, z.shape[-1:], turned(weight).to(x.dtype), eps)
        else:
            out = F.layer_norm(z, z.shape[-1:], turned(weight).to(x.dtype), turned(bias).to(x.dtype), eps)
        return turned(out), turned(z)

    return solve(p, backend)


def less_exact(p: Problem, truth: Results) -> Results:
    """Of three plain ways to compute the problem, for each result the one that is furthest from the truth.

    All are honest; on a small problem each may come near the truth by luck. The third is the reference formula.
    """

    def furthest(truth: Tensor | None, *ways: Tensor | None) -> Tensor | None:
        return None if truth is None else max(ways, key=lambda way: (way.double() - truth).abs().nan_to_num().sum())

    return Results(*map(furthest, truth, plain(p), plain(p, backwards=True), solve(p, partial(public, "reference"))))


def check(p: Problem, backend: Backend) -> Results:
    got, truths = solve(p, backend), exact(p)
    for name, actual, truth, low in zip(Results._fields, got, truths, less_exact(p, truths), strict=True):
        if truth is not None:
            assert_close_as_torch(actual, truth, low, name)
    return got


def public(
    backend: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    *options: float,
    x_bias: Tensor | None = None,
) -> Any:
    """The public function that has these arguments."""
    more = {"return_sum": True, "x_bias": x_bias, "backend": backend}
    if bias is None:
        return dropout_add_rms_norm(x, residual, weight, *options, **more)
    return dropout_add_layer_norm(x, residual, weight, bias, *options, **more)


def backend_call(backend: str, device: torch.device) -> Backend:
    """The public function held to one backend; skips, in why_not's own words, where this machine has no such backend."""
    probe = torch.zeros(1, 16, device=device)
    if (reason := refusal("add_layer_norm", backend, (probe, None, probe[0], probe[0], 0.0))) is not None:
        pytest.skip(f"{backend}: {reason}")
    return partial(public, backend)


class Planted(torch.autograd.Function):
    """The op in plain PyTorch, correct or with one bug."""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps, dropout_p, x_bias, bug):
        rng_state = philox.draw_rng_state(x.device)
        M = Planted.multiplier(x, dropout_p, rng_state, bug)
        z = M * x.float()
        if x_bias is not None and bug != "x_bias ignored":
            z = z + x_bias.float() * (1 if bug == "x_bias not dropped" else M)
        z = z + (0 if residual is None or bug == "residual ignored" else residual.float())
        mean = z.mean(1, keepdim=True) * (bias is not None or bug == "mean subtracted")
        if bug == "mean in the input dtype":
            mean = mean.to(x.dtype).float()
        var = (z - mean).square().mean(1, keepdim=True)
        if bug == "variance from E[z^2] - mean^2":
            var = (z.square().mean(1, keepdim=True) - mean.square()).clamp_min(0)
        if bug == "variance over hidden - 1":
            var = var * x.shape[1] / (x.shape[1] - 1)
        rstd = (var + eps).rsqrt()
        n = (z - mean) * rstd
        ctx.save_for_backward(M, n, rstd, weight, residual)
        ctx.again = (x, dropout_p, rng_state, bug, bias is None, x_bias)
        shift = 0 if bias is None else bias.float()
        return (n * weight.float() + shift).to(x.dtype), z.to(x.dtype)

    @staticmethod
    def multiplier(x, dropout_p, rng_state, bug):
        rows, cols = x.shape
        shift_row, shift_col = bug == "dropout row off by one", bug == "dropout column off by one"
        keep = philox.keep_mask(rng_state, rows + shift_row, cols + shift_col, dropout_p)[shift_row:, shift_col:]
        return keep.float() * (1 if bug == "dropout without rescale" else philox.rescale(dropout_p))

    @staticmethod
    def backward(ctx, dout, dz):
        M, n, rstd, weight, residual = ctx.saved_tensors
        x, dropout_p, rng_state, bug, rms, x_bias = ctx.again
        g = dout.float() * weight.float()
        g_mean = g.mean(1, keepdim=True)
        if bug == "mean of the gradient missing" or (rms and bug != "mean of the gradient subtracted"):
            g_mean = 0
        gn_mean = 0 if bug == "second mean missing" else (g * n).mean(1, keepdim=True)
        dresidual = rstd * (g - g_mean - n * gn_mean) + (0 if bug == "dz ignored" else dz.float())
        if bug == "backward redraws dropout":
            M = Planted.multiplier(x, dropout_p, rng_state + 1, bug)
        if bug == "backward without dropout":
            M = 1
        rows = slice(0, -1) if bug == "last row missing in dweight" else slice(None)
        dweight, dbias = (dout.float() * n)[rows].sum(0), None if rms else dout.float().sum(0)
        dx = M * dresidual
        dx_bias = None if x_bias is None else (dresidual if bug == "dresidual summed for x_bias" else dx).sum(0)
        dresidual = None if residual is None else dresidual.to(dout.dtype)
        return dx.to(dout.dtype), dresidual, dweight, dbias, None, None, dx_bias, None


def planted(bug: str | None) -> Backend:
    return lambda *inputs, x_bias=None: Planted.apply(*inputs, x_bias, bug)
