"""Holding the CUDA feed-forward to one of its routes, on the CPU through csrc/emulator or on a GPU that has it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from add_layer_norm_cases import Guarded

from fastattn import feed_forward
from fastattn.backends.cuda import feed_forward as backend
from fastattn.backends.cuda.feed_forward import GemmBackend, use_gemm_backend


@contextmanager
def forced_route(route: GemmBackend, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In this context products take this route, if it can take them at all."""
    if device.type == "cpu":
        monkeypatch.setenv("FASTATTN_EMULATOR_CAPABILITY", "90")
    elif route == GemmBackend.SM90 and torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("this GPU is no Hopper")
    with use_gemm_backend(route):
        yield


def note_routes(monkeypatch: pytest.MonkeyPatch) -> list[GemmBackend]:
    """The routes that the backend takes from now on, product by product."""
    taken: list[GemmBackend] = []
    choose = backend.choose_gemm_backend

    def noted(*arguments: Any) -> GemmBackend:
        taken.append(choose(*arguments))
        return taken[-1]

    monkeypatch.setattr(backend, "choose_gemm_backend", noted)
    return taken


class GuardedTorch(Guarded):
    """Stands in for torch in the backend: the buffers it makes lie between guard zones."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def cuda(*inputs: Any) -> torch.Tensor:
    return feed_forward(*inputs, backend="cuda")
