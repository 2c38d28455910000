"""The kernel that prepares masks, kernels/mask/, returns what fastattn/masks/kernel_format.py specifies.

Outputs start as the largest integer (conftest.py), so what the kernel forgets to write is seen.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_reads import CLASSES
from mask_cases import KINDS, in_blocks, mask_kinds, offsets, packed_and_padded, prefix

from fastattn import AttentionMask, backends
from fastattn.masks import Layout, PreparedMask


@pytest.fixture
def prepare_mask(device: torch.device) -> Any:
    """The kernel's launch; skips where Triton cannot run."""
    if (reason := backends.unsupported_reason("mask", "triton", (torch.empty(0, device=device),))) is not None:
        pytest.skip(reason)
    return backends.load_backend("mask", "triton").prepare_mask


def compare(expected: PreparedMask, found: PreparedMask) -> None:
    """The formula's and the kernel's; what `tiles` holds past the lists is arbitrary."""
    assert found[:2] == expected[:2] and found.layout == expected.layout
    for name, got, right in zip(found._fields[2:7], found[2:7], expected[2:7], strict=True):
        assert (got is None) == (right is None), name
        if got is None:
            continue
        assert got.dtype == torch.int32 and got.shape == right.shape and got.is_contiguous(), name
        assert got.data_ptr() % 16 == 0, "the CUDA kernels load four words at once"
        if name == "tiles":
            listed = torch.arange(right.shape[3], device=right.device) < expected.counts[..., 1:]
            got, right = got[listed], right[listed]
        assert torch.equal(got, right), name


def check(prepare_mask: Any, Lq: int, Lk: int, layout: Layout, device: torch.device, **kwargs: Any) -> None:
    found = AttentionMask(**kwargs).prepare(Lq, Lk, layout, device, prepare_mask)
    compare(AttentionMask(**kwargs).prepare(Lq, Lk, layout, device), found)


# In the interpreter a program takes some ten milliseconds, so few tiles: two or three of either side, the last ragged.
EVERYDAY = ("window", "key_padding_holes", "attn_mask_head", "segments_window_bottom_right", "everything")


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in EVERYDAY else pytest.mark.full) for k in KINDS])
def test_every_kind_of_mask(kind: str, prepare_mask: Any, device: torch.device) -> None:
    kwargs = mask_kinds(2, 2, 19, 133, device)[kind]
    for layout in (Layout(False, 16, 128), Layout(True, 128, 16), Layout(True)):
        check(prepare_mask, 19, 133, layout, device, **kwargs)


def test_long_rows(prepare_mask: Any, device: torch.device) -> None:
    """More columns than a program reads at once; a row alone."""
    check(prepare_mask, 40, 1500, Layout(False, 32, 64), device, **packed_and_padded(40, 1500, device))
    check(prepare_mask, 1, 1500, Layout(False, 64, 64), device, key_padding=prefix([1300, 0], 1500).to(device))


@pytest.mark.parametrize("layout", CLASSES)
def test_classes_of_blocks(layout: Layout, prepare_mask: Any, device: torch.device) -> None:
    kinds = mask_kinds(1, 2, 200, 300, device)
    kinds["blocks"] = {"attn_mask": in_blocks(1, 2, 200, 300).to(device), "window": (150, 250)}
    for kind in ("blocks", "attn_mask_head", "attn_mask_queries", "everything", "segments_window_bottom_right"):
        check(prepare_mask, 200, 300, layout, device, **kinds[kind])


@pytest.mark.parametrize(("first", "past"), [(2, -1), (-4, 40)])
def test_positions_in_no_sequence(first: int, past: int, prepare_mask: Any, device: torch.device) -> None:
    """Offsets that do not cover everything, or that begin before the first position and end past the last: on a GPU
    nothing reads them."""
    given = AttentionMask(
        cu_seqlens_q=offsets(9, 0, 11).to(device), cu_seqlens_k=offsets(30, 20, 25).to(device), window=(10**10, 3)
    )
    for t in (given.cu_seqlens_q, given.cu_seqlens_k):
        t[0], t[-1] = first, t[-1] + past
    one, other = (given.replace(key_padding=None) for _ in range(2))  # which share no cache
    for layout in (Layout(False, 16, 32), Layout(True, 32, 16)):
        compare(one.prepare(20, 75, layout, device), other.prepare(20, 75, layout, device, prepare_mask))
