"""Plots of one record: each case against its fastest alternative, and speed and memory over the length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only, no display
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator
from result_files import Record, Row, case_rows, default_row, fastest_other, median

DEFAULT = "fastattn (default)"
MOST = 40  # cases in speed_ups.png, the first of the table
Curve = list[tuple[int, Row, Row]]  # (length, case, row), by length


def draw(record: Record, out: Path) -> list[str]:
    """Write the plots that the record has the figures for; returns their file names."""
    made = _draw_speed_ups(record, out / "speed_ups.png")
    series = _series(record)
    timed = {name: curves for name, curves in series.items() if curves[DEFAULT][0][2]["timings"]}
    for name, chosen, label, y in (
        ("speed.png", timed, "TFLOP/s, forward and backward: higher is faster", _tflop_per_s),
        ("memory.png", series, "peak memory, MiB: lower is better", lambda case, row: row["peak_mib"]),
    ):
        if not chosen:
            continue
        figure, grid = plt.subplots(len(chosen), figsize=(9, 3.8 * len(chosen)), squeeze=False, layout="constrained")
        for axes, (title, curves) in zip(grid[:, 0], chosen.items(), strict=True):
            for number, (provider, curve) in enumerate(curves.items()):
                style: dict[str, Any] = {"color": "black", "lw": 2.5} if provider == DEFAULT else {"lw": 1.2}
                lengths, heights = zip(*((x, y(case, row)) for x, case, row in curve), strict=True)
                axes.plot(lengths, heights, marker="os^Dv<>P"[number % 8], ms=4, label=provider, **style)
            axes.set(title=title, ylabel=label)
            axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
            _set_axes(axes, [x for x, _, _ in curves[DEFAULT]], is_memory=name == "memory.png")
        made += _saved(figure, out / name)
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


def _set_axes(axes: Axes, lengths: list[int], is_memory: bool) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths], fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("sequence length, at an equal number of tokens")
    axes.grid(alpha=0.3)
    if is_memory:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=0)
