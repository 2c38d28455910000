"""The kernel that prepares masks, kernels/mask/, returns what fastattn/masks/kernel_format.py specifies.

Outputs start as the largest integer (conftest.py), so what the kernel forgets to write is seen.
"""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mask_cases import KINDS, mask_kinds, offsets, packed_and_padded, prefix

from fastattn import AttentionMask, backends
from fastattn.masks import Layout, PreparedMask
from fastattn.ops import attention


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
@pytest.mark.few(1)
@pytest.mark.bug_class("T14")
@pytest.mark.parametrize("by_key", [False, True])
def test_every_kind_of_mask(by_key: bool, prepare_mask: Any, device: torch.device) -> None:
    tile = (128, 16) if by_key else (16, 128)
    for kind, kwargs in mask_kinds(2, 2, 19, 133, device).items():
        check(prepare_mask, 19, 133, Layout(by_key, *tile), device, **kwargs)
        if kind in ("key_padding_holes", "attn_mask_head", "segments_causal", "decoder"):
            check(prepare_mask, 19, 133, Layout(by_key), device, **kwargs)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_every_tile(kind: str, prepare_mask: Any, device: torch.device) -> None:
    tiles = ((0, 0), (4, 4), (16, 16), (48, 64), (64, 32), (128, 128), (192, 128))
    for shape in ((2, 3, 7, 10), (1, 2, 1, 6), (2, 1, 6, 1), (2, 2, 40, 150), (2, 1, 130, 1100)):
        for by_key, tile in product((False, True), tiles):
            if tile[0] == 0 or 20 * tile[0] > max(shape):  # a program is slow in the interpreter
                check(prepare_mask, *shape[2:], Layout(by_key, *tile), device, **mask_kinds(*shape, device)[kind])


@pytest.mark.bug_class("T4")
def test_strides(prepare_mask: Any, device: torch.device) -> None:
    """Matrices and paddings are read where they are."""
    coin = torch.rand(3, 2, 40, 150, device=device) < 0.6
    matrices = (
        coin.permute(1, 0, 2, 3)[:, :2].contiguous().permute(1, 0, 2, 3),  # heads vary slower than samples
        coin.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)[:2],
        coin[:2, :, 1::2, 5:138],
        coin[:2, :1, :1, :133].expand(2, 2, 19, 133),
        coin[:1, :1, :19, :1].expand(2, 2, 19, 133),
    )
    for matrix in matrices:
        check(prepare_mask, 19, 133, Layout(False, 32, 64), device, attn_mask=matrix[:, :, :19, :133])
    check(prepare_mask, 19, 133, Layout(True, 64, 32), device, attn_mask=matrices[2][:, :, :19])
    keys, queries = coin[:2, 0, 0, 7:140], coin[0, 0, :19, 2:4].T
    for key_padding, query_padding in (
        (keys[:, ::1].T.contiguous().T, queries),
        (keys[:1].expand(2, 133), queries[:1].expand(2, 19)),
    ):
        for layout in (Layout(False, 32, 64), Layout(True)):
            padding = {"key_padding": key_padding, "query_padding": query_padding}
            check(prepare_mask, 19, 133, layout, device, **padding, is_causal=True)


def test_long_rows_and_positions_in_no_sequence(prepare_mask: Any, device: torch.device) -> None:
    """More columns than a program reads at once; packed sequences that do not cover everything; a row alone."""
    Lq, Lk = 40, 1500
    check(prepare_mask, Lq, Lk, Layout(False, 32, 64), device, **packed_and_padded(Lq, Lk, device))
    check(prepare_mask, 1, Lk, Layout(False, 64, 64), device, key_padding=prefix([1300, 0], Lk).to(device))
    of_queries, of_keys = offsets(9, 0, 11).to(device), offsets(30, 20, 25).to(device)
    packed = AttentionMask(cu_seqlens_q=of_queries, cu_seqlens_k=of_keys, window=(10**10, 3))
    for first, past in ((2, -1), (-4, 40)):  # and offsets before the first position and past the last
        for t in (of_queries, of_keys):
            t[0], t[-1] = first, t[-1] + past
        pairs = (packed.replace(key_padding=None),), (packed.replace(key_padding=None), prepare_mask)  # no common cache
        for layout in (Layout(False, 16, 32), Layout(True, 32, 16)):
            one, other = (mask.prepare(20, 75, layout, device, *build) for mask, *build in pairs)
            compare(one, other)


@pytest.mark.bug_class("T12")
def test_empty_dimensions(prepare_mask: Any, device: torch.device) -> None:
    for B, H, Lq, Lk in ((2, 2, 0, 4), (2, 2, 4, 0), (0, 2, 4, 4)):
        real = torch.ones(B, H, Lq, Lk, dtype=torch.bool, device=device)
        key_padding = torch.ones(B, Lk, dtype=torch.bool, device=device)
        for layout in (Layout(), Layout(False, 16, 16), Layout(True, 16, 16)):
            check(prepare_mask, Lq, Lk, layout, device, attn_mask=real, key_padding=key_padding)


def test_which_masks_it_prepares(prepare_mask: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the Triton backend and, on a GPU where Triton runs, those of the CUDA backend."""
    module, prepared = backends.load_backend("mask", "triton"), []
    monkeypatch.setattr(module, "prepare_mask", lambda *given: prepared.append(given))
    on_cpu, on_gpu = (SimpleNamespace(is_cuda=is_cuda, device=device) for is_cuda in (False, True))
    restriction = AttentionMask(key_padding=prefix([5, 3], 5))._restriction(), 5, 5, 0, 0, torch.device("cpu")
    for backend, q, launches in (("triton", on_cpu, 1), ("cuda", on_cpu, 1), ("cuda", on_gpu, 2)):
        attention._prepare(backend, q, *restriction)
        assert len(prepared) == launches, backend
    monkeypatch.setattr(module, "unsupported_reason", lambda x: "there is no compiler")
    compare(
        AttentionMask(key_padding=prefix([5, 3], 5)).prepare(5, 5, Layout(), torch.device("cpu")),
        attention._prepare("cuda", on_gpu, *restriction),
    )
    assert len(prepared) == 2
