"""The CUDA C++ backend: `fastattn.backends.cuda.<op>` checks whether its kernel supports a call and calls fastattn._C.

For tests, the same sources also run on a CPU, thread by thread: a second build of the extension, against csrc/emulator.
`load_emulator(path)`, or the environment's FASTATTN_CUDA_EMULATOR=path, makes the backend accept CPU tensors.
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
    """From now on the CUDA backend runs CPU tensors by the extension at `path`, built against csrc/emulator; None: it
    refuses CPU tensors again."""
    global _emulator
    _emulator = None if path is None else _load(Path(path))


@cache
def _load(path: Path) -> ModuleType:
    name = str(path.parent).replace(".", "_") + "._C"  # pybind11 needs a name for each module
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
                f"fastattn._C is installed in {installed}, but Python imported fastattn from "
                f"{Path(__file__).parents[2]}: start Python in another folder, or pip install -e that checkout"
            )
        return (
            "fastattn._C is not installed: the install found no nvcc, skipped CUDA or failed to compile. In the "
            "sources, FASTATTN_FORCE_CUDA=1 pip install . shows which (CUDA_HOME names the toolkit)"
        )
    except ImportError as error:
        return f"fastattn._C cannot be imported: {error}"


def _installed_elsewhere() -> Path | None:
    """The folder of an installed fastattn that has _C, when Python imported another fastattn."""
    for distribution in importlib.metadata.distributions(name="fastattn"):
        for file in distribution.files or ():
            if file.parent.as_posix() == "fastattn" and file.name.startswith("_C."):
                return Path(distribution.locate_file(file)).parent
    return None


def extension(device: torch.device) -> ModuleType:
    """The extension for tensors on this device; refuse_device() must have accepted it."""
    module = _compiled() if device.type == "cuda" else _emulator
    assert isinstance(module, ModuleType), f"refuse_device() refuses {device}"
    return module


@torch.compiler.assume_constant_result  # torch.compile cannot trace imports or C++
def _refuse_gpu(index: int) -> str | None:
    return _gpu_problem(index)


@cache
def _gpu_problem(index: int) -> str | None:
    module = _compiled()
    return module if isinstance(module, str) else module.device_problem(index) or None


def refuse_device(x: Tensor) -> str | None:
    """Why CUDA kernels cannot run on x's device, or None."""
    if x.device.type == "cpu":
        if _emulator is None:
            return "CUDA kernels need GPU tensors, got a CPU tensor"
        return None
    if x.device.type != "cuda":
        return f"CUDA kernels need GPU tensors, got a tensor on {x.device}"
    return _refuse_gpu(device_index(x))


def device_index(x: Tensor) -> int:
    """The GPU to run on; 0 for the emulator."""
    if x.device.type == "cpu":
        return 0
    return torch.cuda.current_device() if x.device.index is None else x.device.index


def compute_capability(x: Tensor) -> int:
    """10 * major + minor of x's device."""
    return _capability(x.device.type == "cpu", device_index(x))


@torch.compiler.assume_constant_result  # torch.compile cannot trace C++
def _capability(on_cpu: bool, index: int) -> int:
    return _emulator.compute_capability(0) if on_cpu else _gpu_capability(index)  # tests change the emulator's answer


@cache
def _gpu_capability(index: int) -> int:
    return extension(torch.device("cuda")).compute_capability(index)


def stream(x: Tensor) -> int:
    """The raw handle of the current stream of x's device."""
    return 0 if x.device.type == "cpu" else torch._C._cuda_getCurrentRawStream(device_index(x))


def address(x: Tensor | None) -> int:
    """The address of the first element; 0 for None."""
    return 0 if x is None else x.data_ptr()


def typed(x: Tensor | None) -> tuple[int, int]:
    """(address, number of the dtype, or size of an integer) of a tensor whose dtype the kernel reads when it runs."""
    return (0, 0) if x is None else (x.data_ptr(), DTYPES.get(x.dtype, x.element_size()))


def dropout_args(rng_state: Tensor | None, dropout_p: float) -> tuple[int, int, float]:
    """struct Dropout: (address, threshold, scale), by the rule of fastattn/backends/reference/philox.py."""
    return address(rng_state), *constants.dropout_constants(dropout_p)
