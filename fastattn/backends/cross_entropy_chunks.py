"""Logits, losses and gradients of the linear layer with cross-entropy.   Specification: fastattn/backends/reference/

    logits = x weight^T;    dlogits: a backend's kernel, which adds the bias       linear_cross_entropy.py
    dx = dlogits weight;    dweight = dlogits^T x;    dbias = column sums of dlogits

Triton and CUDA share this: each brings its own kernel over rows. The three products are cuBLAS's. Logits
exist once, in x's dtype, and the kernel writes dlogits in their place, so that of a reduced loss nothing but the
gradients outlives the forward. One launch serves all tokens; only where their logits exceed LOGITS_BYTES are tokens
cut into chunks, and weight's gradient is then added up in float32 (8 bytes of traffic for each of its elements a
chunk: why memory alone asks for it). Nothing waits for the device: the count of targets that are not ignored stays
there, ignored rows are computed with the others, and their rows of x are 0 before dlogits^T x.

Floor, n tokens, width d, v classes: 6 n d v FLOP, and 4 n v elements of logits written and read; float32 logits and a
softmax kept between separate operators are 12 n v or more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

LOGITS_BYTES = 1 << 30  # 16k tokens of 32k classes, 4k of 128k: still enough rows for cuBLAS's best


class Rows(NamedTuple):
    """A backend's kernel, and memory as it wants to read it.

    cross_entropy_rows(logits, bias, target, losses, dloss, count, label_smoothing, ignore_index, logit_scale,
    needs_gradient) writes losses and, if asked, the gradient in place of logits, which come from empty_logits(rows,
    n_class, like).
    """

    cross_entropy_rows: Callable[..., None]
    empty_logits: Callable[[int, int, Tensor], Tensor]


def forward(
    backend: Rows,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    label_smoothing: float,
    ignore_index: int,
    logit_scale: float,
    reduction: str,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """x (tokens, d), target (tokens,), both contiguous. needs: whether to make the gradients of x, weight, bias now.

    Returns the loss, (tokens,) where reduction is "none", and these gradients for a dloss of 1, None where not made.
    """
    keep = target != ignore_index
    count = keep.sum() if reduction == "mean" else None
    options = (label_smoothing, ignore_index, logit_scale)
    losses, grads = _chunked_losses_and_grads(backend, None, count, keep, x, weight, bias, target, options, needs)
    if reduction == "none":
        return losses, grads
    return losses.sum() if count is None else losses.sum() / count, grads


def backward(
    backend: Rows,
    dloss: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    label_smoothing: float,
    ignore_index: int,
    logit_scale: float,
    reduction: str,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight, bias from the logits, made again. dloss: as the loss, contiguous."""
    keep = target != ignore_index
    count = keep.sum() if reduction == "mean" else None
    options = (label_smoothing, ignore_index, logit_scale)
    return _chunked_losses_and_grads(backend, dloss, count, keep, x, weight, bias, target, options, needs)[1]


def _chunked_losses_and_grads(
    backend: Rows,
    dloss: Tensor | None,
    count: Tensor | None,
    keep: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    options: tuple[float, int, float],
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Losses (tokens,) and gradients, chunk by chunk. keep: (tokens,), False where ignored."""
    (tokens, _), n_class = x.shape, len(weight)
    bias = None if bias is None else bias.contiguous()
    losses = torch.empty(tokens, dtype=torch.float32, device=x.device)
    dx, dweight, dbias = torch.empty_like(x) if needs[0] else None, None, None
    step = max(LOGITS_BYTES // (n_class * x.element_size()), 1)
    for start in range(0, max(tokens, 1), step):  # at least once: gradients of no tokens are 0
        rows = slice(start, start + step)
        logits = backend.empty_logits(len(x[rows]), n_class, x)
        torch.mm(x[rows], weight.t(), out=logits)
        of_rows = dloss if dloss is None or dloss.dim() == 0 else dloss[rows]
        backend.cross_entropy_rows(logits, bias, target[rows], losses[rows], of_rows, count, *options, any(needs))
        if needs[0]:
            torch.mm(logits, weight, out=dx[rows])
        if needs[1]:
            dweight = _add(dweight, logits.t() @ x[rows].where(keep[rows].unsqueeze(1), 0))
        if needs[2]:
            dbias = _add(dbias, logits.sum(0))
    dweight, dbias = (None if grad is None else grad.to(x.dtype) for grad in (dweight, dbias))
    return losses, (dx, dweight, dbias)


def _add(total: Tensor | None, part: Tensor) -> Tensor:
    """The sum over chunks, in float32 where there is more than one."""
    return part if total is None else total.float().add_(part)
