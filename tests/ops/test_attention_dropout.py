"""Dropout of attention: one written rule, so the mask is compared bit for bit and the results exactly."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from catalogue import ALL, skip_without
from mask_cases import offsets, prefix
from torch import Tensor

from fastattn import AttentionMask, scaled_dot_product_attention
from fastattn.backends.reference import philox

LOW = 0xFFFFFFFF
full = pytest.mark.full


@cache
def words_by_the_rule(seed: int, offset: int, row: int, group: int) -> list[int]:
    counter = [group, row & LOW, row >> 32, offset & LOW]
    return philox4x32(counter, [seed & LOW, (seed >> 32) & LOW], rounds=7)


def lane_by_the_rule(seed: int, offset: int, row: int, col: int) -> int:
    """The 16-bit number of one element in Python integers, from the docstring of reference/philox.py."""
    return words_by_the_rule(seed, offset, row, col // 8)[col % 8 // 2] >> (16 * (col % 2)) & 0xFFFF


def philox4x32(counter: list[int], key: list[int], rounds: int) -> list[int]:
    """Salmon et al. 2011, figure 2 and section 3.3, on integers of any size."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(rounds):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & LOW, (p0 >> 32) ^ c3 ^ k1, p0 & LOW
        k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
    return [c0, c1, c2, c3]


def test_philox_against_published_numbers() -> None:
    """The known answers that Random123 gives for philox4x32 with 7 and 10 rounds."""
    assert philox4x32([0] * 4, [0] * 2, 10) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox4x32([LOW] * 4, [LOW] * 2, 10) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert philox4x32([0] * 4, [0] * 2, 7) == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


@pytest.mark.parametrize("seed, offset", [(0, 0), (1, 2), (2**62 - 1, 2**61 + 5), (2**33 + 7, 2**32 - 1)])
def test_reference_lanes(seed: int, offset: int) -> None:
    lanes = philox.philox_lanes(torch.tensor([seed, offset]), 5, 21)
    expected = [[lane_by_the_rule(seed, offset, row, col) for col in range(21)] for row in range(5)]
    assert (lanes.int() & 0xFFFF).tolist() == expected


@pytest.mark.parametrize("first_row", [2**32 - 3, *(pytest.param(n, marks=full) for n in (0, 2**31 - 3, 2**40 + 5))])
@pytest.mark.parametrize("seed, offset", [(1, 2), (2**62 - 1, 2**61 + 5)])
def test_triton_tile_by_the_rule(seed: int, offset: int, first_row: int, device: torch.device) -> None:
    """Also where the row number, the linear index of a weight's row, leaves 32 bits."""
    skip_without("triton", "attention", device)
    from dropout_tile import keep_tile

    rows, cols = range(first_row, first_row + 8), range(24, 40)
    lanes = [[lane_by_the_rule(seed, offset, row, col) for col in cols] for row in rows]
    for threshold in (0, 20000, 50000, lanes[3][5], lanes[3][5] + 1, 65536):
        keep = keep_tile(torch.tensor([seed, offset], device=device), threshold, first_row, 24, rows=8, cols=16)
        assert keep.tolist() == 2 * [[[lane >= threshold for lane in row] for row in lanes]]


def drawn_lanes(backend: str, rows: int, cols: int, device: torch.device) -> Tensor:
    """The lanes of the next call of an op: on a CPU those of aten are parts of what PyTorch's generator draws."""
    if backend == "aten":
        seed = int(torch.randint(0, 2**62, (1,)))
        words = torch.empty(-(-rows * cols // 4), dtype=torch.int64)
        words.random_(-(2**63), None, generator=torch.Generator().manual_seed(seed))
        return (words.view(torch.int16)[: rows * cols].int() + 2**15).view(rows, cols)
    seed, offset = torch.randint(0, 2**62, (2,), device=device).tolist()
    return torch.tensor([[lane_by_the_rule(seed, offset, row, col) for col in range(cols)] for row in range(rows)])


@pytest.mark.parametrize(("backend", "return_lse"), [*((b, True) for b in ALL), ("aten", False)])
def test_weights_are_dropped_by_the_rule(backend: str, return_lse: bool, device: torch.device) -> None:
    """In several tiles, where values that are the identity show the weights; with a threshold that is a lane."""
    if backend == "aten" and device.type != "cpu":
        pytest.skip("the device's generator draws")
    skip_without(backend, "attention", device)
    q, k = torch.zeros(1, 2, 70, 16, device=device), torch.zeros(1, 2, 128, 16, device=device)
    values = torch.eye(128, device=device).expand(1, 2, 128, 128)
    torch.manual_seed(5)
    lanes = drawn_lanes(backend, 140, 128, device)
    threshold = int(lanes.flatten().sort().values[5000])
    for limit in (threshold, threshold + 1):
        torch.manual_seed(5)
        options = {"dropout_p": limit / 65536, "return_lse": return_lse, "backend": backend}
        mask = AttentionMask(is_causal=True, align="bottom_right")
        out = scaled_dot_product_attention(q, k, values, mask, **options)
        kept = ((out[0] if return_lse else out) != 0).cpu().view(140, 128)
        assert torch.equal(kept, (lanes >= limit) & torch.ones(70, 128).tril(58).bool().repeat(2, 1))


def test_aten_drops_in_packed_sequences_as_in_a_batch() -> None:
    """With equal seeds: results and gradients are those of the sequences one below the other."""
    lengths, total = (9, 11, 9, 12), 41
    bounds = offsets(*lengths)
    leaves = [torch.randn(1, 4, total, 16, requires_grad=True) for _ in range(3)]
    places = [slice(a, b) for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]
    batch = [torch.cat([F.pad(t[:, :, at], (0, 0, 0, 12 - at.stop + at.start)) for at in places]) for t in leaves]
    found = []
    for inputs, mask in (
        (leaves, AttentionMask(cu_seqlens_q=bounds, is_causal=True)),
        (batch, AttentionMask(key_padding=prefix(list(lengths), 12), is_causal=True)),
    ):
        torch.manual_seed(1)
        out = scaled_dot_product_attention(*inputs, mask, 0.3, backend="aten")
        if inputs is batch:
            out = torch.cat([out[i : i + 1, :, :n] for i, n in enumerate(lengths)], 2)
        found.append((out, *torch.autograd.grad(out.sin().sum(), leaves)))
    torch.testing.assert_close(*found)
