"""Where CUDA kernels are tested: on the CPU through csrc/emulator, and on the GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

import fastattn.backends.cuda

GUARD = 64  # elements before and after each tensor: 16 divides their bytes, as it divides those of PyTorch's addresses


@pytest.fixture(params=("cpu", "cuda") if torch.cuda.is_available() else ("cpu",))
def device(request: pytest.FixtureRequest) -> torch.device:
    """A device whose tensors fastattn.backends.cuda accepts."""
    device = torch.device(request.param)
    if device.type == "cpu":
        request.getfixturevalue("emulator")
    elif reason := fastattn.backends.cuda.refuse_device(torch.empty(0, device=device)):
        pytest.skip(reason)
    return device


@pytest.fixture(autouse=True)
def guard_zones(monkeypatch: pytest.MonkeyPatch, poisoned_memory: None) -> Iterator[None]:
    """Fails a test where a kernel has written before or after a tensor of torch.empty and its variants."""
    zones: list[tuple[Tensor, int]] = []

    @torch.no_grad()
    def guarded(t: Tensor) -> Tensor:
        """The tensor, with its numbers, inside a larger memory of sevens."""
        if type(t) is not Tensor or t.is_meta or t.numel() == 0:
            return t
        with _disable_current_modes():  # a test that notes what a call allocates must not see this
            size = t.untyped_storage().nbytes() // t.itemsize
            whole = t.new_full((size + 2 * GUARD,), 7)
            whole[GUARD:-GUARD] = t.as_strided((size,), (1,), 0)
            zones.append((whole, size))
            return t.set_(whole.untyped_storage(), GUARD, t.shape, t.stride())

    def wrapped(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *arguments, **options: guarded(make(*arguments, **options))

    for place, names in ((torch, ("empty", "empty_like")), (Tensor, ("new_empty", "new_empty_strided", "new_zeros"))):
        for name in names:
            monkeypatch.setattr(place, name, wrapped(getattr(place, name)))
    yield
    for whole, size in zones:
        outside = torch.cat([whole[:GUARD], whole[GUARD + size :]])
        assert (outside == 7).all(), "a kernel has written outside of a tensor"
