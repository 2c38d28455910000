"""The README's performance section, from the records benchmarks/results/report_*.json; nothing in it is typed."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import records
import report_markdown

README = records.ROOT / "README.md"
RESULTS = Path(__file__).parent / "results"
CASES = 5  # of each op; the record has all
BEGIN, END = "<!-- performance: written by benchmarks/report.py --readme -->\n", "<!-- /performance -->\n"


def section(results: Path) -> str:
    """What stands between the markers: the summary of every record, or that there is none yet."""
    found = [(path, records.load(path)) for path in sorted(results.glob("report_*.json"))]
    return "\n".join(_lines(found)) + "\n"


def _lines(found: list[tuple[Path, records.Record]]) -> Iterator[str]:
    on_gpu = {path: record["environment"]["device"]["device"] != "cpu" for path, record in found}
    if not any(on_gpu.values()):
        yield "No record from a GPU has been made yet, so no speed-up is claimed on one."
    for path, record in sorted(found, key=lambda pair: not on_gpu[pair[0]]):
        environment = record["environment"]
        yield ""
        yield f"On {records.machine(record)}, {environment['date'][:10]},"
        changed = ", with uncommitted changes" if environment["uncommitted_changes"] else ""
        yield f"commit {(environment['commit'] or 'unknown')[:10]}{changed} ([record](benchmarks/results/{path.name})):"
        yield "over 1x, fastattn's default is faster than the column's name. The bound is the time that the FLOPs and"
        yield f"bytes of the case need at this machine's ceilings. {report_markdown.ceilings(record)}"
        if environment["load_before"] is not None:
            busy = ": others were at work, the figures are rough" if environment["load_before"] > 0.5 else ""
            yield f"Load of the machine before the first measurement: {environment['load_before']:.2f}{busy}."
        yield from report_markdown.summary(record, CASES)


def split(text: str) -> tuple[str, str, str]:
    """The README before, between and after the markers. ValueError where it has none."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"README.md must hold the markers {BEGIN.strip()} and {END.strip()}, once each, in this order")
    before, rest = text.split(BEGIN)
    between, after = rest.split(END)
    return before, between, after


def main(write: bool, readme: Path = README, results: Path = RESULTS) -> int:
    """Write the section, or compare: 1 where README and records disagree, else 0."""
    before, between, after = split(readme.read_text())
    wanted = section(results)
    if write:
        readme.write_text(before + BEGIN + wanted + END + after)
        return 0
    if between == wanted:
        print("README.md says what the records say")
        return 0
    lines = itertools.zip_longest(between.splitlines(), wanted.splitlines(), fillvalue="(ends)")
    said, meant = next(pair for pair in lines if pair[0] != pair[1])
    print("README.md and the records disagree; report.py --readme writes it. The first difference:", file=sys.stderr)
    print(f"  README:  {said}\n  records: {meant}", file=sys.stderr)
    return 1
