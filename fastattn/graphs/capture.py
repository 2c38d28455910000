"""CUDA graphs: work that is captured once and then replayed as one launch from the host."""

from __future__ import annotations

import gc
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

import torch

# Work runs this many times eagerly before it is captured. The first run compiles kernels and creates the tensors that
# later ones change in place; the second runs as every later one will.
WARM_UP = 2

# Warm-up and capture run on one stream a device, because libraries keep workspaces for each stream.
_streams: dict[torch.device, torch.cuda.Stream] = {}
# Only one thread at a time may use that stream. PyTorch allows one capture at a time anyway.
_lock = threading.RLock()


class CudaGraphs:
    """The calls of torch.cuda: the device's stream for warm-up and capture, and one memory pool for all graphs.

    No tensor allocated during a capture may be used after it: another graph of the pool writes to its memory. The
    graphs must be replayed on one stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool: Any = None
        self.pool_bytes = 0  # by which captures have made the allocator's memory larger
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()  # those that use the pool

    @staticmethod
    def can_capture(device: torch.device) -> bool:
        """Whether work on this device can be captured: on a GPU, and not within a capture of the user's own."""
        captures = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        return device.type == "cuda" and not captures

    def host_random_state(self) -> list[Any]:
        """Of the generators that draw on the host: a graph would repeat what a call has drawn from them."""
        numpy = sys.modules.get("numpy.random")
        return [random.getstate(), torch.get_rng_state().tolist(), numpy and str(numpy.get_state())]

    def limit(self) -> int:
        """The bytes that graphs may use. Eager steps, validation among them, need as much once more."""
        return torch.cuda.get_device_properties(self.device).total_memory // 2

    def warm_up(self, work: Callable[[], None]) -> None:
        """work(), on the stream of the capture: libraries such as cuBLAS allocate workspaces for each stream."""
        with _lock:
            stream, current = self._stream(), torch.cuda.current_stream(self.device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                work()
            current.wait_stream(stream)

    def captured(self, work: Callable[[], None], generators: Sequence[torch.Generator] = ()) -> Callable[[], None]:
        """A function that replays work. Capturing runs nothing on the GPU. generators: those that are not torch's."""
        # The device is made the current one for the whole capture: set_stream below changes it too.
        with _lock, torch.cuda.device(self.device), _without_garbage_collection():
            graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
            for generator in generators:
                graph.register_generator_state(generator)
            if not self._graphs:  # at first, and because the allocator refuses a pool whose graphs are all gone
                self.pool, self.pool_bytes = torch.cuda.graph_pool_handle(), 0
            # So a capture allocates cuBLAS's workspace in its pool. torch 2.12 frees that of a stream when any graph of
            # the stream is destroyed, and the others would go on writing to it.
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()  # as torch.cuda.graph does, which would make the difference below smaller
            before = torch.cuda.memory_reserved(self.device)
            try:
                # thread_local: another thread, such as a data loader's, may pin memory during the capture.
                with torch.cuda.graph(graph, pool=self.pool, stream=self._stream(), capture_error_mode="thread_local"):
                    work()
            except BaseException:
                torch.cuda.set_stream(current)  # a failed capture does not restore it
                self._graphs.clear()  # another pool for the next capture, and another stream
                _streams.pop(self.device, None)
                graph.reset()
                self._end_failed_capture(generators)
                raise
            finally:
                torch._C._cuda_clearCublasWorkspaces()  # or eager work of the stream would write to the pool
            self._graphs.add(graph)
            self.pool_bytes += torch.cuda.memory_reserved(self.device) - before
        return graph.replay

    def _end_failed_capture(self, generators: Sequence[torch.Generator]) -> None:
        """What PyTorch leaves undone if a capture has become invalid, by a read on the host for example."""
        with suppress(RuntimeError):  # before torch 2.12 the allocator is still recording, and empty_cache() would fail
            torch._C._cuda_endAllocateToPool(self.device.index, self.pool)
            torch._C._cuda_releasePool(self.device.index, self.pool)
        # Generators still are in their mode for captures, in which an eager dropout raises. A valid capture ends it.
        with suppress(RuntimeError):
            graph = torch.cuda.CUDAGraph()
            for generator in generators:
                graph.register_generator_state(generator)
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(self.device), capture_error_mode="thread_local"):
                torch.zeros(1, device=self.device)

    def _stream(self) -> torch.cuda.Stream:
        if self.device not in _streams:
            _streams[self.device] = torch.cuda.Stream(self.device)
        return _streams[self.device]


class CaptureError(RuntimeError):
    """Work could not be captured. Nothing of it has run."""


class CapturedWork:
    """Work that runs eagerly WARM_UP times, is then captured, and replayed from then on.

    name, hint: for the error message, what the work is and what the user can do. generators: what it draws from.
    """

    def __init__(
        self,
        work: Callable[[], None],
        graphs: CudaGraphs,
        name: str,
        hint: str,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self.work: Callable[[], None] | None = work  # None once it is captured: a graph keeps no Python objects alive
        self.graphs, self.name, self.hint, self.generators = graphs, name, hint, generators
        self.runs = 0
        self.replay: Callable[[], None] | None = None

    def __call__(self) -> None:
        if self.replay is None and self.runs < WARM_UP:
            self.graphs.warm_up(self.work)
            self.runs += 1
            return
        if self.replay is None:
            try:
                self.replay = self.graphs.captured(self.work, self.generators)
            except RuntimeError as error:
                self.runs = 0  # the next capture is on another stream
                raise CaptureError(
                    f"{self.name} could not be captured: {error}\nSomething in it waits for the device; {self.hint}"
                ) from error
            self.work = None
        self.replay()


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """torch.autocast keeps no casts of weights: it frees them when its context ends, but a graph stays."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """A graph that is part of a cycle is destroyed by the collector, which would invalidate a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.enable() if enabled else None
