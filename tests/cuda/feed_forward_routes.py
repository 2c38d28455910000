"""Holding the CUDA feed-forward to one of its routes, on the CPU through csrc/host or on a GPU that has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_norm_checks import Guarded

from fastattn import feed_forward
from fastattn.cuda import feed_forward as backend
from fastattn.cuda.feed_forward import Route, Speed

PRODUCTS = (Route.SM80, Route.SM90)


def hold_to(route: Route, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a product of any size takes this route, if the route can take it at all."""
    capability = 90 if route == Route.SM90 else 80
    if device.type == "cpu":
        monkeypatch.setenv("FASTATTN_HOST_CAPABILITY", str(capability))
    else:
        major, minor = torch.cuda.get_device_capability(device)
        if route == Route.SM90 and (major, minor) != (9, 0):
            pytest.skip("this GPU is no Hopper")
        capability = 10 * major + minor
    always = Speed(route, product=1, cublas=1, copy=1, wave=0)
    monkeypatch.setattr(backend, "SPEEDS", {} if route == Route.CUBLAS else {capability: always})


def note_routes(monkeypatch: pytest.MonkeyPatch) -> list[Route]:
    """The routes that the backend takes from now on, product by product."""
    taken: list[Route] = []
    choose = backend.route_of

    def noted(*arguments: Any) -> Route:
        taken.append(choose(*arguments))
        return taken[-1]

    monkeypatch.setattr(backend, "route_of", noted)
    return taken


class GuardedTorch(Guarded):
    """Stands in for torch in the backend: the buffers it makes lie between guard zones."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def cuda(*inputs: Any) -> torch.Tensor:
    return feed_forward(*inputs, backend="cuda")
