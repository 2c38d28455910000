"""What the benchmarks share: providers are checked, then timed. timing.py measures, report.py runs and writes.

A benchmark fills in `Benchmark`. For each case it makes the inputs, and each provider turns them into a `Run`. A
provider that cannot run a case says why. One whose result is outside the bound of check_error, in
fastattn/check/tolerance.py, is not timed: "wrong result". Backends and rivals are held to the same bound, and all are
checked without dropout.

Directions. forward: with inputs that require gradients, so what the backward needs is saved; backward:
`torch.autograd.grad` on a kept graph; both: one after the other. Inputs are normally distributed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import timing  # before torch: it sets what torch reads when imported
import torch
from torch import Tensor

import fastattn
from fastattn.backends import BACKENDS
from fastattn.check.tolerance import check_error, measure_rounding_scale

SEED = 20170612
DRAWS = 2  # for the rounding scale


class Refused(Exception):
    """A provider cannot serve a case; the message says why."""


class Inputs(NamedTuple):
    """leaves: float tensors, with a gradient where the op has one. fixed: what else a provider may need. dout: the
    gradient of the result."""

    leaves: dict[str, Tensor]
    fixed: dict[str, Any]
    dout: Tensor | None = None

    def changed(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """Leaves and dout after `change`."""
        leaves = {name: change(t.detach()).requires_grad_(t.requires_grad) for name, t in self.leaves.items()}
        return self._replace(leaves=leaves, dout=None if self.dout is None else change(self.dout))


class Run(NamedTuple):
    """One provider on one case. results: what is checked, by name. timed: the calls to time, by direction. notes: what
    else belongs in the row: "default", this is fastattn's own choice here; "ran", what served the call."""

    results: Callable[[], dict[str, Tensor]]
    timed: dict[str, Callable[[], Any]]
    notes: dict[str, Any] = {}


class Provider(NamedTuple):
    """make(case, inputs, dropout_p) -> Run, or raises Refused.

    ours: a backend of fastattn, whose failure fails the report; that of a rival is only recorded. later: it takes long
    to get ready, as torch.compile does; it is measured this many cases after the others, and quick runs leave it out.
    compared: False where its weights are its own, so that only its speed can be compared.
    """

    name: str
    make: Callable[[Any, Inputs, float], Run]
    ours: bool = True
    later: int = 0
    compared: bool = True


@dataclass(frozen=True)
class Benchmark:
    """Its first provider is the reference path: the specification.

    cases: by table, "quick", "cpu" and "cuda". directions: what is timed; none where only the peak memory of a Run's
    last call is of interest. inputs: (case, device) -> Inputs. rates: units shown in the tables.
    part: (case, name, tensor) -> the part that is compared of an input, the result "out" or a gradient, where all of it
    would be too much. hide_host: see timing.measure_in_turn; False where the host is part of what a user waits for.
    """

    name: str
    cases: dict[str, Sequence[Any]]
    directions: tuple[str, ...]
    rates: tuple[str, ...]
    inputs: Callable[[Any, torch.device], Inputs]
    providers: Callable[[torch.device], list[Provider]]
    part: Callable[[Any, str, Tensor], Tensor] = lambda case, name, tensor: tensor
    hide_host: bool = True


def run_of(function: Callable[..., Tensor], inputs: Inputs, **notes: Any) -> Run:
    """The Run of a plain function of the leaves: result and gradients are checked; forward, backward and both timed.
    Of inputs without dout there are no gradients."""
    leaves = list(inputs.leaves.values())

    def forward() -> Tensor:
        return function(**inputs.leaves)

    def both() -> tuple[Tensor, tuple[Tensor, ...]]:
        out = forward()
        return out, torch.autograd.grad(out, leaves, inputs.dout)

    def backward() -> tuple[Tensor, ...]:
        if not kept:
            kept.append(forward())
        return torch.autograd.grad(kept[0], leaves, inputs.dout, retain_graph=True)

    def results() -> dict[str, Tensor]:
        out, grads = both()
        return {"out": out} | {f"grad of {name}": grad for name, grad in zip(inputs.leaves, grads, strict=True)}

    kept: list[Tensor] = []
    if inputs.dout is None:
        return Run(lambda: {"out": forward()}, {"forward": forward}, notes)
    return Run(results, {"forward": forward, "backward": backward, "both": both}, notes)


def ours(
    function: Callable[..., Tensor],
    arguments: Callable[[Any, Inputs, float], dict[str, Any]],
    finish: Callable[[Tensor, dict[str, Tensor]], Tensor] = lambda out, leaves: out,
) -> list[Provider]:
    """A provider for each backend of a public op. arguments(case, inputs, dropout_p): those beside the leaves.

    finish(out, leaves): what becomes of its result.
    """

    def provider(backend: str) -> Provider:
        def make(case: Any, inputs: Inputs, dropout_p: float) -> Run:
            options = arguments(case, inputs, dropout_p)
            explanation = fastattn.explain(function, **inputs.leaves | options)
            if reason := explanation.refusals[backend] or explanation.notes.get(backend):
                raise Refused(reason)  # a note: a kernel can check on a CPU, but its speed there means nothing
            default = {"default": True} if backend == explanation.chosen else {}
            return run_of(
                lambda **leaves: finish(function(**leaves | options, backend=backend), leaves), inputs, **default
            )

        return Provider(backend, make)

    return [provider(backend) for backend in BACKENDS]


Function = Callable[[Any, Inputs, float], Callable[..., Tensor]]


def rival(name: str, function: Function, compiled: bool = False) -> Provider:
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
    """A rival's module; Refused where it is not installed, or is too broken to import."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Refused(f"cannot be imported: {error}") from error


class Checked:
    """One case, whose providers are compared with the reference formula in float64, by the one rule for error."""

    def __init__(self, benchmark: Benchmark, case: Any, device: torch.device) -> None:
        self.benchmark, self.case, self.device = benchmark, case, device
        self.inputs = benchmark.inputs(case, device)
        self.providers = benchmark.providers(device)
        self._bound: tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]] | None = None

    def error_over_bound(self, provider: Provider) -> float:
        """The largest error of a provider's results as a share of its bound; over 1 is wrong. May raise Refused."""
        results = _results(provider.make(self.case, self.inputs, 0.0))
        actual = {name: self._part(name.removeprefix("grad of "), value) for name, value in results.items()}
        truth, baseline, scale = self._bound = self._bound or self._reference()
        checks = (check_error(actual[n], truth[n], baseline[n], scale[n], self.case.dtype) for n in truth)
        return max(check.ratio for check in checks)

    def default(self) -> Run | None:
        """What fastattn does with this case unless told otherwise."""
        for provider in self.providers:
            if provider.ours:
                try:
                    run = provider.make(self.case, self.inputs, self.case.dropout_p)
                except Refused:
                    continue
                if run.notes.get("default"):
                    return run
        return None

    def _reference(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """Truth, the plain formula's results at the case's dtype, and their rounding scale."""
        leaves = {name: self._part(name, value) for name, value in self.inputs.leaves.items()}
        fixed = {name: self._part(name, value) for name, value in self.inputs.fixed.items()}
        low = Inputs(leaves, fixed, self._part("out", self.inputs.dout)).changed(lambda t: t)
        exact = low.changed(lambda t: t.double())
        truth = self._solve(exact)
        scale = measure_rounding_scale(lambda change: self._solve(exact.changed(change)), truth, DRAWS)
        return truth, self._solve(low), scale

    def _solve(self, inputs: Inputs) -> dict[str, Tensor]:
        """The reference path's results."""
        return _results(self.providers[0].make(self.case, inputs, 0.0))

    def _part(self, name: str, value: Any) -> Any:
        return self.benchmark.part(self.case, name, value) if isinstance(value, Tensor) else value


def _results(run: Run) -> dict[str, Tensor]:
    return {name: result.detach() for name, result in run.results().items()}


def measure_provider(checked: Checked, provider: Provider, budget_s: float) -> dict[str, Any]:
    """What came of one provider on one case: {"status": "ok", "timings": ...} or {"status": why not, "reason": ...}.

    Samples alternate with those of fastattn's default; "speed" is how many times that fits into the provider's time.
    """
    device, case = checked.device, checked.case
    try:
        ratio = checked.error_over_bound(provider) if provider.compared else None
        if ratio is not None and not ratio <= 1:
            return {"status": "wrong result", "reason": f"error is {ratio:.3g} x its bound"}
        run = provider.make(case, checked.inputs, case.dropout_p)
        row = {"status": "ok", "error_over_bound": ratio, "timings": {}}
        alone = run.notes.get("default") or not checked.benchmark.directions
        beside = None if alone else checked.default()
        for direction in checked.benchmark.directions:
            calls = [run.timed[direction], *([beside.timed[direction]] if beside else [])]
            timed, *default = timing.measure_in_turn(calls, device, budget_s, checked.benchmark.hide_host)
            row["timings"][direction] = timed._asdict()
            if device.type == "cuda" and direction == "step":
                row["timings"][direction]["device_ms"] = timing.measure(calls[0], device, budget_s).median_ms
            if default:
                row.setdefault("speed", {})[direction] = timed.median_ms / default[0].median_ms
        *_, last = run.timed.values()
        if not checked.benchmark.directions:
            last()  # what only the first call allocates, an optimizer's state, does not count
        row["peak_mib"] = timing.peak_mib(last, device)
        if device.type == "cuda":
            row["clocks"] = timing.nvidia_smi(device, "clocks.sm", "clocks.mem", "power.draw")
        return row | run.notes
    except Refused as refused:
        return {"status": "refused", "reason": str(refused)}
    except Exception as error:  # a rival or a backend that breaks is a finding; the others are still measured
        first_line = f"{type(error).__name__}: {error}".splitlines()[0]
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            return {"status": "out of memory", "reason": first_line}
        return {"status": "failed", "reason": first_line}
