"""What nvcc makes of the feed-forward's kernels: nothing spills, products run on tensor cores, by wgmma that is not
serialized on Hopper, and memory is accessed 16 bytes at a time. `pytest -rP` prints the kernels.
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

ARCHS = ("sm_80", "sm_90a")


def kernels(*names: str) -> list[Kernel]:
    found = [k for k in cuda_kernels() if k.name in {f"feed_forward::{name}_kernel" for name in names}]
    for kernel in found:
        print(kernel)
        assert kernel.spills == 0 and kernel.stack == 0, kernel
    return found


def test_products() -> None:
    """A warp's 32 x 64 and two steps of 16 along the depth are 32 mma; registers allow two blocks a multiprocessor."""
    found = kernels("forward_product", "backward_product")
    assert len(found) == 2 * 2 * len(ARCHS)
    for kernel in found:
        assert kernel.count("HMMA") == 32 and kernel.count("LDSM") == 2 * (2 + 4), kernel
        assert kernel.count("LDGSTS.128") >= 4 and kernel.registers <= 128, kernel
        assert kernel.count("STG.128") >= 2 and kernel.count("LDG.16", "STG.16") == 0, kernel


def test_products_on_hopper() -> None:
    """Four wgmma of 64 x 256 x 16 a step, under one fence and one wait."""
    found = kernels("forward_product_sm90", "backward_product_sm90")
    assert len(found) == 2 * 2 and all(kernel.arch == "sm_90a" for kernel in found)
    for kernel in found:
        assert kernel.count("HGMMA") == 4 and kernel.count("HMMA") == 0 and not kernel.serialized, kernel
        assert kernel.count("WARPGROUP.ARRIVE") == 1 and kernel.count("WARPGROUP.DEPBAR") == 2, kernel
        assert kernel.count("UTMALDG") >= 3, kernel
        assert kernel.count("STG.128") >= 2 and kernel.count("LDG.16", "STG.16") == 0, kernel


def test_pointwise() -> None:
    found = kernels("forward_pointwise", "backward_pointwise")
    assert len(found) == 2 * 3 * 2 * len(ARCHS)  # directions, types, vectors or elements
    for kernel in found:
        vectors = kernel.case.endswith("true")
        assert (kernel.count("LDG.128") >= 2) == (kernel.count("STG.128") >= 2) == vectors, kernel
        assert not vectors or kernel.count("LDG.16", "STG.16") == 0, kernel


def test_bias_gradient() -> None:
    assert len(kernels("add_partial")) == 3 * len(ARCHS)
