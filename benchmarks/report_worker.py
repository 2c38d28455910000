"""The process that measures. It is separate from the process that keeps the results, because a provider may crash, hang
or use all memory.

One worker runs many jobs, since importing torch takes seconds. It is replaced when it dies or a job takes too long. A
ProcessPoolExecutor cannot end a job that hangs, and does not report by which signal a process died.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import harness
import timing
import torch

Plan = list[tuple[harness.Benchmark, Any]]  # each case, and the benchmark that measures it


class Job(NamedTuple):
    """One provider on one case of the plan."""

    index: int
    provider: str


class Worker:
    """`ask` returns a job's result, whatever happens to the process that runs it.

    make_plan: makes the plan there. budget_s: for the samples of each direction. log: gets the output of the process.
    """

    def __init__(self, make_plan: Callable[[], Plan], device: torch.device, budget_s: float, log: Path) -> None:
        self.arguments, self.log = (make_plan, device, budget_s, log), log
        self.process: Any = None

    def ask(self, job: Job | None, limit_s: float, deadline: float) -> dict[str, Any] | None:
        """The job's row, or {"status": "timed out" or "crashed", "reason": ...}; None when time.monotonic() reached the
        deadline before there was an answer. job None: {"ceilings", "conditions"}, those of timing.py."""
        if time.monotonic() >= deadline:
            return None
        if self.process is None:
            self._start()
        left = deadline - time.monotonic()
        try:
            self.connection.send(job)
            if not self.connection.poll(max(0.0, min(limit_s, left))):
                self.stop()
                return None if left < limit_s else {"status": "timed out", "reason": f"not done in {limit_s:g} s"}
            row, usable = self.connection.recv()
            if not usable:
                self.stop()
            return row
        except (EOFError, OSError):  # the other end is closed: the process has ended, or is ending
            self.process.join(10)
            status = self.process.exitcode
            self.stop()
            name = f"signal {signal.Signals(-status).name}" if status and status < 0 else f"exit status {status}"
            return {"status": "crashed", "reason": f"the process ended with {name}"}

    def _start(self) -> None:
        # A worker that is killed may leave semaphores, for instance of torch.compile. That they are removed is no news.
        os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.resource_tracker")
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=run_jobs, args=(theirs, *self.arguments))
        self.process.start()
        theirs.close()
        try:
            self.connection.recv()
        except EOFError as error:
            self.stop()
            raise RuntimeError(f"the measuring process did not start; its output is in {self.log}") from error

    def stop(self) -> None:
        """End the process and everything it started."""
        if self.process is None:
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)  # it leads its own group
        except ProcessLookupError:
            self.process.kill()
        self.process.join()
        self.connection.close()
        self.process = None


def run_jobs(
    connection: Connection, make_plan: Callable[[], Plan], device: torch.device, budget_s: float, log: Path
) -> None:
    """The worker: answers each Job with (row, is this process still usable), until the other end closes."""
    os.setsid()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    plan = make_plan()
    if device.type == "cuda":
        torch.cuda.set_device(device)  # events are recorded there
    current: tuple[int | None, Any] = (None, None)  # all providers of a case share one Checked
    connection.send("ready")
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        if job is None:
            ceilings = timing.ceilings(device, {case.dtype for _, case in plan})
            connection.send(({"ceilings": ceilings, "conditions": timing.conditions(device)}, True))
            continue
        index, name = job
        benchmark, case = plan[index]
        print(f"{benchmark.name} {case}: {name}", flush=True)
        if current[0] != index:
            current = (None, None)
            _empty_cache(device)
            try:
                current = (index, harness.Checked(benchmark, case, device))
            except torch.OutOfMemoryError as error:
                connection.send(({"status": "out of memory", "reason": str(error).splitlines()[0]}, True))
                continue
        provider = next(provider for provider in current[1].providers if provider.name == name)
        row = harness.measure_provider(current[1], provider, budget_s)
        connection.send((row, _empty_cache(device) and not provider.ends_process))


def _empty_cache(device: torch.device) -> bool:
    """Frees what the last provider left. False where the device no longer works: after an illegal access nothing does,
    in this process."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        return True
    except RuntimeError:
        return False


def _end_with(parent: int) -> None:
    """A worker ends when its report was killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)
