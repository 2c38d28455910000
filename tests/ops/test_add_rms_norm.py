"""Dropout + residual + RMSNorm in every backend against float64, forward and backward; and bugs that are to be found."""

from __future__ import annotations

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

from fastattn import dropout_add_rms_norm, explain
from fastattn.ops import _library
from fastattn.reference import philox


@pytest.mark.parametrize("has_residual, dropout_p", [(True, 0.3), (True, 0.0), (False, 0.3), (False, 0.0)])
@pytest.mark.parametrize("rows, hidden", [(37, 48), (13, 513), (5, 1030), (1, 17)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_float32(
    backend: str, rows: int, hidden: int, has_residual: bool, dropout_p: float, device: torch.device
) -> None:
    biased = {"has_x_bias": has_residual != (dropout_p > 0)}
    p = make(rows, hidden, dropout_p, has_residual=has_residual, **biased, rms=True, mean=0.5, device=device)
    check(p, backend_call(backend, device))


@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_16_bit(backend: str, dtype: torch.dtype, weight_dtype: torch.dtype | None, device: torch.device) -> None:
    p = make(37, 72, 0.3, has_x_bias=True, rms=True, dtype=dtype, weight_dtype=weight_dtype, device=device)
    if weight_dtype is None:
        check(p, backend_call(backend, device))
        return
    got, truth, low = solve(p, backend_call(backend, device)), exact(p), plain(p)
    for name, actual, true, rough in zip(Results._fields, got, truth, low, strict=True):
        if actual is not None:
            assert_close_as_torch(actual, true, rough.to(actual.dtype), name)
    assert got.dweight.dtype == torch.float32


@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_float64_and_gradcheck(backend: str, device: torch.device) -> None:
    p = make(3, 5, 0.3, has_x_bias=True, rms=True, dtype=torch.float64, device=device)
    call = backend_call(backend, device)
    for name, actual, truth in zip(Results._fields, solve(p, call), exact(p), strict=True):
        if truth is not None:
            torch.testing.assert_close(actual, truth, rtol=1e-12, atol=1e-13, msg=name)

    def with_one_draw(x: Tensor, residual: Tensor, weight: Tensor, x_bias: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(p.seed)
        return call(x, residual, weight, None, EPS, 0.3, x_bias=x_bias)

    inputs = [t.requires_grad_() for t in (p.x, p.residual, p.weight, p.x_bias)]
    assert torch.autograd.gradcheck(with_one_draw, inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_plain_call(backend: str, device: torch.device) -> None:
    """Leading dimensions, no sum returned, a zero row: 0 and not NaN, as eps says."""
    p = make(12, 40, rms=True, device=device)
    backend_call(backend, device)
    x = p.x.clone()
    x[3] = 0
    out = dropout_add_rms_norm(x.view(3, 4, 40), None, p.weight, 1e-5, backend=backend)
    expected = x * (x.square().mean(1, keepdim=True) + 1e-5).rsqrt() * p.weight
    torch.testing.assert_close(out, expected.view(3, 4, 40))
    assert not out[0, 3].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_bits_run_to_run_and_under_one_seed(backend: str, device: torch.device) -> None:
    p, call = make(20, 130, 0.3, rms=True, device=device), backend_call(backend, device)
    first, second = solve(p, call), solve(p, call)
    for name, a, b in zip(Results._fields, first, second, strict=True):
        assert a is b is None or torch.equal(a, b), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_is_that_of_layer_norm(backend: str, device: torch.device) -> None:
    """The same bits are drawn for the same seed: the sums that both functions return are equal."""
    p, call = make(6, 40, 0.5, device=device), backend_call(backend, device)
    torch.testing.assert_close(solve(p.but(bias=None), call).z, solve(p, call).z, rtol=0, atol=0)


def test_autocast(device: torch.device) -> None:
    p = make(6, 40, rms=True, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        out, z = dropout_add_rms_norm(p.x, p.residual, p.weight, return_sum=True)
    assert out.dtype == z.dtype == torch.bfloat16


@pytest.mark.parametrize("has_residual, dropout_p", [(True, 0.3), (False, 0.0)])
@pytest.mark.parametrize("backend", backends_of("add_layer_norm", kernels_only=True))
def test_library_operators(backend: str, has_residual: bool, dropout_p: float, device: torch.device) -> None:
    backend_call(backend, device)
    p = make(6, 40, dropout_p, has_residual=has_residual, has_x_bias=has_residual, rms=True, device=device)
    rng_state = philox.draw_rng_state(device) if dropout_p else None
    inputs, x_bias = (p.x, p.residual, p.weight, p.bias, EPS, dropout_p, rng_state), p.x_bias
    for t in (p.x, p.residual, p.weight, x_bias):
        if t is not None:
            t.requires_grad_()
    torch.library.opcheck(_library.add_layer_norm_op, (*inputs, x_bias, backend))


def test_its_own_name_in_explanations_and_errors(device: torch.device) -> None:
    x = torch.zeros(4, 8, device=device)
    assert explain("dropout_add_rms_norm", x, None, x[0]).op == "dropout_add_rms_norm"
    assert explain("add_rms_norm", x, None, x[0]).chosen is not None
    with pytest.raises(RuntimeError, match="dropout_add_rms_norm: backend 'triton'.*float64"):
        dropout_add_rms_norm(x.double(), None, x[0].double(), backend="triton")


@pytest.mark.parametrize(
    "name, value, error",
    [
        ("x", [1.0], TypeError),
        ("residual", torch.zeros(3, 8), ValueError),
        ("weight", torch.zeros(7), ValueError),
        ("weight", torch.zeros(8, dtype=torch.bfloat16), TypeError),
        ("x_bias", torch.zeros(7), ValueError),
        ("eps", -1.0, ValueError),
        ("dropout_p", 1.5, ValueError),
        ("backend", "fast", ValueError),
    ],
)
def test_bad_inputs_are_named(name: str, value: object, error: type[Exception]) -> None:
    good = {"x": torch.zeros(4, 8), "residual": torch.zeros(4, 8), "weight": torch.zeros(8)}
    with pytest.raises(error, match=name):
        dropout_add_rms_norm(**(good | {name: value}))


# bug -> the result that it must be found in.
PLANTED = {
    "mean subtracted": "out",
    "variance over hidden - 1": "out",
    "mean of the gradient subtracted": "dx",
    "second mean missing": "dx",
    "last row missing in dweight": "dweight",
}
PROBLEM: Problem = make(37, 48, 0.3, has_x_bias=True, rms=True, mean=0.5)


def test_the_unplanted_formula_passes() -> None:
    check(PROBLEM, planted(None))


@pytest.mark.parametrize("bug", PLANTED)
def test_each_planted_bug_is_found(bug: str) -> None:
    with pytest.raises(AssertionError, match=f"^{PLANTED[bug]}: error"):
        check(PROBLEM, planted(bug))
