"""AttentionMask against loops over single (query, key) pairs: what it means, and what a kernel reads of it."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import kernel_reads
import pytest
import torch
from kernel_reads import LAYOUTS
from mask_cases import KINDS, brute_force, mask_kinds, offsets, prefix

from fastattn import AttentionMask, get_pad_mask, get_subsequent_mask, scaled_dot_product_attention
from fastattn.masks import Layout, from_operator_args, to_operator_args
from fastattn.masks.conversions import documents_to_cu_seqlens, lengths_to_padding, prefix_lm_mask

CPU = torch.device("cpu")
SHAPES = [(2, 3, 7, 10), (2, 2, 10, 7), (3, 1, 5, 5), (1, 2, 1, 6), (2, 1, 6, 1), (1, 1, 4, 150)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_equals_loops(kind: str) -> None:
    """The dense form; what kernels read; and what an operator of torch.library gets and gives back."""
    for shape in SHAPES:
        kwargs = mask_kinds(*shape)[kind]
        given, truth = AttentionMask(**kwargs), brute_force(kwargs, *shape)
        given.check(*shape, CPU)
        found = given.dense(*shape, CPU)
        assert found.dtype == torch.bool and torch.equal(found, truth), shape
        layouts = [*LAYOUTS, Layout(False, 4, 4, (4, 4, 8, 2))]
        prepared = given.prepare_all(*shape[2:], layouts, CPU)
        for made, back in zip(prepared, from_operator_args(*to_operator_args(prepared)), strict=True):
            kernel_reads.check(made, truth)
            assert back[:2] == made[:2] and back.layout == made.layout
            assert all(a is b for a, b in zip(back[2:7], made[2:7], strict=True))
        assert given.band_only == (not any(isinstance(value, torch.Tensor) for value in kwargs.values()))


PICTURES: list[tuple[dict[str, Any], list[str]]] = [  # as the docstring of AttentionMask has them
    ({"is_causal": True}, ["1...", "11.."]),
    ({"is_causal": True, "align": "bottom_right"}, ["111.", "1111"]),
    ({"is_causal": True, "align": "bottom_right"}, [".", ".", "1"]),
    ({"window": (1, 0)}, ["1..", "11.", ".11"]),
    ({"cu_seqlens_q": offsets(1, 2), "cu_seqlens_k": offsets(2, 1)}, ["11.", "..1", "..1"]),
]


def test_the_loops_draw_what_the_docstring_draws() -> None:
    for kwargs, picture in PICTURES:
        drawn = brute_force(kwargs, 1, 1, len(picture), len(picture[0]))[0, 0].tolist()
        assert ["".join(".1"[keep] for keep in row) for row in drawn] == picture


def test_and_means_both() -> None:
    """Either way round. Where packing moves the place that a band is counted from, it is refused."""
    shape, refused = (2, 3, 7, 10), []
    kinds = mask_kinds(*shape)
    loops = {kind: brute_force(kwargs, *shape) for kind, kwargs in kinds.items()}
    masks = ("none", "window", "window_bottom_right", "key_padding_shared", "query_padding", "attn_mask_keys")
    for left, right in itertools.product(KINDS, masks):
        for first, second in ((left, right), (right, left)):
            try:
                both = AttentionMask(**kinds[first]) & AttentionMask(**kinds[second])
            except ValueError as error:
                assert "cu_seqlens" in str(error)
                refused.append(left)
                continue
            expected = loops[left] & loops[right]
            assert torch.equal(both.dense(*shape, CPU), expected), (first, second)
            kernel_reads.check(both.prepare(*shape[2:], Layout(False, 4, 4), CPU), expected)
    packed = {kind for kind in KINDS if "cu_seqlens_q" in kinds[kind]}
    assert set(refused) == packed and len(refused) == 4 * len(packed)  # with two bands, either way round
    equally = {"cu_seqlens_q": offsets(3, 0, 4)}
    both = AttentionMask(**equally) & AttentionMask(is_causal=True)
    assert torch.equal(both.dense(1, 1, 7, 7, CPU), brute_force({**equally, "is_causal": True}, 1, 1, 7, 7))


DOCUMENTS = [([4, 4, 4, 1, 1, 4], [0, 3, 5, 6]), ([[7, 0]], [0, 1, 2]), ([2], [0, 1]), ([], [0, 0])]


@pytest.mark.parametrize(("ids", "expected"), DOCUMENTS, ids=str)
def test_documents(ids: list, expected: list[int]) -> None:
    """An id that comes back is another document. Where their number cannot be read there are as many as tokens."""
    ids = torch.tensor(ids, dtype=torch.int32)
    found = documents_to_cu_seqlens(ids)
    assert found.tolist() == expected
    unread = torch.func.vmap(documents_to_cu_seqlens)(ids[None])[0]
    dense = [AttentionMask(cu_seqlens_q=t).dense(1, 1, ids.numel(), ids.numel(), CPU) for t in (found, unread)]
    assert len(unread) == max(ids.numel() + 1, 2) and torch.equal(*dense)


def test_lengths_and_prefixes() -> None:
    padding = lengths_to_padding(torch.tensor([2, 0, 3], dtype=torch.int32), 3)
    assert padding.int().tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 1]]
    keep = prefix_lm_mask(torch.tensor([2, 0]), 2, 3)
    assert keep.int().tolist() == [[[[1, 1, 0], [1, 1, 0]]], [[[1, 0, 0], [1, 1, 0]]]]
    assert prefix_lm_mask(torch.tensor([], dtype=torch.int64), 2, 3).shape == (0, 1, 2, 3)


def test_pad_and_subsequent_masks() -> None:
    tokens = torch.tensor([[5, 3, 0], [7, 0, 0]])
    assert get_pad_mask(tokens, 0).tolist() == [[[True, True, False]], [[True, False, False]]]
    subsequent = get_subsequent_mask(tokens)
    assert subsequent.dtype == torch.bool and subsequent.int().tolist() == [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]


def test_flags_may_be_of_numpy() -> None:
    assert AttentionMask(is_causal=torch.ones(1).bool().numpy()[0]).is_causal(4, 4)


def test_to_another_device() -> None:
    for kind, kwargs in mask_kinds(2, 3, 7, 10).items():
        given = AttentionMask(**kwargs, bias=torch.zeros(2, 1, 7, 10, requires_grad=True))
        given.dense(2, 3, 7, 10, CPU)
        moved = given.to("meta")
        assert given.to(CPU) is given and moved.bias.requires_grad and repr(moved) == repr(given), kind
        moved.check(2, 3, 7, 10, torch.device("meta"))
        assert moved.dense(2, 3, 7, 10, "meta").is_meta and not given.dense(2, 3, 7, 10, CPU).is_meta, kind


def test_an_empty_tile_is_not_listed() -> None:
    """Work is proportional to what is visible: padding, bands, packed sequences and blocks of a bool matrix."""
    blocks = torch.zeros(64, 64, dtype=torch.bool)
    blocks[:16, 16:32] = True
    for given, listed in (
        (AttentionMask(key_padding=prefix([16], 64)), 4),
        (AttentionMask(is_causal=True, key_padding=prefix([64], 64)), 10),
        (AttentionMask(cu_seqlens_q=offsets(16, 16, 32)), 6),
        (AttentionMask(blocks), 1),
        (AttentionMask(query_padding=prefix([16], 64)), 4),
    ):
        for by_key in (False, True):
            assert given.prepare(64, 64, Layout(by_key, 16, 16), CPU).counts[..., 1].sum() == listed


def test_prepared_once_and_what_is_kept_is_bounded() -> None:
    """By all layers, and by masks that differ in the bias alone. Edits and other lengths replace what was kept."""
    given = AttentionMask(torch.rand(2, 1, 7, 9) < 0.5, key_padding=prefix([9, 4], 9))
    layout, kept = Layout(False, 4, 4), []
    first = given.prepare(7, 9, layout, CPU)
    assert given.prepare(7, 9, layout, CPU).bits is first.bits
    assert given.with_bias(torch.randn(1, 1, 7, 9)).prepare(7, 9, layout, CPU).bits is first.bits
    for _ in range(50):
        given.attn_mask.logical_not_()
        kept.append(weakref.ref(given.prepare(7, 9, layout, CPU).bits))
    every = AttentionMask(torch.ones(1, 1, 1, 1, dtype=torch.bool), query_padding=torch.ones(1, 1, dtype=torch.bool))
    for length in range(1, 100):
        kept.append(weakref.ref(every.prepare(1, length, Layout(), CPU).columns))
    assert sum(t() is not None for t in kept) < 30


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_prepared_again_on_another_stream_and_inside_a_capture() -> None:
    """What one stream makes another must not read without waiting; what a capture makes is empty before its replay."""
    given, device = AttentionMask(key_padding=prefix([9, 4], 9).cuda()), torch.device("cuda", 0)

    def prepared() -> torch.Tensor:
        return given.prepare(7, 9, Layout(), device).columns

    first = prepared()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert prepared() is not first
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        captured = prepared()
    assert prepared() is not captured and prepared() is prepared()


BOOLS, FLOATS = torch.ones(2, 4, dtype=torch.bool), torch.zeros(4, 4)


def test_a_float_mask_of_zeros_and_ones_is_warned_of() -> None:
    q = torch.randn(1, 1, 4, 8)
    with pytest.warns(UserWarning, match="attn_mask.bool()") as caught:
        scaled_dot_product_attention(q, q, q, torch.ones(4, 4).tril())
    assert caught[0].filename == __file__, "the warning names the caller's line"
    for bias in (FLOATS, BOOLS.float(), FLOATS + torch.arange(4.0), BOOLS.float().tril().requires_grad_()):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            AttentionMask.of(bias)


def fits(**kwargs: Any) -> Callable[[], None]:
    """A mask for (B, H, Lq, Lk) = (2, 2, 5, 8)."""
    return lambda: AttentionMask(**kwargs).check(2, 2, 5, 8, CPU)


R = torch.zeros(2, 9)
# More calls of the constructor are in tests/test_wrong_calls.py.
ERRORS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (fits(attn_mask=torch.ones(2, 1, 5, 7, dtype=torch.bool)), ValueError, "attn_mask"),
    (fits(bias=torch.ones(1, 3, 5, 8)), ValueError, "bias"),
    (fits(attn_mask=prefix([1, 2], 8)), ValueError, r"\(1, 1, 2, 8\).*AttentionMask\(key_padding="),
    (fits(key_padding=prefix([1, 2], 5)), ValueError, "key_padding"),
    (fits(key_padding=prefix([1, 2, 3], 8)), ValueError, "key_padding"),
    (fits(query_padding=prefix([1, 2], 8)), ValueError, "query_padding"),
    (fits(key_padding=prefix([1, 2], 8).to("meta")), ValueError, "key_padding is on meta"),
    (fits(cu_seqlens_q=offsets(2, 4)), ValueError, "cu_seqlens_q ends at 6, expected the length 5"),
    (fits(cu_seqlens_q=offsets(2, 2)), ValueError, "cu_seqlens_q ends at 4, expected the length 5"),
    (fits(cu_seqlens_q=offsets(5), cu_seqlens_k=offsets(9)), ValueError, "cu_seqlens_k ends at 9"),
    (fits(relative_bias=R), ValueError, r"\(2, 9\), expected 12 columns, Lq \+ Lk - 1"),
    (fits(relative_bias=R, cu_seqlens_q=offsets(3, 2)), ValueError, r"expected 5 columns, 2 \* the longest packed"),
    (lambda: AttentionMask(is_causal=True) & BOOLS, TypeError, "a Tensor.*AttentionMask"),
    (lambda: AttentionMask(key_padding=BOOLS).with_bias(BOOLS), TypeError, "bias"),
    (lambda: AttentionMask.of(BOOLS.int()), TypeError, "attn_mask has dtype torch.int32, expected bool"),
]


@pytest.mark.parametrize(("call", "error", "message"), ERRORS, ids=range(len(ERRORS)))
def test_errors(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
