"""One comparison for every test of linear_cross_entropy: what a backend computes against float64.

    plain_formula   plain PyTorch: in float64 the truth, in the tested dtype what is allowed.
    check(problem, backend)   runs a backend, judges every result; AssertionError names the one that is off.

A backend is called as backend(x, weight, target, bias, **options) -> loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers import ProblemBase, backends_of, compare
from torch import Tensor

from fastattn import linear_cross_entropy
from fastattn.backends import unsupported_reason

BACKENDS = backends_of("linear_cross_entropy")
IGNORED = 2  # a class that targets may be: padding
REDUCTIONS = ("none", "mean", "sum")
SMOOTHED = {"label_smoothing": 0.1, "logit_scale": 0.4}

Backend = Callable[..., Tensor]


class Results(NamedTuple):
    loss: Tensor
    dx: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None


@dataclass(frozen=True)
class Problem(ProblemBase):
    x: Tensor  # (tokens, d)
    weight: Tensor  # (classes, d)
    target: Tensor  # (tokens,)
    bias: Tensor | None
    dloss: Tensor  # as the loss
    label_smoothing: float = 0.0
    smooth_over: str = "all"
    ignore_index: int = IGNORED
    logit_scale: float = 1.0
    reduction: str = "mean"

    @property
    def options(self) -> dict[str, Any]:
        names = ("label_smoothing", "smooth_over", "ignore_index", "logit_scale", "reduction")
        return {name: getattr(self, name) for name in names}

    @property
    def keep(self) -> Tensor:
        return self.target != self.ignore_index


def make(
    reduction: str = "mean",
    *,
    tokens: int = 21,
    d: int = 32,
    classes: int = 70,
    has_bias: bool = True,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Problem:
    """One token in four is ignored; dloss of a reduced loss is not 1."""
    g = torch.Generator().manual_seed(tokens * 1000 + classes)

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=g, dtype=torch.float64) * scale).to(device, dtype)

    target = torch.randint(0, classes, (tokens,), generator=g)
    target[1::4] = IGNORED
    dloss = torch.randn(tokens, generator=g, dtype=torch.float64) if reduction == "none" else torch.tensor(1.7)
    return Problem(
        x=randn(tokens, d),
        weight=randn(classes, d, scale=2 * max(d, 1) ** -0.5),
        target=target.to(device),
        bias=randn(classes, scale=0.5) if has_bias else None,
        dloss=dloss.to(device, torch.promote_types(dtype, torch.float32)),
        reduction=reduction,
        **options,
    )


def plain_formula(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, **o: Any) -> Tensor:
    """torch's cross-entropy, or the public implementation's loss, of float32 logits."""
    logits = F.linear(x, weight, bias)
    logits = logits.to(torch.promote_types(x.dtype, torch.float32)) * o["logit_scale"]
    eps, classes = o["label_smoothing"], len(weight)
    if o["smooth_over"] == "all" or classes == 1:
        options = {"ignore_index": o["ignore_index"], "reduction": o["reduction"], "label_smoothing": eps}
        return F.cross_entropy(logits, target, **options)
    keep = target != o["ignore_index"]
    one_hot = F.one_hot(target.where(keep, 0), classes).to(logits.dtype)
    wanted = one_hot * (1 - eps) + (1 - one_hot) * eps / (classes - 1)
    losses = -(wanted * F.log_softmax(logits, 1)).sum(1) * keep
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / keep.sum()}[o["reduction"]]


def solve(p: Problem, backend: Backend, needs: str = "xwb") -> Results:
    """Forward and backward. needs: which of x, weight, bias require a gradient."""
    x, weight, bias = (
        None if t is None else t.detach().requires_grad_(n in needs)
        for t, n in zip((p.x, p.weight, p.bias), "xwb", strict=True)
    )
    loss = backend(x, weight, p.target, bias, **p.options)
    loss.backward(p.dloss)
    return Results(loss.detach(), *(None if t is None else t.grad for t in (x, weight, bias)))


def check(p: Problem, backend: Backend) -> Results:
    got = solve(p, backend)
    p = p.but(x=p.x.where(p.keep[:, None], 0))  # the plain formula multiplies what is ignored by 0, NaN too
    compare(got, p, lambda p: solve(p, plain_formula), p.x.dtype)
    return got


def backend_call(backend: str, device: torch.device) -> Backend:
    """The public function with one backend. Skips, with the reason, where that cannot run here."""
    probe = torch.zeros(16, 16, device=device)
    call = (probe, probe, None, probe[0].long(), 0.0, -100, 1.0, "mean")
    if (reason := unsupported_reason("linear_cross_entropy", backend, call)) is not None:
        pytest.skip(f"{backend}: {reason}")
    return lambda *inputs, **options: linear_cross_entropy(*inputs, **options, backend=backend)
