"""Packed sequences in aten, which separates them on a CPU so that no score crosses their borders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_checks import Problem, backend_call, check, make
from test_attention_edge import same_when_poisoned

from fastattn import AttentionMask, scaled_dot_product_attention
from fastattn.backends.aten._sequences import plan_unpacking

SELF = torch.tensor([0, 9, 9, 20, 29, 41], dtype=torch.int32)  # 41 positions, an empty sequence among them
QUERIES = torch.tensor([0, 12, 15, 28, 41], dtype=torch.int32)
OTHER = torch.tensor([0, 12, 12, 20, 33], dtype=torch.int32)  # the second one has no keys
FEW = torch.tensor([0, 6, 20, 20, 41], dtype=torch.int32)  # fewer than keys in the first, none in the third

KINDS: dict[str, dict[str, Any]] = {
    "own": {"cu_seqlens_q": SELF},
    "own, causal": {"cu_seqlens_q": SELF, "is_causal": True},
    "own, causal from the end": {"cu_seqlens_q": SELF, "is_causal": True, "align": "bottom_right"},
    "own, window": {"cu_seqlens_q": SELF, "window": (3, 1)},
    "of another": {"cu_seqlens_q": QUERIES, "cu_seqlens_k": OTHER},
    "of another, causal": {"cu_seqlens_q": QUERIES, "cu_seqlens_k": OTHER, "is_causal": True},
    "few queries": {"cu_seqlens_q": FEW, "cu_seqlens_k": OTHER},
    "few queries, causal": {"cu_seqlens_q": FEW, "cu_seqlens_k": OTHER, "is_causal": True},
}


def packed(kind: str, **options: Any) -> Problem:
    mask = KINDS[kind]
    p = make(B=1, H=4, Hk=2, Lq=41, Lk=33 if "cu_seqlens_k" in mask else 41, D=16, Dv=8, mask=mask, **options)
    assert plan_unpacking(AttentionMask(**mask), p.q, p.k) is not None, "this problem is not separated"
    return p


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_aten_agrees_with_float64(kind: str, dtype: torch.dtype) -> None:
    attend = backend_call("aten", torch.device("cpu"), weights=False)
    check(packed(kind, dtype=dtype), attend, ("out", "lse", "dq", "dk", "dv"))


@pytest.mark.parametrize("kind", KINDS)
def test_aten_drops_as_in_unpacked_sequences(kind: str) -> None:
    """With equal seeds: results and gradients are those of the sequences one below the other."""
    p = packed(kind)
    plan = plan_unpacking(AttentionMask(**p.mask), p.q, p.k)
    leaves = [t.clone().requires_grad_() for t in (p.q, p.k, p.v)]
    unpacked = [side.unpack(t) for side, t in zip((plan.queries, plan.keys, plan.keys), leaves, strict=True)]
    results = []
    for inputs, mask in ((leaves, AttentionMask(**p.mask)), (unpacked, plan.mask)):
        torch.manual_seed(1)
        out = scaled_dot_product_attention(*inputs, mask, 0.3, enable_gqa=True, backend="aten")
        out = out if inputs is leaves else plan.queries.pack(out)
        results.append((out, *torch.autograd.grad(out, leaves, p.dout)))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("kind", ["of another", "few queries", "few queries, causal"])
def test_poison_does_not_spread(kind: str) -> None:
    same_when_poisoned(packed(kind), backend_call("aten", torch.device("cpu"), weights=False))


@pytest.mark.bug_class("T10")
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_nan_stays_in_its_sequence(dropout_p: float) -> None:
    """Of the third of four. The second is short: its place in the batch has room past its end."""
    bounds, bad = torch.tensor([0, 11, 20, 29, 41], dtype=torch.int32), slice(20, 29)
    q, k, v = (torch.randn(1, 4, 41, 16) for _ in range(3))
    for t in (q, k, v):
        t[:, :, bad] = torch.nan
        t.requires_grad_()
    out = scaled_dot_product_attention(q, k, v, AttentionMask(cu_seqlens_q=bounds), dropout_p, backend="aten")
    for t in (out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))):
        assert t[:, :, bad].isnan().all() and t[:, :, :20].isfinite().all() and t[:, :, 29:].isfinite().all()


def test_what_is_not_separated() -> None:
    """One sequence as long as all others together, another packing counted from the end, and anything on top."""
    q, k = torch.randn(1, 1, 41, 8), torch.randn(1, 1, 33, 8)
    long = torch.tensor([0, 39, 40, 41])
    assert plan_unpacking(AttentionMask(cu_seqlens_q=long), q, q) is None
    from_the_end = AttentionMask(cu_seqlens_q=QUERIES, cu_seqlens_k=OTHER, is_causal=True, align="bottom_right")
    assert plan_unpacking(from_the_end, q, k) is None
    own = AttentionMask(cu_seqlens_q=SELF)
    assert plan_unpacking(own, q, q) is not None
    assert plan_unpacking(own & AttentionMask(key_padding=torch.ones(1, 41, dtype=torch.bool)), q, q) is None
    assert plan_unpacking(own & AttentionMask(bias=torch.zeros(41, 41)), q, q) is None
