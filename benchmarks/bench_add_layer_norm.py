"""dropout_add_layer_norm: every backend, and torch's operators one after the other.

python benchmarks/bench_add_layer_norm.py [--device cuda] [--out FILE.json] [--quick]
"""

from __future__ import annotations

import sys
from typing import Any

import harness
import torch
import torch.nn.functional as F
from cases import NORM, NormCase
from harness import Inputs, Provider, Run

from fastattn import dropout_add_layer_norm


def make_inputs(case: NormCase, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(harness.SEED)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=case.dtype)

    leaves = {name: randn(case.rows, case.width) for name in ("x", "residual")}
    leaves |= {name: randn(case.width) for name in ("weight", "bias")}
    leaves = {name: t.requires_grad_() for name, t in leaves.items()}
    return Inputs(leaves, {}, randn(case.rows, case.width))


def torch_operators(case: NormCase, inputs: Inputs, dropout_p: float) -> Run:
    def norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(residual + F.dropout(x, dropout_p), (case.width,), weight, bias, eps=1e-6)

    return harness.run_of(norm, inputs)


def providers(device: torch.device) -> list[Provider]:
    ours = harness.ours(dropout_add_layer_norm, lambda case, inputs, dropout_p: {"dropout_p": dropout_p})
    return [*ours, Provider("torch", torch_operators, ours=False)]


BENCHMARK = harness.Benchmark(
    name="add_layer_norm",
    cases=NORM,
    directions=("forward", "backward", "both"),
    rates=("byte",),
    inputs=make_inputs,
    providers=providers,
)


def test_add_layer_norm(benchmark: Any, timed: Any) -> None:
    benchmark(timed)


if __name__ == "__main__":
    sys.exit(harness.main(BENCHMARK))
