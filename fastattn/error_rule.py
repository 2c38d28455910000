"""The one rule for error: may a result differ this much from the formula in float64?

The doctor, the tests and the benchmarks share `judge`. Beside it stand the functions that say, for each op, how large
the terms are that are summed up in each element of a result: `attention_terms` and the others. They are numbers of the
problem, computed in float64, and say nothing about an implementation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Judgement(NamedTuple):
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


def judge(actual: Tensor, truth: Tensor, low: Tensor, terms: Tensor) -> Judgement:
    """Is `actual` as near to `truth` as a method that rounds to its dtype can be expected to come?

    actual: the result under test. truth: the same result from the reference formula in float64. low: the same from the
    plain formula run in the tested dtype; low and actual have one dtype. terms: T, the size of the terms that are
    summed up in each element, before they cancel. All four have one shape.

    With u = eps / 2 of the dtype, both by the largest element and by the root mean square over all elements,
        error(actual)  <=  2 * error(low)  +  u * |truth|  +  c * u * T,     c = 1 for 16 bits, 8 for float32 and more
    that is: twice the error of the plain formula, one rounding of the result, and what rounding each term once must
    leave (float32 also rounds the products, hence c). Without T the bound would be zero where the plain formula is
    exact by cancellation, for example where a query attends to a single key, and no method that stores 16 bits could
    keep it. Below the normal numbers a rounding is that of the smallest normal one.

    An element where truth, rounded to the dtype, is +-inf must be exactly that infinity. NaN never passes. An element
    that is not finite in `low` where truth is (the plain formula overflowed) adds nothing to the bound.
    Returns the (error, bound) with the larger error / bound; an infinity or NaN out of place gives error inf.
    Raises ValueError when shapes or dtypes differ or truth has a NaN.
    """
    if not actual.shape == truth.shape == low.shape == terms.shape:
        shapes = ", ".join(str(tuple(t.shape)) for t in (actual, truth, low, terms))
        raise ValueError(f"shapes of actual, truth, low, terms differ: {shapes}")
    if actual.dtype != low.dtype:
        raise ValueError(f"dtypes differ: actual {actual.dtype}, low {low.dtype}")
    if actual.numel() == 0:
        return Judgement(0.0, 0.0)
    truth, terms, low = (t.detach().to(actual.device) for t in (truth.double(), terms.double(), low))
    actual = actual.detach()
    if truth.isnan().any():
        raise ValueError("truth has a NaN; it cannot judge anything")
    finfo = torch.finfo(actual.dtype)
    u = finfo.eps / 2
    c = 1 if finfo.bits == 16 else 8
    rounded = truth.to(actual.dtype)
    infinite = rounded.isinf()

    error = (actual.double() - truth).masked_fill(infinite, 0).abs()
    error_low = (low.double() - truth).masked_fill(infinite | ~low.isfinite(), 0).abs()
    rounding = u * truth.masked_fill(infinite, 0).abs().clamp_min(finfo.smallest_normal)
    of_terms = c * u * terms.masked_fill(infinite, 0).nan_to_num(0)

    def bound(size) -> float:
        return (2 * size(error_low) + size(rounding) + size(of_terms)).item()

    if (infinite & (actual != rounded)).any() or not error.isfinite().all():
        return Judgement(float("inf"), bound(torch.max))
    judgements = (Judgement(size(error).item(), bound(size)) for size in (torch.max, _rms))
    return max(judgements, key=lambda judgement: judgement.ratio)


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def root_sum_of_squares(a: Tensor, b: Tensor) -> Tensor:
    """sqrt(sum_k a_ik^2 b_kj^2): the size of the terms of the matrix product a b."""
    return (a.square() @ b.square()).sqrt()


def attention_terms(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    visible: Tensor,
    bias: Tensor | None,
    multiplier: Tensor,
    scale: float,
) -> dict[str, Tensor]:
    """T of out, lse, weights, dq, dk, dv and dbias (where there is a bias), float64.

    q (B, H, Lq, Dk), k (B, Hk, Lk, Dk), v (B, Hk, Lk, Dv), dout (B, H, Lq, Dv), dlse (B, H, Lq) or None; visible: bool,
    broadcastable to (B, H, Lq, Lk); bias likewise, or None; multiplier: 0 where dropout drops, else 1 / (1 - p).

    With P the softmax, Z the multiplier, dP = Z (dout v^T), delta = sum_j P dP, rss = root_sum_of_squares:
        T_lse  = |lse| + sum_j P (scale rss(q, k^T) + |bias|)      T_weights = P Z
        T_out  = rss(P Z, v)                                       T_dv = rss((P Z)^T, dout)
        T_dq   = scale (rss(W, k) + D |P k|)                       T_dk = scale (rss(W^T, q) + rss((P D)^T, q))
        T_dbias = root sum of squares, over what the bias is broadcast over, of W + P D + P Z rss(dout, v^T)
        W = P (|dP| + |delta| + |dlse|)                            D_i = sqrt(sum_d (out_id dout_id)^2)
    D stands for the error of delta, which is common to a row; it is added linearly, the others as independent errors.
    """
    q, k, v, dout = (t.double() for t in (q, k, v, dout))
    heads, group = q.shape[1], q.shape[1] // max(k.shape[1], 1)
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    rss = root_sum_of_squares
    scores = scale * (q @ k.mT)
    size = abs(scale) * rss(q, k.mT)
    if bias is not None:
        bias = bias.double()
        scores = scores + bias
        size = size + bias.abs().masked_fill(bias.isinf(), 0)
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = (
        scores.logsumexp(-1, keepdim=True) if scores.shape[-1] else scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    )
    p = (scores - lse.masked_fill(lse.isinf(), 0)).exp().masked_fill(lse.isinf(), 0)
    kept = p * multiplier
    dp = (dout @ v.mT) * multiplier
    delta = (dp * p).sum(-1, keepdim=True)
    of_row = delta.abs() if dlse is None else delta.abs() + dlse.double().abs()[..., None]
    w = p * (dp.abs() + of_row)
    d = ((kept @ v) * dout).square().sum(-1, keepdim=True).sqrt()

    def of_group(t: Tensor) -> Tensor:
        """Query heads that share a key head add up."""
        return t.square().unflatten(1, (heads // group, group)).sum(2).sqrt()

    terms = {
        "out": rss(kept, v),
        "lse": lse.squeeze(-1).abs().nan_to_num(posinf=0) + (p * size).sum(-1),
        "weights": kept,
        "dq": abs(scale) * (rss(w, k) + d * (p @ k).abs()),
        "dk": of_group(abs(scale) * (rss(w.mT, q) + rss((p * d).mT, q))),
        "dv": of_group(rss(kept.mT, dout)),
    }
    if bias is not None:
        of_bias = w + p * d + p * multiplier * rss(dout, v.mT)
        terms["dbias"] = of_bias.square().sum_to_size(bias.shape).sqrt()
    return terms
