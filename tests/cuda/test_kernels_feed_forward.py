"""What is special about the CUDA feed-forward: guard zones around its buffers, orders of warps, and Triton's backward.

On the CPU through csrc/emulator, and on a GPU where there is one. What every backend must do: tests/ops.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from add_layer_norm_cases import Guarded
from checks import ACTIVATIONS, check, solve
from emulator_build import ORDERS

from fastattn.backends import load_backend, unsupported_reason
from fastattn.backends.cuda import feed_forward as backend
from fastattn.backends.reference import philox
from fastattn.check.cases import Problem
from fastattn.check.cases import feed_forward as make

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
OTHERS = [activation for activation in ACTIVATIONS if activation not in ("relu", "swiglu")]


class GuardedTorch(Guarded):
    """In place of torch in the backend: it makes buffers between guard zones."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.mark.parametrize("dtype, dropout_p", [(BFLOAT16, 0.3), (FLOAT16, 0.0)], ids=["bf16-dropout", "fp16"])
@pytest.mark.parametrize("activation", ["relu", "swiglu", *(pytest.param(a, marks=pytest.mark.full) for a in OTHERS)])
def test_against_float64(
    activation: str, dtype: torch.dtype, dropout_p: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several blocks each way, all of them ragged; in vectors and, with 2 bytes of shift, element by element."""
    for shift, d_ff in ((0, 296), (1, 296), (0, 299)):
        memory = GuardedTorch(device, shift)
        monkeypatch.setattr(backend, "torch", memory)
        sizes = {"tokens": (150,), "d": 72, "d_ff": d_ff, "d_out": 104, "dtype": dtype}
        check(make(activation, dropout_p=dropout_p, **sizes, device=device), "cuda")
        memory.check()


@pytest.mark.parametrize("activation", ["gelu", "reglu"])
def test_bits_do_not_depend_on_the_run(activation: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal bits in every order of warps, lanes and blocks."""
    sizes = {"tokens": (140,), "d": 40, "d_ff": 264, "d_out": 40, "dtype": BFLOAT16}
    p, first = make(activation, dropout_p=0.3, **sizes, device=device), None
    for order in ORDERS:
        monkeypatch.setenv("FASTATTN_EMULATOR_ORDER", order)
        got = solve(p, "cuda")
        first = first or check(p, "cuda")
        assert all(torch.equal(first[name], got[name]) for name in first), order


def problem(activation: str, device: torch.device, d: int = 40, d_ff: int = 72, d_out: int = 48) -> Problem:
    sizes = {"tokens": (70,), "d": d, "d_ff": d_ff, "d_out": d_out, "dropout_p": 0.3, "dtype": BFLOAT16}
    return make(activation, **sizes, device=device)


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
def test_triton_saves_the_same(activation: str, device: torch.device) -> None:
    """The forward by one and the backward by the other: what they save is the same, and so is the mask."""
    p = problem(activation, device)
    names = ("x", "weight1", "bias1", "weight2", "bias2")
    if reason := unsupported_reason("feed_forward", "triton", (*map(p.tensors.get, names), activation, 0.3)):
        pytest.skip(reason)
    both = load_backend("feed_forward", "triton"), backend
    for one, other in (both, both[::-1]):

        class Mixed(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *inputs, one=one):
                ctx.inputs = (*inputs, philox.draw_rng_state(device))
                out, ctx.kept = one.feed_forward_fwd(*ctx.inputs)
                return out

            @staticmethod
            def backward(ctx, dout, other=other):
                return *other.feed_forward_bwd(dout, *ctx.inputs, ctx.kept), None, None

        def mixed(activation, dropout_p, apply=Mixed.apply, **tensors):
            return apply(*map(tensors.get, names), activation, dropout_p)

        check(p, mixed)


def test_strides(device: torch.device) -> None:
    """What does not come in whole aligned vectors."""
    p = problem("gelu", device)
    x, weight1, weight2, bias1, _ = p.tensors.values()
    dout = torch.randn(1, 48, dtype=BFLOAT16, device=device).expand(70, 48)
    check(p.but(bias1=torch.stack([bias1, bias1], 1)[:, 0])._replace(douts=(dout,)), "cuda")
    check(p.but(weight1=weight1.T.contiguous().T, weight2=weight2.T.contiguous().T), "cuda")
    unaligned = torch.empty(x.numel() + 1, dtype=BFLOAT16, device=device)[1:].view_as(x).copy_(x)
    check(p.but(x=unaligned, weight2=torch.cat([weight2, weight2], 1)[:, :72]), "cuda")
    check(problem("swiglu", device, d=44, d_ff=75, d_out=52), "cuda")
