"""The one rule for error: may a result differ this much from the formula in float64?

The doctor, the tests and the benchmarks share `check_error`. `measure_rounding_scale` measures how large the terms are
that are summed up in each element of a result. That is a property of the problem, not of an implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PERTURBATION = 2.0**-40  # relative; float64 leaves 12 bits of its effect, and no relu opens or closes for it

_aten = torch.ops.aten
_MEANS_AND_SOFTMAX = (_aten.mean.default, _aten.mean.dim, _aten.nll_loss_forward.default, _aten._softmax.default)
_MATRIX_PRODUCTS = (_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default)


class ErrorCheck(NamedTuple):
    """The comparison that came closest to its bound, or went furthest past it."""

    error: float
    bound: float

    @property
    def ok(self) -> bool:
        """Whether the error is within its bound."""
        return self.error <= self.bound

    @property
    def ratio(self) -> float:
        """error / bound; 1 is the limit, 0 is exact."""
        return self.error / self.bound if self.bound > 0 else (0.0 if self.error == 0 else float("inf"))


def check_error(
    actual: Tensor, truth: Tensor, baseline: Tensor, rounding_scale: Tensor, computed_in: torch.dtype | None = None
) -> ErrorCheck:
    """Is `actual` as near to `truth` as a method that rounds to its dtype can be expected to come?

    actual: the result under test. truth: the same result from the reference formula in float64. baseline: the same from
    the plain formula run in the tested dtype; baseline and actual have one dtype. rounding_scale: T, the size of the
    terms that are summed up in each element, before they cancel. All four have one shape. computed_in: a lower dtype
    that terms are rounded to, where there is one: the gradient of a float32 weight has bfloat16 terms if x is bfloat16.

    With u = eps / 2 of the dtype, both by the largest element and by the root mean square over all elements,
        error(actual) <= 2 * error(baseline) + u * |truth| + c * u * T,     c = 1 for 16 bits, 8 for float32 and more
    that is: twice the error of the plain formula, one rounding of the result, and what rounding each term once must
    leave (float32 also rounds the products, hence c). Without T the bound would be zero where the plain formula is
    exact by cancellation, for example where a query attends to a single key, and no method that stores 16 bits could
    keep it. Below the normal numbers a rounding is that of the smallest normal one.

    An element where truth, rounded to the dtype, is +-inf must be exactly that infinity. NaN never passes. An element
    that is not finite in `baseline` where truth is (the plain formula overflowed) adds nothing to the bound.
    Returns the (error, bound) with the larger error / bound; an infinity or NaN out of place gives error inf.
    Raises ValueError when shapes or dtypes differ or truth has a NaN.
    """
    if not actual.shape == truth.shape == baseline.shape == rounding_scale.shape:
        shapes = ", ".join(str(tuple(t.shape)) for t in (actual, truth, baseline, rounding_scale))
        raise ValueError(f"shapes of actual, truth, baseline, rounding_scale differ: {shapes}")
    if actual.dtype != baseline.dtype:
        raise ValueError(f"dtypes differ: actual {actual.dtype}, baseline {baseline.dtype}")
    if actual.numel() == 0:
        return ErrorCheck(0.0, 0.0)
    device = actual.device
    truth, baseline, scale = (t.detach().to(device) for t in (truth.double(), baseline, rounding_scale.double()))
    actual = actual.detach()
    if truth.isnan().any():
        raise ValueError("truth has a NaN; it cannot judge anything")
    finfo = torch.finfo(actual.dtype)
    u = finfo.eps / 2
    rounded = truth.to(actual.dtype)
    infinite = rounded.isinf()

    error = (actual.double() - truth).masked_fill(infinite, 0).abs()
    baseline_error = (baseline.double() - truth).masked_fill(infinite | ~baseline.isfinite(), 0).abs()
    rounding = u * truth.masked_fill(infinite, 0).abs().clamp_min(finfo.smallest_normal)
    term_roundings = max(map(_term_rounding, (actual.dtype, computed_in or actual.dtype))) * scale
    term_roundings = term_roundings.masked_fill(infinite, 0).nan_to_num(0)

    def bound(size: Callable[[Tensor], Tensor]) -> float:
        return (2 * size(baseline_error) + size(rounding) + size(term_roundings)).item()

    if (infinite & (actual != rounded)).any() or not error.isfinite().all():
        return ErrorCheck(float("inf"), bound(torch.max))
    checks = (ErrorCheck(size(error).item(), bound(size)) for size in (torch.max, _rms))
    return max(checks, key=lambda check: check.ratio)


def _term_rounding(dtype: torch.dtype) -> float:
    """c * u of check_error."""
    finfo = torch.finfo(dtype)
    return finfo.eps / 2 * (1 if finfo.bits == 16 else 8)


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def measure_rounding_scale(
    solve: Callable[[Callable[[Tensor], Tensor]], dict[str, Tensor]], truth: dict[str, Tensor], draws: int = 4
) -> dict[str, Tensor]:
    """T of each result: how far it moves, in float64, when its inputs move by a small relative amount of random sign.

    solve(change): the results, of inputs each of which went through `change`, the gradients of outputs included.
    truth: the results without a change. T is the root mean square of some draws, and is relative to that amount.

    What is multiplied by a matrix moves again where that is done, and so does each term of a mean or of a sum within a
    row: kernels round both. Scores move once more in a softmax, because its exponent is a score less the row's lse. A
    sum over rows moves by each partial sum: PyTorch's own backward of layer normalisation adds one row after the other
    in the dtype of weight. What runs in float32 in every method does not move.
    """
    total = {name: torch.zeros_like(value) for name, value in truth.items()}
    for seed in range(draws):
        with _Roundings(seed) as roundings:
            moved = solve(roundings.change)
        for name, value in truth.items():
            total[name] += (moved[name].detach() - value) ** 2
    return {name: (square / draws).sqrt() / PERTURBATION for name, square in total.items()}


class _Roundings(TorchDispatchMode):
    """Perturbs the results that measure_rounding_scale describes. The signs depend on the seed alone."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}

    def change(self, t: Tensor) -> Tensor:
        return t * (1 + self._signed_perturbation(t)) if t.is_floating_point() else t

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _MATRIX_PRODUCTS:
            return function(*(self.change(t) if isinstance(t, Tensor) else t for t in args), **kwargs)
        if function == _aten._softmax_backward_data.default:
            grad, out, dim = args[:3]
            return out * (grad - self.change(grad * out).sum(dim, keepdim=True))
        if function in _MEANS_AND_SOFTMAX:
            return function(self.change(args[0]), *args[1:], **kwargs)
        if function == _aten.sum.dim_IntList or function == _aten.sum.default:
            return self._sum(function, args, kwargs)
        return function(*args, **kwargs)

    def _sum(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        x, dims = args[0], (args[1] if len(args) > 1 else None) or tuple(range(args[0].dim()))
        if not x.is_floating_point() or 0 not in dims or x.numel() == 0:
            return function(self.change(x), *args[1:], **kwargs)
        out = function(*args, **kwargs)
        terms = x.movedim(tuple(dims), tuple(range(len(dims)))).flatten(0, len(dims) - 1)
        partial_sums = terms.cumsum(0).abs() + terms.square().cumsum(0).sqrt()
        return out + (partial_sums * self._signed_perturbation(terms)).sum(0).view(out.shape)

    def _signed_perturbation(self, t: Tensor) -> Tensor:
        if t.device not in self.generators:
            self.generators[t.device] = torch.Generator(t.device).manual_seed(self.seed)
        signs = torch.randint(0, 2, t.shape, generator=self.generators[t.device], device=t.device) * 2 - 1
        return PERTURBATION * signs.to(t.dtype)  # in float32 a perturbation of 1 would be lost
