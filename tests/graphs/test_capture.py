"""The calls of torch.cuda around warm-up, capture and replay: what a CPU can check with a fake of torch.cuda."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from recorded_graph import FakeCuda, fake_cuda  # noqa: F401

from fastattn.graphs.capture import CapturedWork, CudaGraphs

ORDER = ["wait", "work", "wait"] * 2 + ["begin", "work", "end", "replay", "replay"]
OTHER_DEVICE = torch.device("cuda", 1)  # not the current one


def captured_work(work: Callable[[], None]) -> CapturedWork:
    return CapturedWork(work, CudaGraphs(OTHER_DEVICE), "it", "a hint")


def test_warm_up_capture_and_replay(fake_cuda: FakeCuda) -> None:  # noqa: F811
    """The user's device and streams stay as they were."""
    work = captured_work(lambda: fake_cuda.log.append("work"))
    for _ in range(4):
        work()
        assert fake_cuda.is_as_before()
    assert fake_cuda.log == ORDER


def test_after_a_capture_that_failed(fake_cuda: FakeCuda) -> None:  # noqa: F811
    """Another capture warms up again and uses neither stream nor pool of the one that failed."""
    fails = [True]

    def run() -> None:
        fake_cuda.log.append("work")
        if fails and fake_cuda.log[-2] == "begin":
            fails.pop()
            raise RuntimeError("not permitted")

    work = captured_work(run)
    work(), work()
    with pytest.raises(RuntimeError, match="(?s)it could not be captured.*a hint"):
        work()
    assert fake_cuda.is_as_before() and fake_cuda.failed
    fake_cuda.log.clear()
    for _ in range(4):
        work()
    assert fake_cuda.log == ORDER and fake_cuda.is_as_before()
    assert fake_cuda.num_streams == 3  # one was to end the failed capture


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


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.usefixtures("fake_cuda")
def test_no_garbage_is_collected_during_a_capture(fails: bool, enabled: bool) -> None:
    """It might be a graph."""

    def work() -> None:
        assert not gc.isenabled()
        if fails:
            raise KeyboardInterrupt

    gc.enable() if enabled else gc.disable()
    try:
        with suppress(KeyboardInterrupt, RuntimeError):
            CudaGraphs(OTHER_DEVICE).captured(work)
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
