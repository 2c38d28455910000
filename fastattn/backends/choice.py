"""The registry of backends, and the choice of the one that an op's call uses.

The first of these that is set wins:

1. the argument ``backend=``,
2. the context ``use_backend()``,
3. the environment variable FASTATTN_BACKEND,
4. a record of ``python -m fastattn tune`` for the device,
5. the device's default order.

1 to 3 request a backend by name (`requested`). If it does not support the call, `choose` raises with the reason. If it
has no kernel for the op, whatever the call, the first backend of GPU_ORDER that supports the call is used: so a backend
can be requested for a whole model. 4 and 5 are the automatic choice (`automatic_order`): the first that supports the
call is used.
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

from fastattn._tracing import constant_in_traces, is_transformed
from fastattn.backends import timings

Backend = Literal["reference", "aten", "triton", "cuda"]
BACKENDS: tuple[str, ...] = get_args(Backend)
# The default orders, where no record names a backend. On a GPU the default is Triton: it supports every mask, and its
# results repeat bit for bit. A CUDA C++ kernel becomes a default only by a record, such as those in backends/records/.
GPU_ORDER = ("triton", "aten", "reference")
# Tensor cores do not compute in float32. On an H200 PyTorch's attention is then 5 times as fast as the kernels here,
# and its products are 1.3 times as fast.
GPU_ORDER_FLOAT32 = ("aten", "triton", "reference")
FLOAT32_OPS = ("attention", "feed_forward")  # the ops to which GPU_ORDER_FLOAT32 applies
OTHER_ORDER = ("aten", "reference")

_NO_KERNEL = "there is no {} kernel for this op"

Function = TypeVar("Function", bound=Callable[..., Any])
Name = TypeVar("Name", bound=str)


@dataclass
class Implementation:
    """An op in a backend. What follows `path` is set by the import.

    path: the module's dotted name.     failure: why there is no module, or None.
    differentiable: the module has DIFFERENTIABLE = True: its function, named as the op, is a formula for autograd.
        Other modules have functions for the forward and for the backward.
    takes_all: the module has no unsupported_reason, so it supports every call.
    """

    name: Backend
    path: str
    module: Any = None
    failure: str | None = None
    differentiable: bool = False
    takes_all: bool = False


_PACKAGES: dict[Backend, str] = {
    "reference": "fastattn.backends.reference",
    "aten": "fastattn.backends.aten",
    "triton": "fastattn.kernels",
    "cuda": "fastattn.backends.cuda",
}
_OP_NAMES = (
    "attention",
    "decode_attention",
    "add_layer_norm",
    "feed_forward",
    "linear_cross_entropy",
)
# op -> backend -> Implementation. "mask" is no op: Triton has a kernel that prepares masks. The table never changes,
# only the attributes of its entries: torch.compile keeps a dictionary as it was, and reads attributes again.
REGISTRY: dict[str, dict[str, Implementation]] = {
    op_name: {name: Implementation(name, f"{package}.{op_name}") for name, package in _PACKAGES.items()}
    for op_name in (*_OP_NAMES, "mask")
}


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.name: Backend | None = None


# The backend of use_backend(). torch.compile cannot read a ContextVar, and guards attributes of a threading.local.
_task_override: ContextVar[Backend | None] = ContextVar("fastattn.use_backend", default=None)
_thread_state = _ThreadState()


@dataclass(frozen=True)
class Op:
    """An op's public function, and what the choice of a backend needs to know about its calls.

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
    """Decorator of an op's public function: adds it to OPS, for `choose`, ``explain`` and the doctor."""

    def add(function: Function) -> Function:
        OPS[op_name] = Op(op_name, function, validate, backend_module or op_name, call_class)
        return function

    return add


def use_backend(name: Backend | None) -> AbstractContextManager[None]:
    """Every op called inside uses this backend: "reference", "aten", "triton" or "cuda". None: the automatic choice.

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
    """The backend requested by name, or None, and the source of the request."""
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


def recorded_order(op_name: str, device: torch.device, op_args: tuple[Any, ...]) -> tuple[str, ...]:
    """The backends that the device's record names for this class of calls, the fastest first; () without one.

    See fastattn/backends/timings.py.
    """
    choices = timings.choices(op_name, device.type, device.index)
    if not choices:
        return ()
    of_call = OPS[op_name].call_class(*op_args)
    if of_call not in choices and of_call.startswith("float16"):  # their orders are equal on an H200
        of_call = f"b{of_call}"
    return tuple(name for name in choices.get(of_call, ()) if name in BACKENDS)


def automatic_order(op_name: str, device: torch.device, op_args: tuple[Any, ...]) -> tuple[str, ...]:
    """The order in which the automatic choice tries the backends for a call: the recorded ones, then the defaults."""
    if device.type != "cuda":
        default = OTHER_ORDER
    elif op_name in FLOAT32_OPS and op_args[0].dtype is torch.float32:  # the first argument of these ops is a tensor
        # From a bias by distance PyTorch's operators would make a tensor of all scores.
        by_distance = op_name == "attention" and getattr(op_args[3], "relative_bias", None) is not None
        default = GPU_ORDER if by_distance else GPU_ORDER_FLOAT32
    else:
        default = GPU_ORDER
    if not (recorded := recorded_order(op_name, device, op_args)):
        return default
    return (*recorded, *(name for name in default if name not in recorded))


@constant_in_traces  # torch.compile traces no import
def import_failure(op_name: str, backend: str) -> str | None:
    """Import a backend's module of an op, once. Returns why there is none, or None. A broken module raises."""
    entry = REGISTRY[op_name][backend]
    if entry.module is None and entry.failure is None:
        try:
            module = importlib.import_module(entry.path)
        except ModuleNotFoundError as error:
            if error.name == entry.path:
                entry.failure = _NO_KERNEL.format(backend)
            elif backend == "triton" and error.name == "triton":
                entry.failure = "triton is not installed (its own wheels are for Linux)"
            else:
                raise
        else:
            entry.differentiable = getattr(module, "DIFFERENTIABLE", False)
            entry.takes_all = not hasattr(module, "unsupported_reason")
            entry.module = module
    return entry.failure


def has_kernel(op_name: str, backend: str) -> bool:
    """Whether a backend has a module for the op, whatever its calls. op_name: a key of REGISTRY."""
    return import_failure(op_name, backend) != _NO_KERNEL.format(backend)


def implementation(op_name: str, backend: str) -> Implementation:
    """The entry in REGISTRY, with its module imported. RuntimeError if there is no module."""
    if (reason := import_failure(op_name, backend)) is not None:
        raise RuntimeError(reason)
    return REGISTRY[op_name][backend]


def load_backend(op_name: str, backend: str) -> Any:
    """The module alone of `implementation`."""
    return implementation(op_name, backend).module


def unsupported_reason(op_name: str, backend: str, op_args: tuple[Any, ...]) -> str | None:
    """Why a backend does not support a call, or None if it does. op_name: a key of REGISTRY."""
    if backend != "reference" and is_transformed():
        return "transforms of torch.func and forward-mode differentiation need the backend reference"
    if (reason := import_failure(op_name, backend)) is not None:
        return reason
    entry = REGISTRY[op_name][backend]
    return None if entry.takes_all else entry.module.unsupported_reason(*op_args)


def choose(op_name: str, device: torch.device, op_args: tuple[Any, ...], backend: Backend | None) -> Implementation:
    """Select the backend for a call; each candidate is checked once. RuntimeError if the requested one refuses it."""
    name, source = requested(backend)
    key = OPS[op_name].backend_module
    if name is None:
        order = automatic_order(op_name, device, op_args)
    else:
        if (reason := unsupported_reason(key, name, op_args)) is None:
            return REGISTRY[key][name]
        if has_kernel(key, name):
            op = OPS[op_name].function.__name__
            raise RuntimeError(f"{op}: backend {name!r} ({source}) does not support this call: {reason}")
        order = GPU_ORDER
    for name in order:
        if unsupported_reason(key, name, op_args) is None:
            return REGISTRY[key][name]
    raise AssertionError("unreachable: the reference supports every call")


def likely_backend(op_name: str, device: torch.device, backend: Backend | None = None) -> str:
    """The backend that a call of the op probably uses, for decisions made before the call's arguments are known.

    It is the requested backend, or the one that a record names first for all calls of the op, or the first of the
    device's default order. Whether it supports the call is not checked. op_name may also be "linear", for nn.Linear:
    it is no op, and no record names it.
    """
    name, _ = requested(backend)
    if name is not None:
        return name
    if op_name in OPS and (choices := timings.choices(op_name, device.type, device.index)):
        recorded = {names[0] for names in choices.values()}
        if len(recorded) == 1 and recorded <= set(BACKENDS):
            return recorded.pop()
    return (GPU_ORDER if device.type == "cuda" else OTHER_ORDER)[0]
