"""What a planted fault is, and how one is tried: in a copy of the checkout, the nearest tests must fail."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

CHECKOUT = Path(__file__).resolve().parents[2]
COPIED = ("fastattn", "kernels", "csrc", "examples", "benchmarks", "tools", "tests", "docs")


class Fault(NamedTuple):
    """One text of a file, `right`, is replaced by `wrong`; `tests`, arguments of pytest, must then fail."""

    name: str
    file: str  # from the checkout's folder on
    right: str  # occurs once in the file
    wrong: str
    tests: str


def copy_checkout(folder: Path) -> Path:
    """A copy to plant faults in. What is compiled is linked, not copied."""
    for name in COPIED:
        ignored = shutil.ignore_patterns("__pycache__", "*.svg")
        shutil.copytree(CHECKOUT / name, folder / name, ignore=ignored, copy_function=_copy)
    for name in ("pyproject.toml", "README.md"):
        (folder / name).symlink_to(CHECKOUT / name)
    return folder


def _copy(source: str, target: str) -> None:
    Path(target).symlink_to(source) if source.endswith(".so") else shutil.copy(source, target)


def run_with(fault: Fault | None, tests: str, copy: Path) -> subprocess.CompletedProcess[str]:
    """pytest on `tests` in the copy, until the first failure."""
    path = original = None
    if fault is not None:
        path = copy / fault.file
        original = path.read_text()
        assert original.count(fault.right) == 1, f"{fault.file} has {fault.right!r} {original.count(fault.right)} times"
        path.write_text(original.replace(fault.right, fault.wrong))
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=short", "-p", "no:cacheprovider"]
        environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("PYTEST_XDIST_WORKER", None)
        return subprocess.run(
            [*command, *shlex.split(tests)], cwd=copy, env=environment, capture_output=True, text=True, timeout=900
        )
    finally:
        if path is not None:
            path.write_text(original)
