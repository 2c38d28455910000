"""The attention kernels as they ship, compiled for sm_80 and sm_90a without a GPU: no spills in the forward, every
product on tensor cores, shared memory that fits. `pytest -rP` on this file prints registers, spills and shared memory.

See common.py: the second half of this file runs as a program of its own, in which Triton compiles.
"""

from __future__ import annotations

import pytest
from common import Compiled, dry_launch, emit, offline_records

# What a block may have of shared memory: CUDA C++ Programming Guide, technical specifications per compute capability.
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90a": 227 * 1024}

# flags -> (mask, dropout, bias). "band" needs no tensor; "lists" reads tile lists and element masks.
FLAGS = {
    "causal": ("band", False, False),
    "causal, dropout": ("band", True, False),
    "lists": ("lists", False, False),
    "lists, dropout, bias": ("lists", True, True),
}
# A kernel takes seconds to compile, so the backward comes with some: each flag, dtype, head dimension and architecture.
EVERYTHING = [
    ("sm_90a", "bfloat16", 64, "causal"),
    ("sm_90a", "bfloat16", 128, "causal"),
    ("sm_90a", "float16", 128, "lists, dropout, bias"),
    ("sm_80", "bfloat16", 64, "lists, dropout, bias"),
    ("sm_80", "float16", 128, "causal"),
]
FORWARD_ONLY = [
    ("sm_90a", "bfloat16", 128, "causal, dropout"),
    ("sm_90a", "bfloat16", 128, "lists"),
    ("sm_80", "bfloat16", 128, "lists, dropout, bias"),
    ("sm_80", "bfloat16", 64, "causal, dropout"),
]
Case = tuple[str, str, int, str]


def name_of(case: Case) -> str:
    return "-".join(map(str, case))


@pytest.mark.parametrize("case", EVERYTHING + FORWARD_ONLY, ids=name_of)
def test_compiles_for_tensor_cores(case: Case) -> None:
    arch = case[0]
    kernels = {record.kernel: record for record in offline_records(__file__)[name_of(case)]}
    wanted = {"attention_forward_kernel"}
    if case in EVERYTHING:
        wanted |= {"attention_dq_kernel", "attention_dkv_kernel", "attention_weights_kernel"}
        wanted |= {"attention_dbias_kernel"} if "bias" in case[3] else set()
    assert wanted <= set(kernels), f"not launched: {wanted - set(kernels)}"
    for record in kernels.values():
        print(record)
        assert record.shared <= SHARED_LIMIT[arch], f"does not fit: {record}"
        assert record.tensor_core_dots == record.dots, f"a product without tensor cores: {record}"
        # mma.sync is there on sm_90a too, at about half the speed of wgmma.
        assert arch != "sm_90a" or record.hmma == 0, f"a product falls back to mma.sync: {record}"
    for name in wanted:
        assert (kernels[name].hgmma if arch == "sm_90a" else kernels[name].hmma) > 0, kernels[name]
    forward = kernels["attention_forward_kernel"]
    assert forward.spills == 0, f"spilled registers in the forward: {forward}"


def compile_case(arch: str, dtype_name: str, D: int, flags: str, backward: bool) -> list[Compiled]:
    import torch

    from fastattn import AttentionMask
    from fastattn.kernels import attention

    mask_kind, dropout, with_bias = FLAGS[flags]
    B, H, L = 2, 4, 1024  # long enough for the largest tiles of the table
    q, k, v, out, dout = (torch.zeros(B, H, L, D, dtype=getattr(torch, dtype_name)) for _ in range(5))
    lse = torch.zeros(B, H, L)
    restrictions = {"is_causal": True}
    if mask_kind == "lists":
        restrictions["attn_mask"] = torch.ones(B, 1, L, L, dtype=torch.bool)
        restrictions["key_padding"] = torch.ones(B, L, dtype=torch.bool)
    mask = AttentionMask(**restrictions, bias=torch.zeros(1, H, L, L) if with_bias else None)
    rng_state = torch.zeros(2, dtype=torch.int64) if dropout else None
    options = (mask, D**-0.5, 0.1 if dropout else 0.0, rng_state)
    with dry_launch(arch) as compiled:
        attention.attention_fwd(q, k, v, *options)
        if backward:
            attention.attention_bwd(dout, None, q, k, v, out, lse, *options, with_bias)
            attention.attention_weights(q, k, lse, *options)
    return compiled


if __name__ == "__main__":
    for case in EVERYTHING + FORWARD_ONLY:
        for record in compile_case(*case, backward=case in EVERYTHING):
            emit(name_of(case), record)
