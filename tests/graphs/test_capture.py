"""The calls of torch.cuda around warm-up, capture and replay: what a CPU can check with a fake of torch.cuda."""

from __future__ import annotations

import gc

import pytest
import torch
from recorded_graph import FakeCuda, fake_cuda  # noqa: F401

from fastattn.graphs.capture import CapturedWork, CudaGraphs

ORDER = ["wait", "work", "wait"] * 2 + ["begin", "work", "end", "replay", "replay"]
OTHER_DEVICE = torch.device("cuda", 1)  # not the current one


@pytest.mark.parametrize("collects", [True, False])
def test_order_and_failure(collects: bool, fake_cuda: FakeCuda) -> None:  # noqa: F811
    """The user's device and streams stay as they were. After a capture that failed another one warms up again, and uses
    neither its stream nor its pool. No garbage is collected meanwhile, which might be a graph."""
    fails = [True]

    def run() -> None:
        fake_cuda.log.append("work")
        if fake_cuda.log[-2] == "begin":
            assert not gc.isenabled()
            if fails:
                fails.pop()
                raise RuntimeError("not permitted")

    graphs = CudaGraphs(OTHER_DEVICE)
    kept = graphs.captured(lambda: None)  # it uses the pool, too
    work = CapturedWork(run, graphs, "it", "a hint")
    gc.enable() if collects else gc.disable()
    try:
        work(), work()
        with pytest.raises(RuntimeError, match="(?s)it could not be captured.*a hint"):
            work()
        assert fake_cuda.is_as_before() and fake_cuda.failed
        fake_cuda.log.clear()
        for _ in range(4):
            work()
            assert fake_cuda.is_as_before() and gc.isenabled() == collects
    finally:
        gc.enable()
    assert fake_cuda.log == ORDER and fake_cuda.num_streams == 3  # one was to end the failed capture
    assert kept is not None


def test_streams_and_pools(fake_cuda: FakeCuda) -> None:  # noqa: F811
    """One stream for all graphs of a device. One pool for those of one CudaGraphs, while one of them is alive: later
    the allocator refuses it."""
    first, second = CudaGraphs(OTHER_DEVICE), CudaGraphs(OTHER_DEVICE)
    replays, pools = [], []
    for graphs in (first, first, second):
        graphs.warm_up(lambda: None)
        replays.append(graphs.captured(lambda: None))
        pools.append(graphs.pool)
    assert fake_cuda.num_streams == 1 and pools[0] is pools[1] is not pools[2]
    replays.clear()
    first.captured(lambda: None)
    assert first.pool is not pools[0]
