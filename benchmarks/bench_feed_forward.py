"""feed_forward: every backend, and torch's operators one after the other.

python benchmarks/bench_feed_forward.py [--device cuda] [--out FILE.json] [--quick]
"""

from __future__ import annotations

import sys
from typing import Any

import harness
import torch
import torch.nn.functional as F
from cases import FEED_FORWARD, FeedForwardCase
from harness import Inputs, Provider, Run

from fastattn import feed_forward

ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "swiglu": F.silu}


def make_inputs(case: FeedForwardCase, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(harness.SEED)

    def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(shape, generator=generator, device=device, dtype=case.dtype)

    leaves = {
        "x": randn(case.tokens, case.d_model),
        "weight1": randn(case.d_up, case.d_model, scale=case.d_model**-0.5),
        "bias1": randn(case.d_up, scale=0.1),
        "weight2": randn(case.d_model, case.d_ff, scale=case.d_ff**-0.5),
        "bias2": randn(case.d_model, scale=0.1),
    }
    leaves = {name: t.requires_grad_() for name, t in leaves.items()}
    return Inputs(leaves, {}, randn(case.tokens, case.d_model))


def arguments(case: FeedForwardCase, inputs: Inputs, dropout_p: float) -> dict[str, Any]:
    return {"activation": case.activation, "dropout_p": dropout_p}


def torch_operators(case: FeedForwardCase, inputs: Inputs, dropout_p: float) -> Run:
    act = ACTIVATIONS[case.activation]

    def network(
        x: torch.Tensor, weight1: torch.Tensor, bias1: torch.Tensor, weight2: torch.Tensor, bias2: torch.Tensor
    ) -> torch.Tensor:
        hidden = F.linear(x, weight1, bias1)
        if case.d_up != case.d_ff:
            gate, up = hidden.chunk(2, dim=-1)
            hidden = act(gate) * up
        else:
            hidden = act(hidden)
        return F.linear(F.dropout(hidden, dropout_p), weight2, bias2)

    return harness.run_of(network, inputs)


def providers(device: torch.device) -> list[Provider]:
    return [*harness.ours(feed_forward, arguments), Provider("torch", torch_operators, ours=False)]


BENCHMARK = harness.Benchmark(
    name="feed_forward",
    cases=FEED_FORWARD,
    directions=("forward", "backward", "both"),
    rates=("flop",),
    inputs=make_inputs,
    providers=providers,
)


def test_feed_forward(benchmark: Any, timed: Any) -> None:
    benchmark(timed)


if __name__ == "__main__":
    sys.exit(harness.main(BENCHMARK))
