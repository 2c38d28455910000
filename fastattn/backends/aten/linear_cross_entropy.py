"""A linear layer and its cross-entropy by PyTorch's own operators, keeping no logits for the backward.

The logits of a chunk of tokens exist once, in x's dtype; their gradient takes their place and is multiplied at once.
Float32 exists for a block of rows at a time, on a CPU small enough to stay in its cache, so that the passes over it
cost little beside the products. On a CPU ignored rows are left out of everything; on a GPU, where leaving them out
would wait for their number, they are computed and multiplied by 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.backends.cpu_matmul import product, uses_onednn

LOGITS_BYTES = 1 << 30  # of a chunk's logits: a cut costs a pass over weight's gradient, so only memory makes one
BLOCK_BYTES = {"cpu": 1 << 20, "cuda": 1 << 27}  # of a block in float32; on a CPU about half of a core's L2 cache


def linear_cross_entropy_fwd(
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
    """x (tokens, d), target (tokens,). needs: whether to make the gradients of x, weight, bias now.

    Returns the loss, (tokens,) where reduction is "none", and these gradients for a dloss of 1, None where not made.
    """
    options = (label_smoothing, ignore_index, logit_scale, reduction, needs)
    losses, grads = _chunked_losses_and_grads(None, x, weight, bias, target, *options)
    if reduction == "none":
        return losses, grads
    return losses.sum() if reduction == "sum" else losses.sum() / (target != ignore_index).sum(), grads


def linear_cross_entropy_bwd(
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
    """The gradients of x, weight, bias from the logits, made again. dloss: as the loss."""
    options = (label_smoothing, ignore_index, logit_scale, reduction, needs)
    return _chunked_losses_and_grads(dloss, x, weight, bias, target, *options)[1]


def _chunked_losses_and_grads(
    dloss: Tensor | None,
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
    """Losses (tokens,) and gradients, chunk by chunk. dloss: None is 1."""
    tokens, keep = len(target), target != ignore_index
    acc = torch.promote_types(x.dtype, torch.float32)
    rate = None  # (rows,): the gradient of a row's loss, times the scale that its logits were made with
    if any(needs):
        rate = torch.full((), logit_scale, dtype=acc, device=x.device) * (1 if dloss is None else dloss)
        rate = torch.where(keep, rate / keep.sum() if reduction == "mean" else rate, 0)
    kept = None
    if not _can_read_values(x):
        x, target = x.where(keep.unsqueeze(1), 0), target.where(keep, 0)
    elif not keep.all():
        kept = keep.nonzero().squeeze(1)
        x, target, rate = x[kept], target[kept], None if rate is None else rate[kept]

    losses = torch.empty(len(x), dtype=acc, device=x.device)
    dx, dweight, dbias = torch.empty_like(x) if needs[0] else None, None, None
    step = max(LOGITS_BYTES // (len(weight) * x.element_size()), 1)
    for start in range(0, max(len(x), 1), step):  # at least once: gradients of no tokens are 0
        rows = slice(start, start + step)
        logits = _scaled_linear(x[rows], weight, bias, logit_scale)
        chunk_rate = None if rate is None else rate[rows]
        _cross_entropy_(logits, target[rows], chunk_rate, label_smoothing, losses[rows])
        if needs[0]:
            dx[rows] = product(logits, weight.t())
        if needs[1]:
            dweight = _add(dweight, product(logits.t(), x[rows].t()), acc)
        if needs[2]:
            dbias = _add(dbias, logits.sum(0), acc)

    if kept is not None:
        losses = losses.new_zeros(tokens).index_copy_(0, kept, losses)
        dx = dx if dx is None else dx.new_zeros(tokens, dx.shape[1]).index_copy_(0, kept, dx)
    elif not _can_read_values(x):
        losses = losses.where(keep, 0)
    dweight, dbias = (None if grad is None else grad.to(x.dtype) for grad in (dweight, dbias))
    return losses, (dx, dweight, dbias)


def _can_read_values(x: Tensor) -> bool:
    """Whether the number of ignored rows can be read without waiting for a device."""
    return x.device.type == "cpu"


def _scaled_linear(x: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """scale * (x weight^T + bias), rounded once."""
    if uses_onednn(x, weight):
        return product(x * scale, weight, None if bias is None else bias * scale)
    if bias is None:
        bias, beta = x.new_zeros(()), 0.0  # of which a product of 0 is not even read
    else:
        beta = scale
    return torch.addmm(bias, x, weight.t(), beta=beta, alpha=scale)


def _add(total: Tensor | None, part: Tensor, acc: torch.dtype) -> Tensor:
    """The sum over chunks, in float32 where there is more than one."""
    return part if total is None else total.to(acc).add_(part)


def _cross_entropy_(
    logits: Tensor, target: Tensor, rate: Tensor | None, label_smoothing: float, losses: Tensor
) -> None:
    """Writes losses (rows,) and, given a rate, rate * (softmax - target distribution) in place of logits."""
    (rows, classes), acc = logits.shape, losses.dtype
    block = BLOCK_BYTES.get(logits.device.type, LOGITS_BYTES) // (classes * acc.itemsize)
    block = max(min(block, rows), 1)
    space = logits.new_empty(block, classes, dtype=acc)  # one for all blocks: memory that is warm
    row = torch.arange(block, device=logits.device)
    for start in range(0, rows, block):
        part = slice(start, start + block)
        label = target[part]
        here = row[: len(label)]
        log_p = torch.log_softmax(logits[part], 1, dtype=acc, out=space[: len(label)])
        loss = -log_p[here, label]
        if label_smoothing > 0:
            loss = (1 - label_smoothing) * loss - label_smoothing * log_p.mean(1)
        losses[part] = loss
        if rate is not None:
            p = log_p.exp_()
            if label_smoothing > 0:
                p -= label_smoothing / classes
            p[here, label] -= 1 - label_smoothing
            torch.mul(p, rate[part].unsqueeze(1), out=logits[part])
