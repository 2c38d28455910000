"""Compile Triton kernels for a GPU that is not here, and count what matters in the machine code.

Triton's compiler and the assembler in its wheel need no GPU. Two ways in:

    compile_kernel(fn, signature, constexprs, arch, ...)   one kernel, its argument types spelled out
    dry_launch(arch)                                       run a room's own Python: launches compile instead of running

dry_launch gates exactly what ships: tile sizes, warps, stages and the specialisation of every argument (16-byte
aligned pointers, strides divisible by 16, ...) come from the launch itself, so no signature is repeated here.

Triton decides between compiler and interpreter when @triton.jit runs, and the CPU test session is interpreted. So a
test file that compiles is also a program: `python test_x_compile.py` prints one JSON line a kernel, and the tests read
those lines from offline_records(__file__), which runs it without TRITON_INTERPRET.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SASS_COUNTED = ("HGMMA", "HMMA", "LDGSTS", "LDL", "STL")


@dataclass(frozen=True)
class Compiled:
    """One kernel for one architecture."""

    kernel: str
    arch: str
    num_warps: int
    num_stages: int
    registers: int  # per thread
    stack: int  # bytes per thread
    shared: int  # bytes per block
    hgmma: int  # instructions: wgmma, sm_90a's tensor cores
    hmma: int  # mma.sync, sm_80's tensor cores
    ldgsts: int  # cp.async
    ldl: int  # loads and stores of local memory: spilled registers
    stl: int
    dots: int  # tl.dot operations in the program
    tensor_core_dots: int  # those of them given to tensor cores
    wide_loads: int  # global loads and cp.async of 16 bytes a thread

    def __str__(self) -> str:
        return (
            f"{self.kernel:28s} {self.arch:7s} warps {self.num_warps} stages {self.num_stages}  "
            f"registers {self.registers:3d}  shared {self.shared / 1024:5.1f} KiB  spills {self.ldl}+{self.stl}  "
            f"HGMMA {self.hgmma:3d}  HMMA {self.hmma:3d}  LDGSTS {self.ldgsts:3d}  dots {self.dots}"
        )

    @property
    def spills(self) -> int:
        return self.ldl + self.stl


def _target(arch: str) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", int(re.fullmatch(r"sm_(\d+)a?", arch)[1]), 32)  # Triton compiles 90 as 90a by itself


def _tool(name: str, *args: str) -> str:
    import triton

    binary = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([binary, *args], capture_output=True, text=True, check=True).stdout


def measure(kernel: Any, arch: str) -> Compiled:
    """Counts of a triton CompiledKernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        sass = _tool("nvdisasm", "-c", cubin.name)
        usage = re.search(r"REG:(\d+) STACK:(\d+)", _tool("cuobjdump", "-res-usage", cubin.name))
    dots = re.findall(r"= (?:tt\.dot|ttng\.warp_group_dot) .*", kernel.asm["ttgir"])
    counts = {name.lower(): len(re.findall(rf"\b{name}\b", sass)) for name in SASS_COUNTED}
    return Compiled(
        kernel=kernel.metadata.name,
        arch=arch,
        num_warps=kernel.metadata.num_warps,
        num_stages=kernel.metadata.num_stages,
        registers=int(usage[1]),
        stack=int(usage[2]),
        shared=kernel.metadata.shared,
        dots=len(dots),
        tensor_core_dots=sum(re.search(r"-> tensor<[^>]*#mma\d*>", dot) is not None for dot in dots),
        wide_loads=len(re.findall(r"\b(?:LDG|LDGSTS)\.[\w.]*\b128\b", sass)),
        **counts,
    )


def compile_kernel(
    fn: Any,
    signature: dict[str, str],
    constexprs: dict[str, Any],
    arch: str,
    num_warps: int,
    num_stages: int,
    unaligned: tuple[str, ...] = (),
) -> Compiled:
    """Compiles the @triton.jit function fn for arch ("sm_80", "sm_90a").

    signature: argument name -> type ("*bf16", "fp32", "i32", "i64"); every other argument is in constexprs.
    unaligned: pointers and integers that are not to be taken as divisible by 16.
    """
    import triton
    from triton.compiler import ASTSource

    types = {name: signature.get(name, "constexpr") for name in fn.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(fn.arg_names)
        if (types[name].startswith("*") or types[name] in ("i32", "i64")) and name not in unaligned
    }
    source = ASTSource(fn=fn, signature=types, constexprs=constexprs, attrs=aligned)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return measure(triton.compile(source, target=_target(arch), options=options), arch)


class _NoDriver:
    """The few answers Triton's launcher wants from a driver before it compiles."""

    def __init__(self, arch: str) -> None:
        self.target = _target(arch)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # each architecture its own device: kernels are cached by device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def dry_launch(arch: str) -> Iterator[list[Compiled]]:
    """Inside, `kernel[grid](...)` compiles for arch and launches nothing; yields the growing list of compiled kernels.

    Tensors may lie on the CPU: only their dtype and the alignment of their address are looked at. For a process that
    does nothing else (offline_records): afterwards Triton still believes in a GPU.
    """
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    compiled: list[Compiled] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if (record := measure(kernel, arch)) not in compiled:
            compiled.append(record)
        return kernel

    driver.set_active(_NoDriver(arch))
    JITFunction.run = compile_only
    try:
        yield compiled
    finally:
        JITFunction.run = run


def emit(name: str, compiled: Compiled) -> None:
    """Called by the program half of a compile test: one line for offline_records()."""
    print(json.dumps({"name": name, **asdict(compiled)}), flush=True)


@functools.cache
def offline_records(file: str) -> dict[str, list[Compiled]]:
    """Runs a compile test file as a program, in a fresh process whose @triton.jit compiles: name -> its kernels."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as cache:
        environment["TRITON_CACHE_DIR"] = cache
        done = subprocess.run([sys.executable, file], env=environment, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{file} failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    records: dict[str, list[Compiled]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            record = json.loads(line)
            records.setdefault(record.pop("name"), []).append(Compiled(**record))
    return records
