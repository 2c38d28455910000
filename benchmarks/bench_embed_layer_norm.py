"""embed_layer_norm: every backend, and torch's operators one after the other and compiled.

pytest benchmarks/bench_embed_layer_norm.py --benchmark-only            the quick cases
python benchmarks/report.py --out DIR --only embed_layer_norm
"""

from __future__ import annotations

from typing import Any

import harness
import torch
import torch.nn.functional as F
from cases import EmbedCase
from harness import Inputs, Provider
from tables import cases_of
from torch import Tensor

from fastattn import embed_layer_norm

EPS, PAD = 1e-6, 0


def make_inputs(case: EmbedCase, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(harness.SEED)

    def randn(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    leaves = {"embedding": randn(case.n_vocab, case.width)} | {name: randn(case.width) for name in ("weight", "bias")}
    tokens = torch.randint(0, case.n_vocab, (case.batch, case.length), generator=generator, device=device)
    fixed = {"tokens": tokens, "position_table": randn(case.length, case.width, dtype=torch.float32)}
    dout = randn(case.batch, case.length, case.width)
    return Inputs({name: t.requires_grad_() for name, t in leaves.items()}, fixed, dout)


def torch_operators(case: EmbedCase, inputs: Inputs, dropout_p: float) -> Any:
    tokens, table = inputs.fixed["tokens"], inputs.fixed["position_table"]

    def enter(embedding: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        words = F.embedding(tokens, embedding, PAD) * case.width**0.5 + table.to(embedding.dtype)
        return F.layer_norm(F.dropout(words, dropout_p), (case.width,), weight, bias, eps=EPS)

    return enter


def arguments(case: EmbedCase, inputs: Inputs, dropout_p: float) -> dict[str, Any]:
    return {**inputs.fixed, "scale": case.width**0.5, "padding_idx": PAD, "dropout_p": dropout_p}


def providers(device: torch.device) -> list[Provider]:
    found = harness.ours(embed_layer_norm, arguments)
    found.append(harness.rival("torch", torch_operators))
    return [*found, harness.rival("torch.compile", torch_operators, compiled=True)]


BENCHMARK = harness.Benchmark(
    name="embed_layer_norm",
    cases=cases_of(EmbedCase),
    directions=("forward", "backward", "both"),
    rates=("byte",),
    inputs=make_inputs,
    providers=providers,
)


def test_embed_layer_norm(benchmark: Any, timed: Any) -> None:
    benchmark(timed)
