"""A model of a GPU's clock and its host's, for tests of what times calls by torch.cuda's events."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

DEVICE = torch.device("cuda", 0)
CYCLES_PER_SECOND = 1.5e9


class GpuClock:
    """The host is at `now`, in seconds, and the GPU has work until `free`. Replaces what measures by torch.cuda."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.free = 0.0
        clock = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.time = max(clock.now, clock.free)

            def synchronize(self) -> None:
                clock.now = max(clock.now, self.time)

            def elapsed_time(self, end: Event) -> float:
                return (end.time - self.time) * 1e3

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.run(1e-6, cycles / CYCLES_PER_SECOND))
        properties = SimpleNamespace(L2_cache_size=50)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        cache = SimpleNamespace(zero_=lambda: self.run(1e-6, 35e-6))
        monkeypatch.setattr(torch, "empty", lambda *shape, **options: cache)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def run(self, host: float, device: float) -> None:
        """A call that takes `host` seconds to launch and `device` seconds to run."""
        self.now += host
        self.free = max(self.now, self.free) + device

    def wait(self, device: Any = None) -> None:
        self.now = max(self.now, self.free)
