"""The CUDA kernels of attention to a cache: on the CPU through csrc/emulator, and on a GPU where there is one.

What every backend is held to: tests/ops/test_decode_attention.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checks import check
from emulator_build import ORDERS

from fastattn.backends.cuda import decode_attention as backend
from fastattn.check.cases import decode_attention as make

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16

# Lanes a key, from 1 to 32; head dimensions that eight divides and not; keys and values of different widths.
DIMS = [
    {"head_dim": k, "value_dim": v, "positions": 45}
    for k, v in ((8, 8), (1, 3), (16, 24), (40, 256), (250, 64), (256, 7))
]
# One query a block and several, on both sides of eight; positions on both sides of a turn of all lanes.
QUERIES = [
    {"queries": w, "rows": 1, "heads": h, "heads_k": k} for w, h, k in ((1, 1, 1), (8, 2, 2), (3, 6, 2), (17, 4, 1))
]
POSITIONS = [{"positions": positions, "rows": 1, "head_dim": 64} for positions in (1, 15, 16, 17, 129)]
# On tensor cores in 16 bits: fewer columns than the tile has; heads of a group that share one query's ancestors.
TENSOR = [
    {"queries": 5, "rows": 1, "positions": 150, "head_dim": 96, "value_dim": 72, "lengths": [150, 61]},
    {"heads": 6, "heads_k": 2, "positions": 140, "head_dim": 64, "ancestors": True, "lengths": [0, 133]},
]
# Divided among blocks: few problems and many positions.
SPLITS = [
    {"batch": 1, "queries": 2, "positions": 1100, "heads": 1, "heads_k": 1, "ancestors": True, "lengths": [1000]},
    {"batch": 1, "queries": 3, "rows": 1, "positions": 600, "heads": 2, "heads_k": 1, "head_dim": 24},
    {"batch": 2, "queries": 1, "positions": 530, "heads": 1, "heads_k": 1, "lengths": [0, 3]},
]  # fmt: skip
ALL = [
    case | {"dtype": dtype}
    for case in (*DIMS, *QUERIES, *POSITIONS, *TENSOR, *SPLITS)
    for dtype in (FLOAT32, BFLOAT16, FLOAT16)
]


@pytest.mark.parametrize(
    "case", [case if i % 4 == 0 else pytest.param(case, marks=pytest.mark.full) for i, case in enumerate(ALL)], ids=str
)
def test_against_float64(case: dict[str, Any], device: torch.device) -> None:
    check(make(device=device, **case), "cuda")


@pytest.mark.parametrize("shift", [1, 4])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_alignment(shift: int, dtype: torch.dtype, device: torch.device) -> None:
    """Keys, values or queries that begin off a 16-byte boundary: the same result."""
    p = make(device=device, ancestors=True, dtype=dtype)
    expected = check(p, "cuda")
    for name, t in p.tensors.items():
        moved = torch.empty(t.numel() + shift, dtype=dtype, device=device)[shift:].view(t.shape).copy_(t)
        torch.testing.assert_close(check(p.but(**{name: moved}), "cuda"), expected)


@pytest.mark.parametrize("case", SPLITS, ids=str)
def test_bits_do_not_depend_on_the_run(
    case: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, results = make(device=device, **case), []
    for order in (*ORDERS, ORDERS[0]):
        monkeypatch.setenv("FASTATTN_EMULATOR_ORDER", order)
        results.append(check(p, "cuda")["out"])
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_splits_follow_from_shapes_alone(device: torch.device) -> None:
    """Short caches and many problems are not divided; few problems over a long cache are, to a limit."""
    splits = backend.extension(device.type == "cuda").decode_attention_splits
    assert splits(1, 1, 8, 8, 511, False, 0) == 1
    assert splits(1, 1, 1, 1, 4096, False, 0) > 1
    assert splits(1, 1, 1, 1, 10**6, False, 0) <= 64
    assert splits(4096, 5, 8, 8, 4096, False, 0) == 1
