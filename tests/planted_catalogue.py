"""A catalogue for the report's tests: one small case, and providers that do what providers should not."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import bench_add_layer_norm
import harness
import torch
from cases import Case, NormCase
from harness import Benchmark, Provider, peer


def zeros(x: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
    return x * 0 + sum(0 * t.sum() for t in others.values())


def crash(**leaves: torch.Tensor) -> torch.Tensor:
    os.kill(os.getpid(), signal.SIGSEGV)
    return leaves["x"]


def hang(**leaves: torch.Tensor) -> torch.Tensor:
    time.sleep(600)
    return leaves["x"]


def no_memory(**leaves: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("planted: tried to allocate 1 TiB")


def providers(device: torch.device) -> list[Provider]:
    reference, *_, plain, _ = bench_add_layer_norm.providers(device)

    def planted(function: Any) -> Any:
        return lambda case, inputs, dropout_p: function

    return [
        reference,
        Provider("zeros", lambda case, inputs, dropout_p: harness.run_of(zeros, inputs)),
        peer("crash", planted(crash)),
        peer("no memory", planted(no_memory)),
        peer("hang", planted(hang)),
        plain._replace(name="after"),
    ]


def plan(table: str) -> list[tuple[Benchmark, Case]]:
    fields = vars(bench_add_layer_norm.BENCHMARK)
    return [(Benchmark(**fields | {"providers": providers}), NormCase(40, 96))]
