"""Warm-up, capture and replay by torch.cuda: what a CPU can check with a fake of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastattn.graphs import capture
from fastattn.graphs.capture import CapturedWork, CudaGraphs

ORDER = ["wait", "work", "wait"] * 2 + ["begin", "work", "end", "replay", "replay"]


class FakeCuda:
    """torch.cuda of one device.     log: what was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.failed: list[Any] = []
        self.users = self.current = self.new_stream()

        class Graph:
            reset, log = dict, self.log

            def replay(self) -> None:
                self.log.append("replay")

        fakes: dict[str, Any] = {"Stream": self.new_stream, "stream": self.stream, "graph": self.graph}
        fakes |= {"current_stream": lambda device: self.current, "device": nullcontext, "graph_pool_handle": object}
        fakes |= {"set_stream": lambda stream: setattr(self, "current", stream)}
        fakes |= {"CUDAGraph": Graph}
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        for name in ("clearCublasWorkspaces", "releasePool", "endAllocateToPool"):
            monkeypatch.setattr(torch._C, f"_cuda_{name}", lambda *given: None, raising=False)
        monkeypatch.setattr(capture, "_streams", {})
        monkeypatch.setattr(torch, "zeros", lambda *size, device: None)

    def new_stream(self, device: Any = None) -> Any:
        return SimpleNamespace(wait_stream=lambda other: self.log.append("wait"))

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def graph(self, graph: Any, stream: Any, capture_error_mode: str, pool: Any = None) -> Iterator[None]:
        """If it fails, the stream stays the current one, and neither it nor the pool may be used again."""
        assert capture_error_mode == "thread_local" and pool not in self.failed and stream not in self.failed
        self.log += ["begin"] if pool else []
        with self.stream(stream):
            try:
                yield
            except BaseException:
                self.failed += [pool, stream]
                raise
        self.log += ["end"] if pool else []


@pytest.mark.parametrize("collects", [True, False])
def test_order_and_failure(collects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's stream stays as it was. After a capture that failed another one warms up again. No garbage is
    collected meanwhile, which might be a graph."""
    cuda, fails = FakeCuda(monkeypatch), [True]

    def run() -> None:
        cuda.log.append("work")
        if cuda.log[-2] == "begin":
            assert not gc.isenabled()
            if fails:
                fails.pop()
                raise RuntimeError("not permitted")

    graphs = CudaGraphs(torch.device("cuda", 0))
    kept = graphs.captured(lambda: None)  # it uses the pool, too
    work = CapturedWork(run, graphs, "it", "a hint")
    gc.enable() if collects else gc.disable()
    try:
        work(), work()
        with pytest.raises(RuntimeError, match="(?s)it could not be captured.*a hint"):
            work()
        assert cuda.failed
        cuda.log.clear()
        for _ in range(4):
            work()
            assert cuda.current is cuda.users and gc.isenabled() == collects
    finally:
        gc.enable()
    assert cuda.log == ORDER and kept is not None
