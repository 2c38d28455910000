"""AttentionMasks that are used, edited in place, changed and used again: each use against the formula in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import kernel_reads
import pytest
import torch
from catalogue import attention
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule
from mask_cases import brute_force
from torch import Tensor

from fastattn import AttentionMask, scaled_dot_product_attention
from fastattn.masks import Layout

CPU = torch.device("cpu")
B, H, HK, LQ, LK, D = 2, 4, 2, 5, 7, 8
SHAPES = {
    "attn_mask": ((B, H, LQ, LK), (1, H, 1, LK), (B, 1, LQ, 1)),
    "bias": ((1, H, LQ, LK), (B, 1, 1, LK)),
    "relative_bias": ((H, LQ + LK - 1), (1, LQ + LK - 1)),
    "key_padding": ((B, LK), (1, LK)),
    "query_padding": ((B, LQ),),
}
BIASES = ("bias", "relative_bias")
NAMES, SEED = st.sampled_from(list(SHAPES)), st.integers(0, 999)
BANDS = st.sampled_from(({}, {"is_causal": True}, {"window": (1, 2)}, {"window": (3, 0), "align": "bottom_right"}))


class Kept(NamedTuple):
    """A mask, and what it must be: tensors with the same numbers, and shared where the mask's are; bands."""

    mask: AttentionMask
    tensors: dict[str, Tensor]
    bands: tuple[dict[str, Any], ...]

    def keep(self, *without: str, is_causal: bool = False) -> Tensor:
        """Bool (B, H, LQ, LK), by loops, without the biases."""
        tensors = {n: t for n, t in self.tensors.items() if n not in (*BIASES, *without)}
        bands = [_band(tuple(band.items())) for band in (*self.bands, {"is_causal": is_causal})]
        return torch.stack([brute_force(tensors, B, H, LQ, LK), *bands]).all(0)


@cache
def _band(items: tuple[tuple[str, Any], ...]) -> Tensor:
    return brute_force(dict(items), B, H, LQ, LK)


def draw(name: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = SHAPES[name][seed % len(SHAPES[name])]
    if name in BIASES:
        drawn = torch.randn(shape, generator=generator)
        return drawn if name == "relative_bias" else drawn.masked_fill(drawn < -1, -torch.inf)
    return torch.rand(shape, generator=generator) < 0.7


class Histories(RuleBasedStateMachine):
    masks = Bundle("masks")

    @initialize(target=masks, names=st.sets(NAMES, max_size=4), band=BANDS, seed=SEED)
    def first(self, **drawn: Any) -> Kept:
        return self.make(**drawn)

    @rule(target=masks, names=st.sets(NAMES, max_size=4), band=BANDS, seed=SEED)
    def make(self, names: set[str], band: dict[str, Any], seed: int) -> Kept:
        tensors = {n: draw(n, seed) for n in sorted(names)}
        return Kept(AttentionMask(**{n: t.clone() for n, t in tensors.items()}, **band), tensors, (band,))

    @rule(target=masks, kept=masks, names=st.sets(NAMES, min_size=1, max_size=2), seed=SEED, removed=st.booleans())
    def replace(self, kept: Kept, names: set[str], seed: int, removed: bool) -> Kept:
        """Some tensors by others, or the first by none."""
        check(kept)
        new = {n: None if removed and i == 0 else draw(n, seed) for i, n in enumerate(sorted(names))}
        given = {n: None if t is None else t.clone() for n, t in new.items()}
        made = kept.mask.with_bias(**given) if names == {"bias"} else kept.mask.replace(**given)
        tensors = {n: t for n, t in (kept.tensors | new).items() if t is not None}
        made = Kept(made, tensors, kept.bands)
        check(made, options={"return_lse": True})
        return made

    @rule(target=masks, a=masks, b=masks)
    def both(self, a: Kept, b: Kept) -> Kept:
        tensors = a.tensors | b.tensors
        for n in a.tensors.keys() & b.tensors.keys():
            tensors[n] = (torch.add if n in BIASES else torch.logical_and)(a.tensors[n], b.tensors[n])
        return Kept(a.mask & b.mask, tensors, a.bands + b.bands)

    @rule(target=masks, kept=masks)
    def copied(self, kept: Kept) -> Kept:
        assert kept.mask.to("cpu") is kept.mask
        return copy.deepcopy(kept)

    @rule(kept=masks, which=st.integers(0, 9), place=SEED, seed=SEED)
    def edit(self, kept: Kept, which: int, place: int, seed: int) -> None:
        """Some numbers, in place, between two uses."""
        if kept.tensors:
            check(kept)
            name = sorted(kept.tensors)[which % len(kept.tensors)]
            new = draw(name, seed).flatten()
            for t in (kept.tensors[name], getattr(kept.mask, name)):
                t.view(-1)[place % t.numel() :] = new[0]
            check(kept)

    @rule(
        kept=masks,
        backend=st.sampled_from(("aten", "aten", "reference")),
        dtype=st.sampled_from((torch.float32, torch.float64)),
        options=st.sampled_from(({}, {"return_lse": True}, {"return_weights": True}, {"is_causal": True})),
        inference=st.booleans(),
    )
    def use(self, **drawn: Any) -> None:
        check(**drawn)


def check(
    kept: Kept,
    backend: str = "aten",
    dtype: torch.dtype = torch.float32,
    options: dict[str, Any] | None = None,
    inference: bool = False,
) -> None:
    """Out, its gradients, and what kernels read of the mask. What padding alone, or bands alone, hide is NaN."""
    options = options or {}
    is_causal = "is_causal" in options
    of_queries = kept.keep("attn_mask", "key_padding", is_causal=is_causal)[:, :1]
    of_keys = kept.keep("attn_mask", "query_padding", is_causal=is_causal)[:, :1]
    unseen = ~of_queries.any(3), ~of_keys.any(2), ~of_keys.any(2)  # queries, keys, values: (B, 1, L)
    inputs = [torch.randn(B, n, L, D, dtype=torch.float64) for n, L in ((H, LQ), (HK, LK), (HK, LK))]
    dirty = [t.to(dtype).masked_fill(rows[..., None], torch.nan) for t, rows in zip(inputs, unseen, strict=True)]
    found, expected = ([t.requires_grad_() for t in some] for some in (dirty, inputs))
    with torch.inference_mode(inference):
        out = scaled_dot_product_attention(*found, kept.mask, enable_gqa=True, backend=backend, **options)
    out, *_ = out if isinstance(out, tuple) else (out,)
    q, k, v = expected
    biases = {n: t.double() for n, t in kept.tensors.items() if n in BIASES}
    right = attention(q, k, v, AttentionMask(kept.keep(is_causal=is_causal), **biases))
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(out.double(), right, **close)
    if not inference:
        grads = [torch.autograd.grad(t.sin().sum(), of) for t, of in ((out, found), (right, expected))]
        torch.testing.assert_close([g.double() for g in grads[0]], list(grads[1]), **close)
    with torch.inference_mode(inference):  # what validation prepares, training can use
        prepared = kept.mask.prepare_all(LQ, LK, (Layout(False, 4, 4), Layout(True, 4, 4), Layout()), CPU)
    for each in prepared:
        kernel_reads.check(each, kept.keep())
        assert not any(t is not None and t.is_inference() for t in each[2:7])


@pytest.mark.parametrize("name", SHAPES)
def test_an_edit_in_place_is_seen(name: str) -> None:
    mask, fresh = (AttentionMask(**{name: draw(name, seed)}) for seed in (0, 6))  # of one shape
    query, key = torch.randn(B, H, LQ, D), torch.randn(B, HK, LK, D)

    def attend(mask: AttentionMask) -> Tensor:
        return scaled_dot_product_attention(query, key, key, mask, enable_gqa=True)

    assert not torch.equal(attend(mask), attend(fresh))
    for seed in (6, 0):
        getattr(mask, name).copy_(draw(name, seed))
        for changed in (copy.deepcopy(mask), mask):  # the tensors of a copy count their edits from 1 again
            assert torch.equal(attend(changed), attend(AttentionMask(**{name: draw(name, seed)})))


def test_an_edit_before_the_backward_is_refused() -> None:
    query, bias = torch.randn(B, H, LQ, D, requires_grad=True), torch.randn(1, H, LQ, LQ)
    out = scaled_dot_product_attention(query, query, query, bias)
    bias.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("share", [2, pytest.param(1, marks=pytest.mark.full)])
def test_histories(share: int, fuzz: Callable[..., None]) -> None:
    fuzz(Histories, share=share)
