"""The tables of tile sizes."""

import pytest
import torch


@pytest.mark.parametrize("arch", [88, 130, 999])
def test_an_unknown_gpu_has_the_smallest_tiles(arch: int) -> None:
    """Of 99 KiB of shared memory: larger ones might not start on it."""
    pytest.importorskip("triton")
    from fastattn.kernels.attention import tile_sizes
    from fastattn.kernels.feed_forward.matmul import tile_for

    assert tile_for(torch.bfloat16, arch, 4096, wide=True) == tile_for(torch.bfloat16, 86, 4096, wide=True)
    for kernel, bits, columns in tile_sizes._CONFIGS:
        call = {16: torch.bfloat16, 32: torch.float32}[bits], columns, False
        assert tile_sizes._look_up(kernel, arch, *call) == tile_sizes._look_up(kernel, 86, *call)
