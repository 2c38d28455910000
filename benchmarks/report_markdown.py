"""Records as Markdown: the report of one run, and the summary that the README shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from records import Record, Row, bound_ms, default_row, machine, median, named, rate, rows_of

PYTORCH = ("sdpa", "torch", "plain PyTorch")  # what a user of plain PyTorch runs, op by op


def brief(row: Row) -> str:
    """One result in a few words, for the terminal."""
    if row["status"] != "ok" or "timings" not in row:
        return f"{row['status']}: {row['reason']}" if "reason" in row else row["status"]
    if not row["timings"]:
        return f"{row['peak_mib']:.1f} MiB"
    return ", ".join(f"{direction} {timed['median_ms']:.3g} ms" for direction, timed in row["timings"].items())


def table(header: Sequence[str], body: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(header) + " |"
    yield "|---|" + "---:|" * (len(header) - 1)
    for cells in body:
        yield "| " + " | ".join(cells) + " |"


def _times(base: float | None, ms: float | None) -> str:
    return f"{base / ms:.2f}x" if base and ms else "-"


def _share(bound: float | None, ms: float | None) -> str:
    return f"{bound / ms:.0%}" if bound and ms else "-"


def summary(record: Record, at_most: int | None = None) -> Iterator[str]:
    """A line for each case, or the first `at_most` of each op: fastattn's default against the others. Over 1x: fastattn
    is faster, or takes less memory."""
    for name, op in record["ops"].items():
        measured = [(case, rows_of(record, case)) for case in record["cases"] if case["op"] == name]
        measured = [(case, rows) for case, rows in measured if rows][:at_most]
        if not measured:
            continue
        if op["directions"]:
            direction = op["directions"][-1]
            done = {"both": "forward and backward", "step": "one training step", "decode": "one batch"}[direction]
            header = ["case", "fastattn, ms", "reference path", "PyTorch", "torch.compile", "fastest other"]
            header.append("of the bound")
            body = [_times_of(record, case, rows, direction) for case, rows in measured]
        else:
            done = "at its peak, of one training step beyond weights and Adam's state"
            header = ["case", "fastattn, MiB", "reference path", "PyTorch"]
            body = [_memory_of(case, rows) for case, rows in measured]
        yield from ("", f"**{name}**, {done}", "")
        yield from table(header, body)


def _times_of(record: Record, case: Row, rows: Sequence[Row], direction: str) -> list[str]:
    ms = median(default_row(rows), direction)
    peers = [(median(row, direction), row["provider"]) for row in rows if not row["ours"]]
    peers = sorted((peer_ms, peer) for peer_ms, peer in peers if peer_ms)
    compiled = [peer_ms for peer_ms, peer in peers if peer.startswith("torch.compile")]
    torch_ms = next((peer_ms for peer_ms, peer in peers if peer in PYTORCH), None)
    fastest = f"{_times(peers[0][0], ms)} {peers[0][1]}" if peers and ms else "-"
    if ms is None and peers:
        fastest = f"{peers[0][0]:.3g} ms {peers[0][1]}"
    reference = named(rows, "reference")
    cells = [case["case"], f"{ms:.3g}" if ms else "-", _times(median(reference, direction), ms)]
    cells += [_times(torch_ms, ms), _times(min(compiled, default=None), ms), fastest]
    return [*cells, _share(bound_ms(record, case, direction), ms)]


def _memory_of(case: Row, rows: Sequence[Row]) -> list[str]:
    mib = [row["peak_mib"] if row and row["status"] == "ok" else None for row in (
        default_row(rows), named(rows, "reference"), named(rows, PYTORCH[-1])
    )]  # fmt: skip
    return [case["case"], f"{mib[0]:.1f}" if mib[0] else "-", _times(mib[1], mib[0]), _times(mib[2], mib[0])]


def ceilings(record: Record) -> str:
    measured = record["ceilings"]
    if measured is None:
        return "Ceilings were not measured."
    products = ", ".join(f"{per_s / 1e12:.3g} TFLOP/s in {dtype}" for dtype, per_s in measured["flop_per_s"].items())
    return f"Measured here: copying {measured['byte_per_s'] / 1e9:.4g} GB/s, large matrix products {products}."


def _provenance(record: Record) -> Iterator[str]:
    environment = record["environment"]
    commit = environment["commit"] or "unknown"
    changed = ", with uncommitted changes" if environment["uncommitted_changes"] else ""
    yield f"{machine(record)}."
    yield f"{environment['date']}, commit {commit}{changed}, sources {environment['sources']}."
    if environment["load_before"] is not None:
        yield f"Load of the machine before the first measurement: {environment['load_before']:.2f}."
    yield ceilings(record)


def write(record: Record, out: Path) -> Path:
    """report.md and its plots. Returns the report's path."""
    lines = ["# fastattn: benchmark report", "", *_provenance(record), ""]
    lines += [
        "Medians; in brackets the quartiles. Over 1x: faster than the reference path. Bound: the time that the case's",
        "FLOPs and bytes need at the ceilings; what fits into a cache may be faster. Error: share of the bound of",
        "`fastattn.doctor.judge`. Memory: the peak of the last direction beyond what was allocated before.",
    ]
    if record["missing"]:
        lines += ["", f"**{record['missing']} measurements are missing: the time was up. Run again to go on.**"]
    lines += [
        "",
        "## Summary",
        "",
        "Over 1x: fastattn's default is faster, or takes less memory, than the column's name.",
    ]
    lines += summary(record)
    try:
        import report_plots  # a machine that measures need not be able to draw

        lines += [line for name in report_plots.draw(record, out) for line in ("", f"![{name}]({name})")]
    except ImportError as error:
        lines += ["", f"No plots: {error}. `report.py --render` draws them anywhere."]
    for name, op in record["ops"].items():
        lines += ["", f"## {name}", "", f"{op['formula']}."]
        for case in (case for case in record["cases"] if case["op"] == name):
            if rows := rows_of(record, case):
                lines += ["", f"### {case['case']}", "", *_details(record, case, op, rows)]
    path = out / "report.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def _details(record: Record, case: Row, op: Row, rows: Sequence[Row]) -> Iterator[str]:
    header = ["provider", *(f"{direction}, ms" for direction in op["directions"])]
    header += [*(f"{unit}s" for unit in op["rates"]), *(["of the bound", "speed"] if op["directions"] else [])]
    header += ["error", "MiB"]
    body, refused = [], []
    for row in rows:
        if row["status"] != "ok":
            refused.append(f"- {row['provider']}: {row['status']}: {row['reason']}")
            continue
        notes = f" ({row['ran']} ran)" if row.get("ran", row["provider"]) not in row["provider"] else ""
        notes += f" (mask alone {row['mask_ms']:.3g} ms)" if "mask_ms" in row else ""
        notes += " (default)" if row.get("default") and row["provider"] != "default" else ""
        cells = [row["provider"] + notes]
        for timed in row["timings"].values():
            cells.append(f"{timed['median_ms']:.4g} [{timed['q1_ms']:.4g}, {timed['q3_ms']:.4g}]")
        for last in op["directions"][-1:]:
            ms = median(row, last)
            cells += [rate(case["work"][last][unit], ms, unit) for unit in op["rates"]]
            cells += [_share(bound_ms(record, case, last), ms), _times(median(named(rows, op["baseline"]), last), ms)]
        body.append([*cells, f"{row['error_over_bound']:.2f}", f"{row['peak_mib']:.1f}"])
    if body:
        yield from table(header, body)
    if refused:
        yield from ("", *refused)
