"""Dropout of attention: one written rule, so the mask is compared bit for bit and the results exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_checks import (
    BACKENDS,
    KERNEL_BACKENDS,
    backend_call,
    check,
    dropout_multiplier,
    make,
    served,
    visible,
)
from helpers import check_case
from mask_cases import scattered
from torch import Tensor

from fastattn import AttentionMask, scaled_dot_product_attention
from fastattn.backends.reference import philox
from fastattn.check import cases


def lane_by_the_rule(seed: int, offset: int, row: int, col: int) -> int:
    """The 16-bit number of one element in Python integers, from the docstring of reference/philox.py."""
    low = 0xFFFFFFFF
    counter = [col // 8, row & low, row >> 32, offset & low]
    key = [seed & low, (seed >> 32) & low]
    words = philox4x32(counter, key, rounds=7)
    return words[col % 8 // 2] >> (16 * (col % 2)) & 0xFFFF


def philox4x32(counter: list[int], key: list[int], rounds: int) -> list[int]:
    """Salmon et al. 2011, figure 2 and section 3.3, on integers of any size."""
    low = 0xFFFFFFFF
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(rounds):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & low, (p0 >> 32) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return [c0, c1, c2, c3]


def test_philox_against_published_numbers() -> None:
    """The known answers that Random123 gives for philox4x32 with 7 and 10 rounds."""
    ones = 0xFFFFFFFF
    assert philox4x32([0] * 4, [0] * 2, 10) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox4x32([ones] * 4, [ones] * 2, 10) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert philox4x32([0] * 4, [0] * 2, 7) == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


@pytest.mark.parametrize("seed, offset", [(0, 0), (1, 2), (2**62 - 1, 2**61 + 5), (2**33 + 7, 2**32 - 1)])
def test_reference_lanes(seed: int, offset: int) -> None:
    lanes = philox.philox_lanes(torch.tensor([seed, offset]), 5, 21)
    expected = [[lane_by_the_rule(seed, offset, row, col) for col in range(21)] for row in range(5)]
    assert (lanes.int() & 0xFFFF).tolist() == expected


def test_lanes_of_aten() -> None:
    """On a CPU aten drops by the 16-bit parts of the words that PyTorch's generator draws from the seed."""
    words = torch.empty(12, dtype=torch.int64).random_(-(2**63), None, generator=torch.Generator().manual_seed(9))
    lanes = [((word >> 16 * part) + 2**15) & 0xFFFF for word in words.tolist() for part in range(4)]
    keep = philox.keep_mask(torch.tensor([9]), 6, 8, 0.3)
    assert keep.flatten().tolist() == [lane >= round(0.3 * 65536) for lane in lanes]


@pytest.mark.parametrize("dropout_p", [0.0, 1e-6, 0.1, 0.5, 0.99999, 1.0])
def test_reference_keeps_by_the_threshold(dropout_p: float) -> None:
    state = torch.tensor([3, 4])
    keep = philox.keep_mask(state, 40, 40, dropout_p)
    lanes = philox.philox_lanes(state, 40, 40).int() & 0xFFFF
    assert torch.equal(keep, lanes >= round(dropout_p * 65536))
    assert dropout_p not in (0.0, 1.0) or keep.all() == (dropout_p == 0.0) and keep.any() == (dropout_p == 0.0)


@pytest.mark.bug_class("T1")
@pytest.mark.parametrize("first_row", [0, 2**31 - 3, 2**32 - 3, 2**40 + 5])
@pytest.mark.parametrize("seed, offset", [(1, 2), (2**62 - 1, 2**61 + 5)])
def test_triton_tile_by_the_rule(seed: int, offset: int, first_row: int, device: torch.device) -> None:
    """Also where the row number, the linear index of a weight's row, leaves 32 bits."""
    backend_call("triton", device)
    from dropout_tile import keep_tile

    rows, cols = range(first_row, first_row + 8), range(24, 40)
    lanes = [[lane_by_the_rule(seed, offset, row, col) for col in cols] for row in rows]
    for threshold in (0, 1, 20000, 32768, 50000, lanes[3][5], lanes[3][5] + 1, 65536):
        keep = keep_tile(torch.tensor([seed, offset], device=device), threshold, first_row, 24, rows=8, cols=16)
        assert keep.tolist() == 2 * [[[lane >= threshold for lane in row] for row in lanes]]


PROBLEMS: dict[str, dict[str, Any]] = {
    "causal": {"H": 4, "Hk": 2, "mask": "causal", "dropout_p": 0.3, "bias": (1, 4, 21, 37)},
    "everything": {"H": 4, "Hk": 2, "mask": "everything", "dropout_p": 0.3},
    "hardly ever": {"mask": "causal", "dropout_p": 1e-5},
    "nearly always": {"mask": "causal", "dropout_p": 0.999},
    "always": {"mask": "causal", "dropout_p": 1.0},
    # Queries with one or two keys: dP nearly equals delta, and dropout's factor scales up how out was rounded.
    "one key": {"Lk": 1, "dropout_p": 0.3, "dtype": torch.bfloat16},
    "one key in a window": {"Lq": 40, "Lk": 40, "mask": {"window": (0, 0)}, "dropout_p": 0.3, "dtype": torch.bfloat16},
    "one key anywhere": dict(Lk=150, mask={"attn_mask": scattered(21, 150, 1)}, dropout_p=0.3, dtype=torch.bfloat16),
    "two keys anywhere": dict(Lk=150, mask={"attn_mask": scattered(21, 150, 2)}, dropout_p=0.5, dtype=torch.float16),
    "heavy": {"Lq": 60, "Lk": 60, "mask": {"window": (9, 0)}, "dropout_p": 0.97, "dtype": torch.float16},
}
EVERYDAY_PROBLEMS = ("everything", "always", "one key in a window", "two keys anywhere")


@pytest.mark.few(6)
@pytest.mark.bug_class("T15")
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in EVERYDAY_PROBLEMS else pytest.mark.full) for c in PROBLEMS]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_and_backward(backend: str, case: str, device: torch.device) -> None:
    """Exactly the weights that the rule drops are dropped, forward and backward: see check()."""
    options = dict(PROBLEMS[case])
    mask = options.pop("mask", "none")
    if isinstance(mask, dict):
        mask = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in mask.items()}
    p = served(make(**{"B": 1, "D": 16, **options}, mask=mask, device=device), backend)
    check(p, backend_call(backend, device))


@pytest.mark.parametrize("backend", ["aten"])
def test_with_a_bias_by_distance(backend: str) -> None:
    """Out alone has the dropout of the formula."""
    check_case(cases.attention(mask={}, relative_bias=(1, 57), dropout_p=0.3), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_over_several_tiles(backend: str, device: torch.device) -> None:
    """Values that are the identity give the weights."""
    p = make(B=2, H=1, Lq=70, Lk=128, D=16, Dv=128, mask="causal_bottom_right", dropout_p=0.2, device=device)
    p = p.but(v=torch.eye(128, device=device).expand(2, 1, 128, 128).contiguous())
    results = check(p, backend_call(backend, device))
    if backend != "reference":
        zeros = dropout_multiplier(p) == 0
        assert torch.equal((results.out == 0)[visible(p)], zeros[visible(p)]), "bit for bit the rule's mask"


@pytest.mark.bug_class("T16")
@pytest.mark.parametrize("backend", KERNEL_BACKENDS)
def test_cuda_graph_draws_anew_at_every_replay(backend: str, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    backend_call(backend, device)
    p = make(B=1, H=2, mask="decoder", device=device)
    mask = AttentionMask(**p.mask)

    def attend() -> Tensor:
        return scaled_dot_product_attention(p.q, p.k, p.v, mask, dropout_p=0.5, backend=backend)

    with torch.cuda.stream(torch.cuda.Stream()):
        attend()  # compiles the kernels and prepares the mask
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    replays = []
    for _ in range(3):
        graph.replay()
        replays.append(captured.clone())
    assert replays[0].any()
    assert not torch.equal(replays[0], replays[1]) and not torch.equal(replays[1], replays[2])
