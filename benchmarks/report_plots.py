"""Plots of one record: speed and memory against sequence length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only, no display
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator
from result_files import Record, Row, case_rows, median

DEFAULT = "fastattn (default)"
Curve = list[tuple[int, Row, Row]]  # (length, case, row), by length


def draw(record: Record, out: Path) -> list[str]:
    """Write the plots that the record has the figures for; returns their file names."""
    series = _series(record)
    timed = {name: curves for name, curves in series.items() if curves[DEFAULT][0][2]["timings"]}
    made = []
    for name, chosen, label, draw_curve in (
        ("speed.png", timed, "TFLOP/s, forward and backward: higher is faster", _draw_speed),
        ("memory.png", series, "peak memory, MiB: lower is better", _draw_memory),
    ):
        if chosen:
            figure, panels = _panels(list(chosen))
            for axes, curves in zip(panels, chosen.values(), strict=True):
                for number, (provider, curve) in enumerate(curves.items()):
                    style = {"color": "black", "lw": 2.5} if provider == DEFAULT else {"lw": 1.2}
                    draw_curve(axes, curve, marker="os^Dv<>P"[number % 8], ms=4, label=provider, **style)
                axes.set_ylabel(label)
                axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
                _length_axis(axes, [x for x, _, _ in curves[DEFAULT]])
                if draw_curve is _draw_speed:
                    axes.set_ylim(bottom=0)
            figure.savefig(out / name, dpi=110)
            plt.close(figure)
            made.append(name)
    return made


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


def _panels(titles: Sequence[str]) -> tuple[Any, list[Axes]]:
    """A figure with a panel for each title."""
    columns = min(2, len(titles))
    lines = -(-len(titles) // columns)
    figure, grid = plt.subplots(
        lines, columns, figsize=(7.2 * columns, 3.8 * lines), squeeze=False, layout="constrained"
    )
    for axes, title in zip(grid.flat, titles, strict=False):
        axes.set_title(title, fontsize=10)
    for axes in grid.flat[len(titles) :]:
        axes.set_visible(False)
    return figure, list(grid.flat[: len(titles)])


def _draw_speed(axes: Axes, curve: Curve, **style: Any) -> None:
    points = [(x, case["work"]["both"]["flop"] / median(row, "both") / 1e9) for x, case, row in curve]
    axes.plot(*zip(*points, strict=True), **style)


def _draw_memory(axes: Axes, curve: Curve, **style: Any) -> None:
    axes.plot([x for x, _, _ in curve], [row["peak_mib"] for _, _, row in curve], **style)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter("{x:g}")


def _length_axis(axes: Axes, lengths: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths], fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("sequence length, at an equal number of tokens")
    axes.grid(alpha=0.3)
