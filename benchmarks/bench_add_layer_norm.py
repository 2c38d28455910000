"""dropout_add_layer_norm: every backend, torch's operators one after the other and compiled, Liger-Kernel, quack.

pytest benchmarks/bench_add_layer_norm.py --benchmark-only            the quick cases
python benchmarks/report.py --out DIR --only add_layer_norm
"""

from __future__ import annotations

from typing import Any

import harness
import torch
import torch.nn.functional as F
from cases import NormCase
from harness import Function, Inputs, Provider, imported
from tables import cases_of
from torch import Tensor

from fastattn import dropout_add_layer_norm

EPS = 1e-6


def make_inputs(case: NormCase, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(harness.SEED)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=case.dtype)

    leaves = {name: randn(case.rows, case.width) for name in ("x", "residual")}
    leaves |= {name: randn(case.width) for name in ("weight", "bias")}
    leaves = {name: t.requires_grad_() for name, t in leaves.items()}
    return Inputs(leaves, {}, randn(case.rows, case.width))


def torch_operators(case: NormCase, inputs: Inputs, dropout_p: float) -> Any:
    def norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(residual + F.dropout(x, dropout_p), (case.width,), weight, bias, eps=EPS)

    return norm


def liger(case: NormCase, inputs: Inputs, dropout_p: float) -> Any:
    """Its LayerNorm; it has none with the residual, so dropout and sum are torch's."""
    layer_norm = imported("liger_kernel.transformers.functional").liger_layer_norm

    def norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return layer_norm(residual + F.dropout(x, dropout_p), weight, bias, EPS)

    return norm


def quack(case: NormCase, inputs: Inputs, dropout_p: float) -> Any:
    """Its LayerNorm has no gradient; it is listed so that the table says so. RMSNorm is another operation."""
    imported("quack")
    raise harness.Refused("quack's LayerNorm has no backward")


def arguments(case: NormCase, inputs: Inputs, dropout_p: float) -> dict[str, Any]:
    return {"dropout_p": dropout_p}


def providers(device: torch.device) -> list[Provider]:
    found = harness.ours(dropout_add_layer_norm, arguments)
    found.append(harness.rival("torch", torch_operators))
    found.append(harness.rival("torch.compile", torch_operators, compiled=True))
    others: dict[str, Function] = {"Liger-Kernel": liger, "quack": quack} if device.type == "cuda" else {}
    return found + [harness.rival(name, function) for name, function in others.items()]


BENCHMARK = harness.Benchmark(
    name="add_layer_norm",
    cases=cases_of(NormCase),
    directions=("forward", "backward", "both"),
    rates=("byte",),
    inputs=make_inputs,
    providers=providers,
)


def test_add_layer_norm(benchmark: Any, timed: Any) -> None:
    benchmark(timed)
