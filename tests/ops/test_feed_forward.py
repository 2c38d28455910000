"""What is special about the feed-forward network, in every backend."""

from __future__ import annotations

import pytest
import torch
from catalogue import ACTIVATIONS, GATED, check
from helpers import backends_of

from fastattn.check import cases

EVERY_BACKEND = pytest.mark.parametrize("backend", backends_of("feed_forward"))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, in the interpreter: exp(large) is inf
@pytest.mark.parametrize(
    "activation", [a if a in ("gelu_tanh", "swiglu") else pytest.param(a, marks=pytest.mark.full) for a in ACTIVATIONS]
)
@EVERY_BACKEND
def test_large_preactivations(backend: str, activation: str, device: torch.device) -> None:
    """|z| up to some thousands: the exponentials saturate, nothing becomes NaN."""
    p = cases.feed_forward(activation, device=device)
    check(p.but(x=p.tensors["x"] * 1000), backend)


@EVERY_BACKEND
def test_slopes(backend: str, device: torch.device) -> None:
    """At 0, where relu's is 0; from 3 to 6, where 1 - sigmoid cancels and gelu_tanh's makes much of what is left."""
    z, zero, one = torch.cat([torch.zeros(1), torch.linspace(3, 6, 100)])[:, None], torch.zeros(8), torch.ones(8)
    for activation in ACTIVATIONS:
        is_gated = activation in GATED  # by z + 1
        given = {"x": z, "weight1": torch.ones(16 if is_gated else 8, 1), "weight2": one[None] / 8}
        given |= {"bias1": torch.cat([zero, one]) if is_gated else zero, "bias2": torch.zeros(1)}
        p = cases.feed_forward(activation, d=1, d_ff=8, d_out=1).but(**given)._replace(douts=(torch.ones_like(z),))
        check(p.map(lambda t: t.to(device)), backend)
