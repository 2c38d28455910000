"""`python -m fastattn tune`: measure which way of computing is fastest on this machine, and keep it in a record.

Each op is timed on a small table of calls, forward and backward, by every backend that can run them, except the
reference path. On a GPU the time of the GPU alone counts, as in models that keep it busy. On a CPU only the backend
`aten` is left, and each of its ways is timed. A backend counts only where the doctor finds it right. Their order, the
fastest first, is written to a record in the user's cache folder, which the choice of a backend reads from then on
(fastattn/backends/timings.py). A way that is not faster than the built-in choice by 3 % does not replace it. Calls that
a run does not reach keep what an earlier run found. `fastattn.explain(...)` names the record.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastattn
from fastattn import backends
from fastattn.backends import cpu_matmul, timings
from fastattn.backends.aten import attention as aten_attention
from fastattn.check.cases import problems
from fastattn.check.doctor import check, positive_number, usable_device, writable_file

GAIN = 1.03  # how many times as fast as the built-in choice a way must be
# The same for aten and the kernels on a GPU: a layer whose ops are all computed by kernels is one node of autograd,
# which saves time of the host.
ATEN_GAIN = 1.1
SECONDS = {"cpu": 0.4, "cuda": 0.15}  # of samples for each way of a call
MIN_SAMPLES, MAX_SAMPLES = 5, 50
ATEN = "attention by aten"  # the ways of aten in a record; the other is "product"

Step = Callable[[], Any]
Ways = dict[str, Callable[[], AbstractContextManager]]  # name -> makes a context in which this way is used


class TimedCall(NamedTuple):
    """A call to measure. op_name, call_class: as in a record.

    built_in: the way that is used without a record.
    """

    op_name: str
    call_class: str
    what: str
    dtype: torch.dtype
    step: Step
    ways: Ways
    built_in: str


def calls(device: torch.device, tiny: bool = False) -> Iterator[TimedCall]:
    """The table, the most valuable calls first. Tensors are made when a call's turn comes."""
    on_gpu = device.type == "cuda"
    tokens = 16 if tiny else 16384 if on_gpu else 1024
    lengths = (16,) if tiny else (64, 128, 1024, 4096) if on_gpu else (64, 256, 1024, 2048)
    if device.type == "cpu":
        yield from _products_of(device, 64 if tiny else 512)
    for dtype in (torch.bfloat16, torch.float32):  # a record's bfloat16 holds for float16
        for length in lengths:
            for trait in ("", "mask", "dropout", "mask, dropout") if on_gpu else ("", "causal", "mask", "dropout"):
                given = _attention(device, dtype, max(tokens // length, 1), 1 if tiny else 8, length, trait)
                if trait != "causal":  # backends have no class for it
                    yield from _by_backends("attention", given, dtype, f"{length} tokens {trait}".strip())
                if device.type == "cpu":
                    yield from _ways_of_aten(given, dtype, f"{length} tokens {trait}".strip())
        width, wide = (32, 64) if tiny else (512, 2048)

        def randn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)

        for dropout_p in (0.0, 0.1):
            options, said = {"dropout_p": dropout_p}, ", dropout" if dropout_p else ""
            for columns in (width,) if tiny else (width, 8 * width):
                norm = {"x": randn(tokens, columns), "residual": randn(tokens, columns)} | options
                norm |= {"weight": randn(columns), "bias": randn(columns)}
                yield from _by_backends("add_layer_norm", norm, dtype, f"{tokens} x {columns}{said}")
            for rows, activation in itertools.product((tokens // 16, tokens), ("relu", "gelu", "swiglu")):
                hidden = 2 * wide if activation == "swiglu" else wide
                given = {"x": randn(rows, width), "weight1": randn(hidden, width), "bias1": randn(hidden)}
                given |= {"weight2": randn(width, wide), "bias2": randn(width)}
                given = given | options | {"activation": activation}
                yield from _by_backends("feed_forward", given, dtype, f"{rows} x {width}, {activation}{said}")
        classes = 200 if tiny else 32000 if on_gpu else 8000
        target = torch.randint(0, classes, (tokens,), device=device)
        given = {"x": randn(tokens, width), "weight": randn(classes, width), "target": target}
        yield from _by_backends("linear_cross_entropy", given, dtype, f"{tokens} x {width} -> {classes}")
        sentences, heads = (2, 1) if tiny else (32, 8)
        keys = (sentences, 64, 5, heads, 64)
        sizes = {"query": (sentences, 5, heads, 64), "key": keys, "value": keys}
        given = {name: randn(*size).detach() for name, size in sizes.items()}
        yield from _by_backends("decode_attention", given, dtype, "32 x 5 beams, 64 tokens")


def _attention(
    device: torch.device, dtype: torch.dtype, batch: int, heads: int, length: int, trait: str
) -> dict[str, Any]:
    def randn() -> Tensor:  # as projections give them
        t = torch.randn(batch, length, heads, 64, device=device, dtype=dtype).transpose(1, 2)
        return t.requires_grad_()

    given: dict[str, Any] = {"query": randn(), "key": randn(), "value": randn()}
    if "mask" in trait:
        real = torch.arange(length, device=device) < torch.linspace(length // 2, length, batch, device=device)[:, None]
        given["attn_mask"] = fastattn.AttentionMask(key_padding=real)
    if trait == "causal":
        given["attn_mask"] = fastattn.AttentionMask(is_causal=True)
    if "dropout" in trait:
        given["dropout_p"] = 0.1
    return given


def _step(function: Callable[..., Tensor], given: dict[str, Any]) -> Step:
    """Forward and backward of a call, where something has a gradient."""
    leaves = [t for t in given.values() if isinstance(t, Tensor) and t.requires_grad]
    dout: list[Tensor] = []

    def step() -> None:
        out = function(**given)
        if leaves:
            dout[:] = dout or [torch.randn_like(out)]
            torch.autograd.grad(out, leaves, dout)

    return step


def _by_backends(op_name: str, given: dict[str, Any], dtype: torch.dtype, what: str) -> Iterator[TimedCall]:
    op = backends.OPS[op_name]
    with timings.override_choices({}):
        explanation = fastattn.explain(op.function, **given)
    usable = [b for b, reason in explanation.refusals.items() if reason is None and b not in explanation.notes]
    ways: Ways = {name: partial(fastattn.use_backend, name) for name in usable if name != "reference"}
    if len(ways) < 2:
        return
    of_call = op.call_class(*op.validate(**given)[1])
    yield TimedCall(op_name, of_call, what, dtype, _step(op.function, given), ways, explanation.chosen)


def _ways_of_aten(given: dict[str, Any], dtype: torch.dtype, what: str) -> Iterator[TimedCall]:
    names = (aten_attention.BLOCKED, aten_attention.TORCH)
    for gradient in (True, False):
        tensors = given if gradient else {n: t.detach() if isinstance(t, Tensor) else t for n, t in given.items()}
        arguments = given["query"], given["key"], given.get("attn_mask"), given.get("dropout_p", 0.0)
        with torch.set_grad_enabled(gradient), timings.override_choices({}):
            of_call, built_in = aten_attention.algorithm_key(*arguments), aten_attention.algorithm(*arguments)
        step = torch.set_grad_enabled(gradient)(_step(fastattn.scaled_dot_product_attention, tensors))
        ways: Ways = {way: partial(timings.override_choices, {ATEN: {of_call: way}}) for way in names}
        yield TimedCall(ATEN, of_call, what if gradient else f"{what}, forward", dtype, step, ways, built_in)


def _products_of(device: torch.device, size: int) -> Iterator[TimedCall]:
    if not cpu_matmul.has_onednn():
        return
    given = {"x": torch.randn(size, size, device=device, requires_grad=True)}
    given["weight"] = torch.randn(4 * size, size, device=device, requires_grad=True)
    with timings.override_choices({}):
        built_in = cpu_matmul.choice()
    names = ("oneDNN", "PyTorch")
    ways: Ways = {way: partial(timings.override_choices, {"product": {"float32": way}}) for way in names}
    what = f"{size} x {size} -> {4 * size}"
    yield TimedCall("product", "float32", what, torch.float32, _step(cpu_matmul.linear, given), ways, built_in)


class WayFailed(Exception):
    """A way of a call raised what is the cause of this."""

    def __init__(self, way: str) -> None:
        self.way = way


def measure(call: TimedCall, device: torch.device) -> dict[str, float]:
    """Median milliseconds of each way, by samples that alternate. WayFailed where one cannot run."""
    samples: dict[str, list[float]] = {way: [] for way in call.ways}
    start = time.monotonic()
    for number in range(-2, MAX_SAMPLES):  # the first are not counted
        if number >= MIN_SAMPLES and time.monotonic() - start > SECONDS[device.type] * len(samples):
            break
        for way, times in samples.items():
            try:
                with call.ways[way]():
                    if number < 0:
                        call.step()
                    else:
                        times.append(_milliseconds(call.step, device))
            except Exception as error:
                raise WayFailed(way) from error
    return {way: statistics.median(times) for way, times in samples.items()}


def _milliseconds(step: Step, device: torch.device) -> float:
    """On a GPU the mean of a few steps that it finds queued, so that it never waits for the host."""
    if device.type == "cuda":
        start = time.perf_counter()
        host = host_seconds(step, device)
        torch.cuda.synchronize(device)
        steps = max(1, min(10, int(1e-3 / (time.perf_counter() - start))))  # in about a millisecond
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        keep_busy(device, 2 * steps * host)
        begin.record()
        for _ in range(steps):
            step()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / steps
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3


def host_seconds(step: Step, device: torch.device) -> float:
    """How long the host of an idle GPU needs for a step. The GPU's time counts only if the step waits for it."""
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def keep_busy(device: torch.device, seconds: float) -> None:
    """Gives the GPU work for at least this long; what is queued meanwhile runs afterwards without gaps."""
    torch.cuda._sleep(int(seconds * _cycles_per_second(device)))


@functools.cache
def _cycles_per_second(device: torch.device) -> float:
    """Of the counter that torch.cuda._sleep reads; the fastest of a few, as clocks rise with work."""
    found, cycles = [], 2_000_000
    for _ in range(4):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        found.append(cycles / begin.elapsed_time(end) * 1e3)
    return max(found)


class _DoctorVerdicts:
    """Which backends the doctor finds right, each op and dtype looked at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.known: dict[tuple[str, torch.dtype, str], bool] = {}

    def __call__(self, op_name: str, dtype: torch.dtype, backend: str) -> bool:
        key = op_name, dtype, backend
        if key not in self.known:
            of_op = [problem for problem in problems(self.device, large=False) if problem.op == op_name]
            self.known[key] = all(found["ok"] for problem in of_op for found in check(problem, dtype, [backend]))
        return self.known[key]


def tune(
    device: torch.device, minutes: float, say: Callable[[str], None], table: Callable[..., Iterator[TimedCall]] = calls
) -> dict[str, Any]:
    """The record of a device, of all calls that there is time for."""
    deadline, is_right = time.monotonic() + 60 * minutes, _DoctorVerdicts(device)
    rows: list[dict[str, Any]] = []
    try:
        for call in table(device):
            if time.monotonic() > deadline:
                say(f"stopped after {minutes:g} minutes: what follows stays as it was")
                break
            rows.append(_row(call, device, is_right, say))
    except KeyboardInterrupt:
        say("stopped by Ctrl-C: what follows stays as it was")
    except RuntimeError as error:  # of a GPU that no longer works, or has no memory for the next tensors
        say(f"stopped by {_first_line(error)}: what follows stays as it was")
    choices: timings.Choices = {}
    for row in rows:
        if row["order"]:
            found = row["order"] if row["op"] in backends.OPS else row["order"][0]
            choices.setdefault(row["op"], {}).setdefault(row["class"], found)
    return {
        "format": timings.FORMAT,
        "device": timings.device_name(device.type),
        "capability": timings.compute_capability(device.type),
        "threads": torch.get_num_threads(),
        "versions": timings.versions(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "measured": f"milliseconds of {'the GPU, without waits for the host' if device.type == 'cuda' else 'a call'}",
        "choices": choices,
        "rows": rows,
    }


def _row(
    call: TimedCall, device: torch.device, is_right: _DoctorVerdicts, say: Callable[[str], None]
) -> dict[str, Any]:
    """What was found about a call. order: of the ways that are right and work, the preferred one first."""
    wrong = [w for w in call.ways if w in backends.BACKENDS and not is_right(call.op_name, call.dtype, w)]
    failed: dict[str, str] = {}
    for way in wrong:
        del call.ways[way]
    found: dict[str, float] = {}
    while call.ways and not found:
        try:
            found = measure(call, device)
        except WayFailed as failure:  # the others are measured without it
            del call.ways[failure.way]
            failed[failure.way] = _first_line(failure.__cause__)

    def handicapped(way: str) -> float:
        ms = found[way] / (GAIN if way == call.built_in else 1.0)
        return ms * ATEN_GAIN if way == "aten" and device.type == "cuda" else ms

    order = sorted(found, key=handicapped)
    best = order[0] if order else None
    times = ", ".join(f"{'*' if way == best else ''}{way} {ms:.3g} ms" for way, ms in found.items())
    said = f"; wrong by the doctor: {', '.join(wrong)}" if wrong else ""
    said += "".join(f"; {way} failed: {reason}" for way, reason in failed.items())
    change = "" if best in (None, call.built_in) else f"  (instead of {call.built_in})"
    say(f"{call.op_name:<21} {str(call.dtype).removeprefix('torch.'):<9} {call.what}: {times}{said}{change}")
    row = {"op": call.op_name, "class": call.call_class, "call": call.what, "ms": found, "order": order}
    return row | {"wrong": wrong, "failed": failed}


def _first_line(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _with_earlier(record: dict[str, Any], path: Path) -> dict[str, Any]:
    """The record, and what it did not reach from an earlier one there, if that is of the same machine and versions."""
    try:
        earlier = json.loads(path.read_text())
        if any(earlier[key] != record[key] for key in ("format", "device", "threads", "versions")):
            return record
        choices = {op: dict(earlier["choices"].get(op, {})) for op in (earlier["choices"] | record["choices"])}
        for op, of_op in record["choices"].items():
            choices[op] |= of_op
        reached = {(row["op"], row["class"], row["call"]) for row in record["rows"]}
        rows = [row for row in earlier["rows"] if (row["op"], row["class"], row["call"]) not in reached]
    except Exception:  # there is none, or it is damaged in some way
        return record
    return record | {"choices": choices, "rows": [*record["rows"], *rows]}


def _write(record: dict[str, Any], path: Path) -> None:
    """Whole or not at all. A link stays a link."""
    path = path.resolve()
    scratch = path.with_name(path.name + ".new")
    try:
        scratch.write_text(json.dumps(record, indent=1) + "\n")
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns 1 when a backend was found wrong or failed, or nothing was measured."""
    description = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="python -m fastattn tune", description=description, allow_abbrev=False)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    minutes = "stop after this long at the latest (default 5)"
    parser.add_argument("--minutes", type=positive_number, default=5.0, metavar="N", help=minutes)
    parser.add_argument("--device", type=usable_device, default=default, help=f"cpu or cuda (here: {default})")
    parser.add_argument(
        "--out", type=writable_file, metavar="FILE", help="write the record here instead of the cache folder"
    )
    arguments = parser.parse_args(argv)
    device = arguments.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        if (name := backends.requested(None)[0]) is not None:
            parser.error(f"with FASTATTN_BACKEND={name} there is nothing to choose: unset it")
        path = arguments.out or writable_file(timings.user_path(timings.device_name(device.type)))
    except (ValueError, RuntimeError, argparse.ArgumentTypeError) as error:  # FASTATTN_BACKEND; no home; the folder
        parser.error(str(error))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        record = tune(device, arguments.minutes, lambda line: print(line, flush=True))
    if not record["choices"]:
        print(f"nothing was measured: {path} stays as it was")
        return 1
    try:
        _write(_with_earlier(record, path), path)
    except OSError as error:
        parser.error(f"{path} cannot be written: {error.strerror}")
    timings.reload_records()
    print(f"\n* is chosen from now on. The record: {path}")
    if arguments.out:
        with suppress(RuntimeError):  # no home folder
            print(f"It counts when it is at {timings.user_path(record['device'])} or in {timings.SHIPPED}")
    return int(any(row["wrong"] or row["failed"] for row in record["rows"]))


if __name__ == "__main__":
    sys.exit(main())
