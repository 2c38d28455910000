"""The CUDA room of the linear layer with cross-entropy. Formula, floor and kernel: csrc/linear_cross_entropy/.

    logits = x weight^T;    dlogits: the kernel, which adds the bias
    dx = dlogits weight;    dweight = dlogits^T x;    dbias = column sums of dlogits

The three products are cuBLAS's, which no kernel of ours would better: csrc/linear_cross_entropy/linear_cross_entropy.h.
Logits exist once, in x's dtype, and dlogits takes their place. One launch serves all tokens; only where their logits
exceed LOGITS_BYTES are tokens cut into chunks, as each adds a pass over weight's gradient in float32. Nothing waits for
the device: the count of targets that are not ignored stays there, ignored rows are computed with the others, and their
rows of x are 0 before dlogits^T x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.cuda import DTYPES, address, device_index, extension, refuse_device, stream

LOGITS_BYTES = 1 << 30  # 16k tokens of 32k classes, 4k of 128k: still enough rows for cuBLAS's best
ALIGNMENT = 64  # elements: rows begin at multiples of it, so that odd class counts too are read 16 bytes at a time


def why_not(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    label_smoothing: float,
    ignore_index: int,
    logit_scale: float,
    reduction: str,
) -> str | None:
    """None, or what is refused and what was got."""
    if reason := refuse_device(x):
        return reason
    if x.dtype not in DTYPES:
        return f"CUDA linear cross-entropy takes float32, bfloat16 and float16, got {x.dtype}"
    return None


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
    """x (tokens, d), target (tokens,), both contiguous. needs: whether to make the gradients of x, weight, bias now.

    Returns the loss, (tokens,) where reduction is "none", and these gradients for a dloss of 1, None where not made.
    """
    keep = target != ignore_index
    count = keep.sum() if reduction == "mean" else None
    options = (label_smoothing, ignore_index, logit_scale)
    losses, grads = _walk(None, count, keep, x, weight, bias, target, options, needs)
    if reduction == "none":
        return losses, grads
    return losses.sum() if count is None else losses.sum() / count, grads


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
    """The gradients of x, weight, bias from the logits, made again. dloss: as the loss, contiguous."""
    keep = target != ignore_index
    count = keep.sum() if reduction == "mean" else None
    options = (label_smoothing, ignore_index, logit_scale)
    return _walk(dloss, count, keep, x, weight, bias, target, options, needs)[1]


def _walk(
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
        logits = _empty_logits(len(x[rows]), n_class, x)
        torch.mm(x[rows], weight.t(), out=logits)
        of_rows = dloss if dloss is None or dloss.dim() == 0 else dloss[rows]
        cross_entropy_rows(logits, bias, target[rows], losses[rows], of_rows, count, *options, any(needs))
        if needs[0]:
            torch.mm(logits, weight, out=dx[rows])
        if needs[1]:
            dweight = _add(dweight, logits.t() @ x[rows].where(keep[rows].unsqueeze(1), 0))
        if needs[2]:
            dbias = _add(dbias, logits.sum(0))
    dweight, dbias = (None if grad is None else grad.to(x.dtype) for grad in (dweight, dbias))
    return losses, (dx, dweight, dbias)


def _empty_logits(rows: int, n_class: int, like: Tensor) -> Tensor:
    """(rows, n_class) of like's dtype and device, rows beginning at multiples of ALIGNMENT."""
    shape = rows, -(-n_class // ALIGNMENT) * ALIGNMENT
    # PyTorch's bfloat16 product on a CPU, where tests run, multiplies what follows an odd row by 0: it must not be NaN.
    return (like.new_zeros(shape) if like.device.type == "cpu" else like.new_empty(shape))[:, :n_class]


def cross_entropy_rows(
    logits: Tensor,
    bias: Tensor | None,
    target: Tensor,
    losses: Tensor,
    dloss: Tensor | None,
    count: Tensor | None,
    label_smoothing: float,
    ignore_index: int,
    logit_scale: float,
    needs_gradient: bool,
) -> None:
    """Writes losses (rows,) float32 and, if asked, each row's gradient over its logits (rows, classes), last stride 1.

    bias: (classes,) contiguous, added to each row, or None.    target: (rows,) int64.
    dloss: (rows,) or () float32, None is 1.    count: () int64, divides the gradient, or None.
    """
    rows, n_class = logits.shape
    extension(logits.device).cross_entropy_rows(
        address(logits), address(bias), address(target), address(losses), address(dloss), address(count),
        rows, logits.stride(0), n_class, 0 if dloss is None or dloss.dim() == 0 else 1,
        ignore_index, logit_scale, 1 - label_smoothing, label_smoothing / n_class,
        needs_gradient, DTYPES[logits.dtype], device_index(logits), stream(logits),
    )  # fmt: skip


def _add(total: Tensor | None, part: Tensor) -> Tensor:
    """The sum over chunks, in float32 where there is more than one."""
    return part if total is None else total.float().add_(part)
