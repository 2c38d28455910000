"""The CUDA kernel over rows of logits against the formula in float64, with every buffer between guards."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from helpers import assert_close_as_torch
from torch import Tensor

from fastattn.backends.cuda import linear_cross_entropy as backend
from fastattn.check.tolerance import measure_rounding_scale

IGNORED = -7
GUARD = 40  # elements before and after each buffer


class Case(NamedTuple):
    classes: int
    dtype: torch.dtype = torch.float32
    rows: int = 9
    label_smoothing: float = 0.1
    logit_scale: float = 0.7
    bias: bool = True
    dloss: str = "rows"  # or "one", or "none"
    mean: bool = True
    gap: int | None = None  # elements between rows; None: rows begin at multiples of 64
    shift: int = 0  # elements by which the logits start after a 16-byte boundary

    def __str__(self) -> str:
        words = [f"{self.rows}x{self.classes}", str(self.dtype).removeprefix("torch.")]
        words += [
            f"{name}{value}" for name, value in self._asdict().items() if name not in ("rows", "classes", "dtype")
        ]
        return "-".join(words)


class Results(NamedTuple):
    losses: Tensor
    gradient: Tensor | None


class Guarded:
    """A matrix inside poisoned memory, of which only the matrix may change."""

    def __init__(self, values: Tensor, gap: int = 0, shift: int = 0) -> None:
        rows, columns = values.shape
        size = 2 * GUARD + shift + rows * (columns + gap)
        self.whole = torch.full((size,), torch.nan, dtype=values.dtype, device=values.device)
        self.matrix = self.whole[GUARD + shift :].as_strided((rows, columns), (columns + gap, 1)).copy_(values)

    def check(self) -> None:
        outside = self.whole.clone()
        start = self.matrix.storage_offset() - self.whole.storage_offset()
        outside[start:].as_strided(self.matrix.shape, self.matrix.stride()).fill_(torch.nan)
        assert outside.isnan().all(), "the kernel wrote outside its rows"


def formula(case: Case, logits: Tensor, bias: Tensor | None, target: Tensor, dloss: Tensor, count: int) -> Results:
    """losses and the gradient of logits, calculated in dloss's dtype."""
    keep = target != IGNORED
    z = case.logit_scale * (logits.to(dloss.dtype) + (0 if bias is None else bias.to(dloss.dtype)))
    z, label = z.where(keep[:, None], 0), target.where(keep, 0)
    log_p = F.log_softmax(z, 1)
    eps = case.label_smoothing
    wanted = ((1 - eps) * F.one_hot(label, case.classes).to(z) + eps / case.classes) * keep[:, None]
    rate = (case.logit_scale * dloss / count * keep)[:, None]
    return Results(-(wanted * log_p).sum(1), (z.softmax(1) - wanted) * rate)


def inputs(case: Case, device: torch.device) -> tuple[Tensor, Tensor | None, Tensor]:
    """Logits, bias, target; the second row is ignored and full of NaN, the last row wants the last class."""
    g = torch.Generator().manual_seed(case.classes)
    logits = 2 * torch.randn(case.rows, case.classes, generator=g)
    bias = torch.randn(case.classes, generator=g).to(device, case.dtype) if case.bias else None
    target = torch.randint(0, case.classes, (case.rows,), generator=g)
    target[-1] = case.classes - 1
    if case.rows > 1:
        logits[1], target[1] = torch.nan, IGNORED
    return logits.to(device, case.dtype), bias, target.to(device)


def run(case: Case, device: torch.device, needs_gradient: bool = True) -> Results:
    """The kernel on a case's inputs, judged."""
    values, bias, target = inputs(case, device)
    gap = -case.classes % 64 if case.gap is None else case.gap
    logits = Guarded(values, gap, case.shift)
    losses = Guarded(torch.full((1, case.rows), torch.nan, device=device))
    g = torch.Generator().manual_seed(1)
    every = torch.randn(case.rows, generator=g).to(device)
    dloss = {"rows": every, "one": every[0].clone(), "none": None}[case.dloss]
    count = torch.tensor(3, device=device) if case.mean else None
    options = (case.label_smoothing, IGNORED, case.logit_scale, needs_gradient)
    backend.cross_entropy_rows(logits.matrix, bias, target, losses.matrix[0], dloss, count, *options)
    logits.check()
    losses.check()

    rate = torch.ones_like(every) if dloss is None else dloss.expand(case.rows)
    truth, low = (
        formula(case, values, bias, target, rate.to(t), 3 if case.mean else 1) for t in (torch.float64, torch.float32)
    )

    def exact(change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        logits, wide_bias, dloss = (None if t is None else change(t.double()) for t in (values, bias, rate))
        return formula(case, logits, wide_bias, target, dloss, 3 if case.mean else 1)._asdict()

    scale = measure_rounding_scale(exact, truth._asdict())
    assert_close_as_torch(losses.matrix[0], truth.losses, low.losses, scale["losses"], "losses")
    if not needs_gradient:
        assert torch.equal(logits.matrix.nan_to_num(9), values.nan_to_num(9)), "logits were overwritten"
        return Results(losses.matrix[0], None)
    assert not logits.matrix[target == IGNORED].any(), "the gradient of an ignored row is not 0"
    assert_close_as_torch(logits.matrix, truth.gradient, low.gradient.to(case.dtype), scale["gradient"], "gradient")
    return Results(losses.matrix[0], logits.matrix)
