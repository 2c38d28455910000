"""Measure everything that there is time for, and write it down. Each result is saved as soon as it is known.

    python benchmarks/report.py [--only OP ...] [--minutes N] [--out DIR] [--device cuda]
    python benchmarks/report.py --render RECORD      write report.md and plots again, also on another machine
    python benchmarks/report.py --compare A B        compare two records, and name what got slower
    python benchmarks/report.py --readme             write docs/results.md and the README's figures

DIR gets rows.jsonl (each result), and at the end record.json, report.md and plots; worker.log has the output of the
measuring process. The most valuable cases come first. Each provider runs in another process, within a time limit: if it
crashes, hangs or runs out of memory, the report says so and goes on. A second run with the same DIR continues where the
first was stopped, unless code, machine or versions have changed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import report_markdown
import result_files
import torch
from report_worker import Job, Task, Worker
from result_files import Row

from fastattn.check.doctor import positive_number, usable_device

LIMIT_S = 150.0  # of one provider on one case
WRITING_S = 12.0  # kept for the plots
BUDGET_S = {"cpu": 0.3, "cuda": 0.15}  # of each direction's samples


class Log:
    """rows.jsonl: one result a line. Lines of other code, machines or versions are kept but not read."""

    def __init__(self, path: Path, run: str) -> None:
        self.path, self.run = path, run
        self.rows: list[Row] = []
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue  # the program was killed while it wrote this line
            if row.pop("run", None) == run:
                self.rows.append(row)

    def append(self, row: Row) -> None:
        self.rows.append(row)
        torn = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
        with self.path.open("a") as file:
            file.write("\n" * torn + json.dumps({"run": self.run} | row, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())


class Report:
    """The results in one folder. only: the names of the benchmarks to run, or None for all."""

    def __init__(self, out: Path, device: torch.device, table: str, only: Sequence[str] | None, tables: str) -> None:
        self.out, self.device, self.plan = out, device, importlib.import_module(tables).plan(table)
        quick = table == "quick"
        ordered = [
            (index + provider.later, Job(index, provider.name), provider.ours)
            for index, (benchmark, _) in enumerate(self.plan)
            if only is None or benchmark.name in only
            for provider in benchmark.providers(device)
            if not (quick and provider.later)
        ]
        ordered.sort(key=lambda entry: entry[0])
        self.jobs = {job: is_ours for _, job, is_ours in ordered}  # in the order of measuring
        self.environment = result_files.environment(device) | {"table": table}
        fixed = {key: self.environment[key] for key in ("device", "versions", "sources", "threads", "table")}
        run = hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:12]
        self.log = Log(out / "rows.jsonl", run)
        budget_s = 0.02 if quick else BUDGET_S[device.type]
        self.worker = Worker(Task(tables, table, str(device), out / "worker.log", budget_s))

    def measure(self, deadline: float, say: Callable[[str], None]) -> None:
        """All jobs that are not done, until time.monotonic() reaches the deadline."""
        done = {result_files.row_key(row) for row in self.log.rows}
        todo = [job for job in (Job(None, ""), *self.jobs) if self._key(job) not in done]
        say(f"{len(self.jobs) + 1} measurements, {len(self.jobs) + 1 - len(todo)} of them done before")
        try:
            for number, job in enumerate(todo, 1):
                row = None if time.monotonic() >= deadline else self.worker.ask(job, LIMIT_S, deadline)
                if row is None:
                    break  # the report's time is up
                op, case, provider = self._key(job)
                row = {"op": op, "case": case, "provider": provider, "ours": self.jobs.get(job, False)} | row
                self.log.append(row)
                say(f"{number}/{len(todo)} {op} {case}: {provider} {report_markdown.brief(row)}")
        finally:
            self.worker.stop()

    def _key(self, job: Job) -> tuple[str, str, str]:
        if job.index is None:
            return "ceilings", "", ""
        benchmark, case = self.plan[job.index]
        return benchmark.name, str(case), job.provider

    def write(self) -> result_files.Record:
        """record.json, report.md and the plots. "missing" counts the measurements there was no time for."""
        known = {result_files.row_key(row): row for row in self.log.rows}
        in_order = sorted(self.jobs, key=lambda job: job.index)
        rows = [known[self._key(job)] for job in in_order if self._key(job) in known]
        cases = [self.plan[index] for index in sorted({job.index for job in self.jobs})]
        ceilings = known.get(("ceilings", "", ""), {}).get("ceilings")
        record = {"environment": self.environment, "ceilings": ceilings, "missing": len(in_order) - len(rows)}
        result_files.save(record | result_files.described(cases) | {"rows": rows}, self.out / "record.json")
        record = result_files.load(self.out)
        report_markdown.write_report(record, self.out)
        return record


def parser() -> argparse.ArgumentParser:
    default = "cuda" if torch.cuda.is_available() else "cpu"
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = made.add_mutually_exclusive_group()
    action.add_argument("--render", type=Path, metavar="RECORD", help="write report.md and plots of this record")
    action.add_argument("--compare", type=Path, nargs=2, metavar=("A", "B"), help="records, or their folders")
    action.add_argument("--readme", action="store_true", help="write the tables from the committed records")
    minutes = "stop after this long (default 8)"
    made.add_argument("--out", type=Path, default=Path("report"), metavar="DIR", help="folder of the results (report)")
    made.add_argument("--minutes", type=positive_number, default=8.0, metavar="N", help=minutes)
    made.add_argument("--only", nargs="+", metavar="OP", help="only these benchmarks")
    made.add_argument("--device", type=usable_device, default=default, help=f"cpu or cuda (here: {default})")
    made.add_argument("--quick", action="store_true", help="tiny cases, to see that everything runs")
    return made


def main(argv: Sequence[str] | None = None, tables: str = "tables") -> int:
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
    arguments.out.mkdir(parents=True, exist_ok=True)
    names = {benchmark.name for benchmark, _ in importlib.import_module(tables).plan("quick")}
    if unknown := set(arguments.only or ()) - names:
        parser().error(f"--only: no benchmark {', '.join(sorted(unknown))}; there are {', '.join(sorted(names))}")
    report = Report(arguments.out, device, "quick" if arguments.quick else device.type, arguments.only, tables)

    def say(line: str) -> None:
        print(f"{time.monotonic() - start:5.0f} s  {line}", flush=True)

    try:
        report.measure(start + max(0.0, 60 * arguments.minutes - WRITING_S), say)
    except KeyboardInterrupt:
        say("stopped")
    record = report.write()
    say(f"wrote {arguments.out / 'report.md'}")
    return int(any(result_files.is_our_failure(row) for row in record["rows"]))


if __name__ == "__main__":
    sys.exit(main())
