"""`python -m fastattn doctor`: what is installed, which backend serves what and why, and how far each is from float64.

The rule by which every kernel is judged, here and in the tests, is `judge`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Judgement(NamedTuple):
    """The comparison that came closest to its bound, or went furthest past it."""

    error: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound

    @property
    def ratio(self) -> float:
        """error / bound; 1 is the limit, 0 is exact."""
        return self.error / self.bound if self.bound > 0 else (0.0 if self.error == 0 else float("inf"))


def judge(actual: torch.Tensor, truth: torch.Tensor, low: torch.Tensor) -> Judgement:
    """Is `actual` as near to `truth` as a plain formula at its precision can be expected to come?

    actual: the result under test. truth: the same result from the reference formula in float64. low: the same from the
    reference formula run in the tested dtype; low and actual have one dtype. All three have one shape.

    With u = eps / 2 of that dtype (u * |t| is at least the rounding error of t), both of these must hold:
        for every i:   |actual_i - truth_i|   <=  2 * max_j |low_j - truth_j|  +  u * |truth_i|
        on the whole:   rms(actual - truth)   <=  2 * rms(low - truth)         +  u * rms(truth)
    that is: at most twice the error of the plain formula, plus one rounding of the output. The first catches one wrong
    element, the second a small error spread over all of them. Below the normal numbers u * |t| is taken at the smallest
    normal one. An element where truth, rounded to the dtype, is +-inf must be exactly that infinity. NaN never passes.
    An element that is not finite in `low` where truth is (the plain formula overflowed) adds nothing to the bound.

    Returns the (error, bound) that has the largest error / bound; passed when error <= bound. An infinity or NaN out of
    place gives error inf. Raises ValueError when shapes or dtypes differ or truth has a NaN.
    Source: in the spirit of the tests of FlashAttention (Dao et al. 2022, arXiv:2205.14135): 2x the error of PyTorch.
    """
    if not actual.shape == truth.shape == low.shape:
        shapes = ", ".join(str(tuple(t.shape)) for t in (actual, truth, low))
        raise ValueError(f"shapes of actual, truth, low differ: {shapes}")
    if actual.dtype != low.dtype:
        raise ValueError(f"dtypes differ: actual {actual.dtype}, low {low.dtype}")
    if actual.numel() == 0:
        return Judgement(0.0, 0.0)
    actual, truth, low = (t.detach().to(device=actual.device) for t in (actual, truth.double(), low))
    if truth.isnan().any():
        raise ValueError("truth has a NaN; it cannot judge anything")
    finfo = torch.finfo(actual.dtype)
    rounded = truth.to(actual.dtype)
    infinite = rounded.isinf()

    zero = truth.new_zeros(())
    error = torch.where(infinite, zero, actual.double() - truth).abs()
    truth = torch.where(infinite, zero, truth)
    error_low = torch.where(infinite | ~low.isfinite(), zero, low.double() - truth).abs()
    rounding = truth.abs().clamp_min(finfo.smallest_normal) * (finfo.eps / 2)

    bound = 2 * error_low.max() + rounding
    if (infinite & (actual != rounded)).any() or not error.isfinite().all():
        return Judgement(float("inf"), bound.max().item())
    worst = (error / bound).argmax()
    by_max = Judgement(error.flatten()[worst].item(), bound.flatten()[worst].item())
    by_rms = Judgement(_rms(error), 2 * _rms(error_low) + _rms(rounding))
    return max(by_max, by_rms, key=lambda judgement: judgement.ratio)


def _rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()
