"""scaled_dot_product_attention in the place of torch's own function: its samples, its broadcasting, its errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close_as_torch, import_torch_tests
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastattn import AttentionMask, scaled_dot_product_attention
from fastattn.check import cases
from fastattn.check.cases import Problem

full = pytest.mark.full
torch_attention = F.scaled_dot_product_attention


def check_as_torch(tensors: list[Tensor], options: dict[str, Any]) -> None:
    """Result and gradients, by the rule for error: the truth is torch's function by plain operators in float64."""
    out = torch_attention(*tensors, **options)
    # Of few numbers, drawn ones may cancel in the formula by chance, which leaves no room for another order of sums.
    dout = torch.linspace(0.5, 1.5, out.numel(), dtype=torch.float64).view(out.shape).sin()
    named = dict(zip(("query", "key", "value", "attn_mask"), tensors, strict=False))
    floating = {name: t.detach() for name, t in named.items() if t.is_floating_point()}
    others = {name: t for name, t in named.items() if name not in floating}
    p = Problem("attention", "", scaled_dot_product_attention, floating, options | others, douts=(dout.to(out.dtype),))
    got = cases.solve(p, scaled_dot_product_attention)
    with sdpa_kernel(SDPBackend.MATH):
        expected = cases.expected_results(p, formula=torch_attention)
    for name, (truth, baseline, scale) in expected.items():
        if truth.dtype == tensors[0].dtype:
            torch.testing.assert_close(got[name], truth)
        else:
            assert_close_as_torch(got[name], truth, baseline, scale, name)


@pytest.mark.parametrize(
    "dtype", [torch.float32, *(pytest.param(dtype, marks=full) for dtype in (torch.float64, torch.bfloat16))]
)
def test_samples_of_torch(dtype: torch.dtype) -> None:
    """Without their dropout, which drops by other bits."""
    op_db = import_torch_tests("common_methods_invocations").op_db
    (op,) = (op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
    samples = list(op.sample_inputs("cpu", dtype, requires_grad=True))
    for sample in samples:
        options = sample.kwargs | {"dropout_p": 0.0}
        mask = options.pop("attn_mask", None)
        check_as_torch([sample.input, *sample.args, *([] if mask is None else [mask])], options)
    assert len(samples) >= 20


L = {"q": (5, 8), "k": (7, 8), "v": (7, 6)}
# The leading dimensions of query, key, value, and the shape of a mask.
SHAPES: dict[str, tuple[Any, ...]] = {
    "no heads": ((), (), (), None),
    "heads alone": ((3,), (3,), (3,), (3, 5, 7)),
    "five dimensions": ((2, 3, 4), (2, 3, 4), (2, 3, 4), (2, 1, 4, 5, 7)),
    "a batch for one key": ((4, 2), (1, 2), (1, 2), (4, 1, 1, 7)),
    "a head for all": ((2, 6), (2, 1), (2, 1), (6, 1, 7)),
    "value alone has heads": ((2, 1), (2, 1), (2, 6), None),
    "fewer dimensions of the query": ((4,), (2, 4), (2, 4), None),
    "fewer dimensions of the keys": ((2, 3, 4), (3, 1), (1,), (3, 1, 5, 7)),
    "mask of the last batch dimension": ((2, 3, 4), (2, 3, 4), (2, 3, 4), (3, 1, 5, 7)),
}


@pytest.mark.parametrize("kind", ["bool", pytest.param("float", marks=full)])
@pytest.mark.parametrize("name", SHAPES)
def test_broadcasts_as_torch(name: str, kind: str) -> None:
    *leading, mask = SHAPES[name]
    tensors = [torch.randn(*lead, *L[n]) for lead, n in zip(leading, "qkv", strict=True)]
    if mask is not None:
        tensors.append(torch.randn(mask) if kind == "float" else torch.rand(mask) < 0.7)
    check_as_torch(tensors, {"scale": 0.4})
    if mask is None:
        check_as_torch(tensors, {"is_causal": True})


@pytest.mark.parametrize("leading", [((6,), (2,), (3,)), ((2, 3, 6), (2, 3, 2), (2, 3, 2))])
def test_grouped_heads_as_torch(leading: tuple[tuple[int, ...], ...]) -> None:
    check_as_torch([torch.randn(*lead, *L[n]) for lead, n in zip(leading, "qkv", strict=True)], {"enable_gqa": True})


def test_lse_and_weights_have_the_leading_dimensions() -> None:
    q, k, v = (torch.randn(2, 3, 4, *L[n]) for n in "qkv")
    out, lse, weights = scaled_dot_product_attention(q, k, v, return_lse=True, return_weights=True)
    scores = q @ k.mT * 8**-0.5
    torch.testing.assert_close((out, lse), (scores.softmax(-1) @ v, scores.logsumexp(-1)))
    torch.testing.assert_close(weights, scores.softmax(-1))


def test_the_batch_of_a_mask_is_all_before_the_heads() -> None:
    q, k, v = (torch.randn(2, 3, 4, *L[n]) for n in "qkv")
    padding = torch.arange(7) < torch.randint(1, 8, (6, 1))
    out = scaled_dot_product_attention(q, k, v, AttentionMask(key_padding=padding))
    torch.testing.assert_close(out, torch_attention(q, k, v, padding.view(2, 3, 1, 1, 7)))


X = torch.ones(2, 4)
CALLS = {
    "integers": (X.long(), X.long(), X.long()),
    "two dtypes": (X, X.double(), X),
    "head dimensions": (X, torch.ones(2, 5), X),
    "lengths": (X, torch.ones(3, 4), X),
    "mask of integers": (X, X, X, torch.ones(2, 2, dtype=torch.int64)),
    "probability": (X, X, X, None, 1.5),
}


@pytest.mark.parametrize("name", CALLS)
def test_errors_are_of_the_types_that_torch_raises(name: str) -> None:
    with pytest.raises((TypeError, RuntimeError)) as theirs:
        torch_attention(*CALLS[name])
    with pytest.raises(type(theirs.value)) as ours:
        scaled_dot_product_attention(*CALLS[name])
    assert isinstance(ours.value, (TypeError, ValueError))


def test_nested_tensors_are_torch_own() -> None:
    q = torch.nested.nested_tensor([torch.randn(n, 2, 8) for n in (3, 5)], layout=torch.jagged).transpose(1, 2)
    out = scaled_dot_product_attention(q, q, q)
    torch.testing.assert_close(out.values(), torch_attention(q, q, q).values())
