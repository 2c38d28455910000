"""What the benchmarks share: each provider is checked, then timed. timing.py measures, report.py runs and writes.

A benchmark fills in `Benchmark`. It makes the inputs of each case, and each provider turns them into a `Run`. A
provider that cannot run a case gives the reason. A result outside the bound of `fastattn.check.tolerance.check_error`
is not timed: "wrong result". The bound is the same for backends and rivals. All are checked without dropout.

Directions. forward: with inputs that require gradients, so what the backward needs is saved; backward:
`torch.autograd.grad` on a saved graph; both: one after the other. Inputs are normally distributed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import timing  # before torch: it sets what torch reads when imported
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import fastattn
from fastattn.backends import BACKENDS
from fastattn.check.cases import Problem
from fastattn.check.tolerance import check_error, measure_rounding_scale

SEED = 20170612
DRAWS = 2  # for the rounding scale
SELDOM = 40  # how many cases later a provider is measured that a GPU's first minutes can do without


class Refused(Exception):
    """A provider cannot run a case; the message is the reason."""

    status = "refused"


class Wrong(Exception):
    """A provider's results are out of bounds."""

    status = "wrong result"


def seeded(device: torch.device | str) -> torch.Generator:
    return torch.Generator(device).manual_seed(SEED)


class Inputs(NamedTuple):
    """leaves: float tensors, with a gradient where the op has one. fixed: other arguments, also in dicts. dout: the
    gradient of the result."""

    leaves: dict[str, Tensor]
    fixed: dict[str, Any]
    dout: Tensor | None = None

    def changed(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """Leaves and dout after `change`."""
        leaves = {name: change(t.detach()).requires_grad_(t.requires_grad) for name, t in self.leaves.items()}
        return self._replace(leaves=leaves, dout=None if self.dout is None else change(self.dout))

    def double(self) -> Inputs:
        """All float tensors in float64."""

        def doubled(t: Tensor) -> Tensor:
            return t.double() if t.is_floating_point() else t

        return self.changed(doubled)._replace(fixed=tree_map_only(Tensor, doubled, self.fixed))


class Run(NamedTuple):
    """One provider on one case. results: what is checked, by name. timed: the calls to time, by direction. notes: more
    entries of the row: "default", this is fastattn's own choice here; "ran", the kernel that ran. after: the entries
    that are known when the calls were timed; Refused if what was timed is not what the provider is for."""

    results: Callable[[], dict[str, Tensor]]
    timed: dict[str, Callable[[], Any]]
    notes: dict[str, Any] = {}
    after: Callable[[], dict[str, Any]] = dict


class Provider(NamedTuple):
    """make(case, inputs, dropout_p) -> Run, or raises Refused.

    ours: a backend of fastattn, whose failure fails the report; the failure of a rival is only recorded. later: it
    needs long preparation, as torch.compile does; it is measured this many cases after the others, and never in quick
    runs. compared: False where it has its own weights, so only its speed can be compared.
    """

    name: str
    make: Callable[[Any, Inputs, float], Run]
    ours: bool = True
    later: int = 0
    compared: bool = True


@dataclass(frozen=True)
class Benchmark:
    """Its first provider is the reference path: the specification.

    formula: what its work or its figures are, in words. inputs: (case, device) -> Inputs. rates: units shown in the
    tables. directions: what is timed. hide_host: see timing.measure_in_turn; False where the user waits for the host
    too. check: the error of a provider, where `Checked.error_over_bound` is not the way.
    """

    name: str
    formula: str
    rates: tuple[str, ...]
    inputs: Callable[[Any, torch.device], Inputs]
    providers: Callable[[torch.device], list[Provider]]
    directions: tuple[str, ...] = ("forward", "backward", "both")
    hide_host: bool = True
    check: Callable[[Checked, Provider], float | None] | None = None


Function = Callable[[Any, Inputs, float], Callable[..., Tensor]]  # (case, inputs, dropout_p) -> function of the leaves


def op_inputs(case: Any, device: torch.device) -> Inputs:
    """Those of a case's problem."""
    problem = case.problem(device)
    like = next(iter(problem.tensors.values()))
    shape = () if problem.op == "linear_cross_entropy" else like.shape  # a loss; all others have the first one's shape
    dout = torch.randn(shape, generator=seeded(device), dtype=like.dtype, device=device)
    return Inputs(problem.tensors, problem.options, dout if problem.differentiable else None)


def op_problem(case: Any, inputs: Inputs, dropout_p: float) -> Problem:
    options = inputs.fixed | ({"dropout_p": dropout_p} if dropout_p else {})
    return Problem(case.op, "", case.function, inputs.leaves, options)


def op_call(
    case: Any, inputs: Inputs, dropout_p: float, backend: str | None = None, new_mask: bool = False
) -> Callable[..., Tensor]:
    """The op of a case as a function of the leaves. A mask is made once for all calls, unless new_mask."""
    problem = op_problem(case, inputs, dropout_p)
    made = problem.arguments()  # a mask has the leaves that are biases

    def call(**leaves: Tensor) -> Tensor:
        given = {name: leaves.get(name, value) for name, value in made.items()}
        return case.function(**problem.arguments(leaves) if new_mask else given, backend=backend)

    return call


def function_run(function: Callable[..., Tensor], inputs: Inputs, **notes: Any) -> Run:
    """The Run of a plain function of the leaves: result and gradients are checked; forward, backward and both timed.
    Without dout there are no gradients. A loss is checked in the dtype of the leaves: the error of a single float32
    number is chance."""
    leaves = list(inputs.leaves.values())

    def forward() -> Tensor:
        out = function(**inputs.leaves)
        return out if out.dim() else out.to(leaves[0].dtype)

    def both() -> tuple[Tensor, tuple[Tensor, ...]]:
        out = forward()
        return out, torch.autograd.grad(out, leaves, inputs.dout)

    def backward() -> tuple[Tensor, ...]:
        if not saved:
            saved.append(forward())
        return torch.autograd.grad(saved[0], leaves, inputs.dout, retain_graph=True)

    def results() -> dict[str, Tensor]:
        out, grads = both()
        return {"out": out} | {f"grad of {name}": grad for name, grad in zip(inputs.leaves, grads, strict=True)}

    saved: list[Tensor] = []
    if inputs.dout is None:
        return Run(lambda: {"out": forward()}, {"forward": forward}, notes)
    return Run(results, {"forward": forward, "backward": backward, "both": both}, notes)


def ours() -> list[Provider]:
    """A provider for each backend of a public op."""

    def make(case: Any, inputs: Inputs, dropout_p: float, backend: str) -> Run:
        given = op_problem(case, inputs, dropout_p).arguments()
        given.pop("sinks", None)  # which are added to the op's result
        explanation = fastattn.explain(case.op, **given)
        if reason := explanation.refusals[backend] or explanation.notes.get(backend):
            raise Refused(reason)  # a note: a kernel can check on a CPU, but its speed there means nothing
        default = {"default": True} if backend == explanation.chosen else {}
        return function_run(op_call(case, inputs, dropout_p, backend), inputs, **default)

    return [Provider(backend, functools.partial(make, backend=backend)) for backend in BACKENDS]


def rival(name: str, function: Function, compiled: bool = False) -> Provider:
    """A provider that is not part of fastattn. compiled: by torch.compile, see fresh_compile."""

    def make(case: Any, inputs: Inputs, dropout_p: float) -> Run:
        call = function(case, inputs, dropout_p)
        return function_run(fresh_compile(call) if compiled else call, inputs)

    return Provider(name, make, ours=False, later=SELDOM * compiled)


def fresh_compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile for these shapes alone. What it compiled before is dropped, so it never falls back to eager after
    many recompilations. Its backward may not reuse the memory of saved tensors: the timed one is repeated on one graph.
    """
    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False
    return torch.compile(function, dynamic=False)


def imported(module: str) -> Any:
    """A rival's module; Refused where it is not installed, or is too broken to import."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Refused(f"cannot be imported: {error}") from error


class Checked:
    """One case. Its providers are compared with the reference formula in float64, by the one rule for error."""

    def __init__(self, benchmark: Benchmark, case: Any, device: torch.device) -> None:
        self.benchmark, self.case, self.device = benchmark, case, device
        self.providers = benchmark.providers(device)

    @functools.cached_property
    def inputs(self) -> Inputs:
        made = self.benchmark.inputs(self.case, self.device)
        for leaf in made.leaves.values():
            leaf.requires_grad_(made.dout is not None)
        return made

    def error_over_bound(self, provider: Provider) -> float:
        """The largest error of a provider's results as a share of its bound; over 1 is wrong. May raise Refused."""
        results = _results(provider.make(self.case, self.inputs, 0.0))
        actual = {name: self._part(name.removeprefix("grad of "), value) for name, value in results.items()}
        truth, baseline, scale = self._reference
        checks = (check_error(actual[n], truth[n], baseline[n], scale[n], self.case.dtype) for n in truth)
        return max(check.ratio for check in checks)

    def check(self, provider: Provider) -> float | None:
        """The same, by the benchmark's way; None where nothing is compared. Raises Wrong."""
        if not provider.compared:
            return None
        ratio = (self.benchmark.check or Checked.error_over_bound)(self, provider)
        if ratio is not None and not ratio <= 1:
            raise Wrong(f"error is {ratio:.3g} x its bound")
        return ratio

    def default(self) -> Run | None:
        """What fastattn does with this case by default."""
        for provider in self.providers:
            if provider.ours:
                try:
                    run = provider.make(self.case, self.inputs, self.case.dropout_p)
                except Refused:
                    continue
                if run.notes.get("default"):
                    return run
        return None

    @functools.cached_property
    def _reference(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """Truth, the plain formula's results at the case's dtype, and their rounding scale."""
        leaves = {name: self._part(name, value) for name, value in self.inputs.leaves.items()}
        fixed = {name: self._part(name, value) for name, value in self.inputs.fixed.items()}
        low = Inputs(leaves, fixed, self._part("out", self.inputs.dout)).changed(lambda t: t)
        exact = low.double()
        truth = self._solve(exact)
        scale = measure_rounding_scale(lambda change: self._solve(exact.changed(change)), truth, DRAWS)
        return truth, self._solve(low), scale

    def _solve(self, inputs: Inputs) -> dict[str, Tensor]:
        """The reference path's results."""
        return _results(self.providers[0].make(self.case, inputs, 0.0))

    def _part(self, name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._part(key, item) for key, item in value.items()}
        return self.case.part(name, value) if isinstance(value, Tensor) else value


def _results(run: Run) -> dict[str, Tensor]:
    return {name: result.detach() for name, result in run.results().items()}


def measure_provider(checked: Checked, provider: Provider, budget_s: float) -> dict[str, Any]:
    """The row of one provider on one case: {"status": "ok", "timings": ...} or {"status": ..., "reason": ...}."""
    try:
        return check_and_time(checked, provider, budget_s)
    except (Refused, Wrong) as reason:
        return {"status": reason.status, "reason": str(reason)}
    except Exception as error:  # recorded: the other providers are still measured
        first_line = f"{type(error).__name__}: {error}".splitlines()[0]
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            return {"status": "out of memory", "reason": first_line}
        return {"status": "failed", "reason": first_line}


def check_and_time(checked: Checked, provider: Provider, budget_s: float) -> dict[str, Any]:
    """The row of what is right.

    Samples alternate with those of fastattn's default; "speed" is how many times that fits into the provider's time.
    Of a whole model: "first_s", the first call, which compiles what is not in the caches on disk; "loop_us", how fast
    the host was. "pool_mib": the memory of CUDA graphs. "device_ms": the GPU's time, None where it is not known.
    Decoding: "step_device_ms", that of a step.
    """
    device, case, pool = checked.device, checked.case, timing.pool_mib(checked.device)
    ratio = checked.check(provider)
    run = provider.make(case, checked.inputs, case.dropout_p)
    row: dict[str, Any] = {"status": "ok", "error_over_bound": ratio, "timings": {}}
    first, last = ([*run.timed.values()][place] for place in (0, -1))
    if not checked.benchmark.hide_host:
        row |= {"first_s": timing.seconds(first, device), "loop_us": timing.loop_us()}
    default_run = None if run.notes.get("default") else checked.default()
    for direction in checked.benchmark.directions:
        calls = [run.timed[direction], *([default_run.timed[direction]] if default_run else [])]
        timed, *default = timing.measure_in_turn(calls, device, budget_s, checked.benchmark.hide_host)
        row["timings"][direction] = timed._asdict()
        if device.type == "cuda" and direction == "step":
            waits = timing.waits_for_gpu(calls[0])
            alone = None if waits else timing.measure(calls[0], device, budget_s).median_ms
            row["timings"][direction]["device_ms"] = alone
        if default:
            row.setdefault("speed", {})[direction] = timed.median_ms / default[0].median_ms
    row |= {"peak_mib": timing.peak_mib(last, device), "pool_mib": max(0.0, timing.pool_mib(device) - pool)}
    return row | run.notes | run.after()
