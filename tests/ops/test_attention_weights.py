"""return_weights: all heads, or their mean, in every backend. test_attention.py also checks all heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_checks import BACKENDS, KERNEL_BACKENDS, Problem, backend_call, exact, make, plain, terms, visible
from helpers import assert_close_as_torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastattn import AttentionMask, scaled_dot_product_attention

full = pytest.mark.full


def weights_of(p: Problem, wanted: bool | str, backend: str) -> torch.Tensor:
    torch.manual_seed(p.seed)
    mask = AttentionMask(**p.mask, bias=p.bias)
    options = {"scale": p.scale, "enable_gqa": True, "return_weights": wanted, "backend": backend}
    return scaled_dot_product_attention(p.q, p.k, p.v, mask, p.dropout_p, **options)[1]


MEANS: dict[str, dict[str, Any]] = {
    "decoder, several tiles": dict(Lq=40, Lk=141, D=33, mask="decoder", bias=(1, 4, 40, 141), dropout_p=0.3),
    "grouped": {"Hk": 2, "Lq": 13, "Lk": 21, "D": 16, "mask": "attn_mask", "dtype": torch.bfloat16},
    "everything": {"Lq": 40, "Lk": 70, "D": 250, "Dv": 8, "mask": "everything", "dtype": torch.float16},
    "nothing": {"Lq": 13, "Lk": 21, "D": 16, "mask": "nothing"},
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=full if case == "everything" else ()) for case in MEANS])
@pytest.mark.parametrize("backend", BACKENDS)
def test_mean(backend: str, case: str, device: torch.device) -> None:
    backend_call(backend, device)
    p = make(B=1, H=4, **MEANS[case], device=device)
    truth, low, size = (t.double().mean(1) for t in (exact(p).weights, plain(p).weights, terms(p)["weights"]))
    mean = weights_of(p, "mean", backend)
    assert_close_as_torch(mean, truth, low.to(p.q.dtype), size, "mean")
    assert not mean[~visible(p).any(1)].any(), "a key masked in every head must have exactly 0 weight"
    p = p.but(q=p.q.transpose(1, 2).contiguous().transpose(1, 2))
    every = weights_of(p, True, backend)
    assert_close_as_torch(every, exact(p).weights, plain(p).weights, terms(p)["weights"], "weights")


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_do(backend: str, device: torch.device) -> None:
    backend_call(backend, device)
    for B, H, Lq, Lk in ((0, 2, 5, 7), (2, 2, 0, 7), (2, 2, 5, 0)):
        q, k = torch.randn(B, H, Lq, 8, device=device), torch.randn(B, H, Lk, 8, device=device)
        for mask in (None, AttentionMask(key_padding=torch.ones(B, Lk, dtype=torch.bool, device=device))):
            for wanted, shape in ((True, (B, H, Lq, Lk)), ("mean", (B, Lq, Lk))):
                weights = scaled_dot_product_attention(q, k, k, mask, return_weights=wanted, backend=backend)[1]
                assert weights.shape == shape


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor made under it."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [t.nbytes for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.bytes = max(self.bytes, *sizes, 0)
        return result


@pytest.mark.parametrize("backend", KERNEL_BACKENDS)
def test_mean_needs_no_weights_of_all_heads(backend: str, device: torch.device) -> None:
    backend_call(backend, device)
    p = make(B=1, H=4, Lq=64, Lk=64, D=16, mask="key_padding", dropout_p=0.1, device=device)
    weights = 4 * 64 * 64 * 4
    for wanted, some in (("mean", weights // 4), (True, weights)):
        with Largest() as made:
            weights_of(p, wanted, backend)
        assert some <= made.bytes and (made.bytes < weights) == (wanted == "mean"), wanted


@pytest.mark.parametrize("wanted", [True, "mean"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient(backend: str, wanted: bool | str, device: torch.device) -> None:
    """Right in reference and aten; the kernels give none, so that asking for it is an error and not silently zero."""
    backend_call(backend, device)
    dtype = torch.float32 if backend in KERNEL_BACKENDS else torch.float64
    p = make(B=1, H=4, Lq=3, Lk=4, D=5, dtype=dtype, mask="causal", device=device)
    leaves = [t.clone().requires_grad_() for t in (p.q, p.k)]

    def weights(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return weights_of(p.but(q=q, k=k), wanted, backend)

    assert weights(*leaves).requires_grad == (backend not in KERNEL_BACKENDS)
    if backend not in KERNEL_BACKENDS:
        torch.autograd.gradcheck(weights, leaves)


@pytest.mark.parametrize("wrong", ["max", [0], 1, torch.tensor([1]), "argmax"], ids=str)
def test_what_cannot_be_returned(wrong: Any) -> None:
    q = torch.randn(1, 4, 5, 8)
    with pytest.raises(ValueError, match="return_weights must be a bool or"):
        scaled_dot_product_attention(q, q, q, return_weights=wrong)


def test_mean_of_no_heads() -> None:
    q = torch.randn(1, 0, 5, 8)
    with pytest.raises(ValueError, match="query has no heads"):
        scaled_dot_product_attention(q, q, q, return_weights="mean")
