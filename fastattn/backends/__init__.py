"""The registry of backends, and the choice of the one that an op's call uses.

The choice is the first of these that says something: the argument ``backend=``, the context ``use_backend()``, the
environment variable FASTATTN_BACKEND, a record of ``python -m fastattn tune`` on such a device, the device's own order.
A backend that is asked for by name raises with its reason where it does not support a call. The automatic choice
uses the first that does. Where a backend is requested for a whole model and has no kernel for an op, the first of
GPU_ORDER that supports the call is used.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, get_args

import torch

from fastattn._tracing import is_transformed
from fastattn.backends import timings

Backend = Literal["reference", "aten", "triton", "cuda"]
BACKENDS: tuple[str, ...] = get_args(Backend)
# The orders without a record. A CUDA kernel becomes a default only by a record, such as those in backends/records/.
GPU_ORDER = ("triton", "aten", "reference")
# Tensor cores do not compute in float32. On an H200 PyTorch's attention is then 5 times as fast as the kernels here,
# and its products are 1.3 times as fast.
GPU_ORDER_FLOAT32 = ("aten", "triton", "reference")
PRODUCTS = ("attention", "feed_forward")  # the ops to which that applies
OTHER_ORDER = ("aten", "reference")

_NO_KERNEL = "there is no {} kernel for this op"

Function = TypeVar("Function", bound=Callable[..., Any])
Name = TypeVar("Name", bound=str)


@dataclass
class Implementation:
    """A backend's module of an op. What follows `path` is known after the import.

    path: the module's dotted name.     failure: why there is no module, or None.
    differentiable: the module says DIFFERENTIABLE: its function, named as the op, is a formula for autograd. Other
        modules have functions for the forward and for the backward.
    takes_all: the module has no unsupported_reason, so it supports every call.
    """

    name: str
    path: str
    module: Any = None
    failure: str | None = None
    differentiable: bool = False
    takes_all: bool = False


_PACKAGES = {
    "reference": "fastattn.backends.reference",
    "aten": "fastattn.backends.aten",
    "triton": "fastattn.kernels",
    "cuda": "fastattn.backends.cuda",
}
_OP_NAMES = (
    "attention",
    "decode_attention",
    "add_layer_norm",
    "embed_layer_norm",
    "feed_forward",
    "linear_cross_entropy",
)
# op -> backend -> Implementation. "mask" is no op: Triton has a kernel that prepares masks. The table never changes,
# only the attributes of its entries: torch.compile keeps a dictionary as it was, and reads attributes again.
REGISTRY = {
    op_name: {name: Implementation(name, f"{package}.{op_name}") for name, package in _PACKAGES.items()}
    for op_name in (*_OP_NAMES, "mask")
}


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.name: Backend | None = None


# What use_backend asked for. torch.compile cannot read a ContextVar, and guards attributes of a threading.local.
_task_override: ContextVar[Backend | None] = ContextVar("fastattn.use_backend", default=None)
_thread_state = _ThreadState()


@dataclass(frozen=True)
class Op:
    """An op as the dispatcher knows it.

    validate: checks a call's arguments and returns (device, the arguments of unsupported_reason).
    backend_module: the op's key in REGISTRY: its own name, or for a variant of another op the other op's.
    call_class: of unsupported_reason's arguments, the class of calls for which a record names the fastest backend.
    """

    name: str
    function: Callable[..., Any]
    validate: Callable[..., tuple[torch.device, tuple[Any, ...]]]
    backend_module: str
    call_class: Callable[..., str]


OPS: dict[str, Op] = {}


def register(
    op_name: str,
    validate: Callable[..., tuple[torch.device, tuple[Any, ...]]],
    call_class: Callable[..., str],
    backend_module: str | None = None,
) -> Callable[[Function], Function]:
    """Decorator of an op's public function: makes it known to ``explain`` and the doctor."""

    def note(function: Function) -> Function:
        OPS[op_name] = Op(op_name, function, validate, backend_module or op_name, call_class)
        return function

    return note


def use_backend(name: Backend | None) -> AbstractContextManager[None]:
    """Every op called inside uses this backend: "reference", "aten", "triton" or "cuda"; None: the automatic choice.

    It holds for the calling thread and async task alone; what torch.compile has compiled follows the thread. PyTorch
    runs a GPU's backward, and DataParallel its replicas, in threads of their own: for activation checkpointing on a GPU
    and for DataParallel give the model ``backend=`` instead, or set FASTATTN_BACKEND.
    ValueError for another name. An op called inside raises RuntimeError where the backend does not support the call.
    """
    return _using(None if name is None else _known(name, "use_backend()"))


@contextmanager
def _using(name: Backend | None) -> Iterator[None]:
    before, token = _thread_state.name, None if torch.compiler.is_compiling() else _task_override.set(name)
    _thread_state.name = name
    try:
        yield
    finally:
        if token is not None:
            _task_override.reset(token)
            before = _task_override.get()  # another task may have come and gone in this thread
        _thread_state.name = before


def requested(backend: Backend | None) -> tuple[Backend | None, str]:
    """The backend asked for by name, if any, and where it was asked for."""
    if backend is not None:
        return _known(backend, "backend"), "backend="
    name = _thread_state.name if torch.compiler.is_compiling() else _task_override.get()
    if name is not None:
        return name, "use_backend()"
    if from_environment := os.environ.get("FASTATTN_BACKEND"):
        return _known(cast(Backend, from_environment), "FASTATTN_BACKEND"), "FASTATTN_BACKEND"
    return None, "automatic choice"


def _known(name: Name, source: str) -> Name:
    if name not in BACKENDS:
        raise ValueError(f"{source} must be one of {', '.join(BACKENDS)}, got {name!r}")
    return name


def default_order(op_name: str, device: torch.device, op_args: tuple[Any, ...]) -> tuple[str, ...]:
    """The backends in the order in which the automatic choice asks them, where no record says which is fastest."""
    if device.type != "cuda":
        return OTHER_ORDER
    # The first argument of these is a tensor.
    return GPU_ORDER_FLOAT32 if op_name in PRODUCTS and op_args[0].dtype is torch.float32 else GPU_ORDER


def recorded_order(op_name: str, device: torch.device, op_args: tuple[Any, ...]) -> tuple[str, ...]:
    """The backends that a record of such a device names for such a call, the fastest first; () if it names none.
    See fastattn/backends/timings.py."""
    choices = timings.choices(op_name, device.type, device.index)
    if not choices:
        return ()
    of_call = OPS[op_name].call_class(*op_args)
    if of_call not in choices and of_call.startswith("float16"):  # their orders are equal on an H200
        of_call = f"b{of_call}"
    return tuple(name for name in choices.get(of_call, ()) if name in BACKENDS)


def automatic_order(op_name: str, device: torch.device, op_args: tuple[Any, ...]) -> tuple[str, ...]:
    """The backends in the order in which this call asks them, each once."""
    order = default_order(op_name, device, op_args)
    if not (recorded := recorded_order(op_name, device, op_args)):
        return order
    return (*recorded, *(other for other in order if other not in recorded))


@torch.compiler.assume_constant_result  # torch.compile traces no import
def import_failure(op_name: str, backend: str) -> str | None:
    """Import a backend's module of an op, unless done. Why there is none, or None; one that is broken raises."""
    entry = REGISTRY[op_name][backend]
    if entry.module is None and entry.failure is None:
        try:
            module = importlib.import_module(entry.path)
        except ModuleNotFoundError as error:
            if error.name == entry.path:
                entry.failure = _NO_KERNEL.format(backend)
            elif backend == "triton" and error.name == "triton":
                entry.failure = "triton is not installed (it has wheels for Linux only)"
            else:
                raise
        else:
            entry.differentiable = getattr(module, "DIFFERENTIABLE", False)
            entry.takes_all = not hasattr(module, "unsupported_reason")
            entry.module = module
    return entry.failure


def has_kernel(op_name: str, backend: str) -> bool:
    """Whether a backend computes this op at all. op_name: a key of REGISTRY."""
    return import_failure(op_name, backend) != _NO_KERNEL.format(backend)


def implementation(op_name: str, backend: str) -> Implementation:
    """A backend's entry in REGISTRY, imported. RuntimeError if there is no module."""
    if (reason := import_failure(op_name, backend)) is not None:
        raise RuntimeError(reason)
    return REGISTRY[op_name][backend]


def load_backend(op_name: str, backend: str) -> Any:
    """A backend's module of an op. RuntimeError if there is none."""
    return implementation(op_name, backend).module


def unsupported_reason(op_name: str, backend: str, op_args: tuple[Any, ...]) -> str | None:
    """Why this backend does not support the call, or None if it does. op_name: a key of REGISTRY."""
    if backend != "reference" and is_transformed():
        return "transforms of torch.func and forward-mode differentiation need the backend reference"
    if (reason := import_failure(op_name, backend)) is not None:
        return reason
    entry = REGISTRY[op_name][backend]
    return None if entry.takes_all else entry.module.unsupported_reason(*op_args)


def choose(
    op_name: str, device: torch.device, op_args: tuple[Any, ...], backend: Backend | None, of_model: bool = False
) -> Implementation:
    """The backend for this call, asked once whether it supports it. RuntimeError if the one asked for does not.

    of_model: `backend` was requested for a whole model, as use_backend and the environment are for all ops. If it has
        no kernel for this op, the first of GPU_ORDER that supports the call is used.
    """
    name, source = requested(backend)
    key = OPS[op_name].backend_module
    if name is None:
        order = automatic_order(op_name, device, op_args)
    else:
        if (reason := unsupported_reason(key, name, op_args)) is None:
            return REGISTRY[key][name]
        if (backend is not None and not of_model) or has_kernel(key, name):
            op = OPS[op_name].function.__name__
            raise RuntimeError(f"{op}: backend {name!r} ({source}) does not support this call: {reason}")
        order = GPU_ORDER
    for name in order:
        if unsupported_reason(key, name, op_args) is None:
            return REGISTRY[key][name]
    raise AssertionError("unreachable: the reference supports every call")


def likely_backend(op_name: str, device: torch.device, backend: Backend | None = None) -> str:
    """The backend that a call of the op is likely to use, for decisions that come before its arguments are known.

    It is the one asked for by name, or the one that a record names first for every call of the op, or the first in the
    device's own order. Whether it supports the call is not asked. op_name may also be "linear", for
    nn.Linear, which is no op: no record names it.
    """
    name, _ = requested(backend)
    if name is not None:
        return name
    if op_name in OPS and (choices := timings.choices(op_name, device.type, device.index)):
        recorded = {names[0] for names in choices.values()}
        if len(recorded) == 1 and recorded <= set(BACKENDS):
            return recorded.pop()
    return (GPU_ORDER if device.type == "cuda" else OTHER_ORDER)[0]
