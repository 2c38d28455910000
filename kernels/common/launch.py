"""What a launch asks of its device. Everything is read from the host: no kernel, no synchronisation."""

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

from fastattn.backends import constants

from . import INTERPRETED

DTYPES = constants.DTYPES


def refuse_device(x: Tensor) -> str | None:
    """Why the kernels cannot run where x lies, or None."""
    if INTERPRETED:
        return None
    if not x.is_cuda:
        return f"Triton runs on a GPU (on a CPU only under TRITON_INTERPRET=1), got tensors on {x.device}"
    return _refuse_gpu(x.device.index)


@torch.compiler.assume_constant_result  # torch.compile would write the question into its graph
def _refuse_gpu(index: int) -> str | None:
    return _gpu_problem(index)


@functools.cache
def _gpu_problem(index: int) -> str | None:
    gpu = _properties(index)
    if torch.version.hip is not None:
        return f"the Triton kernels need an NVIDIA GPU, got {gpu.name}"
    if gpu.major < 8:
        return f"the Triton kernels need compute capability 8.0, got {gpu.major}.{gpu.minor}"
    try:  # Triton now compiles its own module for the driver, unless that is in its cache: small images cannot
        driver.active.get_current_target()
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0] or type(error).__name__
        return f"Triton needs a C compiler, Python.h and libcuda.so, and could not start: {first_line}"
    return None


@functools.cache
def _properties(index: int) -> Any:
    return torch.cuda.get_device_properties(index)


def on_device(x: Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current device, so make it x's."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def current_arch() -> int:
    """Compute capability of the current device, 90 for sm_90; 0 in the interpreter. Call inside on_device."""
    return 0 if INTERPRETED else _arch(driver.active.get_current_device())


@functools.cache
def _arch(device: int) -> int:
    return driver.active.get_current_target().arch


def arch_of(x: Tensor) -> int:
    """current_arch() of x's device, which need not be the current one. May be called while a function is traced."""
    return _capability(x.device.index) if x.is_cuda and not INTERPRETED else current_arch()


@torch.compiler.assume_constant_result
def _capability(index: int) -> int:
    gpu = _properties(index)
    return 10 * gpu.major + gpu.minor


def multiprocessors(x: Tensor) -> int:
    """Streaming multiprocessors of x's device; 1 in the interpreter, so that persistent loops take several turns."""
    return _properties(x.device.index).multi_processor_count if x.is_cuda else 1


def dot_precision(dtype: torch.dtype) -> str:
    """input_precision of tl.dot: float32 is multiplied as torch multiplies it on a GPU, by default exactly."""
    if dtype != torch.float32:
        return "tf32"  # one name for the 16-bit types, which it does not touch: one compiled kernel
    return "tf32" if constants.uses_tf32() else "ieee"
