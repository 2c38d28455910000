"""dropout_add_layer_norm: every backend, torch's operators one after the other and compiled, Liger-Kernel.

python benchmarks/report.py --only add_layer_norm
"""

from __future__ import annotations

from typing import Any

import harness
import torch
import torch.nn.functional as F
from cases import NormCase
from harness import Inputs
from torch import Tensor

from fastattn import dropout_add_layer_norm

EPS = 1e-6


def make_inputs(case: NormCase, device: torch.device) -> Inputs:
    randn = harness.seeded_randn(device, case.dtype)
    leaves = {name: randn(case.rows, case.d_model) for name in ("x", "residual")}
    leaves |= {name: randn(case.d_model) for name in ("weight", "bias")}
    return Inputs(leaves, {}, randn(case.rows, case.d_model))


def torch_operators(case: NormCase, inputs: Inputs, dropout_p: float) -> Any:
    def norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(residual + F.dropout(x, dropout_p), (case.d_model,), weight, bias, eps=EPS)

    return norm


def liger(case: NormCase, inputs: Inputs, dropout_p: float) -> Any:
    """Its LayerNorm. It has none with a residual, so dropout and sum are torch's."""
    layer_norm = harness.imported("liger_kernel.transformers.functional").liger_layer_norm

    def norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return layer_norm(residual + F.dropout(x, dropout_p), weight, bias, EPS)

    return norm


def arguments(case: NormCase, inputs: Inputs, dropout_p: float) -> dict[str, Any]:
    return {"dropout_p": dropout_p}


BACKENDS = harness.ours(dropout_add_layer_norm, arguments)
OTHERS = {"Liger-Kernel": liger}
BENCHMARK = harness.op_benchmark("add_layer_norm", NormCase, "byte", make_inputs, BACKENDS, torch_operators, OTHERS)
