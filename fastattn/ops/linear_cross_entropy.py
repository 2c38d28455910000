"""Public op: the output projection and its label-smoothed cross-entropy."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastattn import _dispatch
from fastattn.ops import _arguments as arguments
from fastattn.ops import _library_cross_entropy as _library

REDUCTIONS = ("none", "mean", "sum")
SMOOTH_OVER = ("all", "others")


def _query(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    smooth_over: str = "all",
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    **options: Any,
) -> tuple[torch.device, tuple[Any, ...]]:
    """Check a call's arguments and bring them into the form that backends take: (device, why_not's arguments)."""
    arguments.check_float("x", x)
    dtype = arguments.autocast_dtype(x.device)
    x = arguments.cast(x, dtype)
    if x.dim() == 0:
        raise ValueError("x has no dimensions, expected (..., d)")
    named = {"weight": weight, "bias": bias}
    for name, t in named.items():
        if t is not None or name == "weight":
            arguments.check_float(name, t)
            named[name] = arguments.cast(t, dtype)
            arguments.check_like(name, named[name], "x", x)
    weight, bias = named.values()
    if weight.dim() != 2 or weight.shape[0] == 0:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, expected (classes, d) with at least one class")
    classes = weight.shape[0]
    arguments.check_shape("weight", weight, (classes, x.shape[-1]), "(classes, d)")
    if bias is not None:
        arguments.check_shape("bias", bias, (classes,), "the rows of weight")
    for name, value in (("label_smoothing", label_smoothing), ("logit_scale", logit_scale)):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must lie between 0 and 1, got {label_smoothing}")
    if not math.isfinite(logit_scale):
        raise ValueError(f"logit_scale must be finite, got {logit_scale}")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index must be an integer, got {type(ignore_index).__name__}")
    for name, value, known in (("reduction", reduction, REDUCTIONS), ("smooth_over", smooth_over, SMOOTH_OVER)):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    target = _checked_target(target, x, classes, ignore_index)
    if smooth_over == "others":  # a share of eps / (classes - 1) for each of the others is this one for each of all
        label_smoothing = label_smoothing * classes / (classes - 1) if classes > 1 else 0.0
    call = (x, weight, bias, target, float(label_smoothing), ignore_index, float(logit_scale), reduction)
    return x.device, call


def _checked_target(target: Tensor, x: Tensor, classes: int, ignore_index: int) -> Tensor:
    """target in int64. Its values are looked at on a CPU only: on a GPU that would wait for it."""
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a Tensor, got {type(target).__name__}")
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise TypeError(f"target has dtype {target.dtype}, expected integers: the number of each right class")
    arguments.check_shape("target", target, tuple(x.shape[:-1]), "the leading dimensions of x")
    if target.device != x.device:
        raise ValueError(f"target is on {target.device}, expected {x.device} as x")
    target = target.long()
    if target.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
        if wrong.any():
            raise ValueError(
                f"target has the value {target[wrong][0]}, expected 0 to {classes - 1} or ignore_index={ignore_index}"
            )
    return target


@_dispatch.register("linear_cross_entropy", _query)
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    smooth_over: str = "all",
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    backend: str | None = None,
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
    reduction: "none", "sum", or "mean" over the rows that are not ignored: NaN if all are, as in torch, with
        gradients 0.
    backend: "reference", "aten", "triton" or "cuda"; default the first that can serve, see ``explain``.

    Returns the loss, (...) or (), in float32 (float64 of float64).
    A reduced loss makes its gradients in the forward, where the logits are; "none", and float16, whose gradients must
    not be rounded before a loss scale has multiplied them, compute the logits a second time in the backward.
    Raises TypeError or ValueError naming the argument, RuntimeError if the backend asked for cannot serve.
    """
    device, call = _query(
        x,
        weight,
        target,
        bias,
        label_smoothing=label_smoothing,
        smooth_over=smooth_over,
        ignore_index=ignore_index,
        logit_scale=logit_scale,
        reduction=reduction,
    )
    name, module = _dispatch.choose("linear_cross_entropy", device, call, backend)
    with arguments.no_autocast(device):
        if hasattr(module, "linear_cross_entropy"):
            return module.linear_cross_entropy(*call)
        x, weight, bias, target, *options = call
        inputs = (arguments.as_matrix(x), weight, bias, target.reshape(-1).contiguous(), *options)
        asked = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in inputs[:3]]
        if torch.compiler.is_compiling():
            loss = _library.linear_cross_entropy(*inputs, asked, name)
        else:
            loss = _LinearCrossEntropy.apply(*inputs, asked, module)
    return loss.view(target.shape) if reduction == "none" else loss


class _LinearCrossEntropy(torch.autograd.Function):
    """Straight from autograd to the launch. What is kept is the gradients, or the inputs; no logits."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        label_smoothing: float,
        ignore_index: int,
        logit_scale: float,
        reduction: str,
        asked: list[bool],
        module: Any,
    ) -> Tensor:
        options = (label_smoothing, ignore_index, logit_scale, reduction)
        now = _library.made_in_forward(x.dtype, reduction)
        needs = tuple(asked) if now else (False, False, False)
        loss, grads = module.linear_cross_entropy_fwd(x, weight, bias, target, *options, needs)
        ctx.save_for_backward(*(grads if now else (x, weight, bias, target)))
        ctx.options = (now, options, tuple(asked), module)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        now, options, asked, module = ctx.options
        if now:
            grads = tuple(_times(grad, dloss) for grad in ctx.saved_tensors)
        else:
            grads = module.linear_cross_entropy_bwd(dloss.contiguous(), *ctx.saved_tensors, *options, asked)
        return *grads, None, None, None, None, None, None, None


def _times(grad: Tensor | None, dloss: Tensor) -> Tensor | None:
    """grad * dloss; as it is where looking shows that dloss is 1, which on a CPU does not wait."""
    if grad is None or (dloss.device.type == "cpu" and dloss.item() == 1):
        return grad
    return grad * dloss
