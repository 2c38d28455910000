"""Draws the pictures of the documentation: `python docs/pictures.py` writes docs/pictures/*.svg.

They are made from the records in benchmarks/results/ and from fastattn itself. Equal records and an equal version of
matplotlib give equal files. alignment.svg and heads.png are not among them: they show a model that was trained.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import panel
import torch
from matplotlib.axes import Axes
from panel import BAR, BLUE, EMPTY, GREY, MARGIN, MUTED, ORANGE, RIGHT, SKY, Picture, squares

from fastattn import AttentionMask
from fastattn.masks import Layout, t5_relative_bias

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from report_markdown import STEP, committed
from result_files import (
    WITH_PADDING,
    Record,
    case_rows,
    default_row,
    fastest_other,
    is_busy,
    machine,
    median,
    provider_row,
    slowdown,
)

ROOT = Path(__file__).resolve().parents[1]
Records = Sequence[tuple[Path, Record]]

# The code in a picture is run, and gives what is drawn next to it.
SIZE = 12
REAL = "j = torch.arange(12)\nreal = j[None] < 9\n"
MASKS = {
    "mask_causal": (
        "Causal: a query sees no later key",
        "As in a decoder: query i sees the keys 0 to i.",
        "mask = AttentionMask(\n    is_causal=True,\n)",
    ),
    "mask_padding": (
        "Padding: no query sees a padded key",
        "The sentence has 9 tokens. Its row is filled up to 12.",
        REAL + "mask = AttentionMask(\n    key_padding=real,\n)",
    ),
    "mask_window": (
        "Window: a query sees only keys close to it",
        "Here three keys before its own position and one after it.",
        "mask = AttentionMask(\n    window=(3, 1),\n)",
    ),
    "mask_packed": (
        "Packed: three sequences in one row, without padding",
        "A query sees the keys of its own sequence. Lengths: 5, 3 and 4.",
        "cu_seqlens = torch.tensor(\n    [0, 5, 8, 12])\nmask = AttentionMask(\n    cu_seqlens_q=cu_seqlens,\n)",
    ),
    "mask_bias": (
        "Bias: a number that is added to each score",
        "Here it falls with the distance, as in ALiBi. All keys are visible.",
        "j = torch.arange(12.0)\ni = j[:, None]\nbias = -0.25 * (i - j).abs()\n"
        + "mask = AttentionMask(\n    bias=bias,\n)",
    ),
    "mask_relative": (
        "Bias by distance: the same on each diagonal",
        "23 numbers for 12 x 12 scores. Far distances share one, as in T5.",
        "table = -0.5 * torch.arange(8.0)\nbias = t5_relative_bias(\n    table[:, None], 12, 12,\n"
        "    max_distance=8)\nmask = AttentionMask(\n    relative_bias=bias,\n)",
    ),
    "mask_combined": (
        "Combined: causal, window and padding",
        "A key is visible if all of them allow it. Padded queries see nothing.",
        REAL + "mask = AttentionMask(\n    is_causal=True,\n    window=(4, None),\n    key_padding=real,\n"
        "    query_padding=real,\n)",
    ),
}
TILED, TILE = 1024, 64
TILES_CODE = """\
j = torch.arange(1024)
real = j[None] < 840
mask = AttentionMask(
    is_causal=True,
    window=(400, None),
    key_padding=real,
    query_padding=real,
)"""
CODE_LEFT = 384  # where the code begins


def record_with(records: Records, op: str, provider: str) -> Record:
    """The record that has this provider's figures of the most cases of this op, the first of equals."""

    def cases(record: Record) -> int:
        return sum((row["op"], row["provider"], row["status"]) == (op, provider, "ok") for row in record["rows"])

    return max((record for _, record in records), key=cases)


def source(record: Record) -> str:
    """The processor, torch's version and the date, and whether the machine was busy."""
    given = record["environment"]
    device, torch_version = machine(record).split("; ")[0], given["versions"]["torch"].partition("+")[0]
    busy = "; busy machine" if is_busy(record) else ""
    return f"{device.replace('(R)', '')}; torch {torch_version}; {given['date'][:10]}{busy}"


def mask_of(code: str) -> AttentionMask:
    names: dict[str, Any] = {"torch": torch, "AttentionMask": AttentionMask, "t5_relative_bias": t5_relative_bias}
    exec(code, names)
    return names["mask"]


def mask_frame(title: str, subtitle: str, code: str, size: int) -> tuple[Picture, Axes]:
    """The picture of a mask without its cells: titles, a grid of size x size, and the code."""
    picture = Picture(434, title, subtitle)
    picture.text(220, 92, "keys", color=MUTED, ha="center")
    picture.text(38, 266, "queries", color=MUTED, rotation=90, rotation_mode="anchor", ha="center")
    picture.code(CODE_LEFT, 134, code)
    return picture, picture.grid(76, 122, 288, 288, size, size)


def mask(records: Records, title: str, subtitle: str, code: str) -> Picture:
    """Which query sees which key; with a bias, how much is added."""
    picture, axes = mask_frame(title, subtitle, code, SIZE)
    numbers = np.arange(0, SIZE, 3)
    axes.set_xticks(numbers + 0.5, numbers)
    axes.set_yticks(numbers + 0.5, numbers)
    made = mask_of(code)
    visible = made.dense(1, 1, SIZE, SIZE, "cpu")[0, 0].numpy()
    if made.any_bias is None:
        kinds = {"visible": (BLUE, visible), "masked": (EMPTY, ~visible)}
        keys = list(kinds)
    else:
        shown = made.bias if made.relative_bias is None else made.dense_relative_bias(SIZE, SIZE)
        bias = shown[0, 0].numpy() + 0.0  # no -0
        values = np.unique(bias)[::-1]
        kinds = {f"bias {value:g}": (panel.shade(1 - value / bias.min()), bias == value) for value in values}
        keys = list(kinds)[::5]
    for colour, cells in kinds.values():
        squares(axes, np.argwhere(cells), colour)
    for number, name in enumerate(reversed(keys)):
        picture.key(CODE_LEFT, 404 - 24 * number, kinds[name][0], name)
    return picture


def tiles(records: Records) -> Picture:
    """The tiles of the scores that a kernel skips, computes without a test, and computes with one."""
    count, made = TILED // TILE, mask_of(TILES_CODE)
    title = "A kernel visits only the tiles that hold visible keys"
    subtitle = f"Tiles of {TILE} x {TILE} scores. The black line surrounds what is visible."
    picture, axes = mask_frame(title, subtitle, TILES_CODE, count)
    ticks = np.arange(0, count + 1, 4)
    axes.set_xticks(ticks, ticks * TILE)
    axes.set_yticks(ticks, ticks * TILE)
    prepared = made.prepare(TILED, TILED, Layout(block_rows=TILE, block_columns=TILE), torch.device("cpu"))
    kinds = np.zeros((count, count), int)  # skipped
    for row, (partial_tiles, visited) in enumerate(prepared.counts[0, 0].tolist()):
        columns = prepared.tiles[0, 0, row]
        kinds[row, columns[partial_tiles:visited]] = 1
        kinds[row, columns[:partial_tiles]] = 2
    names = ("skipped", "full: no test of the mask", "partial: each score tested")
    for kind, (colour, name) in enumerate(zip((EMPTY, BLUE, ORANGE), names, strict=True)):
        squares(axes, np.argwhere(kinds == kind), colour)
        picture.key(CODE_LEFT, 356 + 24 * kind, colour, f"{np.sum(kinds == kind)} {name}")
    visible = made.dense(1, 1, TILED, TILED, "cpu")[0, 0].numpy()
    rows = np.flatnonzero(visible.any(1))
    begin, end = visible[rows].argmax(1), TILED - visible[rows, ::-1].argmax(1)
    outline = np.concatenate([np.stack([begin, rows]), np.stack([end, rows + 1])[:, ::-1]], 1)
    axes.plot(*np.append(outline, outline[:, :1], 1) / TILE, color=panel.INK, linewidth=1.2)
    return picture


def step_speed(records: Records) -> Picture:
    """A training step of fastattn's Transformer: the speed-up over the fastest alternative, and how much of it is left
    if padding is not skipped."""
    record, groups = record_with(records, STEP, WITH_PADDING), {}
    for case in (case for case in record["cases"] if case["op"] == STEP):
        rows = case_rows(record, case)
        if other := fastest_other(rows, "step"):
            kept = slowdown(rows, provider_row(rows, WITH_PADDING), "step") or 1.0
            name = case["case"].removesuffix(f", {case['dtype']}")
            groups.setdefault(name, []).append((case["dtype"], other[0] / kept, *other))
    height, left, y = sum(36 + BAR * len(rows) for rows in groups.values()), 74, 0
    titles = "Training step: speed-up over the fastest alternative", "At each bar: the speed-up, and the alternative."
    picture = Picture(182 + height, *titles)
    limit = 1.85 * max(whole for rows in groups.values() for _, _, whole, _ in rows)
    picture.key(MARGIN, 88, BLUE, "with padding computed too")
    picture.key(290, 88, SKY, "more, by skipping padding")
    axes = picture.axes(left, 104, RIGHT - left, height, xlim=(0, limit), ylim=(height, 0), yticks=[])
    for heading, rows in groups.items():
        picture.text(MARGIN, 104 + y + 18, heading, weight="bold")
        y += 26
        axes.plot([1, 1], [y - 2, y + BAR * len(rows) + 2], **panel.DASHED)
        for dtype, without, whole, other in rows:
            axes.barh(y + BAR / 2, without, BAR - 6, color=BLUE)
            if without < whole:
                axes.barh(y + BAR / 2, whole - without, BAR - 6, left=without, color=SKY)
            picture.text(left - 8, 104 + y + 17, dtype, ha="right")
            white = {"facecolor": "white", "edgecolor": "none", "pad": 3.5}
            axes.text(max(without, whole) + limit / 80, y + 17, f"{whole:.2f}x {other}", bbox=white)
            y += BAR
        y += 10
    axes.set_xlabel("times as fast; 1.0 is the fastest alternative")
    axes.set_xticks([0, 1, 2], ["0", "1.0", "2.0"])
    picture.source(source(record))
    return picture


def decoding(records: Records) -> Picture:
    """Tokens per second of translating, next to CTranslate2 and Hugging Face."""
    marks = {"fastattn": ("o", BLUE), "CTranslate2": ("D", ORANGE), "Hugging Face Marian": ("s", GREY)}
    _, *rivals = marks
    record, lines = record_with(records, "decoding", rivals[0]), []
    for case in record["cases"]:
        rows = case_rows(record, case) if case["op"] == "decoding" else []
        if ms := median(default_row(rows), "decode"):
            own = case["work"]["decode"]["token"] / ms * 1e3
            # The times of alternating samples.
            slower = {name: slowdown(rows, provider_row(rows, name), "decode") for name in rivals}
            speeds = {"fastattn": own} | {name: own / ratio for name, ratio in slower.items() if ratio}
            parts = re.fullmatch(r"(.*) (\d+)x\d+[ ,].* (greedy|beam \d+), .*", case["case"])
            name = f"{parts[2]} sentence{'s' * (parts[2] != '1')}, {parts[3]}"
            lines.append((parts[1], name, speeds))
    height = BAR * (len(lines) + len({line[0] for line in lines}))
    picture = Picture(204 + height, "Decoding: new tokens per second", "Further to the right is faster.")
    axes = picture.axes(206, 124, 400, height, xscale="log", ylim=(height, 0), yticks=[], xlabel="new tokens/s")
    axes.minorticks_off()
    axes.xaxis.set_major_formatter("{x:,.0f}")
    y, model = 0, None
    for name, line, speeds in lines:
        if name != model:
            picture.text(MARGIN, 124 + y + 17, name, weight="bold")
            y, model = y + BAR, name
        axes.axhline(y + BAR / 2, color=EMPTY, linewidth=1, zorder=0)
        for provider, speed in reversed(speeds.items()):
            style = {"color": marks[provider][1], "markersize": 8, "markeredgecolor": "white"}
            axes.plot(speed, y + BAR / 2, marks[provider][0], **style)
        picture.text(194, 124 + y + 17, line, ha="right")
        y += BAR
    for left, (name, (marker, colour)) in zip((MARGIN, 130, 264), marks.items(), strict=True):
        picture.key(left, 90, colour, name, marker)
    picture.source(source(record))
    return picture


DRAWN: dict[str, Callable[[Records], Picture]] = {
    **{name: partial(mask, title=title, subtitle=said, code=code) for name, (title, said, code) in MASKS.items()},
    **{draw.__name__: draw for draw in (tiles, step_speed, decoding)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures", help="folder (default docs/pictures)")
    options = parser.parse_args()
    records = committed(ROOT / "benchmarks" / "results")
    options.out.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWN.items():
        draw(records).save(options.out / f"{name}.svg")
        print(f"wrote {options.out / name}.svg")


if __name__ == "__main__":
    main()
