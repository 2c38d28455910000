"""benchmarks/compiled_kernels.py for the tests of this folder: what it compiled for its own record is gated here."""

from __future__ import annotations

from compiled_kernels import triton_kernels
from compiled_sass import Kernel
from compiled_triton import Case


def kernels_of(case: Case) -> dict[str, Kernel]:
    """The kernels that a case launches, by name; printed, and each fits its architecture."""
    found = {}
    for kernel in triton_kernels():
        if (kernel.arch, kernel.case) == (case.arch, str(case)):
            print(kernel)
            assert kernel.blocks > 0, f"does not fit: {kernel}"
            found[kernel.name] = kernel
    return found


def assert_products_on_tensor_cores(kernel: Kernel) -> None:
    """By wgmma on sm_90a: mma.sync is there too, at about half the speed."""
    assert kernel.tensor_core_dots == kernel.dots, f"a product without tensor cores: {kernel}"
    assert kernel.tensor > 0, f"no tensor core instruction: {kernel}"
    assert kernel.arch != "sm_90a" or kernel.count("HMMA") == 0, f"a product falls back to mma.sync: {kernel}"
