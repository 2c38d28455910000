"""Fixtures of all tests. Without a GPU, Triton kernels run in Triton's interpreter; the flag precedes any import."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels are tested: the GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A function that imports a module of benchmarks/, as a script there would."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))
    return importlib.import_module


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty and its kind give NaN (integers: the largest), so an output that a kernel forgot to write is seen."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.fixture(autouse=True)
def among_many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests have few queries where users have many, so that here delta of attention is made as among many, unless a
    test is marked few_queries."""
    from fastattn import _attention_delta

    if request.node.get_closest_marker("few_queries") is None:
        monkeypatch.setattr(_attention_delta, "FEW_QUERIES", 0)


@pytest.fixture(autouse=True)
def one_seed() -> None:
    torch.manual_seed(20170612)


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # two xdist workers on two cores
