"""The registry of backends, and the choice of the one that an op's call uses.

The first of these that is set wins:

1. the argument ``backend=``,
2. the context ``use_backend()``,
3. the environment variable FASTATTN_BACKEND,
4. the rule for the device: `automatic_order`.

1 to 3 request a backend by name (`requested`). If it does not support the call, `choose` raises with the reason. If it
has no kernel for the op, or for attention's weights, the first backend of GPU_ORDER that supports the call is used: so
a backend can be requested for a whole model. 4 is the automatic choice: the first that supports the call is used.
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
from torch import Tensor

from fastattn._tracing import constant_in_traces, is_transformed, known_equal
from fastattn.backends.constants import NO_KERNEL, PACKAGE

Backend = Literal["reference", "aten", "triton", "cuda"]
BACKENDS: tuple[str, ...] = get_args(Backend)
# The orders that the rule chooses from. Triton's kernels support every mask, and their results repeat bit for bit.
GPU_ORDER = ("triton", "aten", "reference")
_ATEN_FIRST = ("aten", "triton", "reference")
_CUDA_FIRST = ("cuda", *GPU_ORDER)
_CUDA_THEN_ATEN = ("cuda", *_ATEN_FIRST)
_OTHER_DEVICES = ("aten", "reference")
MAX_DENSE_SCORES = 2**28  # 1 GiB in float32

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass
class Implementation:
    """An op in a backend. What follows `path` is set by the import.

    path: the module's dotted name.     failure: why there is no module, or None.
    differentiable: the module has DIFFERENTIABLE = True: its function, named as the op, is a formula for autograd.
        Other modules have functions for the forward and for the backward.
    """

    name: Backend
    path: str
    module: Any = None
    failure: str | None = None
    differentiable: bool = False


_PACKAGES: dict[Backend, str] = {name: f"{PACKAGE}.backends.{name}" for name in get_args(Backend)}
_PACKAGES["triton"] = f"{PACKAGE}.kernels"
_OP_NAMES = ("attention", "decode_attention", "add_layer_norm", "feed_forward", "linear_cross_entropy")
# op -> backend -> Implementation. "mask" and "search" are no ops: Triton has kernels that prepare masks and choose the
# next tokens. The table never changes, only the attributes of its entries: torch.compile keeps a dictionary as it was,
# and reads attributes again.
REGISTRY: dict[str, dict[str, Implementation]] = {
    op_name: {name: Implementation(name, f"{package}.{op_name}") for name, package in _PACKAGES.items()}
    for op_name in (*_OP_NAMES, "mask", "search")
}


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.name: Backend | None = None


# The backend of use_backend(). torch.compile cannot read a ContextVar, and guards attributes of a threading.local.
_task_override: ContextVar[Backend | None] = ContextVar("fastattn.use_backend", default=None)
_thread_state = _ThreadState()
_environment, _VARIABLE = cast(Any, os.environ)._data, os.environ.encodekey("FASTATTN_BACKEND")  # get() takes 1 us


@dataclass(frozen=True)
class Op:
    """An op's public function, and what the choice of a backend needs to know about its calls.

    validate: checks a call's arguments and returns (device, the arguments of unsupported_reason).
    backend_module: the op's key in REGISTRY: its own name, or for a variant of another op the other op's.
    """

    name: str
    function: Callable[..., Any]
    validate: Callable[..., tuple[torch.device, tuple[Any, ...]]]
    backend_module: str


OPS: dict[str, Op] = {}


def register(
    op_name: str, validate: Callable[..., tuple[torch.device, tuple[Any, ...]]], backend_module: str | None = None
) -> Callable[[Function], Function]:
    """Decorator of an op's public function: adds it to OPS, for `choose`, ``explain`` and the doctor."""

    def add(function: Function) -> Function:
        OPS[op_name] = Op(op_name, function, validate, backend_module or op_name)
        return function

    return add


def use_backend(name: Backend | None) -> AbstractContextManager[None]:
    """Every op called inside uses this backend: "reference", "aten", "triton" or "cuda"; None is the automatic choice.

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


def requested(backend: Backend | None, op_name: str | None = None) -> tuple[Backend | None, str]:
    """The backend requested by name, or None, and the source of the request.

    op_name: a key of REGISTRY; for another or None only what FASTATTN_BACKEND requests for every op counts.
    """
    if backend is not None:
        return _known(backend, "backend"), "backend="
    name, text = request_of_all_ops()
    if name is not None:
        return name, "use_backend()"
    if text and (name := _in_environment(text, op_name)) is not None:
        return name, "FASTATTN_BACKEND"
    return None, "automatic choice"


def request_of_all_ops() -> tuple[Backend | None, str]:
    """The backend of use_backend(), or None, and the text of FASTATTN_BACKEND. What is kept for later calls holds as
    long as both are the same."""
    if torch.compiler.is_compiling():  # its guards would be on all variables
        return _thread_state.name, os.environ.get("FASTATTN_BACKEND", "")
    text = _environment.get(_VARIABLE)
    return _task_override.get(), "" if text is None else os.environ.decodevalue(text)


@constant_in_traces
def _in_environment(text: str, op_name: str | None) -> Backend | None:
    """What FASTATTN_BACKEND requests for an op. text: "cuda", "attention=cuda,feed_forward=triton", or both kinds."""
    found: Backend | None = None
    for item in text.split(","):
        op, separator, name = item.strip().rpartition("=")
        if separator and op not in _OP_NAMES:
            raise ValueError(f"FASTATTN_BACKEND: the op before = must be one of {', '.join(_OP_NAMES)}, got {op!r}")
        backend = _known(name, f"FASTATTN_BACKEND{separator and f' for {op}'}")
        if op == op_name or (not separator and found is None):
            found = backend
    return found


def _known(name: str, source: str) -> Backend:
    if name not in BACKENDS:
        raise ValueError(f"{source} must be one of {', '.join(BACKENDS)}, got {name!r}")
    return cast(Backend, name)


def automatic_order(op_name: str, device: torch.device, op_args: tuple[Any, ...]) -> tuple[str, ...]:
    """The rule: the order in which the automatic choice tries the backends for a call.

    Each line names the rows of benchmarks/results/h200_backends.json that it wins. A kernel that no record times is not
    the first of its op. tests/backends/test_rule.py compares the rule with all rows.
    """
    if device.type != "cuda":
        return _OTHER_DEVICES
    on_hopper = _is_hopper(device)
    if op_name == "attention":
        return _attention_order(on_hopper, *op_args)
    if op_name == "feed_forward":  # cuBLAS and a pointwise kernel: within 4 % of the fastest in all 14 rows
        return _CUDA_FIRST if on_hopper else _ATEN_FIRST if op_args[0].dtype is torch.float32 else GPU_ORDER
    if OPS[op_name].backend_module == "add_layer_norm":  # 512 columns 1.28x of Triton, 4096 columns 0.86x
        return _CUDA_FIRST if on_hopper and op_args[0].shape[-1] <= 1024 else GPU_ORDER
    return GPU_ORDER


def _attention_order(on_hopper: bool, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[str, ...]:
    """The part of `automatic_order` for attention. float16 as bfloat16."""
    mask, dropout_p, softcap, *results = others  # return_weights, return_lse
    Lq, Lk, width = q.shape[2], k.shape[2], max(q.shape[3], v.shape[3])
    bias = None if mask is None else mask.any_bias
    if q.dtype is torch.float32:  # 4.4x of both kernels in 13 rows; for lse or a bias by distance it makes all scores
        is_dense = any(results) or (bias is not None and mask.relative_bias is not None)
        return GPU_ORDER if is_dense and q.shape[:3].numel() * Lk > MAX_DENSE_SCORES else _ATEN_FIRST
    # PyTorch's own kernels are fast without a mask, or causal alone. Their gradients may differ from run to run.
    is_plain = mask is None or (mask.band_only and known_equal(Lq, Lk) and mask.is_causal(Lq, Lk))
    is_plain = is_plain and bias is None and softcap is None and not any(results)
    is_plain = is_plain and not torch.are_deterministic_algorithms_enabled()
    if on_hopper and bias is None and softcap is None and width <= 128:
        if mask is None and is_plain and Lk > 128 and width > 64:  # 8192 tokens, D 128, full: 1.03x to 1.06x of CUDA
            return _ATEN_FIRST
        if Lk > 128:  # 192 keys and more: 1.3x to 2.1x of Triton; without a mask Triton is 0.65x to 0.73x of PyTorch
            return _CUDA_THEN_ATEN if is_plain else _CUDA_FIRST
        if mask is None and is_plain and Lk > 64 and dropout_p > 0:  # 128 tokens dropout: 1.26x of Triton
            return _ATEN_FIRST
    # Triton: up to 64 keys 1.4x to 1.6x of CUDA. Long plain calls on other GPUs: as on Hopper without CUDA kernels.
    return _ATEN_FIRST if is_plain and Lk > 512 else GPU_ORDER


@constant_in_traces
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


@constant_in_traces  # torch.compile traces no import
def import_failure(op_name: str, backend: str) -> str | None:
    """Import a backend's module of an op, once. Returns why there is none, or None. A broken module raises."""
    entry = REGISTRY[op_name][backend]
    if entry.module is None and entry.failure is None:
        try:
            module = importlib.import_module(entry.path)
        except ModuleNotFoundError as error:
            if error.name == entry.path:
                entry.failure = f"{NO_KERNEL} this op in {backend}"
            elif error.name == _PACKAGES["cuda"]:
                entry.failure = "this copy of fastattn has no CUDA C++ kernels"
            elif backend == "triton" and error.name == "triton":
                entry.failure = "triton is not installed (on Windows: triton-windows)"
            else:
                raise
        else:
            entry.differentiable = getattr(module, "DIFFERENTIABLE", False)
            entry.module = module
    return entry.failure


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
    reason_of_module = getattr(REGISTRY[op_name][backend].module, "unsupported_reason", None)
    return None if reason_of_module is None else reason_of_module(*op_args)


def choose(op_name: str, device: torch.device, op_args: tuple[Any, ...], backend: Backend | None) -> Implementation:
    """Select the backend for a call; each candidate is checked once. RuntimeError if the requested one refuses it."""
    key = OPS[op_name].backend_module
    name, source = requested(backend, key)
    if name is None:
        order = automatic_order(op_name, device, op_args)
    else:
        if (reason := unsupported_reason(key, name, op_args)) is None:
            return REGISTRY[key][name]
        if not reason.startswith(NO_KERNEL):
            op = OPS[op_name].function.__name__
            raise RuntimeError(f"{op}: backend {name!r} ({source}) does not support this call: {reason}")
        order = GPU_ORDER
    # The last of each order, the reference, supports every call.
    for name in order:
        if unsupported_reason(key, name, op_args) is None:
            break
    return REGISTRY[key][name]


def likely_backend(op_name: str, device: torch.device, backend: Backend | None = None) -> str:
    """The backend that a call of the op probably uses, for decisions made before the call's arguments are known.

    It is the requested backend, or the first of the device's most frequent order. Whether it supports the call is not
    checked. op_name may also be "linear", for nn.Linear, which is no op.
    """
    name, _ = requested(backend, op_name)
    return name or (GPU_ORDER if device.type == "cuda" else _OTHER_DEVICES)[0]
