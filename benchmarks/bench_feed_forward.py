"""feed_forward: every backend, torch's operators one after the other and compiled, Liger-Kernel's gated activations.

python benchmarks/report.py --only feed_forward
"""

from __future__ import annotations

from typing import Any

import harness
import torch
import torch.nn.functional as F
from cases import FeedForwardCase
from harness import Inputs, Refused
from torch import Tensor

from fastattn import feed_forward

ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "swiglu": F.silu}


def make_inputs(case: FeedForwardCase, device: torch.device) -> Inputs:
    randn = harness.seeded_randn(device, case.dtype)
    leaves = {
        "x": randn(case.tokens, case.d_model),
        "weight1": randn(case.d_up, case.d_model, scale=case.d_model**-0.5),
        "bias1": randn(case.d_up, scale=0.1),
        "weight2": randn(case.d_model, case.d_inner, scale=case.d_inner**-0.5),
        "bias2": randn(case.d_model, scale=0.1),
    }
    return Inputs(leaves, {}, randn(case.tokens, case.d_model))


def arguments(case: FeedForwardCase, inputs: Inputs, dropout_p: float) -> dict[str, Any]:
    return {"activation": case.activation, "dropout_p": dropout_p}


def torch_operators(case: FeedForwardCase, inputs: Inputs, dropout_p: float) -> Any:
    act = ACTIVATIONS[case.activation]

    def network(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
        hidden = F.linear(x, weight1, bias1)
        if case.d_up != case.d_inner:
            gate, up = hidden.chunk(2, dim=-1)
            hidden = act(gate) * up
        else:
            hidden = act(hidden)
        return F.linear(F.dropout(hidden, dropout_p), weight2, bias2)

    return network


def liger(case: FeedForwardCase, inputs: Inputs, dropout_p: float) -> Any:
    """Its silu(gate) * up between torch's matrix products. Its backward overwrites what it saved: when it is timed, it
    repeats the same work on other numbers."""
    swiglu = harness.imported("liger_kernel.transformers.functional").liger_swiglu
    if case.activation != "swiglu":
        raise Refused(f"no fused {case.activation}")

    def network(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
        gate, up = F.linear(x, weight1, bias1).chunk(2, dim=-1)
        return F.linear(F.dropout(swiglu(gate, up), dropout_p), weight2, bias2)

    return network


BACKENDS = harness.ours(feed_forward, arguments)
OTHERS = {"Liger-Kernel": liger}
BENCHMARK = harness.op_benchmark(
    "feed_forward", FeedForwardCase, "flop", make_inputs, BACKENDS, torch_operators, OTHERS
)
