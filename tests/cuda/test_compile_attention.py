"""What nvcc makes of attention's kernels for every chip from sm_80 on: nothing spills, products run on tensor cores but
for those of exact float32, tiles are copied and loaded in whole vectors. `pytest -rP` prints the kernels.
"""

from __future__ import annotations

import sys

import host_build
import pytest

sys.path.insert(0, str(host_build.CSRC.parent / "benchmarks"))

import compiled_cuda  # noqa: E402
from compiled_kernels import cuda_extension, cuda_kernels  # noqa: E402
from compiled_sass import Kernel  # noqa: E402

if reason := compiled_cuda.why_not():
    pytest.skip(reason, allow_module_level=True)

ARCHS = ("sm_80", "sm_90a")
TENSOR_TYPES, TYPES = ("__half", "__nv_bfloat16", "Tf32"), ("__half", "__nv_bfloat16", "Tf32", "float")
HEAD_DIMS = (64, 128, 256)
PREPARATION = {
    f"attention::{name}_kernel"
    for name in ("make_spans", "pack_bits", "transpose_bits", "classify_tiles", "list_tiles", "seen_keys")
}


def kernels(name: str) -> dict[tuple[str, str, int], Kernel]:
    """Every instance of a kernel, by architecture, type and head dimension."""
    found = {}
    for kernel in cuda_kernels():
        if kernel.name == f"attention::{name}":
            print(kernel)
            kind, head_dim = kernel.case.split(", ")
            found[kernel.arch, kind, int(head_dim)] = kernel
    expected = {(arch, kind, head_dim) for arch in ARCHS for kind in TYPES for head_dim in HEAD_DIMS}
    assert set(found) == expected
    return found


def tensor_products(kind: str, head_dim: int, columns: int) -> int:
    """mma instructions of a warp for 16 rows of head_dim elements times columns; a loop takes four steps at once."""
    depth = 8 if kind == "Tf32" else 16
    return min(head_dim // depth, 4) * columns // 8


@pytest.mark.parametrize("name, columns", [("forward_kernel", 32), ("weights_kernel", 32)])
def test_tensor_cores_and_vectors(name: str, columns: int) -> None:
    for (_, kind, head_dim), kernel in kernels(name).items():
        assert kernel.spills == 0, kernel
        assert kernel.blocks >= 1 and kernel.count("LDGSTS.128") >= 2, kernel
        assert kernel.count("MUFU.EX2") >= columns // 8 * 4, kernel
        assert kernel.count("LDSM") >= 3, kernel
        if kind in TENSOR_TYPES:
            products = tensor_products(kind, head_dim, columns)
            if name == "forward_kernel":
                products += columns * head_dim // (8 * (8 if kind == "Tf32" else 16))
            assert kernel.count("HMMA") >= products, kernel
        else:
            assert kernel.tensor == 0, f"exact float32 has no tensor cores: {kernel}"


def test_short_forward() -> None:
    """Up to head dimension 64; two blocks of 128 queries a multiprocessor, as the header of forward.cu says."""
    found = [kernel for kernel in cuda_kernels() if kernel.name == "attention::short_forward_kernel"]
    assert {(kernel.arch, kernel.case) for kernel in found} == {(a, t) for a in ARCHS for t in TENSOR_TYPES[:2]}
    for kernel in found:
        print(kernel)
        assert kernel.spills == 0 and kernel.warps == 8 and kernel.blocks == 2, kernel
        assert kernel.count("HMMA") >= 2 * 64 // 16 * 32 // 8 and kernel.count("LDGSTS.128") >= 2, kernel


def test_alignment() -> None:
    """The products of a tile and comparisons: no exponential, and of keys one store a row."""
    for (_, kind, head_dim), kernel in kernels("alignment_kernel").items():
        assert kernel.spills == 0 and kernel.blocks >= 1, kernel
        assert kernel.count("LDGSTS.128") >= 2 and kernel.count("LDSM") >= 3, kernel
        assert kernel.count("MUFU.EX2") == 0, kernel
        if kind in TENSOR_TYPES:
            assert kernel.count("HMMA") >= tensor_products(kind, head_dim, 32), kernel
        else:
            assert kernel.tensor == 0, kernel


def test_blocks_a_multiprocessor() -> None:
    """As the header of forward.cu says."""
    for (_, kind, head_dim), kernel in kernels("forward_kernel").items():
        if kind in ("__half", "__nv_bfloat16"):
            assert kernel.blocks == (3 if head_dim == 64 else 2), kernel
        elif head_dim == 64:  # 128 registers, so that of short sequences two blocks of 128 queries find backend
            assert kernel.blocks == 4, kernel


def test_preparation_does_not_spill() -> None:
    found = [kernel for kernel in cuda_kernels() if kernel.name in PREPARATION]
    assert len(found) == len(ARCHS) * len(PREPARATION)
    for kernel in found:
        print(kernel)
        assert kernel.spills == 0, kernel


def test_newer_chips_are_served_through_ptx() -> None:
    """Every source but Hopper's own carries PTX, which a driver compiles for chips that came later."""
    listed = compiled_cuda._run(compiled_cuda._cuobjdump(), "-lptx", str(cuda_extension()))
    sources = [path for path in host_build.CSRC.rglob("*.cu") if not path.stem.endswith("_sm90")]
    assert listed.count(".sm_80.ptx") == len(sources)
