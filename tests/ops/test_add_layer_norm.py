"""What is special about dropout + residual + LayerNorm or RMSNorm, in every backend."""

from __future__ import annotations

import pytest
import torch
from checks import skip_without, solve
from helpers import backends_of

from fastattn import dropout_add_layer_norm, dropout_add_rms_norm
from fastattn.backends.reference import philox
from fastattn.check import cases

EVERY_BACKEND = pytest.mark.parametrize("backend", backends_of("add_layer_norm"))


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 1.0])
@EVERY_BACKEND
def test_mask_is_the_written_rule(backend: str, dropout_p: float, device: torch.device) -> None:
    """x = 1: what is kept is 1 / (1 - dropout_p), in z and, for a gradient of 1, in dx; element for element. The rule
    itself: test_attention_dropout.py."""
    skip_without(backend, "add_layer_norm", device)
    rows, hidden = 11, 77
    if backend == "aten" and device.type == "cuda":
        pytest.skip("on a GPU aten drops by PyTorch's own rule")
    torch.manual_seed(3)
    expected = philox.keep_factor(philox.draw_rng_state(device), rows, hidden, dropout_p, torch.float32)
    x = torch.ones(rows, hidden, device=device, requires_grad=True)
    ones = torch.ones(hidden, device=device)
    torch.manual_seed(3)
    _, z = dropout_add_layer_norm(x, None, ones, ones, dropout_p=dropout_p, return_sum=True, backend=backend)
    z.sum().backward()
    assert torch.equal(z, expected)
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("unused", [0, 1])
@EVERY_BACKEND
def test_one_output_used(backend: str, unused: int, device: torch.device) -> None:
    p = cases.add_layer_norm(rows=(6,), hidden=40, dropout_p=0.3, return_sum=True, device=device)
    douts = [torch.randn_like(p.tensors["x"]) for _ in range(2)]
    douts[unused].zero_()
    expected = solve(p._replace(douts=tuple(douts)), backend)
    p = p.but(x=p.tensors["x"].requires_grad_())
    torch.manual_seed(cases.SEED)
    outputs = p.function(**p.arguments(), backend=backend)
    outputs[1 - unused].backward(douts[1 - unused])
    torch.testing.assert_close(p.tensors["x"].grad, expected["grad of x"], rtol=1e-6, atol=1e-6)


@EVERY_BACKEND
def test_rms_norm(backend: str, device: torch.device) -> None:
    """No sum returned; a row of zeros gives 0, as eps says; its dropout draws the bits of dropout_add_layer_norm."""
    skip_without(backend, "add_rms_norm", device)
    p = cases.add_layer_norm(rows=(12,), hidden=40, rms=True, device=device)
    x, weight = p.tensors["x"].clone(), p.tensors["weight"]
    x[3] = 0
    out = dropout_add_rms_norm(x.view(3, 4, 40), None, weight, eps=1e-5, backend=backend)
    expected = x * (x.square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight
    torch.testing.assert_close(out, expected.view(3, 4, 40))
    assert not out[0, 3].any()
    sizes = {"rows": (6,), "hidden": 40, "dropout_p": 0.5, "return_sum": True, "device": device}
    sums = [solve(cases.add_layer_norm(**sizes, rms=rms), backend)["out[1]"] for rms in (False, True)]
    torch.testing.assert_close(*sums, rtol=0, atol=0)


@EVERY_BACKEND
def test_eps_on_std(backend: str, device: torch.device) -> None:
    """eps is added to the standard deviation; a row of equal elements gives the bias, and its gradient is
    (g - mean(g)) / eps, not NaN; a single element has no standard deviation."""
    skip_without(backend, "add_layer_norm", device)
    tensors = cases.add_layer_norm(rows=(12,), hidden=40, device=device).tensors
    x, weight, bias = tensors["x"].clone(), tensors["weight"], tensors["bias"]
    x[3] = 2.5
    x.requires_grad_()
    options = {"eps": 0.5, "eps_on_std": True, "backend": backend}
    out = dropout_add_layer_norm(x, None, weight, bias, **options)
    expected = weight * (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 0.5) + bias
    torch.testing.assert_close(out, expected)
    assert torch.equal(out[3], bias)
    dout = torch.randn_like(x)
    (dx,) = torch.autograd.grad(out, x, dout)
    g = dout[3] * weight
    torch.testing.assert_close(dx[3], (g - g.mean()) / 0.5)
    with pytest.raises(ValueError, match="x has shape.*eps_on_std.*hidden must be at least 2"):
        dropout_add_layer_norm(x[:, :1], None, weight[:1], bias[:1], **options)
