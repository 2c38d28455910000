"""Measure everything there is time for, and write it down: one command, its results safe at any moment.

    python benchmarks/report.py --out DIR [--minutes N] [--only OP ...] [--device cuda]
    python benchmarks/report.py --render RECORD      report.md and plots anew, also on another machine
    python benchmarks/report.py --compare A B        two records side by side, and what got slower
    python benchmarks/report.py --readme             RESULTS.md and the README's figures from the records in results/

DIR gets rows.jsonl (each result, as soon as it is known), at the end record.json, report.md and the plots, and the
measuring process's output. The most valuable cases come first; each provider works in another process, within a time
limit, so one that crashes, hangs or runs out of memory is a line in the report. Run again with the same DIR, the report
goes on where it was stopped, unless code, machine or versions have changed.
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
from typing import Any

import report_markdown
import result_files
import torch
from report_worker import Job, Task, Worker

from fastattn.check.doctor import positive_number, usable_device

LIMIT_S = {"cpu": 150.0, "cuda": 150.0}  # of one provider on one case
WRITING_S = 12.0  # kept for the plots
BUDGET_S = {"cpu": 0.3, "cuda": 0.15}  # of each direction's samples
Row = dict[str, Any]


class Log:
    """rows.jsonl: one line a result, appended whole. Lines of other code, machines or versions are left alone."""

    def __init__(self, path: Path, run: str) -> None:
        self.path, self.run = path, run
        self.rows: list[Row] = []
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue  # its writer was killed in the middle of it
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
    """One folder's worth of results. only: the names of the benchmarks to run, or None for all."""

    def __init__(self, out: Path, device: torch.device, table: str, only: Sequence[str] | None, catalogue: str) -> None:
        self.out, self.device, self.quick = out, device, table == "quick"
        self.plan = importlib.import_module(catalogue).plan(table)
        self.jobs = [job for job in self._all_jobs() if only is None or self.plan[job.index][0].name in only]
        self.environment = result_files.environment(device) | {"table": table}
        fixed = {key: self.environment[key] for key in ("device", "versions", "sources", "threads", "table")}
        run = hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:12]
        self.log = Log(out / "rows.jsonl", run)
        budget_s = 0.02 if self.quick else BUDGET_S[device.type]
        self.worker = Worker(Task(catalogue, table, str(device), out / "worker.log", budget_s))

    def _all_jobs(self) -> list[Job]:
        """Every provider on every case in the plan's order; what takes long to get ready later, or not if quick."""
        ordered = [
            (index + provider.later, Job(index, provider.name))
            for index, (benchmark, _) in enumerate(self.plan)
            for provider in benchmark.providers(self.device)
            if not (self.quick and provider.later)
        ]
        return [job for _, job in sorted(ordered, key=lambda pair: pair[0])]

    def measure(self, limit_s: float, deadline: float, say: Callable[[str], None]) -> None:
        """All jobs that are not done, until time.monotonic() reaches the deadline. limit_s: of one job."""
        done = {(row["op"], row["case"], row["provider"]) for row in self.log.rows}
        todo = [job for job in (Job(None, ""), *self.jobs) if self._key(job) not in done]
        say(f"{len(self.jobs) + 1} measurements, {len(self.jobs) + 1 - len(todo)} of them done before")
        try:
            for number, job in enumerate(todo, 1):
                row = None if time.monotonic() >= deadline else self.worker.ask(job, limit_s, deadline)
                if row is None:
                    break  # the report's time is up
                op, case, provider = self._key(job)
                row = {"op": op, "case": case, "provider": provider, "ours": self._is_ours(job)} | row
                self.log.append(row)
                say(f"{number}/{len(todo)} {op} {case}: {provider} {report_markdown.brief(row)}")
        finally:
            self.worker.stop()

    def _key(self, job: Job) -> tuple[str, str, str]:
        if job.index is None:
            return "ceilings", "", ""
        benchmark, case = self.plan[job.index]
        return benchmark.name, str(case), job.provider

    def _is_ours(self, job: Job) -> bool:
        if job.index is None:
            return False
        return next(p.ours for p in self.plan[job.index][0].providers(self.device) if p.name == job.provider)

    def write(self) -> result_files.Record:
        """record.json, report.md and the plots. "missing" counts the measurements there was no time for."""
        known = {(row["op"], row["case"], row["provider"]): row for row in self.log.rows}
        in_order = sorted(self.jobs, key=lambda job: job.index)
        rows = [known[self._key(job)] for job in in_order if self._key(job) in known]
        cases = [self.plan[index] for index in sorted({job.index for job in self.jobs})]
        ceilings = known.get(("ceilings", "", ""), {}).get("ceilings")
        record = {"environment": self.environment, "ceilings": ceilings, "missing": len(in_order) - len(rows)}
        result_files.save(record | result_files.described(cases) | {"rows": rows}, self.out / "record.json")
        record = result_files.load(self.out)
        report_markdown.write_report(record, self.out)
        return record


def record_path(text: str) -> Path:
    path = Path(text)
    if not (path / "record.json" if path.is_dir() else path).is_file():
        raise argparse.ArgumentTypeError(f"there is no record at {path}")
    return path


def folder(text: str) -> Path:
    """A folder that is there or can be made."""
    try:
        Path(text).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be a folder: {error.strerror}") from error
    return Path(text)


def parser() -> argparse.ArgumentParser:
    default = "cuda" if torch.cuda.is_available() else "cpu"
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = made.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", type=folder, metavar="DIR", help="measure, and write everything here")
    action.add_argument("--render", type=record_path, metavar="RECORD", help="write report.md and plots of this record")
    action.add_argument("--compare", type=record_path, nargs=2, metavar=("A", "B"), help="records, or folders with one")
    action.add_argument("--readme", action="store_true", help="write the tables from the committed records")
    made.add_argument(
        "--minutes", type=positive_number, default=8.0, metavar="N", help="stop after this long (default 8)"
    )
    made.add_argument("--only", nargs="+", metavar="OP", help="only these benchmarks")
    made.add_argument("--device", type=usable_device, default=default, help=f"cpu or cuda (here: {default})")
    made.add_argument("--quick", action="store_true", help="tiny cases, to see that everything runs")
    return made


def main(argv: Sequence[str] | None = None, catalogue: str = "catalogue") -> int:
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
    names = {benchmark.name for benchmark, _ in importlib.import_module(catalogue).plan("quick")}
    if unknown := set(arguments.only or ()) - names:
        parser().error(f"--only: no benchmark {', '.join(sorted(unknown))}; there are {', '.join(sorted(names))}")
    report = Report(arguments.out, device, "quick" if arguments.quick else device.type, arguments.only, catalogue)

    def say(line: str) -> None:
        print(f"{time.monotonic() - start:5.0f} s  {line}", flush=True)

    try:
        report.measure(LIMIT_S[device.type], start + max(0.0, 60 * arguments.minutes - WRITING_S), say)
    except KeyboardInterrupt:
        say("stopped")
    record = report.write()
    say(f"wrote {arguments.out / 'report.md'}")
    return int(any(result_files.is_our_failure(row) for row in record["rows"]))


if __name__ == "__main__":
    sys.exit(main())
