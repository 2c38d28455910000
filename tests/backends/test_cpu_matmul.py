"""oneDNN's float32 products, chosen as on a Zen 5, against PyTorch's in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import autograd_nodes
from torch import Tensor, nn

from fastattn import feed_forward, linear_cross_entropy
from fastattn.backends import cpu_matmul
from fastattn.models import FusedTransformer
from fastattn.nn.linear import Product

pytestmark = pytest.mark.skipif(not cpu_matmul.has_onednn(), reason="this PyTorch has no products by oneDNN")
CHOICE = cpu_matmul.choice


@pytest.fixture(autouse=True)
def zen_5(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_matmul, "choice", lambda: "oneDNN")


def pytorch_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_matmul, "choice", lambda: "PyTorch")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", ["matrix", "batch", "transposed"])
def test_linear(layout: str, bias: bool) -> None:
    """Results, gradients (one from an expanded view) and second derivatives."""
    torch.manual_seed(0)
    x = torch.randn({"matrix": (520, 96), "batch": (8, 65, 96), "transposed": (96, 520)}[layout])
    given = [x, torch.randn(112, 96), *([torch.randn(112)] if bias else [])]
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [t.to(dtype).requires_grad_() for t in given]
        view = leaves[0].t() if layout == "transposed" else leaves[0]
        out = cpu_matmul.linear(view, *leaves[1:])
        if dtype == torch.float32:
            assert "_LinearBackward" in autograd_nodes(out)
        grads = torch.autograd.grad(out.sum(), leaves, retain_graph=True)  # a gradient of strides 0
        more = torch.autograd.grad(out, leaves, out.detach().cos(), retain_graph=True)
        again = torch.autograd.grad(out.square().sum(), leaves[0], create_graph=True)[0]
        results.append([out, *grads, *more, *torch.autograd.grad(again.square().sum(), leaves[:2])])
    for actual, exact in zip(*results, strict=True):
        torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=1e-4 * exact.abs().max().item())


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_some_need_a_gradient(needs: tuple[bool, ...]) -> None:
    leaves = [
        torch.randn(*n, requires_grad=need) for n, need in zip(((512, 96), (112, 96), (112,)), needs, strict=True)
    ]
    cpu_matmul.linear(*leaves).sum().backward()
    assert [t.grad is not None for t in leaves] == list(needs)


@pytest.mark.parametrize("n", [509, 512])
@pytest.mark.parametrize("rows", [1, 5])
@torch.no_grad()
def test_products_of_a_loop(rows: int, n: int) -> None:
    """One row by the weight's blocks, of which a prime number of rows has none."""
    torch.manual_seed(0)
    weight, bias, x, residual = (torch.randn(*size) for size in ((n, 1024), (n,), (rows, 1024), (rows, n)))
    for biases in ((), (bias,)):
        product = Product(nn.Linear(1, 1), "", [weight], *(biases or (None,)), rows, torch.float32)
        assert (product.by_blocks, product.is_prepacked) == (rows == 1 and n == 512, rows == 5)
        exact = F.linear(*(t.double() for t in (x, weight, *biases)))
        for found in (product.of_rows(x), product(x[None])[0], product.added(x, residual) - residual):
            torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)


def test_compiled() -> None:
    """The products of a graph are oneDNN's, for all numbers of rows."""
    layer = nn.Linear(96, 112)
    compiled = torch.compile(cpu_matmul.linear_in_graph, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (520, 5):
        found = []
        for call in (compiled, cpu_matmul.linear):
            x = torch.randn(2, rows, 96, generator=torch.Generator().manual_seed(0), requires_grad=True)
            out = call(x, layer.weight, layer.bias)
            found.append([out, *torch.autograd.grad(out.cos().sum(), [x, *layer.parameters()])])
        for actual, expected in zip(*found, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def test_when_pytorch_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(512, 96), torch.randn(112, 96)
    assert cpu_matmul.uses_onednn(x, weight)
    assert not cpu_matmul.uses_onednn(x[:8], weight)  # a call costs more than it gains
    assert not cpu_matmul.uses_onednn(x.bfloat16(), weight.bfloat16())  # oneDNN's anyway
    assert not cpu_matmul.uses_onednn(x, nn.Parameter(weight).as_subclass(type("Other", (Tensor,), {})))
    pytorch_is_chosen(monkeypatch)
    assert not cpu_matmul.uses_onednn(x, weight)


def test_compiled_products_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user has set another limit."""
    monkeypatch.setattr(cpu_matmul, "choice", CHOICE)
    monkeypatch.setattr(cpu_matmul, "_mkl_is_slow", lambda: True)
    monkeypatch.setattr(cpu_matmul, "cpu_info", {"cpu family": str(cpu_matmul.ZEN_5)}.get)
    for given in ({}, {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "7", "LRU_CACHE_CAPACITY": "8"}):
        environ = dict(given)
        monkeypatch.setattr(cpu_matmul.os, "environ", environ)
        cpu_matmul._bound_compiled.cache_clear()
        assert cpu_matmul.choice() == "oneDNN"
        limits = [environ[name] for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")]
        assert limits == ([*given.values()] or [str(cpu_matmul.MAX_COMPILED)] * 2)


def test_ops_and_the_model_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight1, weight2 = (torch.randn(*n, requires_grad=True) for n in ((512, 96), (192, 96), (96, 192)))
    assert "_LinearBackward" in autograd_nodes(feed_forward(x, weight1, None, weight2, None))
    target = torch.randint(0, 192, (512,))
    options: dict[str, Any] = {"label_smoothing": 0.1, "logit_scale": 0.3}
    found = []
    for backend in ("aten", "reference"):
        loss = linear_cross_entropy(x, weight1, target, **options, backend=backend)
        found.append([loss, *torch.autograd.grad(loss, (x, weight1))])
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
    model = FusedTransformer(50, 50, 0, 0, d_word_vec=64, d_model=64, d_inner=128, n_layers=1, n_head=2, d_k=32, d_v=32)
    tokens = torch.randint(1, 50, (32, 24))
    assert "_LinearBackward" in autograd_nodes(model(tokens, tokens))
    with torch.autocast("cpu", torch.bfloat16):
        assert "_LinearBackward" not in autograd_nodes(model(tokens, tokens))
    expected = model.eval()(tokens, tokens)
    pytorch_is_chosen(monkeypatch)
    torch.testing.assert_close(model(tokens, tokens), expected, rtol=1e-4, atol=1e-5)
