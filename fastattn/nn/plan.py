"""What one forward of a model decides for all of its layers: backends, dtypes, prepared masks.

Dropped: a plan that the next forward uses again. In a training step of 6 + 6 layers all decisions take 0.47 of 13 ms of
the host. 0.24 of them check that modules are unmodified, 0.08 that parameters fit, and neither may be skipped: hooks
and `.data` leave no version.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from fastattn import backends
from fastattn._tracing import is_transformed, may_write_in_place
from fastattn.backends import Backend, Implementation, timings
from fastattn.masks import AttentionMask
from fastattn.nn.residual import PendingResidual
from fastattn.ops import _autocast
from fastattn.ops.attention import prepare_masks

MAX_CHOICES = 64  # of a plan that later forwards use again


class AttentionChoice(NamedTuple):
    """What the calls of attention with one mask, one size and one layout share.

    way: how aten computes them; None of other backends.     masks: as kernels read `mask`.
    bound: a dictionary in which the backend keeps the launches that these calls share.
    """

    chosen: Implementation
    mask: AttentionMask | None
    way: Any
    masks: Sequence[Any]
    bound: dict[str, Any]


class Plan:
    """The decisions of a forward, made when a layer first needs them.

    is_open: whether sublayers may be fused.     keeps: whether gradients are recorded.
    stream_dtype: of the residual stream: the input's.
    dtype: of what the sublayers compute from it: torch.autocast's, or the input's.
    """

    def __init__(self, x: Tensor | PendingResidual) -> None:
        """x: the first layer's input."""
        self._state = _state(x)
        self.is_open = self._state is not None
        if self._state is not None:
            self.device, self.stream_dtype, autocast_dtype, self.keeps, _ = self._state
            self.is_under_autocast = autocast_dtype is not None
            keeps_dtype = autocast_dtype is None or self.stream_dtype is torch.float64
            self.dtype = self.stream_dtype if keeps_dtype else autocast_dtype
            self._choices: dict[tuple[Any, ...], Any] = {}

    def holds_for(self, x: Tensor | PendingResidual) -> bool:
        """Whether a layer's call with this input may use it. Activation checkpointing, for one, calls a layer without
        gradients."""
        return self._state == _state(x)

    def cast(self, x: Tensor) -> Tensor:
        """x in the dtype of the products."""
        return x if x.dtype is self.dtype else x.to(self.dtype)

    def choose(
        self, op_name: str, backend: Backend | None, key: tuple[Any, ...], dtype: torch.dtype, x: Tensor, *others: Any
    ) -> Implementation:
        """The backend of an op. key: what distinguishes calls for which it may differ.

        x, others: the op's arguments.     dtype: in which the op gets x.
        """
        key = op_name, backend, *key
        if (chosen := self._choices.get(key)) is None:
            x = x if x.dtype is dtype else torch.empty_like(x, dtype=dtype)
            chosen = self._choices[key] = backends.choose(op_name, self.device, (x, *others), backend)
        return chosen

    def choose_attention(
        self,
        backend: Backend | None,
        mask: AttentionMask | None,
        sizes: tuple[int, ...],
        dropout_p: float,
        softmax_scale: float,
        layout: tuple[Any, ...] | None,
    ) -> AttentionChoice:
        """The choice for a mask and sizes (B, Lq, Lk, H, Hk, Dk, Dv). The mask is checked here.

        layout: strides of the memory, None for self-attention. Calls with one choice have them in common.
        """
        key = id(mask), sizes, dropout_p, backend, softmax_scale, layout
        if (choice := self._choices.get(key)) is None:
            B, Lq, Lk, H, Hk, Dk, Dv = sizes
            shapes = (B, H, Lq, Dk), (B, Hk, Lk, Dk), (B, Hk, Lk, Dv)
            q, k, v = (torch.empty(shape, dtype=self.dtype, device=self.device) for shape in shapes)
            if mask is not None:
                mask.check(B, H, Lq, Lk, self.device)
            chosen = backends.choose("attention", self.device, (q, k, v, mask, dropout_p, None), backend)
            way, masks = None, ()
            if not chosen.differentiable:
                masks = prepare_masks(chosen, q, k, v, mask, needs_gradient=self.keeps)
            elif chosen.name == "aten":
                way = chosen.module.decide(q, k, v, mask, softmax_scale, dropout_p)
            choice = self._choices[key] = AttentionChoice(chosen, mask, way, masks, {})
        return choice


def _state(x: Tensor | PendingResidual) -> tuple[Any, ...] | None:
    """What a Plan depends on, next to the layers; None where no sublayer may be fused."""
    t = x
    if isinstance(x, PendingResidual):
        t = x.branch if x.residual is None else x.residual
    if type(t) is not Tensor or torch.compiler.is_compiling() or is_transformed() or _has_any_global_hook():
        return None
    modes = torch.is_grad_enabled(), may_write_in_place()
    return t.device, t.dtype, _autocast.autocast_dtype(t.device), *modes


def open_plan(plan: Plan | None, x: Tensor | PendingResidual) -> Plan | None:
    """A plan for a layer's call with this input, or None where its sublayers have to be called.

    plan: that of the forward, which the layers share, or None. Where it was made for another kind of call, the layer
    gets its own.
    """
    if plan is None or not plan.holds_for(x):
        plan = Plan(x)
    return plan if plan.is_open else None


class _LastPlan(threading.local):
    """What shared_plan returned last, for which masks, for which of their stamps, requested backend and shape, and by
    which record."""

    masks: Sequence[Callable[[], AttentionMask | None]] = ()
    choices: Any = None
    state: Any = None
    plan: Plan | None = None


_last = _LastPlan()


def shared_plan(masks: Sequence[AttentionMask | None], x: Tensor) -> Plan | None:
    """open_plan for layers that get no plan of their forward, of a model of another library.

    The layers of a forward have their masks in common, so the plan is kept as long as calls have the same masks, or
    none, with the same values, on the same stream. A forward with other sizes gets another plan, and so does each layer
    where a mask keeps nothing that is prepared, as in the capture of a CUDA graph. So does the forward after
    MAX_CHOICES decisions, for memories of many lengths.
    """
    if torch.compiler.is_compiling():
        return open_plan(None, x)
    given = [mask for mask in masks if mask is not None]
    stamps = [mask.stamp(x.device, with_bias=True) for mask in given]
    state = backends.requested(None), x.shape, stamps
    choices = timings.all_choices(x.device.type, x.device.index)
    same = None not in stamps and _last.state == state and [ref() for ref in _last.masks] == given
    same = same and _last.choices is choices
    same = same and (_last.plan is None or len(_last.plan._choices) < MAX_CHOICES)
    plan = open_plan(_last.plan if same else None, x)
    if plan is not _last.plan:
        _last.masks, _last.state, _last.plan = [weakref.ref(mask) for mask in given], state, plan
        _last.choices = choices
    return plan
