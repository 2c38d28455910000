"""Without a GPU, the tests of every op hold the CUDA backends to their checks as well, by way of csrc/host."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fastattn.cuda
from fastattn.reference import philox

sys.path.append(str(Path(__file__).parents[1] / "cuda"))

import host_build  # noqa: E402
from turns import take_turns  # noqa: E402


@pytest.fixture(scope="session")
def host_extension() -> Path | None:
    """fastattn._C, built for the CPU; None where it cannot be."""
    if host_build.why_not() is not None:
        return None
    return host_build.build("_C", host_build.extension_sources(), host_build.KEPT)


@pytest.fixture(autouse=True)
def the_reference_drops_alike(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test computes by the formula, with draw_rng_state or the reference path, drops what its backend drops."""
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    with philox.dropping_as(parameters.get("backend") or "reference"):
        yield


@pytest.fixture(autouse=True)
def cuda_on_a_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if parameters.get("backend") != "cuda" or torch.cuda.is_available():
        yield
        return
    take_turns(request.node, monkeypatch)
    fastattn.cuda.load_host_runner(request.getfixturevalue("host_extension"))
    yield
    fastattn.cuda.load_host_runner(None)
