"""`fastattn.shadow`: compare the ops of every N-th step of a running training with the reference path.

A compared call computes what it always computes. Its results are then judged by the rule of tolerance.py: truth is the
reference in float64, the baseline is the reference in the call's dtype. So are its gradients, by a second call next to
it, with the same dropout and random gradients of the results: the run's own gradients would have to be recorded by
autograd, which then adds in another order. So losses, gradients and random numbers are those of a run without it, bit
for bit.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _disable_current_modes

from fastattn._tracing import is_traced, is_transformed
from fastattn.backends import Implementation
from fastattn.check.tolerance import check_error, measure_rounding_scale
from fastattn.masks import AttentionMask
from fastattn.ops import _autocast, _watch


@dataclass(frozen=True)
class Deviation:
    """A result that differs from the reference by more than rounding explains."""

    step: int
    layer: str
    op: str
    backend: str
    dtype: torch.dtype
    result: str
    error: float
    bound: float

    def __str__(self) -> str:
        of = f"{self.op} ({self.backend}, {str(self.dtype).removeprefix('torch.')})"
        return (
            f"step {self.step}, {self.layer}, {of}: error of {self.result} is {self.error:.2e}, bound {self.bound:.2e}"
        )


def shadow(model: nn.Module, every: int = 50) -> Shadow:
    """A context that compares the ops of one training step in `every` with the reference path.

        with fastattn.shadow(model, every=50) as watch:
            for batch in batches:
                ...                     # forward, backward, optimizer.step()
        print(watch)

    A RuntimeWarning names step, layer and op where a result or a gradient breaks the rule for error that the doctor and
    the tests use. ``watch.deviations`` has all of them, ``watch.comparisons`` counts what was compared, and
    ``watch.skipped`` what could not be, by the reason. Losses, gradients and random numbers stay those of a run without
    it, bit for bit.

    model: a model of fastattn, an accelerated one, or your own that calls fastattn's ops; it gives the layers' names.
    every: N compares every N-th step, from the first on. A step ends with the step() of an optimizer that has
        parameters of the model. Without one, call ``watch.step()`` yourself, for example after each batch of inference.
        Of each op of a layer the first 4 calls of such a step are compared.

    It sees eager calls on a CPU and a GPU, under torch.autocast and activation checkpointing too. It does not see what
    torch.compile has compiled and what a CUDA graph replays: train without them while you look. Compared are the ops,
    not the linear maps between them. An op's gradients are compared at the time of its call, for random gradients of
    its results. A compared step takes about 20 to 60 times as long as others, and memory for the
    scores of an attention, or the logits of a loss, in float64.
    TypeError for what is no nn.Module, ValueError unless every is a positive integer. RuntimeError if one is open.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(f"every must be a positive integer, got {every!r}")
    return Shadow(model, every)


MAX_CALLS = 4  # of an op of a layer that are compared in a step: it may end with a whole validation set

_open: Shadow | None = None


class Shadow:
    """Context manager returned by ``shadow``. steps: how many have ended."""

    def __init__(self, model: nn.Module, every: int) -> None:
        self.every, self.steps, self.comparisons = every, 0, 0
        self.deviations: list[Deviation] = []
        self.skipped: Counter[str] = Counter()
        self._calls: Counter[tuple[Any, ...]] = Counter()  # of this step
        self._warned: set[tuple[str, ...]] = set()
        self._parameters = {id(p) for p in model.parameters()}
        self._paths = {id(module): path for path, module in model.named_modules()}
        named = list(model.named_parameters(remove_duplicate=False))
        self._owners = {id(p): name.rpartition(".")[0] for name, p in reversed(named)}  # of a shared one the first

    def __enter__(self) -> Shadow:
        global _open
        if _open is not None:
            raise RuntimeError("another shadow is open: its context has to end first")
        _open, self._hook = self, register_optimizer_step_post_hook(self._after_optimizer)
        self._choose()
        return self

    def __exit__(self, error: object, *_: object) -> None:
        global _open
        _open, _watch.current = None, None
        self._hook.remove()
        if error is None and not self.comparisons:
            reasons = f" ({'; '.join(self.skipped)})" if self.skipped else ""
            warnings.warn(f"shadow compared nothing: no op of fastattn ran eagerly{reasons}", RuntimeWarning, 2)

    def step(self) -> None:
        """A step has ended."""
        self.steps += 1
        self._choose()

    def __str__(self) -> str:
        lines = [f"shadow: {self.steps} steps, {self.comparisons} calls compared, {len(self.deviations)} deviations"]
        lines += [f"  {deviation}" for deviation in self.deviations[:20]]
        return "\n".join([*lines, *(f"  not compared, {n} calls: {reason}" for reason, n in self.skipped.items())])

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if any(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"]):
            self.step()

    def _choose(self) -> None:
        self._calls.clear()
        _watch.current = self if self.steps % self.every == 0 else None

    # What the ops call: see fastattn/ops/_watch.py.

    def run(
        self,
        op_name: str,
        compute: Callable[..., Any],
        chosen: Implementation,
        formula: Callable[..., Any],
        op_args: tuple[Any, ...],
        owners: Sequence[Tensor | None] = (),
    ) -> Any:
        made = compute(chosen, *op_args)
        if chosen.name != "reference" and not is_traced() and not is_transformed():
            results = _as_tuple(made)
            learns = [r is not None and r.requires_grad for r in results]
            gradients = partial(_repeated_gradients, partial(compute, chosen), op_args)
            self.compare(op_name, chosen, formula, op_args, results, learns, gradients, owners)
        return made

    def compare(
        self,
        op_name: str,
        chosen: Implementation,
        formula: Callable[..., Any],
        op_args: tuple[Any, ...],
        results: Sequence[Tensor | None],
        learns: Sequence[bool],
        gradients: Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]],
        owners: Sequence[Tensor | None] = (),
    ) -> None:
        """Judge the results of a call now: later the program may change them, or its inputs, in place.

        learns: which results have a gradient.     gradients: of op_args, from those of the results.
        """
        tensors = [_differentiable(argument) for argument in op_args]
        layer = self._layer(owners, tensors)
        kind = layer, op_name, torch.is_grad_enabled()
        self._calls[kind] += 1
        if self._calls[kind] > MAX_CALLS:
            return
        call = _Call(self, layer, op_name, chosen.name, formula, op_args, tensors)
        device = next(t for t in tensors if t is not None).device
        # Activation checkpoints count the tensors that are saved and the operators that run: not those of a comparison.
        try:
            with saved_tensors_hooks(_unchanged, _unchanged), _disable_current_modes(), _autocast.no_autocast(device):
                reason = call.incomparable_reason() or call.judge(results, learns, gradients)
        except torch.OutOfMemoryError:
            reason = "the reference in float64 does not fit into memory"
        except RuntimeError as error:
            reason = str(error)
        if reason is None:
            self.comparisons += 1
        else:
            self.skipped[f"{op_name}: {reason}"] += 1

    def _layer(self, owners: Sequence[Tensor | None], tensors: Sequence[Tensor | None]) -> str:
        """The module around that of an owner, else the module of a tensor that is a parameter, else the innermost
        module of the model whose method is running."""
        paths = [self._owners.get(id(t), "").rpartition(".")[0] for t in owners]
        paths += [self._owners.get(id(t), "") for t in tensors]
        for path in filter(None, paths):
            return path
        frame = sys._getframe()
        while frame is not None:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and (path := self._paths.get(id(module))) is not None:
                return path or "the model"
            frame = frame.f_back
        return "outside of the model"


def _differentiable(argument: Any) -> Tensor | None:
    """The tensor of an op's argument that may get a gradient, and is converted to float64."""
    if isinstance(argument, AttentionMask):
        return argument.any_bias
    return argument if isinstance(argument, Tensor) and argument.is_floating_point() else None


def _with_tensors(op_args: Sequence[Any], tensors: Sequence[Tensor | None]) -> list[Any]:
    """op_args with these in place of what _differentiable returns of them."""
    made = []
    for argument, t in zip(op_args, tensors, strict=True):
        if t is not None and isinstance(argument, AttentionMask):
            t = argument.replace(**{"bias" if argument.relative_bias is None else "relative_bias": t})
        made.append(argument if t is None else t)
    return made


def _as_tuple(results: Any) -> tuple[Tensor | None, ...]:
    return results if isinstance(results, tuple) else (results,)


def _unchanged(t: Tensor) -> Tensor:
    return t


def _random_gradient(t: Tensor) -> Tensor:
    generator = torch.Generator(t.device).manual_seed(0)
    return torch.randn(t.shape, generator=generator, dtype=t.dtype, device=t.device)


def _repeated_gradients(
    compute: Callable[..., Any], op_args: Sequence[Any], dresults: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    """Gradients of op_args. The call is repeated for them, with the same dropout: the graph of the program's own call
    stays as it is, and autograd adds the gradients of one tensor in the same order."""
    leaves = [None if t is None else t.detach().requires_grad_(t.requires_grad) for t in map(_differentiable, op_args)]
    results = _as_tuple(compute(*_with_tensors(op_args, leaves)))
    outputs, doutputs = zip(*[(r, d) for r, d in zip(results, dresults, strict=False) if d is not None], strict=True)
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(outputs, wanted, doutputs, allow_unused=True))
    return [next(found) if t is not None and t.requires_grad else None for t in leaves]


@dataclass
class _Call:
    """A call of an op in a compared step. tensors: of each of op_args what _differentiable returns."""

    shadow: Shadow
    layer: str
    op: str
    backend: str
    formula: Callable[..., Any]
    op_args: tuple[Any, ...]
    tensors: list[Tensor | None]

    def incomparable_reason(self) -> str | None:
        if not any(t is not None and t.is_cuda for t in self.tensors):
            return None
        if torch.cuda.is_current_stream_capturing():
            return "it is captured in a CUDA graph"
        given = torch.utils._pytree.tree_leaves((self.op_args, getattr(self.formula, "args", ())))
        if self.backend == "aten" and any(
            isinstance(t, Tensor) and t.dtype == torch.int64 and t.numel() == 1 for t in given
        ):
            return "the dropout of PyTorch's operators on a GPU cannot be repeated"
        return None

    def judge(
        self,
        results: Sequence[Tensor | None],
        learns: Sequence[bool],
        gradients: Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]],
    ) -> str | None:
        """Returns why there is no comparison, or None."""
        names, dresults = self._names(len(results)), [None] * len(results)
        grads: Sequence[Tensor | None] = ()
        if any(learns):
            dresults = [_random_gradient(r) if learn else None for r, learn in zip(results, learns, strict=True)]
            grads = [None if t is None else g for t, g in zip(self.tensors, gradients(dresults), strict=False)]
        actual = {name: t.detach() for name, t in zip(names, (*results, *grads), strict=False) if t is not None}
        solve = partial(self._solve, names, actual, dresults)
        truth, baseline = solve(torch.float64), solve(None)
        if any(t.isnan().any() for t in truth.values()):
            return "the reference gives NaN"
        scale = measure_rounding_scale(lambda change: solve(torch.float64, change), truth)
        lowest = min((t.dtype for t in self.tensors if t is not None), key=lambda dtype: torch.finfo(dtype).bits)
        kinked = self._near_kinks(solve, truth, scale)
        for name, t in actual.items():
            given, plain, exact = t.to(baseline[name].dtype), baseline[name], truth[name]
            if name in kinked:
                given, plain = (x.where(~kinked[name], exact.to(x.dtype)) for x in (given, plain))
            found = check_error(given, exact, plain, scale[name], computed_in=lowest)
            if not found.ok:
                deviation = Deviation(self.shadow.steps, self.layer, self.op, self.backend, lowest, name, *found)
                self.shadow.deviations.append(deviation)
                if (kind := (self.layer, self.op, name)) not in self.shadow._warned:
                    self.shadow._warned.add(kind)
                    warnings.warn(str(deviation), RuntimeWarning, stacklevel=2)
        return None

    def _names(self, results: int) -> list[str]:
        outs = ["out", *(f"out[{i}]" for i in range(1, results))]
        *others, last = inspect.signature(self.formula).parameters.values()
        given, count = [p.name for p in others], len(self.op_args)
        if last.kind is inspect.Parameter.VAR_POSITIONAL:
            given += [f"{last.name}[{i}]" for i in range(count - len(given))]
        else:
            given.append(last.name)
        return outs + [f"the gradient of {name}" for name in given[:count]]

    def _solve(
        self,
        names: Sequence[str],
        actual: dict[str, Tensor],
        dresults: Sequence[Tensor | None],
        dtype: torch.dtype | None,
        change: Callable[[Tensor], Tensor] = lambda t: t,
        tensors: Sequence[Tensor | None] = (),
    ) -> dict[str, Tensor]:
        """What `actual` has, by the formula in dtype, or in that of each tensor. tensors: in place of the call's."""

        def convert(t: Tensor) -> Tensor:
            return change(t.detach().to(dtype or t.dtype)).detach()

        given = [None if t is None else convert(t) for t in tensors or self.tensors]
        wanted = names[len(names) - len(self.op_args) :]
        leaves = {
            name: t.requires_grad_() for name, t in zip(wanted, given, strict=True) if t is not None and name in actual
        }
        with torch.enable_grad() if leaves else torch.no_grad():
            results = _as_tuple(self.formula(*_with_tensors(self.op_args, given)))
        found = {name: t.detach() for name, t in zip(names, results, strict=False) if name in actual}
        if leaves:
            pairs = [(r, convert(d).to(r)) for r, d in zip(results, dresults, strict=False) if d is not None]
            outputs, doutputs = zip(*pairs, strict=True)
            grads = torch.autograd.grad(outputs, list(leaves.values()), doutputs)
            found |= dict(zip(leaves, grads, strict=True))
        return found

    def _near_kinks(
        self, solve: Callable[..., dict[str, Tensor]], truth: dict[str, Tensor], scale: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Where a gradient depends on a relu whose input is 0 but for rounding: there any of two numbers is right."""
        if self.op != "feed_forward" or self.op_args[5] not in ("relu", "reglu") or len(truth) == 1:
            return {}
        x, weight1, bias1, *others = (None if t is None else t.detach().double() for t in self.tensors)
        if x.numel() == 0 or weight1.numel() == 0:
            return {}
        rounding = 4 * torch.finfo(torch.float32).eps
        reach = rounding * (x.abs() @ weight1.abs().mT).amax()
        bias1 = weight1.new_zeros(len(weight1)) if bias1 is None else bias1
        hidden_units = len(bias1) // 2 if self.op_args[5] == "reglu" else len(bias1)
        reach = reach * (torch.arange(len(bias1), device=x.device) < hidden_units)
        below, above = (solve(torch.float64, tensors=[x, weight1, bias1 + shift, *others]) for shift in (-reach, reach))
        u = torch.finfo(torch.float32).eps / 2
        return {name: (above[name] - below[name]).abs() > u * scale[name] for name in truth if name != "out"}
