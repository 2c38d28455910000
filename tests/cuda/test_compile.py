"""What nvcc makes of the CUDA kernels for sm_80 and sm_90a: registers, spills, and the width of memory accesses."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shutil
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import host_build
import pytest

ARCHS = ("80", "90a")
FILES = ("add_layer_norm/forward.cu", "add_layer_norm/backward.cu")
TYPES = {"f": "fp32", "13__nv_bfloat16": "bf16", "6__half": "fp16", "S3_": "as x"}


class Kernel(NamedTuple):
    """A compiled kernel: a template instance of the layer norm's forward_kernel or backward_kernel."""

    arch: str
    direction: str
    types: str
    chunks: int
    vectors: bool
    registers: int
    spilled_bytes: int
    accesses: Counter[str]  # of global memory, by instruction


def find_cuobjdump() -> str | None:
    """The toolkit's, or the one that triton brings."""
    spec = importlib.util.find_spec("triton")
    triton = [f"{path}/backends/nvidia/bin" for path in (spec.submodule_search_locations if spec else ())]
    return shutil.which("cuobjdump") or shutil.which("cuobjdump", path=":".join(triton))


def compile_file(arch: str, file: str, folder: Path) -> list[Kernel]:
    target = folder / f"{Path(file).stem}-{arch}.cubin"
    command = ["nvcc", "-std=c++17", "-O3", "-Xptxas", "-v", f"-arch=sm_{arch}", f"-I{host_build.CSRC}", "-cubin"]
    done = subprocess.run([*command, host_build.CSRC / file, "-o", target], capture_output=True, text=True)
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
    sass = subprocess.run([find_cuobjdump(), "-sass", target], capture_output=True, text=True, check=True).stdout
    functions = re.findall(r"Function : (\S+)\n(.*?)(?=Function :|\Z)", sass, re.DOTALL)
    accesses = {name: Counter(re.findall(r"\b(?:LDG|STG)[.\w]*", body)) for name, body in functions}
    used = r"Compiling entry function '(\S+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers"
    kernels = []
    for name, spilled, registers in re.findall(used, done.stderr, re.DOTALL):
        if parts := re.search(r"\d(forward|backward)_kernelI(f|13__nv_bfloat16|6__half)(f|S3_)Li(\d)ELb([01])E", name):
            direction, x, weight, chunks, vectors = parts.groups()
            types = f"{TYPES[x]}, weight {TYPES[weight]}"
            numbers = int(registers), int(spilled), accesses[name]
            kernels.append(Kernel(arch, direction, types, int(chunks), vectors == "1", *numbers))
    return kernels


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on PATH")
    if find_cuobjdump() is None:
        pytest.skip("cuobjdump is neither on PATH nor in the triton package")
    folder = tmp_path_factory.mktemp("nvcc")
    jobs = list(itertools.product(ARCHS, FILES))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [kernel for found in pool.map(lambda job: compile_file(*job, folder), jobs) for kernel in found]


def test_registers_and_spills(kernels: list[Kernel]) -> None:
    """Nothing spills, but for the backward of unaligned rows wider than 8192, and there a few bytes only."""
    assert len(kernels) == 2 * 2 * 5 * 3 * 2  # architectures, directions, types, chunks, vectors or elements
    for k in kernels:
        path = "vectors" if k.vectors else "elements"
        print(f"sm_{k.arch:<4}{k.direction:<9}{k.types:<18}{k.chunks} chunks, {path:<9}", end="")
        print(f"{k.registers:>4} registers, {k.spilled_bytes} bytes spilled")
    for k in kernels:
        allowed = 32 if (k.direction, k.chunks, k.vectors) == ("backward", 4, False) else 0
        assert k.spilled_bytes <= allowed, k


def test_memory_accesses_are_vectors(kernels: list[Kernel]) -> None:
    """Aligned rows are read and written 16 bytes at a time: every chunk, and no 16-bit access is left."""
    for k in kernels:
        loads, stores = (sum(n for op, n in k.accesses.items() if op.startswith(kind) and ".128" in op)
                         for kind in ("LDG", "STG"))  # fmt: skip
        narrow = sum(n for op, n in k.accesses.items() if ".U16" in op)
        if k.vectors:
            assert loads >= 2 * k.chunks and stores >= 2 and narrow == 0, k
        else:
            assert loads == stores == 0, k
