"""A CUDA graph's behaviour on a CPU: what ran is repeated, operator by operator and kernel by kernel, at its addresses.

As a GPU's graph it holds fast every number that Python held, refuses what reads a value on the host, runs nothing while
it is captured, and leaves in memory that the capture allocated no value that a replay does not write.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

HOST_READS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero"}
# Files that look at values, but only those of a CPU tensor.
LOOKS_ON_A_CPU = ("ops/linear_cross_entropy.py", "ops/embed_layer_norm.py", "ops/_arguments.py")


class RecordedGraphs:
    """Stands in for fastattn.graphs._CudaGraphs."""

    def __init__(self, device: torch.device) -> None:
        pass

    def warm_up(self, work: Callable[[], None]) -> None:
        work()

    def captured(self, work: Callable[[], None]) -> Callable[[], None]:
        from triton.runtime.interpreter import InterpretedFunction

        graph, run = _Recorder(), InterpretedFunction.run
        generator = torch.get_rng_state()

        def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
            with _disable_current_modes():
                graph.remember((args, kwargs))
                run(kernel, *args, **kwargs)
            graph.calls.append((lambda *a, **k: run(kernel, *a, **k), args, kwargs, None))

        try:
            with patch.object(InterpretedFunction, "run", launch), graph:
                work()
        finally:
            torch.set_rng_state(generator)
            graph.undo()
        return graph.replay


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], Any, Any, Any]] = []
        self.before: dict[int, tuple[Any, Any]] = {}  # memory from before the capture, and what it held
        self.made: dict[int, Tensor] = {}  # by address; kept, so that no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in HOST_READS and not _looks_on_a_cpu():
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        self.remember((args, kwargs))
        out = func(*args, **kwargs)
        for t in _tensors(out):
            if t.untyped_storage().data_ptr() not in self.before:
                self.made[t.untyped_storage().data_ptr()] = t
        if not func.is_view and not name.startswith(("empty", "new_empty")):
            self.calls.append((func, args, kwargs, out))
        return out

    def remember(self, arguments: Any) -> None:
        for t in _tensors(arguments):
            storage = t.untyped_storage()
            if storage.data_ptr() not in self.made and storage.data_ptr() not in self.before:
                self.before[storage.data_ptr()] = (storage, storage.clone())

    def undo(self) -> None:
        """Nothing ran; and new memory holds nothing of use."""
        for storage, held in self.before.values():
            storage.copy_(held)
        for t in self.made.values():
            t.untyped_storage().fill_(0xFF)

    @torch.no_grad()
    def replay(self) -> None:
        for function, args, kwargs, recorded in self.calls:
            result = function(*args, **kwargs)
            for new, place in zip(_tensors(result), _tensors(recorded), strict=True):
                if new.data_ptr() != place.data_ptr():
                    place.copy_(new)


def _tensors(values: Any) -> list[Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, Tensor)]


def _looks_on_a_cpu() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.endswith(LOOKS_ON_A_CPU):
            return True
        frame = frame.f_back
    return False
