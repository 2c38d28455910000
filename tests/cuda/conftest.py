"""Where CUDA kernels are tested: on the CPU through csrc/emulator, and on the GPU where there is one."""

from __future__ import annotations

import pytest
import torch

import fastattn.backends.cuda


@pytest.fixture(params=("cpu", "cuda") if torch.cuda.is_available() else ("cpu",))
def device(request: pytest.FixtureRequest, guard_zones: None) -> torch.device:
    """A device whose tensors fastattn.backends.cuda accepts."""
    device = torch.device(request.param)
    if device.type == "cpu":
        request.getfixturevalue("emulator")
    elif reason := fastattn.backends.cuda.refuse_device(torch.empty(0, device=device)):
        pytest.skip(reason)
    return device
