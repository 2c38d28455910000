"""Every CUDA kernel of csrc/, as setup.py builds it with nvcc for sm_80 and sm_90a, taken apart by cuobjdump.

Kernels are found in the objects, so a new one needs no line here. Registers, stack and static shared memory are what
ptxas said; threads are those of __launch_bounds__, unless compiled_work.py knows what the launch takes.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from compiled_sass import ARCHS, Kernel, instruction_mix
from compiled_work import cuda_launch

ROOT = Path(__file__).resolve().parents[1]
_ELF = re.compile(r"Fatbin elf code:\n=+\narch = (sm_\w+)")
_USED = re.compile(
    r"Compiling entry function '(\S+)' for '(sm_\w+)'.*?(\d+) bytes stack frame.*?Used (\d+) registers([^\n]*)",
    re.DOTALL,
)


class Build(NamedTuple):
    """package: the folder of fastattn with _C. said: for each object what nvcc and ptxas -v said when they made it."""

    package: Path
    said: dict[Path, str]


def why_not() -> str | None:
    """Why CUDA kernels cannot be compiled or taken apart here, or None."""
    for tool in ("nvcc", "c++filt"):
        if shutil.which(tool) is None:
            return f"{tool} is not on PATH"
    return None if _cuobjdump() else "cuobjdump is neither beside nvcc nor in the triton package"


def _cuobjdump() -> str | None:
    """The toolkit's, or the one that Triton brings."""
    said = subprocess.run(["nvcc", "--dryrun", "-c", "x.cu"], capture_output=True, text=True).stderr
    folders = [f"{top}/bin" for top in re.findall(r"#\$ TOP=(.*)", said)]  # nvcc on PATH may be a wrapper
    spec = importlib.util.find_spec("triton")
    folders += [f"{path}/backends/nvidia/bin" for path in (spec.submodule_search_locations if spec else ())]
    return shutil.which("cuobjdump", path=os.pathsep.join([os.environ.get("PATH", ""), *folders]))


def versions() -> dict[str, str]:
    return {"nvcc": re.search(r"V([\d.]+)", _run("nvcc", "--version"))[1]}


def build(folder: Path) -> Build:
    """fastattn._C for both architectures; what lies in the folder from before and is up to date is not made again.

    RuntimeError with the compiler's words if that fails.
    """
    settings = {
        "FASTATTN_FORCE_CUDA": "1",
        "FASTATTN_SKIP_CUDA": "0",
        "FASTATTN_CUDA_ARCHS": ";".join(arch.removeprefix("sm_") for arch in ARCHS),
        "NVCC_APPEND_FLAGS": "-Xptxas -v",
    }
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", folder / "lib", "--build-temp", folder / "temp"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True)
    # ninja prints a step's command, and then its output. Kept, because a later build does not repeat this step.
    for step in re.split(r"^\[\d+/\d+\] ", done.stdout, flags=re.MULTILINE)[1:]:
        if target := re.search(r" -o (\S+\.cu\.o)$", step.splitlines()[0]):
            Path(f"{target[1]}.said").write_text(step)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    sources = [path for path in sorted((ROOT / "csrc").rglob("*.cu")) if path.parent.name != "host"]
    objects = [folder / "temp" / f"{'_'.join(path.relative_to(ROOT).parts)}.o" for path in sources]
    return Build(folder / "lib" / "fastattn", {path: Path(f"{path}.said").read_text() for path in objects})


def kernels(target: Path, said: str) -> list[Kernel]:
    """Every kernel of an object file, by architecture and name."""
    used = {(arch, symbol): numbers for symbol, arch, *numbers in _USED.findall(said)}
    # Of C7510 to C7518 each says that wgmma is serialized, and in which function.
    serialized = set(re.findall(r"\(C751[0-8]\).*?in (?:the )?function '(\S+?)'", said))
    threads = dict(_max_threads(target))
    found = []
    for arch, symbol, sass in _functions(target):
        if (arch, symbol) not in used:  # a device function that was not inlined
            continue
        stack, registers, more = used[arch, symbol]
        static = re.search(r"(\d+) bytes smem", more)
        name, arguments = demangled(symbol)
        launch = cuda_launch(name, arguments)
        kernel = Kernel(
            language="cuda",
            arch=arch,
            name=name,
            case=arguments,
            warps=(launch.threads if launch else threads.get(symbol, 1024)) // 32,
            registers=int(registers),
            stack=int(stack),
            shared=(int(static[1]) if static else 0) + (launch.shared if launch else 0),
            serialized=symbol in serialized,
            instructions=instruction_mix(sass),
        )
        found.append(kernel)
    return sorted(found, key=lambda kernel: (kernel.arch, kernel.name, kernel.case))


def _functions(target: Path) -> Iterator[tuple[str, str, str]]:
    """(architecture, mangled name, disassembly) of each function in an object file."""
    _, *sections = _ELF.split(_run(_cuobjdump(), "-sass", str(target)))
    for arch, section in zip(sections[::2], sections[1::2], strict=True):
        _, *functions = re.split(r"^\s*Function : (\S+)$", section, flags=re.MULTILINE)
        for symbol, body in zip(functions[::2], functions[1::2], strict=True):
            yield arch, symbol, body


def _max_threads(target: Path) -> Iterator[tuple[str, int]]:
    """(mangled name, threads of a block at most) where __launch_bounds__ says so."""
    section = r"^\.nv\.info\.(\S+)\n(.*?)(?=^\.|\Z)"
    for symbol, body in re.findall(section, _run(_cuobjdump(), "-elf", str(target)), re.MULTILINE | re.DOTALL):
        if bound := re.search(r"EIATTR_MAX_THREADS\s+Format:\s+\S+\s+Value:\s+(0x\w+) (0x\w+) (0x\w+)", body):
            x, y, z = (int(number, 16) for number in bound.groups())
            yield symbol, x * y * z


def demangled(symbol: str) -> tuple[str, str]:
    """(name, template arguments): ("add_layer_norm::forward_kernel", "float, float, 4, true")."""
    text = re.sub(r"\(anonymous namespace\)::|\bfastattn::|^void ", "", _run("c++filt", symbol).strip())
    name, arguments = re.match(r"([\w:]+)(?:<(.*)>)?\(", text).groups()
    return name, arguments or ""


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
