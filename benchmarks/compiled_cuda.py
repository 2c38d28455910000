"""Every CUDA kernel of csrc/, as setup.py builds it with nvcc, taken apart by cuobjdump.

Kernels are found in the extension, so a new one needs no line here. Threads and dynamic shared memory are those of the
launch, as compiled_launches.py finds them; of a kernel that it does not know, those of __launch_bounds__, and none.
An extension that lies in fastattn/ and is newer than its sources, as after `pip install -e .`, is taken as it is:
compiling takes minutes.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

from compiled_launches import Launch
from compiled_sass import Kernel, instruction_mix

ROOT = Path(__file__).resolve().parents[1]
ARCHS = {"sm_80": "sm_80", "sm_90": "sm_90a", "sm_90a": "sm_90a"}  # what setup.py builds, and its name in the record
_RESERVED = {"sm_80": 0, "sm_90a": 1024}  # of static shared memory, by the system, in cuobjdump's count
_ELF = re.compile(r"Fatbin elf code:\n=+\narch = (sm_\w+)")


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


def extension(folder: Path) -> Path:
    """fastattn._C for every architecture of setup.py: the one in fastattn/ if it is new and whole, else built here.

    In the folder, what is up to date from an earlier build is not made again. RuntimeError with the compiler's words.
    """
    name = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    sources = [path for path in [ROOT / "setup.py", *(ROOT / "csrc").rglob("*.*")] if path.parent.name != "host"]
    installed = ROOT / "fastattn" / name
    if installed.exists() and installed.stat().st_mtime > max(path.stat().st_mtime for path in sources):
        if {"sm_80", "sm_90"} <= set(re.findall(r"\.(sm_\w+)\.cubin", _run(_cuobjdump(), "-lelf", str(installed)))):
            return installed
    settings = {"FASTATTN_FORCE_CUDA": "1", "FASTATTN_SKIP_CUDA": "0"}
    environment = {key: value for key, value in os.environ.items() if key != "FASTATTN_CUDA_ARCHS"} | settings
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", folder / "lib", "--build-temp", folder / "temp"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return folder / "lib" / "fastattn" / name


def kernels(binary: Path, launches: Mapping[str, Launch]) -> list[Kernel]:
    """Every kernel of a library or an object file, by architecture and name. launches: by mangled name."""
    launched = {demangled(symbol): launch for symbol, launch in launches.items()}  # two compilers' names, alike now
    used = r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)"
    usage = {
        (arch, symbol): tuple(map(int, numbers))
        for arch, section in _by_arch(binary, "-res-usage")
        for symbol, *numbers in re.findall(used, section)
    }
    found, threads = [], None
    for arch, symbol, sass in functions(binary):
        registers, stack, static = usage[arch, symbol]
        name, arguments = demangled(symbol)
        launch = launched.get((name, arguments))
        if launch is None:
            threads = dict(_max_threads(binary)) if threads is None else threads
            launch = Launch(threads.get(symbol, 1024), 0)
        kernel = Kernel(
            language="cuda",
            arch=ARCHS[arch],
            name=name,
            case=arguments,
            warps=launch.threads // 32,
            registers=registers,
            stack=stack,
            shared=max(static - _RESERVED[ARCHS[arch]], 0) + launch.shared,
            instructions=instruction_mix(sass),
            launched=(name, arguments) in launched,
        )
        found.append(kernel)
    return sorted(found, key=lambda kernel: (kernel.arch, kernel.name, kernel.case))


def functions(binary: Path, *options: str) -> Iterator[tuple[str, str, str]]:
    """(architecture, mangled name, disassembly) of every kernel. options: of cuobjdump, such as ("-arch", "sm_90a")."""
    for arch, section in _by_arch(binary, *options, "-sass"):
        _, *parts = re.split(r"^\s*Function : (\S+)$", section, flags=re.MULTILINE)
        for symbol, sass in zip(parts[::2], parts[1::2], strict=True):
            yield arch, symbol, sass


def _by_arch(binary: Path, *what: str) -> Iterator[tuple[str, str]]:
    """(architecture, output) of cuobjdump for each part of a file that we compiled; not for those of CUDA's runtime."""
    _, *sections = _ELF.split(_run(_cuobjdump(), *what, str(binary)))
    for arch, section in zip(sections[::2], sections[1::2], strict=True):
        if "fastattn" in section:
            yield arch, section


def _max_threads(binary: Path) -> Iterator[tuple[str, int]]:
    """(mangled name, threads of a block at most) where __launch_bounds__ says so."""
    section = r"^\.nv\.info\.(\S+)\n(.*?)(?=^\.|\Z)"
    for symbol, body in re.findall(section, _run(_cuobjdump(), "-elf", str(binary)), re.MULTILINE | re.DOTALL):
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
