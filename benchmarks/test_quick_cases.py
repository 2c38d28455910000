"""pytest benchmarks --benchmark-only [-k feed_forward] [--benchmark-json FILE] [--benchmark-compare]

Every quick case, by every provider and in every direction; what torch.compile makes is left out. Results are checked
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


@functools.lru_cache(maxsize=1)
def row_and_run(index: int, provider: harness.Provider) -> tuple[dict[str, Any], harness.Run | None]:
    """What report.py would write, and the calls if they are right."""
    checked = prepared(index)
    row = harness.measure_provider(checked, provider, 0.0)
    is_ok = row["status"] == "ok"
    return row, provider.make(checked.case, checked.inputs, checked.case.dropout_p) if is_ok else None


@pytest.mark.parametrize(
    ("index", "provider", "direction"),
    [
        pytest.param(index, provider, direction, id=f"{benchmark.name}-{case}-{provider.name}-{direction}")
        for index, (benchmark, case) in enumerate(PLAN)
        for provider in benchmark.providers(DEVICE)
        if not provider.later
        for direction in benchmark.directions
    ],
)
def test_quick(benchmark: Any, index: int, provider: harness.Provider, direction: str) -> None:
    row, run = row_and_run(index, provider)
    if row["status"] == "wrong result" or (provider.ours and row["status"] not in ("ok", "refused")):
        pytest.fail(f"{row['status']}: {row['reason']}")
    if run is None or direction not in run.timed:
        pytest.skip(row.get("reason", f"{direction} is not a call"))

    def call() -> None:
        run.timed[direction]()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    name, case = PLAN[index][0].name, PLAN[index][1]
    benchmark.group = f"{name}, {case}, {direction}"
    benchmark.extra_info |= case.work.get(direction, {}) | {"error_over_bound": row["error_over_bound"]}
    benchmark(call)
