"""What is special about dropout + residual + LayerNorm or RMSNorm, in every backend."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from checks import skip_without, solve
from helpers import backends_of
from layouts import zeros
from torch import Tensor

from fastattn import dropout_add_layer_norm, dropout_add_rms_norm
from fastattn.backends import load_backend
from fastattn.backends.calls import NormCall
from fastattn.backends.reference import philox
from fastattn.check import cases

EVERY_BACKEND = pytest.mark.parametrize("backend", backends_of("add_layer_norm"))


@pytest.mark.bug_class("T15")
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


@pytest.mark.bug_class("T20")
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


@pytest.mark.bug_class("T18")
@pytest.mark.parametrize(
    ("dtype", "hidden", "dropout_p", "rms", "has_x_bias", "has_dz"),
    [
        (torch.bfloat16, 45, 0.3, False, True, True),
        (torch.float16, 256, 0.0, True, False, False),
        *(
            pytest.param(*values, marks=pytest.mark.full)
            for values in itertools.product(
                (torch.bfloat16, torch.float16), (45, 256, 1536), (0.0, 0.3), *[(False, True)] * 3
            )
        ),
        pytest.param(torch.bfloat16, 8200, 0.0, False, True, True, marks=pytest.mark.full),
        pytest.param(torch.float16, 8200, 0.3, False, True, False, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("backend", backends_of("add_layer_norm", kernels_only=True))
def test_x_of_16_bits_and_a_float32_residual(
    backend: str,
    dtype: torch.dtype,
    hidden: int,
    dropout_p: float,
    rms: bool,
    has_x_bias: bool,
    has_dz: bool,
    device: torch.device,
) -> None:
    """The results are those of x.float(), and the gradient of x is the float32 gradient rounded to x's dtype. What the
    kernels do for layers under autocast has equal bits to what casts around them would do. On a GPU Triton sums up the
    row in another order where x has 16 bits."""
    skip_without(backend, "add_layer_norm", device)
    module, rows = load_backend("add_layer_norm", backend), 37
    generator = torch.Generator(device).manual_seed(hidden)
    normal = partial(torch.randn, device=device, generator=generator)
    x, residual, dout, dz = normal(rows, hidden).to(dtype), *(normal(rows, hidden) for _ in range(3))
    weight, bias, x_bias = (normal(hidden) for _ in range(3))
    bias, x_bias, dz = None if rms else bias, x_bias if has_x_bias else None, dz if has_dz else None
    rng_state = philox.draw_rng_state(device) if dropout_p > 0 else None
    call = NormCall(x, residual, weight, bias, x_bias, rng_state, 1e-6, dropout_p, False)
    assert module.unsupported_reason(x, residual, weight, bias, dropout_p, x_bias) is None
    found, expected = (module.add_layer_norm_fwd(call._replace(x=t)) for t in (x, x.float()))
    assert found[0].dtype == found[1].dtype == torch.float32
    is_exact = backend == "cuda" or device.type == "cpu"
    assert_same(found, expected, is_exact)
    assert torch.equal(found[1], expected[1])  # z, which depends on no sum
    read = torch.empty_like(residual, dtype=dtype)
    assert_same(module.add_layer_norm_fwd(call, read=read), found, is_exact)
    rounded, *others = module.add_layer_norm_fwd(call, out_dtype=dtype)
    assert_same((read, rounded, *others), (*[found[0].to(dtype)] * 2, *found[1:]), is_exact)

    _, z, statistics = expected
    for has_residual in (True, False):
        arguments = dout, dz, call._replace(x=z), statistics, has_residual
        dx, dresidual, *sums = module.add_layer_norm_bwd(*arguments, x_dtype=dtype)
        expected_dx, *others = module.add_layer_norm_bwd(*arguments)
        assert dx.dtype == dtype and (dresidual is None) != has_residual
        assert_same((dx, dresidual, *sums), (expected_dx.to(dtype), *others), is_exact)


def assert_same(found: Sequence[Tensor | None], expected: Sequence[Tensor | None], is_exact: bool) -> None:
    """By their bits, or within the rounding of sums."""
    for a, b in zip(found, expected, strict=True):
        if a is None or b is None or is_exact:
            assert (a is None and b is None) or torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=max(torch.finfo(a.dtype).eps, 1e-5), atol=1e-5)


@pytest.mark.bug_class("T1")
@pytest.mark.parametrize("backend", ["triton"])
def test_rows_beyond_2_31_elements(backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2^17 + 1 rows the last, whose program alone runs."""
    skip_without(backend, "add_layer_norm", device)
    if device.type == "cpu":  # the programs of a launch are numbered by range() there
        monkeypatch.setattr("triton.runtime.interpreter.range", lambda n: [n - 1], raising=False)
    monkeypatch.setattr(torch, "empty_like", lambda t, **_: zeros(t.dtype, t.device, *t.shape))
    weight, bias, last = torch.randn(3, 16384, device=device).bfloat16()
    x = zeros(torch.bfloat16, device, 2**17 + 1, 16384)
    x[-1] = last
    with torch.no_grad():
        few, many = (dropout_add_layer_norm(t, t, weight, bias, backend=backend) for t in (x[-1:], x))
    assert torch.equal(few[0], many[-1])
