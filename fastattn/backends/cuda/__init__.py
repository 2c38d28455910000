"""The CUDA C++ backend: `fastattn.backends.cuda.<op>` checks what its kernel can serve and calls the extension fastattn._C.

The same sources also run on a CPU, thread by thread, in a second build of the extension against csrc/emulator. It exists
for tests: `load_emulator(path)`, or the environment's FASTATTN_CUDA_EMULATOR=path, makes the backend serve CPU
tensors through it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import os
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from fastattn.backends import constants

# How the extension numbers dtypes: csrc/common/dtype_switch.h.
DTYPES = {dtype: number for number, dtype in enumerate(constants.DTYPES)}

_emulator: ModuleType | None = None


def load_emulator(path: str | Path | None) -> None:
    """From now on the CUDA backend serves CPU tensors, through the extension at `path`, built against csrc/emulator.

    None: it refuses CPU tensors again.
    """
    global _emulator
    _emulator = None if path is None else _load(Path(path))


@cache
def _load(path: Path) -> ModuleType:
    name = str(path.parent).replace(".", "_") + "._C"  # pybind11 takes two modules of one name for the same
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    if module.device_type != "cpu":
        raise ValueError(f"{path} was built for {module.device_type}, not against csrc/emulator")
    return module


if _path := os.environ.get("FASTATTN_CUDA_EMULATOR"):
    load_emulator(_path)


@cache
def _compiled() -> ModuleType | str:
    """fastattn._C, or why it cannot be imported."""
    try:
        return importlib.import_module("fastattn._C")
    except ModuleNotFoundError:
        if (installed := _installed_elsewhere()) is not None:
            return (
                f"fastattn._C is installed in {installed}, but Python took fastattn from {Path(__file__).parents[1]}, "
                "as in a checkout it does: start it in another folder, or pip install -e the checkout"
            )
        return (
            "fastattn._C is not installed: the install found no nvcc, skipped CUDA or failed to compile. In the "
            "sources, FASTATTN_FORCE_CUDA=1 pip install . says which (CUDA_HOME names the toolkit)"
        )
    except ImportError as error:
        return f"fastattn._C cannot be imported: {error}"


def _installed_elsewhere() -> Path | None:
    """The folder of an installed fastattn with _C, in place of which another fastattn runs."""
    for distribution in importlib.metadata.distributions(name="fastattn"):
        for file in distribution.files or ():
            if file.parent.as_posix() == "fastattn" and file.name.startswith("_C."):
                return Path(distribution.locate_file(file)).parent
    return None


def extension(device: torch.device) -> ModuleType:
    """The extension for tensors of this device, which refuse_device() accepted."""
    module = _compiled() if device.type == "cuda" else _emulator
    assert isinstance(module, ModuleType), f"refuse_device() refuses {device}"
    return module


@torch.compiler.assume_constant_result  # torch.compile traces neither imports nor C++, and warns of caches
def _refuse_gpu(index: int) -> str | None:
    return _gpu_problem(index)


@cache
def _gpu_problem(index: int) -> str | None:
    module = _compiled()
    return module if isinstance(module, str) else module.device_problem(index) or None


def refuse_device(x: Tensor) -> str | None:
    """None if CUDA kernels can run on x's device, or why they cannot."""
    if x.device.type == "cpu":
        if _emulator is None:
            return "CUDA kernels need GPU tensors, got a CPU tensor"
        return None
    if x.device.type != "cuda":
        return f"CUDA kernels need GPU tensors, got a tensor on {x.device}"
    return _refuse_gpu(device_index(x))


def device_index(x: Tensor) -> int:
    """The GPU to run on; 0 for the CPU runner."""
    if x.device.type == "cpu":
        return 0
    return torch.cuda.current_device() if x.device.index is None else x.device.index


def compute_capability(x: Tensor) -> int:
    """10 * major + minor of x's device; of the CPU runner, what its environment says, which tests change."""
    return capability_of(x.device.type == "cpu", device_index(x))


def capability_of(on_cpu: bool, index: int) -> int:
    """The same of a GPU, or of the CPU runner, which is asked every time."""
    return extension(torch.device("cpu")).compute_capability(0) if on_cpu else _gpu_capability(index)


@cache
def _gpu_capability(index: int) -> int:
    return extension(torch.device("cuda")).compute_capability(index)


def stream(x: Tensor) -> int:
    """The raw handle of the current stream of x's device."""
    return 0 if x.device.type == "cpu" else torch._C._cuda_getCurrentRawStream(device_index(x))


def address(x: Tensor | None) -> int:
    """Where the elements start; 0 for None."""
    return 0 if x is None else x.data_ptr()


def typed(x: Tensor | None) -> tuple[int, int]:
    """A tensor whose type the kernel is told: (address, its dtype's number; of integers, their size)."""
    return (0, 0) if x is None else (x.data_ptr(), DTYPES.get(x.dtype, x.element_size()))
