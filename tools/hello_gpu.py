"""The first minute on a machine with a GPU: what is installed, and whether one Triton kernel of the project runs.

    python tools/hello_gpu.py

dropout_add_layer_norm, forward and backward in float32, is compared with float64: in its first call, which goes through
Triton's own launch; in the next, which is bound to the compiled kernel; and on another stream. Without a GPU, set
TRITON_INTERPRET=1: Triton's interpreter runs the kernel. Exit status 1 if a result is wrong or, on a GPU, something is
missing that tools/gpu_check.sh needs.
"""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import torch

from fastattn.check.cases import Problem, problems
from fastattn.check.doctor import check

HAS_GPU = torch.cuda.is_available()
PACKAGES = ("torch", "triton", "numpy", "pytest", "setuptools", "ninja")
COMMANDS = ("gcc", "nvcc")


def missing() -> Iterator[str]:
    """Prints what there is; yields what is missing."""
    print(f"{time.ctime()}, Python {sys.version.split()[0]} at {sys.executable}")
    for name in PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name
            continue
        print(f"{name} {version}")
    found = {name: shutil.which(name) for name in (*COMMANDS, "compute-sanitizer")}
    # Without the next two the kernel fails below; not every way of finding them is tried here.
    found["Python.h"] = [*map(str, Path(sysconfig.get_path("include")).glob("Python.h"))]
    found["libcuda"] = ctypes.util.find_library("cuda")
    print(*(f"{name}: {place}" for name, place in found.items()), sep="\n")
    yield from (name for name in COMMANDS if found[name] is None)
    if HAS_GPU:
        major, minor = torch.cuda.get_device_capability()
        print(f"{torch.cuda.get_device_name()}, sm_{major}{minor}, {torch.cuda.mem_get_info()[0] / 2**30:.1f} GiB free")
    print(f"CUDA of torch {torch.version.cuda}; tf32: {torch.backends.cuda.matmul.allow_tf32}")


def is_right(what: str, problem: Problem) -> bool:
    start = time.perf_counter()
    bad = [record for record in check(problem, torch.float32, ["triton"]) if not record["ok"]]
    print(f"{what}: {bad or 'right'} ({time.perf_counter() - start:.1f} s)", flush=True)
    return not bad


def main() -> int:
    absent = list(missing())
    print(f"missing: {', '.join(absent) or 'nothing'}", flush=True)
    device = torch.device("cuda" if HAS_GPU else "cpu")
    problem = next(p for p in problems(device) if p.op == "add_layer_norm")
    right = [is_right("the first launches", problem)]
    if HAS_GPU:
        from fastattn.kernels.common.launch import Launches

        right.append(any(launch.launcher is not None for launches in Launches.all for launch in launches.values()))
        print(f"a launch was bound: {right[-1]}")
    right.append(is_right("bound launches", problem))
    with torch.cuda.stream(torch.cuda.Stream()) if HAS_GPU else nullcontext():
        right.append(is_right("on another stream", problem))
    return int(not all(right) or HAS_GPU and bool(absent))


if __name__ == "__main__":
    sys.exit(main())
