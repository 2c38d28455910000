"""One comparison for every op but attention: what a backend computes, forward and backward, against float64.

    FORMULAS                  each op in plain PyTorch, with the op's own arguments: in float64 the truth, in the tested
                              dtype what is allowed.
    check(problem, backend)   runs a backend, judges every result; AssertionError names the one that is off.

Problems come from fastattn/check/cases.py. Attention has its own comparison, attention_checks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close_as_torch
from torch import Tensor

import fastattn
from fastattn import explain
from fastattn.backends.reference import philox
from fastattn.check import cases
from fastattn.check.cases import Problem, expected_results

Backend = str | Callable[..., Any]  # a name, or what is called with the arguments of the op

GATED = {"reglu": "relu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "swiglu": "silu"}
ACTIVATIONS = (*GATED.values(), *GATED)
FUNCTIONS = {"relu": F.relu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "silu": F.silu}


def dropped(x: Tensor, dropout_p: float) -> Tensor:
    """x with dropout by the written rule, for the draw that an op makes at its place in the generator."""
    if dropout_p == 0:
        return x
    rows = x.numel() // max(x.shape[-1], 1)
    factor = philox.keep_factor(philox.draw_rng_state(x.device), rows, x.shape[-1], dropout_p, torch.float64)
    return x * factor.view(x.shape).to(x.dtype)


def add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    return_sum: bool = False,
    x_bias: Tensor | None = None,
    eps_on_std: bool = False,
) -> Any:
    """In x's dtype throughout. Without a bias it is RMSNorm."""
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    z = dropped(x if x_bias is None else x + x_bias.to(x.dtype), dropout_p)
    z = z if residual is None else residual + z
    if eps_on_std:
        out = weight * (z - z.mean(-1, keepdim=True)) / (z.std(-1, keepdim=True) + eps) + bias
    elif bias is None:
        out = F.rms_norm(z, z.shape[-1:], weight, eps)
    else:
        out = F.layer_norm(z, z.shape[-1:], weight, bias, eps)
    return (out, z) if return_sum else out


def feed_forward(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str = "relu",
    dropout_p: float = 0.0,
) -> Tensor:
    z = F.linear(x, weight1, bias1)
    if activation in GATED:
        gate, up = z.chunk(2, dim=-1)
        h = FUNCTIONS[GATED[activation]](gate) * up
    else:
        h = FUNCTIONS[activation](z)
    return F.linear(dropped(h, dropout_p), weight2, bias2)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    smooth_over: str = "all",
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    reduction: str = "mean",
) -> Tensor:
    """torch's cross-entropy, or the public implementation's loss, of float32 logits. (tokens, d) only."""
    logits = F.linear(x, weight, bias)
    logits = logits.to(torch.promote_types(x.dtype, torch.float32)) * logit_scale
    classes = len(weight)
    if smooth_over == "all" or classes == 1:
        options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
        return F.cross_entropy(logits, target, **options)
    keep = target != ignore_index
    one_hot = F.one_hot(target.where(keep, 0), classes).to(logits.dtype)
    wanted = one_hot * (1 - label_smoothing) + (1 - one_hot) * label_smoothing / (classes - 1)
    losses = -(wanted * F.log_softmax(logits, 1)).sum(1) * keep
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / keep.sum()}[reduction]


FORMULAS: dict[str, Callable[..., Any]] = {
    "add_layer_norm": add_layer_norm,
    "add_rms_norm": add_layer_norm,
    "feed_forward": feed_forward,
    "linear_cross_entropy": linear_cross_entropy,
    "decode_attention": partial(fastattn.decode_attention, backend="reference"),
}
SMALL = {
    problem.op: problem
    for problem in (
        cases.attention(),
        cases.decode_attention(),
        cases.add_layer_norm(),
        cases.add_layer_norm(rms=True),
        cases.feed_forward(),
        cases.linear_cross_entropy(),
    )
}


def skip_without(backend: Backend, op: str, device: torch.device) -> None:
    """Skips, with the reason, where a backend of that name cannot run: it refuses even a small problem in float32."""
    if isinstance(backend, str):
        probe = SMALL[op].map(lambda t: t.to(device))
        if reason := explain(probe.function, **probe.arguments()).refusals[backend]:
            pytest.skip(f"{backend}: {reason}")


def solve(p: Problem, backend: Backend) -> dict[str, Tensor]:
    """Outputs and gradients. Skips where the backend cannot run here."""
    skip_without(backend, p.op, next(iter(p.tensors.values())).device)
    return cases.solve(p, backend)


def check(p: Problem, backend: Backend, formula_of: Problem | None = None) -> dict[str, Tensor]:
    """Judge every result. formula_of: what the formula solves, where it would not ignore what an op ignores."""
    got = solve(p, backend)
    expected = expected_results(formula_of or p, formula=FORMULAS[p.op])
    for name, (truth, baseline, scale) in expected.items():
        computed_in = next(iter(p.tensors.values())).dtype
        assert_close_as_torch(got[name], truth, baseline, scale, name, computed_in)
    return got


def gradcheck(p: Problem, backend: str) -> None:
    """In float64: the results are the formula's, and the gradients those of finite differences."""
    torch.testing.assert_close(solve(p, backend), cases.solve(p, FORMULAS[p.op]), rtol=1e-12, atol=1e-13)

    def call(*tensors: Tensor) -> Any:
        torch.manual_seed(cases.SEED)  # one draw of dropout
        return p.function(**p.arguments(dict(zip(p.tensors, tensors, strict=True))), backend=backend)

    assert torch.autograd.gradcheck(call, [t.detach().requires_grad_() for t in p.tensors.values()])
