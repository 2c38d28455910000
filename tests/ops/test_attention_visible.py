"""Attention on a CPU by the visible blocks of a mask, fastattn/backends/aten/_visible.py, for calls that return out
alone."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from attention_checks import LOW_PRECISION, Problem, check, compare, make, out_alone, solve
from mask_cases import KINDS, offsets, prefix
from test_attention_edge import same_when_poisoned
from torch import Tensor

from fastattn import AttentionMask, explain, scaled_dot_product_attention
from fastattn.backends.aten import attention as aten
from fastattn.backends.aten._visible import Visible, visible_blocks

WAYS = (aten.TORCH, aten.BLOCKED)
full = pytest.mark.full
RESULTS = ("out", "dq", "dk", "dv")
# Long enough to be cut, and not to be computed at once; odd, with grouped heads.
SHAPE = {"B": 2, "H": 6, "Hk": 2, "Lq": 229, "Lk": 251, "D": 16}
ONE = {"B": 1, "H": 12}
EVERYDAY = ("key_padding_holes", "attn_mask_3d", "attn_mask_queries", "decoder", "everything")


def problem(mask: str | dict[str, Any], **options: Any) -> Problem:
    return make(**SHAPE | options, mask=mask, dlse=False, may_be_empty=True)


def blocks_of(p: Problem, way: str) -> Visible:
    mask = AttentionMask(**p.mask, bias=p.bias)
    with mock.patch.object(aten, "algorithm", lambda q, dropout_p: way):
        return aten.decide(p.q, p.k, p.v, mask, p.scale, 0.0).visible


@pytest.mark.few(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [k if k in EVERYDAY else pytest.param(k, marks=full) for k in KINDS])
def test_every_mask(kind: str, way: str) -> None:
    check(problem(kind, **(ONE if "segments" in kind or kind == "everything" else {})), out_alone(way), RESULTS)


# name -> (mask, how many blocks PyTorch's operator gets, how many of them know is_causal)
CUT: dict[str, tuple[dict[str, Any], int, int]] = {
    "window": ({"window": (9, 20)}, 4, 0),
    "window, bottom right": ({"window": (9, 0), "align": "bottom_right"}, 4, 0),
    "causal": ({"is_causal": True}, 1, 1),
    "padding": ({"key_padding": prefix([251, 90], 251)}, 2, 0),
    "padding, causal": ({"key_padding": prefix([251, 90], 251), "is_causal": True}, 2, 2),
    "padding on the left": ({"key_padding": prefix([251, 90], 251).flip(1), "is_causal": True}, 2, 1),
    "padding with holes": ({"key_padding": prefix([251, 90], 251) & (torch.arange(251) % 7 != 3)}, 2, 0),
    "nothing in one sentence": ({"key_padding": prefix([251, 0], 251)}, 1, 0),
    "both paddings": ({"key_padding": prefix([251, 90], 251), "query_padding": prefix([120, 229], 229)}, 3, 0),
    "short": ({"key_padding": prefix([251, 90], 251), "query_padding": prefix([229, 90], 229)}, 2, 0),
    "matrix": ({"attn_mask": (torch.arange(229)[:, None] // 32 - torch.arange(251) // 32).abs() < 2}, 4, 0),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("dtype", [torch.float32, *(pytest.param(t, marks=full) for t in LOW_PRECISION)])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CUT)
def test_every_cut(case: str, way: str, dtype: torch.dtype) -> None:
    mask, blocks, causal = CUT[case]
    p = problem(mask, dtype=dtype)
    if way == aten.TORCH:
        found = blocks_of(p, way).blocks
        assert (len(found), sum(block.is_causal for block in found)) == (blocks, causal)
    check(p, out_alone(way), RESULTS)
    if case != "matrix":
        same_when_poisoned(p, out_alone(way))


@pytest.mark.parametrize("way", WAYS)
def test_a_head_that_sees_fewer_keys_than_its_group(way: str) -> None:
    """What padding hides from all heads may be NaN, and what one head does not see is read by the others."""
    seen = (torch.arange(6) != 1)[:, None, None] | (torch.arange(251) > 80)
    p = problem({"key_padding": prefix([251, 90], 251), "attn_mask": seen})
    check(p, out_alone(way), RESULTS)
    same_when_poisoned(p, out_alone(way))


PACKED = {"cu_seqlens_q": offsets(60, 1, 0, 68, 100), "cu_seqlens_k": offsets(100, 0, 7, 44, 100)}


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("band", [{}, {"is_causal": True}, {"window": (5, 3), "align": "bottom_right"}])
@pytest.mark.parametrize("way", WAYS)
def test_packed_sequences_are_blocks(way: str, band: dict[str, Any], dtype: torch.dtype) -> None:
    """An empty sequence on either side among them."""
    p = problem(PACKED | band, **ONE, dtype=dtype)
    assert len(blocks_of(p, way).blocks) == 3
    same_when_poisoned(p, out_alone(way))
    check(p, out_alone(way), RESULTS)


@pytest.mark.few(3)
@pytest.mark.parametrize("gradient", [True, pytest.param(False, marks=full)])
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16, torch.float32), (torch.float16,) * 2])
@pytest.mark.parametrize("shape", [(1, 6, 229, 251), (2, 1, 1, 251), pytest.param((1, 1, 229, 1), marks=full)])
@pytest.mark.parametrize("kind", ["none", "padding", *(pytest.param(k, marks=full) for k in CUT if k != "padding")])
def test_bias_without_gradient(
    kind: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], gradient: bool
) -> None:
    """It is added in its own dtype. A query that it leaves no key gives 0."""
    p = problem({} if kind == "none" else CUT[kind][0], bias=shape, dtype=dtypes[0], bias_dtype=dtypes[1])
    p.bias.mul_(30)
    p.bias[..., :5, :] = -torch.inf
    p.bias[..., 3:4] = -torch.inf

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, *options: float) -> tuple[Any, ...]:
        if gradient:
            return out_alone(aten.TORCH)(q, k, v, mask, *options)
        out = scaled_dot_product_attention(q, k, v, mask, scale=options[1], enable_gqa=True)
        return out, torch.zeros(out.shape[:3]), None

    with torch.set_grad_enabled(gradient):
        actual = solve(p, attend, needs="qkv" if gradient else "")
    with torch.enable_grad():
        compare(p, actual, RESULTS if gradient else ("out",))


def test_bias_is_not_copied_where_it_is_cut() -> None:
    bias = torch.randn(1, 6, 229, 251)
    p = problem(CUT["padding"][0]).but(bias=bias)
    blocks = blocks_of(p, aten.TORCH).blocks
    assert len(blocks) == 2
    assert {block.score_mask.untyped_storage().data_ptr() for block in blocks} == {bias.untyped_storage().data_ptr()}


def test_bias_that_is_edited() -> None:
    """The next call uses the new values. Between forward and backward autograd refuses it."""
    p = problem(CUT["causal"][0] | CUT["padding with holes"][0])
    bias, q = torch.randn(1, 6, 229, 251), p.q.clone().requires_grad_()
    mask = AttentionMask(**p.mask, bias=bias)
    out = scaled_dot_product_attention(q, p.k, p.v, mask, enable_gqa=True)
    bias.mul_(3)
    expected = scaled_dot_product_attention(q, p.k, p.v, AttentionMask(**p.mask, bias=bias), enable_gqa=True)
    again = scaled_dot_product_attention(q, p.k, p.v, mask, enable_gqa=True)
    assert torch.equal(again, expected) and not torch.equal(out, again)
    out = scaled_dot_product_attention(q, p.k, p.v, bias, enable_gqa=True)
    bias.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("case", [c if c in ("causal", "short") else pytest.param(c, marks=full) for c in CUT])
def test_learned_relative_bias(case: str) -> None:
    """By products; without a gradient by PyTorch's operator, where all sentences have one mask."""
    p = problem(CUT[case][0], relative_bias=(2, 479), H=2, Hk=1)
    check(p, learned, (*RESULTS, "dbias"))
    with torch.no_grad():
        alone = solve(p, learned, needs="")
    compare(p, alone, ("out",))
    if case == "short":  # where row sums are larger than the gradients of scores
        low = problem(CUT[case][0], relative_bias=(2, 479), H=2, Hk=1, dtype=torch.bfloat16, common=10.0)
        check(low.but(q=0.1 * low.q), learned, (*RESULTS, "dbias"))
    if case != "matrix":
        same_when_poisoned(p, learned)


def test_learned_bias_keeps_its_gradient() -> None:
    check(problem(CUT["padding"][0], bias=(1, 6, 229, 251)), learned, (*RESULTS, "dbias"))


def learned(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, dropout_p: float, scale: float) -> tuple[Any, ...]:
    out = scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
    return out, torch.zeros(out.shape[:3]), None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ["window", "padding, causal", "packed"])
def test_gradcheck(case: str, way: str) -> None:
    packed = case == "packed"
    mask = PACKED if packed else CUT[case][0]
    p = problem(mask, dtype=torch.float64, D=3, **(ONE if packed else {}))
    kept = AttentionMask(**p.mask)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return out_alone(way)(q, k, v, kept, 0.0, 0.7)[0]

    leaves = tuple(t.clone().requires_grad_() for t in (p.q, p.k, p.v))
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize(
    "length, kwargs, most",
    [
        (2048, {"window": (64, 64)}, 0.1),
        (2048, {"window": (64, 0)}, 0.08),
        (512, {"is_causal": True}, 0.65),
        (2048, {"key_padding": prefix([1434], 2048)}, 0.71),
        (2048, {"cu_seqlens_q": offsets(102, 205, 512, 41, 614, 574)}, 0.25),
    ],
)
def test_what_is_hidden_costs_nothing(length: int, kwargs: dict[str, Any], most: float) -> None:
    q = torch.zeros(1, 8, length, 64)
    blocks = visible_blocks(AttentionMask(**kwargs), q, q, q.dtype, by_torch=True).blocks
    assert sum(block.scores for block in blocks) <= most * 8 * length**2


def test_explain_names_the_way() -> None:
    q = torch.zeros(1, 8, 2048, 64)
    window = AttentionMask(window=(64, 64))
    said = str(explain("attention", q, q, q, window))
    assert "9% of the scores are computed, in 32 blocks of the mask, by " in said
    learned_bias = torch.zeros(2048, 2048, requires_grad=True)
    assert "all scores in memory" in str(explain("attention", q, q, q, learned_bias))
    assert "all scores in memory" in str(explain("attention", q, q, q, window, return_lse=True))
    packed = AttentionMask(cu_seqlens_q=torch.arange(0, 2049, 64))
    assert "a batch of 32 x 64 keys" in str(explain("attention", q, q, q, packed, 0.1))


def test_a_planted_bug_is_noticed() -> None:
    def one_key_less(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, *options: float) -> tuple[Any, ...]:
        return out_alone(aten.TORCH)(q, k, v, AttentionMask(window=(9, 19)), *options)

    with pytest.raises(AssertionError, match="out"):
        check(problem(CUT["window"][0]), one_key_less, RESULTS)
