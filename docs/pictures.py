"""Draws the pictures of the documentation: `python docs/pictures.py` writes docs/pictures/*.svg.

They are made from the records in benchmarks/results/ and from fastattn itself. Equal records and an equal version of
matplotlib give equal files. --alignment and --captioner also train the small models of examples/, in a minute or two
each, and draw what these do.
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
from panel import BAR, BLUE, EMPTY, GREY, MARGIN, MUTED, ORANGE, RIGHT, SKY, Bar, Picture, bar_picture, squares

from fastattn import AttentionMask
from fastattn.masks import Layout, t5_relative_bias

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from cases import ATTENTION_DROPOUT
from report_markdown import ACCELERATE, HOST_TIME, LAUNCH_US, PLAIN, STEP, committed, fastest_other, format_times
from result_files import WITH_PADDING, Record, case_rows, default_row, machine, median, provider_row, slowdown

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
    """The record that has this provider's figures of the most cases of this op, the first of equals in the order of the
    README's tables."""

    def cases(record: Record) -> int:
        return sum((row["op"], row["provider"], row["status"]) == (op, provider, "ok") for row in record["rows"])

    if records and cases(best := max((record for _, record in records), key=cases)):
        return best
    advice = f"`python benchmarks/report.py --only {op} --out DIR` measures it"
    raise SystemExit(f"error: {len(records)} records report_*.json, and none has {op} by {provider!r}; {advice}")


def source(record: Record) -> str:
    """The processor, torch's version and the date, and whether the machine was busy."""
    given = record["environment"]
    device, torch_version = (
        machine(record).split("; ")[0].replace("(R)", ""),
        given["versions"]["torch"].partition("+")[0],
    )
    busy = "; busy machine" if (given["load_before"] or 0) > 0.5 else ""  # as report_markdown.provenance
    return f"{device}; torch {torch_version}; {given['date'][:10]}{busy}"


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


def speed_ups(record: Record, op: str) -> list[tuple[str, str, float, float, str]]:
    """Of each case that was measured: its name, its dtype, the speed-up over the fastest alternative, how much of it is
    left if padding is not skipped, and the alternative. The reference path is no alternative."""
    found = []
    for case in record["cases"]:
        rows = case_rows(record, case) if case["op"] == op else []
        if other := fastest_other(rows, "step"):
            kept = slowdown(rows, provider_row(rows, WITH_PADDING), "step") or 1.0
            name = case["case"].removesuffix(f", {case['dtype']}")
            found.append((name, case["dtype"], other[0], other[0] / kept, other[1]))
    return found


def step_speed(records: Records) -> Picture:
    """A training step of fastattn's Transformer."""
    record, groups = record_with(records, STEP, WITH_PADDING), {}
    for name, dtype, whole, without, other in speed_ups(record, STEP):
        row = Bar(dtype, without, whole, (BLUE, SKY), f"{format_times(whole)} {other}")
        groups.setdefault(name, []).append(row)
    titles = "Training step: speed-up over the fastest alternative", "At each bar: the speed-up, and the alternative."
    keys = (MARGIN, BLUE, "with padding computed too"), (290, SKY, "more, by skipping padding")
    picture, axes = bar_picture(titles, keys, 74, groups, room=1.85)
    axes.set_xlabel("times as fast; 1.0 is the fastest alternative")
    axes.set_xticks([0, 1, 2], ["0", "1.0", "2.0"])
    picture.source(source(record))
    return picture


def accelerate_speed(records: Records) -> Picture:
    """A training step of other libraries' models, with `accelerate` and without."""
    record, found = record_with(records, ACCELERATE, "default"), {}
    for name, dtype, whole, _, _ in speed_ups(record, ACCELERATE):
        model, shape = re.fullmatch(r"(.*?) \d+\+\d+ layers .* (\d+x\d+), .*", name).groups()
        model += "*" * (ATTENTION_DROPOUT in name)
        found.setdefault((model, dtype), {})[shape] = whole
    height = 28 * len(found)
    tail = " (*: not in attention)" if any(model.endswith("*") for model, _ in found) else ""
    subtitle = f"Batches of sentences x tokens, a quarter padding, dropout 0.1{tail}."
    picture = Picture(190 + height, "fastattn.accelerate: speed-up of a training step", subtitle)
    label = "times as fast; 1.0 is the fastest without fastattn"
    axes = picture.axes(190, 108, 316, height, ylim=(height, 0), yticks=[], xlabel=label)
    axes.axvline(1, **panel.DASHED)
    markers = dict(zip(dict.fromkeys(shape for speeds in found.values() for shape in speeds), "os^", strict=True))
    for row, ((model, dtype), speeds) in enumerate(found.items()):
        y, ends = 28 * row, (min(speeds.values()), max(speeds.values()))
        axes.plot(ends, [y + 14] * 2, color=SKY, linewidth=3)
        for shape, speed in speeds.items():
            axes.plot(speed, y + 14, markers[shape], color=BLUE, markersize=8, markeredgecolor="white")
        picture.text(178, 108 + y + 19, f"{model} {dtype}", ha="right")
        picture.text(RIGHT, 108 + y + 19, " to ".join(map(format_times, ends)), ha="right")
    for number, (shape, marker) in enumerate(markers.items()):
        picture.key(190 + 100 * number, 90, BLUE, shape, marker)
    picture.source(source(record))
    return picture


def memory_length(records: Records) -> Picture:
    """The peak memory of a training step over the length, of fastattn and of what a user would use instead."""
    record, curves = record_with(records, "memory", "default"), {}
    cases = [case for case in record["cases"] if case["op"] == "memory" and default_row(case_rows(record, case))]
    for case in cases:
        for row in case_rows(record, case):
            if row["status"] == "ok" and (row.get("default") or not row["ours"]):
                name = "fastattn" if row.get("default") else row["provider"]
                curves.setdefault(name, []).append((case["series"][1], row["peak_mib"]))
    subtitle = cases[0]["series"][0].partition(", ")[2].replace(" fp32", " a batch, fp32")
    picture = Picture(424, "Peak memory of a training step over the length", f"{subtitle}.")
    lengths = [length for length, _ in curves["fastattn"]]
    axes = picture.axes(76, 104, 296, 238, xscale="log", xlabel="tokens of each sentence")
    axes.set_xticks(lengths, lengths)
    axes.minorticks_off()
    axes.grid(axis="y", color=EMPTY)
    axes.set_axisbelow(True)
    picture.text(MARGIN, 92, "MiB, beyond weights and Adam's state", color=MUTED)
    styles = {"fastattn": (BLUE, BLUE, "o-", 3), PLAIN: (ORANGE, "#a66f00", "s-", 3)}
    styles["torch.nn.Transformer"] = (GREY, MUTED, "^-", 2)
    by_end = sorted(curves.items(), key=lambda item: item[1][-1][1])
    ours, top, label = curves["fastattn"][-1][1], 1.08 * by_end[-1][1][-1][1], -np.inf
    axes.set_ylim(0, top)
    for name, curve in by_end:
        colour, text, line, width = styles.get(name, (panel.INK, panel.INK, ".:", 1.2))
        axes.plot(*zip(*curve, strict=True), line, color=colour, linewidth=width, zorder=4 - width, markersize=7)
        label = max(curve[-1][1], label + 20 / 238 * top)  # labels are 20 pixels apart
        said = f"{ours:.1f} MiB" if name == "fastattn" else format_times(curve[-1][1] / ours)
        picture.text(384, 104 + 238 * (1 - label / top) + 5, f"{name}: {said}", color=text)
    picture.source(source(record))
    return picture


def host_time(records: Records) -> Picture:
    """What Python and PyTorch do around the launches of a training step, by backend."""
    record, groups = record_with(records, HOST_TIME, "triton"), {}
    cases = [case for case in record["cases"] if case["op"] == HOST_TIME]
    for case in cases:
        for row in case_rows(record, case):
            if row["status"] == "ok" and row["provider"] != PLAIN:
                share, launches = row["of_plain"]["both"], row["launches"] or 0
                launched = share * (1 + launches * LAUNCH_US / 1e3 / median(row, "both"))
                said = f"{share:.0%}" + (f", with launches {launched:.0%}" if launches else "")
                colours = (BLUE, SKY) if row["ours"] else (GREY, GREY)
                groups.setdefault(case["dtype"], []).append(Bar(row["provider"], share, launched, colours, said))
    subtitle = f"{cases[0]['case'].rpartition(',')[0]}; without GPU kernels."
    keys = (
        (MARGIN, BLUE, "fastattn's backends"),
        (198, SKY, f"their launches, {LAUNCH_US} us each"),
        (424, GREY, "others"),
    )
    picture, axes = bar_picture(("Host time of a training step: less is better", subtitle), keys, 276, groups, room=1.7)
    axes.set_xlabel(f"share of what {PLAIN} needs")
    axes.set_xticks([0, 0.5, 1], ["0%", "50%", "100%"])
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
            # The times of alternating samples, so the marks agree with the numbers.
            slower = {name: slowdown(rows, provider_row(rows, name), "decode") for name in rivals}
            speeds = {"fastattn": own} | {name: own / ratio for name, ratio in slower.items() if ratio}
            parts = re.fullmatch(r"(.*) (\d+)x\d+[ ,].* (greedy|beam \d+), .*", case["case"])
            name = f"{parts[2]} sentence{'s' * (parts[2] != '1')}, {parts[3]}"
            lines.append((parts[1], name, speeds, map(format_times, slower.values())))
    height = BAR * (len(lines) + len({line[0] for line in lines}))
    subtitle = "Right: fastattn's speed divided by that of CTranslate2 and of Marian."
    picture = Picture(204 + height, "Decoding: new tokens per second", subtitle)
    axes = picture.axes(206, 124, 236, height, xscale="log", ylim=(height, 0), yticks=[], xlabel="new tokens/s")
    axes.minorticks_off()
    axes.xaxis.set_major_formatter("{x:,.0f}")
    y, model = 0, None
    for name, line, speeds, ratios in lines:
        if name != model:
            picture.text(MARGIN, 124 + y + 17, name, weight="bold")
            y, model = y + BAR, name
        axes.axhline(y + BAR / 2, color=EMPTY, linewidth=1, zorder=0)
        for provider, speed in reversed(speeds.items()):
            style = {"color": marks[provider][1], "markersize": 8, "markeredgecolor": "white"}
            axes.plot(speed, y + BAR / 2, marks[provider][0], **style)
        picture.text(194, 124 + y + 17, line, ha="right")
        for right, ratio in zip((516, 606), ratios, strict=True):
            picture.text(right, 124 + y + 17, ratio, ha="right")
        y += BAR
    for left, (name, (marker, colour)) in zip((MARGIN, 130, 264), marks.items(), strict=True):
        picture.key(left, 90, colour, name, marker)
    for right, name in zip((536, RIGHT), ("CTranslate2", "Marian"), strict=True):
        picture.text(right, 130, name, color=MUTED, ha="right")
    picture.source(source(record))
    return picture


DRAWN: dict[str, Callable[[Records], Picture]] = {
    **{name: partial(mask, title=title, subtitle=said, code=code) for name, (title, said, code) in MASKS.items()},
    **{draw.__name__: draw for draw in (tiles, step_speed, accelerate_speed, memory_length, host_time, decoding)},
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures", help="folder (default docs/pictures)")
    parser.add_argument("--records", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the records")
    parser.add_argument("--alignment", action="store_true", help="also train a translator, and draw its attention")
    parser.add_argument("--captioner", action="store_true", help="also train a captioner, and draw a video it captions")
    options = parser.parse_args(arguments)
    drawn, records = dict(DRAWN), committed(options.records)
    if options.alignment or options.captioner:
        import trained_pictures

        drawn |= {name: getattr(trained_pictures, name) for name in ("alignment", "captioner") if vars(options)[name]}
    options.out.mkdir(parents=True, exist_ok=True)
    for name, draw in drawn.items():
        draw(records).save(options.out / f"{name}.svg")
        print(f"wrote {options.out / name}.svg")


if __name__ == "__main__":
    main()
