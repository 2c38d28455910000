"""Fixtures and the two tiers of all tests. Without a GPU, Triton kernels run in Triton's interpreter; the flag precedes
any import."""

from __future__ import annotations

import os
import tempfile

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# A record that `python -m fastattn tune` has left on this machine must not decide what the tests see.
os.environ["XDG_CACHE_HOME"] = tempfile.gettempdir() + "/fastattn-tests"

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="every combination, planted bugs, fuzzing, wheels")
    parser.addoption("--part", metavar="I/N", default="1/1", help="only the I-th of N equal parts of the tests")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # two xdist workers on two cores


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --full, the everyday tier; of that, one part."""
    chosen = [item for item in items if config.getoption("--full") or not item.get_closest_marker("full")]
    part, parts = map(int, config.getoption("--part").split("/"))
    chosen = chosen[len(chosen) * (part - 1) // parts : len(chosen) * part // parts]
    config.hook.pytest_deselected(items=list({*items} - {*chosen}))
    items[:] = chosen


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
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty and its kind give NaN (integers: the largest), so an output that a kernel forgot to write is seen.

    torch does so itself in its deterministic mode, which tests must not run in: users do not.
    """

    @torch.no_grad()
    def poison(t: torch.Tensor) -> torch.Tensor:
        if type(t) is not torch.Tensor or t.is_meta:
            return t
        if t.is_floating_point():
            return t.fill_(torch.nan)
        return t if t.dtype == torch.bool or t.is_complex() else t.fill_(torch.iinfo(t.dtype).max)

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapped(*arguments: Any, **options: Any) -> torch.Tensor:
            made = make(*arguments, **options)
            return made if torch.compiler.is_compiling() else poison(made)

        return wrapped

    for place, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(place, name, poisoned(getattr(place, name)))


@pytest.fixture(autouse=True)
def one_seed() -> None:
    torch.manual_seed(20170612)
