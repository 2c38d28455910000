"""The only place that picks a backend.

Order of choice: the ``backend=`` argument, the ``use_backend()`` context, the environment's FASTATTN_BACKEND, the
record that ``python -m fastattn tune`` made of this device, then the device's own order. A backend asked for by name
serves or raises with its reason; the automatic choice takes the first that can. Of each op a backend has one module,
with ``unsupported_reason`` and the op's functions, imported when first asked for.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, Literal, TypeVar, cast, get_args

import torch

from fastattn._tracing import is_transformed
from fastattn.backends import timings

Backend = Literal["reference", "aten", "triton", "cuda"]
BACKENDS: tuple[str, ...] = get_args(Backend)
# A kernel becomes a default for a GPU only after its speed was recorded on one (benchmarks/results/).
DEFAULT_ORDER = {"cuda": ("triton", "aten", "reference")}
OTHER_ORDER = ("aten", "reference")

Function = TypeVar("Function", bound=Callable[..., Any])
Name = TypeVar("Name", bound=str)

_PACKAGES = {
    "reference": "fastattn.backends.reference",
    "aten": "fastattn.backends.aten",
    "triton": "fastattn.kernels",
    "cuda": "fastattn.backends.cuda",
}
# For each backend the modules of ops that were asked for, as attributes, or why there is none. torch.compile reads
# attributes afresh, where it would take a dictionary as it was before the first import of a trace.
_MODULES = {backend: SimpleNamespace() for backend in BACKENDS}


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.name: Backend | None = None


# What use_backend asked for. torch.compile cannot read a ContextVar, and guards attributes of a threading.local.
_of_task: ContextVar[Backend | None] = ContextVar("fastattn.use_backend", default=None)
_of_thread = _OfThread()


@dataclass(frozen=True)
class Op:
    """An op as the dispatcher knows it. ``query`` checks a call's arguments and gives (device, unsupported_reason's arguments).

    served_by: the name under which backends have it: its own or, for a variant of another op, that op's.
    call_class: of unsupported_reason's arguments, the class of calls for which a record names the fastest backend.
    """

    name: str
    function: Callable[..., Any]
    query: Callable[..., tuple[torch.device, tuple[Any, ...]]]
    served_by: str
    call_class: Callable[..., str]


OPS: dict[str, Op] = {}


def register(
    op_name: str,
    query: Callable[..., tuple[torch.device, tuple[Any, ...]]],
    call_class: Callable[..., str],
    served_by: str | None = None,
) -> Callable[[Function], Function]:
    """Decorator of an op's public function: makes it known to ``explain`` and the doctor."""

    def note(function: Function) -> Function:
        OPS[op_name] = Op(op_name, function, query, served_by or op_name, call_class)
        return function

    return note


@contextmanager
def use_backend(name: Backend | None) -> Iterator[None]:
    """Every op called inside uses this backend: "reference", "aten", "triton" or "cuda"; None: the automatic choice.

    It holds for the calling thread and async task alone; what torch.compile has compiled follows the thread. PyTorch
    runs a GPU's backward, and DataParallel its replicas, in threads of their own: for activation checkpointing on a GPU
    and for DataParallel give the model ``backend=`` instead, or set FASTATTN_BACKEND.
    """
    name = None if name is None else _known(name, "use_backend()")
    before, token = _of_thread.name, None if torch.compiler.is_compiling() else _of_task.set(name)
    _of_thread.name = name
    try:
        yield
    finally:
        if token is not None:
            _of_task.reset(token)
            before = _of_task.get()  # another task may have come and gone in this thread
        _of_thread.name = before


def requested(backend: Backend | None) -> tuple[Backend | None, str]:
    """The backend asked for by name, if any, and where it was asked for."""
    if backend is not None:
        return _known(backend, "backend"), "backend="
    name = _of_thread.name if torch.compiler.is_compiling() else _of_task.get()
    if name is not None:
        return name, "use_backend()"
    if from_environment := os.environ.get("FASTATTN_BACKEND"):
        return _known(cast(Backend, from_environment), "FASTATTN_BACKEND"), "FASTATTN_BACKEND"
    return None, "automatic choice"


def _known(name: Name, source: str) -> Name:
    if name not in BACKENDS:
        raise ValueError(f"{source} must be one of {', '.join(BACKENDS)}, got {name!r}")
    return name


def default_order(device: torch.device) -> tuple[str, ...]:
    """The backends in the order in which the automatic choice asks them, where no record says which is fastest."""
    return DEFAULT_ORDER.get(device.type, OTHER_ORDER)


def recorded_choice(op_name: str, device: torch.device, arguments: tuple[Any, ...]) -> str | None:
    """The backend that a record of this device names for such a call, or None. See fastattn/backends/timings.py."""
    name = timings.choice(op_name, device.type, lambda: OPS[op_name].call_class(*arguments), device.index)
    return name if name in BACKENDS else None


def automatic_order(op_name: str, device: torch.device, arguments: tuple[Any, ...]) -> tuple[str, ...]:
    """The backends in the order in which this call asks them."""
    order, name = default_order(device), recorded_choice(op_name, device, arguments)
    return order if name is None else (name, *order)


@torch.compiler.assume_constant_result  # torch.compile traces no import
def import_failure(op_name: str, backend: str) -> str | None:
    """Import a backend's module of an op, unless done. Why there is none, or None; one that is broken raises."""
    if not hasattr(_MODULES[backend], op_name):
        setattr(_MODULES[backend], op_name, _import(op_name, backend))
    found = getattr(_MODULES[backend], op_name)
    return found if isinstance(found, str) else None


def _import(op_name: str, backend: str) -> ModuleType | str:
    name = f"{_PACKAGES[backend]}.{op_name}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            return f"there is no {backend} kernel for this op yet"
        if backend == "triton" and error.name == "triton":
            return "triton is not installed (it has wheels for Linux only)"
        raise


def load_backend(op_name: str, backend: str) -> ModuleType:
    """A backend's module of an op. RuntimeError if there is none."""
    if (reason := import_failure(op_name, backend)) is not None:
        raise RuntimeError(reason)
    return getattr(_MODULES[backend], op_name)


def unsupported_reason(op_name: str, backend: str, arguments: tuple[Any, ...]) -> str | None:
    """Why this backend cannot serve the call, or None if it can."""
    if backend != "reference" and is_transformed():
        return "inside transforms of torch.func and forward-mode differentiation only the backend reference serves"
    reason = import_failure(op_name, backend)
    return load_backend(op_name, backend).unsupported_reason(*arguments) if reason is None else reason


def choose(op_name: str, device: torch.device, arguments: tuple[Any, ...], backend: Backend | None) -> tuple[str, Any]:
    """The backend for this call, its name and its module. RuntimeError if the one asked for cannot serve."""
    name, source = requested(backend)
    served_by = OPS[op_name].served_by
    if name is not None:
        if (reason := unsupported_reason(served_by, name, arguments)) is not None:
            op = OPS[op_name].function.__name__
            raise RuntimeError(f"{op}: backend {name!r} ({source}) cannot serve this call: {reason}")
        return name, load_backend(served_by, name)
    for name in automatic_order(op_name, device, arguments):
        if unsupported_reason(served_by, name, arguments) is None:
            return name, load_backend(served_by, name)
    raise AssertionError("unreachable: the reference serves everything")


def likely_backend(op_name: str, device: torch.device, backend: Backend | None = None) -> str:
    """The backend that a call of the op is likely to use, for decisions that come before its arguments are known.

    It is the one asked for by name, or the one that a record of this device names for every call of the op, or the
    first in the device's own order. Whether it supports the call is not asked. op_name may also be "linear", for
    nn.Linear, which is no op: no record names it.
    """
    name, _ = requested(backend)
    if name is not None:
        return name
    if op_name in OPS and (choices := timings.choices(op_name, device.type, device.index)):
        recorded = set(choices.values())
        if len(recorded) == 1 and recorded <= set(BACKENDS):
            return recorded.pop()
    return default_order(device)[0]
