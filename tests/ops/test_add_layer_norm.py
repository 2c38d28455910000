"""Dropout + residual + LayerNorm or RMSNorm in every backend against float64, forward and backward."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest
import torch
from add_layer_norm_checks import BACKENDS, EPS, Results, backend_call, check, make, plain, solve
from torch import Tensor

from fastattn import dropout_add_rms_norm
from fastattn.backends.reference import philox

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# Several blocks, a ragged last one, several turns of a persistent one; narrow rows that share a warp; rows wider than a
# warp's; one row; odd rows wider than 8192, from where on backwards read their rows twice. Mean 1000, variance 1:
# E[z^2] - mean^2 would keep two or three digits of float32's seven. A standard deviation a hundredth of
# eps: where eps is added to it, it is most of the sum.
EVERYDAY: list[dict[str, Any]] = [
    {"rows": 37, "hidden": 48, "dropout_p": 0.3, "has_x_bias": True},
    {"rows": 37, "hidden": 48, "dropout_p": 0.3, "has_x_bias": True, "rms": True, "mean": 0.5},
    {"rows": 300, "hidden": 7, "has_residual": False},
    {"rows": 5, "hidden": 1030, "dropout_p": 0.3, "rms": True, "has_residual": False},
    {"rows": 9, "hidden": 520, "mean": 1e3},
    {"rows": 37, "hidden": 72, "dropout_p": 0.3, "has_x_bias": True, "dtype": BF16},
    {"rows": 37, "hidden": 72, "has_x_bias": True, "dtype": FP16, "weight_dtype": FP32},
    {"rows": 37, "hidden": 48, "dropout_p": 0.3, "has_x_bias": True, "eps_on_std": True},
    {"rows": 9, "hidden": 520, "has_residual": False, "eps_on_std": True, "std": 1e-8},
]
FULL: list[dict[str, Any]] = [
    {"rows": rows, "hidden": hidden, "dropout_p": p, "has_residual": residual, "has_x_bias": x_bias, "rms": rms}
    for rows, hidden in ((37, 48), (13, 513), (300, 7), (5, 1030), (1, 17))
    for p, residual, x_bias, rms in (
        (0.0, True, True, False), (0.3, True, False, True), (0.3, False, True, False), (0.0, False, False, True)
    )
]  # fmt: skip
FULL += [
    {"rows": 37, "hidden": 72, "dropout_p": p, "has_x_bias": True, "rms": rms, "dtype": dtype, "weight_dtype": weight}
    for dtype in (BF16, FP16)
    for weight in (None, FP32)
    for p, rms in ((0.0, False), (0.3, True))
]
FULL += [
    {"rows": 2, "hidden": 3001, "dropout_p": 0.3, "has_x_bias": True, "dtype": FP16},
    {"rows": 2, "hidden": 8201, "dropout_p": 0.3, "has_x_bias": True},
    {"rows": 2, "hidden": 16384, "dropout_p": 0.3, "has_x_bias": True, "rms": True, "dtype": BF16},
]
FULL += [
    {"rows": rows, "hidden": hidden, "dropout_p": p, "has_x_bias": True, "eps_on_std": True, "dtype": dtype}
    for rows, hidden in ((300, 2), (13, 513), (2, 8201), (2, 16384))
    for p, dtype in ((0.3, FP32), (0.0, BF16), (0.3, FP16))
]


@pytest.mark.parametrize("case", [*EVERYDAY, *(pytest.param(case, marks=pytest.mark.full) for case in FULL)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_against_float64(backend: str, case: dict[str, Any], device: torch.device) -> None:
    p = make(**case, device=device)
    got = check(p, backend_call(backend, device))
    assert got.dweight.dtype == p.weight.dtype and got.out.dtype == p.x.dtype
    if case.get("dtype", FP32) != FP32 and p.x_bias is not None:  # in float32, another dtype
        assert check(p.but(x_bias=p.x_bias.float()), backend_call(backend, device)).dx_bias.dtype == FP32


@pytest.mark.parametrize("variant", [{}, {"rms": True}, {"eps_on_std": True}], ids=str)
@pytest.mark.parametrize("has_residual, dropout_p", [(True, 0.3), (False, 0.0)])
@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_float64_and_gradcheck(
    backend: str, variant: dict[str, bool], has_residual: bool, dropout_p: float, device: torch.device
) -> None:
    p = make(3, 5, dropout_p, has_residual=has_residual, has_x_bias=True, **variant, dtype=torch.float64, device=device)
    call = backend_call(backend, device)
    for name, actual, truth in zip(Results._fields, solve(p, call), plain(p), strict=True):
        if truth is not None:
            torch.testing.assert_close(actual, truth, rtol=1e-12, atol=1e-13, msg=name)
    tensors = {"x": p.x, "residual": p.residual, "weight": p.weight, "bias": p.bias, "x_bias": p.x_bias}
    given = {name: t.requires_grad_() for name, t in tensors.items() if t is not None}

    def with_one_draw(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(p.seed)
        t = dict.fromkeys(tensors) | dict(zip(given, inputs, strict=True))
        inputs = (t["x"], t["residual"], t["weight"], t["bias"], EPS, dropout_p)
        return call(*inputs, x_bias=t["x_bias"], **(variant if p.eps_on_std else {}))

    assert torch.autograd.gradcheck(with_one_draw, list(given.values()))


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_mask_is_the_written_rule(backend: str, dropout_p: float, device: torch.device) -> None:
    """x = 1: what is kept is 1 / (1 - dropout_p), in z and, for a gradient of 1, in dx; element for element. The rule
    itself: test_attention_dropout.py."""
    call, (rows, hidden) = backend_call(backend, device), (11, 77)
    if backend == "aten" and device.type == "cuda":
        pytest.skip("on a GPU aten drops by PyTorch's own rule")
    torch.manual_seed(3)
    expected = philox.keep_factor(philox.draw_rng_state(device), rows, hidden, dropout_p, torch.float32)
    x = torch.ones(rows, hidden, device=device, requires_grad=True)
    ones = torch.ones(hidden, device=device)
    torch.manual_seed(3)
    _, z = call(x, None, ones, ones, EPS, dropout_p)
    z.sum().backward()
    assert torch.equal(z, expected)
    assert torch.equal(x.grad, expected)


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


@pytest.mark.parametrize("dropout_p", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(0, 24), (2, 0, 24)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows(backend: str, shape: tuple[int, ...], dropout_p: float, device: torch.device) -> None:
    x, residual = (torch.zeros(shape, device=device, requires_grad=True) for _ in range(2))
    weight, bias, x_bias = (torch.ones(24, device=device, requires_grad=True) for _ in range(3))
    out, z = backend_call(backend, device)(x, residual, weight, bias, EPS, dropout_p, x_bias=x_bias)
    (out.sum() + z.sum()).backward()
    assert out.shape == z.shape == x.grad.shape == residual.grad.shape == shape
    for t in (weight, bias, x_bias):
        assert torch.equal(t.grad, torch.zeros(24, device=device))


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_everything_dropped(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    """z is the residual or 0, and x gets the gradient 0, also where float16's gradient of z is inf."""
    variants = ({}, {"rms": True}, {"eps_on_std": True}, {"has_x_bias": True})
    for variant, has_residual in itertools.product(variants, (True, False)):
        p = make(5, 24, 1.0, has_residual=has_residual, **variant, dtype=dtype, device=device)
        got = solve(p.but(dout=p.dout * 1024), backend_call(backend, device))
        assert torch.equal(got.z, p.residual if has_residual else torch.zeros_like(p.x))
        assert not got.dx.any() and (got.dx_bias is None or not got.dx_bias.any())
        assert got.out.isfinite().all() and got.dweight.isfinite().all()
        if not has_residual:
            assert torch.equal(got.out, torch.zeros_like(p.x) if p.bias is None else p.bias.expand_as(p.x))


@pytest.mark.full
@pytest.mark.parametrize("multiprocessors, hidden", [(8, 1030), (8, 264), (9, 264)])
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
def test_rms_norm(backend: str, device: torch.device) -> None:
    """No sum returned; a row of zeros gives 0, because of eps; its dropout draws the bits of dropout_add_layer_norm."""
    p, call = make(12, 40, rms=True, device=device), backend_call(backend, device)
    x = p.x.clone()
    x[3] = 0
    out = dropout_add_rms_norm(x.view(3, 4, 40), None, p.weight, eps=1e-5, backend=backend)
    expected = x * (x.square().mean(1, keepdim=True) + 1e-5).rsqrt() * p.weight
    torch.testing.assert_close(out, expected.view(3, 4, 40))
    assert not out[0, 3].any()
    p = make(6, 40, 0.5, device=device)
    torch.testing.assert_close(solve(p.but(bias=None), call).z, solve(p, call).z, rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_eps_on_std(backend: str, device: torch.device) -> None:
    """eps is added to the standard deviation; a row of equal elements gives the bias, and its gradient is
    (g - mean(g)) / eps, not NaN; a single element has no standard deviation."""
    p, call = make(12, 40, eps_on_std=True, device=device), backend_call(backend, device)
    x = p.x.clone()
    x[3] = 2.5
    x.requires_grad_()
    out, _ = call(x, None, p.weight, p.bias, 0.5, 0.0, eps_on_std=True)
    expected = p.weight * (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 0.5) + p.bias
    torch.testing.assert_close(out, expected)
    assert torch.equal(out[3], p.bias)
    (dx,) = torch.autograd.grad(out, x, p.dout)
    g = p.dout[3] * p.weight
    torch.testing.assert_close(dx[3], (g - g.mean()) / 0.5)
    with pytest.raises(ValueError, match="x has shape.*eps_on_std.*hidden must be at least 2"):
        call(x[:, :1], None, p.weight[:1], p.bias[:1], EPS, 0.0, eps_on_std=True)
