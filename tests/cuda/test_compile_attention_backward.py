"""What nvcc makes of the kernels of attention's backward, for every chip from sm_80 on.

Nothing spills; products run on tensor cores, but for those of exact float32; tiles are copied and loaded in vectors.
`pytest -rP` prints the kernels.
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

LOW, TYPES = {"__half", "__nv_bfloat16"}, {"__half", "__nv_bfloat16", "Tf32", "float"}
ALL = {(kind, str(head_dim)) for kind in TYPES for head_dim in (64, 128, 256)}
KERNELS = {
    "backward_dq_kernel": ALL,
    "backward_dkdv_kernel": ALL,
    "backward_rows_kernel": {(kind,) for kind in TYPES},
    "bias_gradient_kernel": {(kind,) for kind in TYPES},
    "short_backward_kernel": {(kind, head_dim) for kind in LOW for head_dim in ("64", "128")},
    "short_backward_wide_kernel": {(kind,) for kind in TYPES},
}


def kernels(name: str) -> dict[tuple[str, ...], list[Kernel]]:
    """Every instance of a kernel, by type and head dimension: one for each architecture."""
    found: dict[tuple[str, ...], list[Kernel]] = {}
    for kernel in cuda_kernels():
        if kernel.name == f"attention::{name}":
            print(kernel)
            found.setdefault(tuple(kernel.case.split(", ")), []).append(kernel)
    assert set(found) == KERNELS[name]
    assert {len(instances) for instances in found.values()} == {2}, "one for sm_80, one for Hopper"
    return found


@pytest.mark.parametrize("name", KERNELS)
def test_tensor_cores_and_vectors(name: str) -> None:
    for (kind, *_), instances in kernels(name).items():
        for kernel in instances:
            assert kernel.spills == 0, kernel
            assert kernel.blocks >= 1 and kernel.count("LDGSTS.128") >= 2, kernel
            assert kernel.count("LDSM") >= 4 and kernel.count("MUFU.EX2") >= 8, kernel
            # Two products at least, of 16 rows, 16 columns and 128 bytes of depth: steps of 32 bytes.
            assert kernel.count("HMMA") >= 16 if kind != "float" else kernel.tensor == 0, kernel


@pytest.mark.parametrize("name", ["backward_dq_kernel", "backward_dkdv_kernel"])
def test_blocks_a_multiprocessor(name: str) -> None:
    """Two blocks fill each other's waits."""
    for (kind, head_dim), instances in kernels(name).items():
        if kind in LOW and head_dim != "256":
            assert all(kernel.blocks >= 2 for kernel in instances)
