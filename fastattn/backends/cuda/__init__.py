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
from typing import Any

import torch
from torch import Tensor

from fastattn._tracing import constant_in_traces

# What the backend calls in the extension, by which an older one is recognised.
FUNCTIONS = """
add_layer_norm_bwd add_layer_norm_bwd_grid add_layer_norm_fwd attention_bwd attention_fwd attention_rows_bwd
attention_rows_fwd attention_tiles attention_work_sm90 compute_capability device_problem feed_forward_bwd
feed_forward_fwd
""".split()

_emulator: ModuleType | None = None


def load_emulator(path: str | Path | None) -> None:
    """From now on the CUDA backend runs CPU tensors by the extension at `path`, built against csrc/emulator. With None
    it refuses CPU tensors again."""
    global _emulator
    _emulator = None if path is None else _load(Path(path))


@cache
def _load(path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader("_C", str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("_C", loader))
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
        module = importlib.import_module("fastattn._C")
        if missing := [name for name in FUNCTIONS if not hasattr(module, name)]:
            return f"fastattn._C is of another version of fastattn, without {missing[0]}: install fastattn again"
        return module
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
                return Path(str(distribution.locate_file(file))).parent
    return None


def extension(on_gpu: bool) -> Any:
    """The extension for tensors on a GPU, or on a CPU; refuse_device() must have accepted one. Its functions take
    tensors as they are."""
    return _compiled() if on_gpu else _emulator


@constant_in_traces  # torch.compile cannot trace imports or C++
def _refuse_gpu(index: int) -> str | None:
    return _gpu_problem(index)


@cache
def _gpu_problem(index: int) -> str | None:
    module = _compiled()
    return module if isinstance(module, str) else module.device_problem(index) or None


def refuse_device(x: Tensor) -> str | None:
    """Why CUDA kernels cannot run on x's device, or None."""
    if x.is_cuda:
        return _refuse_gpu(device_index(x))
    if not x.is_cpu:
        return f"CUDA kernels need GPU tensors, got a tensor on {x.device}"
    return "CUDA kernels need GPU tensors, got a CPU tensor" if _emulator is None else None


def device_index(x: Tensor) -> int:
    """The GPU to run on; 0 for the emulator."""
    if x.is_cpu:
        return 0
    index = x.device.index
    return torch.cuda.current_device() if index is None else index


def compute_capability(x: Tensor) -> int:
    """10 * major + minor of x's device."""
    return _capability(x.is_cpu, device_index(x))


@constant_in_traces  # torch.compile cannot trace C++
def _capability(on_cpu: bool, index: int) -> int:
    return _emulator.compute_capability(0) if on_cpu else _gpu_capability(index)  # tests change the emulator's


@cache
def _gpu_capability(index: int) -> int:
    return extension(on_gpu=True).compute_capability(index)
