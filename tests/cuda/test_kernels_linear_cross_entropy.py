"""The CUDA kernel over rows of logits: on the CPU through csrc/emulator, and on a GPU where there is one.

The op in this backend, products included, is held to every backend's checks in tests/ops/test_linear_cross_entropy.py.
"""

from __future__ import annotations

import pytest
import torch
from emulator_build import ORDERS
from linear_cross_entropy_cases import IGNORED, Case, run

from fastattn.backends.cuda import linear_cross_entropy as backend

FLOAT32, BFLOAT16, FLOAT16 = DTYPES = torch.float32, torch.bfloat16, torch.float16

# Both sides of each switch: whole chunks and what is left of them, one warp a row and more, their number at its limit.
COUNTS = [Case(n, dtype) for n in (1, 7, 8, 83, 1000, 1024, 1025, 2056, 16392) for dtype in DTYPES]
# Held in shared memory in part, and as a whole: 163 to 227 KiB.
WIDE = [Case(70001, FLOAT32, rows=2), Case(50257, BFLOAT16, rows=2)]
UNALIGNED = [
    Case(n, dtype, gap=gap, shift=shift) for n in (7, 1003, 2056) for dtype in DTYPES for gap, shift in ((0, 1), (3, 0))
]
OPTIONS = [
    Case(1003, FLOAT16, rows, eps, scale, bias, dloss, mean)
    for rows, eps, scale, bias, dloss, mean in (
        (1, 0.0, 1.0, False, "none", False),
        (4, 0.0, -0.3, True, "one", True),
        (9, 1.0, 0.0, True, "rows", False),
        (9, 1.02, 3.0, False, "one", False),
    )
]


ALL = [*COUNTS, *WIDE, *UNALIGNED, *OPTIONS]


@pytest.mark.parametrize(
    "case", [case if i % 4 == 0 else pytest.param(case, marks=pytest.mark.full) for i, case in enumerate(ALL)], ids=str
)
def test_against_float64(case: Case, device: torch.device) -> None:
    run(case, device)


@pytest.mark.parametrize("case", [Case(1003, BFLOAT16), Case(2056), Case(83, FLOAT16, gap=0)], ids=str)
def test_a_loss_alone_leaves_the_logits(case: Case, device: torch.device) -> None:
    assert torch.equal(run(case, device, needs_gradient=False).losses, run(case, device).losses)


@pytest.mark.parametrize("case", [Case(83, BFLOAT16, rows=11), Case(3001), Case(3001, FLOAT16, gap=0)], ids=str)
def test_bits_do_not_depend_on_the_run(case: Case, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for order in (*ORDERS, ORDERS[0]):
        monkeypatch.setenv("FASTATTN_EMULATOR_ORDER", order)
        results.append(run(case, device))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_held_or_read_again(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a row is held in shared memory, most of it, or all of it: equal bits."""
    if device.type != "cpu":
        pytest.skip("a GPU has one size of shared memory")
    case, results = Case(50257, rows=3), []
    for capability in ("86", "80", "90"):
        monkeypatch.setenv("FASTATTN_EMULATOR_CAPABILITY", capability)
        results.append(run(case, device))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [5, 2056])
def test_nan_is_kept(classes: int, dtype: torch.dtype, device: torch.device) -> None:
    """One NaN among the logits, and a target that is no class: loss and gradient of that row are NaN, of others not."""
    logits = torch.randn(4, classes, device=device).to(dtype)
    logits[1, 3] = torch.nan
    target, losses = torch.tensor([0, 2, classes, IGNORED], device=device), torch.zeros(4, device=device)
    backend.cross_entropy_rows(logits, None, target, losses, None, None, 0.1, IGNORED, 1.0, True)
    assert losses.isnan().tolist() == logits.isnan().all(1).tolist() == [False, True, True, False]
    assert logits.isnan().any(1).tolist() == [False, True, True, False] and not logits[3].any()
