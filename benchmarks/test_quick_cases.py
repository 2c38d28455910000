"""pytest benchmarks --benchmark-only [-k feed_forward] [--benchmark-json FILE] [--benchmark-compare]

Every quick case, forward and backward, by every provider; what torch.compile makes is left out. Results are checked
first, as harness.py describes: what is wrong fails and is not timed. extra_info has "flop" and "byte", what any
implementation must do, and "error_over_bound". The large cases, measured in turn: report.py.
"""

from __future__ import annotations

import functools
from typing import Any

import harness
import pytest
import tables
import torch

pytest.importorskip("pytest_benchmark")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLAN = tables.plan("quick")


@functools.lru_cache(maxsize=1)
def prepared(index: int) -> harness.Checked:
    return harness.Checked(*PLAN[index], DEVICE)


@pytest.mark.parametrize(
    ("index", "provider"),
    [
        pytest.param(index, provider, id=f"{benchmark.name}-{case}-{provider.name}")
        for index, (benchmark, case) in enumerate(PLAN)
        for provider in benchmark.providers(DEVICE)
        if not provider.later
    ],
)
def test_quick(benchmark: Any, index: int, provider: harness.Provider) -> None:
    checked = prepared(index)
    case, direction = checked.case, checked.benchmark.directions[-1]
    row = harness.measure_provider(checked, provider, 0.0)
    if row["status"] == "wrong result" or (provider.ours and row["status"] not in ("ok", "refused")):
        pytest.fail(f"{row['status']}: {row['reason']}")
    if row["status"] != "ok":
        pytest.skip(row["reason"])
    timed = provider.make(case, checked.inputs, case.dropout_p).timed[direction]

    def call() -> None:
        timed()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    benchmark.group = f"{checked.benchmark.name}, {case}, {direction}"
    benchmark.extra_info |= case.work.get(direction, {}) | {"error_over_bound": row["error_over_bound"]}
    benchmark(call)
