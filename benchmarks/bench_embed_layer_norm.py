"""embed_layer_norm: every backend, and torch's operators one after the other and compiled.

python benchmarks/report.py --only embed_layer_norm
"""

from __future__ import annotations

from typing import Any

import harness
import torch
import torch.nn.functional as F
from cases import EmbedCase
from harness import Inputs
from torch import Tensor

from fastattn import embed_layer_norm

EPS, PAD = 1e-6, 0


def make_inputs(case: EmbedCase, device: torch.device) -> Inputs:
    randn, shape = harness.seeded_randn(device, case.dtype), (case.batch, case.length)
    leaves = {"embedding": randn(case.n_vocab, case.d_model)}
    leaves |= {name: randn(case.d_model) for name in ("weight", "bias")}
    tokens = torch.randint(0, case.n_vocab, shape, generator=harness.seeded(device), device=device)
    fixed = {"tokens": tokens, "position_table": randn(case.length, case.d_model).float()}
    return Inputs(leaves, fixed, randn(*shape, case.d_model))


def torch_operators(case: EmbedCase, inputs: Inputs, dropout_p: float) -> Any:
    tokens, table = inputs.fixed["tokens"], inputs.fixed["position_table"]

    def embed(embedding: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        words = F.embedding(tokens, embedding, PAD) * case.d_model**0.5 + table.to(embedding.dtype)
        return F.layer_norm(F.dropout(words, dropout_p), (case.d_model,), weight, bias, eps=EPS)

    return embed


def arguments(case: EmbedCase, inputs: Inputs, dropout_p: float) -> dict[str, Any]:
    return {**inputs.fixed, "scale": case.d_model**0.5, "padding_idx": PAD, "dropout_p": dropout_p}


BACKENDS = harness.ours(embed_layer_norm, arguments)
BENCHMARK = harness.op_benchmark("embed_layer_norm", EmbedCase, "byte", make_inputs, BACKENDS, torch_operators)
