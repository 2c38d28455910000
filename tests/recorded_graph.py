"""The behaviour of a CUDA graph on a CPU: operators and Triton kernels are recorded and replayed at their addresses.

Like a GPU's graph it repeats every number that came from Python, refuses to read a value on the host, and computes
nothing during the capture: memory allocated then holds no value until a replay writes it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from fastattn import generate
from fastattn.backends.aten import linear_cross_entropy
from fastattn.generate import kept_graphs
from fastattn.graphs import graphed_call, training_step
from fastattn.graphs.capture import CudaGraphs
from fastattn.nn import DecoderCache

HOST_READS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero"}


class RecordedGraphs(CudaGraphs):
    """Stands in for fastattn.graphs.capture.CudaGraphs.

    The capture after one of a forward is that of its backward. All share the pool's memory: every replay but a
    backward's overwrites what any of them has written there.
    """

    pool_size = 2**20  # that a capture adds

    @staticmethod
    def can_capture(device: torch.device) -> bool:
        return True

    def host_random_state(self) -> list[Any]:
        """A CPU's generator is that of dropout, too. So single numbers are counted, as LayerDrop draws them."""
        pythons, _, numpys = super().host_random_state()
        return [pythons, numpys, self._numbers]

    def limit(self) -> int:
        return 2**40

    def warm_up(self, work: Callable[[], None]) -> None:
        counted = _Numbers()
        with counted:
            work()
        self._numbers += counted.count

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._recorded: WeakSet[_Recorder] = WeakSet()

    _numbers = 0
    # The forward whose backward is captured next. Its memory has to hold values: operators of a CPU check indices.
    replays_before: Callable[[], None] | None = None

    def captured(self, work: Callable[[], None], generators: Sequence[torch.Generator] = ()) -> Callable[[], None]:
        from triton.runtime.interpreter import InterpretedFunction

        overwrites = self.replays_before is None
        graph, run = _Recorder(self._recorded if overwrites else ()), InterpretedFunction.run
        generator = torch.get_rng_state()
        if self.replays_before is not None:
            self.replays_before()
            torch.set_rng_state(generator)

        def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
            with _disable_current_modes():
                graph.remember((args, kwargs))
                run(kernel, *args, **kwargs)
                graph.calls.append((lambda *a, **k: run(kernel, *a, **k), *_detached((args, kwargs, None))))

        try:
            with patch.object(InterpretedFunction, "run", launch), graph:
                work()
        finally:
            torch.set_rng_state(generator)
            graph.undo()
        self._recorded.add(graph)
        self.pool_bytes += self.pool_size
        self.replays_before = graph.replay if overwrites and "forward" in getattr(work, "__name__", "") else None
        return graph.replay


class Recorder:
    """What the package has made since a test began: pools, each with a stream; captures; replays.

    failures: by the number of a capture, what is called at its end, within it.
    """

    def __init__(self) -> None:
        self.pools = self.captures = self.replays = 0
        self.failures: dict[int, Callable[[], Any]] = {}


def _recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Graphs are made as on a GPU, where there is none recorded ones. Searches keep none of another test."""
    recorder, has_gpu = Recorder(), torch.cuda.is_available()

    class Counted(CudaGraphs if has_gpu else RecordedGraphs):  # type: ignore[misc]
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            recorder.pools += 1

        def captured(self, work: Callable[[], None], *generators: Any) -> Callable[[], None]:
            recorder.captures += 1
            number = recorder.captures

            def forward_or_other() -> None:
                work()
                recorder.failures.get(number, int)()

            forward_or_other.__name__ = getattr(work, "__name__", "")
            replay = super().captured(forward_or_other, *generators)

            def count_and_replay() -> None:
                recorder.replays += 1
                replay()

            return count_and_replay

    for module in (graphed_call, training_step, kept_graphs):
        monkeypatch.setattr(module, "CudaGraphs", Counted)
    monkeypatch.setattr(kept_graphs, "_shared", {})
    if not has_gpu:  # a GPU's graph reads no value on the host
        for name, module in [*sys.modules.items()]:
            if name.startswith("fastattn") and hasattr(module, "can_read_values"):
                monkeypatch.setattr(module, "can_read_values", lambda t: False)
        monkeypatch.setattr(linear_cross_entropy, "_can_count", lambda x: False)
    generate.drop_graphs()
    yield recorder
    generate.drop_graphs()


recorder = pytest.fixture(_recorded, name="recorder")
recorded_calls = pytest.fixture(_recorded, name="recorded_calls")  # for tests that count nothing


@contextmanager
def decoding_as_on_a_gpu() -> Iterator[None]:
    """Searches read no number of the host, and their steps are graphs."""
    make = DecoderCache.__init__

    def on_device(self: DecoderCache, *arguments: Any) -> None:
        make(self, *arguments)
        self.on_device = True

    with patch.object(DecoderCache, "__init__", on_device):
        yield


class _Numbers(TorchFunctionMode):
    """count: of calls of torch.rand for one number."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.rand and args == ([],)
        return func(*args, **kwargs or {})


class _Recorder(TorchDispatchMode):
    """overwrites: the graphs whose memory a replay may use."""

    def __init__(self, overwrites: Iterable[_Recorder] = ()) -> None:
        super().__init__()
        self.overwrites, self.holds_values = overwrites, True
        self.calls: list[tuple[Callable[..., Any], Any, Any, Any]] = []
        # By address: storages from before the capture with a copy of what they held, and tensors allocated during the
        # capture. The latter are kept alive so that no address is used twice.
        self.before: dict[int, tuple[Any, Any]] = {}
        self.allocated: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if _waits(name, args) and not _checks_arguments():  # public ops check values, but only on a CPU
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        self.remember((args, kwargs))
        out = func(*args, **kwargs)
        for t in _tensors(out):
            if t.untyped_storage().data_ptr() not in self.before:
                self.allocated[t.untyped_storage().data_ptr()] = t.detach()
        if not func.is_view and not name.startswith(("empty", "new_empty")):
            self.calls.append((func, *_detached((args, kwargs, out))))
        return out

    def remember(self, arguments: Any) -> None:
        for t in _tensors(arguments):
            storage = t.untyped_storage()
            if storage.data_ptr() not in self.allocated and storage.data_ptr() not in self.before:
                self.before[storage.data_ptr()] = (storage, storage.clone())

    def undo(self) -> None:
        """Restore old memory and fill new memory with 0xFF: a capture computes nothing."""
        for storage, held in self.before.values():
            storage.copy_(held)
        self.fill()

    def fill(self) -> None:
        if self.holds_values:
            for t in self.allocated.values():
                t.untyped_storage().fill_(0xFF)
        self.holds_values = False

    @torch.no_grad()
    def replay(self) -> None:
        for other in self.overwrites:
            other.fill()
        self.holds_values = True
        for function, args, kwargs, recorded in self.calls:
            result = function(*args, **kwargs)
            for new, old in zip(_tensors(result), _tensors(recorded), strict=True):
                if new.data_ptr() != old.data_ptr():
                    old.copy_(new)


def _waits(name: str, args: Any) -> bool:
    """Whether an operator reads values of a GPU on the host, or copies from it. x[i] = 1 with indices i is such a copy,
    and a bool index is counted before it is used."""
    if name in ("index", "index_put", "index_put_"):
        has_bools = any(t is not None and t.dtype is torch.bool for t in args[1])
        return has_bools or (name == "index_put_" and args[2].dim() == 0)
    return name in HOST_READS or (name == "lift_fresh" and args[0].dim() > 0)  # torch.tensor of a list


def _tensors(values: Any) -> list[Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, Tensor)]


def _detached(values: Any) -> Any:
    """The same memory. Autograd makes the tensors themselves part of its graph, and a CUDA graph keeps none alive."""
    return tree_map_only(Tensor, Tensor.detach, values)


def _checks_arguments() -> bool:
    """Whether the innermost line of the package on the stack is one of the public ops."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/fastattn/" in path or "/kernels/" in path:
            return "/fastattn/ops/" in path
        frame = frame.f_back
    return False
