"""What is special about return_weights. test_attention.py compares the weights of most calls with float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_checks import KERNEL_BACKENDS, Problem, backend_call, expected, make
from helpers import assert_close_as_torch

from fastattn import AttentionMask, explain, scaled_dot_product_attention, use_backend

full = pytest.mark.full


def weights_of(p: Problem, backend: str | None) -> torch.Tensor:
    torch.manual_seed(p.seed)
    mask = AttentionMask(**p.mask, bias=p.bias)
    options = {"scale": p.scale, "enable_gqa": True, "return_weights": True, "backend": backend}
    return scaled_dot_product_attention(p.q, p.k, p.v, mask, p.dropout_p, **options)[1]


CASES: dict[str, dict[str, Any]] = {
    "decoder, several tiles": dict(Lq=40, Lk=141, D=33, mask="decoder", bias=(1, 4, 40, 141), dropout_p=0.3),
    "grouped": {"Hk": 2, "Lq": 13, "Lk": 21, "D": 16, "mask": "attn_mask", "dtype": torch.bfloat16},
    "everything": {"Lq": 40, "Lk": 70, "D": 250, "Dv": 8, "mask": "everything", "dtype": torch.float16},
    "nothing": {"Lq": 13, "Lk": 21, "D": 16, "mask": "nothing"},
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=full if case == "everything" else ()) for case in CASES])
@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_heads_inside_positions(backend: str, case: str, device: torch.device) -> None:
    """The layout of a projection viewed as heads."""
    backend_call(backend, device)
    p = make(B=1, H=4, **CASES[case], device=device)
    p = p.but(q=p.q.transpose(1, 2).contiguous().transpose(1, 2))
    weights = weights_of(p, backend)
    assert_close_as_torch(weights, *expected(p)["weights"], "weights")


@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_nothing_to_do(backend: str, device: torch.device) -> None:
    backend_call(backend, device)
    for B, H, Lq, Lk in ((0, 2, 5, 7), (2, 2, 0, 7), (2, 2, 5, 0)):
        q, k = torch.randn(B, H, Lq, 8, device=device), torch.randn(B, H, Lk, 8, device=device)
        for mask in (None, AttentionMask(key_padding=torch.ones(B, Lk, dtype=torch.bool, device=device))):
            weights = scaled_dot_product_attention(q, k, k, mask, return_weights=True, backend=backend)[1]
            assert weights.shape == (B, H, Lq, Lk)


@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_gradient(backend: str, device: torch.device) -> None:
    p = make(B=1, H=4, Lq=3, Lk=4, D=5, dtype=torch.float64, mask="causal", device=device)
    leaves = [t.clone().requires_grad_() for t in (p.q, p.k)]

    def weights(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return weights_of(p.but(q=q, k=k), backend)

    torch.autograd.gradcheck(weights, leaves)


@pytest.mark.parametrize("backend", KERNEL_BACKENDS)
def test_kernels_leave_them_to_aten(backend: str, device: torch.device) -> None:
    """With its dropout, and a gradient; whether the op, the context or a model requests the kernels."""
    backend_call(backend, device)
    p = make(B=1, H=4, Lq=3, Lk=4, D=8, mask="causal", dropout_p=0.3, device=device)
    mask, wanted = AttentionMask(**p.mask), {"return_weights": True}
    assert explain("attention", p.q, p.k, p.v, mask, **wanted, backend=backend).chosen == "aten"
    assert explain("attention", p.q, p.k, p.v, mask, backend=backend).chosen == backend
    assert torch.equal(weights_of(p, backend), weights_of(p, "aten"))
    with use_backend(backend):
        assert torch.equal(weights_of(p, None), weights_of(p, "aten"))
    assert weights_of(p.but(q=p.q.clone().requires_grad_()), backend).requires_grad
    with pytest.raises(RuntimeError, match="float64"):
        weights_of(p.but(q=p.q.double(), k=p.k.double(), v=p.v.double()), backend)
