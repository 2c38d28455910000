"""add_sinks and merge: exact, with gradients, and where a query may attend to nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastattn import AttentionMask, add_sinks, merge, scaled_dot_product_attention

SINKS = torch.tensor([[-1.0, 2.0], [0.5, -2.0]], dtype=torch.float64)


def inputs(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, n, 4, generator=generator, dtype=torch.float64, requires_grad=True) for n in lengths]


def mask(Lk: int) -> AttentionMask:
    """Query 0 of the first sentence sees no key, of the second none at all."""
    real = torch.tensor([[False] + [True] * (Lk - 1), [False] * Lk])
    return AttentionMask(key_padding=real, is_causal=True)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor]:
    return scaled_dot_product_attention(q, k, v, mask, return_lse=True)


@pytest.mark.parametrize("sinks", [SINKS[0], SINKS[..., None].repeat(1, 1, 3)], ids=["of heads", "of queries"])
def test_sinks(sinks: Tensor) -> None:
    q, k, v = inputs(3, 5, 5)
    sinks, keep = sinks.clone().requires_grad_(), mask(5).dense(2, 2, 3, 5, "cpu")

    def formula(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        scores = (q @ k.mT / 2).masked_fill(~keep, -torch.inf)
        sinks = sinks if sinks.dim() == 3 else sinks[:, None].expand(2, 2, 3)
        scores = torch.cat([scores, sinks[..., None]], -1)
        return scores.softmax(-1)[..., :-1] @ v, scores.logsumexp(-1)

    def ours(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        return add_sinks(*attend(q, k, v, mask(5)), sinks)

    torch.testing.assert_close(ours(q, k, v, sinks), formula(q, k, v, sinks))
    assert torch.autograd.gradcheck(ours, (q, k, v, sinks))


def test_a_sink_of_minus_infinity_is_none() -> None:
    q, k, v = leaves = inputs(3, 5, 5)
    sinks, found = torch.full((2,), -torch.inf, requires_grad=True), []
    for results in (attend(q, k, v, mask(5)), add_sinks(*attend(q, k, v, mask(5)), sinks)):
        loss = results[0].sum() + results[1][0, :, 1:].sum()
        grads = torch.autograd.grad(loss, [*leaves, sinks], allow_unused=True, materialize_grads=True)
        found.append([*results, *grads])
    torch.testing.assert_close(*found)


def test_merge() -> None:
    q, k, v, k2, v2 = inputs(3, 5, 5, 4, 4)
    keep = torch.cat([mask(n).dense(2, 2, 3, n, "cpu") for n in (5, 4)], -1)

    def ours(q: Tensor, k: Tensor, v: Tensor, k2: Tensor, v2: Tensor) -> tuple[Tensor, Tensor]:
        return merge(attend(q, k, v, mask(5)), attend(q, k2, v2, mask(4)))

    out, lse = ours(q, k, v, k2, v2)
    together = attend(q, torch.cat([k, k2], 2), torch.cat([v, v2], 2), AttentionMask(keep))
    torch.testing.assert_close((out, lse), together)
    assert not out[1].any() and (lse[1] == -torch.inf).all()
    seen = torch.autograd.grad(lse[0, :, 1:].sum() + out.sum(), (q, k, v, k2, v2))
    expected = torch.autograd.grad(together[1][0, :, 1:].sum() + together[0].sum(), (q, k, v, k2, v2))
    torch.testing.assert_close(seen, expected)
