"""linear_cross_entropy as torch.library operators, for torch.compile, torch.export and opcheck. See _library.py.

One operator makes the loss and, of a reduced loss, the gradients; the other makes the gradients from the inputs. A
gradient that was not asked for is an empty tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn._dispatch import load_backend


def made_in_forward(dtype: torch.dtype, reduction: str) -> bool:
    """Whether the forward makes the gradients: not where dloss has a value a row, or must come before the rounding.

    float16 overflows and underflows early; loss scaling, which prevents it, arrives with dloss.
    """
    return reduction != "none" and dtype != torch.float16


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    label_smoothing: float,
    ignore_index: int,
    logit_scale: float,
    reduction: str,
    asked: list[bool],
    backend: str,
) -> Tensor:
    """The loss, differentiable, as one operator in a traced graph."""
    options = (label_smoothing, ignore_index, logit_scale, reduction, asked, backend)
    return linear_cross_entropy_op(x, weight, bias, target, *options)[0]


def _or_empty(grads: tuple[Tensor | None, ...], like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dbias = (like.new_empty(0) if grad is None else grad for grad in grads)
    return dx, dweight, dbias


def _fake_grads(x: Tensor, weight: Tensor, bias: Tensor | None, needs: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    grads = (x.new_empty(t.shape) if need else None for t, need in zip((x, weight, bias), needs, strict=True))
    return _or_empty(tuple(grads), x)


@torch.library.custom_op("fastattn::linear_cross_entropy", mutates_args=())
def linear_cross_entropy_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    label_smoothing: float,
    ignore_index: int,
    logit_scale: float,
    reduction: str,
    asked: list[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    module = load_backend("linear_cross_entropy", backend)
    needs = asked if made_in_forward(x.dtype, reduction) else [False] * 3
    options = (label_smoothing, ignore_index, logit_scale, reduction, needs)
    loss, grads = module.linear_cross_entropy_fwd(x, weight, bias, target, *options)
    return loss, *_or_empty(grads, x)


@linear_cross_entropy_op.register_fake
def _(x, weight, bias, target, label_smoothing, ignore_index, logit_scale, reduction, asked, backend):
    dtype = torch.promote_types(x.dtype, torch.float32)
    loss = x.new_empty(target.shape if reduction == "none" else (), dtype=dtype)
    needs = asked if made_in_forward(x.dtype, reduction) else [False] * 3
    return loss, *_fake_grads(x, weight, bias, needs)


@torch.library.custom_op("fastattn::linear_cross_entropy_backward", mutates_args=())
def linear_cross_entropy_backward_op(
    dloss: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    label_smoothing: float,
    ignore_index: int,
    logit_scale: float,
    reduction: str,
    asked: list[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    module = load_backend("linear_cross_entropy", backend)
    options = (label_smoothing, ignore_index, logit_scale, reduction, asked)
    return _or_empty(module.linear_cross_entropy_bwd(dloss, x, weight, bias, target, *options), x)


@linear_cross_entropy_backward_op.register_fake
def _(dloss, x, weight, bias, target, label_smoothing, ignore_index, logit_scale, reduction, asked, backend):
    return _fake_grads(x, weight, bias, asked)


def _setup(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    x, weight, bias, target, *options, reduction, asked, backend = inputs
    ctx.now = made_in_forward(x.dtype, reduction)
    ctx.save_for_backward(*(output[1:] if ctx.now else (x, weight, bias, target)))
    ctx.options = (*options, reduction, asked, backend)


def _backward(ctx: Any, dloss: Tensor, *_: Tensor) -> tuple:
    asked = ctx.options[-2]
    if ctx.now:
        grads = tuple(grad * dloss for grad in ctx.saved_tensors)
    else:
        grads = linear_cross_entropy_backward_op(dloss.contiguous(), *ctx.saved_tensors, *ctx.options)
    return *(grad if ask else None for grad, ask in zip(grads, asked, strict=True)), *(None,) * 7


linear_cross_entropy_op.register_autograd(_backward, setup_context=_setup)
