"""What a training step needs of memory, by the benchmark that measures it against length."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
CPU = torch.device("cpu")


def test_a_step_takes_at_most_half_of_the_reference_paths_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The base model at 2048 tokens, sequences of 512, dropout 0.1, no padding. To be quick it has 8000 words, which
    favours the reference path, as the fused loss keeps no logits, and is measured with one layer and with two: each
    layer more takes as much again, so that these figures give those of all six.
    """
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module, timing, cases = (importlib.import_module(name) for name in ("bench_memory", "timing", "cases"))

    def peak(provider: Any, n_layers: int) -> float:
        case = cases.MemoryCase(4, 512, n_layers, 512, 2048, 8, 8000)
        run = provider.make(case, module.BENCHMARK.inputs(case, CPU), case.dropout_p)
        return timing.peak_mib(run.timed["step"], CPU)

    reference, default, *_ = module.providers(CPU)
    (one, two), (fused_one, fused_two) = ([peak(given, n) for n in (1, 2)] for given in (reference, default))
    whole, fused_whole = one + 5 * (two - one), fused_one + 5 * (fused_two - fused_one)
    said = f"6+6 layers: {fused_whole:.0f} MiB, by the reference path {whole:.0f}"
    assert fused_two <= two / 2 and fused_whole <= whole / 2, said
