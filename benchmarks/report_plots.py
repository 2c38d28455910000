"""Plots of one record: speed and memory against length, the roofline, and what makes the whole step faster."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only, no display
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from result_files import KEPT, Record, Row, by_medians, default_row, median, named, rows_of, slowdown

OURS, RIVAL = "#c1272d", "#44546a"
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c6d31", "#7f7f7f", "#000000")
MARKERS = "os^Dv<>P"
Curve = list[tuple[int, Row, Row]]  # (x, case, row), by x


def draw(record: Record, out: Path) -> list[str]:
    """Write every plot that the record has the figures for; returns their file names."""
    series = _series(record)
    figures = {
        f"speed_{name.replace(' ', '_').replace('%', '')}.png": _speed(name, curves) for name, curves in series.items()
    }
    figures |= {"memory.png": _memory(series), "roofline.png": _roofline(record), "step.png": _contributions(record)}
    made = {name: figure for name, figure in figures.items() if figure}
    for name, figure in made.items():
        figure.savefig(out / name, dpi=110)
        plt.close(figure)
    return list(made)


def _series(record: Record) -> dict[str, dict[str, Curve]]:
    """Name of the series -> provider -> its curve; only series of at least three lengths by fastattn's default."""
    found: dict[str, dict[str, Curve]] = {}
    for case in record["cases"]:
        if case["series"] is None:
            continue
        name, x = case["series"]
        for row in rows_of(record, case):
            if row["status"] == "ok":
                provider = "fastattn (default)" if row.get("default") else row["provider"]
                found.setdefault(name, {}).setdefault(provider, []).append((x, case, row))
    for curves in found.values():
        for curve in curves.values():
            curve.sort(key=lambda point: point[0])
    return {name: curves for name, curves in found.items() if len(curves.get("fastattn (default)", ())) >= 3}


def _flop_per_s(case: Row, row: Row, direction: str) -> float:
    return case["work"][direction]["flop"] / median(row, direction) * 1e3


def _flop_axis(axis: Any) -> None:
    def written(value: float, _: int) -> str:
        return f"{value / 1e12:g} T" if value >= 1e12 else f"{value / 1e9:g} G"

    axis.set_major_formatter(FuncFormatter(written))


def _length_axis(axes: Axes, lengths: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths], fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("sequence length, equally many tokens in all")
    axes.grid(alpha=0.3, which="both")


def _panels(titles: Sequence[str], columns: int, width: float, height: float, **options: Any) -> tuple[Any, list[Axes]]:
    """A figure with a panel for each title."""
    columns = min(columns, len(titles))
    lines = -(-len(titles) // columns)
    size = (width * columns, height * lines + 0.5)
    figure, grid = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained", **options)
    for axes, title in zip(grid.flat, titles, strict=False):
        axes.set_title(title, fontsize=10)
    for axes in grid.flat[len(titles) :]:
        axes.set_visible(False)
    return figure, list(grid.flat[: len(titles)])


def _speed(name: str, curves: dict[str, Curve]) -> Any:
    """Speed against length: a panel for each rival, with fastattn's default in all of them."""
    default = curves["fastattn (default)"]
    rivals = [provider for provider, curve in curves.items() if curve is not default and len(curve) >= 2]
    if not rivals or not default[0][2]["timings"]:
        return None
    figure, panels = _panels(rivals, 3, 4.2, 3.1, sharey=True)
    for axes, rival in zip(panels, rivals, strict=True):
        for provider, colour in ((rival, RIVAL), ("fastattn (default)", OURS)):
            points = [(x, _flop_per_s(case, row, "both")) for x, case, row in curves[provider]]
            axes.plot(*zip(*points, strict=True), color=colour, marker="o", label=provider)
        if axes.get_subplotspec().is_first_col():
            axes.set_ylabel("FLOP/s, forward and backward")
        axes.legend(fontsize=8, loc="upper left")
        _length_axis(axes, [x for x, _, _ in default])
        _flop_axis(axes.yaxis)
    panels[0].set_ylim(0, 1.2 * panels[0].get_ylim()[1])  # of all panels; now that all have their curves
    figure.suptitle(f"{name}: higher is faster")
    return figure


def _memory(series: dict[str, dict[str, Curve]]) -> Any:
    """Peak memory against length, of an op's forward and backward or of a whole step: a panel for each series."""
    if not series:
        return None
    figure, panels = _panels(list(series), 2, 7.2, 3.8)
    for axes, curves in zip(panels, series.values(), strict=True):
        providers = sorted(curves, key=lambda provider: provider != "fastattn (default)")
        for number, (provider, colour) in enumerate(zip(providers, (OURS, *COLOURS * 2), strict=False)):
            points = [(x, row["peak_mib"]) for x, _, row in curves[provider]]
            marker = MARKERS[number % len(MARKERS)]
            axes.plot(*zip(*points, strict=True), color=colour, lw=1.2, marker=marker, ms=4, label=provider)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_ylabel("peak memory, MiB")
        _length_axis(axes, [x for x, _, _ in curves["fastattn (default)"]])
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle("Memory beyond inputs, or beyond weights and Adam's state: lower is better", fontsize=10)
    return figure


def _roofline(record: Record) -> Any:
    """Every case by fastattn's default, under the roof that copying and matrix products put over it."""
    points = list(_roofline_points(record))
    if record["ceilings"] is None or not points:
        return None
    figure, axes = plt.subplots(figsize=(9.5, 5.2), layout="constrained")
    byte_per_s, products = record["ceilings"]["byte_per_s"], record["ceilings"]["flop_per_s"]
    dtypes = sorted({dtype for _, dtype, _, _ in points})
    # The ridges, where the slope meets the roofs, are in view however few points there are.
    shown = [x for _, _, x, _ in points] + [products[dtype] / byte_per_s for dtype in dtypes]
    left, right = min(shown) / 3, 3 * max(shown)
    for dtype in dtypes:
        roof = [left * byte_per_s, products[dtype], products[dtype]]
        axes.plot([left, products[dtype] / byte_per_s, right], roof, color="black", lw=1.2)
        axes.text(0.95 * right, 1.05 * products[dtype], f"matrix products, {dtype}", ha="right", fontsize=8)
    middle = (left * min(products[dtype] / byte_per_s for dtype in dtypes)) ** 0.5  # of the slope
    axes.text(0.95 * middle, middle * byte_per_s, "copy", ha="right", va="bottom", fontsize=8)
    for number, op in enumerate(dict.fromkeys(op for op, _, _, _ in points)):
        for dtype in dtypes:
            chosen = [(x, y) for other, other_dtype, x, y in points if (other, other_dtype) == (op, dtype)]
            style = {"facecolors": "none" if dtype == "fp32" else COLOURS[number], "edgecolors": COLOURS[number]}
            if chosen:
                axes.scatter(
                    *zip(*chosen, strict=True), marker=MARKERS[number], label=f"{op}, {dtype}", zorder=3, **style
                )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    axes.set_ylim(top=1.5 * max(products[dtype] for dtype in dtypes))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    _flop_axis(axes.yaxis)
    axes.set_xlabel("FLOPs for each byte of main memory that the case must move")
    axes.set_ylabel("FLOP/s")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.set_title("Roofline: fastattn's default, forward and backward (above the roof: served from a cache)")
    return figure


def _roofline_points(record: Record) -> Iterator[tuple[str, str, float, float]]:
    """(op, dtype, FLOP / byte, FLOP/s) of each case that the default serves."""
    for case in record["cases"]:
        row = default_row(rows_of(record, case))
        for direction in record["ops"][case["op"]]["directions"][-1:]:
            work = case["work"][direction]
            if median(row, direction):
                yield case["op"], case["dtype"], work["flop"] / work["byte"], _flop_per_s(case, row, direction)


def contributions(rows: list[Row]) -> tuple[float, float, dict[str, float]] | None:
    """(reference ms, default ms, name -> milliseconds that the step takes longer without it: without dropping padding,
    or with padding kept and this op by the reference path). All are medians, as the tables have them."""
    reference, default = median(named(rows, "reference"), "step"), median(default_row(rows), "step")
    if not reference or not default:
        return None
    kept = median(named(rows, KEPT), "step")
    left_out = {}
    for row in rows:
        whole, without = default if row["provider"] == KEPT else kept, median(row, "step")
        if row.get("without") and whole and without:
            left_out[row["without"]] = without - whole
    return reference, default, left_out


def _contributions(record: Record) -> Any:
    """A bar for each training step: the default's time, and on it what each op saves, up to the reference path's."""
    steps = [(case["case"], rows_of(record, case)) for case in record["cases"] if "step" in case["work"]]
    bars = [(name, rows, found) for name, rows in steps if (found := contributions(rows)) and found[2]]
    if not bars:
        return None
    ops = list(dict.fromkeys(op for _, _, (_, _, left_out) in bars for op in left_out))
    figure, axes = plt.subplots(figsize=(12, 2.2 + 1.0 * len(bars)), layout="constrained")
    for y, (_, rows, (reference, default, left_out)) in enumerate(bars):
        # Single savings overlap: where they add up to more than the whole, their bars are drawn shorter to fit.
        saved, single = max(reference - default, 0.0), sum(ms for ms in left_out.values() if ms > 0)
        fit = min(1.0, saved / single) if single else 0.0
        parts = [("fastattn (default)", default, OURS)]
        parts += [(f"saved by {op}", fit * max(left_out.get(op, 0), 0), COLOURS[n]) for n, op in enumerate(ops)]
        parts.append(("saved by them together", saved - fit * single, "#999999"))
        end = 0.0
        for label, ms, colour in parts:
            share = 100 * ms / reference
            axes.barh(y, share, left=end, color=colour, edgecolor="white", label=label if y == 0 else None, height=0.6)
            end += share
        axes.text(max(end, 100) + 1, y, f"{reference / default:.2f}x", va="center", fontsize=10, fontweight="bold")
        savings = "".join(f", {op} {-ms:+.3g}" for op, ms in left_out.items())
        row = named(rows, "reference")
        if by_medians(rows, row, "step"):
            savings += f"; by samples that alternate {slowdown(rows, row, 'step'):.2f}x: measure again"
        caption = textwrap.fill(f"{default:.4g} ms instead of {reference:.4g}{savings}", 85)
        axes.text(0.5, y + 0.33, caption, fontsize=8, va="top")
    axes.axvline(100, color="black", lw=1, ls="--")
    axes.set_yticks(range(len(bars)), [name for name, *_ in bars], fontsize=8)
    axes.set_ylim(len(bars) - 0.3, -0.5)  # from above, with space for the last caption
    axes.set_xlim(right=axes.get_xlim()[1] * 1.07)
    axes.set_xlabel("percent of the reference path's time (dashed: 100 %)")
    figure.legend(fontsize=8, loc="outside lower center", ncols=4)
    figure.suptitle("One training step against the reference path, and what each part of fastattn saves")
    return figure
