"""linear_cross_entropy: every backend, torch's operators one after the other and compiled, Liger-Kernel, quack.

python benchmarks/report.py --only linear_cross_entropy
"""

from __future__ import annotations

from typing import Any

import harness
import torch
import torch.nn.functional as F
from cases import CrossEntropyCase
from harness import Inputs, Refused
from torch import Tensor

from fastattn import linear_cross_entropy

PAD = 0


def make_inputs(case: CrossEntropyCase, device: torch.device) -> Inputs:
    randn = harness.seeded_randn(device, case.dtype)
    leaves = {"x": randn(case.tokens, case.d_model), "weight": randn(case.n_vocab, case.d_model, scale=0.05)}
    target = torch.randint(1, case.n_vocab, (case.tokens,), generator=harness.seeded(device), device=device)
    target[: case.tokens // 8] = PAD
    return Inputs(leaves, {"target": target}, torch.ones((), device=device, dtype=case.dtype))


def _options(case: CrossEntropyCase) -> dict[str, Any]:
    return {"ignore_index": PAD, "label_smoothing": case.smoothing}


def round_loss(loss: Tensor, x: Tensor) -> Tensor:
    """The loss in the dtype of x. Every loss here is checked in it: the error of a single float32 number is chance."""
    return loss.to(x.dtype)


def torch_operators(case: CrossEntropyCase, inputs: Inputs, dropout_p: float) -> Any:
    """Logits in the dtype given, their softmax at least in float32."""

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        logits = F.linear(x, weight)
        accurate = logits if logits.dtype == torch.float64 else logits.float()
        return round_loss(F.cross_entropy(accurate, inputs.fixed["target"], **_options(case)), x)

    return loss


def liger(case: CrossEntropyCase, inputs: Inputs, dropout_p: float) -> Any:
    function = harness.imported("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
    return lambda x, weight: round_loss(function(x, weight, inputs.fixed["target"], **_options(case)), x)


def quack(case: CrossEntropyCase, inputs: Inputs, dropout_p: float) -> Any:
    """torch's matrix product and quack's cross-entropy."""
    cross_entropy = harness.imported("quack").cross_entropy
    if case.smoothing:
        raise Refused("no label smoothing")
    target = inputs.fixed["target"]
    return lambda x, weight: round_loss(cross_entropy(F.linear(x, weight), target, ignore_index=PAD), x)


def arguments(case: CrossEntropyCase, inputs: Inputs, dropout_p: float) -> dict[str, Any]:
    return {"target": inputs.fixed["target"], "logit_scale": 1.0, "reduction": "mean"} | _options(case)


BACKENDS = harness.ours(linear_cross_entropy, arguments, finish=lambda loss, leaves: round_loss(loss, leaves["x"]))
OTHERS = {"Liger-Kernel": liger, "quack": quack}
BENCHMARK = harness.op_benchmark(
    "linear_cross_entropy", CrossEntropyCase, "flop", make_inputs, BACKENDS, torch_operators, OTHERS
)
