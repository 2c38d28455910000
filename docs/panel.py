"""The style of all pictures of the documentation, and what they are drawn with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path as Outline

WIDTH, MARGIN, RIGHT = 640, 24, 616  # lengths and places are in pixels
TITLE, TEXT, SMALL = 12.75, 12, 10.5  # points: 17, 16 and 14 pixels
LETTER = 0.602 * SMALL * 4 / 3  # the width of a letter of code
INK, MUTED, LINE, EMPTY = "#1f2328", "#57606a", "#d0d7de", "#e4e7eb"
# Okabe and Ito's colours, which the colour-blind can tell apart, and a light blue.
BLUE, SKY, ORANGE, GREY = "#0072b2", "#8cc6ea", "#e69f00", "#80868c"
DASHED = {"color": INK, "linewidth": 1.2, "linestyle": (0, (4, 2))}
BAR = 24  # height in a list of bars
STYLE = {
    "font.size": SMALL,
    "font.sans-serif": ["DejaVu Sans", "sans-serif"],
    "font.monospace": ["DejaVu Sans Mono", "monospace"],
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.facecolor": "none",
    **{f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")},
    **{f"{axis}tick.color": MUTED for axis in "xy"},
    **{f"{axis}tick.{kind}.size": 0 for axis in "xy" for kind in ("major", "minor")},
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "fastattn",  # equal names in equal files
}
matplotlib.rcParams.update(STYLE)


class Picture:
    """A white panel with round corners, for light and dark pages. Places are counted from its upper left corner."""

    def __init__(self, height: float, title: str, subtitle: str) -> None:
        self.height, self.title = height, title
        self.figure = Figure(figsize=(WIDTH / 96, height / 96), facecolor="none")
        style = {"boxstyle": "round,pad=0,rounding_size=0.1", "facecolor": "white", "edgecolor": LINE}
        size, transform = (WIDTH / 96 - 0.02, height / 96 - 0.02), self.figure.dpi_scale_trans
        self.figure.add_artist(FancyBboxPatch((0.01, 0.01), *size, **style, transform=transform, zorder=-1))
        self.text(MARGIN, 36, title, size=TITLE, weight="bold")
        self.text(MARGIN, 60, subtitle, color=MUTED)

    def text(self, left: float, base: float, text: str, **style: Any) -> None:
        self.figure.text(left / WIDTH, 1 - base / self.height, text, **style)

    def axes(self, left: float, top: float, width: float, height: float, **options: Any) -> Axes:
        place = (left / WIDTH, 1 - (top + height) / self.height, width / WIDTH, height / self.height)
        axes = self.figure.add_axes(place)
        axes.set(**options)
        return axes

    def grid(self, left: float, top: float, width: float, height: float, rows: int, columns: int) -> Axes:
        """Axes of cells of 1 x 1; the first one is above on the left."""
        axes = self.axes(left, top, width, height, xlim=(0, columns), ylim=(rows, 0))
        axes.xaxis.tick_top()
        return axes

    def key(self, left: float, base: float, colour: str, text: str, marker: str | None = None) -> None:
        """What a colour or a marker means."""
        axes = self.grid(left, base - 13, 16, 16, 1, 1)
        axes.set_axis_off()
        if marker:
            axes.plot(0.5, 0.5, marker, color=colour, markersize=8)
        else:
            squares(axes, [(0, 0)], colour)
        self.text(left + 22, base, text)

    def code(self, left: float, base: float, code: str) -> None:
        for number, line in enumerate(code.splitlines()):
            spaces = len(line) - len(line.lstrip())  # SVG drops spaces at the begin
            self.text(left + spaces * LETTER, base + 22 * number, line.strip(), family="monospace")

    def source(self, said: str) -> None:
        """The last line: where the figures come from."""
        self.text(MARGIN, self.height - 18, said, color=MUTED)

    def save(self, path: Path) -> None:
        self.figure.savefig(path, format="svg", metadata={"Date": None, "Title": self.title})


def squares(axes: Axes, places: Iterable[Sequence[float]], colour: str, gap: float = 0.06) -> None:
    """Fill cells (row, column) of a grid. All are one shape, so the file stays small."""
    corners = np.array([(0, 0), (1, 0), (1, 1), (0, 1), (0, 0)]) * (1 - 2 * gap) + gap
    shapes = [Outline(corners + (column, row), closed=True) for row, column in places]
    if shapes:
        axes.add_patch(PathPatch(Outline.make_compound_path(*shapes), facecolor=colour, linewidth=0))


def shade(share: float, colour: str = BLUE) -> str:
    """From a trace of the colour at 0 to the colour at 1."""
    share = 0.08 + 0.92 * share
    return to_hex(share * np.array(to_rgb(colour)) + (1 - share))
