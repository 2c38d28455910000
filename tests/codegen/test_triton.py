"""The Triton kernels compiled for sm_80, sm_90a and other GPUs without one: no spills where there were none, every
product on tensor cores, shared and tensor memory that fit. `pytest -rP` prints the registers and shared memory of each
kernel. And their launches, and the tables of tile sizes."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path

import pytest
import torch
import triton_cases
from helpers import run_python
from machine_code import Kernel, report

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

# The most loads and stores of spilled registers that a kernel had in any case when its tiles were chosen. Others have
# none. Attention's have a bias and a bool mask at once: smaller tiles would spill nothing and load twice as much.
SPILLS = {
    "attention_dq_kernel": 10,
    "attention_dkv_kernel": 56,
    "attention_dbias_kernel": 58,
    "attention_short_bwd_kernel": 12,
    "decode_attention_kernel": 2,
    "add_layer_norm_bwd_kernel": 38,
    "feed_forward_bwd_kernel": 34,
}
# wgmma takes 64 rows. Short sequences have tiles of 32 rows, where 64 are too many or spill. A step of decoding, which
# waits for memory, has 16 in every case.
WITHOUT_WGMMA = ("decode_attention_kernel", "attention_short_")
# Shared memory that a block may have, in KiB.
SHARED = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90a": 227, "sm_100a": 227, "sm_120a": 99}
TENSOR_MEMORY = 512  # columns
FOLDER = Path(__file__).parent


@pytest.mark.full
def test_launches_bound_before_are_tritons() -> None:
    run_python(FOLDER / "launch_cases.py", CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize("arch", [89, 120, 121, 88, 130, 999])
def test_small_and_unknown_gpus_have_the_smallest_tiles(arch: int) -> None:
    """Of 99 KiB of shared memory, as sm_86: larger ones would not start on them, or might not."""
    from fastattn.kernels.attention import tile_sizes
    from fastattn.kernels.feed_forward.matmul import tile_for

    assert tile_for(torch.bfloat16, arch, 4096, wide=True) == tile_for(torch.bfloat16, 86, 4096, wide=True)
    for kernel, bits, columns in tile_sizes._CONFIGS:
        call = {16: torch.bfloat16, 32: torch.float32}[bits], columns, False
        assert tile_sizes._look_up(kernel, arch, *call) == tile_sizes._look_up(kernel, 86, *call)


@pytest.mark.gates
@pytest.mark.parametrize("group", triton_cases.GROUPS)
def test_kernels(group: str) -> None:
    problems = []
    for found in map(json.loads, run_python(FOLDER / "triton_cases.py", group).splitlines()):
        kernel, where = Kernel(*found["kernel"]), f"[{found['case']}] {Kernel(*found['kernel'])}"
        print(where)
        problems += [f"{problem}: {where}" for problem in problems_of(kernel, found, group)]
    report(problems, "triton", importlib.metadata.version("triton"))


def problems_of(kernel: Kernel, found: dict[str, int], group: str) -> list[str]:
    problems, is_float32 = [], found["case"].startswith("float32")
    must_be_fast = group not in ("sizes of 1", "the most shared memory")
    if kernel.spills > SPILLS.get(kernel.name, 0) and must_be_fast:
        problems.append(f"{kernel.spills} accesses of spilled registers")
    if kernel.shared > SHARED[kernel.arch] * 1024 or found["tensor_memory"] > TENSOR_MEMORY:
        problems.append("more shared or tensor memory than a block may have")
    if is_float32 and found["on_tensor_cores"]:
        problems.append("an exact float32 product on tensor cores")
    if found["dots"] and not is_float32:  # exact float32 products have no tensor core
        fastest = kernel.arch in ("sm_90a", "sm_100a") and not kernel.name.startswith(WITHOUT_WGMMA)
        if found["on_tensor_cores"] < found["dots"] or kernel.count("HMMA", "HGMMA", "UTCHMMA") == 0:
            problems.append("a product without tensor cores")
        elif fastest and kernel.count("HMMA"):
            problems.append("a product by mma.sync instead of wgmma or tcgen05, at half the speed")
    return problems
