"""Records as Markdown tables: the report of one run, and the tables of the documentation.

`report.py --readme` writes the tables between the markers of the README, docs/accelerate.md and docs/results.md, from
benchmarks/results/report_*.json. The sentences around them are written by hand. The site also has a page of each
record, which docs/hooks.py makes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean

import result_files
from cases import BEAMS, FORWARD, GREEDY, NO_DROPOUT, NO_PADDING, OWN_DROPOUT, STATIC
from result_files import (
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
    fastest_other,
    is_busy,
    is_on_gpu,
    machine,
    median,
    provider_row,
    rate,
    slowdown,
)

Records = Sequence[tuple[Path, Record]]
MOST_BARS = 40  # the first cases of the plot
STEP, ACCELERATED_STEP = "transformer", "accelerate_training"
CALLS = ("accelerate_inference", ACCELERATED_STEP)  # of accelerated models
OWN_LOSS, REPORT_LOSS, PEAK = ", own loss", ", report.loss", "peak memory, "
CALL_TABLES = {  # title -> the kinds of call in a cell
    "a forward": (FORWARD,),
    "`generate`, greedy / 4 beams": (GREEDY, BEAMS),
    "`generate` in a static cache, greedy / 4 beams": (GREEDY + STATIC, BEAMS + STATIC),
    **{
        f"{title}, {dropout}, own loss / `report.loss`": (start + dropout + OWN_LOSS, start + dropout + REPORT_LOSS)
        for title, start in (("a training step", ""), ("peak memory of it, accelerated / untouched", PEAK))
        for dropout in (OWN_DROPOUT, NO_DROPOUT)
    },
}
RESULTS = {  # docs/results.md: the heading of a table -> its benchmarks
    "A training step": (STEP,),
    "Ops": ("attention", "attention_masks", "add_layer_norm", "feed_forward", "linear_cross_entropy"),
    "Accelerated models": (ACCELERATED_STEP, "accelerate"),  # the second: old records
    "Decoding": ("decoding",),
}
EXAMPLE = "8x64"  # the case to show where there is one; else the first
READING = """\
Ratios above 1: fastattn's default is faster, or needs less memory. Their samples were taken in turn, so on a busy
machine they differ from the quotient of the two times.

- *fastattn, ms*: the median. An op's time is the GPU's alone, a model's is what its user waits for; in parentheses the
  host's time and, of a training step, the GPU's alone.
- *best alternative*: the fastest of what a user would use instead.
- *own loss*: the loss is computed from the logits, next to `model.loss` or `report.loss`.
- *padding kept*: how much longer fastattn needs if it computes the padding too.
- *% of peak*: roofline time / measured time. The roofline is this machine's measured bandwidth and matrix products.
- *host_time*: what Python and PyTorch do around launches, in one thread. PyTorch's operators do run, on 16 tokens."""
DETAILS = """\
Medians; in brackets the quartiles. Speed: the time divided by that of fastattn's default, of samples taken in turn.
Error: share of the bound of `fastattn.check.tolerance.check_error`. Memory: the peak of the last direction beyond what
was allocated before."""
# The README's training steps: how many cases of each benchmark, and the columns on a GPU and on a CPU.
README_ROWS = {STEP: 2, ACCELERATED_STEP: 4}
GPU_STEPS = {"fastattn": "default", "`graphs=True`": GRAPHS, "`GraphedStep`": GRAPHED_STEP}
CPU_STEPS = {"fastattn": "default", "without `model.loss`": LOSS_FROM_LOGITS, "padding computed too": WITH_PADDING}


def brief(row: Row) -> str:
    """One result in a few words, for the terminal."""
    if row["status"] != "ok" or "timings" not in row:
        return f"{row['status']}: {row['reason']}" if "reason" in row else row["status"]
    return ", ".join(f"{direction} {format_ms(timed)} ms" for direction, timed in row["timings"].items())


def format_number(ms: float) -> str:
    return f"{ms:.3g}" if ms < 1000 else f"{ms:.0f}"


def format_ms(timed: Row, quartiles: bool = False) -> str:
    """A median; on a GPU also the host's time and, of a whole model, the GPU's alone."""
    text = format_number(timed["median_ms"])
    if quartiles:
        text = f"{timed['median_ms']:.4g} [{timed['q1_ms']:.4g}, {timed['q3_ms']:.4g}]"
    if not timed.get("host_us"):
        return text
    gpu = f", GPU {timed['device_ms']:.3g}" if timed.get("device_ms") else ""
    return f"{text} (host {timed['host_us'] / 1e3:.3g}{gpu})"


def format_times(ratio: float | None) -> str:
    return f"{ratio:.2f}x" if ratio else "-"


def format_share(bound: float | None, ms: float | None) -> str:
    return f"{bound / ms:.0%}" if bound and ms else "-"


def table(header: Sequence[str], body: Sequence[Sequence[str]], texts: int = 1) -> Iterator[str]:
    """texts: how many of the first columns are no numbers."""
    yield "| " + " | ".join(header) + " |"
    yield "|" + "---|" * texts + "---:|" * (len(header) - texts)
    for cells in body:
        yield "| " + " | ".join(cells) + " |"


Cells = dict[str, dict[str, list[float | None]]]  # line -> column -> ratios


def pivot(found: Cells) -> Iterator[str]:
    """A table with these lines and columns, and at its end their geometric means."""
    columns = list(dict.fromkeys(column for line in found.values() for column in line))
    means: dict[str, list[float | None]] = {}
    for column in columns:
        places = zip(*(line[column] for line in found.values() if column in line), strict=True)
        means[column] = [geometric_mean(given) if (given := list(filter(None, r))) else None for r in places]

    def cell(ratios: Sequence[float | None]) -> str:
        return " / ".join(f"{ratio:.2f}" if ratio else "-" for ratio in ratios) if any(ratios) else "-"

    lines = [*found.items(), ("geometric mean", means)]
    yield from table(["", *columns], [[name, *(cell(line.get(c, ())) for c in columns)] for name, line in lines])


# A table for each benchmark.


def summary(record: Record) -> Iterator[str]:
    for name, op in record["ops"].items():
        cases = [case for case in record["cases"] if case["op"] == name and case_rows(record, case)]
        if cases and op["directions"]:  # old records have peak memory without times: it is in the details alone
            yield from ("", f"**{name}**")
            yield from (call_tables if name in CALLS else speed_table)(record, cases)


def speed_table(record: Record, cases: Sequence[Row]) -> Iterator[str]:
    """fastattn's default against the best alternative; of a training step also what a part of it gains."""
    direction = record["ops"][cases[0]["op"]]["directions"][-1]
    more = {"own loss": LOSS_FROM_LOGITS, "padding kept": WITH_PADDING} if direction == "step" else {}
    body = []
    for case in cases:
        rows = case_rows(record, case)
        if ms := median(default_row(rows), direction):
            other = fastest_other(rows, direction)
            ratios = [format_times(slowdown(rows, provider_row(rows, name), direction)) for name in more.values()]
            cells = [case["case"], format_ms(default_row(rows)["timings"][direction])]
            cells += [f"{format_times(other[0])} {other[1]}" if other else "-", *ratios]
            body.append([*cells, format_share(bound_ms(record, case, direction), ms)])
    columns = zip(["case", "fastattn, ms", "best alternative", *more, "% of peak"], *body, strict=True)
    header, *body = zip(*[column for column in columns if set(column[1:]) != {"-"}], strict=True)
    yield from ("", *table(header, body))


def call_ratios(record: Record, cases: Sequence[Row]) -> dict[str, dict[tuple[str, str], float]]:
    """Kind of call -> (model, size and dtype) -> ratio. Of time: untouched divided by accelerated; of old
    records, whose samples all alternated, by the fastest. Of peak memory: accelerated divided by untouched."""
    found: dict[str, dict[tuple[str, str], float]] = {}
    for case in cases:
        kind, _, cell = case["case"].partition(": ")
        model, width, size = cell.split(maxsplit=2)
        place = f"{model} {width}{NO_PADDING * kind.endswith(NO_PADDING)}", size
        (direction,) = record["ops"][case["op"]]["directions"]
        timed = {row["provider"]: row for row in case_rows(record, case) if row["status"] == "ok"}
        untouched = timed.pop(UNTOUCHED, None)
        for row in (timed[p] for p in ("default", LOSS_FROM_LOGITS) if untouched and p in timed):
            name = kind
            if direction == "step":
                name = kind.removesuffix(NO_PADDING) + (REPORT_LOSS if row.get("default") else OWN_LOSS)
                found.setdefault(PEAK + name, {})[place] = row["peak_mib"] / untouched["peak_mib"]
            ratio = untouched["timings"][direction]["min_ms"] / row["timings"][direction]["min_ms"]
            if speed := untouched.get("speed"):  # of samples that alternate with the default's
                ratio = speed[direction] / row.get("speed", {direction: 1.0})[direction]
            found.setdefault(name, {})[place] = ratio
    return found


def call_tables(record: Record, cases: Sequence[Row]) -> Iterator[str]:
    """A table for each kind of call, a line for each model, a column for each size and dtype."""
    ratios = call_ratios(record, cases)
    for title, kinds in CALL_TABLES.items():
        cells: Cells = {}
        given = [ratios.get(kind, {}) for kind in kinds]
        for model, size in dict.fromkeys(place for each in given for place in each):
            cells.setdefault(model, {})[size] = [each.get((model, size)) for each in given]
        if cells:
            yield from ("", f"{title}:", "", *pivot(cells))


# The report of one run.


def place(record: Record) -> str:
    """The machine without its versions."""
    return machine(record).partition(";")[0]


def title(record: Record) -> str:
    return f"{place(record)}, {record['environment']['date'][:16].replace('T', ' ')}"


def provenance(record: Record) -> Iterator[str]:
    environment = record["environment"]
    changed = ", with uncommitted changes" if environment["uncommitted_changes"] else ""
    yield f"On {machine(record)}, {environment['date'][:10]},"
    yield f"commit {(environment['commit'] or 'unknown')[:10]}{changed}, sources {environment['sources']}."
    if environment["load_before"] is not None:
        busy = ": the machine was not idle: +-10 %" if is_busy(record) else ""
        yield f"Load of the machine before the first measurement: {environment['load_before']:.2f}{busy}."
    if measured := record["ceilings"]:
        products = ", ".join(f"{each / 1e12:.3g} TFLOP/s in {dtype}" for dtype, each in measured["flop_per_s"].items())
        yield f"Measured here: copying {measured['byte_per_s'] / 1e9:.4g} GB/s, large matrix products {products}."
    if record.get("conditions"):
        yield f"Measured by timing.conditions: {', '.join(f'{k} {v}' for k, v in record['conditions'].items())}."


def draw(record: Record, out: Path) -> list[str]:
    """The plot: for each case how many times as fast fastattn's default is as the fastest alternative. Returns the
    names of the files, none where the record has no such case."""
    import matplotlib

    matplotlib.use("Agg")  # files only, no display
    from matplotlib import pyplot

    bars = []
    for case in record["cases"]:
        rows = case_rows(record, case)
        for direction in record["ops"][case["op"]]["directions"][-1:] if default_row(rows) else ():
            if other := fastest_other(rows, direction):
                bars.append((f"{case['op']}: {case['case']}", *other))
    if not bars:
        return []
    bars, path = bars[:MOST_BARS][::-1], out / "speed_ups.png"
    figure, axes = pyplot.subplots(figsize=(11, 0.8 + 0.3 * len(bars)), layout="constrained")
    for place, (_, ratio, other) in enumerate(bars):
        axes.barh(place, ratio, color="tab:blue" if ratio >= 1 else "tab:orange")
        axes.text(ratio, place, f" {ratio:.2f}x {other}", va="center", fontsize=8)
    axes.set_yticks(range(len(bars)), [name for name, *_ in bars], fontsize=8)
    axes.axvline(1, color="black", lw=1)
    axes.margins(x=0.25)
    axes.set_title("Speed of fastattn's default; 1 is the fastest alternative, which is named at the bar", fontsize=10)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return [path.name]


def report(record: Record, plot: Sequence[str] = ()) -> Iterator[str]:
    """Everything that a record has. plot: lines of the report that follow its first."""
    yield from (f"# {title(record)}", "", *provenance(record))
    if record["missing"]:
        yield from ("", f"**{record['missing']} measurements are missing: the time was up. Run again to go on.**")
    yield from (*plot, "", "## Summary", "", READING, *summary(record), "", "## Everything measured", "", DETAILS)
    for case in record["cases"]:
        if rows := case_rows(record, case):
            op = record["ops"][case["op"]]
            yield from ("", f"### {case['op']}: {case['case']}", "", f"{op['formula']}.", "")
            yield from details(record, case, op, rows)


def write_report(record: Record, out: Path) -> Path:
    """report.md and its plot. Returns the report's path."""
    try:
        # matplotlib may be missing where the report is made.
        plot = [line for name in draw(record, out) for line in ("", f"![{name}]({name})")]
    except ImportError as error:
        plot = ["", f"No plot: {error}. `report.py --render` draws it anywhere."]
    path = out / "report.md"
    path.write_text("\n".join(report(record, plot)) + "\n")
    return path


def details(record: Record, case: Row, op: Row, rows: Sequence[Row]) -> Iterator[str]:
    directions = op["directions"]
    header = ["provider", *(f"{direction}, ms" for direction in directions), *(f"{unit}s" for unit in op["rates"])]
    header += ["% of peak", "speed"] * bool(directions) + ["error", "MiB"]
    body, others = [], []
    for row in rows:
        if row["status"] != "ok":
            others.append(f"- {row['provider']}: {brief(row)}")
            continue
        notes = f" ({row['ran']} ran)" if row.get("ran", row["provider"]) not in row["provider"] else ""
        notes += f" (mask alone {row['mask_ms']:.3g} ms)" if "mask_ms" in row else ""
        notes += f" (first call {row['first_s']:.3g} s)" if "first_s" in row else ""
        notes += f" (a step {row['step_device_ms']:.3g} ms of the GPU)" if "step_device_ms" in row else ""
        notes += f" ({row['replays']} replays, {row['eager']} eager)" if "replays" in row else ""
        notes += " (default)" if row.get("default") and row["provider"] != "default" else ""
        cells = [row["provider"] + notes, *(format_ms(timed, quartiles=True) for timed in row["timings"].values())]
        for last in directions[-1:]:
            ms = median(row, last)
            cells += [rate(case["work"][last][unit], ms, unit) for unit in op["rates"]]
            cells += [format_share(bound_ms(record, case, last), ms), format_times(slowdown(rows, row, last))]
        ratio = row["error_over_bound"]
        mib = "-" if row["peak_mib"] is None else f"{row['peak_mib']:.1f}"
        mib += f" + {row['pool_mib']:.0f} of graphs" if row.get("pool_mib") else ""
        body.append([*cells, "-" if ratio is None else f"{ratio:.2f}", mib])
    yield from table(header, body) if body else ()
    yield from ("", *others) if others else ()


# The tables of the documentation.


def committed(folder: Path) -> list[tuple[Path, Record]]:
    """The records report_*.json of a folder: those of GPUs first, then the newest first."""
    found = [(path, result_files.load(path)) for path in sorted(folder.glob("report_*.json"))]
    found.sort(key=lambda pair: pair[1]["environment"]["date"], reverse=True)
    return sorted(found, key=lambda pair: not is_on_gpu(pair[1]))


def best_alternative(rows: Sequence[Row], direction: str) -> Row | None:
    """The rival with the least median."""
    timed = [row for row in rows if not row["ours"] and median(row, direction)]
    return min(timed, key=lambda row: median(row, direction), default=None)


def steps(record: Record, columns: dict[str, str], ops: Collection[str] = (STEP,)) -> Iterator[str]:
    """The fastest rival and some providers. A ratio is that of the two times in the table."""
    body: list[list[str]] = []
    for op in ops:
        given = [(case, case_rows(record, case)) for case in record["cases"] if case["op"] == op]
        given = [(case["case"], rows, rival) for case, rows in given if (rival := best_alternative(rows, "step"))]
        for case, rows, rival in given[: README_ROWS[op]]:
            best = median(rival, "step")
            body.append([case, f"{format_ms(rival['timings']['step'])} {rival['provider']}"])
            for row in (provider_row(rows, name) for name in columns.values()):
                ms = median(row, "step")
                body[-1].append(f"{format_ms(row['timings']['step'])}: {format_times(best / ms)}" if ms else "-")
    yield from table(["one training step, ms", "the best alternative", *columns], body)


def spread(ratios: Sequence[float]) -> str:
    """Their geometric mean, the least and the most."""
    return f"{geometric_mean(ratios):.2f}x ({min(ratios):.2f}x to {max(ratios):.2f}x)" if ratios else "-"


def calls(record: Record) -> Iterator[str]:
    """Accelerated models: the geometric mean, the least and the most of all families, by width and dtype."""
    ratios = call_ratios(record, [case for case in record["cases"] if case["op"] in CALLS])
    body: dict[str, dict[str, list[float]]] = {}
    for kind, found in ratios.items():
        for (model, size), ratio in found.items() if STATIC not in kind and NO_DROPOUT not in kind else ():
            column = f"{model.split()[1].removesuffix(',')} {size.split()[1]}"
            body.setdefault(kind, {}).setdefault(column, []).append(ratio)
    columns = list(dict.fromkeys(column for line in body.values() for column in line))
    names = {kind: kind.replace(OWN_DROPOUT, "training step") for kind in body}
    lines = [[names[kind], *(spread(line.get(c, ())) for c in columns)] for kind, line in body.items()]
    yield from table(["", *columns], lines)


def first(found: Records, op: str, on_gpu: bool) -> Record:
    """The first record of this kind of device that has cases of this op."""
    return next(r for _, r in found if is_on_gpu(r) == on_gpu and any(row["op"] == op for row in r["rows"]))


def newest(found: Records, ops: Collection[str]) -> list[tuple[str, Record]]:
    """The name and the content of each machine's newest record that has rows of these benchmarks."""
    of_machine: dict[str, tuple[str, Record]] = {}
    for path, record in found:
        if any(row["op"] in ops for row in record["rows"]):
            of_machine.setdefault(place(record), (path.stem, record))
    return list(of_machine.values())


def compared(record: Record, op: str) -> Iterator[list[str]]:
    """For each dtype the case to show, both times, their quotient, and the quotients of all cases."""
    direction, found = record["ops"][op]["directions"][-1], {}
    for case in (case for case in record["cases"] if case["op"] == op):
        rows = case_rows(record, case)
        default, rival = default_row(rows), best_alternative(rows, direction)
        if default and rival:
            ours, theirs = default["timings"][direction], median(rival, direction)
            times = [format_ms(ours), f"{format_number(theirs)} {rival['provider']}"]
            found.setdefault(case["dtype"], []).append((theirs / ours["median_ms"], case["case"], times))
    for given in found.values():
        ratio, case, times = next((each for each in given if EXAMPLE in each[1]), given[0])
        all_cases = f"{len(given)}: {spread([each for each, *_ in given])}" if len(given) > 1 else "-"
        yield [case, *times, format_times(ratio), all_cases]


def results(found: Records) -> Iterator[str]:
    """The tables of docs/results.md: each machine's newest record, a row for each dtype; of ops only for the first."""
    header = ["machine", "case", "fastattn, ms", "best alternative, ms", "ratio", "all cases", "record"]
    for heading, ops in RESULTS.items():
        body = []
        for name, record in newest(found, ops):
            for op in (op for op in ops if op in record["ops"]):
                for case, *figures in list(compared(record, op))[: 1 if heading == "Ops" else None]:
                    named = f"{op}: {case}" if len(ops) > 1 else case
                    body.append([place(record) + "\\*" * is_busy(record), named, *figures, f"`{name}`"])
        yield from ("", f"## {heading}", "", *table(header, body, texts=2))


def with_table(page: str, name: str, lines: Iterator[str]) -> str:
    """A page with these lines between its markers of this name. ValueError where it has none."""
    begin, end = f"<!-- table {name}: report.py --readme -->\n", f"<!-- /table {name} -->\n"
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"the page must hold the markers {begin.strip()} and {end.strip()}, once each, in this order")
    return page.partition(begin)[0] + begin + "\n".join(lines).strip() + "\n" + end + page.partition(end)[2]


def pages() -> dict[Path, str]:
    """The pages of the documentation with their tables, from the committed records."""
    found, texts = committed(result_files.ROOT / "benchmarks" / "results"), {}
    for page, name, lines in (
        ("README.md", "gpu_steps", steps(first(found, STEP, on_gpu=True), GPU_STEPS, README_ROWS)),
        ("README.md", "cpu_steps", steps(first(found, STEP, on_gpu=False), CPU_STEPS)),
        ("docs/accelerate.md", "calls", calls(first(found, CALLS[0], on_gpu=False))),
        ("docs/results.md", "all", results(found)),
    ):
        path = result_files.ROOT / page
        texts[path] = with_table(texts.get(path) or path.read_text(), name, lines)
    return texts
