"""Measure everything that there is time for, and write it down. Each result is saved as soon as it is known.

    python benchmarks/report.py [--only OP ...] [--match PATTERN] [--minutes N] [--out DIR] [--device cuda]
    python benchmarks/report.py --render RECORD      write report.md and plots again, also on another machine
    python benchmarks/report.py --compare A B        compare two records, and name what got slower
    python benchmarks/report.py --readme             write docs/results.md, and other pages' figures

DIR gets record.json with every result, and at the end report.md and plots; worker.log has the output of the processes.
The most valuable cases come first. Each provider runs in another process, within a time limit: if it crashes, hangs or
runs out of memory, that is its result, and the report goes on. A second run with the same DIR continues where the first
was stopped. If code, machine or versions have changed, the old record is renamed to record_DATE.json, and everything is
measured again.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import report_markdown
import result_files
import tables
import torch
from report_worker import Job, Plan, Worker

from fastattn.check.doctor import positive_number, usable_device

LIMIT_S = 150.0  # of one provider on one case
WRITING_S = 12.0  # kept for the plots
BUDGET_S = {"cpu": 0.3, "cuda": 0.15}  # of each direction's samples


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
        quick = table == "quick"
        self.providers = {
            Job(index, provider.name): provider
            for index, (benchmark, _) in enumerate(self.plan)
            for provider in benchmark.providers(device)
            if not (quick and provider.later)
        }

        def is_selected(job: Job) -> bool:
            op, *names = self._key(job)
            return (only is None or op in only) and re.search(match, ": ".join(names)) is not None

        selected = (job for job in self.providers if is_selected(job))
        self.jobs = sorted(selected, key=lambda job: job.index + self.providers[job].later)  # in the order of measuring
        self.environment = result_files.environment(device) | {"table": table}
        before = result_files.unfinished(out, self.environment) or {"rows": [], "ceilings": None}
        self.of_machine = {name: before.get(name) for name in ("ceilings", "conditions")}
        self.rows = {result_files.row_key(row): row for row in before["rows"]}
        budget_s = 0.02 if quick else BUDGET_S[device.type]
        self.worker = Worker(partial(plan, table), device, budget_s, out / "worker.log")

    def measure(self, deadline: float, say: Callable[[str], None]) -> None:
        """All jobs that are not done, until time.monotonic() reaches the deadline."""
        todo = [job for job in self.jobs if self._key(job) not in self.rows]
        say(f"{len(self.jobs)} measurements, {len(self.jobs) - len(todo)} of them done before")
        try:
            if self.of_machine["ceilings"] is None:
                found = self.worker.ask(None, LIMIT_S, deadline) or {}
                self.of_machine = {name: found.get(name) for name in self.of_machine}
            for number, job in enumerate(todo, 1):
                row = self.worker.ask(job, LIMIT_S, deadline)
                if row is None:
                    break  # the report's time is up
                op, case, provider = key = self._key(job)
                identity = {"op": op, "case": case, "provider": provider, "ours": self.providers[job].ours}
                self.rows[key] = identity | row
                self.save()
                say(f"{number}/{len(todo)} {op} {case}: {provider} {report_markdown.brief(row)}")
        finally:
            self.worker.stop()

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

    def _key(self, job: Job) -> tuple[str, str, str]:
        benchmark, case = self.plan[job.index]
        return benchmark.name, str(case), job.provider


def parser() -> argparse.ArgumentParser:
    default = "cuda" if torch.cuda.is_available() else "cpu"
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    action = made.add_mutually_exclusive_group()
    action.add_argument("--render", type=Path, metavar="RECORD", help="write report.md and plots of this record")
    action.add_argument("--compare", type=Path, nargs=2, metavar=("A", "B"), help="records, or their folders")
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
    """The command. Returns 1 when a backend of fastattn failed or was wrong; with --compare, when one got slower."""
    arguments = parser().parse_args(argv)
    if arguments.render:
        folder = arguments.render if arguments.render.is_dir() else arguments.render.parent
        print(f"wrote {report_markdown.write_report(result_files.load(arguments.render), folder)}")
        return 0
    if arguments.compare:
        return result_files.compare(*arguments.compare)
    if arguments.readme:
        report_markdown.write_results()
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
    report.save()
    record = result_files.load(arguments.out)
    say(f"wrote {report_markdown.write_report(record, arguments.out)}")
    return int(any(result_files.is_our_failure(row) for row in record["rows"]))


if __name__ == "__main__":
    sys.exit(main())
