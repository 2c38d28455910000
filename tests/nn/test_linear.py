"""Linear maps of one input as one product: the same results as one by one, with separate parameters."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastattn.nn.linear import joint_linear, wide_mm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, D = (12, 8, 20), 16


def linear_maps(dtype=torch.float32, biased=(False,) * 3):
    return [nn.Linear(D, rows, bias, device=DEVICE, dtype=dtype) for rows, bias in zip(ROWS, biased, strict=True)]


def solve(linears, x, call):
    """Outputs, and the gradients of x and of each parameter, for fixed gradients of the outputs."""
    x = x.detach().requires_grad_()
    out = call(x)
    douts = [torch.cos(torch.arange(t.numel(), device=DEVICE)).view(t.shape).to(t) for t in out]
    parameters = [p for linear in linears for p in linear.parameters()]
    return [t.detach() for t in out], torch.autograd.grad(out, [x, *parameters], douts)


@pytest.mark.parametrize("biased", list(product((False, True), repeat=3)))
@pytest.mark.parametrize("shape", [(3, 5, D), (7, D), (2, 0, D)])
def test_same_as_one_by_one(shape, biased):
    linears, x = linear_maps(torch.float64, biased), torch.randn(shape, dtype=torch.float64, device=DEVICE)
    out, grads = solve(linears, x, lambda x: joint_linear(x, linears, backend="aten"))
    expected, expected_grads = solve(linears, x, lambda x: [linear(x) for linear in linears])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(grads, expected_grads, rtol=0, atol=1e-13)


@pytest.mark.parametrize("biased", [(False, False, False), (False, True, False), (True, False, True)])
def test_autocast_casts_and_gives_float32_gradients(biased):
    linears, x = linear_maps(biased=biased), torch.randn(3, 5, D, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        out, grads = solve(linears, x, lambda x: joint_linear(x, linears, backend="aten"))
        expected, expected_grads = solve(linears, x, lambda x: [linear(x) for linear in linears])
    assert [t.dtype for t in out] == [torch.bfloat16] * 3 and {t.dtype for t in grads} == {torch.float32}
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(grads, expected_grads, rtol=2**-6, atol=2**-4)


def test_frozen_weights_get_no_gradient():
    linears = linear_maps()
    linears[1].weight.requires_grad_(False)
    sum(t.sum() for t in joint_linear(torch.randn(2, D, device=DEVICE), linears, backend="aten")).backward()
    assert [linear.weight.grad is None for linear in linears] == [False, True, False]


class Adapted(nn.Linear):
    """Like the adapters of fine-tuning libraries: another class of linear map."""


def test_when_there_is_one_product(monkeypatch):
    """In training with unmodified maps, on a CPU where their weights are small or cast. Hooks and adapters are called,
    and inference copies no weights."""
    x, products, linear = torch.randn(2, D, device=DEVICE), [], F.linear
    monkeypatch.setattr(F, "linear", lambda *arguments: products.append(arguments[1].shape[0]) or linear(*arguments))

    def shapes(linears, is_cast=True, **options):
        products.clear()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=is_cast):
            joint_linear(x, linears, **{"backend": "aten"} | options)
        return products

    linears, hooked, adapted = linear_maps(), linear_maps(), linear_maps()
    calls = []
    hooked[0].register_forward_hook(lambda *_: calls.append("hook"))
    adapted[1].__class__ = Adapted
    assert shapes(linears) == [sum(ROWS)]
    assert shapes(linears, is_cast=False) == [sum(ROWS)]
    wide = [nn.Linear(D, 2048, device=DEVICE) for _ in range(2)]  # to concatenate these would cost more
    assert shapes(wide) == [4096]
    assert shapes(wide, is_cast=False) == ([2048, 2048] if DEVICE == "cpu" else [4096])
    assert shapes(linears, backend="reference") == [*ROWS]
    assert shapes(hooked) == [*ROWS] and calls == ["hook"]
    assert shapes(adapted) == [*ROWS]
    assert shapes([*linears[:2], linear_maps(torch.float64)[2].float().requires_grad_(False)]) == [sum(ROWS)]
    with torch.no_grad():
        assert shapes(linears) == [*ROWS]
    assert joint_linear(x, [], backend="aten") == ()


def test_float64_stays_under_autocast():
    linears, x = linear_maps(torch.float64), torch.randn(2, D, dtype=torch.float64, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert {t.dtype for t in joint_linear(x, linears, backend="aten")} == {torch.float64}


@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize("result", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_wide_mm(dtype, result, is_added):
    """Of a transposed matrix, as gradients of weights are, and of one without rows."""
    if dtype == torch.float32:
        result = dtype
    for rows in (33, 0):
        a, b = (torch.randn(rows, n, dtype=dtype, device=DEVICE).t() for n in (24, 40))
        added = torch.randn(24, 40, dtype=result, device=DEVICE) if is_added else None
        exact = a.double() @ b.double().t() + (0 if added is None else added.double())
        found = wide_mm(a, b.t(), result, added)
        assert found.dtype == result
        rounding = torch.finfo(result if a.is_cuda else dtype).eps * (exact.abs().max() + 20)
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=float(rounding))
