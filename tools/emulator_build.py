"""Builds CUDA sources for the CPU with g++ and csrc/emulator. Needs CUDA's headers, not the toolkit.

Objects and libraries are kept in a folder and named by a hash of what they are made of, so that a session compiles only
what changed, and several test processes share the work. Where ccache is installed, compiles go through it, so that
checkouts share the work too.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from unittest import mock

CSRC = Path(__file__).resolve().parents[1] / "csrc"
BUILD_DIR = CSRC.parent / "build" / "emulator"  # where tests and benchmarks share what is built
CXX = os.environ.get("CXX", "g++")
CCACHE = shutil.which("ccache")
EMULATOR_SOURCES = tuple(sorted((CSRC / "emulator").glob("*.cpp")))
# Of warps, lanes and blocks, for FASTATTN_EMULATOR_ORDER: csrc/emulator/block.h.
ORDERS = ("forward", "reverse", "1", "2")
COMPLETIONS = ("lazy", "eager")  # of asynchronous work, for FASTATTN_EMULATOR_ASYNC: csrc/emulator/async.h
SM90_COMPLETIONS = (*COMPLETIONS, "crossed")  # where work also reads shared memory
# Hidden symbols: a CUDA runtime that torch has loaded must not be called in place of csrc/emulator/runtime.cpp.
FLAGS = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-DFASTATTN_EMULATOR")
FLAGS += ("-DFASTATTN_ARCHS=80,90", "-DFASTATTN_PTX=110")  # 12.0 has PTX alone, and 10.0 nothing: device_problem()
FLAGS += ("-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-psabi")


@cache
def cuda_include() -> tuple[Path, ...] | str:
    """The folders of CUDA's headers, the toolkit's before those of PyPI's wheels; or why there are none."""
    roots = []
    if nvcc := shutil.which("nvcc", path=f"{os.environ.get('CUDA_HOME', '')}/bin{os.pathsep}{os.environ['PATH']}"):
        # nvcc on PATH may be a wrapper; the compiler itself prints where its toolkit is.
        said = subprocess.run([nvcc, "--dryrun", "-c", "x.cu"], capture_output=True, text=True).stderr
        roots += re.findall(r"#\$ TOP=(.*)", said)
    if spec := importlib.util.find_spec("nvidia"):
        roots += [path for parent in spec.submodule_search_locations for path in sorted(Path(parent).glob("cu*"))]
    for root in map(Path, roots):
        if (root / "include" / "cuda_runtime.h").is_file():
            return root.resolve() / "include", root.resolve() / "include" / "cccl"
    return "CUDA's headers are not here: install nvcc, or the wheels of the extra fastattn[test]"


@cache
def unsupported_reason() -> str | None:
    """Why CUDA sources cannot be built for the CPU here."""
    if shutil.which(CXX) is None:
        return f"no C++ compiler: {CXX} is not on PATH"
    include = cuda_include()
    return include if isinstance(include, str) else None


@contextlib.contextmanager
def recording(library: Path | None = None, capability: int = 90) -> Iterator[Callable[[], list[tuple[int, ...]]]]:
    """Inside, backend="cuda" accepts CPU tensors, and its launches are recorded in place of running.

    What is left is the host's part of a call. Gives a function that returns the launches since it was last called:
    (kernel's address, blocks, threads of a block, its bytes of shared memory).
    library: fastattn._C built for the CPU; it is built if None.     capability: of the GPU whose kernels are launched.
    """
    from fastattn.backends import cuda

    library = build("_C", extension_sources(), BUILD_DIR) if library is None else library
    before, module = cuda._emulator, cuda._load(library)
    with mock.patch.dict(os.environ, FASTATTN_EMULATOR_CAPABILITY=str(capability)):
        cuda.load_emulator(library)
        module.record_launches(True)
        try:
            yield module.take_launches
        finally:
            module.take_launches()
            module.record_launches(False)
            cuda._emulator = before


def build(name: str, sources: list[Path], folder: Path, *options: str) -> Path:
    """A shared library `name`.so of `sources`, in a subfolder of `folder`.

    options: further ones for the compiler. A source includes headers from its own csrc/, which may be a changed copy.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sources = [*sources, *EMULATOR_SOURCES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # the largest first, so that none is left for the end
        started = {
            source: pool.submit(_compile, source, folder, options)
            for source in sorted(sources, key=lambda source: source.stat().st_size, reverse=True)
        }
    objects = [started[source].result() for source in sources]
    library = folder / _digest(*map(str, objects)) / f"{name}.so"
    library.parent.mkdir(exist_ok=True)
    _make(library, [CXX, "-shared", "-Wl,-Bsymbolic", *map(str, objects)], folder)
    return library


def _compile(source: Path, folder: Path, extra: tuple[str, ...]) -> Path:
    csrc = next((path for path in source.parents if (path / "common" / "launch.cuh").is_file()), CSRC)
    contents = [path.read_bytes() for path in _headers(source, csrc)]
    options = [*FLAGS, "-Og", *extra, *(["-x", "c++"] if source.suffix == ".cu" else [])]
    include = [csrc, sysconfig.get_path("include")]
    target = folder / f"{source.name}-{_digest(str(include[1]), CXX, *options, source.read_bytes(), *contents)}.o"
    system = [f"-isystem{path}" for path in cuda_include()]
    command = [CXX, *options, *(f"-I{path}" for path in include), *system, "-c", str(source)]
    _make(target, [CCACHE, *command] if CCACHE else command, csrc.parent)
    return target


def _headers(source: Path, csrc: Path) -> list[Path]:
    """The headers of csrc/ that a source includes, directly or not."""
    found, left = {}, [source]
    while left:
        for name in re.findall(r'^#include "(.*)"', left.pop().read_text(), re.MULTILINE):
            path = csrc / name
            if path.is_file() and path not in found:
                found[path] = None
                left.append(path)
    return sorted(found)


def extension_sources(kernels: Path = CSRC) -> list[Path]:
    """The sources of fastattn._C; the kernels may come from a changed copy of csrc/."""
    bindings = [path for path in sorted(CSRC.rglob("*.cpp")) if path.parent.name != "emulator"]
    return [*sorted(kernels.rglob("*.cu")), *bindings]


def _make(target: Path, command: list[str], root: Path) -> None:
    """Makes a missing target by `command -o target` in the folder root; other processes that need it wait."""
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return
        partial = target.with_suffix(".partial")
        environment = os.environ | {"CCACHE_BASEDIR": str(root)}  # paths below it are the same in every checkout
        command = [*command, "-o", str(partial)]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
        partial.rename(target)


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
        digest.update(b"\0")
    return digest.hexdigest()[:16]
