"""linear_cross_entropy: every backend, torch's operators one after the other and compiled, Liger-Kernel, quack.

pytest benchmarks/bench_linear_cross_entropy.py --benchmark-only            the quick cases
python benchmarks/report.py --out DIR --only linear_cross_entropy
"""

from __future__ import annotations

from typing import Any

import harness
import torch
import torch.nn.functional as F
from cases import CrossEntropyCase
from harness import Inputs, Provider, Refused, imported
from tables import cases_of
from torch import Tensor

from fastattn import linear_cross_entropy

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


def in_dtype_of(loss: Tensor, x: Tensor) -> Tensor:
    """All losses here, so that they are judged by the rounding of what they are made from: one number's own error, in
    float32, is a matter of luck."""
    return loss.to(x.dtype)


def torch_operators(case: CrossEntropyCase, inputs: Inputs, dropout_p: float) -> Any:
    """Logits in the dtype given, their softmax at least in float32."""

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        logits = F.linear(x, weight)
        accurate = logits if logits.dtype == torch.float64 else logits.float()
        return in_dtype_of(F.cross_entropy(accurate, inputs.fixed["target"], **_options(case)), x)

    return loss


def liger(case: CrossEntropyCase, inputs: Inputs, dropout_p: float) -> Any:
    function = imported("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
    return lambda x, weight: in_dtype_of(function(x, weight, inputs.fixed["target"], **_options(case)), x)


def quack(case: CrossEntropyCase, inputs: Inputs, dropout_p: float) -> Any:
    """torch's product, its cross-entropy."""
    cross_entropy = imported("quack").cross_entropy
    if case.smoothing:
        raise Refused("no label smoothing")
    target = inputs.fixed["target"]
    return lambda x, weight: in_dtype_of(cross_entropy(F.linear(x, weight), target, ignore_index=PAD), x)


def arguments(case: CrossEntropyCase, inputs: Inputs, dropout_p: float) -> dict[str, Any]:
    return {"target": inputs.fixed["target"], "logit_scale": 1.0, "reduction": "mean"} | _options(case)


def providers(device: torch.device) -> list[Provider]:
    found = harness.ours(linear_cross_entropy, arguments, finish=lambda loss, leaves: in_dtype_of(loss, leaves["x"]))
    found.append(harness.rival("torch", torch_operators))
    found.append(harness.rival("torch.compile", torch_operators, compiled=True))
    others = {"Liger-Kernel": liger, "quack": quack} if device.type == "cuda" else {}
    return found + [harness.rival(name, function) for name, function in others.items()]


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
