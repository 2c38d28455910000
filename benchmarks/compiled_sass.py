"""What machine code says of itself: one `Kernel`, its instruction mix, and how many blocks a multiprocessor holds."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple


class Limits(NamedTuple):
    """Of a multiprocessor. CUDA C++ Programming Guide, technical specifications per compute capability."""

    shared: int  # bytes of a multiprocessor
    shared_of_block: int
    warps: int = 64
    blocks: int = 32
    registers: int = 65536


LIMITS = {"sm_80": Limits(164 * 1024, 163 * 1024), "sm_90a": Limits(228 * 1024, 227 * 1024)}
_RESERVED = 1024  # bytes of shared memory that every block loses to the system

# Counted by name, and global accesses by their width in bits too. MUFU: exponentials, roots, reciprocals. WARPGROUP:
# fences of wgmma and waits for it.
_TENSOR = ("HGMMA", "HMMA")
_COUNTED = (*_TENSOR, "UTMALDG", "UTMASTG", "UTMAREDG", "LDSM", "LDS", "STS", "SHFL", "BAR", "LDL", "STL", "SYNCS")
_BY_WIDTH = ("LDG", "STG", "LDGSTS")
_ATOMIC = ("RED", "ATOM", "ATOMG", "ATOMS")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)


@dataclass(frozen=True)
class Kernel:
    """One kernel as compiled for one architecture. shared: bytes of a block; dots: tl.dot operations of a Triton
    program, and those of them that tensor cores compute."""

    language: str  # "triton" or "cuda"
    arch: str
    name: str
    case: str  # dtype, sizes and flags of a Triton kernel, template arguments of a CUDA kernel
    warps: int
    registers: int  # a thread
    stack: int  # bytes a thread
    shared: int
    dots: int = 0
    tensor_core_dots: int = 0
    instructions: dict[str, int] = field(default_factory=dict)
    launched: bool = True  # False: nobody knows how, so warps are a guess, and what is shared dynamically is missing

    def count(self, *prefixes: str) -> int:
        """Instructions of these names, and of these names at any width: "LDG" counts LDG.128, not LDGSTS."""
        return sum(
            n for name, n in self.instructions.items() if any(name == p or name.startswith(f"{p}.") for p in prefixes)
        )

    @property
    def spills(self) -> int:
        """Loads and stores of local memory."""
        return self.count("LDL", "STL")

    @property
    def tensor(self) -> int:
        return self.count(*_TENSOR)

    @property
    def serialized(self) -> bool:
        """ptxas puts a fence before and a wait after every wgmma where it cannot prove that none is needed."""
        fences = min(self.count("WARPGROUP.ARRIVE"), self.count("WARPGROUP.DEPBAR"))
        return 1 < self.count("HGMMA") <= fences

    @property
    def wide_loads(self) -> int:
        """Global loads and cp.async of 16 bytes a thread, and TMA loads."""
        return self.count("LDG.128", "LDGSTS.128", "UTMALDG")

    @property
    def blocks(self) -> int:
        return blocks_per_multiprocessor(self.arch, self.warps, self.registers, self.shared)

    def __str__(self) -> str:
        mix = "  ".join(f"{name} {n}" for name, n in self.instructions.items())
        return (
            f"{self.arch:7s}{self.name} [{self.case}]  warps {self.warps}  registers {self.registers}  "
            f"shared {self.shared / 1024:.1f} KiB  blocks {self.blocks}  {mix}"
        )


def instruction_mix(sass: str) -> dict[str, int]:
    """Counts by instruction in the disassembly of one kernel; those that are there, and "all"."""
    found: Counter[str] = Counter()
    for instruction in _INSTRUCTION.findall(sass):
        name, *modifiers = instruction.split(".")
        found["all"] += 1
        if name in _BY_WIDTH:
            found[f"{name}.{_width(modifiers)}"] += 1
        elif name in ("MUFU", "WARPGROUP"):
            found[f"{name}.{modifiers[0]}"] += 1
        elif name in _ATOMIC:
            found["atomic"] += 1
        elif name in _COUNTED:
            found[name] += 1
    return dict(sorted(found.items()))


def _width(modifiers: list[str]) -> int:
    """Bits that a global access moves for a thread; 32 goes without saying."""
    for modifier in modifiers:
        if modifier in ("128", "64"):
            return int(modifier)
        if modifier in ("U16", "S16", "U8", "S8"):
            return int(modifier[1:])
    return 32


def blocks_per_multiprocessor(arch: str, warps: int, registers: int, shared: int) -> int:
    """How many blocks run side by side; 0 if not even one fits.

    Registers are handed to a warp in units of 256, in four partitions of a multiprocessor; shared memory in 128 bytes.
    """
    limits = LIMITS[arch]
    if shared > limits.shared_of_block or registers > 255:
        return 0
    of_warp = math.ceil(max(registers, 1) * 32 / 256) * 256
    by_registers = (limits.registers // 4 // of_warp) * 4 // warps
    by_shared = limits.shared // (math.ceil(shared / 128) * 128 + _RESERVED)
    return min(by_registers, by_shared, limits.warps // warps, limits.blocks)
