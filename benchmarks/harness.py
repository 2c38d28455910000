"""What the benchmarks share: providers are checked, then timed. timing.py measures, records.py keeps what came of it.

A benchmark script fills in `Benchmark` and calls `main`. For each case it makes the inputs, and each provider turns
them into a `Run`. A provider that cannot serve a case says why; one whose result is far outside the bound of
`fastattn.doctor.judge` is not timed: "wrong result". Every other's share of that bound is in the record and the tables.
Nothing that a provider does can stop the others.

Directions. forward: with inputs that require gradients, so what the backward needs is saved; backward:
`torch.autograd.grad` on a kept graph; both: one after the other. Inputs are normally distributed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import records
import timing  # before torch: it sets what torch reads when imported
import torch

import fastattn
from fastattn._dispatch import BACKENDS
from fastattn.doctor import judge, usable_device

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
    """One provider on one case. results: what is checked, by name. timed: the calls to time, by direction. notes: what
    else belongs in the row: "default", this is fastattn's own choice here; "ran", what served the call."""

    results: Callable[[], dict[str, torch.Tensor]]
    timed: dict[str, Callable[[], Any]]
    notes: dict[str, Any] = {}


class Provider(NamedTuple):
    """make(case, inputs, dropout_p) -> Run, or raises Refused.

    ours: a backend of fastattn; its failure fails the script, that of a peer is only recorded. later: it takes long to
    get ready, as torch.compile does; the report measures it this many cases after the others, and quick runs leave it
    out. same_dropout: one of ours that drops what the reference drops; all others are checked without dropout.
    """

    name: str
    make: Callable[[Any, Inputs, float], Run]
    ours: bool = True
    later: int = 0
    same_dropout: bool = True

    def checked_dropout(self, case: Any) -> float:
        return case.dropout_p if self.ours and self.same_dropout else 0.0


@dataclass(frozen=True)
class Benchmark:
    """One script. Its first provider is the reference path: the specification, and the speed to divide by.

    cases: by table, "quick", "cpu" and "cuda". directions: what is timed; none where only the peak memory of a Run's
    last call is of interest. inputs: (case, device) -> Inputs. rates: units shown in the tables.
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


def run_of(function: Callable[..., torch.Tensor], inputs: Inputs, **notes: Any) -> Run:
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
    return Run(results, {"forward": forward, "backward": backward, "both": both}, notes)


def ours(
    function: Callable[..., torch.Tensor],
    arguments: Callable[[Any, Inputs, float], dict[str, Any]],
    finish: Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor] = lambda out, leaves: out,
) -> list[Provider]:
    """A provider for each backend of a public op. arguments(case, inputs, dropout_p): those beside the leaves.

    finish(out, leaves): what becomes of its result.
    """

    def provider(backend: str) -> Provider:
        def make(case: Any, inputs: Inputs, dropout_p: float) -> Run:
            explanation = fastattn.explain(function, **(call := inputs.leaves | arguments(case, inputs, dropout_p)))
            if reason := explanation.refusals[backend] or explanation.notes.get(backend):
                raise Refused(reason)  # a note: a kernel can check on a CPU, but its speed there means nothing
            options = {name: value for name, value in call.items() if name not in inputs.leaves}
            default = {"default": True} if backend == explanation.chosen else {}
            return run_of(
                lambda **leaves: finish(function(**leaves, **options, backend=backend), leaves), inputs, **default
            )

        return Provider(backend, make)

    return [provider(backend) for backend in BACKENDS]


Function = Callable[[Any, Inputs, float], Callable[..., torch.Tensor]]


def peer(name: str, function: Function, compiled: bool = False) -> Provider:
    """A provider of something else than fastattn. function(case, inputs, dropout_p): a plain function of the leaves.

    compiled: by torch.compile, for these shapes alone; what it compiled before is forgotten, so that it never falls
    back to eager for having compiled too often. Its backward may not reuse the saved tensors' memory: the timed one is
    repeated on one graph.
    """

    def make(case: Any, inputs: Inputs, dropout_p: float) -> Run:
        call = function(case, inputs, dropout_p)
        if compiled:
            torch._dynamo.reset()
            torch._functorch.config.donated_buffer = False
            call = torch.compile(call, dynamic=False)
        return run_of(call, inputs)

    return Provider(name, make, ours=False, later=12 * compiled)


def imported(module: str) -> Any:
    """A peer's module; Refused where it is not installed, or is too broken to import."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Refused(f"cannot be imported: {error}") from error


class Checker:
    """Compares providers with the reference formula in float64, on one case."""

    def __init__(self, benchmark: Benchmark, case: Any, inputs: Inputs, reference: Provider) -> None:
        self.benchmark, self.case, self.inputs, self.reference = benchmark, case, inputs, reference
        self.known: dict[float, tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = {}

    def ratio(self, provider: Provider) -> float:
        """Largest error of a provider's results, as a share of its bound; over 1 is wrong. Refused where it refuses."""
        return self.checked(provider)[0]

    def checked(self, provider: Provider) -> tuple[float, Run]:
        """The ratio, and the Run that was checked."""
        dropout_p = provider.checked_dropout(self.case)
        run = provider.make(self.case, self.inputs, dropout_p)
        if dropout_p not in self.known:
            inputs = self._inputs()
            self.known[dropout_p] = tuple(
                _seeded(self.reference.make(self.case, given, dropout_p))
                for given in (inputs.to(torch.float64), inputs)
            )
        truth, low = self.known[dropout_p]
        actual = {name: self._part(name.removeprefix("grad of "), value) for name, value in _seeded(run).items()}
        return max(judge(actual[name], truth[name], low[name]).ratio for name in truth), run

    def _inputs(self) -> Inputs:
        """The inputs of the part that is compared."""
        leaves = {name: self._part(name, value).detach().requires_grad_() for name, value in self.inputs.leaves.items()}
        fixed = {name: self._part(name, value) for name, value in self.inputs.fixed.items()}
        return Inputs(leaves, fixed, self._part("out", self.inputs.dout))

    def _part(self, name: str, value: Any) -> Any:
        return self.benchmark.part(self.case, name, value) if isinstance(value, torch.Tensor) else value


def _seeded(run: Run) -> dict[str, torch.Tensor]:
    torch.manual_seed(SEED)  # so that all who share the dropout rule drop the same
    return {name: result.detach() for name, result in run.results().items()}


def measure_provider(
    benchmark: Benchmark,
    case: Any,
    provider: Provider,
    inputs: Inputs,
    checker: Checker,
    device: torch.device,
    budget_s: float,
) -> dict[str, Any]:
    """What came of one provider on one case: {"status": "ok", "timings": ...} or {"status": why not, "reason": ...}."""
    try:
        ratio, run = checker.checked(provider)
        if not ratio <= WRONG:
            return {"status": "wrong result", "reason": f"error is {ratio:.3g} x its bound"}
        if case.dropout_p != provider.checked_dropout(case):
            run = provider.make(case, inputs, case.dropout_p)
        timings = {
            direction: timing.measure(run.timed[direction], device, budget_s)._asdict()
            for direction in benchmark.directions
        }
        *_, last = run.timed.values()
        if not timings:
            last()  # what only the first call allocates, an optimizer's state, does not count
        clocks = timing.nvidia_smi("clocks.sm", "clocks.mem", "power.draw") if device.type == "cuda" else None
        return {
            "status": "ok",
            "error_over_bound": ratio,
            "timings": timings,
            "peak_mib": timing.peak_mib(last, device),
            **({"clocks": clocks} if clocks else {}),
            **run.notes,
        }
    except Refused as refused:
        return {"status": "refused", "reason": str(refused)}
    except Exception as error:  # a peer or a backend that breaks is a finding; the others are still measured
        first_line = f"{type(error).__name__}: {error}".splitlines()[0]
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            return {"status": "out of memory", "reason": first_line}
        return {"status": "failed", "reason": first_line}


def measure_all(
    benchmark: Benchmark,
    device: torch.device,
    quick: bool,
    keep: Callable[[dict[str, Any]], None] = lambda record: None,
) -> dict[str, Any]:
    """The record of one benchmark, all in this process. keep: is given the record after each case."""
    providers = [provider for provider in benchmark.providers(device) if not (quick and provider.later)]
    cases = benchmark.cases["quick" if quick else device.type]
    rows: list[dict[str, Any]] = []
    record = {"complete": False, "environment": records.environment(device), "ceilings": None}
    record |= records.described([(benchmark, case) for case in cases], device) | {"rows": rows}
    for case in cases:
        inputs = benchmark.inputs(case, device)
        checker = Checker(benchmark, case, inputs, providers[0])
        for provider in providers:
            row = {"op": benchmark.name, "case": str(case), "provider": provider.name, "ours": provider.ours}
            row |= measure_provider(benchmark, case, provider, inputs, checker, device, 0.02 if quick else 0.3)
            rows.append(row)
            if device.type == "cuda":
                torch.cuda.empty_cache()  # so that one provider's leftovers are not another's lack of memory
        record["complete"] = case is cases[-1]
        keep(record)
    return record


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
    sys.stdout.write(records.text(record))
    return int(any(records.is_our_failure(row) for row in record["rows"]))
