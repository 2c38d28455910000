"""What a launch must know of its device and tensors. No kernel runs for it, and nothing waits for the device."""

import contextlib
import functools
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime import driver

from fastattn.backends import constants

from . import INTERPRETED

DTYPES = constants.DTYPES


def unsupported_tensors(op: str, **tensors: Tensor | None) -> str | None:
    """Why an op's kernels cannot take these tensors, all on one device, or None. It reads dtype and device only."""
    for name, t in tensors.items():
        if t is not None and t.dtype not in DTYPES:
            return f"{op} in Triton takes float32, bfloat16 and float16, got {name} in {t.dtype}"
    return unsupported_device(next(iter(tensors.values())))


def unsupported_device(x: Tensor) -> str | None:
    """Why the kernels cannot run on x's device, or None."""
    if INTERPRETED:
        return None
    if not x.is_cuda:
        return f"Triton runs on a GPU (on a CPU only under TRITON_INTERPRET=1), got tensors on {x.device}"
    return _constant_gpu_problem(x.device.index)


@torch.compiler.assume_constant_result  # torch.compile would put the question into its graph
def _constant_gpu_problem(index: int) -> str | None:
    return _gpu_problem(index)


@functools.cache
def _gpu_problem(index: int) -> str | None:
    gpu = _properties(index)
    if torch.version.hip is not None:
        return f"the Triton kernels need an NVIDIA GPU, got {gpu.name}"
    if gpu.major < 8:
        return f"the Triton kernels need compute capability 8.0, got {gpu.major}.{gpu.minor}"
    try:  # Triton now compiles its driver module, unless it is in the cache. A small image may have no compiler.
        driver.active.get_current_target()
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0] or type(error).__name__
        return f"Triton needs a C compiler, Python.h and libcuda.so, and could not start: {first_line}"
    return None


@functools.cache
def _properties(index: int) -> Any:
    return torch.cuda.get_device_properties(index)


def on_device(x: Tensor) -> contextlib.AbstractContextManager:
    """Makes x's device the current one, on which Triton launches."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def gpu_arch(x: Tensor) -> int:
    """Compute capability of x's device, 90 for sm_90; 0 in the interpreter. It can be called in a trace."""
    if INTERPRETED:
        return 0
    # Kernels may also be compiled with tensors on a CPU, for a GPU that is not here (tools/precompile.py).
    return _capability(x.device.index) if x.is_cuda else driver.active.get_current_target().arch


@torch.compiler.assume_constant_result
def _capability(index: int) -> int:
    gpu = _properties(index)
    return 10 * gpu.major + gpu.minor


def multiprocessors(x: Tensor) -> int:
    """Streaming multiprocessors of x's device; 1 in the interpreter, so that persistent loops run several times."""
    return _properties(x.device.index).multi_processor_count if x.is_cuda else 1


@functools.cache
def padded_dim(size: int) -> int:
    """The size of a tile along a dimension: tl.dot and tl.arange need a power of two, and at least 16."""
    return max(16, triton.next_power_of_2(size))


def dot_precision(dtype: torch.dtype) -> str:
    """input_precision of tl.dot. float32 is multiplied as torch multiplies it on a GPU: exactly, by default."""
    if dtype != torch.float32:
        return "tf32"  # one name for the 16-bit types, which it does not touch: one compiled kernel
    return "tf32" if constants.uses_tf32() else "ieee"
