"""Layer norm, feed-forward and cross-entropy as they ship, compiled for sm_80 and sm_90a without a GPU: no spills in a
forward, loads of 16 bytes, every product on tensor cores, shared memory that fits. `pytest -rP` prints each kernel.
"""

from __future__ import annotations

import importlib.metadata

import compiled_triton
import pytest
from compiled import assert_products_on_tensor_cores, kernels_of

WIDTH = {"bfloat16": 2, "float32": 4}
# The tiles were chosen with triton 3.6, and a product's accumulator fills its registers to the brim. Another Triton's
# compiler may need one or two more, and spills those; that is no regression of ours.
SPILLS_ALLOWED = 0 if importlib.metadata.version("triton").startswith("3.6.") else 8

LAYER_NORMS = [case for case in compiled_triton.CASES if isinstance(case, compiled_triton.LayerNorm)]
EMBEDDINGS = [case for case in compiled_triton.CASES if isinstance(case, compiled_triton.EmbedLayerNorm)]
CROSS_ENTROPIES = [case for case in compiled_triton.CASES if isinstance(case, compiled_triton.CrossEntropy)]
FEED_FORWARDS = [case for case in compiled_triton.CASES if isinstance(case, compiled_triton.FeedForward)]


@pytest.mark.parametrize("case", LAYER_NORMS, ids=lambda case: f"{case.arch} {case}")
def test_layer_norm(case: compiled_triton.LayerNorm) -> None:
    kernels = kernels_of(case)
    forward, backward = kernels["add_layer_norm_fwd_kernel"], kernels["add_layer_norm_bwd_kernel"]
    assert forward.spills == 0, forward
    # Above 8192, two sums and a row are more than the registers; below, one value may wait in memory beside the loop.
    assert backward.count("LDL") <= (20 if case.hidden > 8192 else 1), backward
    # Values of a lane: 32 forward, 16 backward. Row by row x, residual and dout, z, dz come in 16-byte pieces.
    assert forward.wide_loads >= 2 * 32 * WIDTH[case.dtype] // 16, forward
    assert backward.wide_loads >= 3 * 16 * WIDTH[case.dtype] // 16, backward


@pytest.mark.parametrize("case", EMBEDDINGS, ids=lambda case: f"{case.arch} {case}")
def test_embed_layer_norm(case: compiled_triton.EmbedLayerNorm) -> None:
    """No spills; two programs a multiprocessor hide the gather; words and positions come in 16-byte pieces."""
    kernels = kernels_of(case)
    forward, backward = kernels["embed_layer_norm_fwd_kernel"], kernels["embed_layer_norm_bwd_kernel"]
    assert forward.spills == backward.spills == 0, (forward, backward)
    assert backward.blocks >= 2 or case.hidden > 1024, backward
    assert forward.wide_loads >= 32 * (WIDTH[case.dtype] + 4) // 16, forward
    assert backward.wide_loads >= 8 * (WIDTH[case.dtype] + 4 + 2) // 16, backward


@pytest.mark.parametrize("case", FEED_FORWARDS, ids=lambda case: f"{case.arch} {case}")
def test_feed_forward(case: compiled_triton.FeedForward) -> None:
    kernels = kernels_of(case)
    forward, backward = kernels["feed_forward_fwd_kernel"], kernels["feed_forward_bwd_kernel"]
    assert forward.spills <= SPILLS_ALLOWED, forward
    if not case.gated:
        assert backward.spills <= SPILLS_ALLOWED, backward
    for kernel in (forward, backward):
        # At least: a compiler may peel an iteration off the loop over the inner dimension.
        assert kernel.dots >= (2 if kernel is forward and case.gated else 1), kernel
        assert kernel.wide_loads > 0, kernel
        if case.dtype != "float32":  # exact float32 products have no tensor core
            assert_products_on_tensor_cores(kernel)


@pytest.mark.parametrize("case", CROSS_ENTROPIES, ids=lambda case: f"{case.arch} {case}")
def test_cross_entropy(case: compiled_triton.CrossEntropy) -> None:
    """Eight values a lane each sweep, in pieces of 16 bytes whatever the class count; two rows a multiprocessor."""
    kernel = kernels_of(case)["cross_entropy_rows_kernel"]
    assert kernel.spills == 0, kernel
    assert kernel.blocks >= 2, kernel
    sweeps = 1 if case.gradient == "none" else 2
    assert kernel.wide_loads >= sweeps * 8 * (4 if case.dtype == "float32" else 2) // 16, kernel
    assert kernel.count("atomic") == 0, kernel
