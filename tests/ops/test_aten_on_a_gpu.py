"""What the backend aten does on a GPU: PyTorch's own dropout. Without a GPU, the same path with tensors elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import attention_checks
import pytest
import torch
from attention_checks import Problem, check, make
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastattn import AttentionMask, scaled_dot_product_attention
from fastattn.backends.aten import attention as aten
from fastattn.backends.reference import philox
from fastattn.check import cases, doctor

PROBLEMS = {p.op: p for p in cases.problems(torch.device("cpu"), large=False) if "dropout_p" in p.options}


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


def attend(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, dropout_p: float, scale: float) -> tuple[Any, ...]:
    out = scaled_dot_product_attention(q, k, v, mask, dropout_p, scale=scale, enable_gqa=True, backend="aten")
    return out, torch.zeros(out.shape[:3], device=out.device), None


def factor_of_torch(p: Problem) -> Tensor:
    """(B, H, Lq, Lk): 0 where PyTorch drops, by a call with the identity as v, and else 1 / (1 - dropout_p)."""
    v = torch.eye(p.shape[3], dtype=p.v.dtype, device=p.v.device).expand(*p.v.shape[:2], -1, -1).contiguous()
    torch.manual_seed(p.seed)
    out, *_ = attend(p.q, p.k, v, AttentionMask(**p.mask), p.dropout_p, p.scale)
    return (out != 0).double() / (1 - p.dropout_p)


def test_attention_drops_in_the_fused_operator(
    gpu: None, fused_calls: list[tuple[int, float]], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward are those of the weights that it leaves. With a mask, heads are repeated before."""
    monkeypatch.setattr(attention_checks, "dropout_multiplier", factor_of_torch)
    for kind in ("none", "causal", "key_padding_holes", "decoder", "attn_mask", "window"):
        p = make(H=4, Hk=2, Lq=21, Lk=32, D=32, mask=kind, dropout_p=0.3, dlse=False, device=device)
        share = factor_of_torch(p)[attention_checks.visible(p)].mul(0.7).mean()
        assert 0.66 < share < 0.74, kind
        fused_calls.clear()
        check(p, attend, ("out", "dq", "dk", "dv"))
        assert set(fused_calls) == {(4, 0.3)}


@pytest.mark.parametrize("kind", ["none", "key_padding_holes", "decoder"])
def test_bias_without_gradient_is_added_in_the_fused_operator(
    kind: str, gpu: None, fused_calls: list[tuple[int, float]], device: torch.device
) -> None:
    """Where it has the dtype of the queries, to which PyTorch would round it. A query without a key gives 0."""
    for dtype, calls in ((torch.float32, 1), (torch.bfloat16, 0)):
        p = make(H=4, Hk=2, Lq=21, Lk=32, D=32, mask=kind, bias=(1, 4, 21, 32), dlse=False, device=device, dtype=dtype)
        p = p.but(bias=p.bias.float().index_fill_(2, torch.tensor([3], device=device), -torch.inf))
        fused_calls.clear()
        actual = attention_checks.solve(p, attend, needs="qkv")
        attention_checks.compare(p, actual, ("out", "dq", "dk", "dv"))
        assert len(fused_calls) == calls


@pytest.mark.parametrize("shape", [(0, 2, 5, 7), (2, 0, 5, 7), (2, 2, 0, 7), (2, 2, 5, 0)], ids=str)
def test_an_empty_call_is_not_for_the_fused_operator(
    shape: tuple[int, ...], gpu: None, fused_calls: list[tuple[int, float]], device: torch.device
) -> None:
    """Its kernels for GPUs refuse some: a backward without heads, in older versions of PyTorch an empty batch."""
    B, H, Lq, Lk = shape
    q, k = (torch.zeros(B, H, L, 8, device=device, requires_grad=True) for L in (Lq, Lk))
    for mask, dropout_p in itertools.product((AttentionMask(), AttentionMask(is_causal=True)), (0.0, 0.3)):
        out, *_ = attend(q, k, k, mask, dropout_p, 1.0)
        grads = torch.autograd.grad(out.sum(), (q, k))
        assert out.shape == q.shape and not any(t.any() for t in (out, *grads))
    assert not fused_calls


def test_all_dropped(gpu: None, device: torch.device) -> None:
    """Without a division by 1 - dropout_p = 0."""
    q = torch.randn(1, 2, 8, 16, device=device, requires_grad=True)
    out, *_ = attend(q, q, q, AttentionMask(), 1.0, 0.25)
    assert out.eq(0).all() and torch.autograd.grad(out.sum(), q)[0].eq(0).all()


class Counted(TorchDispatchMode):
    """How many operators were called."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_few_operators(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The written rule takes over a hundred."""
    monkeypatch.setattr(torch._C._nn, "scaled_dot_product_attention", lambda q, *rest, **options: torch.empty_like(q))
    for problem in PROBLEMS.values():
        tensors, options = (
            {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in given.items()}
            for given in (problem.tensors, problem.options)
        )
        with Counted() as counted:
            problem.function(**tensors, **options, backend="aten")
        assert 0 < counted.calls < 40, problem.op


def test_what_is_kept(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the device's generator: the same numbers from the same seed, whatever the dtype."""
    monkeypatch.setattr(philox, "can_read_values", lambda t: False)
    rng_state = torch.empty(1, dtype=torch.int64, device=device)
    kept = []
    for dtype in (torch.bool, torch.float32, torch.bfloat16, torch.float64):
        torch.manual_seed(1)
        kept.append(philox.keep_mask(rng_state, 200, 300, 0.3, dtype))
        assert kept[-1].dtype == dtype and torch.equal(kept[-1].bool(), kept[0])
    assert abs(kept[0].double().mean() - 0.7) < 0.01
    assert not torch.equal(philox.keep_mask(rng_state, 200, 300, 0.3), kept[0])
    assert philox.keep_mask(rng_state, 9, 9, 1.0).sum() == 0
    torch.manual_seed(1)
    factor = philox.keep_factor(rng_state, 200, 300, 0.3, torch.float32)
    torch.testing.assert_close(factor, kept[1] / 0.7)


def test_the_doctor_compares_no_dropout_of_a_fused_kernel(gpu: None) -> None:
    for op, problem in PROBLEMS.items():
        found = list(doctor.check(problem, torch.float32, ["aten"]))
        assert bool(found) == (op != "attention") and all(record["ok"] for record in found), (op, found)
