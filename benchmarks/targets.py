"""What fastattn is to reach on an H100 or H200, and what a record says of it.

Attention's kernels are judged by the faster of its own backends, Triton and CUDA, whichever is the default; models by
what they do unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from typing import NamedTuple

from cases import AttentionCase, Case, DecodingCase, FeedForwardCase, NormCase, StepCase
from result_files import Record, Row, median, named, rows_of
from tables import BASE, BF16, attention

OWN = ("triton", "cuda")
Measure = Callable[[Record, Row, Sequence[Row]], "float | None"]  # of a record, a case and its rows


class Target(NamedTuple):
    """gate: the least that will do; goal: what is wanted. measure gives a figure in `unit`."""

    what: str
    op: str
    case: Case
    measure: Measure
    unit: str
    gate: float
    goal: float | None = None


def _ours(rows: Sequence[Row], direction: str) -> float | None:
    """Milliseconds of the faster of fastattn's own backends; of a model, of its default."""
    if model := named(rows, "default"):
        return median(model, direction)
    own = [median(row, direction) for row in rows if row["provider"] in OWN]
    return min((ms for ms in own if ms), default=None)


def tflops(direction: str) -> Measure:
    def measure(record: Record, case: Row, rows: Sequence[Row]) -> float | None:
        ms = _ours(rows, direction)
        return case["work"][direction]["flop"] / ms / 1e9 if ms else None

    return measure


def of_copy_rate(direction: str) -> Measure:
    """The share of the rate at which this machine copies memory, in percent."""

    def measure(record: Record, case: Row, rows: Sequence[Row]) -> float | None:
        ms = _ours(rows, direction)
        if not ms or record["ceilings"] is None:
            return None
        return 1e5 * case["work"][direction]["byte"] / ms / record["ceilings"]["byte_per_s"]

    return measure


def gain(direction: str, rival: str) -> Measure:
    """Over the fastest provider of this name, a pattern as a shell has them."""

    def measure(record: Record, case: Row, rows: Sequence[Row]) -> float | None:
        others = [median(row, direction) for row in rows if fnmatch(row["provider"], rival)]
        ms, fastest = _ours(rows, direction), min((other for other in others if other), default=None)
        return fastest / ms if ms and fastest else None

    return measure


def of_host_time(record: Record, case: Row, rows: Sequence[Row]) -> float | None:
    """The host's time for torch's own call, as a multiple of that for the faster of our backends."""
    found = {row["provider"]: row["timings"]["forward"]["host_us"] for row in rows if row["status"] == "ok"}
    own = min((us for name, us in found.items() if name in OWN), default=None)
    return found["sdpa"] / own if own and "sdpa" in found else None


def _kernels() -> Iterator[Target]:
    for direction, dim, mask, least in (
        ("forward", 128, "full", 620.0),
        ("forward", 128, "causal", 560.0),
        ("forward", 64, "full", 460.0),
        ("backward", 128, "full", 480.0),
        ("backward", 64, "full", 400.0),
    ):
        case, what = attention(8192, dim, mask), f"attention {direction}, D {dim}, 8192 tokens, {mask}"
        yield Target(what, "attention", case, tflops(direction), "TFLOP/s", least)
        yield Target(f"{what}: over cuDNN's", "attention", case, gain(direction, "sdpa cudnn"), "x", 0.0, 1.0)


_BLOCKS = attention(2048, 64, "blocks", masked=0.5)
_SHORT = AttentionCase(128, 8, 64, 64, 64, "padding", BF16)
_NORM = NormCase(65536, 1024, BF16, 0.1)
_STEP = StepCase(256, 32, *BASE, BF16)
_ADD_NORM = "dropout + residual + LayerNorm"
_HALF, _STEPS = "bool mask, half of it masked, forward and backward", "training step, 6+6 layers, d 512, 8k tokens"
TARGETS = (
    *_kernels(),
    Target(f"{_HALF}: over torch's SDPA", "attention", _BLOCKS, gain("both", "sdpa*"), "x", 2.0),
    Target(f"{_HALF}: over FlexAttention", "attention", _BLOCKS, gain("both", "flex + mask building"), "x", 3.0),
    Target("64 tokens, forward and backward: over torch's SDPA", "attention", _SHORT, gain("both", "sdpa*"), "x", 1.5),
    Target("host time of torch's call over ours", "attention", _SHORT, of_host_time, "x", 1 / 1.5, 1.0),
    Target(f"{_ADD_NORM}, forward", "add_layer_norm", _NORM, of_copy_rate("forward"), "%", 85.0, 90.0),
    Target(f"{_ADD_NORM}, backward", "add_layer_norm", _NORM, of_copy_rate("backward"), "%", 75.0, 85.0),
    Target(
        f"{_ADD_NORM}, backward: over Liger-Kernel's",
        "add_layer_norm",
        _NORM,
        gain("backward", "Liger-Kernel"),
        "x",
        0.0,
        2.0,
    ),
    Target(
        "feed-forward, training: over PyTorch in eager",
        "feed_forward",
        FeedForwardCase(8192, 512, 2048, "relu", BF16, 0.1),
        gain("both", "torch"),
        "x",
        1.2,
        1.5,
    ),
    Target(f"{_STEPS}: over the reference path", "transformer", _STEP, gain("step", "reference"), "x", 3.0, 4.0),
    Target(f"{_STEPS}: over torch.compile", "transformer", _STEP, gain("step", "torch.compile*"), "x", 1.5, 2.0),
    Target(
        "beam search with 5 beams, a sentence: over plain PyTorch",
        "decoding",
        DecodingCase(1, 32, *BASE, BF16, new_tokens=64, beam=5),
        gain("decode", "plain PyTorch"),
        "x",
        10.0,
        20.0,
    ),
)


def measured(record: Record) -> Iterator[tuple[Target, float | None]]:
    for target in TARGETS:
        case = next((c for c in record["cases"] if (c["op"], c["case"]) == (target.op, str(target.case))), None)
        rows = rows_of(record, case) if case else []
        yield target, target.measure(record, case, rows) if rows else None


def verdict(target: Target, figure: float | None) -> str:
    if figure is None:
        return "not measured"
    if target.goal is not None and figure >= target.goal:
        return "goal reached"
    return ("met" if target.gate else "goal missed") if figure >= target.gate else "**missed**"


def table(record: Record) -> Iterator[str]:
    """As Markdown."""
    yield from ("| target | measured | gate | goal | |", "|---|---:|---:|---:|---|")
    for target, figure in measured(record):
        cells = (f"{n:.3g} {target.unit}" if n else "-" for n in (figure, target.gate, target.goal))
        yield f"| {target.what} | {' | '.join(cells)} | {verdict(target, figure)} |"
