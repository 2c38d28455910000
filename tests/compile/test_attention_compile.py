"""The attention kernels as they ship, compiled for sm_80 and sm_90a without a GPU: no spills in the forward, every
product on tensor cores, shared memory that fits. `pytest -rP` on this file prints registers, spills and shared memory.
"""

from __future__ import annotations

import compiled_triton
import pytest
from compiled import assert_products_on_tensor_cores, kernels_of

CASES = [case for case in compiled_triton.CASES if isinstance(case, compiled_triton.Attention)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.arch} {case}")
def test_compiles_for_tensor_cores(case: compiled_triton.Attention) -> None:
    kernels = kernels_of(case)
    wanted = {"attention_forward_kernel"}
    if case.backward:
        wanted |= {"attention_dq_kernel", "attention_dkv_kernel"}
        wanted |= {"attention_weights_kernel", "attention_alignment_kernel"}
        wanted |= {"attention_dbias_kernel"} if "bias" in case.flags else set()
    assert wanted <= set(kernels), f"not launched: {wanted - set(kernels)}"
    for name, kernel in kernels.items():
        if kernel.dots == 0 or case.dtype == "float32":  # exact float32 products have no tensor core
            continue
        # The weights, looked at but not trained with, have tiles of 32 rows at D 256: too few for wgmma.
        if (name, case.head_dim) != ("attention_weights_kernel", 256):
            assert_products_on_tensor_cores(kernel)
    forward = kernels["attention_forward_kernel"]
    assert forward.spills == 0, f"spilled registers in the forward: {forward}"
