"""Warm-up, capture and replay by torch.cuda, which is replaced here: a GPU shows that its calls are right."""

from __future__ import annotations

import gc
from unittest.mock import MagicMock

import pytest
import torch

from fastattn.graphs import capture
from fastattn.graphs.capture import CapturedWork, CudaGraphs


def test_order_and_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a capture that failed the user's stream is the current one, and another capture warms up, on another stream
    and in another pool. No garbage is collected meanwhile, which might be a graph."""
    cuda = MagicMock(graph_pool_handle=object, Stream=lambda device: MagicMock())
    for context in (cuda.graph, cuda.stream, cuda.device):
        context.return_value.__exit__.return_value = False
    monkeypatch.setattr(torch, "cuda", cuda)
    for name in ("clearCublasWorkspaces", "endAllocateToPool", "releasePool"):
        monkeypatch.setattr(torch._C, f"_cuda_{name}", lambda *pool: None, raising=False)
    monkeypatch.setattr(capture, "_streams", {})
    monkeypatch.setattr(torch, "zeros", lambda *size, device: None)
    captured: list[bool] = []

    def run() -> None:
        captured.append(cuda.graph.call_count > cuda.graph.return_value.__exit__.call_count)
        assert gc.isenabled() == (not captured[-1])
        if captured == [False, False, True]:
            raise RuntimeError("not permitted")

    graphs = CudaGraphs(torch.device("cuda", 0))
    kept = graphs.captured(lambda: None)  # it uses the pool, too
    work = CapturedWork(run, graphs, "it", "a hint")
    work(), work()
    with pytest.raises(RuntimeError, match="(?s)it could not be captured.*a hint"):
        work()
    cuda.set_stream.assert_called_once_with(cuda.current_stream.return_value)
    for _ in range(4):
        work()
    assert captured == [False, False, True] * 2 and cuda.CUDAGraph.return_value.replay.call_count == 2
    _, failed, last = (call.kwargs for call in cuda.graph.call_args_list if "pool" in call.kwargs)
    assert last["pool"] is not failed["pool"] and last["stream"] is not failed["stream"] and kept is not None
