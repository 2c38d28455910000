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
from typing import NamedTuple

import torch
from torch import Tensor

from fastattn.backends.calls import LossCall
from fastattn.backends.cpu_matmul import mm

LOGITS_BYTES = 1 << 30  # 16k tokens of 32k classes, 4k of 128k: still enough rows for cuBLAS's best

Gradients = tuple[Tensor | None, ...]


class RowKernel(NamedTuple):
    """What a backend provides.

    cross_entropy_rows(call, logits, losses, dloss, count) writes losses and, if any is wanted, the gradient in place of
    logits. It adds the bias and scales.
    count: what a mean divides by, else None. A number where ignore_index is None: no row is ignored.
    logits(call): memory with the logits, without bias and scale if the kernel adds them.
    ignored_rows_are_zero: the backend passes x without the rows of ignored targets, or with zeros there.
    """

    cross_entropy_rows: Callable[..., None]
    logits: Callable[[LossCall], Tensor]
    ignored_rows_are_zero: bool = False


def forward(kernel: RowKernel, call: LossCall) -> tuple[Tensor, Gradients]:
    """The loss, and the gradients of x, weight, bias for a dloss of 1."""
    losses, count, grads = _losses_and_grads(kernel, None, call)
    if call.reduction == "none":
        return losses, grads
    loss = losses.sum(dtype=torch.float64)  # thousands of float32 terms, of which an error is all the loss's
    return (loss if count is None else loss / count).to(losses.dtype), grads


def backward(kernel: RowKernel, dloss: Tensor, call: LossCall) -> Gradients:
    """The gradients of x, weight, bias from the logits, made again. dloss: as the loss, contiguous."""
    return _losses_and_grads(kernel, dloss, call)[2]


def _losses_and_grads(
    kernel: RowKernel, dloss: Tensor | None, call: LossCall
) -> tuple[Tensor, Tensor | int | None, Gradients]:
    """Losses (tokens,); the count that a mean divides by, or None; the gradients that are wanted, else None.

    dloss: (tokens,) if reduction is "none", else (); None is 1.
    """
    x, weight, bias, target, *_ = call
    tokens = len(target)
    valid, count = None if call.ignore_index is None else target != call.ignore_index, None
    if call.reduction == "mean":
        count = tokens if valid is None else valid.sum()
    if bias is not None and not bias.is_contiguous():
        call = call._replace(bias=bias.contiguous())
    acc = torch.promote_types(x.dtype, torch.float32)
    losses = torch.empty(tokens, dtype=acc, device=x.device)
    dx, dweight, dbias = [], None, None
    step = max(LOGITS_BYTES // (len(weight) * x.element_size()), 1)
    for start in range(0, max(tokens, 1), step):  # at least once: gradients of no tokens are 0
        part, losses_rows, dloss_rows, valid_rows = call, losses, dloss, valid
        if tokens > step:
            rows = slice(start, start + step)
            part, losses_rows = call._replace(x=x[rows], target=target[rows]), losses[rows]
            dloss_rows = dloss if dloss is None or dloss.dim() == 0 else dloss[rows]
            valid_rows = None if valid is None else valid[rows]
        logits = kernel.logits(part)
        kernel.cross_entropy_rows(part, logits, losses_rows, dloss_rows, count)
        if call.wanted[0]:
            dx.append(mm(logits, weight))
        if call.wanted[1]:
            x_rows = part.x
            if not (valid_rows is None or kernel.ignored_rows_are_zero):
                x_rows = x_rows.where(valid_rows.unsqueeze(1), 0)
            dweight = _add(dweight, mm(logits.t(), x_rows), acc)
        if call.wanted[2]:
            dbias = _add(dbias, logits.sum(0), acc)
    if tokens > step:
        dx = [torch.cat(dx)] if dx else []
        dweight, dbias = [None if grad is None else grad.to(x.dtype) for grad in (dweight, dbias)]
    return losses, count, (dx[0] if dx else None, dweight, dbias)


def _add(total: Tensor | None, part: Tensor, acc: torch.dtype) -> Tensor:
    """The sum over chunks, in acc where there is more than one."""
    return part if total is None else total.to(acc).add_(part)
