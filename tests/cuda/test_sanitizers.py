"""The CUDA kernels, their bindings and csrc/emulator under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., "subprocess.CompletedProcess[str]"]
# Kernels form addresses outside of tensors, also from a null pointer, which a condition keeps them from reading.
FLAGS = "-fsanitize=address,undefined -fno-sanitize=pointer-overflow -fno-sanitize-recover=all"
BUILD = "import emulator_build as b; b.build('_C', b.extension_sources(), b.BUILD_DIR)"
BUILD_ERRORS = "import emulator_build as b; b.build('errors', [b.CSRC.parent / 'tests/cuda/errors.cu'], b.BUILD_DIR)"
ERRORS = """
import sys, torch, emulator_build, kernel_library
kernels = kernel_library.build("errors", emulator_build.BUILD_DIR)
kernels.run("misuse", [torch.zeros(128)], bug=int(sys.argv[1]))
"""
TESTS = ["tests/cuda/test_kernels.py", "tests/ops", "-k", "cuda or cpu", "-x"]


@pytest.fixture(scope="module")
def run(build_folder: Path) -> Run:
    """Runs Python where csrc/ is built with sanitizers, with their runtime loaded, unless it only builds."""
    compiler = build_folder / "sanitizing-g++"  # in a place that stays, since what is built is named by it
    compiler.write_text(f'#!/bin/sh\nexec g++ {FLAGS} "$@"\n')
    compiler.chmod(0o755)
    names = ("libasan.so", "libubsan.so")
    found = [subprocess.check_output(["g++", f"-print-file-name={n}"], text=True).strip() for n in names]
    if torch.cuda.is_available() or not all(map(os.path.isabs, found)):
        pytest.skip("needs the sanitizers of g++, and no GPU, whose driver maps memory where theirs is")
    paths = os.pathsep.join(str(ROOT / name) for name in (".", "tools", "tests/cuda"))

    def run(arguments: Sequence[str], builds: bool = False) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"CXX": str(compiler), "PYTHONPATH": paths, "ASAN_OPTIONS": "detect_leaks=0"}
        if not builds:
            environment["LD_PRELOAD"] = " ".join(found)
        return subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, errors="replace"
        )

    return run


def test_a_planted_error_is_reported(run: Run) -> None:
    """In a thread of a kernel, the last one of errors.cu. Without an error nothing is."""
    built = run(["-c", BUILD_ERRORS], builds=True)
    assert built.returncode == 0, built.stderr
    assert run(["-c", ERRORS, "0"]).returncode == 0
    done = run(["-c", ERRORS, "5"])
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr, done.stderr


def test_nothing_is_reported(run: Run) -> None:
    built = run(["-c", BUILD], builds=True)
    assert built.returncode == 0, built.stderr
    done = run(["-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS])
    assert done.returncode == 0 and "runtime error" not in done.stderr + done.stdout, done.stdout + done.stderr
