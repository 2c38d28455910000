"""Dropout + residual + LayerNorm in every backend against float64, forward and backward; and bugs that are to be found."""

from __future__ import annotations

import importlib

import pytest
import torch
from add_layer_norm_checks import (
    BACKENDS,
    EPS,
    Problem,
    Results,
    backend_call,
    check,
    exact,
    make,
    plain,
    planted,
    solve,
)
from helpers import assert_close_as_torch, backends_of
from torch import Tensor

from fastattn import dropout_add_layer_norm
from fastattn._dispatch import refusal
from fastattn.ops import _library
from fastattn.reference import philox

# rows, hidden: several programs, a ragged last one, several turns of a persistent one; narrow rows that share a warp;
# rows wider than a warp's.
SHAPES = [(37, 48), (13, 513), (300, 7), (5, 1030), (1, 17)]


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("has_residual, has_x_bias", [(True, False), (True, True), (False, False), (False, True)])
@pytest.mark.parametrize("rows, hidden", SHAPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_float32(
    backend: str,
    rows: int,
    hidden: int,
    has_residual: bool,
    has_x_bias: bool,
    dropout_p: float,
    device: torch.device,
) -> None:
    p = make(rows, hidden, dropout_p, has_residual=has_residual, has_x_bias=has_x_bias, device=device)
    check(p, backend_call(backend, device))


@pytest.mark.parametrize(
    "hidden, rms, dtype",
    [(3001, False, torch.float16), (8201, False, torch.float32), (16384, True, torch.bfloat16)],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_widest_rows(backend: str, hidden: int, rms: bool, dtype: torch.dtype, device: torch.device) -> None:
    """Odd, and wider than 8192, from where on the backward reads its rows twice; the widest."""
    check(make(2, hidden, 0.3, has_x_bias=True, rms=rms, dtype=dtype, device=device), backend_call(backend, device))


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_16_bit(
    backend: str, dtype: torch.dtype, weight_dtype: torch.dtype | None, dropout_p: float, device: torch.device
) -> None:
    p = make(37, 72, dropout_p, has_x_bias=True, dtype=dtype, weight_dtype=weight_dtype, device=device)
    if weight_dtype is None:
        check(p, backend_call(backend, device))
        p = p.but(x_bias=p.x_bias.float())  # a type of its own
    got, truth, low = solve(p, backend_call(backend, device)), exact(p), plain(p)
    for name, actual, true, rough in zip(Results._fields, got, truth, low, strict=True):
        assert_close_as_torch(actual, true, rough.to(actual.dtype), name)
    assert got.dweight.dtype == got.dbias.dtype == p.weight.dtype
    assert got.dx_bias.dtype == p.x_bias.dtype


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_float64_and_gradcheck(backend: str, has_residual: bool, dropout_p: float, device: torch.device) -> None:
    p = make(3, 5, dropout_p, has_residual=has_residual, has_x_bias=True, dtype=torch.float64, device=device)
    call = backend_call(backend, device)
    for name, actual, truth in zip(Results._fields, solve(p, call), exact(p), strict=True):
        if truth is not None:
            torch.testing.assert_close(actual, truth, rtol=1e-12, atol=1e-13, msg=name)

    def with_one_draw(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(p.seed)
        x, residual, weight, bias, x_bias = (inputs[0], inputs[1] if has_residual else None, *inputs[-3:])
        return call(x, residual, weight, bias, EPS, dropout_p, x_bias=x_bias)

    inputs = [t.requires_grad_() for t in (p.x, p.residual, p.weight, p.bias, p.x_bias) if t is not None]
    assert torch.autograd.gradcheck(with_one_draw, inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_mean(backend: str, device: torch.device) -> None:
    """Mean 1000, variance 1: E[z^2] - mean^2 would keep two or three digits of float32's seven."""
    check(make(9, 520, mean=1e3, device=device), backend_call(backend, device))
    check(make(9, 520, mean=8, has_residual=False, dtype=torch.bfloat16, device=device), backend_call(backend, device))


def philox_lane(seed: int, offset: int, row: int, col: int) -> int:
    """One element's 16-bit number, from the written rule, in Python's own integers."""
    c = [col // 8, row & 0xFFFFFFFF, row >> 32, offset & 0xFFFFFFFF]
    k = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    for _ in range(7):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c[col % 8 // 2] >> 16 * (col % 2) & 0xFFFF


@pytest.mark.parametrize("dropout_p", [1e-4, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_mask_is_the_written_rule(backend: str, dropout_p: float, device: torch.device) -> None:
    """x = 1: what is kept is 1 / (1 - dropout_p), in z and, for a gradient of 1, in dx; element for element."""
    call, (rows, hidden) = backend_call(backend, device), (11, 77)
    torch.manual_seed(3)
    seed, offset = philox.draw_rng_state(device).tolist()
    threshold = round(dropout_p * 65536)
    rule = [[philox_lane(seed, offset, row, col) >= threshold for col in range(hidden)] for row in range(rows)]
    kept = 0.0 if dropout_p == 1 else 1 / (1 - dropout_p)
    expected = torch.tensor(rule, device=device) * torch.tensor(kept, dtype=torch.float32, device=device)
    x = torch.ones(rows, hidden, device=device, requires_grad=True)
    ones = torch.ones(hidden, device=device)
    torch.manual_seed(3)
    _, z = call(x, None, ones, ones, EPS, dropout_p)
    z.sum().backward()
    assert torch.equal(z, expected)
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_draws(backend: str, device: torch.device) -> None:
    """A new mask at every call; the same one under the same seed; the same in every backend."""
    p, call = make(8, 64, 0.5, device=device), backend_call(backend, device)
    inputs = (p.x, p.residual, p.weight, p.bias, EPS, 0.5)
    torch.manual_seed(1)
    first, second = call(*inputs)[1], call(*inputs)[1]
    torch.manual_seed(1)
    again = call(*inputs)[1]
    torch.manual_seed(1)
    reference = backend_call("reference", device)(*inputs)[1]
    assert not torch.equal(first, second)
    assert torch.equal(first, again)
    torch.testing.assert_close(first, reference, rtol=1e-6, atol=1e-6)  # one dropped element more would be off by 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_of_dout(backend: str, device: torch.device) -> None:
    """Expanded (stride 0, as from out.sum()), transposed and sliced gradients."""
    p, call = make(12, 264, 0.3, device=device), backend_call(backend, device)
    row, one = p.dout[:1], torch.ones((), device=device)
    for dout in (row.expand(12, 264), one.expand(12, 264), p.dout.t().contiguous().t(), p.dout.repeat(1, 2)[:, ::2]):
        check(p.but(dout=dout, dz=dout), call)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shapes_and_strides_of_inputs(backend: str, device: torch.device) -> None:
    """Leading dimensions, transposed, sliced and unaligned inputs give the bits of plain rows."""
    p, call = make(12, 40, 0.3, device=device), backend_call(backend, device)

    def run(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        return call(x, residual, p.weight, p.bias, EPS, 0.3)

    expected = run(p.x, p.residual)
    unaligned = torch.empty(12 * 40 + 1, device=device)[1:].view(12, 40).copy_(p.residual)
    wide = torch.cat([p.x, p.x], 1)[:, :40]
    for x, residual in (
        (p.x.view(3, 4, 40), p.residual.view(3, 4, 40)),
        (p.x.t().contiguous().t(), unaligned),
        (wide, p.residual.repeat_interleave(2, 0)[::2]),
    ):
        for got, want in zip(run(x, residual), expected, strict=True):
            assert got.shape == x.shape
            assert torch.equal(got.reshape(12, 40), want)


@pytest.mark.parametrize("needs", ["x", "r", "w", "b", "i", "xr", "wb"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_frozen_inputs(backend: str, needs: str, device: torch.device) -> None:
    """Only those get a gradient that ask for one, and it is the one they get among all."""
    p, call = make(6, 40, 0.3, has_x_bias=True, device=device), backend_call(backend, device)
    everything, some = solve(p, call), solve(p, call, needs)
    for name, letter, a, b in zip(Results._fields[2:], "xrwbi", everything[2:], some[2:], strict=True):
        assert torch.equal(a, b) if letter in needs else b is None, name


@pytest.mark.parametrize("unused", ["out", "z"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_output_used(backend: str, unused: str, device: torch.device) -> None:
    p, call = make(6, 40, 0.3, device=device), backend_call(backend, device)
    zeroed = p.but(**{"dout" if unused == "out" else "dz": torch.zeros_like(p.x)})
    x = p.x.detach().requires_grad_()
    torch.manual_seed(p.seed)
    out, z = call(x, p.residual, p.weight, p.bias, EPS, 0.3)
    (z if unused == "out" else out).backward(p.dz if unused == "out" else p.dout)
    torch.testing.assert_close(x.grad, solve(zeroed, call).dx, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 24), (0, 3, 24), (2, 0, 24)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows(backend: str, shape: tuple[int, ...], device: torch.device) -> None:
    x, residual = (torch.zeros(shape, device=device, requires_grad=True) for _ in range(2))
    weight, bias, x_bias = (torch.ones(24, device=device, requires_grad=True) for _ in range(3))
    out, z = backend_call(backend, device)(x, residual, weight, bias, EPS, 0.3, x_bias=x_bias)
    (out.sum() + z.sum()).backward()
    assert out.shape == z.shape == x.grad.shape == residual.grad.shape == shape
    for t in (weight, bias, x_bias):
        assert torch.equal(t.grad, torch.zeros(24, device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_bits_run_to_run(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    p, call = make(20, 130, 0.3, has_x_bias=True, dtype=dtype, device=device), backend_call(backend, device)
    first = solve(p, call)
    for _ in range(1 if device.type == "cpu" else 30):
        for name, a, b in zip(Results._fields, first, solve(p, call), strict=True):
            assert torch.equal(a, b), name


@pytest.mark.parametrize("multiprocessors, hidden", [(8, 1030), (8, 264), (9, 264), (20, 264)])
def test_triton_weight_gradients_of_many_programs(
    multiprocessors: int, hidden: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One, whole and broken groups of programs that add their sums up in the launch; a wide row's, in another."""
    call = backend_call("triton", device)
    norm = importlib.import_module("fastattn.kernels.common.norm")
    monkeypatch.setattr(norm, "multiprocessors", lambda x: multiprocessors)
    p = make(170 if hidden < 1000 else 40, hidden, has_x_bias=True, device=device)
    first = check(p, call)
    for name, a, b in zip(Results._fields, first, solve(p, call), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_forward_has_several_backwards(backend: str, device: torch.device) -> None:
    """What the forward leaves for the backward is as it was when that ends."""
    p, call = make(20, 40, 0.3, device=device), backend_call(backend, device)
    weight = p.weight.detach().requires_grad_()
    out, _ = call(p.x, p.residual, weight, p.bias, EPS, 0.3)
    grads = [torch.autograd.grad(out, weight, p.dout, retain_graph=True)[0] for _ in range(3)]
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_the_sum(backend: str, device: torch.device) -> None:
    p, call = make(6, 40, device=device), backend_call(backend, device)
    out = dropout_add_layer_norm(p.x, p.residual, p.weight, p.bias, backend=backend)
    assert torch.equal(out, call(p.x, p.residual, p.weight, p.bias, 1e-6, 0.0)[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast(backend: str, device: torch.device) -> None:
    """Under autocast x and residual arrive in its dtype; float32 weights stay float32, their gradients too."""
    p, call = make(6, 40, has_x_bias=True, device=device), backend_call(backend, device)
    with torch.autocast(device.type, torch.bfloat16):
        got = solve(p.but(dout=p.dout.bfloat16(), dz=p.dz.bfloat16()), call)
    cast = {name: vars(p)[name].bfloat16() for name in ("x", "residual", "dout", "dz")}
    want = solve(p.but(**cast), call)
    assert got.out.dtype == got.z.dtype == torch.bfloat16
    assert got.dx.dtype == got.dweight.dtype == got.dx_bias.dtype == torch.float32
    for name, a, b in zip(Results._fields, got, want, strict=True):
        assert torch.equal(a, b.to(a.dtype)), name


@pytest.mark.parametrize("has_residual, dropout_p", [(True, 0.3), (False, 0.0)])
@pytest.mark.parametrize("backend", backends_of("add_layer_norm", kernels_only=True))
def test_library_operators(backend: str, has_residual: bool, dropout_p: float, device: torch.device) -> None:
    backend_call(backend, device)
    p = make(6, 40, dropout_p, has_residual=has_residual, has_x_bias=not has_residual, device=device)
    rng_state = philox.draw_rng_state(device) if dropout_p else None
    *inputs, x_bias = [None if t is None else t.requires_grad_() for t in (p.x, p.residual, p.weight, p.bias, p.x_bias)]
    torch.library.opcheck(_library.add_layer_norm_op, (*inputs, EPS, dropout_p, rng_state, x_bias, backend))


def test_triton_refusals(device: torch.device) -> None:
    backend_call("triton", device)
    wide, x = torch.zeros(1, 16385, device=device), torch.zeros(1, 8, device=device, dtype=torch.float64)
    assert "16384" in refusal("add_layer_norm", "triton", (wide, None, wide[0], wide[0], 0.0))
    assert "float64" in refusal("add_layer_norm", "triton", (x, None, x[0], x[0], 0.0))


@pytest.mark.parametrize(
    "name, value, error",
    [
        ("x", torch.zeros(4, 8, dtype=torch.int64), TypeError),
        ("x", [1.0], TypeError),
        ("x", torch.zeros(()), ValueError),
        ("residual", torch.zeros(3, 8), ValueError),
        ("residual", torch.zeros(4, 8, dtype=torch.bfloat16), TypeError),
        ("residual", torch.zeros(4, 8, device="meta"), ValueError),
        ("weight", torch.zeros(7), ValueError),
        ("weight", torch.zeros(8, dtype=torch.bfloat16), TypeError),
        ("bias", torch.zeros(4, 8), ValueError),
        ("bias", torch.zeros(8, dtype=torch.float64), TypeError),
        ("bias", None, TypeError),
        ("x_bias", torch.zeros(4, 8), ValueError),
        ("x_bias", torch.zeros(8, dtype=torch.bfloat16), TypeError),
        ("x_bias", torch.zeros(8, device="meta"), ValueError),
        ("x_bias", 0.0, TypeError),
        ("eps", -1.0, ValueError),
        ("dropout_p", 1.5, ValueError),
        ("dropout_p", float("nan"), ValueError),
        ("dropout_p", "0.1", TypeError),
        ("backend", "fast", ValueError),
    ],
)
def test_bad_inputs_are_named(name: str, value: object, error: type[Exception]) -> None:
    good = {"x": torch.zeros(4, 8), "residual": torch.zeros(4, 8), "weight": torch.zeros(8), "bias": torch.zeros(8)}
    with pytest.raises(error, match=name):
        dropout_add_layer_norm(**(good | {name: value}))


# bug -> the problem that must find it (the kinds that every backend is given above) and the result it must be found in.
WITH_DROPOUT, LARGE_MEAN = make(37, 48, 0.3, has_x_bias=True), make(9, 520, mean=1e3)
HALF = make(37, 72, 0.3, dtype=torch.bfloat16)
HALF_MEAN = make(9, 520, mean=8, has_residual=False, dtype=torch.bfloat16)
PLANTED = {
    "residual ignored": (WITH_DROPOUT, "out"),
    "variance from E[z^2] - mean^2": (LARGE_MEAN, "out"),
    "variance over hidden - 1": (WITH_DROPOUT, "out"),
    "mean in the input dtype": (HALF_MEAN, "out"),
    "dropout row off by one": (WITH_DROPOUT, "out"),
    "dropout column off by one": (WITH_DROPOUT, "out"),
    "dropout without rescale": (WITH_DROPOUT, "out"),
    "backward redraws dropout": (WITH_DROPOUT, "dx"),
    "backward without dropout": (WITH_DROPOUT, "dx"),
    "mean of the gradient missing": (WITH_DROPOUT, "dx"),
    "second mean missing": (WITH_DROPOUT, "dx"),
    "dz ignored": (WITH_DROPOUT, "dx"),
    "last row missing in dweight": (WITH_DROPOUT, "dweight"),
    "x_bias ignored": (WITH_DROPOUT, "out"),
    "x_bias not dropped": (WITH_DROPOUT, "out"),
    "dresidual summed for x_bias": (WITH_DROPOUT, "dx_bias"),
}


@pytest.mark.parametrize("problem", [WITH_DROPOUT, LARGE_MEAN, HALF, HALF_MEAN])
def test_the_unplanted_formula_passes(problem: Problem) -> None:
    check(problem, planted(None))


@pytest.mark.parametrize("bug", PLANTED)
def test_each_planted_bug_is_found(bug: str) -> None:
    problem, result = PLANTED[bug]
    with pytest.raises(AssertionError, match=f"^{result}: error"):
        check(problem, planted(bug))


@pytest.mark.parametrize("bug", ["dropout column off by one", "second mean missing", "dz ignored"])
def test_16_bit_tolerance_is_not_idle(bug: str) -> None:
    with pytest.raises(AssertionError):
        check(HALF, planted(bug))
