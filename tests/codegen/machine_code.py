"""What the compilers make of the kernels: registers, shared memory and instructions, read from compiled code.

The gates of this folder say what one version of each compiler makes of a kernel: which registers it spills, which
tensor core instructions it takes, in which order it waits. They are asserted for the versions in PINNED and are
warnings for all others, because another compiler's choices are no change of ours.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import subprocess
import warnings
from pathlib import Path
from typing import NamedTuple

PINNED = {"triton": "3.6.0", "nvcc": "13.0"}

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*?)\s*;", re.MULTILINE)


class Kernel(NamedTuple):
    """One compiled kernel. code: its instructions with their operands, in order."""

    arch: str
    name: str  # with the template arguments of a CUDA kernel, or the case of a Triton kernel
    registers: int  # a thread
    shared: int  # bytes a block: of a CUDA kernel what is static, the rest is asked for at launch
    code: list[str]

    def count(self, *names: str) -> int:
        """Instructions of these names: "LDG" counts LDG.E.128, not LDGSTS."""
        return sum(1 for instruction in self.code if re.split(r"[. ]", instruction, maxsplit=1)[0] in names)

    @property
    def spills(self) -> int:
        """Loads and stores of local memory."""
        return self.count("LDL", "STL")

    @property
    def serialized(self) -> bool:
        """Whether each wgmma has its own fence and wait. ptxas adds them where it cannot prove them needless."""
        fences, waits = (sum(f"WARPGROUP.{name}" in line for line in self.code) for name in ("ARRIVE", "DEPBAR"))
        return 1 < self.count("HGMMA") <= min(fences, waits)

    def gaps(self) -> list[int]:
        """How many instructions each HGMMA has between it and the last one of its product, whose end is marked gsb0.

        Left out are gaps with a wait, a branch, or floating-point work that ptxas moved there.
        """
        found, since = [], None
        for instruction in self.code:
            if instruction.startswith("HGMMA"):
                if since is not None:
                    found.append(since)
                since = None if "gsb0" in instruction else 0
            elif re.match("WARPGROUP|BAR|SYNCS|BRA|BSSY|BSYNC|CALL|RET|EXIT|F", instruction):
                since = None
            elif since is not None:
                since += 1
        return found

    def __str__(self) -> str:
        return (
            f"{self.arch:8}{self.name}: {self.registers} registers, {self.shared} bytes of shared memory, "
            f"{len(self.code)} instructions"
        )


def report(problems: list[str], compiler: str, version: str) -> None:
    """Fails with these problems under the pinned version of a compiler, and warns of them under any other."""
    if version.startswith(PINNED[compiler]):
        assert not problems, "\n".join(problems)
    elif problems:
        warnings.warn(f"{compiler} {version} (pinned: {PINNED[compiler]}):\n" + "\n".join(problems), stacklevel=2)


def kernels_of(cubin: Path, arch: str) -> list[Kernel]:
    """Every kernel of a compiled file for one architecture; shared memory is what the file itself says."""
    usage = dict(re.findall(r"Function (\S+):\s+(REG:\d+ STACK:\d+ SHARED:\d+)", _cuobjdump("-res-usage", cubin)))
    _, *parts = re.split(r"^\s*Function : (\S+)$", _cuobjdump("-sass", cubin), flags=re.MULTILINE)
    found = []
    for symbol, sass in zip(parts[::2], parts[1::2], strict=True):
        registers, _, shared = (int(number) for number in re.findall(r"\d+", usage[symbol]))
        found.append(Kernel(arch, symbol, registers, shared, _INSTRUCTION.findall(sass)))
    return found


@functools.cache
def cuobjdump() -> Path | None:
    """The disassembler that comes with Triton, or None where Triton is not installed."""
    spec = importlib.util.find_spec("triton")
    return Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump" if spec else None


def _cuobjdump(*arguments: str | Path) -> str:
    return subprocess.run([cuobjdump(), *arguments], capture_output=True, text=True, check=True).stdout
