"""Where CUDA kernels are tested: on the CPU through csrc/host, and on the GPU as well where there is one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import host_build
import pytest
import torch
from turns import take_turns

import fastattn.cuda

sys.path.append(str(Path(__file__).parents[1] / "ops"))  # the checks that every backend is held to

DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


@pytest.fixture(scope="session")
def build_folder() -> Path:
    """Where builds of csrc/ for the CPU are kept between sessions."""
    if reason := host_build.why_not():
        pytest.skip(reason)
    return host_build.KEPT


@pytest.fixture(scope="session")
def host_extension(build_folder: Path) -> Path:
    """fastattn._C, built for the CPU."""
    return host_build.build("_C", host_build.extension_sources(), build_folder)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A device whose tensors fastattn.cuda serves."""
    device = torch.device(request.param)
    if device.type == "cpu":
        take_turns(request.node, monkeypatch)
        fastattn.cuda.load_host_runner(request.getfixturevalue("host_extension"))
    elif reason := fastattn.cuda.refuse_device(torch.empty(0, device=device)):
        pytest.skip(reason)
    yield device
    fastattn.cuda.load_host_runner(None)
