"""One comparison for every test of dropout + residual + LayerNorm or RMSNorm: what a backend computes against float64.

    plain(problem)   the formula in plain PyTorch: in float64 the truth, in the tested dtype what is allowed.
    check(problem, backend)   runs a backend, judges every result; AssertionError names the one that is off.

A backend is called as (x, residual, weight, bias, eps, dropout_p, x_bias=) -> (out, z), in problems that have it also
with eps_on_std=True. A problem without bias is RMSNorm's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers import ProblemBase, backends_of, compare
from torch import Tensor

from fastattn import dropout_add_layer_norm, dropout_add_rms_norm
from fastattn.backends import unsupported_reason
from fastattn.backends.reference import philox

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
class Problem(ProblemBase):
    x: Tensor  # (rows, hidden)
    residual: Tensor | None
    weight: Tensor
    bias: Tensor | None
    dout: Tensor
    dz: Tensor
    dropout_p: float
    seed: int = 5
    x_bias: Tensor | None = None
    eps_on_std: bool = False


def make(
    rows: int = 37,
    hidden: int = 48,
    dropout_p: float = 0.0,
    *,
    has_residual: bool = True,
    has_x_bias: bool = False,
    rms: bool = False,
    eps_on_std: bool = False,
    dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    mean: float = 0.0,
    std: float = 1.0,
) -> Problem:
    """Random inputs. The residual is not as large as x, and the gradients differ, so that every mix-up shows."""
    g = torch.Generator().manual_seed(rows * 1000 + hidden)

    def randn(*shape: int, dtype: torch.dtype = dtype, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        return (torch.randn(*shape, generator=g, dtype=torch.float64) * scale + shift).to(device, dtype)

    shape, weight_dtype = (rows, hidden), weight_dtype or dtype
    return Problem(
        x=randn(*shape, scale=std, shift=mean),
        residual=randn(*shape, scale=0.7 * std) if has_residual else None,
        weight=randn(hidden, dtype=weight_dtype, scale=0.3, shift=1.0),
        bias=None if rms else randn(hidden, dtype=weight_dtype),
        dout=randn(*shape),
        dz=randn(*shape, scale=0.5),
        dropout_p=dropout_p,
        x_bias=randn(hidden, scale=0.6 * std, shift=0.3) if has_x_bias else None,
        eps_on_std=eps_on_std,
    )


def multiplier(p: Problem) -> Tensor:
    """(rows, hidden) float64: 0 where dropped, 1 / (1 - dropout_p) elsewhere, for the draw of this problem's seed."""
    if p.dropout_p == 0:
        return torch.ones_like(p.x, dtype=torch.float64)
    torch.manual_seed(p.seed)
    keep = philox.keep_mask(philox.draw_rng_state(p.x.device), *p.x.shape, p.dropout_p)
    return keep.double() * (0.0 if p.dropout_p == 1 else 1 / (1 - p.dropout_p))


def solve(p: Problem, backend: Backend, needs: str = "xrwbi") -> Results:
    """Forward and backward. needs: which of x, residual, weight, bias, x_bias (i) require a gradient."""
    tensors = zip((p.x, p.residual, p.weight, p.bias, p.x_bias), "xrwbi", strict=True)
    x, residual, weight, bias, x_bias = leaves = [
        None if t is None else t.detach().requires_grad_(n in needs) for t, n in tensors
    ]
    torch.manual_seed(p.seed)
    variant = {"eps_on_std": True} if p.eps_on_std else {}
    out, z = backend(x, residual, weight, bias, EPS, p.dropout_p, x_bias=x_bias, **variant)
    losses = [(t, dt) for t, dt in ((out, p.dout), (z, p.dz)) if t.requires_grad]
    torch.autograd.backward(*zip(*losses, strict=True))
    grads = (None if t is None else t.grad for t in leaves)
    return Results(out.detach(), z.detach(), *grads)


def plain(p: Problem) -> Results:
    """As a person writes it in PyTorch, in x's dtype throughout."""

    def formula(x, residual, weight, bias, eps, dropout_p, x_bias, eps_on_std=False):
        z = x if x_bias is None else x + x_bias.to(x.dtype)
        z = z * multiplier(p).to(x.dtype)
        z = z if residual is None else residual + z
        if eps_on_std:
            centred = z - z.mean(-1, keepdim=True)
            return weight.to(x.dtype) * centred / (z.std(-1, keepdim=True) + eps) + bias.to(x.dtype), z
        if bias is None:
            return F.rms_norm(z, z.shape[-1:], weight.to(x.dtype), eps), z
        return F.layer_norm(z, z.shape[-1:], weight.to(x.dtype), bias.to(x.dtype), eps), z

    return solve(p, formula)


def check(p: Problem, backend: Backend) -> Results:
    got = solve(p, backend)
    compare(got, p, plain, p.x.dtype)
    return got


def public(
    backend: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    x_bias: Tensor | None = None,
    **variant: bool,
) -> Any:
    """The public function that has these arguments."""
    options = {"eps": eps, "dropout_p": dropout_p, "return_sum": True, "x_bias": x_bias, "backend": backend}
    if bias is None:
        return dropout_add_rms_norm(x, residual, weight, **options)
    return dropout_add_layer_norm(x, residual, weight, bias, **options, **variant)


def backend_call(backend: str, device: torch.device) -> Backend:
    """The public function with one backend. Skips, with the reason, where that cannot run here."""
    probe = torch.zeros(1, 16, device=device)
    if (reason := unsupported_reason("add_layer_norm", backend, (probe, None, probe[0], probe[0], 0.0))) is not None:
        pytest.skip(f"{backend}: {reason}")
    return partial(public, backend)
