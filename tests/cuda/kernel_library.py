"""Calls the kernels of a .cu file in this folder, which tests the CPU runner. See kernel_table.h."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path

import emulator_build
from emulator_build import CSRC
from torch import Tensor

FOLDER = Path(__file__).parent


class Kernels:
    def __init__(self, path: Path, device: str = "cpu") -> None:
        self.device = device
        self.run_kernel = ctypes.CDLL(str(path)).run_kernel
        self.run_kernel.restype = ctypes.c_char_p

    def run(self, name: str, tensors: Sequence[Tensor], numbers: Sequence[int] = (), bug: int = 0) -> None:
        """RuntimeError with what the runner found."""
        pointers = (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))
        if message := self.run_kernel(name.encode(), bug, pointers, (ctypes.c_int * len(numbers))(*numbers)):
            raise RuntimeError(message.decode())


def build(name: str, folder: Path) -> Kernels:
    """The kernels of a file, for the CPU."""
    return Kernels(emulator_build.build(name, [FOLDER / f"{name}.cu"], folder))


def build_for_hopper(folder: Path) -> Path:
    """The library of hopper.cu, for the GPU."""
    target = folder / "hopper.so"
    options = "-std=c++17 -O2 -shared -Xcompiler=-fPIC -gencode=arch=compute_90a,code=sm_90a".split()
    sources = [FOLDER / "hopper.cu", CSRC / "common" / "sm90" / "tensor_map.cpp"]
    done = subprocess.run(["nvcc", *options, f"-I{CSRC}", *sources, "-o", target], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target
