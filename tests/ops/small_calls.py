"""A small call of every op in each of its variants, for the tests of what all ops have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fastattn import use_backend
from fastattn.check import cases
from fastattn.check.cases import Problem

ANCESTORS = (torch.arange(48).view(2, 3, 8) % 5 % 3).int()  # the first row of each sample is one
PADDING = torch.arange(8) < torch.tensor([[8], [5]])


def attention(mask: dict[str, Any] | None = None, B: int = 2, **options: Any) -> Problem:
    return cases.attention(B=B, Lq=8, Lk=8, D=16, mask=mask, **options)


def norm(**options: Any) -> Problem:
    return cases.add_layer_norm(rows=(2, 3), hidden=16, **options)


def feed_forward(activation: str, **options: Any) -> Problem:
    return cases.feed_forward(activation, tokens=(2, 3), d=16, d_ff=16, d_out=16, **options)


def loss(**options: Any) -> Problem:
    return cases.linear_cross_entropy(tokens=(6,), d=16, classes=9, ignore_index=-100, **options)


OPS: dict[str, Problem] = {
    "attention": attention(),
    "attention causal": attention(is_causal=True),
    "attention padded": attention({"key_padding": PADDING}),
    "attention grouped": attention({"key_padding": PADDING}, Hk=1),
    "attention packed": attention({"cu_seqlens_q": torch.tensor([0, 3, 8]), "is_causal": True}, B=1),
    "attention bias, lse": attention({"key_padding": PADDING}, bias=(1, 2, 1, 8), return_lse=True),
    "attention grouped, dropout": attention(Hk=1, is_causal=True, dropout_p=0.3),
    "norm": norm(x_bias=True),
    "norm with sum and dropout": norm(x_bias=True, return_sum=True, dropout_p=0.4),
    "norm by std": norm(x_bias=True, eps_on_std=True),
    "rms norm": norm(rms=True, residual=False, dropout_p=0.2),
    "feed-forward": feed_forward("gelu"),
    "feed-forward relu": feed_forward("relu"),
    "feed-forward gated": feed_forward("swiglu", dropout_p=0.3),
    "loss": loss(label_smoothing=0.1),
    "loss of each": loss(reduction="none", logit_scale=0.5),
}
# Calls with a result that has no gradient in every backend.
WITHOUT_GRADIENT: dict[str, Problem] = {
    "decoding": cases.decode_attention(positions=8, head_dim=16, lengths=[8, 5]).but(ancestors=ANCESTORS),
    "attention weights": OPS["attention bias, lse"].but(return_lse=False, return_weights=True, dropout_p=0.3),
}
ALL = OPS | WITHOUT_GRADIENT
WITH_DROPOUT = tuple(name for name, problem in ALL.items() if "dropout_p" in problem.options)
EVERYDAY = (
    *("attention grouped", "attention packed", "attention bias, lse", "attention grouped, dropout", "norm"),
    *("norm with sum and dropout", "feed-forward gated", "loss"),
)
EVERY_OP = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in EVERYDAY else pytest.mark.full) for n in OPS]
)


def call_of(name: str, **changes: Any) -> Callable[..., Any]:
    """The op's call, as a function of the tensors that get a gradient. A mask is built in it. changes: of arguments."""
    problem = ALL[name].but(**changes)

    def run(*inputs: Tensor) -> Any:
        here = problem.map(lambda t: t.to(inputs[0].device))
        arguments = here.arguments(dict(zip(problem.tensors, inputs, strict=True)))
        if problem.differentiable:
            return problem.function(**arguments)
        with torch.no_grad():
            return problem.function(**arguments)

    return run


def random_tensors(
    shapes: Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """They ask for a gradient."""
    generator = torch.Generator().manual_seed(4)
    drawn = (torch.randn(tuple(shape), generator=generator, dtype=torch.float64) for shape in shapes)
    return [t.to(device, dtype).requires_grad_() for t in drawn]


def inputs_of(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return random_tensors([t.shape for t in ALL[name].tensors.values()], device, dtype)


def run(name: str, backend: str, inputs: Sequence[Tensor], seed: int | None = 5) -> tuple[Tensor, ...]:
    """The results. Equal seeds draw equal dropout. Skips where the backend cannot run."""
    if seed is not None:
        torch.manual_seed(seed)
    with use_backend(backend):
        try:
            results = call_of(name)(*inputs)
        except RuntimeError as refused:
            pytest.skip(str(refused))
    return (results,) if isinstance(results, Tensor) else results


def scalar(results: Tensor | Sequence[Tensor]) -> Tensor:
    """Something whose derivatives have no zeros by chance."""

    def weighted(t: Tensor) -> Tensor:
        return (t * torch.linspace(0.5, 1.5, t.numel(), dtype=t.dtype, device=t.device).view(t.shape)).sin().sum()

    return sum(weighted(t) for t in ((results,) if isinstance(results, Tensor) else results))
