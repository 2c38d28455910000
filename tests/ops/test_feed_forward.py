"""The feed-forward network in every backend against float64, forward and backward."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from feed_forward_checks import ACTIVATIONS, BACKENDS, GATED, Results, backend_call, check, make, plain, solve
from helpers import backends_of
from torch import Tensor

from fastattn import feed_forward
from fastattn.backends import unsupported_reason
from fastattn.backends.reference import philox

KERNELS = backends_of("feed_forward", kernels_only=True)
BF16, FP16 = torch.bfloat16, torch.float16

# Several tiles each way, ragged; widths that no tile divides; one token.
EVERYDAY: list[dict[str, Any]] = [
    {"activation": "relu", "dropout_p": 0.3},
    {"activation": "gelu", "dropout_p": 0.3, "dtype": BF16},
    {"activation": "geglu_tanh", "has_bias": False},
    {"activation": "swiglu", "dropout_p": 0.3, "dtype": FP16},
    {"activation": "relu", "dropout_p": 0.3, "tokens": 270, "d": 33, "d_ff": 150, "d_out": 20},
    {"activation": "silu", "dropout_p": 0.3, "tokens": 1, "d": 33, "d_ff": 257, "d_out": 129},
]
FULL: list[dict[str, Any]] = [{"activation": a, "dropout_p": p} for a in ACTIVATIONS for p in (0.0, 0.3)]
FULL += [{"activation": a, "dropout_p": 0.3, "dtype": dtype} for a in ACTIVATIONS for dtype in (BF16, FP16)]
FULL += [{"activation": a, "dropout_p": 0.3, "has_bias": False} for a in ("relu", "gelu", "swiglu")]
FULL += [
    {"activation": a, "dropout_p": 0.3, "tokens": tokens, "d": d, "d_ff": d_ff, "d_out": d_out, "dtype": dtype}
    for a, dtype in (("relu", BF16), ("geglu_tanh", torch.float32))
    for tokens, d, d_ff, d_out in ((270, 72, 136, 40), (1, 33, 257, 129), (3, 50, 129, 65))
]


@pytest.mark.parametrize("case", [*EVERYDAY, *(pytest.param(case, marks=pytest.mark.full) for case in FULL)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_against_float64(backend: str, case: dict[str, Any], device: torch.device) -> None:
    check(make(**case, device=device), backend_call(backend, device))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_float64_and_gradcheck(backend: str, activation: str, device: torch.device) -> None:
    p = make(activation, 0.3, tokens=3, d=4, d_ff=5, d_out=3, dtype=torch.float64, device=device)
    call = backend_call(backend, device)
    for name, actual, truth in zip(Results._fields, solve(p, call), plain(p), strict=True):
        torch.testing.assert_close(actual, truth, rtol=1e-12, atol=1e-13, msg=name)

    def with_one_draw(*inputs: Tensor) -> Tensor:
        torch.manual_seed(p.seed)
        return call(*inputs, activation, 0.3)

    assert torch.autograd.gradcheck(with_one_draw, [t.requires_grad_() for t in p.inputs])


@pytest.mark.parametrize("activation", ["relu", "reglu"])
@pytest.mark.parametrize("dropout_p", [0.1, 1.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_mask_is_the_rule(backend: str, dropout_p: float, activation: str, device: torch.device) -> None:
    """Every pre-activation is 1 and weight2 the identity: out is h, and its zeros are the mask. Rows of x are unit
    vectors: dweight1's columns are the rows of dz, and its zeros the mask of the backward."""
    call, (tokens, d_ff) = backend_call(backend, device), (19, 45)
    x, eye = torch.eye(tokens, device=device), torch.eye(d_ff, device=device)
    halves = 2 if activation in GATED else 1
    weight1 = torch.ones(halves * d_ff, tokens, device=device, requires_grad=True)
    torch.manual_seed(3)
    rng_state = philox.draw_rng_state(device)
    keep = philox.keep_mask(rng_state, tokens, d_ff, dropout_p)
    torch.manual_seed(3)
    out = call(x, weight1, None, eye, None, activation, dropout_p)
    out.sum().backward()
    assert torch.equal(out != 0, keep)
    for dweight1 in weight1.grad.chunk(halves):
        assert torch.equal(dweight1.T != 0, keep)


@pytest.mark.parametrize("activation", ["relu", "swiglu"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_recompute(backend: str, activation: str, device: torch.device) -> None:
    """Equal bits, dropout's among them, with nothing of the hidden layer kept between forward and backward."""
    p, call = make(activation, 0.3, device=device), backend_call(backend, device)

    def again(*inputs: Tensor) -> Tensor:
        kept: list[torch.Size] = []

        def note(t: Tensor) -> Tensor:
            kept.append(t.shape)
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            out = feed_forward(*inputs, backend=backend, recompute=True)
        assert not {p.weight1.shape[0], p.weight2.shape[1]} & {shape[-1] for shape in kept if shape[:1] == (21,)}
        return out

    results = solve(p, call)
    for name, once, recomputed in zip(Results._fields, results, solve(p, again), strict=True):
        assert torch.equal(once, recomputed), name
    torch.manual_seed(p.seed)
    with torch.no_grad():
        out = feed_forward(*p.inputs, activation, 0.3, backend=backend, recompute=True)
    assert torch.equal(out, results.out)


@pytest.mark.parametrize("backend", BACKENDS)
def test_draws(backend: str, device: torch.device) -> None:
    """A new mask at every call; the same one under the same seed."""
    p, call = make("relu", 0.5, device=device), backend_call(backend, device)
    torch.manual_seed(1)
    first, second = call(*p.inputs, "relu", 0.5), call(*p.inputs, "relu", 0.5)
    torch.manual_seed(1)
    assert not torch.equal(first, second)
    assert torch.equal(first, call(*p.inputs, "relu", 0.5))


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides(backend: str, device: torch.device) -> None:
    """Expanded (stride 0), transposed and sliced gradients; transposed weights, sliced biases; sliced, unaligned x."""
    p, call = make("gelu", 0.3, device=device), backend_call(backend, device)
    row, one = p.dout[:1], torch.ones((), device=device)
    for dout in (row.expand_as(p.dout), one.expand_as(p.dout), p.dout.T.contiguous().T, p.dout.repeat(1, 2)[:, ::2]):
        check(p.but(dout=dout), call)
    biases = {name: vars(p)[name].repeat_interleave(2)[::2] for name in ("bias1", "bias2")}
    check(p.but(weight1=p.weight1.T.contiguous().T, weight2=p.weight2.T.contiguous().T, **biases), call)
    unaligned = torch.empty(p.x.numel() + 1, device=device)[1:].view_as(p.x).copy_(p.x)
    check(p.but(x=unaligned, weight1=torch.cat([p.weight1, p.weight1], 1)[:, : p.x.shape[1]]), call)
    check(p.but(x=torch.cat([p.x, p.x], 1)[:, : p.x.shape[1]]), call)


@pytest.mark.parametrize("backend", BACKENDS)
def test_leading_dimensions(backend: str, device: torch.device) -> None:
    p, call = make("gelu", 0.3, tokens=12, device=device), backend_call(backend, device)
    rest = (*p.inputs[1:], "gelu", 0.3)
    torch.manual_seed(0)
    rows = call(p.x, *rest)
    torch.manual_seed(0)
    assert torch.equal(call(p.x.view(3, 4, -1), *rest), rows.view(3, 4, -1))
    vector = call(p.x[0], *rest[:-1], 0.0)
    assert vector.shape == (24,)


@pytest.mark.parametrize("needs", ["x", "1", "b", "2c"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_frozen_inputs(backend: str, needs: str, device: torch.device) -> None:
    """Only those get a gradient that ask for one, and it is right."""
    p, call = make("swiglu", 0.3, device=device), backend_call(backend, device)
    everything, some = solve(p, call), solve(p, call, needs)
    for name, letter, a, b in zip(Results._fields[1:], "x1b2c", everything[1:], some[1:], strict=True):
        assert torch.equal(a, b) if letter in needs else b is None, name


@pytest.mark.parametrize("activation", ["relu", "swiglu"])
@pytest.mark.parametrize("empty", ["d", "d_ff", "d_out"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_widths(backend: str, empty: str, activation: str, device: torch.device) -> None:
    p, call = make(activation, 0.5, tokens=5, **{empty: 0}, device=device), backend_call(backend, device)
    check(p, call)
    if empty == "d":
        out = call(p.x, *p.inputs[1:], activation, 0.0)
        torch.testing.assert_close(call(p.x[0], *p.inputs[1:], activation, 0.0), out[0])


@pytest.mark.parametrize("dtype", [torch.float32, BF16, FP16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_everything_dropped(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    for activation in ("relu", "swiglu"):
        p = make(activation, 1.0, tokens=5, dtype=dtype, device=device)
        got = solve(p, backend_call(backend, device))
        assert torch.equal(got.out, p.bias2.expand_as(got.out))
        assert not any(grad.any() for grad in got[1:-1])


@pytest.mark.parametrize("dropout_p", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(0, 16), (3, 0, 16)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens(backend: str, shape: tuple[int, ...], dropout_p: float, device: torch.device) -> None:
    p = make("swiglu", dropout_p, d=16, device=device)
    inputs = [torch.zeros(shape, device=device), *p.inputs[1:]]
    inputs = [t.detach().requires_grad_() for t in inputs]
    out = backend_call(backend, device)(*inputs, "swiglu", dropout_p)
    out.sum().backward()
    assert out.shape == (*shape[:-1], 24) and inputs[0].grad.shape == shape
    for t in inputs[1:]:
        assert torch.equal(t.grad, torch.zeros_like(t))


@pytest.mark.parametrize("activation", ["relu", "geglu"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_bits_run_to_run(backend: str, activation: str, device: torch.device) -> None:
    p, call = make(activation, 0.3, tokens=140, device=device), backend_call(backend, device)
    first = solve(p, call)
    for _ in range(1 if device.type == "cpu" else 30):
        for name, a, b in zip(Results._fields, first, solve(p, call), strict=True):
            assert torch.equal(a, b), name


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, in the interpreter: exp(large) is inf
@pytest.mark.parametrize("backend", BACKENDS)
def test_large_preactivations(backend: str, device: torch.device) -> None:
    """|z| up to some thousands: the exponentials saturate, nothing becomes NaN."""
    call = backend_call(backend, device)
    for activation in ACTIVATIONS:
        p = make(activation, device=device)
        check(p.but(x=p.x * 1000), call)


@pytest.mark.parametrize("backend", BACKENDS)
def test_slopes_near_one(backend: str, device: torch.device) -> None:
    """z from 3 to 6, where 1 - sigmoid cancels and gelu_tanh's slope makes much of what is left."""
    call = backend_call(backend, device)
    z, ones = torch.linspace(3, 6, 301, device=device)[:, None], torch.ones(8, 1, device=device)
    for activation in GATED.values():
        p = make(activation, d=1, d_ff=8, d_out=1, has_bias=False, device=device)
        check(p.but(x=z, weight1=ones, weight2=ones.T / 8, dout=torch.ones_like(z)), call)


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
@pytest.mark.parametrize("backend", KERNELS)
def test_what_is_kept_for_the_backward(backend: str, activation: str, device: torch.device) -> None:
    """No dropout mask and no second tensor: beside inputs and rng_state, one tensor as wide as weight1 has rows."""
    p, call = make(activation, 0.3, tokens=40, device=device), backend_call(backend, device)
    inputs = [t.detach().requires_grad_() for t in p.inputs]
    given, kept = {t.data_ptr() for t in inputs}, []

    def note(t: Tensor) -> Tensor:
        if t.data_ptr() not in given and t.dtype != torch.int64:
            kept.append(tuple(t.shape))
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        call(*inputs, activation, 0.3)
    assert kept == [(40, p.weight1.shape[0])]


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast(backend: str, device: torch.device) -> None:
    p, call = make("gelu", device=device), backend_call(backend, device)
    with torch.autocast(device.type, torch.bfloat16):
        got = solve(p.but(dout=p.dout.bfloat16()), call)
    low = {name: vars(p)[name].bfloat16() for name in ("x", "weight1", "bias1", "weight2", "bias2", "dout")}
    want = solve(p.but(**low), call)
    assert got.out.dtype == torch.bfloat16 and got.dx.dtype == got.dweight1.dtype == torch.float32
    for name, a, b in zip(Results._fields, got, want, strict=True):
        assert torch.equal(a, b.to(a.dtype)), name


@pytest.mark.parametrize("activation, has_bias, dropout_p", [("relu", True, 0.3), ("geglu", False, 0.0)])
@pytest.mark.parametrize("backend", KERNELS)
def test_library_operators(
    backend: str, activation: str, has_bias: bool, dropout_p: float, device: torch.device
) -> None:
    backend_call(backend, device)
    p = make(activation, dropout_p, tokens=6, has_bias=has_bias, device=device)
    inputs = [None if t is None else t.requires_grad_() for t in p.inputs]
    rng_state = philox.draw_rng_state(device) if dropout_p else None
    operator = importlib.import_module("fastattn.ops.feed_forward")._FeedForward._traced.operator
    for recompute in (False, True):
        arguments = (*inputs, activation, dropout_p, rng_state, recompute, backend)
        torch.library.opcheck(operator, arguments)


def test_triton_refuses_float64(device: torch.device) -> None:
    backend_call("triton", device)
    p = make(dtype=torch.float64, device=device)
    assert "float64" in unsupported_reason("feed_forward", "triton", (*p.inputs, "relu", 0.0))


@pytest.mark.parametrize(
    "name, value, error",
    [
        ("x", torch.zeros(4, 8, dtype=torch.int64), TypeError),
        ("x", None, TypeError),
        ("x", torch.zeros(()), ValueError),
        ("weight1", torch.zeros(12, 7), ValueError),
        ("weight1", torch.zeros(12), ValueError),
        ("weight1", torch.zeros(12, 8, dtype=torch.bfloat16), TypeError),
        ("weight1", None, TypeError),
        ("bias1", torch.zeros(8), ValueError),
        ("bias1", torch.zeros(12, device="meta"), ValueError),
        ("weight2", torch.zeros(8, 11), ValueError),
        ("weight2", None, TypeError),
        ("bias2", torch.zeros(12), ValueError),
        ("bias2", torch.zeros(8, dtype=torch.float64), TypeError),
        ("activation", "tanh", ValueError),
        ("activation", None, ValueError),
        ("dropout_p", -0.1, ValueError),
        ("dropout_p", True, TypeError),
        ("backend", "fast", ValueError),
    ],
)
def test_bad_inputs_are_named(name: str, value: object, error: type[Exception]) -> None:
    good = {
        "x": torch.zeros(4, 8),
        "weight1": torch.zeros(12, 8),
        "bias1": torch.zeros(12),
        "weight2": torch.zeros(8, 12),
        "bias2": torch.zeros(8),
    }
    with pytest.raises(error, match=name):
        feed_forward(**(good | {name: value}))


def test_a_gated_weight1_that_is_not_doubled_is_named() -> None:
    x, weight1, weight2 = torch.zeros(4, 8), torch.zeros(6, 8), torch.zeros(8, 6)
    with pytest.raises(ValueError, match=r"weight1 has shape \(6, 8\), expected \(2 \* d_ff, d\) = \(12, 8\)"):
        feed_forward(x, weight1, None, weight2, None, "swiglu")


def test_an_odd_weight_has_no_halves() -> None:
    x, weight1, weight2 = torch.zeros(4, 8), torch.zeros(13, 8), torch.zeros(8, 6)
    with pytest.raises(ValueError, match="weight1 has 13 rows"):
        feed_forward(x, weight1, None, weight2, None, "swiglu")
