"""The wrappers of peers that only run on a GPU, around stand-ins with the same signatures: is it the same problem?"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

CPU = torch.device("cpu")


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, causal: bool = False, alibi_slopes: Any = None
) -> Tensor:
    """q (B, Lq, H, D), k and v (B, Lk, Hk, D)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    bias = torch.zeros(q.shape[2], k.shape[2])
    if causal:
        bias = bias.masked_fill(~torch.ones_like(bias, dtype=torch.bool).tril(), float("-inf"))
    if alibi_slopes is not None:
        distance = (torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])).abs()
        bias = bias - alibi_slopes[:, None, None] * distance
    return F.scaled_dot_product_attention(q, k, v, bias, dropout_p, enable_gqa=True).transpose(1, 2)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """q (all queries, H, D), k and v (all keys, Hk, D); offsets int32. Returns (out, lse), as some versions do."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == cu_seqlens_k.diff().max()
    spans = zip(cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[:-1], cu_seqlens_k[1:], strict=True)
    outs = [flash_attn_func(q[None, a:b], k[None, c:d], v[None, c:d], **options)[0] for a, b, c, d in spans]
    return torch.cat(outs), None


def ratio(load: Any, module: Any, provider: Any, case: Any) -> float:
    inputs = module.make_inputs(case, CPU)
    return load("harness").Checker(module.BENCHMARK, case, inputs, module.providers(CPU)[0]).ratio(provider)


@pytest.mark.parametrize(("version", "name"), [(2, "flash_attn"), (3, "flash_attn_interface"), (4, "flash_attn.cute")])
def test_flash_attention(version: int, name: str, load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {"flash_attn_func": flash_attn_func, "flash_attn_varlen_func": flash_attn_varlen_func}
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(**functions))
    module, harness, case = load("bench_attention"), load("harness"), load("cases").AttentionCase
    provider = load("attention_peers").flash_attention(version)
    served = [case(2, 4, 40, 72, 16), case(2, 4, 40, 40, 16, "causal", heads_k=2), case(3, 2, 24, 40, 16, "padding")]
    refused = [case(2, 4, 40, 72, 16, "causal"), case(2, 4, 72, 72, 16, "blocks"), case(2, 4, 40, 40, 16, "bias")]
    (served if version == 2 else refused).append(case(2, 4, 40, 40, 16, "alibi"))
    for problem in served:
        assert ratio(load, module, provider, problem) <= harness.WRONG, problem
    for problem in refused:
        with pytest.raises(harness.Refused):
            ratio(load, module, provider, problem)


@pytest.mark.parametrize("mask", ["full", "causal", "padding", "blocks", "alibi", "bias"])
def test_flex_attention_has_the_same_mask(mask: str, load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled, and without a backward, which it has on a GPU only."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    module, harness, peers = load("bench_attention"), load("harness"), load("attention_peers")
    case = load("cases").AttentionCase(2, 4, 128, 128, 16, mask, heads_k=None if mask == "bias" else 2)
    inputs = module.make_inputs(case, CPU)
    inputs = inputs._replace(leaves={name: leaf.detach() for name, leaf in inputs.leaves.items()})
    expected = module.providers(CPU)[0].make(case, inputs, 0.0).timed["forward"]()
    for count_mask in (False, True):
        provider = peers.flex(count_mask)
        if count_mask and mask in ("full", "bias"):
            with pytest.raises(harness.Refused, match="no mask to build"):
                provider.make(case, inputs, 0.0)
        else:
            run = provider.make(case, inputs, 0.0)
            torch.testing.assert_close(run.timed["forward"](), expected)
            assert run.notes.get("mask_ms", 0) > 0 or not count_mask
    with pytest.raises(harness.Refused, match="no dropout"):
        peers.flex(False).make(case, inputs, 0.1)


def test_liger_and_quack(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = sys.modules
    liger = SimpleNamespace(
        liger_layer_norm=lambda X, W, B, eps: F.layer_norm(X, W.shape, W, B, eps),
        liger_swiglu=lambda a, b: F.silu(a) * b,
        liger_fused_linear_cross_entropy=lambda input, weight, target, **options: F.cross_entropy(
            input @ weight.T, target, **options
        ),
    )
    monkeypatch.setitem(modules, "liger_kernel.transformers.functional", liger)
    monkeypatch.setitem(modules, "quack", SimpleNamespace(cross_entropy=F.cross_entropy))
    cases, harness = load("cases"), load("harness")
    for name, case in (
        ("bench_add_layer_norm", cases.NormCase(40, 96)),
        ("bench_feed_forward", cases.FeedForwardCase(40, 48, 96, "swiglu")),
        ("bench_linear_cross_entropy", cases.CrossEntropyCase(40, 32, 60)),
    ):
        module = load(name)
        assert ratio(load, module, harness.peer("Liger-Kernel", module.liger), case) <= harness.WRONG, name
    provider = harness.peer("quack", module.quack)
    assert ratio(load, module, provider, cases.CrossEntropyCase(40, 32, 60, smoothing=0.0)) <= harness.WRONG
    with pytest.raises(harness.Refused, match="no label smoothing"):
        ratio(load, module, provider, cases.CrossEntropyCase(40, 32, 60))


def test_a_peer_that_is_not_installed_says_so(load: Any) -> None:
    harness = load("harness")
    with pytest.raises(harness.Refused, match="cannot be imported"):
        harness.imported("no_such_module_anywhere")
