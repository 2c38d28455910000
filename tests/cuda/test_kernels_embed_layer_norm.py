"""The CUDA backend of embedding + positions + dropout + LayerNorm: on the CPU through csrc/emulator, in several warp
orders, and on a GPU where there is one. What every backend is held to: tests/ops/test_embed_layer_norm.py.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from embed_layer_norm_cases import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    Case,
    run,
)
from emulator_build import ORDERS

from fastattn.backends.cuda import embed_layer_norm as backend

INT32, INT64 = torch.int32, torch.int64
# Every combination that the public op lets through: parameters in float32, or some of them in 16 bits.
TYPES = [
    (embedding, table, weight, out)
    for embedding in (FLOAT32, BFLOAT16, FLOAT16)
    for table, weight in itertools.product(dict.fromkeys((FLOAT32, embedding)), repeat=2)
    for out in (FLOAT32, BFLOAT16, FLOAT16)
    if out != FLOAT32 or embedding == FLOAT32
]
# Widths on both sides of every switch: chunks and warps of a row, forward and backward; vectors and single elements.
WIDTHS = (1, 7, 8, 100, 256, 264, 512, 520, 1000, 1024, 1032, 2048, 3001, 4096, 4104, 8192, 8200, 16383, 16384)
CASES = [Case(5 if width < 4096 else 2, width, dropout_p=0.3, indices=INT64) for width in WIDTHS]
CASES += [Case(9, width, types, p) for types in TYPES for width, p in ((72, 0.1), (131, 0.0))]
CASES += [
    Case(37, width, dropout_p=p, indices=i) for width in (64, 132) for p in (0.0, 0.5) for i in (None, INT32, INT64)
]
CASES += [Case(6, width, types, 0.2, shift=1) for width in (64, 1040) for types in TYPES[::3]]


@pytest.mark.parametrize(
    "case",
    [case if i % 7 == 3 else pytest.param(case, marks=pytest.mark.full) for i, case in enumerate(CASES)],
    ids=str,
)
def test_against_float64(case: Case, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    run(case, device, monkeypatch)


@pytest.mark.parametrize("blocks", [None, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 18, 37))])
def test_bits_do_not_depend_on_the_run(
    blocks: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal bits in every order of warps, lanes and blocks; in one, whole and broken groups of blocks that add up."""

    class Blocks:
        def __getattr__(self, name: str) -> object:
            given = blocks is not None and name == "embed_layer_norm_bwd_grid"
            return (lambda *_: grid) if given else getattr(extension, name)

    grid = blocks, blocks and blocks + -(-blocks // 17)  # rows of partial sums: csrc/common/norm.h
    extension = backend.extension(device.type == "cuda")
    monkeypatch.setattr(backend, "extension", lambda _: Blocks())
    results = []
    for order in (*ORDERS, ORDERS[0]):
        monkeypatch.setenv("FASTATTN_EMULATOR_ORDER", order)
        torch.manual_seed(0)
        results.append(run(Case(8 * (blocks or 4) + 5, 264, dropout_p=0.1, indices=INT32), device, monkeypatch))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
