"""fastattn._C as setup.py builds it with nvcc for sm_80 and sm_90a.

It imports without a driver; its kernels do not spill, and access memory 16 bytes at a time. `pytest -rP` prints them.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import host_build
import pytest

ROOT = host_build.CSRC.parent
ARCHS = ("80", "90a")
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


class Build(NamedTuple):
    folder: Path  # of the package with _C
    objects: list[Path]
    said: str


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on PATH")
    folder = tmp_path_factory.mktemp("build")
    settings = {
        "FASTATTN_FORCE_CUDA": "1",
        "FASTATTN_SKIP_CUDA": "0",
        "FASTATTN_CUDA_ARCHS": ";".join(ARCHS),
        "NVCC_APPEND_FLAGS": "-Xptxas -v",
    }
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", folder / "lib", "--build-temp", folder / "temp"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return Build(folder / "lib" / "fastattn", sorted((folder / "temp").glob("*.cu.o")), said)


def test_imports_without_a_driver(build: Build) -> None:
    """The extension loads anywhere; asked for a device where there is none, it says so in an exception."""
    program = "import _C; assert _C.device_type == 'cuda'; print(_C.device_problem(0) or 'none')"
    environment = os.environ | {"PYTHONPATH": str(build.folder), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert "no NVIDIA driver" in done.stdout or "no CUDA-capable device" in done.stderr, done.stdout + done.stderr


@pytest.fixture(scope="module")
def kernels(build: Build) -> list[Kernel]:
    """Every instance of the layer norm's kernels."""
    if (cuobjdump := find_cuobjdump()) is None:
        pytest.skip("cuobjdump is neither on PATH nor in the triton package")
    accesses: dict[tuple[str, str], Counter[str]] = {}
    for target in build.objects:
        sass = subprocess.run([cuobjdump, "-sass", target], capture_output=True, text=True, check=True).stdout
        for section in sass.split("Fatbin elf code")[1:]:
            arch = re.search(r"arch = sm_(\w+)", section)[1]
            for name, body in re.findall(r"Function : (\S+)\n(.*?)(?=Function :|\Z)", section, re.DOTALL):
                accesses[arch, name] = Counter(re.findall(r"\b(?:LDG|STG)[.\w]*", body))
    used = r"Compiling entry function '(\S+)' for 'sm_(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers"
    kernels = []
    for name, arch, spilled, registers in re.findall(used, build.said, re.DOTALL):
        if parts := re.search(r"\d(forward|backward)_kernelI(f|13__nv_bfloat16|6__half)(f|S3_)Li(\d)ELb([01])E", name):
            direction, x, weight, chunks, vectors = parts.groups()
            types = f"{TYPES[x]}, weight {TYPES[weight]}"
            numbers = int(registers), int(spilled), accesses[arch, name]
            kernels.append(Kernel(arch, direction, types, int(chunks), vectors == "1", *numbers))
    return kernels


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
