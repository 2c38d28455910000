"""Triton kernels compiled beforehand, in a process a core: nothing runs, Triton's cache is filled.

A launch on a CPU tensor, under `compiling`, compiles what the same launch compiles on the GPU: Triton looks at dtypes,
at numbers and at the alignment of pointers only. As a program it compiles what the doctor will launch:

    python benchmarks/precompile.py [--capability 90] [--seconds N]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from compiled_triton import NoDriver, compile_only

from fastattn._dispatch import OPS
from fastattn._problems import problems, solve
from fastattn.doctor import DTYPES


@contextlib.contextmanager
def compiling(capability: int) -> Iterator[None]:
    """Inside, backend="triton" takes CPU tensors, and its launches compile for a GPU (90: sm_90) instead of running."""
    from triton.runtime.driver import driver

    driver.set_active(NoDriver(capability))
    with contextlib.ExitStack() as stack:
        for served_by in {op.served_by for op in OPS.values()}:
            with contextlib.suppress(ImportError):  # an op may have no Triton room
                stack.enter_context(mock.patch(f"fastattn.kernels.{served_by}.why_not", lambda *_: None))
        stack.enter_context(compile_only())
        yield


def every(jobs: Sequence[Callable[[], Any]], slice_number: int, slices: int, capability: int) -> None:
    """Every slices-th of these calls, compiling. What cannot be compiled is met again, and told, when it is run."""
    with compiling(capability):
        for job in jobs[slice_number::slices]:
            with contextlib.suppress(Exception):
                job()


def over_cores(command: Sequence[str], seconds: float) -> None:
    """`command --slice NUMBER SLICES` in a process a core, ended after so many seconds."""
    slices, deadline = os.cpu_count() or 1, time.monotonic() + seconds
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    processes = [
        subprocess.Popen([*command, "--slice", str(number), str(slices)], env=environment) for number in range(slices)
    ]
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()


def doctors_jobs() -> list[Callable[[], Any]]:
    """Every problem that the doctor solves on a GPU, forward and backward."""

    def job(problem: Any, dtype: torch.dtype) -> Callable[[], Any]:
        return lambda: solve(problem, lambda **named: problem.function(**named, backend="triton"), dtype, dtype)

    return [job(problem, dtype) for problem in problems(torch.device("cpu"), large=True) for dtype in DTYPES]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, metavar="N", help="90 for sm_90; default: the GPU at hand")
    parser.add_argument("--seconds", type=float, default=300.0, metavar="N", help="stop after this long")
    parser.add_argument("--slice", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    capability = arguments.capability
    if capability is None:
        if not torch.cuda.is_available():
            parser.error("there is no GPU here: --capability says for which to compile")
        major, minor = torch.cuda.get_device_capability()
        capability = 10 * major + minor
    if arguments.slice:
        every(doctors_jobs(), *arguments.slice, capability)
        return 0
    over_cores([sys.executable, __file__, "--capability", str(capability)], arguments.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
