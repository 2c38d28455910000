"""The plot of one record: each case against its fastest alternative."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files only, no display
import matplotlib.pyplot as plt
from result_files import Record, case_rows, default_row, fastest_other

MOST = 40  # cases, the first of the table


def draw(record: Record, out: Path) -> list[str]:
    """A bar for each case: how many times as fast fastattn's default is as the fastest alternative. Returns the names
    of the files, none where the record has no such case."""
    bars = []
    for case in record["cases"]:
        rows = case_rows(record, case)
        for direction in record["ops"][case["op"]]["directions"][-1:] if default_row(rows) else ():
            if other := fastest_other(rows, direction):
                bars.append((f"{case['op']}: {case['case']}", *other))
    if not bars:
        return []
    bars, path = bars[:MOST][::-1], out / "speed_ups.png"
    figure, axes = plt.subplots(figsize=(11, 0.8 + 0.3 * len(bars)), layout="constrained")
    for place, (_, ratio, other) in enumerate(bars):
        axes.barh(place, ratio, color="tab:blue" if ratio >= 1 else "tab:orange")
        axes.text(ratio, place, f" {ratio:.2f}x {other}", va="center", fontsize=8)
    axes.set_yticks(range(len(bars)), [name for name, *_ in bars], fontsize=8)
    axes.axvline(1, color="black", lw=1)
    axes.margins(x=0.25)
    axes.set_title("Speed of fastattn's default; 1 is the fastest alternative, which is named at the bar", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return [path.name]
