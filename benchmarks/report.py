"""Measure everything that there is time for, and write it down. Each result is saved as soon as it is known.

    python benchmarks/report.py [--only OP ...] [--match PATTERN] [--minutes N] [--out DIR] [--device cuda]
    python benchmarks/report.py --render RECORD      write report.md and the plot again, also on another machine
    python benchmarks/report.py --readme             write the tables of the README and of docs/

First one case of every op, a training step, an accelerated model and a translation: after them, in some three minutes
of a CPU, DIR has report.md and a plot. Then follow the other cases, the most valuable first, until the time is up.
DIR/record.json has every result; worker.log the output of the process that measures. A provider that crashes, hangs or
runs out of memory has that as its result, and the report goes on. A second run with the same DIR continues where the
first was stopped. If code, machine or versions have changed, the old record is renamed to record_DATE.json, and
everything is measured again.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import harness
import report_markdown
import result_files
import tables
import timing
import torch
from result_files import Row

from fastattn.check.doctor import positive_number, usable_device

LIMIT_S = 150.0  # of one provider on one case
WRITING_S = 12.0  # kept for the report
BUDGET_S = {"cpu": 0.3, "cuda": 0.15}  # of each direction's samples
QUICK_BUDGET_S = 0.02

Plan = list[tuple[harness.Benchmark, Any]]  # each case, and the benchmark that measures it


class Job(NamedTuple):
    """One provider on one case of the plan; without a provider, the ceilings of the machine."""

    index: int
    provider: str | None


def measured(jobs: Sequence[Job], deadline: float, log: Path, *arguments: Any) -> Iterator[Row]:
    """The row of each job in turn, by run_jobs(.., *arguments) in another process. After a crash or a hang, which is
    that job's row, a new process goes on. Ends at the deadline. log: gets the output of the processes."""
    # A process that is killed may leave semaphores, for instance of torch.compile. That they are removed is no news.
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.resource_tracker")
    context, left = multiprocessing.get_context("spawn"), list(jobs)
    while left and time.monotonic() < deadline:
        connection, theirs = context.Pipe()
        process = context.Process(target=run_jobs, args=(theirs, log, tuple(left), *arguments))
        process.start()
        theirs.close()
        is_ready = False
        try:
            is_ready = connection.recv()
            while left:
                limit = min(LIMIT_S, deadline - time.monotonic())
                if connection.poll(max(0.0, limit)):
                    row = connection.recv()
                elif limit < LIMIT_S:
                    return  # the report's time is up
                else:
                    row = {"status": "timed out", "reason": f"not done in {LIMIT_S:g} s"}
                del left[0]
                yield row
                if row.get("status") == "timed out":
                    break
        except EOFError as error:  # the process has ended
            process.join(10)
            if not is_ready:
                raise RuntimeError(f"the measuring process did not start; its output is in {log}") from error
            if status := process.exitcode:
                del left[0]
                name = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
                yield {"status": "crashed", "reason": f"the process ended with {name}"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it leads its own group, with all that it started
            process.kill()
            process.join()
            connection.close()


def run_jobs(
    connection: Connection,
    log: Path,
    jobs: Sequence[Job],
    make_plan: Callable[[], Plan],
    device: torch.device,
    budget_s: float,
) -> None:
    """The process that measures: sends True, then the row of each job. It ends early after a provider that leaves it
    unusable. budget_s: for the samples of each direction."""
    os.setsid()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    plan, checked = make_plan(), None
    if device.type == "cuda":
        torch.cuda.set_device(device)  # events are recorded there
    connection.send(True)
    for index, name in jobs:
        benchmark, case = plan[index]
        print(f"{benchmark.name} {case}: {name}", flush=True)
        if name is None:
            ceilings = timing.ceilings(device, {case.dtype for _, case in plan})
            connection.send({"ceilings": ceilings, "conditions": timing.conditions(device)})
            continue
        provider = next(provider for provider in benchmark.providers(device) if provider.name == name)
        if checked is None or checked.case is not case:  # all providers of a case share one
            checked = None
            _is_usable(device)
            checked = harness.Checked(benchmark, case, device)
        connection.send(harness.measure_provider(checked, provider, budget_s))
        if not _is_usable(device):
            return


def _is_usable(device: torch.device) -> bool:
    """Frees what the last provider left. False where the device no longer works: after an illegal access nothing does,
    in this process."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            gc.collect()  # of a model with CUDA graphs, whose pool would count as the next one's
            torch.cuda.empty_cache()
        return True
    except RuntimeError:
        return False


def _end_with(parent: int) -> None:
    """The process ends when the report was killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


class Report:
    """The results in one folder. only: the names of the benchmarks to run, or None for all. match: a regular
    expression that has to be found in a measurement's "case: provider"."""

    def __init__(
        self,
        out: Path,
        device: torch.device,
        table: str,
        only: Sequence[str] | None,
        match: str,
        plan: Callable[[str], Plan],
    ) -> None:
        self.out, self.plan = out, plan(table)
        is_quick = table == "quick"
        self.providers = {
            Job(index, provider.name): provider
            for index, (benchmark, _) in enumerate(self.plan)
            for provider in benchmark.providers(device)
            if not (is_quick and provider.later)
        }

        def is_selected(job: Job) -> bool:
            op, *names = self._key(job)
            return (only is None or op in only) and re.search(match, ": ".join(names)) is not None

        self.jobs = sorted(filter(is_selected, self.providers), key=self._place)
        self.environment = result_files.environment(device) | {"table": table}
        before = result_files.unfinished(out, self.environment) or {"rows": []}
        self.of_machine = {name: before.get(name) for name in ("ceilings", "conditions")}
        self.rows = {result_files.row_key(row): row for row in before["rows"]}
        self.arguments = partial(plan, table), device, QUICK_BUDGET_S if is_quick else BUDGET_S[device.type]

    def measure(self, deadline: float, say: Callable[[str], None]) -> None:
        """All jobs that are not done, until time.monotonic() reaches the deadline."""
        todo = [job for job in self.jobs if self._key(job) not in self.rows]
        say(f"{len(self.jobs)} measurements, {len(self.jobs) - len(todo)} of them done before")
        first = sum(self._place(job) < tables.OVERVIEW for job in todo)
        ceilings = [Job(0, None)] * (self.of_machine["ceilings"] is None)
        jobs = [*ceilings, *todo]
        rows = measured(jobs, deadline, self.out / "worker.log", *self.arguments)
        for number, (job, row) in enumerate(zip(jobs, rows, strict=False), 1 - len(ceilings)):
            if job.provider is None:
                self.of_machine = {name: row.get(name) for name in self.of_machine}
                continue
            op, case, provider = key = self._key(job)
            self.rows[key] = {"op": op, "case": case, "provider": provider, "ours": self.providers[job].ours} | row
            self.save()
            say(f"{number}/{len(todo)} {op} {case}: {provider} {report_markdown.brief(row)}")
            if number == first < len(todo):
                say(f"wrote {self.write()}; the other cases follow")

    def save(self) -> None:
        """record.json. "missing" counts the measurements there was no time for."""
        done = [job for job in self.providers if self._key(job) in self.rows]
        cases = [self.plan[index] for index in sorted({job.index for job in (*done, *self.jobs)})]
        record = {
            "environment": self.environment,
            **self.of_machine,
            "missing": len(set(self.jobs) - set(done)),
            **result_files.described(cases),
            "rows": [self.rows[self._key(job)] for job in done],
        }
        result_files.save(record, self.out / result_files.RECORD)

    def write(self) -> Path:
        self.save()
        return report_markdown.write_report(result_files.load(self.out), self.out)

    def _place(self, job: Job) -> int:
        """In the order of measuring. The reference path is slow, and no rival."""
        return job.index + max(self.providers[job].later, harness.SELDOM * (job.provider == "reference"))

    def _key(self, job: Job) -> tuple[str, str, str]:
        benchmark, case = self.plan[job.index]
        return benchmark.name, str(case), str(job.provider)


def parser() -> argparse.ArgumentParser:
    default = "cuda" if torch.cuda.is_available() else "cpu"
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    action = made.add_mutually_exclusive_group()
    action.add_argument("--render", type=Path, metavar="RECORD", help="write report.md and the plot of this record")
    action.add_argument("--readme", action="store_true", help="write the tables from the committed records")
    minutes = "stop after this long (default 8)"
    made.add_argument("--out", type=Path, default=Path("report"), metavar="DIR", help="folder of the results (report)")
    made.add_argument("--minutes", type=positive_number, default=8.0, metavar="N", help=minutes)
    made.add_argument("--only", nargs="+", metavar="OP", help="only these benchmarks")
    matched = "only where this regular expression is found in 'case: provider'"
    made.add_argument("--match", default="", metavar="PATTERN", help=matched)
    made.add_argument("--device", type=usable_device, default=default, help=f"cpu or cuda (here: {default})")
    made.add_argument("--quick", action="store_true", help="tiny cases, to see that everything runs")
    return made


def main(argv: Sequence[str] | None = None, plan: Callable[[str], Plan] = tables.plan) -> int:
    """The command. Returns 1 when a backend of fastattn failed or was wrong."""
    arguments = parser().parse_args(argv)
    if arguments.render:
        folder = arguments.render if arguments.render.is_dir() else arguments.render.parent
        print(f"wrote {report_markdown.write_report(result_files.load(arguments.render), folder)}")
        return 0
    if arguments.readme:
        for path, text in report_markdown.pages().items():
            path.write_text(text)
        return 0
    start, device = time.monotonic(), arguments.device
    names = {benchmark.name for benchmark, _ in plan("quick")}
    if unknown := set(arguments.only or ()) - names:
        parser().error(f"--only: no benchmark {', '.join(sorted(unknown))}; there are {', '.join(sorted(names))}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    table = "quick" if arguments.quick else device.type
    report = Report(arguments.out, device, table, arguments.only, arguments.match, plan)

    def say(line: str) -> None:
        print(f"{time.monotonic() - start:5.0f} s  {line}", flush=True)

    try:
        report.measure(start + max(0.0, 60 * arguments.minutes - WRITING_S), say)
    except KeyboardInterrupt:
        say("stopped")
    say(f"wrote {report.write()}")
    return int(any(row["ours"] and row["status"] in result_files.FAILURES for row in report.rows.values()))


if __name__ == "__main__":
    sys.exit(main())
