"""One comparison for every test of linear_cross_entropy: what a backend computes against float64.

    exact(problem)   the formula and its gradients written out in float64: the truth. No autograd.
    plain(problem)   as a person writes it in PyTorch at the problem's own dtype: its error decides what is allowed.
    check(problem, backend)   runs a backend, judges every result; AssertionError names the one that is off.

A backend is called as backend(x, weight, target, bias, **options) -> loss: backend_call's, or a planted() one with a bug.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close_as_torch, backends_of
from torch import Tensor

from fastattn import linear_cross_entropy
from fastattn._dispatch import refusal

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
class Problem:
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

    def but(self, **changes: Any) -> Problem:
        return replace(self, **changes)


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
        weight=randn(classes, d, scale=2 * d**-0.5),
        target=target.to(device),
        bias=randn(classes, scale=0.5) if has_bias else None,
        dloss=dloss.to(device, torch.promote_types(dtype, torch.float32)),
        reduction=reduction,
        **options,
    )


def wanted_distribution(p: Problem) -> Tensor:
    """(tokens, classes) float64: what label smoothing makes of the target."""
    classes, eps = len(p.weight), p.label_smoothing
    one_hot = F.one_hot(p.target.where(p.keep, 0), classes).double()
    if p.smooth_over == "all":
        return (1 - eps) * one_hot + eps / classes
    return (1 - eps) * one_hot + (1 - one_hot) * eps / (classes - 1) if classes > 1 else one_hot


def exact(p: Problem) -> Results:
    """z = scale (x W^T + b);  loss = -sum q log softmax(z);  dz = rate (softmax(z) - q);  dx = scale dz W;  ..."""
    x, weight, dloss = p.x.double().where(p.keep[:, None], 0), p.weight.double(), p.dloss.double()
    z = p.logit_scale * (x @ weight.T + (0 if p.bias is None else p.bias.double()))
    log_p, q, keep = z - torch.logsumexp(z, 1, keepdim=True), wanted_distribution(p), p.keep.double()
    losses = -(q * log_p.clamp_min(-1e300)).sum(1) * keep
    count = keep.sum() if p.reduction == "mean" else 1.0
    dlogits = p.logit_scale * (keep * dloss / max(count, 1))[:, None] * (log_p.exp() - q)
    loss = losses if p.reduction == "none" else losses.sum() / count
    return Results(loss, dlogits @ weight, dlogits.T @ x, None if p.bias is None else dlogits.sum(0))


def plain_backend(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, **o: Any) -> Tensor:
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
    """Forward and backward. needs: which of x, weight, bias ask for a gradient."""
    x, weight, bias = (
        None if t is None else t.detach().requires_grad_(n in needs)
        for t, n in zip((p.x, p.weight, p.bias), "xwb", strict=True)
    )
    loss = backend(x, weight, p.target, bias, **p.options)
    loss.backward(p.dloss)
    return Results(loss.detach(), *(None if t is None else t.grad for t in (x, weight, bias)))


def check(p: Problem, backend: Backend) -> Results:
    """A reduced loss is one number, whose error in the plain formula is luck: a mean is allowed what its rows are."""
    got, truth = solve(p, backend), exact(p)
    p = p.but(x=p.x.where(p.keep[:, None], 0))  # the plain formula multiplies what is ignored by 0, NaN too
    low = solve(p, plain_backend)
    if p.reduction == "none":
        assert_close_as_torch(got.loss, truth.loss, low.loss, "loss")
    else:
        rows = p.but(reduction="none", dloss=torch.zeros(len(p.x), device=p.x.device))
        error = (solve(rows, plain_backend).loss - exact(rows).loss).abs().max()
        error = error * p.keep.sum() if p.reduction == "sum" else error
        assert got.loss.dtype == low.loss.dtype and got.loss.shape == (), f"loss: {got.loss}"
        bound = 2 * error + torch.finfo(low.loss.dtype).eps / 2 * truth.loss.abs()
        off = (got.loss - truth.loss).abs()
        assert off <= bound, f"loss: error {off:.3e} is over the bound {bound:.3e}"
    for name, *of_name in zip(Results._fields[1:], got[1:], truth[1:], low[1:], strict=True):
        if of_name[2] is not None:
            assert_close_as_torch(*of_name, name)
    return got


def backend_call(backend: str, device: torch.device) -> Backend:
    """The public function held to one backend; skips, in why_not's own words, where this machine has no such backend."""
    probe = torch.zeros(16, 16, device=device)
    call = (probe, probe, None, probe[0].long(), 0.0, -100, 1.0, "mean")
    if (reason := refusal("linear_cross_entropy", backend, call)) is not None:
        pytest.skip(f"{backend}: {reason}")
    return lambda *inputs, **options: linear_cross_entropy(*inputs, **options, backend=backend)


class Planted(torch.autograd.Function):
    """The op in plain PyTorch as a fused kernel computes it, rows in float32, correct or with one bug."""

    @staticmethod
    def forward(ctx, x, weight, target, bias, o, bug):
        eps, scale, classes = o["label_smoothing"], o["logit_scale"], len(weight)
        keep = target != o["ignore_index"]
        x = x if bug == "ignored rows in dweight" else x.where(keep[:, None], 0)
        logits = F.linear(x, weight, None if bug == "bias missing" else bias).float()
        z = logits * (1 if bug == "scale missing" else scale)
        label = target.where(keep, 0)
        if bug == "the next class":
            label = (label + 1) % classes
        lse = torch.logsumexp(z[:, :64] if bug == "ragged tile missing" else z, 1)
        if bug == "lse rounded":
            lse = lse.bfloat16().float()
        share = eps / (classes - 1 if bug == "smoothed over the others" else classes)
        smooth = (lse[:, None] - z)[:, :64] if bug == "ragged tile not smoothed" else lse[:, None] - z
        losses = (1 - eps) * (lse - z.gather(1, label[:, None])[:, 0]) + share * smooth.sum(1)
        losses = losses if bug == "ignored rows in the loss" else losses.where(keep, 0)
        count = len(x) if bug == "mean over all rows" else keep.sum()
        rate = 1 if bug == "gradient without scale" else scale
        if o["reduction"] == "mean" and bug != "gradient of the sum":
            rate = rate / count
        p = torch.exp(z - lse[:, None])
        p -= 0 if bug == "gradient without smoothing" else share
        p.scatter_add_(1, label[:, None], torch.full_like(p[:, :1], eps - 1))
        dlogits = (p * rate).where(keep[:, None] | (bug == "ignored rows in dx"), 0).to(x.dtype)
        ctx.save_for_backward(x, weight, dlogits)
        ctx.bug = bug
        if o["reduction"] == "none":
            return losses
        return losses.sum() if o["reduction"] == "sum" else losses.sum() / count

    @staticmethod
    def backward(ctx, dloss):
        x, weight, dlogits = ctx.saved_tensors
        if ctx.bug != "dloss forgotten":
            dlogits = (dlogits * dloss.view(-1, 1)).to(dlogits.dtype)
        rows = slice(0, 16) if ctx.bug == "dbias of one tile" else slice(None)
        return dlogits @ weight, dlogits.T @ x, None, dlogits[rows].sum(0), None, None


def planted(bug: str | None) -> Backend:
    return lambda *inputs, **options: Planted.apply(*inputs, options, bug)
