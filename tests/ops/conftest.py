"""Without a GPU, the tests of every op hold the CUDA backends to their checks as well, by way of csrc/emulator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import emulator_build
import pytest
import torch
from emulator_settings import take_turns

import fastattn.backends.cuda
from fastattn.backends.reference import philox


@pytest.fixture(scope="session")
def emulator_library() -> Path | None:
    """fastattn._C, built for the CPU; None where it cannot be."""
    if emulator_build.unsupported_reason() is not None:
        return None
    return emulator_build.build("_C", emulator_build.extension_sources(), emulator_build.BUILD_DIR)


@pytest.fixture(autouse=True)
def the_reference_drops_alike(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test computes by the formula, with draw_rng_state or the reference path, drops what its backend drops."""
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    with philox.reference_dropout_rule(parameters.get("backend") or "reference"):
        yield


@pytest.fixture(autouse=True)
def cuda_on_a_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if parameters.get("backend") != "cuda" or torch.cuda.is_available():
        yield
        return
    take_turns(request.node, monkeypatch)
    fastattn.backends.cuda.load_emulator(request.getfixturevalue("emulator_library"))
    yield
    fastattn.backends.cuda.load_emulator(None)
