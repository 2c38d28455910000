"""CUDA graphs: work that is captured once and then replayed as one launch from the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

# Work runs this many times eagerly before it is captured. The first run compiles kernels and creates what later ones
# change in place; the second runs as every later one will.
WARM_UP = 2


class CudaGraphs:
    """The calls of torch.cuda: one stream for warm-up and capture, and one memory pool for all graphs."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], None]) -> None:
        """work(), on the stream of the capture: libraries such as cuBLAS allocate workspaces for each stream."""
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            work()
        current.wait_stream(self.stream)

    def captured(self, work: Callable[[], None], generators: Sequence[torch.Generator] = ()) -> Callable[[], None]:
        """A function that replays work. Capturing runs nothing on the GPU. generators: other than torch's own."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.stream.device)
        for generator in generators:
            graph.register_generator_state(generator)
        try:
            # thread_local: another thread, such as a data loader's, may pin memory during the capture.
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                work()
        finally:
            torch.cuda.set_stream(current)  # a failed capture does not restore it
        return graph.replay


class CapturedWork:
    """Work that runs eagerly WARM_UP times, is then captured, and from then on replayed.

    name: the work's, in an error message, and hint what to do about one. generators: what it draws from.
    """

    def __init__(
        self,
        work: Callable[[], None],
        graphs: CudaGraphs,
        name: str,
        hint: str,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self.work, self.graphs, self.name, self.hint, self.generators = work, graphs, name, hint, generators
        self.runs = 0
        self.replay: Callable[[], None] | None = None

    def __call__(self) -> None:
        if self.replay is None and self.runs < WARM_UP:
            self.runs += 1
            self.graphs.warm_up(self.work)
            return
        if self.replay is None:
            try:
                self.replay = self.graphs.captured(self.work, self.generators)
            except RuntimeError as error:
                raise RuntimeError(
                    f"{self.name} could not be captured: {error}\nSomething in it waits for the device; {self.hint}"
                ) from error
        self.replay()
