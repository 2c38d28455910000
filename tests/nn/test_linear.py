"""Linear maps of one input as one product: the same results as one by one, with separate parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
from model_checks import DEVICE
from torch import Tensor, nn

from fastattn.nn.linear import joint_linear, wide_mm

ROWS, D = (12, 8, 20), 16
BIASED = [*product((False, True), repeat=3)]


def linear_maps(dtype: torch.dtype = torch.float32, biased: Sequence[bool] = (False,) * 3) -> list[nn.Linear]:
    return [nn.Linear(D, n, bias, device=DEVICE, dtype=dtype) for n, bias in zip(ROWS, biased, strict=True)]


def solve(linears: list[nn.Linear], x: Tensor, call: Callable[[Tensor], Sequence[Tensor]]) -> tuple[list[Tensor], ...]:
    """Outputs, and the gradients of x and of each parameter that is trained, for fixed gradients of the outputs."""
    x = x.detach().requires_grad_()
    out = call(x)
    douts = [torch.cos(torch.arange(t.numel(), device=DEVICE)).view(t.shape).to(t) for t in out]
    parameters = [p for linear in linears for p in linear.parameters() if p.requires_grad]
    return [t.detach() for t in out], list(torch.autograd.grad(out, [x, *parameters], douts))


@pytest.mark.parametrize("biased", BIASED)
@pytest.mark.parametrize("shape", [(3, 5, D), (2, 0, D)])
@pytest.mark.parametrize("frozen", [False, True])
def test_same_as_one_by_one(shape: tuple[int, ...], biased: Sequence[bool], frozen: bool) -> None:
    linears, x = linear_maps(torch.float64, biased), torch.randn(shape, dtype=torch.float64, device=DEVICE)
    linears[1].weight.requires_grad_(not frozen)
    found = solve(linears, x, lambda x: joint_linear(x, linears, backend="aten"))
    expected = solve(linears, x, lambda x: [linear(x) for linear in linears])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    with torch.autocast(DEVICE, torch.bfloat16):  # float64 stays
        assert {t.dtype for t in joint_linear(x, linears, backend="aten")} == {torch.float64}
    assert joint_linear(x, [], backend="aten") == ()


@pytest.mark.parametrize("biased", BIASED[:4])
def test_autocast_casts_and_gives_float32_gradients(biased: Sequence[bool]) -> None:
    linears, x = linear_maps(biased=biased), torch.randn(3, 5, D, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        out, grads = solve(linears, x, lambda x: joint_linear(x, linears, backend="aten"))
        expected, expected_grads = solve(linears, x, lambda x: [linear(x) for linear in linears])
    assert {t.dtype for t in out} == {torch.bfloat16} and {t.dtype for t in grads} == {torch.float32}
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(grads, expected_grads, rtol=2**-6, atol=2**-4)


@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize("result", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide_mm(dtype: torch.dtype, result: torch.dtype, is_added: bool) -> None:
    """Of a transposed matrix, as gradients of weights are, and of one without rows."""
    result = dtype if dtype == torch.float32 else result
    for count in (33, 0):
        a, b = (torch.randn(count, n, dtype=dtype, device=DEVICE).t() for n in (24, 40))
        added = torch.randn(24, 40, dtype=result, device=DEVICE) if is_added else None
        exact = a.double() @ b.double().t() + (0 if added is None else added.double())
        found = wide_mm(a, b.t(), result, added)
        assert found.dtype == result
        rounding = torch.finfo(result if a.is_cuda else dtype).eps * (exact.abs().max() + 20)
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=float(rounding))
