"""The output projection and its label-smoothed cross-entropy: torch's operators, compiled, Liger-Kernel, quack.

    python benchmarks/bench_linear_cross_entropy.py [--device cuda] [--out FILE.json] [--quick]

fastattn has no op for it yet; what it would replace is measured. Peers with the whole in one op are given x and weight.
"""

from __future__ import annotations

import sys
from typing import Any

import harness
import torch
import torch.nn.functional as F
from cases import CrossEntropyCase
from harness import Inputs, Provider, Refused, imported
from tables import cases_of
from torch import Tensor

PAD = 0


def make_inputs(case: CrossEntropyCase, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(harness.SEED)

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=generator, device=device, dtype=case.dtype)

    leaves = {"x": randn(case.tokens, case.d_model), "weight": randn(case.n_vocab, case.d_model, scale=0.05)}
    target = torch.randint(1, case.n_vocab, (case.tokens,), generator=generator, device=device)
    target[: case.tokens // 8] = PAD
    leaves = {name: t.requires_grad_() for name, t in leaves.items()}
    return Inputs(leaves, {"target": target}, torch.ones((), device=device, dtype=case.dtype))


def _options(case: CrossEntropyCase) -> dict[str, Any]:
    return {"ignore_index": PAD, "label_smoothing": case.smoothing}


def torch_operators(case: CrossEntropyCase, inputs: Inputs, dropout_p: float) -> Any:
    """Logits in the dtype given, their softmax at least in float32; so are all losses here, but returned in the dtype
    given: of one number, that is the rounding that can be expected."""

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        logits = F.linear(x, weight)
        accurate = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(accurate, inputs.fixed["target"], **_options(case)).to(x.dtype)

    return loss


def liger(case: CrossEntropyCase, inputs: Inputs, dropout_p: float) -> Any:
    function = imported("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
    return lambda x, weight: function(x, weight, inputs.fixed["target"], **_options(case)).to(x.dtype)


def quack(case: CrossEntropyCase, inputs: Inputs, dropout_p: float) -> Any:
    """torch's product, its cross-entropy."""
    cross_entropy = imported("quack").cross_entropy
    if case.smoothing:
        raise Refused("no label smoothing")
    return lambda x, weight: cross_entropy(F.linear(x, weight), inputs.fixed["target"], ignore_index=PAD).to(x.dtype)


def providers(device: torch.device) -> list[Provider]:
    found = [harness.peer("torch", torch_operators), harness.peer("torch.compile", torch_operators, compiled=True)]
    others = {"Liger-Kernel": liger, "quack": quack} if device.type == "cuda" else {}
    return found + [harness.peer(name, function) for name, function in others.items()]


BENCHMARK = harness.Benchmark(
    name="linear_cross_entropy",
    cases=cases_of(CrossEntropyCase),
    directions=("forward", "backward", "both"),
    rates=("flop",),
    inputs=make_inputs,
    providers=providers,
)


def test_linear_cross_entropy(benchmark: Any, timed: Any) -> None:
    benchmark(timed)


if __name__ == "__main__":
    sys.exit(harness.main(BENCHMARK))
