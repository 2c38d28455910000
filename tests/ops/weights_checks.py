"""What attention returns for return_weights, against float64. The rest of attention: attention_checks.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from attention_checks import Problem, exact, plain, visible
from helpers import assert_close_as_torch
from torch import Tensor

from fastattn import AttentionMask, scaled_dot_product_attention

Wanted = bool | list[int] | str
HEADS = [3, 1, 0]  # of four: not in order, and not of equal steps


def ask(backend: str) -> Callable[[Problem, Wanted], Tensor]:
    """weights = ask(backend)(problem, return_weights)"""

    def call(p: Problem, wanted: Wanted) -> Tensor:
        torch.manual_seed(p.seed)
        mask = AttentionMask(**p.mask, bias=p.bias)
        options = {"scale": p.scale, "enable_gqa": True, "return_weights": wanted, "backend": backend}
        return scaled_dot_product_attention(p.q, p.k, p.v, mask, p.dropout_p, **options)[1]

    return call


def scores(p: Problem, dtype: torch.dtype) -> Tensor:
    """(B, H, Lq, Lk), the products in dtype, -inf where masked."""
    k = p.k.to(dtype).repeat_interleave(p.q.shape[1] // p.k.shape[1], 1)
    S = (p.q.to(dtype) @ k.mT).to(torch.promote_types(dtype, torch.float32)) * p.scale
    keep = visible(p)
    if p.bias is not None:
        S = S + p.bias.where(keep, 0)
    return S.masked_fill(~keep, -torch.inf)


def check(p: Problem, weights: Callable[[Problem, Wanted], Tensor]) -> None:
    """Four heads: all of them, some, their mean, and where the largest weights are."""
    truth, low, keep = exact(p).weights, plain(p).weights, visible(p)
    every, some, mean = weights(p, True), weights(p, HEADS), weights(p, "mean")
    assert_close_as_torch(every, truth, low, "weights")
    assert torch.equal(some, every[:, HEADS]), "weights of some heads"
    assert_close_as_torch(mean, truth.mean(1), low.float().mean(1).to(low.dtype), "mean")
    assert not mean[~keep.any(1)].any(), "a key masked in every head must have exactly 0 weight"
    check_alignment(p, weights(p, "argmax"))


def check_alignment(p: Problem, keys: Tensor) -> None:
    """The key of the largest weight, or one whose score is as near to the largest as scores are exact: each of the two
    may be off by as much as the plain formula's."""
    sees = visible(p).any(-1)
    assert keys.dtype == torch.int64 and keys.shape == p.shape[:3]
    assert torch.equal(keys == -1, ~sees) and (keys[sees] >= 0).all(), "alignment: -1 where nothing is seen, only there"
    if not sees.any():
        return
    truth = scores(p, torch.float64)
    error = (scores(p, p.q.dtype).double() - truth)[visible(p)].abs().max()
    of_keys = truth.gather(-1, keys.clamp_min(0)[..., None])[..., 0]
    behind = (truth.amax(-1) - of_keys)[sees].max()
    assert behind <= 2 * error, f"alignment: a score {behind:.2e} below the largest; scores are exact to {error:.2e}"
