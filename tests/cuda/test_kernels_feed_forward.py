"""The CUDA feed-forward's product with epilogues: on the CPU through csrc/emulator, and on a GPU where there is one.

The backend of the route that users take, cuBLAS and a pointwise kernel, is held to the checks of every backend in
tests/ops/test_feed_forward.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from emulator_build import ORDERS, SM90_COMPLETIONS
from feed_forward_checks import ACTIVATIONS, Results, check, make, solve
from feed_forward_routes import GuardedTorch, cuda, forced_route, note_routes

from fastattn.backends import load_backend, unsupported_reason
from fastattn.backends.cuda import feed_forward as backend
from fastattn.backends.cuda.feed_forward import GemmBackend
from fastattn.backends.reference import philox

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
# Several tiles each way, all of them ragged, and steps along the depth that end in the middle of one.
OTHERS = [activation for activation in ACTIVATIONS if activation not in ("relu", "swiglu")]
SIZES = {"tokens": 150, "d": 72, "d_ff": 296, "d_out": 104}


@pytest.fixture
def route(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[GemmBackend]:
    with forced_route(GemmBackend.SM90, device, monkeypatch):
        yield GemmBackend.SM90


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[GemmBackend]:
    return note_routes(monkeypatch)


@pytest.mark.parametrize("dtype, dropout_p", [(BFLOAT16, 0.3), (FLOAT16, 0.0)], ids=["bf16-dropout", "fp16"])
@pytest.mark.parametrize("activation", ["relu", "swiglu", *(pytest.param(a, marks=pytest.mark.full) for a in OTHERS)])
def test_against_float64(
    activation: str,
    dtype: torch.dtype,
    dropout_p: float,
    route: GemmBackend,
    taken: list[GemmBackend],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Buffers start as NaN, between guard zones."""
    memory = GuardedTorch(device, shift=0)
    monkeypatch.setattr(backend, "torch", memory)
    check(make(activation, dropout_p, **SIZES, dtype=dtype, device=device), cuda)
    memory.check()
    assert taken == [route, route]


@pytest.mark.parametrize("activation", ["swiglu"])
def test_without_biases(activation: str, route: GemmBackend, taken: list[GemmBackend], device: torch.device) -> None:
    p = make(activation, 0.3, tokens=70, d=40, d_ff=72, d_out=16, has_bias=False, dtype=BFLOAT16, device=device)
    got = check(p, cuda)
    assert got.dbias1 is None and got.dbias2 is None and taken == [route, route]


# One of each; a depth of one step, of the stages of a ring and one more; rows at the edges of a tile and of a sum.
@pytest.mark.full
@pytest.mark.parametrize("activation", ["relu", "geglu"])
@pytest.mark.parametrize(
    "tokens, d, d_ff, d_out",
    [(1, 8, 8, 200), (64, 32, 64, 64), (65, 256, 136, 320), (128, 264, 128, 24), (193, 8, 256, 8)],
)
def test_sizes(
    tokens: int,
    d: int,
    d_ff: int,
    d_out: int,
    activation: str,
    route: GemmBackend,
    taken: list[GemmBackend],
    device: torch.device,
) -> None:
    check(make(activation, 0.3, tokens=tokens, d=d, d_ff=d_ff, d_out=d_out, dtype=BFLOAT16, device=device), cuda)
    assert taken == [route, route]


@pytest.mark.full
@pytest.mark.parametrize("activation", ["relu", "geglu"])
def test_many_tiles(activation: str, route: GemmBackend, device: torch.device) -> None:
    """More rows of tiles than a group has, and several tiles for each of the CPU runner's two multiprocessors."""
    check(make(activation, 0.1, tokens=1100, d=24, d_ff=264, d_out=16, dtype=FLOAT16, device=device), cuda)


@pytest.mark.parametrize("activation", ["gelu", "reglu"])
def test_bits_do_not_depend_on_the_run(
    activation: str, route: GemmBackend, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal bits in every order of warps, lanes and blocks, and wherever asynchronous work ends."""
    p = make(activation, 0.3, tokens=140, d=40, d_ff=264, d_out=40, dtype=BFLOAT16, device=device)
    first = None
    for order, completion in itertools.product(ORDERS, SM90_COMPLETIONS):
        monkeypatch.setenv("FASTATTN_EMULATOR_ORDER", order)
        monkeypatch.setenv("FASTATTN_EMULATOR_ASYNC", completion)
        got = solve(p, cuda)
        first = first or check(p, cuda)
        for name, a, b in zip(Results._fields, first, got, strict=True):
            assert torch.equal(a, b), (name, order, completion)


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
def test_routes_and_triton_are_interchangeable(
    activation: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward by one and the backward by another: what they save is the same, and so is the mask."""
    p = make(activation, 0.3, tokens=70, d=40, d_ff=72, d_out=48, dtype=BFLOAT16, device=device)
    backends: list[Any] = [GemmBackend.CUBLAS]
    if device.type == "cpu" or torch.cuda.get_device_capability(device) == (9, 0):
        backends.append(GemmBackend.SM90)
    if unsupported_reason("feed_forward", "triton", (*p.inputs, activation, 0.3)) is None:
        backends.append("triton")

    def functions(which: Any) -> Any:
        return load_backend("feed_forward", "triton") if which == "triton" else backend

    def context(which: Any) -> Any:
        return nullcontext() if which == "triton" else forced_route(which, device, monkeypatch)

    for one, other in zip(backends, backends[1:] + backends[:1], strict=True):

        class Mixed(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *inputs, one=one):
                ctx.inputs = (*inputs, philox.draw_rng_state(device))
                with context(one):
                    out, ctx.kept = functions(one).feed_forward_fwd(*ctx.inputs)
                return out

            @staticmethod
            def backward(ctx, dout, other=other):
                with context(other):
                    return *functions(other).feed_forward_bwd(dout, *ctx.inputs, ctx.kept), None, None

        check(p, Mixed.apply)


def test_strides(route: GemmBackend, taken: list[GemmBackend], device: torch.device) -> None:
    """What does not come in whole aligned vectors goes to cuBLAS; an expanded gradient and a strided bias do not."""
    p = make("gelu", 0.3, tokens=70, d=40, d_ff=72, d_out=48, dtype=BFLOAT16, device=device)
    check(p.but(dout=p.dout[:1].expand_as(p.dout), bias1=torch.stack([p.bias1, p.bias1], 1)[:, 0]), cuda)
    assert taken == [route, route]
    check(p.but(weight1=p.weight1.T.contiguous().T, weight2=p.weight2.T.contiguous().T), cuda)
    unaligned = torch.empty(p.x.numel() + 1, dtype=BFLOAT16, device=device)[1:].view_as(p.x).copy_(p.x)
    check(p.but(x=unaligned, weight2=torch.cat([p.weight2, p.weight2], 1)[:, :72]), cuda)
    check(make("swiglu", 0.3, tokens=70, d=44, d_ff=72, d_out=52, dtype=BFLOAT16, device=device), cuda)
    check(make("relu", 0.3, tokens=70, d=40, d_ff=76, d_out=48, dtype=BFLOAT16, device=device), cuda)
    check(make("relu", 0.3, tokens=70, d=40, d_ff=72, d_out=48, device=device), cuda)
    assert taken[2:] == [GemmBackend.CUBLAS] * 10
