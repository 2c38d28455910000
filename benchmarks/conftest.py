"""`pytest benchmarks/bench_*.py --benchmark-only`: every quick case by every provider, except those that compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import pytest
import tables
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "timed" in metafunc.fixturenames:
        runs = [
            pytest.param((benchmark, case, provider, direction), id=f"{case}-{provider.name}-{direction}")
            for benchmark, case in tables.plan("quick")
            if benchmark.name == metafunc.module.BENCHMARK.name
            for provider in benchmark.providers(DEVICE)
            if not provider.later
            for direction in benchmark.directions
        ]
        metafunc.parametrize("timed", runs, indirect=True)


@pytest.fixture
def timed(request: pytest.FixtureRequest) -> Callable[[], Any]:
    """The call to time, checked, and synchronised with the device."""
    benchmark, case, provider, direction = request.param
    checked = harness.Checked(benchmark, case, DEVICE)
    try:
        assert not provider.compared or checked.error_over_bound(provider) <= 1, "wrong result"
        call = provider.make(case, checked.inputs, case.dropout_p).timed[direction]
    except harness.Refused as refused:
        pytest.skip(str(refused))

    def synchronised() -> None:
        call()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    return synchronised
