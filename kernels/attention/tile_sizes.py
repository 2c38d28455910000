"""Tile sizes of the attention kernels: a table. A call reads it once. Nothing is tuned at call time.

The sizes were chosen offline, by compiling for each architecture (tests/codegen): no spilled register in the forward,
as few as possible in the backward, tensor cores in every product, shared memory within the device's limit.
"""

from typing import NamedTuple

import torch

from ..common import INTERPRETED


class Config(NamedTuple):
    """Tiles of BLOCK_M queries by BLOCK_N keys, num_warps warps a program, loads num_stages - 1 tiles ahead.

    The field names are those of the launch's arguments.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


# In the interpreter a visited tile costs milliseconds whatever its size. All kernels have the same one, as products of
# another size are rounded otherwise: the weights would not fit lse. Kernels of short sequences have up to 32 keys.
INTERPRETED_CONFIG, INTERPRETED_SHORT_KEYS = Config(64, 64, 4, 1), 32

# Which column of the table a device reads. sm_86, 89, 120 and 121 have 99 KiB of shared memory a block, the other
# devices from sm_80 on at least 163; sm_90 and 100 keep operands of products in shared memory, sm_80 in registers.
# A device that is not here gets the smallest tiles, which fit everywhere.
_HOPPER, _AMPERE, _SMALL = range(3)
_COLUMN = {80: _AMPERE, 87: _AMPERE, **dict.fromkeys((90, 100, 103, 110), _HOPPER)}

# (kernel, bits of the dtype, head dimension at most) -> one configuration for all devices, or one a column.
_CONFIGS: dict[tuple[str, int, int], tuple[Config, ...]] = {
    ("forward", 16, 64): (Config(128, 64, 8, 3), Config(128, 64, 8, 3), Config(128, 64, 8, 2)),
    ("forward", 16, 128): (Config(128, 64, 8, 3), Config(128, 32, 8, 3), Config(64, 32, 4, 2)),
    ("forward", 16, 256): (Config(128, 32, 8, 2), Config(64, 32, 8, 2), Config(64, 32, 8, 1)),
    ("forward", 32, 64): (Config(64, 32, 8, 1),),
    ("forward", 32, 128): (Config(32, 32, 8, 1),),
    ("forward", 32, 256): (Config(16, 16, 8, 1),),
    ("dq", 16, 64): (Config(128, 64, 8, 2), Config(128, 32, 8, 2), Config(64, 64, 4, 2)),
    ("dq", 16, 128): (Config(128, 64, 8, 2), Config(64, 64, 8, 2), Config(64, 32, 4, 2)),
    ("dq", 16, 256): (Config(64, 32, 8, 2), Config(64, 32, 8, 1), Config(32, 32, 8, 1)),
    ("dq", 32, 64): (Config(32, 32, 8, 1),),
    ("dq", 32, 128): (Config(32, 32, 8, 1),),
    ("dq", 32, 256): (Config(16, 16, 8, 1),),
    ("dkv", 16, 64): (Config(64, 128, 8, 2), Config(32, 128, 8, 2), Config(32, 64, 4, 2)),
    ("dkv", 16, 128): (Config(32, 128, 8, 2), Config(32, 64, 8, 2), Config(32, 64, 8, 1)),
    ("dkv", 16, 256): (Config(32, 64, 8, 2), Config(32, 32, 8, 1), Config(32, 32, 8, 1)),
    ("dkv", 32, 64): (Config(32, 32, 8, 1),),
    ("dkv", 32, 128): (Config(32, 32, 8, 1),),
    ("dkv", 32, 256): (Config(16, 16, 8, 1),),
    ("dbias", 16, 64): (Config(64, 64, 8, 1),),
    ("dbias", 16, 128): (Config(64, 32, 8, 1),),
    ("dbias", 16, 256): (Config(32, 32, 8, 1),),
    ("dbias", 32, 64): (Config(32, 32, 8, 1),),
    ("dbias", 32, 128): (Config(32, 32, 8, 1),),
    ("dbias", 32, 256): (Config(16, 16, 8, 1),),
    ("relative dbias", 16, 64): (Config(64, 64, 8, 1),),
    ("relative dbias", 16, 128): (Config(64, 64, 8, 1), Config(32, 32, 8, 1), Config(32, 32, 8, 1)),
    ("relative dbias", 16, 256): (Config(64, 64, 8, 1), Config(32, 32, 8, 1), Config(32, 32, 8, 1)),
    ("relative dbias", 32, 64): (Config(32, 32, 8, 1),),
    ("relative dbias", 32, 128): (Config(32, 32, 8, 1),),
    ("relative dbias", 32, 256): (Config(16, 16, 8, 1),),
}

# Short sequences, where one tile holds all keys. Configurations as above, by the number of keys at most.
_SHORT: dict[tuple[str, int, int], dict[int, tuple[Config, ...]]] = {
    ("forward", 16, 64): {32: (Config(32, 32, 2, 1),), 64: (Config(64, 64, 4, 1),), 128: (Config(64, 128, 4, 1),)},
    ("forward", 16, 128): {32: (Config(32, 32, 4, 1),), 64: (Config(64, 64, 4, 1),)},
    ("forward", 32, 64): {32: (Config(32, 32, 8, 1),)},
    ("forward", 32, 128): {32: (Config(32, 32, 8, 1),)},
    ("backward", 16, 64): {
        32: (Config(32, 32, 2, 1),),
        64: (Config(64, 64, 4, 1), Config(32, 64, 4, 1), Config(32, 64, 4, 1)),
    },
    ("backward", 16, 128): {32: (Config(32, 32, 4, 1),), 64: (Config(32, 64, 8, 1),)},
    ("backward", 32, 64): {32: (Config(32, 32, 8, 1),)},
    ("backward", 32, 128): {32: (Config(16, 32, 8, 1),)},
}
# The backward's programs own a key head with all its queries. More queries need more programs.
MAX_SHORT_QUERIES = 128


def config(kernel: str, arch: int, dtype: torch.dtype, head_dim: int, rows: int) -> Config:
    """The launch configuration of a kernel: "forward", "dq", "dkv", "dbias" or "relative dbias".

    arch: 90 for sm_90. head_dim: the larger of Dk and Dv. rows: the length along which programs divide the work, Lk for
    "dkv" and Lq for the others. If it is short, the block and the warps are halved.
    """
    return INTERPRETED_CONFIG if INTERPRETED else _look_up(kernel, arch, dtype, head_dim, rows <= 64)


def short_config(
    kernel: str, arch: int, dtype: torch.dtype, head_dim: int, seqlen_q: int, seqlen_k: int
) -> Config | None:
    """The launch configuration of a kernel of short.py, "forward" or "backward", or None if the lengths or the head
    dimension are too large for it."""
    if seqlen_k == 0 or (kernel == "backward" and seqlen_q > MAX_SHORT_QUERIES):
        return None
    if INTERPRETED:
        return INTERPRETED_CONFIG if seqlen_k <= INTERPRETED_SHORT_KEYS else None
    for keys, row in _SHORT.get((kernel, dtype.itemsize * 8, _columns(head_dim)), {}).items():
        if seqlen_k <= keys:
            c = _on_device(row, arch)
            if seqlen_q <= 32 and c.BLOCK_M == 64:
                return c._replace(BLOCK_M=32, num_warps=2 if kernel == "forward" else c.num_warps)
            return c
    return None


def _columns(head_dim: int) -> int:
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256


def _on_device(row: tuple[Config, ...], arch: int) -> Config:
    return row[_COLUMN.get(arch, _SMALL) if len(row) > 1 else 0]


def _look_up(kernel: str, arch: int, dtype: torch.dtype, head_dim: int, short: bool) -> Config:
    c = _on_device(_CONFIGS[kernel, dtype.itemsize * 8, _columns(head_dim)], arch)
    owned = "BLOCK_N" if kernel == "dkv" else "BLOCK_M"
    if short and getattr(c, owned) == 128:
        return c._replace(**{owned: 64}, num_warps=c.num_warps // 2)
    return c
