"""What is special about dropout + residual + LayerNorm or RMSNorm, in every backend."""

from __future__ import annotations

import pytest
import torch
from catalogue import skip_without, solve
from helpers import backends_of
from layouts import zeros

from fastattn import dropout_add_layer_norm
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
