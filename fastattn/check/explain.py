"""What would happen, and why: which backend computes a call, and which submodules of a model run unfused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, overload

from torch import nn

from fastattn import backends
from fastattn.graphs import Stats, stats
from fastattn.nn.fusible import hook_reason, unfusible_reason

# How a kernel runs on CPU tensors, where it does.
_ON_A_CPU = {
    "triton": "interpreted on the CPU: slow, for checking only",
    "cuda": "run on the CPU by csrc/emulator: slow, for checking only",
}


@dataclass(frozen=True)
class Explanation:
    """Which backend a call would use, and why not the others. ``str()`` is the text to read.

    op: the public function's name.     device: of the call's tensors.
    source: what requested the backend, or "automatic choice".
    chosen: the backend, or None if the requested one does not support the call.
    refusals: for each backend the reason why it does not support the call, or None if it does.
    notes: for some backends how they would compute it, if that is unusual.
    remarks: for attention on a CPU, which share of the scores is computed, and how.
    """

    op: str
    device: str
    source: str
    chosen: str | None
    refusals: dict[str, str | None] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.op} on {self.device}: {self.chosen or 'no backend'} ({self.source})"]
        for name, reason in self.refusals.items():
            note = f" ({self.notes[name]})" if name in self.notes else ""
            verdict = f"no: {reason}" if reason is not None else f"supported{note}"
            lines.append(f"  {'->' if name == self.chosen else '  '} {name:<9} {verdict}")
        return "\n".join(lines + [f"  {remark}" for remark in self.remarks])


@overload
def explain(op: nn.Module) -> ModelExplanation: ...
@overload
def explain(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation: ...
def explain(op: Any, *args: Any, **kwargs: Any) -> Explanation | ModelExplanation:
    """Which backend ``op(*args, **kwargs)`` would use here, and every other backend's reason. Launches nothing.

    op: a public function of fastattn, its name, or the op's name ("attention"). Or a module, such as FusedTransformer,
        alone: which of its submodules are called instead of being computed by a fused op, and why.
    Returns an Explanation, of a module a ModelExplanation. If a backend was requested by name and does not support the
    call, nothing is raised: ``chosen`` is None.
    Raises ValueError if op is no op of fastattn, TypeError for further arguments after a module, and TypeError or
    ValueError where the call itself would.
    """
    if isinstance(op, nn.Module):
        if args or kwargs:
            raise TypeError("explain(module) takes no further arguments")
        return _explain_model(op)
    found = next((o for o in backends.OPS.values() if op in (o.function, o.function.__name__, o.name)), None)
    if found is None:
        raise ValueError(
            f"op must be one of {', '.join(o.function.__name__ for o in backends.OPS.values())}, got {op!r}"
        )
    inspect.signature(found.function).bind(*args, **kwargs)  # TypeError where the call itself would be one
    name, source = backends.requested(kwargs.get("backend"), found.backend_module)
    device, arguments = found.validate(*args, **kwargs)
    order = backends.automatic_order(found.name, device, arguments)
    order += tuple(b for b in backends.BACKENDS if b not in order)
    refusals = {b: backends.unsupported_reason(found.backend_module, b, arguments) for b in order}
    try:
        chosen = backends.choose(found.name, device, arguments, kwargs.get("backend")).name
    except RuntimeError:  # the requested backend does not support the call
        chosen = None
    notes = {b: _ON_A_CPU[b] for b in order if device.type == "cpu" and b in _ON_A_CPU and refusals[b] is None}
    source = source if name is None else f"{source} requests {name}"
    remarks = []
    if found.name == "attention" and device.type == "cpu" and chosen == "aten":
        q, k, v, mask, dropout_p, softcap, return_weights, return_lse = arguments
        results = {"return_lse": return_lse, "return_weights": return_weights}
        route = backends.load_backend("attention", "aten").decide(q, k, v, mask, 1.0, dropout_p, softcap, **results)
        remarks.append(route.describe(q, k))
    return Explanation(found.function.__name__, str(device), source, chosen, refusals, notes, remarks)


@dataclass(frozen=True)
class ModelExplanation:
    """Submodules that run unfused, and calls that ran without CUDA graphs, and why. ``str()`` is the text to read.

    model: the name of its class.
    called: for each submodule that is called instead of being fused, by its name, the reason.
    not_stepped: the same for modules that step-by-step decoding does not call.
    modules: how many of the model's modules are from fastattn and fuse their submodules.
    graphs: what the model's CUDA graphs of training have done, or None if it was never called with graphs=True.
    """

    model: str
    called: dict[str, str] = field(default_factory=dict)
    not_stepped: dict[str, str] = field(default_factory=dict)
    modules: int = 0
    graphs: Stats | None = None

    def __str__(self) -> str:
        lines = []
        if self.modules:
            lines = [f"{self.model}: {'not fused, but called:' if self.called else 'everything is fused'}"]
        elif self.graphs is None:
            return f"{self.model}: it has no module of fastattn, and explain() reads no others"
        lines += [f"  {name} {reason}" for name, reason in self.called.items()]
        if self.not_stepped:
            lines += ["called by forward and loss, but not where tokens are decoded step by step:"]
            lines += [f"  {name} {reason}" for name, reason in self.not_stepped.items()]
        if found := self.graphs:
            megabytes = f"{found.pool_bytes / 2**20:.0f} MiB"
            lines += [f"CUDA graphs of {self.model}: {found.captures} captures, {found.replays} replays, {megabytes}"]
            lines += [f"  eager calls: {count}, {reason}" for reason, count in found.eager.most_common()]
        return "\n".join(lines)


def _explain_model(model: nn.Module) -> ModelExplanation:
    called, not_stepped, modules = {}, {}, 0
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        modules += hasattr(module, "fused_children")
        for child in getattr(module, "fused_children", ()):
            found = getattr(module, child, None)
            if found is not None and (reason := unfusible_reason(found)) is not None:
                called[prefix + child] = reason
        if hasattr(module, "step") and (reason := hook_reason(module)) is not None:
            not_stepped[name or type(module).__name__] = reason
    graphs = stats(model)
    used = graphs if graphs.replays or graphs.eager else None
    return ModelExplanation(type(model).__name__, called, not_stepped, modules, used)
