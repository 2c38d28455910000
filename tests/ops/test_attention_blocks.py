"""Attention by blocks of heads, fastattn/backends/aten/_blocks.py: used on a CPU for calls that return out alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_checks import Problem, check, make, out_alone
from torch import Tensor

from fastattn import AttentionMask, scaled_dot_product_attention
from fastattn.backends.aten import attention as aten
from fastattn.backends.reference.philox import reference_dropout_rule

CPU = torch.device("cpu")
RESULTS = ("out", "dq", "dk", "dv")
KINDS = ("none", "causal", "key_padding", "decoder", "attn_mask", "key_padding_holes", "window", "nothing")
# Blocks of all heads of some sentences, of some heads of one, and of some queries of one head; odd lengths.
SHAPES: dict[str, dict[str, Any]] = {
    "one block": {"B": 3, "H": 4, "Hk": 2, "Lq": 41, "Lk": 67, "D": 16, "Dv": 8},
    "sentences": {"B": 5, "H": 4, "Lq": 203, "Lk": 203, "D": 16},
    "heads": {"B": 1, "H": 5, "Lq": 451, "Lk": 451, "D": 16},
    "queries": {"B": 1, "H": 2, "Lq": 1103, "Lk": 1103, "D": 16},
}


by_blocks = out_alone(aten.BLOCKED)


def problem(shape: str, kind: str, **options: Any) -> Problem:
    return make(**SHAPES[shape], mask=kind, dlse=False, device=CPU, **options)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_mask(kind: str, dtype: torch.dtype, dropout_p: float) -> None:
    with reference_dropout_rule("aten"):
        check(problem("one block", kind, dtype=dtype, dropout_p=dropout_p), by_blocks, RESULTS)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("shape", ["one block", pytest.param("sentences", marks=pytest.mark.full)])
def test_what_values_have_in_common_cancels(shape: str, dropout_p: float) -> None:
    """With weights that are nearly equal, so that all of a row are rounded to the same side."""
    p = problem(shape, "key_padding", dtype=torch.bfloat16, dropout_p=dropout_p, common=10.0)
    with reference_dropout_rule("aten"):
        check(p.but(q=0.1 * p.q), by_blocks, RESULTS)


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", ["causal", "key_padding", "window"])
@pytest.mark.parametrize("shape", ["sentences", "heads", "queries"])
def test_every_cut(shape: str, kind: str, dtype: torch.dtype) -> None:
    with reference_dropout_rule("aten"):
        check(problem(shape, kind, dtype=dtype, dropout_p=0.3), by_blocks, RESULTS)


def test_a_planted_bug_is_noticed() -> None:
    def other_seed(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Any, ...]:
        torch.manual_seed(99)
        return by_blocks(q, k, v, *options)

    with reference_dropout_rule("aten"), pytest.raises(AssertionError, match="out"):
        check(problem("one block", "causal", dropout_p=0.3), other_seed, RESULTS)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_gradcheck(dropout_p: float) -> None:
    p = make(B=2, H=2, Hk=1, Lq=3, Lk=5, D=3, dtype=torch.float64, device=CPU, mask="attn_mask")

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(1)
        q, k, v = (torch.cat([t] * 24, 1) for t in (q, k, v))  # few weights are left to PyTorch's operator
        q, k, v = (torch.cat([t] * 24) for t in (q, k, v))
        mask = AttentionMask(attn_mask=p.mask["attn_mask"].repeat(24, 24, 1, 1))
        return by_blocks(q, k, v, mask, dropout_p, 0.7)[0]

    leaves = tuple(t.clone().requires_grad_() for t in (p.q, p.k, p.v))
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


@pytest.mark.full
def test_equal_seeds_draw_equal_masks_however_the_heads_are_cut() -> None:
    """A weight's number is its place, also where a causal mask leaves keys out, and of whatever dtype."""
    q = torch.zeros(1, 2, 1103, 8)
    v = torch.eye(1103).expand(1, 2, -1, -1)
    drawn = []
    for dtype in (torch.float32, torch.bfloat16):
        for is_causal in (True, False):
            torch.manual_seed(2)
            out = scaled_dot_product_attention(q.to(dtype), q.to(dtype), v.to(dtype), None, 0.4, is_causal)
            drawn.append((out != 0).tril())
    assert all(torch.equal(mask, drawn[0]) for mask in drawn[1:])
    assert 0.59 < drawn[0].sum() / torch.ones(2, 1103, 1103).tril().sum() < 0.61
