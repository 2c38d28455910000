"""What is special about the feed-forward network, in every backend."""

from __future__ import annotations

import pytest
import torch
from checks import ACTIVATIONS, GATED, check, skip_without, solve
from helpers import backends_of
from torch import Tensor

from fastattn import feed_forward
from fastattn.backends.reference import philox
from fastattn.check import cases

EVERY_BACKEND = pytest.mark.parametrize("backend", backends_of("feed_forward"))
KERNELS = backends_of("feed_forward", kernels_only=True)


@pytest.mark.bug_class("T15")
@pytest.mark.parametrize("activation", ["relu", "reglu"])
@pytest.mark.parametrize("dropout_p", [0.1, 1.0])
@EVERY_BACKEND
def test_mask_is_the_rule(backend: str, dropout_p: float, activation: str, device: torch.device) -> None:
    """Every pre-activation is 1 and weight2 the identity: out is h, and its zeros are the mask. Rows of x are unit
    vectors: dweight1's columns are the rows of dz, and its zeros the mask of the backward."""
    skip_without(backend, "feed_forward", device)
    tokens, d_ff = 19, 45
    x, eye = torch.eye(tokens, device=device), torch.eye(d_ff, device=device)
    halves = 2 if activation in GATED else 1
    weight1 = torch.ones(halves * d_ff, tokens, device=device, requires_grad=True)
    torch.manual_seed(3)
    rng_state = philox.draw_rng_state(device)
    keep = philox.keep_mask(rng_state, tokens, d_ff, dropout_p)
    torch.manual_seed(3)
    out = feed_forward(x, weight1, None, eye, None, activation, dropout_p, backend=backend)
    out.sum().backward()
    assert torch.equal(out != 0, keep)
    for dweight1 in weight1.grad.chunk(halves):
        assert torch.equal(dweight1.T != 0, keep)


@EVERY_BACKEND
def test_leading_dimensions(backend: str, device: torch.device) -> None:
    p = cases.feed_forward("gelu", tokens=(12,), dropout_p=0.3, device=device)
    x = p.tensors["x"]
    rows = solve(p, backend)["out"]
    assert torch.equal(solve(p.but(x=x.view(3, 4, -1)), backend)["out"], rows.view(3, 4, -1))
    assert solve(p.but(x=x[0], dropout_p=0.0), backend)["out"].shape == (24,)


@pytest.mark.bug_class("T12")
@pytest.mark.parametrize("activation", ["relu", "swiglu"])
@pytest.mark.parametrize("empty", ["d", "d_ff", "d_out"])
@EVERY_BACKEND
def test_empty_widths(backend: str, empty: str, activation: str, device: torch.device) -> None:
    p = cases.feed_forward(activation, tokens=(5,), dropout_p=0.5, **{empty: 0}, device=device)
    check(p, backend)
    if empty == "d":
        p = p.but(dropout_p=0.0)
        vector = solve(p.but(x=p.tensors["x"][0]), backend)["out"]
        torch.testing.assert_close(vector, solve(p, backend)["out"][0])


@pytest.mark.bug_class("T13")
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, in the interpreter: exp(large) is inf
@EVERY_BACKEND
def test_large_preactivations(backend: str, device: torch.device) -> None:
    """|z| up to some thousands: the exponentials saturate, nothing becomes NaN."""
    for activation in ACTIVATIONS:
        p = cases.feed_forward(activation, device=device)
        check(p.but(x=p.tensors["x"] * 1000), backend)


@EVERY_BACKEND
def test_slopes_near_one(backend: str, device: torch.device) -> None:
    """z from 3 to 6, where 1 - sigmoid cancels and gelu_tanh's slope makes much of what is left."""
    z, ones = torch.linspace(3, 6, 301, device=device)[:, None], torch.ones(8, 1, device=device)
    for activation in GATED.values():
        p = cases.feed_forward(activation, d=1, d_ff=8, d_out=1, has_bias=False, device=device)
        p = p._replace(douts=(torch.ones_like(z),))
        check(p.but(x=z, weight1=ones, weight2=ones.T / 8), backend)


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
@pytest.mark.parametrize("backend", KERNELS)
def test_what_is_kept_for_the_backward(backend: str, activation: str, device: torch.device) -> None:
    """No dropout mask and no second tensor: except inputs and rng_state, one tensor as wide as weight1 has rows."""
    skip_without(backend, "feed_forward", device)
    p = cases.feed_forward(activation, tokens=(40,), dropout_p=0.3, device=device)
    tensors = {name: t.requires_grad_() for name, t in p.tensors.items()}
    given, kept = {t.data_ptr() for t in tensors.values()}, []

    def note(t: Tensor) -> Tensor:
        if t.data_ptr() not in given and t.dtype != torch.int64:
            kept.append(tuple(t.shape))
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        feed_forward(**p.arguments(tensors), backend=backend)
    assert kept == [(40, len(tensors["weight1"]))]
