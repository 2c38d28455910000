"""Intervals and tile lists by Triton's two launches, against AttentionMask's own."""

from __future__ import annotations

import importlib

import pytest
import torch
from attention_checks import backend_call

from fastattn import AttentionMask

TILES = [(16, 64), (64, 16)]


@pytest.fixture
def lists(device: torch.device):
    backend_call("triton", device)
    return importlib.import_module("fastattn.kernels.attention.lists")


def padding(device: torch.device, *lengths: int, L: int) -> torch.Tensor:
    return torch.arange(L, device=device) < torch.tensor(lengths, device=device)[:, None]


def masks(device: torch.device, Lq: int, Lk: int) -> dict[str, AttentionMask]:
    keys, queries = padding(device, Lk, 3, 0, Lk // 2, L=Lk), padding(device, Lq, Lq // 2, 5, 0, L=Lq)
    holes = keys.clone()
    holes[:, Lk // 3 : Lk // 2] = False
    return {
        "padding": AttentionMask(key_padding=keys),
        "padding in front, and causal": AttentionMask(key_padding=keys.flip(1), is_causal=True),
        "holes, window from the end": AttentionMask(key_padding=holes, window=(20, 7), align="bottom_right"),
        "one padding for all": AttentionMask(key_padding=keys[3:], query_padding=queries),
        "queries alone, causal": AttentionMask(query_padding=queries, is_causal=True),
        "arbitrary": AttentionMask(torch.rand(1, 1, Lq, Lk, device=device) < 0.2, key_padding=keys),
        "packed": AttentionMask(cu_seqlens_q=torch.tensor([0, min(7, Lq), Lq], device=device, dtype=torch.int32))
        & AttentionMask(key_padding=keys),
    }


@pytest.mark.parametrize(("Lq", "Lk"), [(70, 130), (33, 16), (1, 1), (300, 40)])
def test_as_the_mask_says(lists, Lq: int, Lk: int, device: torch.device) -> None:
    for name, mask in masks(device, Lq, Lk).items():
        for got, want in zip(lists.intervals(mask, Lq, Lk, device), mask.intervals(Lq, Lk, device), strict=True):
            assert torch.equal(got.expand_as(want), want), name
        for tile in TILES if Lq == 70 else TILES[1:]:
            got, want = lists.tile_lists(mask, Lq, Lk, *tile, device), mask.tiles(Lq, Lk, *tile, device)
            for field in ("partial", "full", "partial_t", "full_t"):
                count, places = getattr(got, f"num_{field}"), getattr(got, field)
                assert torch.equal(count, getattr(want, f"num_{field}")), (name, tile, field)
                listed = torch.arange(places.shape[-1], device=device) < count[..., None]
                assert torch.equal(places[listed], getattr(want, field)[listed]), (name, tile, field)


def test_prepared_once_and_anew_after_an_edit(lists, device: torch.device) -> None:
    mask = AttentionMask(key_padding=padding(device, 20, 9, L=20))
    first = lists.tile_lists(mask, 20, 20, 16, 16, device)
    assert lists.tile_lists(mask, 20, 20, 16, 16, device) is first
    mask.key_padding[0, 10:] = False
    assert not torch.equal(lists.tile_lists(mask, 20, 20, 16, 16, device).num_full, first.num_full)


@pytest.mark.parametrize(("B", "Lq", "Lk"), [(2, 5, 0), (2, 0, 5), (0, 5, 7)])
def test_no_tokens(lists, B: int, Lq: int, Lk: int, device: torch.device) -> None:
    mask = AttentionMask(key_padding=torch.zeros(B, Lk, dtype=torch.bool, device=device))
    for got, want in zip(lists.intervals(mask, Lq, Lk, device), mask.intervals(Lq, Lk, device), strict=True):
        assert torch.equal(got, want)
    for got, want in zip(
        lists.tile_lists(mask, Lq, Lk, 16, 16, device), mask.tiles(Lq, Lk, 16, 16, device), strict=True
    ):
        assert got.shape == want.shape
