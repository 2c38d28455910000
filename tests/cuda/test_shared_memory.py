"""sm_86, sm_89 and sm_120 run the kernels of sm_80 with 99 KiB of shared memory a block, where an A100 has 163.

csrc/emulator records the launches and does not run them. It refuses a launch that asks for more than its compute
capability has. Attention's forward and backward: test_kernels_attention.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import emulator_build
import pytest
import torch

import fastattn.backends.cuda

KIB = 1024


@pytest.fixture
def take_launches(emulator_library: Path) -> Iterator[Callable[[], list[tuple[int, ...]]]]:
    with emulator_build.recording(emulator_library, capability=89) as take_launches:
        yield take_launches


@pytest.mark.bug_class("T21")
def test_every_launch_fits(take_launches: Callable[[], list[tuple[int, ...]]]) -> None:
    module = fastattn.backends.cuda.extension(on_gpu=False)

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, requires_grad=dtype.is_floating_point)

    def largest(out: torch.Tensor) -> int:
        """KiB of a block, in the launches that made `out` and its gradients."""
        out.float().sum().backward()
        return max(shared_bytes for *_, shared_bytes in take_launches()) // KIB

    for dtype in (torch.float32, torch.bfloat16):
        q = zeros(1, 2, 200, 128, dtype=dtype)
        sizes = [largest(fastattn.scaled_dot_product_attention(q, q, q, backend="cuda"))]
        for hidden in (512, module.NORM_MAX_HIDDEN_DX_BIAS, 16384):
            x, weight = zeros(64, hidden, dtype=dtype), zeros(hidden, dtype=dtype)
            out = fastattn.dropout_add_layer_norm(x, x, weight, weight, dropout_p=0.1, x_bias=weight, backend="cuda")
            sizes.append(largest(out))
        assert max(sizes) > 48  # KiB, which need no permission
