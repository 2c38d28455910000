"""The output projection and its label-smoothed cross-entropy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fastattn import backends
from fastattn._tracing import can_read_values
from fastattn.backends import Backend, Implementation
from fastattn.backends.calls import LossCall
from fastattn.backends.reference import linear_cross_entropy as reference
from fastattn.ops import _autocast, _checks, _watch
from fastattn.ops._autograd import Grads, Needs, Operator

Reduction = Literal["none", "mean", "sum"]
SmoothOver = Literal["all", "others"]
REDUCTIONS, SMOOTH_OVER = get_args(Reduction), get_args(SmoothOver)


def _validate(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    label_smoothing: float = 0.0,
    smooth_over: SmoothOver = "all",
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    reduction: Reduction = "mean",
    known_target: bool = False,
    **options: Any,
) -> tuple[torch.device, tuple[Any, ...]]:
    """Check a call's arguments. Returns (device, inputs): the inputs are what unsupported_reason takes."""
    _checks.check_float("x", x)
    x, weight, bias = _autocast.autocast_inputs(x, weight, bias)
    if x.dim() == 0:
        raise ValueError("x has no dimensions, expected (..., d)")
    _checks.check_like("weight", weight, "x", x)
    if bias is not None:
        _checks.check_like("bias", bias, "x", x)
    if weight.dim() != 2 or weight.shape[0] == 0:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, expected (classes, d) with at least one class")
    classes = weight.shape[0]
    _checks.check_shape("weight", weight, (classes, x.shape[-1]), "(classes, d)")
    if bias is not None:
        _checks.check_shape("bias", bias, (classes,), "the rows of weight")
    _checks.check_finite("logit_scale", logit_scale)
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index must be an integer, got {type(ignore_index).__name__}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    target = target.long() if known_target else _checked_target(target, x, classes, ignore_index)
    label_smoothing = smooth_over_all(label_smoothing, smooth_over, classes)
    return x.device, (x, weight, bias, target, label_smoothing, ignore_index, float(logit_scale), reduction)


def smooth_over_all(label_smoothing: float, smooth_over: str, classes: int) -> float:
    """The label smoothing over all classes that equals this one, over all or over the others."""
    _checks.check_number("label_smoothing", label_smoothing)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must lie between 0 and 1, got {label_smoothing}")
    if smooth_over not in SMOOTH_OVER:
        raise ValueError(f"smooth_over must be one of {', '.join(SMOOTH_OVER)}, got {smooth_over!r}")
    if smooth_over == "others":
        return float(label_smoothing) * classes / (classes - 1) if classes > 1 else 0.0
    return float(label_smoothing)


def cross_entropy(
    logits: Tensor, target: Tensor, *, label_smoothing: float, smooth_over: str, ignore_index: int, reduction: str
) -> Tensor:
    """linear_cross_entropy of logits (..., classes) that a module of the user's made, by the formula."""
    smoothing = smooth_over_all(label_smoothing, smooth_over, logits.shape[-1])
    return reference.loss_of_logits(logits, target.long(), smoothing, ignore_index, reduction)


def _checked_target(target: Tensor, x: Tensor, classes: int, ignore_index: int) -> Tensor:
    """target in int64. Its values are read on a CPU only: on a GPU this would wait."""
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a Tensor, got {type(target).__name__}")
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise TypeError(f"target has dtype {target.dtype}, expected integers: the number of each right class")
    _checks.check_shape("target", target, tuple(x.shape[:-1]), "the leading dimensions of x")
    if target.device != x.device:
        raise ValueError(f"target is on {target.device}, expected {x.device} as x")
    target = target.long()
    if can_read_values(target) and target.numel() > 0:
        low, high = target.aminmax()
        if low.item() >= 0 and high.item() < classes:
            return target
        wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
        if wrong.any():
            raise ValueError(
                f"target has the value {target[wrong][0]}, expected 0 to {classes - 1} or ignore_index={ignore_index}"
            )
    return target


@backends.register("linear_cross_entropy", _validate)
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    smooth_over: SmoothOver = "all",
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    reduction: Reduction = "mean",
    backend: Backend | None = None,
) -> Tensor:
    """torch.nn.functional.cross_entropy(logit_scale * linear(x, weight, bias), target), the logits never kept.

    x (..., d): float32, bfloat16, float16 (float64 in reference and aten).
    weight (classes, d), bias (classes,) or None: in x's dtype. Under torch.autocast all three are cast to its dtype.
    target (...): integers, 0 to classes - 1 or ignore_index. Another value is a ValueError on a CPU; on a GPU, where
        looking at it would wait, an assertion of PyTorch stops the process, or loss and gradients are NaN.
    label_smoothing: between 0 and 1, how much of the target's probability is spread evenly over
        smooth_over "all": all classes, as torch does, or
        smooth_over "others": all but the target, as the public implementation of the Transformer does.
    ignore_index: rows with this target take no part: their loss and gradients are 0, whatever x holds there.
    logit_scale: a finite number that multiplies the logits, the bias included.
    reduction: "none", "sum", or "mean" over the rows that are not ignored: NaN if all are, as in torch, with
        gradients 0.
    backend: "reference", "aten", "triton" or "cuda"; default the first that supports the call, see ``explain``.

    Returns the loss, (...) or (), in float32 (float64 of float64).
    A reduced loss makes its gradients in the forward, where the logits are; "none", and float16, whose gradients must
    not be rounded before a loss scale has multiplied them, compute the logits a second time in the backward.
    Raises TypeError or ValueError naming the argument, RuntimeError if the backend asked for does not support it.
    Source: Szegedy et al. 2016, arXiv:1512.00567, section 7 (label smoothing). Chunks of logits that their gradient
    replaces in the forward: Hsu et al. 2024, "Liger Kernel", arXiv:2410.10989.
    """
    options = label_smoothing, smooth_over, ignore_index, logit_scale, reduction
    return _loss(*_validate(x, weight, target, bias, *options), backend)


def loss_of_known_target(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *, backend: Backend | None, **options: Any
) -> Tensor:
    """``linear_cross_entropy`` of a target that the caller has checked, of x's leading dimensions."""
    return _loss(*_validate(x, weight, target, bias, known_target=True, **options), backend)


def _loss(device: torch.device, inputs: tuple[Any, ...], backend: Backend | None) -> Tensor:
    chosen = backends.choose("linear_cross_entropy", device, inputs, backend)
    with _autocast.no_autocast(device):
        return _watch.run("linear_cross_entropy", _loss_by, chosen, reference.linear_cross_entropy, inputs)


def _loss_by(
    chosen: Implementation, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *options: Any
) -> Tensor:
    if chosen.differentiable:
        return chosen.module.linear_cross_entropy(x, weight, bias, target, *options)
    shape, target = target.shape, target.reshape(-1).contiguous()
    needs = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (x, weight, bias)]
    call = LossCall._make((_checks.as_matrix(x), weight, bias, target, *options, needs))
    (loss,) = _LinearCrossEntropy.apply(call, chosen)
    return loss.view(shape) if options[-1] == "none" else loss


def _made_in_forward(dtype: torch.dtype, reduction: str) -> bool:
    """Whether the forward makes the gradients: not where dloss has a value a row, or must come before the rounding.

    float16 overflows and underflows early; loss scaling, which prevents it, arrives with dloss.
    """
    return reduction != "none" and dtype != torch.float16


def _in_forward(call: LossCall) -> LossCall:
    return call if _made_in_forward(call.x.dtype, call.reduction) else call._replace(wanted=[False] * 3)


class _LinearCrossEntropy(Operator, name="linear_cross_entropy"):
    """The forward makes the loss and, where _made_in_forward, the gradients that are needed; no logits are kept."""

    results, outputs, inputs, call = 1, 4, 3, LossCall

    @staticmethod
    def forward(call: LossCall, backend: Implementation) -> tuple[Tensor | None, ...]:
        loss, grads = backend.module.linear_cross_entropy_fwd(_in_forward(call))
        return loss, *grads

    @staticmethod
    def forward_fake(call: LossCall, backend: Implementation) -> tuple[Tensor | None, ...]:
        x, dtype = call.x, torch.promote_types(call.x.dtype, torch.float32)
        loss = x.new_empty(call.target.shape if call.reduction == "none" else (), dtype=dtype)
        return loss, *_empty_gradients(call, _in_forward(call).wanted)

    @staticmethod
    def keep(call: LossCall, outputs: tuple[Tensor, ...]) -> tuple[LossCall, Grads]:
        return call, outputs[1:] if _made_in_forward(call.x.dtype, call.reduction) else ()

    @staticmethod
    def backward(gradients: Callable[..., Grads], dresults: Grads, call: LossCall, saved: Grads, *others: Any) -> Grads:
        return _times(saved, dresults[0]) if saved else gradients(dresults, call, saved, *others)

    @staticmethod
    def gradients(dresults: Grads, call: LossCall, saved: Grads, needs: Needs, backend: Implementation) -> Grads:
        call = call._replace(wanted=list(needs[:3]))
        return backend.module.linear_cross_entropy_bwd(dresults[0].contiguous(), call)

    @staticmethod
    def gradients_fake(dresults: Grads, call: LossCall, saved: Grads, needs: Needs, backend: Implementation) -> Grads:
        return _empty_gradients(call, needs)


def _empty_gradients(call: LossCall, needs: Needs) -> tuple[Tensor | None, ...]:
    return tuple(call.x.new_empty(t.shape) if need else None for t, need in zip(call[:3], needs, strict=False))


def _times(grads: Sequence[Tensor | None], dloss: Tensor) -> tuple[Tensor | None, ...]:
    """grads * dloss. On a CPU the grads themselves, where dloss is 1 and this backward does not keep the graph.

    What is returned may become the .grad of a leaf, which is changed in place: a graph that is kept needs its own.
    """
    can_read = type(dloss) is Tensor and can_read_values(dloss)
    if can_read and dloss.item() == 1 and not torch._C._autograd._get_current_graph_task_keep_graph():
        return tuple(grads)
    return tuple([None if grad is None else grad * dloss for grad in grads])
