"""The few lines of fastattn.graphs that call torch.cuda, over stand-ins for it."""

import pytest
import torch

from fastattn import graphs


def test_the_thin_layer_over_torch_cuda(monkeypatch):
    """What a CPU can check: the order of streams, warm-up, capture and replay, and the way back after a failure."""
    log = []

    class Stream:
        device = torch.device("cuda", 0)
        __init__ = __enter__ = __exit__ = lambda self, *_: None

        def wait_stream(self, other):
            log.append("wait")

    class Capture:
        def __init__(self, graph, pool, stream, capture_error_mode):
            assert (pool, capture_error_mode) == ("pool", "thread_local")

        def __enter__(self):
            log.append("begin")

        def __exit__(self, *_):
            log.append("end")

    class Graph:
        def replay(self):
            log.append("replay")

    here, others = Stream(), dict(Stream=Stream, graph=Capture, CUDAGraph=Graph, graph_pool_handle=lambda: "pool")
    others |= dict(current_stream=lambda _: here, stream=lambda s: s, set_stream=lambda s: log.append(s is here))
    for name, stand_in in others.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    replayed = graphs._Replayed(lambda: log.append("work"), graphs._CudaGraphs(Stream.device))
    for _ in range(4):
        replayed()
    assert log == ["wait", "work", "wait"] * 2 + ["begin", "work", "end", True, "replay", "replay"]

    def fail():
        raise RuntimeError("not permitted")

    log.clear()
    with pytest.raises(RuntimeError, match="not permitted"):
        graphs._CudaGraphs(Stream.device).captured(fail)
    assert log == ["begin", "end", True]
