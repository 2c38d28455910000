"""What the backend aten does on a GPU: PyTorch's own dropout. Without a GPU, the same path with tensors elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import catalogue
import pytest
import torch
from catalogue import BF16, FP32, judge, make, visible
from torch import Tensor

from fastattn.backends.aten import attention as aten
from fastattn.check import cases, doctor
from fastattn.check.cases import Problem

SIZES = {"H": 4, "Hk": 2, "Lk": 32, "D": 32, "return_lse": False}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """aten takes any tensor for one on a GPU."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: True))
    monkeypatch.setattr(aten, "can_read_values", lambda t: False)


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """Of each call of PyTorch's fused attention: how many heads its keys have, and dropout_p."""
    calls, fused = [], torch._C._nn.scaled_dot_product_attention

    def noted(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout_p: float, *rest: Any, **more: Any
    ) -> Tensor:
        calls.append((k.shape[1], dropout_p))
        return fused(q, k, v, bias, dropout_p, *rest, **more)

    monkeypatch.setattr(torch._C._nn, "scaled_dot_product_attention", noted)
    return calls


def factor_of_torch(p: Problem) -> Tensor:
    """(B, H, Lq, Lk): 0 where PyTorch drops, by a call with the identity as value, and else 1 / (1 - dropout_p)."""
    value = p.tensors["value"]
    identity = torch.eye(32).to(value).expand(*value.shape[:2], -1, -1).contiguous()
    out = cases.solve(p.but(value=identity)._replace(differentiable=False), "aten")["out"]
    return (out != 0).double() / (1 - p.options["dropout_p"])


def test_attention_drops_in_the_fused_operator(
    gpu: None, fused_calls: list[tuple[int, float]], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward are those of the weights that it leaves. With a mask, heads are repeated before."""
    for kind in ("none", "causal", "key_padding_holes", "decoder", "attn_mask", "window"):
        p = make("attention", **SIZES, mask=kind, dropout_p=0.3, device=device)
        factor = factor_of_torch(p)
        kept = factor[visible(p)].mul(0.7)
        assert abs(kept.mean() - 0.7) < 4 * (0.3 * 0.7 / len(kept)) ** 0.5, kind
        fused_calls.clear()
        got = cases.solve(p, "aten")
        assert set(fused_calls) == {(4, 0.3)}
        with monkeypatch.context() as patch:
            patch.setattr(catalogue, "dropped", lambda weights, dropout_p, f=factor: weights * f.to(weights.dtype))
            judge(p, got)


@pytest.mark.parametrize("kind", ["none", "key_padding_holes", "decoder"])
def test_bias_without_gradient_is_added_in_the_fused_operator(
    kind: str, gpu: None, fused_calls: list[tuple[int, float]], device: torch.device
) -> None:
    """Where it has the dtype of the queries, to which PyTorch would round it. A query without a key gives 0."""
    for dtype, calls in ((FP32, 1), (BF16, 0)):
        options = {"bias": (1, 4, 21, 32), "bias_dtype": FP32, "dtype": dtype, "frozen": ("bias",)}
        p = make("attention", **SIZES | options, mask=kind, device=device)
        p.options["bias"][:, :, 3] = -torch.inf
        fused_calls.clear()
        got = cases.solve(p, "aten")
        assert len(fused_calls) == calls
        judge(p, got)


def test_the_doctor_compares_no_dropout_of_a_fused_kernel(gpu: None) -> None:
    for p in cases.problems(torch.device("cpu"), large=False):
        if "dropout_p" in p.options:
            found = list(doctor.check(p, torch.float32, ["aten"]))
            assert bool(found) == (p.op != "attention") and all(record["ok"] for record in found), (p.op, found)
