"""The linear layer with cross-entropy, chunk by chunk of tokens.   Specification: fastattn/backends/reference/

    logits = x weight^T;    dlogits: a backend's kernel over rows                  linear_cross_entropy.py
    dx = dlogits weight;    dweight = dlogits^T x;    dbias = column sums of dlogits

aten and Triton share this: each has a RowKernel. The three products are PyTorch's. Logits exist once, in x's
dtype, and the kernel writes dlogits in their place: of a reduced loss only the gradients outlive the forward. One
launch does all tokens. They are cut into chunks only if their logits exceed LOGITS_BYTES. Weight's gradient is then
added up in float32, which costs 8 bytes of traffic for each of its elements and chunk. Nothing waits for the device:
the count of targets that are not ignored stays there, ignored rows are computed with the others, and their rows of x
are 0 before dlogits^T x.

Floor, n tokens, width d, v classes: 6 n d v FLOP, and 4 n v elements of logits written and read; float32 logits and a
softmax kept between separate operators are 12 n v or more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn.backends.cpu_matmul import mm

LOGITS_BYTES = 1 << 30  # 16k tokens of 32k classes, 4k of 128k: still enough rows for cuBLAS's best

Gradients = tuple[Tensor | None, ...]


class RowKernel(NamedTuple):
    """What a backend provides.

    cross_entropy_rows(logits, bias, target, losses, dloss, count, label_smoothing, ignore_index, logit_scale,
    needs_gradient) writes losses and, if needs_gradient, the gradient in place of logits. It adds the bias and scales.
    count: what a mean divides by, else None. A number where ignore_index is None: no row is ignored.
    logits(x, weight, bias, logit_scale): memory with the logits, without bias and scale if the kernel adds them.
    ignored_rows_are_zero: the backend passes x without the rows of ignored targets, or with zeros there.
    """

    cross_entropy_rows: Callable[..., None]
    logits: Callable[[Tensor, Tensor, Tensor | None, float], Tensor]
    ignored_rows_are_zero: bool = False


def forward(kernel: RowKernel, *call: Any) -> tuple[Tensor, Gradients]:
    """The loss, and the gradients of x, weight, bias for a dloss of 1. call: see _losses_and_grads, from x on."""
    losses, count, grads = _losses_and_grads(kernel, None, *call)
    if call[-2] == "none":
        return losses, grads
    loss = losses.sum(dtype=torch.float64)  # thousands of float32 terms, of which an error is all the loss's
    return (loss if count is None else loss / count).to(losses.dtype), grads


def backward(kernel: RowKernel, dloss: Tensor, *call: Any) -> Gradients:
    """The gradients of x, weight, bias from the logits, made again. dloss: as the loss, contiguous."""
    return _losses_and_grads(kernel, dloss, *call)[2]


def _losses_and_grads(
    kernel: RowKernel,
    dloss: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    label_smoothing: float,
    ignore_index: int | None,
    logit_scale: float,
    reduction: str,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor | int | None, Gradients]:
    """Losses (tokens,); the count that a mean divides by, or None; the gradients that `needs` selects, else None.

    x (tokens, d), target (tokens,), both contiguous. dloss: (tokens,) if reduction is "none", else (); None is 1.
    """
    tokens, options = len(target), (label_smoothing, ignore_index, logit_scale)
    valid, count = None if ignore_index is None else target != ignore_index, None
    if reduction == "mean":
        count = tokens if valid is None else valid.sum()
    bias = None if bias is None else bias.contiguous()
    acc = torch.promote_types(x.dtype, torch.float32)
    losses = torch.empty(tokens, dtype=acc, device=x.device)
    dx, dweight, dbias = [], None, None
    step = max(LOGITS_BYTES // (len(weight) * x.element_size()), 1)
    for start in range(0, max(tokens, 1), step):  # at least once: gradients of no tokens are 0
        part = x, target, losses, dloss
        if tokens > step:
            part = (t if t is None or t.dim() == 0 else t[start : start + step] for t in part)
        x_rows, target_rows, losses_rows, dloss_rows = part
        logits = kernel.logits(x_rows, weight, bias, logit_scale)
        kernel.cross_entropy_rows(logits, bias, target_rows, losses_rows, dloss_rows, count, *options, any(needs))
        if needs[0]:
            dx.append(mm(logits, weight))
        if needs[1]:
            if not (valid is None or kernel.ignored_rows_are_zero):
                valid_rows = valid if tokens <= step else valid[start : start + step]
                x_rows = x_rows.where(valid_rows.unsqueeze(1), 0)
            dweight = _add(dweight, mm(logits.t(), x_rows), acc)
        if needs[2]:
            dbias = _add(dbias, logits.sum(0), acc)
    if tokens > step:
        dx = [torch.cat(dx)] if dx else []
        dweight, dbias = [None if grad is None else grad.to(x.dtype) for grad in (dweight, dbias)]
    return losses, count, (dx[0] if dx else None, dweight, dbias)


def _add(total: Tensor | None, part: Tensor, acc: torch.dtype) -> Tensor:
    """The sum over chunks, in acc where there is more than one."""
    return part if total is None else total.to(acc).add_(part)
