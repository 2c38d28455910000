"""fastattn._C as setup.py builds it with nvcc, for sm_80 and sm_90.

It imports without a driver; the layer norm's kernels do not spill, and access memory 16 bytes at a time. The build is
that of benchmarks/compiled_kernels.py. `pytest -rP` prints the kernels.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import host_build
import pytest

sys.path.insert(0, str(host_build.CSRC.parent / "benchmarks"))

import compiled_cuda  # noqa: E402
from compiled_kernels import cuda_extension, cuda_kernels  # noqa: E402
from compiled_sass import Kernel  # noqa: E402

if reason := compiled_cuda.why_not():
    pytest.skip(reason, allow_module_level=True)


def test_imports_without_a_driver() -> None:
    """The extension loads anywhere; asked for a device where there is none, it says so in an exception."""
    program = "import _C; assert _C.device_type == 'cuda'; print(_C.device_problem(0) or 'none')"
    environment = os.environ | {"PYTHONPATH": str(cuda_extension().parent), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert "no NVIDIA driver" in done.stdout or "no CUDA-capable device" in done.stderr, done.stdout + done.stderr


def layer_norms() -> list[tuple[Kernel, str, int, bool]]:
    """Every instance of the layer norm's two kernels, with its direction, chunks, and whether it uses vectors."""
    found = []
    for kernel in cuda_kernels():
        if kernel.name in ("add_layer_norm::forward_kernel", "add_layer_norm::backward_kernel"):
            _, _, chunks, aligned = kernel.case.split(", ")
            direction = kernel.name.split("::")[1].removesuffix("_kernel")
            found.append((kernel, direction, int(chunks), aligned == "true"))
    assert len(found) == 2 * 2 * 5 * 3 * 2  # architectures, directions, types, chunks, vectors or elements
    return found


def test_registers_and_spills() -> None:
    """Nothing spills, but for the backward of unaligned rows wider than 8192, and there a few registers only."""
    for kernel, direction, chunks, vectors in layer_norms():
        print(kernel)
        allowed = 16 if (direction, chunks, vectors) == ("backward", 4, False) else 0
        assert kernel.spills <= allowed, kernel


def test_memory_accesses_are_vectors() -> None:
    """Aligned rows are read and written 16 bytes at a time: every chunk, and no 16-bit access is left, but for the sums
    that a backward writes once, at its end, where they are the gradients of 16-bit weights and x_bias."""
    for kernel, direction, chunks, vectors in layer_norms():
        loads, stores = kernel.count("LDG.128"), kernel.count("STG.128")
        finishes = direction == "backward" and chunks < 4
        if vectors:
            assert loads >= 2 * chunks and stores >= 2 and kernel.count("LDG.16") == 0, kernel
            assert kernel.count("STG.16") == 0 or finishes, kernel
        else:
            assert loads == stores == 0, kernel


def embeddings() -> list[tuple[Kernel, int, bool]]:
    """Every instance of the embedding's two kernels, with its chunks, and whether it uses vectors."""
    kernels = [k for k in cuda_kernels() if re.fullmatch(r"embed_layer_norm::(for|back)ward_kernel", k.name)]
    assert len(kernels) == 2 * 2 * 3 * 2  # architectures, directions, chunks, vectors or elements
    return [(kernel, int(kernel.case.split(", ")[0]), kernel.case.endswith("true")) for kernel in kernels]


def test_embedding_does_not_spill() -> None:
    """But for the backward of rows wider than 8192, where half of a thread's registers are sums."""
    for kernel, chunks, vectors in embeddings():
        print(kernel)
        allowed = (40 if vectors else 110) if chunks == 4 and "backward" in kernel.name else 0
        assert kernel.spills <= allowed, kernel


def test_embedding_reads_vectors() -> None:
    """Two loads for each chunk of each operand, of which 16-bit types skip the second; elements where rows are
    unaligned. Single 16-bit elements are left only where the backward writes sums."""
    for kernel, chunks, vectors in embeddings():
        loads, stores = kernel.count("LDG.128"), kernel.count("STG.128")
        if vectors:
            assert loads >= 2 * 2 * chunks and stores >= 2 and kernel.count("LDG.16") == 0, kernel
            assert kernel.count("STG.16") == 0 or "backward" in kernel.name, kernel
        else:
            assert loads == stores == 0, kernel
