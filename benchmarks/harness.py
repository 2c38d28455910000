"""What the benchmarks share: providers are checked, then timed; a record is kept as JSON and shown as a table.

A benchmark script fills in `Benchmark` and calls `main`. For each case it makes the inputs, and each provider turns
them into a `Run`. A provider that cannot serve a case says why; one whose result is far outside the bound of
`fastattn.doctor.judge` is not timed: "wrong result". Every other's share of that bound is in the record and the table.
Nothing that a provider does can stop the others.

Timing. GPU: CUDA events around each call, the L2 cache overwritten before it. CPU: `time.perf_counter`. Warm-up is
outside; median and quartiles are kept. forward: with inputs that require gradients, so what the backward needs is
saved; backward: `torch.autograd.grad` on a kept graph; both: one after the other. Inputs are normally distributed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fastattn
from fastattn._dispatch import BACKENDS
from fastattn.doctor import devices, judge, usable_device, versions

SEED = 20170612
# A result this many times past its bound is wrong, not just less accurate. The tests hold fastattn's kernels to 1;
# torch's own operators reach 2 (gradients of float32 attention) to 7 (float32 sums over thousands of rows).
WRONG = 10.0


class Refused(Exception):
    """A provider cannot serve a case; the message says why."""


class Inputs(NamedTuple):
    """leaves: float tensors with a gradient. fixed: what else a provider may need. dout: the gradient of the result."""

    leaves: dict[str, torch.Tensor]
    fixed: dict[str, Any]
    dout: torch.Tensor | None = None

    def to(self, dtype: torch.dtype) -> Inputs:
        leaves = {name: t.detach().to(dtype).requires_grad_() for name, t in self.leaves.items()}
        return self._replace(leaves=leaves, dout=None if self.dout is None else self.dout.to(dtype))


class Run(NamedTuple):
    """One provider on one case. results: what is checked, by name. timed: the calls to time, by direction."""

    results: Callable[[], dict[str, torch.Tensor]]
    timed: dict[str, Callable[[], Any]]


class Provider(NamedTuple):
    """make(case, inputs, dropout_p) -> Run, or raises Refused.

    ours: a backend of fastattn. It drops what the reference drops, and its failure fails the script; a peer is checked
    without dropout, and its failure is only recorded.
    """

    name: str
    make: Callable[[Any, Inputs, float], Run]
    ours: bool = True


@dataclass(frozen=True)
class Benchmark:
    """One script. Its first provider is the reference path: the specification, and the speed to divide by.

    cases: by table, "quick", "cpu" and "cuda". inputs: (case, device) -> Inputs. rates: units shown in the table.
    part: (case, name, tensor) -> the part that is compared of an input, the result "out" or a gradient, where all of it
    would be too much.
    """

    name: str
    cases: dict[str, Sequence[Any]]
    directions: tuple[str, ...]
    rates: tuple[str, ...]
    inputs: Callable[[Any, torch.device], Inputs]
    providers: Callable[[torch.device], list[Provider]]
    part: Callable[[Any, str, torch.Tensor], torch.Tensor] = lambda case, name, tensor: tensor


def run_of(function: Callable[..., torch.Tensor], inputs: Inputs) -> Run:
    """The Run of a plain function of the leaves: result and gradients are checked; forward, backward and both timed."""
    leaves = list(inputs.leaves.values())

    def forward() -> torch.Tensor:
        return function(**inputs.leaves)

    def both() -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        out = forward()
        return out, torch.autograd.grad(out, leaves, inputs.dout)

    def backward() -> tuple[torch.Tensor, ...]:
        if not kept:
            kept.append(forward())
        return torch.autograd.grad(kept[0], leaves, inputs.dout, retain_graph=True)

    def results() -> dict[str, torch.Tensor]:
        out, grads = both()
        return {"out": out} | {f"grad of {name}": grad for name, grad in zip(inputs.leaves, grads, strict=True)}

    kept: list[torch.Tensor] = []
    return Run(results, {"forward": forward, "backward": backward, "both": both})


def ours(
    function: Callable[..., torch.Tensor], arguments: Callable[[Any, Inputs, float], dict[str, Any]]
) -> list[Provider]:
    """A provider for each backend of a public op. arguments(case, inputs, dropout_p): those beside the leaves."""

    def provider(backend: str) -> Provider:
        def make(case: Any, inputs: Inputs, dropout_p: float) -> Run:
            explanation = fastattn.explain(function, **(call := inputs.leaves | arguments(case, inputs, dropout_p)))
            if reason := explanation.refusals[backend] or explanation.notes.get(backend):
                raise Refused(reason)  # a note: a kernel can check on a CPU, but its speed there means nothing
            options = {name: value for name, value in call.items() if name not in inputs.leaves}
            return run_of(lambda **leaves: function(**leaves, **options, backend=backend), inputs)

        return Provider(backend, make)

    return [provider(backend) for backend in BACKENDS]


class Checker:
    """Compares providers with the reference formula in float64, on one case."""

    def __init__(self, benchmark: Benchmark, case: Any, inputs: Inputs, reference: Provider) -> None:
        self.benchmark, self.case, self.inputs, self.reference = benchmark, case, inputs, reference
        self.known: dict[float, tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = {}

    def ratio(self, provider: Provider) -> float:
        """Largest error of a provider's results, as a share of its bound; over 1 is wrong. Refused where it refuses."""
        dropout_p = self.case.dropout_p if provider.ours else 0.0
        run = provider.make(self.case, self.inputs, dropout_p)
        if dropout_p not in self.known:
            inputs = self._inputs()
            self.known[dropout_p] = tuple(
                _seeded(self.reference.make(self.case, given, dropout_p))
                for given in (inputs.to(torch.float64), inputs)
            )
        truth, low = self.known[dropout_p]
        actual = {name: self._part(name.removeprefix("grad of "), value) for name, value in _seeded(run).items()}
        return max(judge(actual[name], truth[name], low[name]).ratio for name in truth)

    def _inputs(self) -> Inputs:
        """The inputs of the part that is compared."""
        leaves = {name: self._part(name, value).detach().requires_grad_() for name, value in self.inputs.leaves.items()}
        fixed = {name: self._part(name, value) for name, value in self.inputs.fixed.items()}
        return Inputs(leaves, fixed, self._part("out", self.inputs.dout))

    def _part(self, name: str, value: Any) -> Any:
        return self.benchmark.part(self.case, name, value) if isinstance(value, torch.Tensor) else value


def _seeded(run: Run) -> dict[str, torch.Tensor]:
    torch.manual_seed(SEED)  # so that all who share the dropout rule drop the same
    return run.results()


class Timing(NamedTuple):
    """Quartiles in milliseconds, of `samples` calls, and the fastest: on a busy machine the steadiest figure."""

    min_ms: float
    q1_ms: float
    median_ms: float
    q3_ms: float
    samples: int


def measure(call: Callable[[], Any], device: torch.device, budget_s: float) -> Timing:
    """Time a call: three warm-up calls, then at least 5 and at most 200 samples in about budget_s seconds."""
    sample = _sample_on_gpu if device.type == "cuda" else _sample_on_cpu
    first = sample(call, device, 3)[-1]
    samples = sample(call, device, max(5, min(200, int(budget_s * 1e3 / max(first, 1e-3)))))
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(min(samples), q1, median, q3, len(samples))


def _sample_on_cpu(call: Callable[[], Any], device: torch.device, count: int) -> list[float]:
    samples = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        samples.append((time.perf_counter() - start) * 1e3)
    return samples


def _sample_on_gpu(call: Callable[[], Any], device: torch.device, count: int) -> list[float]:
    cache = torch.empty(2 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.int8, device=device)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for start, end in events:
        cache.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in events]


def _peak_mib(call: Callable[[], Any], device: torch.device) -> float | None:
    """Memory that a call needs beyond what was allocated before it; None on a CPU."""
    if device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def measure_provider(
    benchmark: Benchmark,
    case: Any,
    provider: Provider,
    inputs: Inputs,
    checker: Checker,
    device: torch.device,
    budget_s: float,
) -> dict[str, Any]:
    """The row of one provider on one case: {"status": "ok", "timings": ...} or {"status": why not, "reason": ...}."""
    try:
        ratio = checker.ratio(provider)
        if not ratio <= WRONG:
            return {"status": "wrong result", "reason": f"error is {ratio:.3g} x its bound"}
        run = provider.make(case, inputs, case.dropout_p)
        timings = {}
        for direction in benchmark.directions:
            timing = measure(run.timed[direction], device, budget_s)
            work = case.work(direction)
            rates = {f"{unit}_per_s": amount / timing.median_ms * 1e3 for unit, amount in work.items()}
            timings[direction] = timing._asdict() | work | rates
        return {
            "status": "ok",
            "error_over_bound": ratio,
            "timings": timings,
            "peak_mib": _peak_mib(run.timed[benchmark.directions[-1]], device),
        }
    except Refused as refused:
        return {"status": "refused", "reason": str(refused)}
    except torch.OutOfMemoryError:
        return {"status": "out of memory", "reason": "on this device"}
    except Exception as error:  # a peer or a backend that breaks is a finding; the others are still measured
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}".splitlines()[0]}


def measure_all(
    benchmark: Benchmark,
    device: torch.device,
    quick: bool,
    keep: Callable[[dict[str, Any]], None] = lambda record: None,
) -> dict[str, Any]:
    """The record: environment, and one row per case and provider. keep: is given the record after each case."""
    providers = benchmark.providers(device)
    cases = benchmark.cases["quick" if quick else device.type]
    rows: list[dict[str, Any]] = []
    record = {
        "benchmark": benchmark.name,
        "formula": cases[0].formula,
        "baseline": providers[0].name,
        "complete": False,
    }
    record |= {"environment": environment(device), "rows": rows}
    for case in cases:
        inputs = benchmark.inputs(case, device)
        checker = Checker(benchmark, case, inputs, providers[0])
        for provider in providers:
            row = {"case": str(case), "provider": provider.name, "ours": provider.ours}
            row |= measure_provider(benchmark, case, provider, inputs, checker, device, 0.02 if quick else 0.3)
            rows.append(row)
            if device.type == "cuda":
                torch.cuda.empty_cache()  # so that one provider's leftovers are not another's lack of memory
        record["complete"] = case is cases[-1]
        keep(record)
    return record


def environment(device: torch.device) -> dict[str, Any]:
    """Everything that a figure may depend on."""

    def output_of(*command: str) -> str | None:
        try:
            return subprocess.run(
                command, capture_output=True, text=True, cwd=Path(__file__).parent, check=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None  # no git, or not a checkout; no driver

    changed = output_of("git", "status", "--porcelain", "--untracked-files=no")
    clocks = output_of("nvidia-smi", "--query-gpu=clocks.sm,clocks.max.sm,power.limit", "--format=csv,noheader")
    index = device.index if device.index is not None else 0
    return {
        "device": devices()[index + 1 if device.type == "cuda" else 0],
        "clocks": clocks if device.type == "cuda" else None,
        "versions": versions(),
        "commit": output_of("git", "rev-parse", "HEAD"),
        "uncommitted_changes": None if changed is None else bool(changed),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "threads": torch.get_num_threads(),
    }


def _rate(per_s: float, unit: str) -> str:
    """12.3 TFLOP/s, 4.56 GB/s, 78900 tokens/s."""
    if unit == "token":
        return f"{per_s:.0f} tokens/s"
    scale, prefix = (1e12, "T") if unit == "flop" and per_s >= 1e12 else (1e9, "G")
    return f"{per_s / scale:.3g} {prefix}{'FLOP' if unit == 'flop' else 'B'}/s"


def table(record: dict[str, Any], rates: Sequence[str]) -> str:
    """The record for people: median [quartiles], rates, speed-up over the reference path, error / bound."""
    environment = record["environment"]
    device = ", ".join(f"{key} {value}" for key, value in environment["device"].items())
    lines = [f"{record['benchmark']} on {device}, torch {environment['versions']['torch']}", record["formula"]]
    baselines = {row["case"]: row for row in record["rows"] if row["provider"] == record["baseline"]}
    case = None
    for row in record["rows"]:
        if row["case"] != case:
            case = row["case"]
            lines += ["", case]
        if row["status"] != "ok":
            lines.append(f"  {row['provider']:<16}{row['status']}: {row['reason']}")
            continue
        for direction, timing in row["timings"].items():
            baseline = baselines[case].get("timings", {}).get(direction, {}).get("median_ms", math.nan)
            spread = f"{timing['median_ms']:>10.3f} ms [{timing['q1_ms']:.3f}, {timing['q3_ms']:.3f}]"
            speeds = "".join(f"{_rate(timing[f'{unit}_per_s'], unit):>16}" for unit in rates)
            speed_up = f"{baseline / timing['median_ms']:>8.2f}x"
            memory = "" if row["peak_mib"] is None else f"{row['peak_mib']:>10.1f} MiB"
            error = f"  error {row['error_over_bound']:.2f}"
            lines.append(f"  {row['provider']:<16}{direction:<9}{spread:<36}{speeds}{speed_up}{error}{memory}")
    return "\n".join(lines)


def main(benchmark: Benchmark, argv: Sequence[str] | None = None) -> int:
    """A script's command line. Returns 1 when a backend of fastattn gave a wrong result or failed, else 0."""
    parser = argparse.ArgumentParser(description=f"Time {benchmark.name} and compare with the reference path.")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=usable_device, default=default, help=f"cpu or cuda (here: {default})")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="also write the record here")
    parser.add_argument("--quick", action="store_true", help="tiny cases, to see that everything runs")
    arguments = parser.parse_args(argv)

    def keep(record: dict[str, Any]) -> None:
        if arguments.out:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")

    record = measure_all(benchmark, arguments.device, arguments.quick, keep)
    print(table(record, benchmark.rates))
    return int(any(row["ours"] and row["status"] in ("wrong result", "failed") for row in record["rows"]))
