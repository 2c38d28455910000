"""What is special about dropout + residual + LayerNorm or RMSNorm, in every backend."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from catalogue import skip_without, solve
from helpers import backends_of
from layouts import zeros

from fastattn import dropout_add_layer_norm
from fastattn.backends import load_backend
from fastattn.backends.calls import NormCall
from fastattn.backends.reference import philox
from fastattn.check import cases

full = pytest.mark.full
EVERY_BACKEND = pytest.mark.parametrize("backend", backends_of("add_layer_norm"))


@EVERY_BACKEND
def test_rows_without_variance(backend: str, device: torch.device) -> None:
    """RMSNorm makes 0 of a row of zeros, by eps. With eps_on_std a row of equal elements gives the bias, and its
    gradient is (g - mean(g)) / eps, not NaN; a single element has no standard deviation."""
    p = cases.add_layer_norm(rows=(3,), hidden=40, residual=False, rms=True, device=device)
    assert not solve(p.but(x=p.tensors["x"].index_fill(0, torch.tensor(1, device=device), 0)), backend)["out"][1].any()
    p = cases.add_layer_norm(rows=(3,), hidden=40, residual=False, eps=0.5, eps_on_std=True, device=device)
    p = p.but(x=p.tensors["x"].index_fill(0, torch.tensor(1, device=device), 2.5))
    dout, (_, weight, bias) = torch.randn_like(p.tensors["x"]), p.tensors.values()
    got = solve(p._replace(douts=(dout,)), backend)
    g = dout[1] * weight
    assert torch.equal(got["out"][1], bias)
    torch.testing.assert_close(got["grad of x"][1], (g - g.mean()) / 0.5)
    with pytest.raises(ValueError, match="x has shape.*eps_on_std.*hidden must be at least 2"):
        solve(p.map(lambda t: t[..., :1]), backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=full)])
@pytest.mark.parametrize("hidden", [45, *(pytest.param(hidden, marks=full) for hidden in (256, 1536, 8200))])
@pytest.mark.parametrize("rms", [False, pytest.param(True, marks=full)])
@pytest.mark.parametrize("backend", backends_of("add_layer_norm", kernels_only=True))
def test_x_of_16_bits_and_a_float32_residual(
    backend: str, rms: bool, hidden: int, dtype: torch.dtype, device: torch.device
) -> None:
    """For layers under autocast: the results are those of x.float(), and the gradient of x is the float32 gradient
    rounded to x's dtype. On a GPU Triton sums up the row in another order where x has 16 bits."""
    skip_without(backend, "add_layer_norm", device)
    module, rows = load_backend("add_layer_norm", backend), 37
    normal = partial(torch.randn, device=device)
    x, residual, dout, dz = normal(rows, hidden).to(dtype), *(normal(rows, hidden) for _ in range(3))
    weight, bias, x_bias = normal(hidden), None if rms else normal(hidden), None if rms else normal(hidden)
    dropout_p, rng_state = (0.0, None) if hidden == 256 else (0.3, philox.draw_rng_state(device))
    call = NormCall(x, residual, weight, bias, x_bias, rng_state, 1e-6, dropout_p, False)
    close = {"rtol": 1e-5, "atol": 1e-5} if backend == "triton" and device.type == "cuda" else {"rtol": 0, "atol": 0}
    found, expected = (module.add_layer_norm_fwd(call._replace(x=t)) for t in (x, x.float()))
    assert found[0].dtype == found[1].dtype == torch.float32 and torch.equal(found[1], expected[1])
    torch.testing.assert_close(found, expected, **close)
    read = torch.empty_like(residual, dtype=dtype)
    torch.testing.assert_close(module.add_layer_norm_fwd(call, read=read), found, **close)
    rounded = module.add_layer_norm_fwd(call, out_dtype=dtype)[0]
    assert torch.equal(rounded, found[0].to(dtype)) and torch.equal(read, rounded)
    for some_dz, has_residual in ((dz, True), (None, False)):
        arguments = dout, some_dz, call._replace(x=expected[1]), expected[2], has_residual
        dx, dresidual, *sums = module.add_layer_norm_bwd(*arguments, x_dtype=dtype)
        expected_dx, *others = module.add_layer_norm_bwd(*arguments)
        assert dx.dtype == dtype and (dresidual is None) != has_residual
        torch.testing.assert_close(dx, expected_dx.to(dtype), **close)
        for got, want in zip((dresidual, *sums), others, strict=True):
            assert got is want is None or torch.allclose(got, want, **close)


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
