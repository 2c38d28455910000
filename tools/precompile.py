"""Compiles Triton kernels into Triton's cache, in one process for each core. Nothing runs.

A launch on a CPU tensor, under `compiling`, compiles the same kernel as a launch on the GPU: Triton only reads dtypes,
numbers and the alignment of pointers. As a program this compiles the kernels of the doctor, or of the report, and their
launchers where there is a libcuda, and prints how many were not in the cache:

    python tools/precompile.py [--report] [--capability 90] [--seconds N]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from fastattn.backends import BACKENDS, OPS
from fastattn.check.cases import problems, solve
from fastattn.check.doctor import DTYPES, positive_number

# Of an H100. Whether decoding is split follows from it, and how many sums the backward of a norm adds up.
MULTIPROCESSORS = 132


class _NoDriver:
    """What Triton's launcher reads of a driver before it compiles, and the GPU's properties that launches read."""

    multiprocessors = MULTIPROCESSORS

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)  # Triton makes 90 90a

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # Triton keeps kernels by device, so each architecture is another device

    def get_current_stream(self, device: int) -> int:
        return 0

    @functools.cached_property
    def utils(self) -> Any:  # triton 3.9 launches all kernels from this module
        from triton.backends.nvidia.driver import CudaUtils

        return CudaUtils()


@contextlib.contextmanager
def compiling(capability: int, each: Callable[[Any], None] = lambda compiled: None) -> Iterator[None]:
    """Inside, backend="triton" accepts CPU tensors, and its launches compile for a GPU (90: sm_90) instead of running.

    each: is called with the compiled kernel of every launch. The process can do nothing else afterwards, because Triton
    still sees a GPU. TRITON_INTERPRET must not be set.
    """
    from fastattn.kernels.common import launch
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        each(compiled)
        return compiled

    def no_launcher(compiled: Any) -> tuple[Any, None, None]:
        """In place of the C launcher, which further launches of a kernel call."""
        return lambda *_: each(compiled), None, None

    driver.set_active(_NoDriver(capability))
    launch.forget()
    with contextlib.ExitStack() as stack:
        for name in {op.backend_module for op in OPS.values()}:
            stack.enter_context(mock.patch(f"fastattn.kernels.{name}.unsupported_reason", lambda *_: None))
        stack.enter_context(mock.patch.object(JITFunction, "run", compile_only))
        stack.enter_context(mock.patch.object(launch, "c_launcher", no_launcher))
        stack.enter_context(mock.patch.object(launch, "current_stream", lambda device: 0, create=True))
        stack.callback(launch.forget)
        yield


def compile_slice(jobs: Sequence[Callable[[], Any]], first: int, step: int, capability: int) -> None:
    """Compile the kernels of every step-th of these calls, and their launchers where there is a libcuda.

    What cannot be compiled fails when it is run.
    """

    def build_launcher(compiled: Any) -> None:
        """What launches a compiled kernel from C. Triton builds it with gcc, or finds it in its cache."""
        with contextlib.suppress(Exception):
            from triton.backends.nvidia.driver import CudaLauncher

            CudaLauncher(compiled.src, compiled.metadata)

    import triton

    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    with compiling(capability, build_launcher):
        for job in jobs[first::step]:
            with contextlib.suppress(Exception):
                job()
    print(f"{len(hits)} kernels, {hits.count(False)} of them compiled now", flush=True)


def over_cores(command: Iterable[str], seconds: float) -> None:
    """Run `command --slice NUMBER SLICES` in one process for each core, and end them after these seconds."""
    slices, deadline = os.cpu_count() or 1, time.monotonic() + seconds
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["OMP_NUM_THREADS"] = "1"  # the processes are as many as the cores
    processes = [
        subprocess.Popen([*command, "--slice", str(number), str(slices)], env=environment) for number in range(slices)
    ]
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()


def doctor_jobs() -> list[Callable[[], Any]]:
    """A call for every problem that the doctor solves on a GPU, forward and backward."""
    given = itertools.product(problems(torch.device("cpu"), large=True), DTYPES)
    return [functools.partial(solve, problem, "triton", dtype, dtype) for problem, dtype in given]


def report_jobs(table: str = "cuda") -> list[Callable[[], Any]]:
    """A call for every case of this table of the benchmarks."""
    sys.path.append(os.path.join(os.path.dirname(__file__), "..", "benchmarks"))
    import tables

    return [functools.partial(run_case, *given) for given in tables.plan(table)]


def run_case(benchmark: Any, case: Any) -> None:
    """What the report runs of a case: without dropout, as it is checked, and as it is timed. Random numbers are zeros.
    A model has one layer and few sentences: more have the same kernels. Decoding ends where a GPU would capture."""
    import harness
    from cases import ModelCase

    makes = [lambda *given: harness.function_run(harness.op_call(*given, "triton", new_mask=True), given[1])]
    if isinstance(case, ModelCase):
        case = dataclasses.replace(case, n_layers=1, batch=min(case.batch, max(16, 512 // case.length)))
        ours = [p for p in benchmark.providers(torch.device("cuda")) if p.ours and p.name not in BACKENDS]
        makes = [p.make for p in ours if "compiled" not in p.name]
    with (
        mock.patch.dict(os.environ, FASTATTN_BACKEND="triton"),
        mock.patch("torch.randn", lambda *shape, generator=None, **options: torch.zeros(*shape, **options)),
        mock.patch("fastattn.nn.DecoderCache.on_device", property(lambda self: True, lambda *_: None), create=True),
        mock.patch("fastattn.graphs.capture.CudaGraphs.warm_up", lambda self, work: work()),
    ):
        inputs = harness.Checked(benchmark, case, torch.device("cpu")).inputs
        for make, dropout_p in itertools.product(makes, dict.fromkeys((0.0, case.dropout_p))):
            with contextlib.suppress(Exception):
                for call in make(case, inputs, dropout_p).timed.values():
                    call()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--report", action="store_true", help="the kernels of the report, in place of the doctor's")
    parser.add_argument("--capability", type=int, metavar="N", help="90 for sm_90; default: the GPU of this machine")
    parser.add_argument("--seconds", type=positive_number, default=300.0, metavar="N", help="stop after this long")
    parser.add_argument("--slice", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.capability is None and not torch.cuda.is_available():
        parser.error("there is no GPU here: --capability must name one")
    capability = arguments.capability or int("{}{}".format(*torch.cuda.get_device_capability()))
    if arguments.slice:
        compile_slice(report_jobs() if arguments.report else doctor_jobs(), *arguments.slice, capability)
    else:
        over_cores([sys.executable, __file__, *sys.argv[1:], "--capability", str(capability)], arguments.seconds)


if __name__ == "__main__":
    main()
