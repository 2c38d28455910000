"""Plots of one record: each case against its fastest alternative, and speed and memory over the length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only, no display
import matplotlib.pyplot as plt
from result_files import Record, Row, case_rows, default_row, fastest_other, median

DEFAULT = "fastattn (default)"
MOST = 40  # cases in speed_ups.png, the first of the table
Curve = list[tuple[int, Row, Row]]  # (length, case, row), by length


def draw(record: Record, out: Path) -> list[str]:
    """Write the plots that the record has the figures for; returns their file names."""
    made = _draw_speed_ups(record, out / "speed_ups.png")
    for name, curves in _series(record).items():
        is_memory = name.startswith("training step")
        figure, axes = plt.subplots(figsize=(9, 3.8), layout="constrained")
        for number, (provider, curve) in enumerate(curves.items()):
            style: dict[str, Any] = {"color": "black", "lw": 2.5} if provider == DEFAULT else {"lw": 1.2}
            heights = [row["peak_mib"] if is_memory else _tflop_per_s(case, row) for _, case, row in curve]
            axes.plot([x for x, *_ in curve], heights, marker="os^Dv<>P"[number % 8], ms=4, label=provider, **style)
        what = "peak memory, MiB: lower is better" if is_memory else "TFLOP/s, both directions: higher is faster"
        axes.set(title=name, ylabel=what, xlabel="sequence length, at an equal number of tokens", ylim=(0, None))
        axes.set_xscale("log", base=2)
        lengths = [x for x, *_ in curves[DEFAULT]]
        axes.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths], fontsize=8)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
        made += _saved(figure, out / f"{name.replace(', ', '_').replace(' ', '_')}.png")
    return made


def _draw_speed_ups(record: Record, path: Path) -> list[str]:
    """A bar for each case: how many times as fast fastattn's default is as the fastest alternative."""
    bars = []
    for case in record["cases"]:
        rows = case_rows(record, case)
        for direction in record["ops"][case["op"]]["directions"][-1:] if default_row(rows) else ():
            if other := fastest_other(rows, direction):
                bars.append((f"{case['op']}: {case['case']}", *other))
    if not bars:
        return []
    figure, axes = plt.subplots(figsize=(11, 0.8 + 0.3 * len(bars[:MOST])), layout="constrained")
    for place, (_, ratio, other) in enumerate(reversed(bars[:MOST])):
        axes.barh(place, ratio, color="tab:blue" if ratio >= 1 else "tab:orange")
        axes.text(ratio, place, f" {ratio:.2f}x {other}", va="center", fontsize=8)
    axes.set_yticks(range(len(bars[:MOST])), [name for name, *_ in reversed(bars[:MOST])], fontsize=8)
    axes.axvline(1, color="black", lw=1)
    axes.margins(x=0.25)
    axes.set_title("Speed of fastattn's default; 1 is the fastest alternative, which is named at the bar", fontsize=10)
    return _saved(figure, path)


def _saved(figure: Any, path: Path) -> list[str]:
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return [path.name]


def _series(record: Record) -> dict[str, dict[str, Curve]]:
    """Name of the series -> provider -> its curve. Only series with three lengths or more by fastattn's default."""
    found: dict[str, dict[str, Curve]] = {}
    for case in record["cases"]:
        for row in case_rows(record, case) if case["series"] else ():
            name, x = case["series"]
            if row["status"] == "ok":
                provider = DEFAULT if row.get("default") else row["provider"]
                found.setdefault(name, {}).setdefault(provider, []).append((x, case, row))
    for curves in found.values():
        for curve in curves.values():
            curve.sort(key=lambda point: point[0])
    return {name: curves for name, curves in found.items() if len(curves.get(DEFAULT, ())) >= 3}


def _tflop_per_s(case: Row, row: Row) -> float:
    return case["work"]["both"]["flop"] / median(row, "both") / 1e9
