"""Where CUDA kernels are tested: on the CPU through csrc/emulator, and on the GPU as well where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import emulator_build
import pytest
import torch
from emulator_settings import take_turns

import fastattn.backends.cuda

DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


@pytest.fixture(scope="session")
def build_folder() -> Path:
    """Where builds of csrc/ for the CPU are kept between sessions."""
    if reason := emulator_build.unsupported_reason():
        pytest.skip(reason)
    return emulator_build.BUILD_DIR


@pytest.fixture(scope="session")
def emulator_library(build_folder: Path) -> Path:
    """fastattn._C, built for the CPU."""
    return emulator_build.build("_C", emulator_build.extension_sources(), build_folder)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A device whose tensors fastattn.backends.cuda serves."""
    device = torch.device(request.param)
    if device.type == "cpu":
        take_turns(request.node, monkeypatch)
        fastattn.backends.cuda.load_emulator(request.getfixturevalue("emulator_library"))
    elif reason := fastattn.backends.cuda.refuse_device(torch.empty(0, device=device)):
        pytest.skip(reason)
    yield device
    fastattn.backends.cuda.load_emulator(None)
