"""What nvcc makes of the cross-entropy's kernel: nothing spills, registers allow two blocks a multiprocessor, accesses
of memory are 16 bytes wide. `pytest -rP` prints the kernels.
"""

from __future__ import annotations

import sys

import host_build
import pytest

sys.path.insert(0, str(host_build.CSRC.parent / "benchmarks"))

import compiled_cuda  # noqa: E402
from compiled_kernels import cuda_kernels  # noqa: E402
from compiled_sass import Kernel  # noqa: E402

if reason := compiled_cuda.why_not():
    pytest.skip(reason, allow_module_level=True)


def kernels() -> list[Kernel]:
    found = [k for k in cuda_kernels() if k.name == "linear_cross_entropy::rows_kernel"]
    assert len(found) == 3 * 2  # types, architectures
    return found


def test_registers_and_spills() -> None:
    for kernel in kernels():
        print(kernel)
        assert kernel.spills == 0 and kernel.stack == 0 and kernel.registers <= 64, kernel


def test_memory_accesses_are_vectors() -> None:
    """64 bytes of logits and of bias are four loads, in each of two sweeps; beside the gradient's chunks a zero one is
    written. The columns behind the chunks, and the target's logit and bias, go one by one."""
    for kernel in kernels():
        words = 2 if kernel.case == "float" else 1  # of a chunk
        assert kernel.count("LDG.128") == 2 * (4 + 4) and kernel.count("STG.128") == 4 + words, kernel
        assert kernel.count("LDG.16") <= 8 and kernel.count("STG.16") <= 3, kernel
