"""Layer norm and feed-forward as they ship, compiled for sm_80 and sm_90a without a GPU: no spills in a forward, loads
of 16 bytes, every product on tensor cores, shared memory that fits. `pytest -rP` prints registers, spills and shared.

See common.py: the second half of this file runs as a program of its own, in which Triton compiles.
"""

from __future__ import annotations

import importlib.metadata

import pytest
from common import Compiled, dry_launch, emit, offline_records

# What a block may have of shared memory: CUDA C++ Programming Guide, technical specifications per compute capability.
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90a": 227 * 1024}
WIDTH = {"bfloat16": 2, "float32": 4}
# The tiles were chosen with triton 3.6, and a product's accumulator fills its registers to the brim. Another Triton's
# compiler may need one or two more, and spills those; that is no regression of ours.
SPILLS_ALLOWED = 0 if importlib.metadata.version("triton").startswith("3.6.") else 8

# arch, dtype, hidden, dropout
LAYER_NORMS = [
    *(("sm_90a", "bfloat16", hidden, 0.1) for hidden in (64, 512, 4096, 8192, 16384)),
    ("sm_90a", "bfloat16", 1024, 0.0),
    ("sm_90a", "float32", 1024, 0.1),
    ("sm_80", "bfloat16", 512, 0.1),
]
# arch, dtype, activation, dropout; "few": as many tokens as in decoding, which are cut into smaller tiles
FEED_FORWARDS = [
    *(("sm_90a", "bfloat16", activation, 0.1) for activation in ("relu", "gelu", "silu", "geglu")),
    *(("sm_90a", "bfloat16", activation, 0.0) for activation in ("gelu", "swiglu")),
    *(("sm_80", "bfloat16", activation, 0.1) for activation in ("relu", "swiglu")),
    ("sm_80", "float16", "gelu", 0.1),
    *(("sm_90a", dtype, "silu", 0.1) for dtype in ("float32", "tf32")),
    *((arch, "bfloat16", "geglu", 0.1, "few") for arch in ("sm_80", "sm_90a")),
]


def kernels_of(case: tuple) -> dict[str, Compiled]:
    kernels = {record.kernel: record for record in offline_records(__file__)[", ".join(map(str, case))]}
    for record in kernels.values():
        print(record)
        assert record.shared <= SHARED_LIMIT[case[0]], record
    return kernels


@pytest.mark.parametrize("case", LAYER_NORMS, ids=lambda case: "-".join(map(str, case)))
def test_layer_norm(case: tuple[str, str, int, float]) -> None:
    _, dtype, hidden, _ = case
    kernels = kernels_of(case)
    forward, backward = kernels["add_layer_norm_fwd_kernel"], kernels["add_layer_norm_bwd_kernel"]
    assert forward.spills == 0, forward
    assert hidden > 8192 or backward.spills == 0, backward  # above, two sums and a row are more than the registers
    # Values of a lane: 32 forward, 16 backward. Row by row x, residual and dout, z, dz come in 16-byte pieces.
    assert forward.wide_loads >= 2 * 32 * WIDTH[dtype] // 16, forward
    assert backward.wide_loads >= 3 * 16 * WIDTH[dtype] // 16, backward


@pytest.mark.parametrize("case", FEED_FORWARDS, ids=lambda case: "-".join(map(str, case)))
def test_feed_forward(case: tuple) -> None:
    arch, dtype, activation = case[:3]
    kernels = kernels_of(case)
    forward, backward = kernels["feed_forward_fwd_kernel"], kernels["feed_forward_bwd_kernel"]
    assert forward.spills <= SPILLS_ALLOWED, forward
    if activation not in ("geglu", "swiglu"):
        assert backward.spills <= SPILLS_ALLOWED, backward
    for record in (forward, backward):
        # At least: a compiler may peel an iteration off the loop over the inner dimension.
        assert record.dots >= (2 if record is forward and activation in ("geglu", "swiglu") else 1), record
        assert record.wide_loads > 0, record
        if dtype != "float32":  # exact float32 products have no tensor core
            assert record.tensor_core_dots == record.dots, f"a product without tensor cores: {record}"
            assert (record.hgmma if arch == "sm_90a" else record.hmma) > 0, record
            assert arch != "sm_90a" or record.hmma == 0, f"a product falls back to mma.sync on sm_90a: {record}"


def compile_layer_norm(arch: str, dtype: str, hidden: int, dropout_p: float) -> None:
    import torch

    from fastattn.kernels import add_layer_norm

    rows = torch.zeros(272, hidden, dtype=getattr(torch, dtype))
    weight, statistic = rows[0].clone(), torch.zeros(272)
    rng_state = torch.zeros(2, dtype=torch.int64) if dropout_p else None
    with dry_launch(arch) as compiled:
        add_layer_norm.add_layer_norm_fwd(rows, rows, weight, weight, 1e-6, dropout_p, rng_state)
        options = (statistic, statistic, dropout_p, rng_state, True)
        add_layer_norm.add_layer_norm_bwd(rows, rows, rows, weight, weight, *options)
    for record in compiled:
        emit(f"{arch}, {dtype}, {hidden}, {dropout_p}", record)


def compile_feed_forward(arch: str, dtype: str, activation: str, dropout_p: float, *few: str) -> None:
    import torch

    from fastattn.kernels import feed_forward

    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    x = torch.zeros(64 if few else 512, 512, dtype=torch.float32 if dtype == "tf32" else getattr(torch, dtype))
    halves = 2 if activation in ("geglu", "swiglu") else 1
    weight1, bias1, weight2 = x.new_zeros(halves * 512, 512), x.new_zeros(halves * 512), x.new_zeros(512, 512)
    rng_state = torch.zeros(2, dtype=torch.int64) if dropout_p else None
    options = (x, weight1, bias1, weight2, bias1[:512], activation, dropout_p, rng_state)
    with dry_launch(arch) as compiled:
        _, saved = feed_forward.feed_forward_fwd(*options)
        feed_forward.feed_forward_bwd(x, *options, saved)
    for record in compiled:
        emit(", ".join(map(str, (arch, dtype, activation, dropout_p, *few))), record)


if __name__ == "__main__":
    for case in LAYER_NORMS:
        compile_layer_norm(*case)
    for case in FEED_FORWARDS:
        compile_feed_forward(*case)
