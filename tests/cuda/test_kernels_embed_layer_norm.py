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
    LENGTH,
    PLACES,
    VOCABULARY,
    Case,
    Memory,
    call,
    inputs,
    run,
)
from emulator_build import ORDERS

from fastattn import explain
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


def test_no_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, _, dweight, dbias, *_ = run(Case(0, 64, dropout_p=0.1), device, monkeypatch)
    assert not dweight.any() and not dbias.any()


@pytest.mark.parametrize("blocks", [None, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 17, 37))])
def test_bits_do_not_depend_on_the_run(
    blocks: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal bits in every order of warps, lanes and blocks; in one, whole and broken groups of blocks that add up."""

    class Blocks:
        def __getattr__(self, name: str) -> object:
            given = blocks is not None and name == "embed_layer_norm_bwd_blocks"
            return (lambda *_: blocks) if given else getattr(extension, name)

    extension = backend.extension(device)
    monkeypatch.setattr(backend, "extension", lambda _: Blocks())
    results = []
    for order in (*ORDERS, ORDERS[0]):
        monkeypatch.setenv("FASTATTN_EMULATOR_ORDER", order)
        torch.manual_seed(0)
        results.append(run(Case(8 * (blocks or 4) + 5, 264, dropout_p=0.1, indices=INT32), device, monkeypatch))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dropout_p", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("hidden", [64, 67])
def test_out_of_range(hidden: int, dropout_p: float, device: torch.device) -> None:
    """NaN in every element of such a row and of its gradient, whatever dropout drops; the others' bits stay."""
    given = inputs(Case(9, hidden, dropout_p=dropout_p, indices=INT64), Memory(device, 0))
    dout = torch.randn(9, hidden, device=device)
    want, _ = call(given, dout)
    far = 2**62
    bad = {"tokens": {0: -1, 2: VOCABULARY, 3: far}, "position": {5: -1, 6: PLACES, 8: -far}}
    changed = given | {name: given[name].clone() for name in bad}
    for name, values in bad.items():
        for row, value in values.items():
            changed[name][row] = value
    got, _ = call(changed, dout)
    rows = sorted(bad["tokens"] | bad["position"])
    others = [row for row in range(9) if row not in rows]
    for name in ("out", "drows"):
        assert got[name][rows].isnan().all() and torch.equal(got[name][others], want[name][others])
    assert not got["index"][rows].any() and torch.equal(got["index"][others], want["index"][others])


def test_positions_in_order_begin_again_with_every_sequence(device: torch.device) -> None:
    given = inputs(Case(11, 40), Memory(device, 0))
    dout = torch.randn(11, 40, device=device)
    in_order, _ = call(given, dout)
    given_positions, _ = call(given | {"position": torch.arange(11, device=device) % LENGTH}, dout)
    assert all(torch.equal(a, b) for a, b in zip(in_order.values(), given_positions.values(), strict=True))


def test_refusals(device: torch.device) -> None:
    """Each limit is refused with what was got; and what serves is explained."""
    tokens, embedding, vector = torch.zeros(2, 3, dtype=INT64, device=device), torch.empty(5, 8), torch.empty(8)
    tensors = [t.to(device) for t in (embedding, embedding, vector, vector)]
    assert explain("embed_layer_norm", tokens, *tensors).refusals["cuda"] is None
    rest = (*tensors[1:], None, 1.0, None, 0.0, FLOAT32)
    for wrong, said in ((tensors[0].double(), "float64"), (torch.empty(1, 16385, device=device), "16385")):
        assert said in backend.unsupported_reason(tokens, wrong, *rest)
    assert "meta" in backend.unsupported_reason(tokens, embedding.to("meta"), *rest)
