"""What csrc/attention/prepare.cu makes of a mask, against AttentionMask.dense: spans, bits, seen keys, tile lists."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from host_build import ORDERS
from mask_cases import KINDS, Kwargs, mask_kinds, packed_and_padded
from torch import Tensor

from fastattn import AttentionMask
from fastattn.cuda import _visibility as made

SIZES = [(21, 37), (130, 261), (1, 129), (257, 64)]
PACKED_AND_PADDED = "packed and padded"


def given(kind: str, Lq: int, Lk: int, device: torch.device, H: int = 2) -> Kwargs:
    """Arguments of AttentionMask for two samples."""
    packed = kind == PACKED_AND_PADDED
    return packed_and_padded(Lq, Lk, device) if packed else mask_kinds(2, H, Lq, Lk, device)[kind]


def unpack(words: Tensor, columns: int) -> Tensor:
    """Bits in fragment order, (.., blocks, 4) -> bool (.., columns)."""
    column = torch.arange(128)
    word, bit = column % 8 // 2, column // 8 * 2 + column % 2
    bits = (words[..., word] >> bit & 1).bool().flatten(-2)
    assert not bits[..., columns:].any(), "a column past the end is seen"
    return bits[..., :columns]


def who_sees(mask: AttentionMask, Lq: int, Lk: int, by_key: bool, device: torch.device) -> Tensor:
    """What struct Visibility says, bool (B or 1, H or 1, Lq, Lk)."""
    numbers, kept = made._who_sees(mask, Lq, Lk, by_key, device)
    tensors = {t.data_ptr(): t.cpu() for t in kept}
    rows, columns = torch.arange(Lk if by_key else Lq), torch.arange(Lq if by_key else Lk)
    ahead = (columns - rows[:, None]) * (-1 if by_key else 1)
    keep = ((ahead >= numbers[0]) & (ahead <= numbers[1]))[None, None]
    if numbers[2]:
        begin, end = tensors[numbers[2]][:, None, :, :, None].unbind(3)
        keep = (columns >= begin) & (columns < end)
    if numbers[4]:
        keep = keep & unpack(tensors[numbers[4]], len(columns))
    return keep.mT if by_key else keep


@pytest.mark.parametrize("kind", [*KINDS, PACKED_AND_PADDED])
@pytest.mark.parametrize("Lq, Lk", SIZES)
def test_it_is_the_mask(Lq: int, Lk: int, kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways; without an attn_mask from what is of the size of the sequences."""
    mask = AttentionMask(**given(kind, Lq, Lk, device, 3))
    keep = mask.dense(2, 3, Lq, Lk, device).cpu()
    mask = made.without_a_row(mask, Lk)
    assert mask.attn_mask is None or kind not in ("attn_mask_keys", "attn_mask_expanded", "nothing")
    with monkeypatch.context() as patched:
        if mask.attn_mask is None:
            patched.setattr(made, "_build_bits", None)
        for by_key in (False, True):
            assert torch.equal(who_sees(mask, Lq, Lk, by_key, device).expand_as(keep), keep)
        seen = made.seen_keys(mask, Lq, Lk, device).cpu()
    assert torch.equal(unpack(seen, Lk).expand(2, 3, Lk), keep.any(-2))


def classes(keep: Tensor, block_m: int, block_n: int) -> Tensor:
    """(.., row tiles, column tiles): 0 empty, 1 partial, 2 full; a ragged tile is never full."""
    Lq, Lk = keep.shape[-2:]
    padded = F.pad(keep, (0, -Lk % block_n, 0, -Lq % block_m))
    tiles = padded.unflatten(-1, (-1, block_n)).unflatten(-3, (-1, block_m))
    return tiles.any(-1).any(-2).int() + tiles.all(-1).all(-2).int()


@pytest.mark.parametrize(
    "kind", ["key_padding", "attn_mask", "segments_causal", "decoder", "nothing", PACKED_AND_PADDED]
)
@pytest.mark.parametrize("block_m, block_n", [(64, 64), (128, 32), (16, 128), (192, 16), (64, 256)])
def test_lists_hold_the_tiles_with_work(block_m: int, block_n: int, kind: str, device: torch.device) -> None:
    Lq, Lk = 300, 520
    mask = AttentionMask(**given(kind, Lq, Lk, device))
    expected = classes(mask.dense(2, 2, Lq, Lk, device).cpu(), block_m, block_n)
    for by_key in (False, True):
        lists = made.tile_lists(mask, Lq, Lk, block_m, block_n, by_key, device)
        counts, tiles = (t.cpu().expand(2, 2, *t.shape[2:]) for t in lists)
        along = expected.mT if by_key else expected
        for place in torch.cartesian_prod(*map(torch.arange, along.shape[:3])).tolist():
            row, (partial, visited), found = (t[tuple(place)].tolist() for t in (along, counts, tiles))
            assert found[:partial] == [i for i, kind in enumerate(row) if kind == 1]
            assert found[partial:visited] == [i for i, kind in enumerate(row) if kind == 2]


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "kind", ["none", "causal_bottom_right", "window", "attn_mask", "key_padding_holes", PACKED_AND_PADDED]
)
def test_a_bias_hides_keys(kind: str, bias_dtype: torch.dtype, device: torch.device) -> None:
    """-inf for every query that a key is left to. Each broadcast; full, with one column, one head, one key masked."""
    Lq, Lk = 70, 150
    arguments = given(kind, Lq, Lk, device)
    for shape in ((2, 2, Lq, Lk), (1, 2, 1, Lk), (2, 1, Lq, 1), (1, 1, Lq, Lk)):
        bias = torch.randn(shape).masked_fill(torch.rand(shape) < 0.5, -torch.inf)
        bias[..., 0, :] = bias[..., -1, :]
        bias[:, :, :, 5 % shape[3]] = -torch.inf
        mask = AttentionMask(**arguments, bias=bias.to(device, bias_dtype))
        keep = AttentionMask(**arguments).dense(2, 2, Lq, Lk, device).cpu() & (bias != -torch.inf)
        seen = made.seen_keys(mask, Lq, Lk, device).cpu()
        assert torch.equal(unpack(seen, Lk).expand(2, 2, Lk), keep.any(-2)), shape


@pytest.mark.parametrize("order", ORDERS)
def test_in_every_order(order: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTATTN_HOST_ORDER", order)
    for kind in ("everything", PACKED_AND_PADDED):
        test_it_is_the_mask(130, 261, kind, device, monkeypatch)
    test_lists_hold_the_tiles_with_work(64, 64, "attn_mask", device)
    test_a_bias_hides_keys("attn_mask", torch.float32, device)


def test_prepared_once(device: torch.device) -> None:
    """A mask is prepared once; an edit of it in place is noticed; a bias is looked at in every call."""
    mask = AttentionMask(torch.ones(40, 50, dtype=torch.bool, device=device))
    assert made.bits(mask, 40, 50, device) is made.bits(mask, 40, 50, device)
    assert made.seen_keys(mask, 40, 50, device) is made.seen_keys(mask, 40, 50, device)
    mask.attn_mask[..., 7] = False
    assert not unpack(made.bits(mask, 40, 50, device).cpu(), 50)[..., 7].any()
    biased = mask.with_bias(torch.zeros(1, 1, 1, 50, device=device))
    biased.bias[..., 3] = -torch.inf
    assert unpack(made.seen_keys(biased, 40, 50, device).cpu(), 50).sum() == 48
