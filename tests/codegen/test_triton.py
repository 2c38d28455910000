"""The Triton kernels compiled for sm_80, sm_90a and other GPUs without one: no spills where there were none, every
product on tensor cores, shared and tensor memory that fit. `pytest -rP` prints the registers and shared memory of each
kernel."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton_cases
from machine_code import Kernel, report

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

# The most loads and stores of spilled registers that these kernels had when their tiles were chosen. Others have none.
# Attention's have a bias and a bool mask at once: smaller tiles would spill nothing and load twice as much.
SPILLS = {
    ("attention_dkv_kernel", "bfloat16 D256 causal"): 56,
    ("attention_dq_kernel", "float16 D128 tensors, dropout, bias"): 10,
    ("attention_dkv_kernel", "float16 D128 tensors, dropout, bias"): 2,
    ("attention_dkv_kernel", "bfloat16 D64 tensors, dropout, bias, dlse"): 10,
    ("attention_dbias_kernel", "bfloat16 D64 tensors, dropout, bias, dlse"): 22,
    ("attention_short_bwd_kernel", "bfloat16 D64 64 keys, tensors, dropout, bias, dlse"): 12,
    ("attention_dq_kernel", "float32 D64 tensors, bias, dlse"): 8,
    ("attention_dkv_kernel", "float32 D64 tensors, bias, dlse"): 4,
    ("decode_attention_kernel", "float32 D256 shared"): 2,
    ("add_layer_norm_bwd_kernel", "bfloat16 hidden 512"): 2,
    ("add_layer_norm_bwd_kernel", "bfloat16 hidden 16384"): 36,
    ("feed_forward_bwd_kernel", "bfloat16 geglu"): 34,
    ("attention_dq_kernel", "bfloat16 D128 tensors, dropout, bias, sm_89"): 3,
    ("attention_dbias_kernel", "bfloat16 D128 tensors, dropout, bias, sm_89"): 51,
    ("add_layer_norm_bwd_kernel", "bfloat16 hidden 16384, sm_89"): 22,
    ("attention_dq_kernel", "bfloat16 D256 causal, sm_100a"): 8,
    ("add_layer_norm_bwd_kernel", "bfloat16 hidden 16384, sm_100a"): 24,
    ("attention_dq_kernel", "bfloat16 D128 tensors, dropout, bias, sm_120a"): 4,
    ("attention_dkv_kernel", "bfloat16 D128 tensors, dropout, bias, sm_120a"): 2,
    ("attention_dbias_kernel", "bfloat16 D128 tensors, dropout, bias, sm_120a"): 58,
    ("add_layer_norm_bwd_kernel", "bfloat16 hidden 16384, sm_120a"): 38,
}
# wgmma takes 64 rows. Short sequences have tiles of 32 rows, where 64 are too many or spill. A step of decoding, which
# waits for memory, has 16 in every case.
WITHOUT_WGMMA = ("decode_attention_kernel", "attention_short_")
# Shared memory that a block may have, in KiB.
SHARED = {"sm_80": 163, "sm_89": 99, "sm_90a": 227, "sm_100a": 227, "sm_120a": 99}
TENSOR_MEMORY = 512  # columns
COUNTS = ("tensor_memory", "dots", "on_tensor_cores")


def compiled(group: str) -> list[tuple[str, Kernel, int, int, int]]:
    """(case, kernel, columns of tensor memory, products, products on tensor cores) of every kernel that the cases of a
    group launch."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, Path(__file__).with_name("triton_cases.py"), group]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return [(line["case"], Kernel(*line["kernel"]), *(line[name] for name in COUNTS)) for line in lines]


GROUPS = [pytest.param(group, marks=() if group == "everyday" else pytest.mark.full) for group in triton_cases.GROUPS]


@pytest.mark.bug_class("T17", "T21")
@pytest.mark.parametrize("group", GROUPS)
def test_kernels(group: str) -> None:
    problems = []
    for case, kernel, tensor_memory, dots, on_tensor_cores in compiled(group):
        print(f"[{case}] {kernel}")
        found = []
        if kernel.spills > SPILLS.get((kernel.name, case), 0) and group != "sizes_of_1":  # what must work, not be fast
            found.append(f"{kernel.spills} accesses of spilled registers")
        if kernel.shared > SHARED[kernel.arch] * 1024 or tensor_memory > TENSOR_MEMORY:
            found.append("more shared or tensor memory than a block may have")
        if on_tensor_cores and case.startswith("float32"):
            found.append("an exact float32 product on tensor cores")
        if dots and not case.startswith("float32"):  # exact float32 products have no tensor core
            fastest = kernel.arch in ("sm_90a", "sm_100a") and not f"{kernel.name} {case}".startswith(WITHOUT_WGMMA)
            if on_tensor_cores < dots or kernel.count("HMMA", "HGMMA", "UTCHMMA") == 0:
                found.append("a product without tensor cores")
            elif fastest and kernel.count("HMMA"):
                found.append("a product by mma.sync instead of wgmma or tcgen05, at half the speed")
        problems += [f"{problem}: [{case}] {kernel}" for problem in found]
    report(problems, "triton", importlib.metadata.version("triton"))
