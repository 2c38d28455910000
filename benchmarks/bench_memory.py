"""Peak memory of a training step against the length of its sequences, equally many tokens in all.

    python benchmarks/bench_memory.py [--device cuda] [--out FILE.json] [--quick]

What a step needs beyond weights and Adam's state: activations, gradients, temporary tensors. Nothing is timed, but each
provider's results are checked, as in bench_transformer.py, whose step this is. timing.py says how memory is measured.
"""

from __future__ import annotations

import sys

import bench_transformer
import harness
import models
import torch
from bench_transformer import provider
from cases import MemoryCase
from harness import Provider
from tables import cases_of


def providers(device: torch.device) -> list[Provider]:
    found = [provider("reference", backend="reference"), provider("default", default=True)]
    found += [provider(backend, backend=backend) for backend in (("aten", "triton") if device.type == "cuda" else ())]
    return [*found, provider("plain PyTorch", models.plain)]


BENCHMARK = harness.Benchmark(
    name="memory",
    cases=cases_of(MemoryCase),
    directions=(),
    rates=(),
    inputs=bench_transformer.make_inputs,
    providers=providers,
)


if __name__ == "__main__":
    sys.exit(harness.main(BENCHMARK))
