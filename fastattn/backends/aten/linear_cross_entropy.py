"""A linear layer and its cross-entropy by PyTorch's own operators, keeping no logits for the backward.

The loop over chunks of tokens is fastattn/backends/cross_entropy_chunks.py. Float32 exists for a block of rows at a
time. On a CPU the block fits into the cache, so that the passes over it cost little next to the products. On a CPU
ignored rows are left out of everything. On a GPU this would wait for their number: they are computed with the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.backends import cross_entropy_chunks as chunks
from fastattn.backends.calls import LossCall
from fastattn.backends.cpu_matmul import product, uses_onednn

BLOCK_BYTES = {"cpu": 1 << 20, "cuda": 1 << 27}  # of a block in float32; on a CPU about half of a core's L2 cache
# In float32 on a CPU logits so far below the largest of their row count as -inf: denormal numbers are slow, in exp and,
# divided by the number of tokens, in what follows.
SMALLEST_LOG_P = -80.0


def linear_cross_entropy_fwd(call: LossCall) -> tuple[Tensor, chunks.Gradients]:
    """As fastattn.backends.cross_entropy_chunks.forward."""
    tokens, (call, valid_index) = len(call.target), _without_ignored(call)
    loss, (dx, *grads) = chunks.forward(_KERNEL, call)
    loss = _expand(loss, valid_index, tokens) if loss.dim() > 0 else loss
    return loss, (_expand(dx, valid_index, tokens), *grads)


def linear_cross_entropy_bwd(dloss: Tensor, call: LossCall) -> chunks.Gradients:
    """As fastattn.backends.cross_entropy_chunks.backward."""
    tokens, (call, valid_index) = len(call.target), _without_ignored(call)
    if valid_index is not None and dloss.dim() > 0:
        dloss = dloss.index_select(0, valid_index)
    dx, *grads = chunks.backward(_KERNEL, dloss, call)
    return _expand(dx, valid_index, tokens), *grads


def _without_ignored(call: LossCall) -> tuple[LossCall, Tensor | None]:
    """The call and, on a CPU, the numbers of the rows that are left, or None if these are all."""
    x, target, valid = call.x, call.target, call.target != call.ignore_index
    if not _can_count(x):
        return call._replace(x=x.where(valid.unsqueeze(1), 0)), None
    valid_index = valid.nonzero().squeeze(1)
    if len(valid_index) == len(target):
        return call._replace(ignore_index=None), None
    x, target = x.index_select(0, valid_index), target.index_select(0, valid_index)
    return call._replace(x=x, target=target, ignore_index=None), valid_index


def _can_count(x: Tensor) -> bool:
    """Whether the number of ignored rows can be read without waiting for a device."""
    return x.device.type == "cpu"


def _expand(t: Tensor | None, valid_index: Tensor | None, tokens: int) -> Tensor | None:
    """With rows of 0 where rows were left out."""
    if t is None or valid_index is None:
        return t
    return t.new_zeros(tokens, *t.shape[1:]).index_copy_(0, valid_index, t)


def _scaled_linear(call: LossCall) -> Tensor:
    """logit_scale * (x weight^T + bias), rounded once."""
    x, weight, bias, scale = call.x, call.weight, call.bias, call.logit_scale
    if uses_onednn(x, weight):
        return product(x * scale, weight, None if bias is None else bias * scale)
    if bias is None:
        bias, beta = x.new_empty(()), 0.0  # a factor of 0: it is not even read
    else:
        beta = scale
    return torch.addmm(bias, x, weight.t(), beta=beta, alpha=scale)


def _cross_entropy_rows(
    call: LossCall, logits: Tensor, losses: Tensor, dloss: Tensor | None, count: Tensor | None
) -> None:
    """As fastattn.backends.cross_entropy_chunks.RowKernel has it, of scaled logits with their bias.

    log_softmax and its gradient compute exp twice and need two more blocks of memory: on one core of an Intel Xeon, 256
    rows of 8000 logits, 5.9 ms in place of 3.6. addcmul with columns takes 2.9 times as long as mul_ and sub_.
    """
    _, _, _, target, label_smoothing, ignore_index, logit_scale, _, wanted = call
    (rows, n_class), acc, label, valid = logits.shape, losses.dtype, target, None
    rate = torch.full((), logit_scale, dtype=acc, device=logits.device)  # times softmax - target: the gradient
    rate = rate if dloss is None else rate * dloss
    rate = rate if count is None else rate / count
    if ignore_index is not None:
        valid = target != ignore_index
        label, rate = target.where(valid, 0), torch.where(valid, rate, 0)
    columns = label.unsqueeze(1), losses.unsqueeze(1), rate.expand(rows).unsqueeze(1)
    block = BLOCK_BYTES.get(logits.device.type, chunks.LOGITS_BYTES) // (n_class * acc.itemsize)
    block = max(min(block, rows), 1)
    # One for all blocks: memory that is warm.
    space = None if logits.dtype == acc else torch.empty(block, n_class, dtype=acc, device=logits.device)
    on_each = label_smoothing / n_class
    for start in range(0, rows, block):
        part, label, loss, rate = parts = logits, *columns
        if rows > block:
            part, label, loss, rate = [t[start : start + block] for t in parts]
        exps = part if space is None else space[: len(part)].copy_(part)
        exps.sub_(exps.amax(1, keepdim=True))
        torch.gather(exps, 1, label, out=loss).mul_(label_smoothing - 1)
        if label_smoothing > 0:
            loss.sub_(exps.sum(1, keepdim=True), alpha=on_each)
        if logits.device.type == "cpu" and acc is torch.float32:
            torch.threshold_(exps, SMALLEST_LOG_P, -torch.inf)  # keeps NaN
        sums = exps.exp_().sum(1, keepdim=True)
        loss.add_(sums.log())
        if not any(wanted):
            continue
        exps.mul_(rate / sums).scatter_add_(1, label, rate * (label_smoothing - 1))
        if label_smoothing > 0:
            exps.sub_(rate * on_each)
        if exps is not part:
            part.copy_(exps)
    if valid is not None:
        losses.masked_fill_(~valid, 0)


_KERNEL = chunks.RowKernel(_cross_entropy_rows, _scaled_linear, ignored_rows_are_zero=True)
