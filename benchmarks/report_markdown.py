"""Records as Markdown: the report of one run, docs/results.md of all committed records, and the figures of two pages.

`report.py --readme` writes docs/results.md, and the figures of the README and of docs/accelerate.md, from
benchmarks/results/report_*.json.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean

import result_files
from cases import ATTENTION_DROPOUT, BEAMS, FORWARD, GREEDY, NO_DROPOUT, NO_PADDING, OWN_DROPOUT, STATIC
from result_files import (
    CUDA_GRAPHS,
    GRAPHED_STEP,
    GRAPHS,
    LOSS_FROM_LOGITS,
    UNTOUCHED,
    WITH_PADDING,
    Record,
    Row,
    bound_ms,
    case_rows,
    default_row,
    machine,
    median,
    provider_row,
    rate,
    slowdown,
)

DOCS, README = result_files.ROOT / "docs", result_files.ROOT / "README.md"
RESULTS, YOUR_MODEL = DOCS / "results.md", DOCS / "accelerate.md"
BEGIN, END = "<!-- performance: written by benchmarks/report.py --readme -->\n", "<!-- /performance -->\n"
PLAIN, SDPA = "plain PyTorch", "plain PyTorch with SDPA"
NAMED_RIVAL = {"step": PLAIN, "decode": "Hugging Face Marian"}  # it has a column, also where another one is faster
HOW_TIMED = """\
An op's time is the GPU's alone, a whole model's is what its user waits for. In parentheses: the host's time, and, of a
training step, the GPU's alone."""
NO_GPU = "No record from a GPU has been made yet, so no speed-up is claimed on one."
README_ROWS = 2
OWN_STEPS = {"fastattn": "default", "`graphs=True`": GRAPHS, "`GraphedStep`": GRAPHED_STEP}  # columns of the README
ON_GPU = {  # the ops of which the README has a GPU's figures
    "attention": "attention",
    "add_layer_norm": "dropout + residual + LayerNorm",
    "feed_forward": "feed-forward",
    "linear_cross_entropy": "projection with loss",
}
STEP, ACCELERATE, HOST_TIME, MASKS = "transformer", "accelerate", "host_time", "attention_masks"
MEMORY, EPOCH = "memory", "epoch"
CALLS = ("accelerate_inference", "accelerate_training")  # of accelerated models
OWN_LOSS, REPORT_LOSS, PEAK = ", own loss", ", report.loss", "peak memory, "
_LOSSES = {"own loss": OWN_LOSS, "`report.loss`": REPORT_LOSS}
CALL_TABLES = {  # title -> name in a cell -> kind of call
    "A forward": {"": FORWARD},
    "`generate`": {how: how for how in (GREEDY, BEAMS)},
    "`generate`, static cache": {how: how + STATIC for how in (GREEDY, BEAMS)},
    **{
        f"{title}, {dropout}": {name: start + dropout + loss for name, loss in _LOSSES.items()}
        for title, start in (("A training step", ""), ("Peak memory, accelerated / untouched", PEAK))
        for dropout in (OWN_DROPOUT, NO_DROPOUT)
    },
}
README_CALLS = {  # a line of the README's table -> the kind of call
    "a forward": FORWARD,
    "`generate`, greedy": GREEDY,
    "`generate`, 4 beams": BEAMS,
    "a training step, own loss": OWN_DROPOUT + OWN_LOSS,
    "a training step, `report.loss`": OWN_DROPOUT + REPORT_LOSS,
    "its peak memory, own loss: accelerated / untouched": PEAK + OWN_DROPOUT + OWN_LOSS,
}
MEASURED = {  # by direction
    "forward": "forward",
    "both": "forward and backward",
    "step": "one training step",
    "decode": "one batch",
    "call": "one call",
}
PICTURES = {  # of docs/pictures.py: what each shows
    "step_speed": "Speed of a training step compared with the fastest alternative",
    "accelerate_speed": "Speed of accelerated models compared with the fastest alternative",
    "memory_length": "Peak memory over the length",
    "host_time": "Host time of a training step",
    "decoding": "Decoding next to CTranslate2 and Hugging Face",
}
LAUNCH_US = 4  # what a launch adds to the host time, about


def brief(row: Row) -> str:
    """One result in a few words, for the terminal."""
    if row["status"] != "ok" or "timings" not in row:
        return f"{row['status']}: {row['reason']}" if "reason" in row else row["status"]
    if not row["timings"]:
        return f"{row['peak_mib']:.1f} MiB"
    return ", ".join(f"{direction} {format_ms(timed)} ms" for direction, timed in row["timings"].items())


def format_ms(timed: Row, quartiles: bool = False) -> str:
    """A median; on a GPU also the other times of HOW_TIMED."""
    text = f"{timed['median_ms']:.3g}"
    if quartiles:
        text = f"{timed['median_ms']:.4g} [{timed['q1_ms']:.4g}, {timed['q3_ms']:.4g}]"
    if not timed.get("host_us"):
        return text
    gpu = f", GPU {timed['device_ms']:.3g}" if timed.get("device_ms") else ""
    return f"{text} (host {timed['host_us'] / 1e3:.3g}{gpu})"


def table(header: Sequence[str], body: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(header) + " |"
    yield "|---|" + "---:|" * (len(header) - 1)
    for cells in body:
        yield "| " + " | ".join(cells) + " |"


def wrapped(words: str) -> list[str]:
    return textwrap.wrap(words, width=120, break_on_hyphens=False)


def format_times(ratio: float | None) -> str:
    return f"{ratio:.2f}x" if ratio else "-"


def format_share(bound: float | None, ms: float | None) -> str:
    return f"{bound / ms:.0%}" if bound and ms else "-"


def fastest_other(rows: Sequence[Row], direction: str) -> tuple[float, str] | None:
    """The fastest rival's time divided by that of fastattn's default, and the rival's name."""
    found = [(slowdown(rows, row, direction), row["provider"]) for row in rows if not row["ours"]]
    return min(((ratio, name) for ratio, name in found if ratio), default=None)


Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # what is measured, the header, the body


def summary(record: Record) -> Iterator[str]:
    """A table for each op: fastattn's default against the others."""
    for name in record["ops"]:
        cases = [case for case in record["cases"] if case["op"] == name and case_rows(record, case)]
        if cases and name in CALLS:
            yield from ("", f"**{name}**, the untouched model divided by the accelerated one")
            yield from _call_tables(record, cases)
            yield from _without_figures(record, cases)
        elif cases:
            measured, header, body = SUMMARIES.get(name, _speed_table)(record, cases)
            yield from ("", f"**{name}**, {measured}", "")
            yield from table(header, body)
            if name != HOST_TIME:  # it has a line for each provider
                yield from _without_figures(record, cases)


def _without_figures(record: Record, cases: Sequence[Row]) -> Iterator[str]:
    """Why cells of a table are empty: fastattn's default and each rival without a figure, in how many cases and why."""
    found: dict[tuple[str, str], int] = {}
    for row in (row for case in cases for row in case_rows(record, case)):
        if row["status"] != "ok" and (row.get("default") or not row["ours"]):
            key = row["provider"], ": ".join(row[k] for k in ("status", "reason") if k in row)
            found[key] = found.get(key, 0) + 1
    if found:
        yield from ("", "Without a figure:", "")
        yield from (f"- {name}, {count} of {len(cases)} cases: {why}" for (name, why), count in found.items())


def _speed_table(record: Record, cases: Sequence[Row]) -> Table:
    direction = record["ops"][cases[0]["op"]]["directions"][-1]
    header = ["case", "fastattn, ms", "fastest other", "of the bound", "reference path"]
    if direction in NAMED_RIVAL:
        header.insert(3, NAMED_RIVAL[direction])
    if direction == "step":
        header[4:4] = ["with their own loss", "by dropping padding"]
    return MEASURED[direction], header, [_speed_cells(record, case, direction) for case in cases]


def _speed_cells(record: Record, case: Row, direction: str) -> list[str]:
    rows = case_rows(record, case)
    ms = median(default_row(rows), direction)
    other = fastest_other(rows, direction)
    ours = format_ms(default_row(rows)["timings"][direction]) if ms else "-"
    cells = [case["case"], ours, f"{format_times(other[0])} {other[1]}" if other else "-"]
    if direction in NAMED_RIVAL:
        cells.append(format_times(slowdown(rows, provider_row(rows, NAMED_RIVAL[direction]), direction)))
    if direction == "step":
        own_loss = slowdown(rows, provider_row(rows, LOSS_FROM_LOGITS), direction)
        cells.append(format_times(other[0] / own_loss if other and own_loss else None))
        cells.append(format_times(slowdown(rows, provider_row(rows, WITH_PADDING), direction)))
    reference = slowdown(rows, provider_row(rows, "reference"), direction)
    return [*cells, format_share(bound_ms(record, case, direction), ms), format_times(reference)]


def _memory_table(record: Record, cases: Sequence[Row]) -> Table:
    measured = "at its peak, of one training step beyond weights and Adam's state"
    return measured, ["case", "fastattn, MiB", PLAIN, "reference path"], [_memory_cells(record, case) for case in cases]


def _memory_cells(record: Record, case: Row) -> list[str]:
    rows = case_rows(record, case)
    found = (default_row(rows), provider_row(rows, PLAIN), provider_row(rows, "reference"))
    ours, *others = (row["peak_mib"] if row and row["status"] == "ok" else None for row in found)
    ratios = [format_times(mib / ours) if mib and ours else "-" for mib in others]
    return [case["case"], f"{ours:.1f}" if ours else "-", *ratios]


def _epoch_table(record: Record, cases: Sequence[Row]) -> Table:
    """A line for each provider of each case."""
    header = ["case", "provider", "target tokens", "first epoch, s", "later ones, s", "replays", "MiB of graphs"]
    return "batches of changing lengths", header, [_epoch_cells(c, row) for c in cases for row in case_rows(record, c)]


def _epoch_cells(case: Row, row: Row) -> list[str]:
    if (ms := median(row, EPOCH)) is None:
        return [case["case"], f"{row['provider']}: {row.get('reason', row['status'])}", *["-"] * 5]
    replays = f"{row['replays'] / (row['replays'] + row['eager']):.0%}" if "replays" in row else "-"
    cells = [rate(case["work"][EPOCH]["token"], ms, "token"), f"{row['first_s']:.3g}", f"{ms / 1e3:.3g}", replays]
    return [case["case"], row["provider"], *cells, f"{row['pool_mib']:.0f}"]


def _host_time_table(record: Record, cases: Sequence[Row]) -> Table:
    """A line for each provider of each case."""
    header = ["case", "provider", "forward, ms", "backward, ms", "both, ms"]
    header += [f"of {PLAIN}", "launches", f"with {LAUNCH_US} us for each"]
    body = [_host_time_cells(case, row) for case in cases for row in case_rows(record, case)]
    return "of one training step, without the launches of triton and cuda", header, body


def _host_time_cells(case: Row, row: Row) -> list[str]:
    if row["status"] != "ok":
        said = row["reason"] if row["status"] in ("refused", "timed out") else row["status"]
        return [case["case"], f"{row['provider']}: {said}", *["-"] * 6]
    ms, share, launches = median(row, "both"), row["of_plain"]["both"], row["launches"]
    cells = [case["case"], row["provider"], *(format_ms(timed) for timed in row["timings"].values()), f"{share:.0%}"]
    if launches is None:
        return [*cells, "-", "-"]
    return [*cells, f"{launches}", f"{share * (1 + launches * LAUNCH_US / 1e3 / ms):.0%}"]


def _masks_table(record: Record, cases: Sequence[Row]) -> Table:
    """A line for each mask, a column for each length and dtype."""
    found = _over_torch(record, cases)
    columns = list(dict.fromkeys(column for line in found.values() for column in line))
    means = {c: zip(*(line[c] for line in found.values() if c in line), strict=True) for c in columns}
    found["geometric mean"] = {column: [geometric_mean(ratios) for ratios in means[column]] for column in columns}
    body = [
        [mask, *(" / ".join(f"{r:.2f}" for r in line.get(c, ())) or "-" for c in columns)]
        for mask, line in found.items()
    ]
    return "the time of torch's operator divided by fastattn's: inference / training", ["mask", *columns], body


def _over_torch(record: Record, cases: Sequence[Row]) -> dict[str, dict[str, list[float]]]:
    """Mask -> length and dtype -> torch's time divided by fastattn's, of inference and of training."""
    found: dict[str, dict[str, list[float]]] = {}
    for case in cases:
        rows = case_rows(record, case)
        ratios = [slowdown(rows, provider_row(rows, "torch"), name) for name in ("inference", "training")]
        if all(ratios):
            mask, _, column = case["case"].rpartition(", ")
            found.setdefault(mask, {})[column] = ratios
    return found


Ratios = dict[str, dict[tuple[str, str], float]]  # kind of call -> (model, size and dtype) -> ratio


def _call_ratios(record: Record, cases: Sequence[Row]) -> Ratios:
    """Of time: untouched divided by accelerated, by the fastest samples, because ratios near 1 matter. Of peak memory:
    accelerated divided by untouched."""
    found: Ratios = {}
    for case in cases:
        rows = case_rows(record, case)
        kind, _, cell = case["case"].partition(": ")
        model, width, size = cell.split(maxsplit=2)
        place = f"{model} {width}{NO_PADDING * kind.endswith(NO_PADDING)}", size
        (direction,) = record["ops"][case["op"]]["directions"]
        timed = {row["provider"]: row for row in rows if row["status"] == "ok"}
        untouched = timed.pop(UNTOUCHED, None)
        for row in timed.values() if untouched else ():
            ratio = untouched["timings"][direction]["min_ms"] / row["timings"][direction]["min_ms"]
            if direction == "call":
                found.setdefault(kind, {})[place] = ratio
            else:
                step = kind.removesuffix(NO_PADDING) + (REPORT_LOSS if row.get("default") else OWN_LOSS)
                found.setdefault(step, {})[place] = ratio
                found.setdefault(PEAK + step, {})[place] = row["peak_mib"] / untouched["peak_mib"]
    return found


def _call_tables(record: Record, cases: Sequence[Row]) -> Iterator[str]:
    """A table for each kind of call, a line for each model, a column for each size and dtype."""
    ratios = _call_ratios(record, cases)
    for title, kinds in CALL_TABLES.items():
        found = {name: ratios[kind] for name, kind in kinds.items() if kind in ratios}
        if not found:
            continue
        places = list(dict.fromkeys(place for cells in found.values() for place in cells))
        models, sizes = (list(dict.fromkeys(names)) for names in zip(*places, strict=True))
        body = [[model, *(_cell(found, (model, size)) for size in sizes)] for model in models]
        word, worst = ("most", max) if title.startswith("Peak") else ("least", min)
        said = []
        for name, cells in found.items():
            place = worst(cells, key=cells.__getitem__)
            mean = geometric_mean(cells.values())
            said.append(
                f"{name}: " * bool(name) + f"geometric mean {mean:.2f}, {word} {cells[place]:.2f} ({' '.join(place)})"
            )
        yield from ("", *wrapped(f"**{title}**: {'; '.join(said)}."), "")
        yield from table([" / ".join(found), *sizes], body)


def _cell(found: Ratios, place: tuple[str, str]) -> str:
    texts = [f"{cells[place]:.2f}" if place in cells else "-" for cells in found.values()]
    return " / ".join(texts) if any(place in cells for cells in found.values()) else "-"


SUMMARIES = {HOST_TIME: _host_time_table, MASKS: _masks_table, MEMORY: _memory_table, EPOCH: _epoch_table}


def how_to_read() -> str:
    return (
        "Over 1x: fastattn's default is faster, or needs less memory, than the column's name. The two were measured\n"
        "in turn, the time of the first column alone: on a busy machine they differ. A case of several records has\n"
        "a figure of each run; a GPU's host was busier in one than in another, and the GPU's own time differs less.\n"
        "Fastest other: the fastest of what a user would use instead. With their own loss: the gain of a user who\n"
        "only changes the import and computes the loss from the logits. By dropping padding: how much longer\n"
        "fastattn needs when it computes the padding too, which is that part of its gain. Of the bound: the least\n"
        "time that the FLOPs and bytes of the case need at this machine's ceilings, as a share of the measured time.\n"
        "The reference path is the specification, not a rival. Host time: what Python and PyTorch do around launches,\n"
        f"in one thread, also as a share of what {PLAIN} needs. PyTorch's operators do run, on 16 target tokens."
    )


def ceilings(record: Record) -> str:
    measured = record["ceilings"]
    if measured is None:
        return "Ceilings were not measured."
    products = ", ".join(f"{per_s / 1e12:.3g} TFLOP/s in {dtype}" for dtype, per_s in measured["flop_per_s"].items())
    return f"Measured here: copying {measured['byte_per_s'] / 1e9:.4g} GB/s, large matrix products {products}."


def provenance(record: Record) -> Iterator[str]:
    environment = record["environment"]
    changed = ", with uncommitted changes" if environment["uncommitted_changes"] else ""
    yield f"On {machine(record)}, {environment['date'][:10]},"
    yield f"commit {(environment['commit'] or 'unknown')[:10]}{changed}, sources {environment['sources']}."
    if environment["load_before"] is not None:
        busy = ": others were at work, the figures are rough" if environment["load_before"] > 0.5 else ""
        yield f"Load of the machine before the first measurement: {environment['load_before']:.2f}{busy}."
    yield ceilings(record)
    if found := record.get("conditions"):
        said = (f"{name} {value if isinstance(value, str) else format(value, '.3g')}" for name, value in found.items())
        yield f"Measured by timing.conditions: {', '.join(said)}."
    if _on_gpu(record):
        yield HOW_TIMED


def write_report(record: Record, out: Path) -> Path:
    """report.md and its plots. Returns the report's path."""
    lines = ["# fastattn: benchmark report", "", *provenance(record)]
    if record["missing"]:
        lines += ["", f"**{record['missing']} measurements are missing: the time was up. Run again to go on.**"]
    lines += ["", "## Summary", "", how_to_read(), *summary(record)]
    try:
        import report_plots  # matplotlib may be missing where the report is made

        lines += [line for name in report_plots.draw(record, out) for line in ("", f"![{name}]({name})")]
    except ImportError as error:
        lines += ["", f"No plots: {error}. `report.py --render` draws them anywhere."]
    lines += [
        "",
        "## Everything measured",
        "",
        "Medians; in brackets the quartiles. Speed: the time divided by that of fastattn's default, by samples that",
        "alternate with its own. Error: share of the bound of `fastattn.check.tolerance.check_error`. Memory: the peak",
        "of the last direction beyond what was allocated before.",
    ]
    for name, op in record["ops"].items():
        cases = [case for case in record["cases"] if case["op"] == name and case_rows(record, case)]
        lines += ["", f"## {name}", "", f"{op['formula']}."] if cases else []
        for case in cases:
            lines += ["", f"### {case['case']}", "", *_details(record, case, op, case_rows(record, case))]
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
        notes += f" (first call {row['first_s']:.3g} s)" if "first_s" in row else ""
        notes += " (default)" if row.get("default") and row["provider"] != "default" else ""
        cells = [row["provider"] + notes, *(format_ms(timed, quartiles=True) for timed in row["timings"].values())]
        for last in op["directions"][-1:]:
            ms = median(row, last)
            cells += [rate(case["work"][last][unit], ms, unit) for unit in op["rates"]]
            cells += [format_share(bound_ms(record, case, last), ms), format_times(slowdown(rows, row, last))]
        ratio = row["error_over_bound"]
        mib = "-" if row["peak_mib"] is None else f"{row['peak_mib']:.1f}"
        mib += f" + {row['pool_mib']:.0f} of graphs" if row.get("pool_mib") else ""
        body.append([*cells, "-" if ratio is None else f"{ratio:.2f}", mib])
    if body:
        yield from table(header, body)
    if refused:
        yield from ("", *refused)


def committed(folder: Path) -> list[tuple[Path, Record]]:
    """The records report_*.json of a folder: those of GPUs first, then the newest first."""
    found = [(path, result_files.load(path)) for path in sorted(folder.glob("report_*.json"))]
    found.sort(key=lambda pair: pair[1]["environment"]["date"], reverse=True)
    return sorted(found, key=lambda pair: not _on_gpu(pair[1]))


def _on_gpu(record: Record) -> bool:
    return record["environment"]["device"]["device"] != "cpu"


def results(found: Sequence[tuple[Path, Record]]) -> str:
    """docs/results.md: the records in words and pictures, and the tables of every record."""
    lines = [
        "# Results",
        "",
        "Written by `python benchmarks/report.py --readme` from the records that are named below.",
        "",
    ]
    lines += [] if any(_on_gpu(record) for _, record in found) else [NO_GPU, ""]
    lines += [*said, ""] if (said := _accelerate_table(found)) else []
    for sentence in (_host_time_figures, _mask_figures):
        lines += next(([*said, ""] for path, record in found if (said := sentence(path, record))), [])
    lines += [f"![{text}](pictures/{name}.svg)\n" for name, text in PICTURES.items()]
    lines += ["## How to read the tables", "", how_to_read()]
    for path, record in found:
        device, date = machine(record).partition(";")[0], record["environment"]["date"][:10]
        lines += ["", f"## {device}, {date}, {path.stem}", "", f"Record: `benchmarks/results/{path.name}`."]
        lines += provenance(record)
        lines += summary(record)
    return "\n".join(lines) + "\n"


def figures(found: Sequence[tuple[Path, Record]]) -> str:
    """The README's tables: of the newest record of a GPU; the first training steps of the first record of a CPU that
    has them; accelerate, by its calls where a record has them."""
    gpus = [pair for pair in found if _on_gpu(pair[1])]
    lines = _gpu_figures(gpus) if gpus else [NO_GPU]
    found = [pair for pair in found if not _on_gpu(pair[1])]
    lines += ["", *_cpu_steps(found)] if found else []
    lines += ["", *said] if (said := _call_figures(found) or _accelerate_table(found)) else []
    return "\n".join(lines) + "\n"


def _with_calls(found: Sequence[tuple[Path, Record]]) -> tuple[Path, Record, list[Row]] | None:
    """The first record that has calls of accelerated models, and these cases."""
    for path, record in found:
        cases = [case for case in record["cases"] if case["op"] in CALLS and case_rows(record, case)]
        if cases:
            return path, record, cases
    return None


def call_tables(found: Sequence[tuple[Path, Record]]) -> str:
    """The tables of docs/accelerate.md: of the first record that has them."""
    if (given := _with_calls(found)) is None:
        return ""
    path, record, cases = given
    formulas = "; ".join(dict.fromkeys(record["ops"][case["op"]]["formula"] for case in cases))
    words = (
        f"On {machine(record)}, {record['environment']['date'][:10]} (`benchmarks/results/{path.name}`). Time: the "
        "untouched model's divided by the accelerated one's, by the fastest samples; above 1 is faster. Peak memory: "
        f"the accelerated model's divided by the untouched one's; under 1 is less. {formulas}."
    )
    return "\n".join([*wrapped(words), *_call_tables(record, cases)]) + "\n"


def _call_figures(found: Sequence[tuple[Path, Record]]) -> list[str]:
    """Accelerated models in a table with a line for each kind of call; nothing if no record has them."""
    if (given := _with_calls(found)) is None:
        return []
    path, record, cases = given
    ratios = _call_ratios(record, cases)
    body: dict[str, dict[str, list[float]]] = {}
    for line, kind in README_CALLS.items():
        for (model, size), ratio in ratios.get(kind, {}).items():
            column = f"{model.split()[1].removesuffix(',')} {size.split()[1]}"
            body.setdefault(line, {}).setdefault(column, []).append(ratio)
    columns = list(dict.fromkeys(column for line in body.values() for column in line))
    models = dict.fromkeys(model.split()[0] for cells in ratios.values() for model, _ in cells)
    words = (
        f"`accelerate`, {len(models)} families of models, on {machine(record)}: the untouched model's time divided by "
        "the accelerated one's, in the geometric mean (and the least and the most; "
        f"[every family](docs/accelerate.md); `benchmarks/results/{path.name}`):"
    )
    cells = [[line, *(_spread(given.get(column)) for column in columns)] for line, given in body.items()]
    return [*wrapped(words), "", *table(["", *columns], cells)]


def _spread(ratios: Sequence[float] | None) -> str:
    return f"{geometric_mean(ratios):.2f}x ({min(ratios):.2f}x to {max(ratios):.2f}x)" if ratios else "-"


def _other_records(found: Sequence[tuple[Path, Record]]) -> Iterator[str]:
    """Sentences: what users waited for the first training step in all records, and the GPU's time of it; the fastest by
    torch.compile in the newest record that has one; accelerated models. A ratio next to times is that of them."""
    step = next((case for case in found[0][1]["cases"] if case["op"] == STEP), None)
    runs, said = [(path, case_rows(record, step)) for path, record in found] if step else [], []
    for title, name in {"fastattn": "default", SDPA: SDPA}.items():
        timed = [row["timings"]["step"] for _, rows in runs if median(row := provider_row(rows, name), "step")]
        spans = [_span([t[key] for t in timed if t.get(key)]) for key in ("median_ms", "device_ms")]
        said += [f"{title} {spans[0]} ms (GPU {spans[1]})"] if all(spans) else []
    if said:
        load = _span([record["environment"]["load_before"] for _, record in found], "{:.2g}".format)
        yield f"That step in {len(runs)} runs, by how busy the host was (load {load}): {', '.join(said)}."
    for path, rows in runs:
        compiled = [row for row in rows if row["provider"].startswith("torch.compile") and row["status"] == "ok"]
        row = min(compiled, key=lambda row: median(row, "step"), default=None)
        if row and (ratio := slowdown(rows, row, "step")):
            ms, graphed = median(row, "step"), median(provider_row(rows, GRAPHED_STEP), "step")
            ours = {"in turn with it": ms / ratio, "with `GraphedStep`": graphed}
            times = [f"{how} {time:.3g} ({format_times(ms / time)})" for how, time in ours.items() if time]
            yield f"{row['provider']}: {ms:.3g} ms, fastattn {', '.join(times)} (`{path.name}`)."
            break
    of_models = [case_rows(record, case) for _, record in found for case in record["cases"] if case["op"] == ACCELERATE]
    if ratios := [other[0] for rows in of_models if default_row(rows) and (other := fastest_other(rows, "step"))]:
        yield f"Accelerated models: {_span(ratios, format_times)}."
    if not any(row["provider"].endswith(CUDA_GRAPHS) for _, rows in runs for row in rows):
        yield (
            "Not measured: alternatives with CUDA graphs, `GraphedStep` as three graphs, and the projection with loss "
            "since Triton's kernel has replaced CUDA's."
        )


def _span(values: Sequence[float], form: Callable[[float], str] = "{:.3g}".format) -> str:
    return " to ".join(dict.fromkeys(map(form, (min(values), max(values))))) if values else ""


def _gpu_figures(found: Sequence[tuple[Path, Record]]) -> list[str]:
    """Training steps of the newest record, and for other ops the smallest and the largest speed-up: of each case the
    least of all records, as not all have all rivals. A ratio in the table is that of the two times in it."""
    (path, record), *_ = found
    body, gains = [], {}
    for case in record["cases"]:
        rows, direction = case_rows(record, case), record["ops"][case["op"]]["directions"][-1:]
        other = fastest_other(rows, direction[0]) if direction and default_row(rows) else None
        if other and case["op"] == STEP:
            best, rival = min((ms, row["provider"]) for row in rows if not row["ours"] and (ms := median(row, "step")))
            body.append([case["case"], f"{format_ms(provider_row(rows, rival)['timings']['step'])} {rival}"])
            for row in (provider_row(rows, name) for name in OWN_STEPS.values()):
                times = f"{format_ms(row['timings']['step'])}: " if (ms := median(row, "step")) else "not measured yet"
                body[-1].append(times + (format_times(best / ms) if ms else ""))
        elif other and case["op"] in ON_GPU:
            others = [fastest_other(case_rows(each, case), direction[0]) for _, each in found]
            gains.setdefault(case["op"], []).append(min(other[0] for other in others if other))
    lines = [f"On {machine(record)}, {record['environment']['date'][:10]} (`benchmarks/results/{path.name}`):"]
    lines += ["", *table(["one training step, ms", "the best alternative", *OWN_STEPS], body)] if body else []
    said = [f"{name} {_span(gains[op], format_times)}" for op, name in ON_GPU.items() if op in gains]
    words = f"A single op against its best alternative, the GPU's time alone: {', '.join(said)}."
    return [*lines, "", *wrapped(" ".join([words, *_other_records(found)]))] if said else lines


def _cpu_steps(found: Sequence[tuple[Path, Record]]) -> list[str]:
    def steps(record: Record) -> list[Row]:
        return [case for case in record["cases"] if case["op"] == STEP and case_rows(record, case)][:README_ROWS]

    path, record = next((pair for pair in found if steps(pair[1])), found[0])
    cases = steps(record)
    body = [[cells[column] for column in (0, 1, 2, 4, 5)] for cells in (_speed_cells(record, c, "step") for c in cases)]
    lines = [f"On {machine(record)}, {record['environment']['date'][:10]} (`benchmarks/results/{path.name}`):", ""]
    header = ["one training step", "fastattn, ms", "speed-up over the best alternative", "without `model.loss`"]
    lines += table([*header, "share from skipping padding"], body)
    return lines


def _accelerate_table(found: Sequence[tuple[Path, Record]]) -> list[str]:
    """Other libraries' models against themselves, in words and a table of all records; nothing if none has them."""
    body, paths, everywhere = [], [], []
    dtypes = list(dict.fromkeys(c["dtype"] for _, record in found for c in record["cases"] if c["op"] == ACCELERATE))
    for path, record in found:
        speed_ups: dict[str, dict[str, list[tuple[str, float, float]]]] = {}
        for case in (case for case in record["cases"] if case["op"] == ACCELERATE):
            rows = case_rows(record, case)
            other = fastest_other(rows, "step") if default_row(rows) else None
            own_loss = slowdown(rows, provider_row(rows, LOSS_FROM_LOGITS), "step") if other else None
            if other and own_loss:
                model, dropout_p = case["case"].split()[0], case["case"].partition(ATTENTION_DROPOUT)[2]
                of_row = speed_ups.setdefault(dropout_p, {}).setdefault(case["dtype"], [])
                of_row.append((model, other[0], other[0] / own_loss))
                everywhere += [] if dropout_p else [model]
        paths += [f"`benchmarks/results/{path.name}`"] if speed_ups else []
        for dropout_p, of_row in speed_ups.items():
            cells, models = [], dict.fromkeys(model for one in of_row.values() for model, *_ in one)
            for dtype in dtypes:
                columns = list(zip(*of_row.get(dtype, ()), strict=True))[1:]
                cells += [_spread(r) for r in columns] or ["-", "-"]
            dropout = f"{dropout_p} ({', '.join(models)})" if dropout_p else "0.1"
            body.append([machine(record).partition(";")[0], dropout, *cells])
    if not body:
        return []
    *others, last = dict.fromkeys(everywhere)
    words = (
        f"`accelerate`, one training step of {', '.join(others)}{' and ' * bool(others)}{last}, a quarter padding, "
        "dropout 0.1, also of attention weights (where the default of Marian and BART is 0): the speed-up over the "
        "fastest without fastattn with `report.loss`, where there is one, and with the model's own loss, in the "
        f"geometric mean (and of the slowest and the fastest case; {', '.join(paths)}):"
    )
    header = ["processor", "attention dropout", *(f"{d}{loss}" for d in dtypes for loss in ("", ", own loss"))]
    return [*wrapped(words), "", *table(header, body)]


def _host_time_figures(path: Path, record: Record) -> list[str]:
    """A sentence about fastattn's backends, as lines; none where the record has no host time."""
    cases = [case for case in record["cases"] if case["op"] == HOST_TIME]
    shares: dict[str, list[str]] = {}
    for case in cases:
        for row in case_rows(record, case):
            if row["ours"] and row["status"] == "ok":
                shares.setdefault(row["provider"], []).append(f"{row['of_plain']['both']:.0%} in {case['dtype']}")
    if not shares:
        return []
    layers = cases[0]["case"].partition(" d")[0]
    return [
        f"Host time of a training step of {layers}, without launches, as a share of what the public model needs:",
        "; ".join(f"`{backend}` {', '.join(found)}" for backend, found in shares.items()),
        f"(`benchmarks/results/{path.name}`).",
    ]


def _mask_figures(path: Path, record: Record) -> list[str]:
    """How attention compares with torch's operator, as lines; none where the record has no masks."""
    found = _over_torch(record, [case for case in record["cases"] if case["op"] == MASKS])
    by_mask = {mask: [ratio for pair in line.values() for ratio in pair] for mask, line in found.items()}
    ratios = [ratio for line in by_mask.values() for ratio in line]
    if not ratios:
        return []
    means = sorted(((geometric_mean(line), mask) for mask, line in by_mask.items()), reverse=True)
    faster, slower = sum(ratio > 1.05 for ratio in ratios), sum(ratio < 0.95 for ratio in ratios)
    return textwrap.wrap(
        f"Attention on {machine(record).partition(';')[0]}, with {len(means)} kinds of mask, {len(ratios)} calls: "
        f"`scaled_dot_product_attention` is {geometric_mean(ratios):.2f} times as fast as torch's operator in the "
        f"geometric mean, from {min(ratios):.2f} to {max(ratios):.2f}; by over 5 % faster in {faster} calls and slower "
        f"in {slower}. By mask: {', '.join(f'{mask} {mean:.2f}' for mean, mask in means)} "
        f"(`benchmarks/results/{path.name}`).",
        width=120,
        break_on_hyphens=False,
    )


def with_figures(page: str, text: str) -> str:
    """A page with this text between its markers. ValueError where it has none."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"the page must hold the markers {BEGIN.strip()} and {END.strip()}, once each, in this order")
    before, rest = page.split(BEGIN)
    return before + BEGIN + text + END + rest.split(END)[1]


def write_results() -> None:
    """docs/results.md and the figures of the README and of docs/accelerate.md, from benchmarks/results/."""
    found = committed(result_files.ROOT / "benchmarks" / "results")
    RESULTS.write_text(results(found))
    for page, text in ((README, figures(found)), (YOUR_MODEL, call_tables(found))):
        page.write_text(with_figures(page.read_text(), text))
