"""The CUDA layer norm: on the CPU through csrc/emulator, in several warp orders, and on a GPU where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from add_layer_norm_cases import Case, run
from emulator_build import ORDERS

from fastattn.backends.cuda import add_layer_norm as backend

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
PAIRS = [(FLOAT32, FLOAT32), (BFLOAT16, FLOAT32), (BFLOAT16, BFLOAT16), (FLOAT16, FLOAT32), (FLOAT16, FLOAT16)]

# Widths on both sides of every switch: chunks and warps of a row, forward and backward; vectors and single elements.
WIDTHS = (1, 7, 8, 100, 256, 264, 512, 520, 1000, 1024, 1032, 2048, 3001, 4104, 8192, 8200, 16383, 16384)
SHAPES = [
    Case(5 if width < 4096 else 2, width, dropout_p=0.3, x_bias=FLOAT32 if i % 2 else None)
    for i, width in enumerate(WIDTHS)
]
DTYPES = [
    Case(9, width, dtype, weight_dtype, dropout_p, x_bias=x_bias)
    for dtype, weight_dtype in PAIRS
    for width, dropout_p, x_bias in ((72, 0.1, dtype), (500, 0.0, FLOAT32), (1040, 0.1, dtype))
]
ARGUMENTS = [
    Case(37, width, BFLOAT16, FLOAT32, dropout_p, residual, dz, x_bias=x_bias)
    for width, x_bias in ((64, None), (64, FLOAT32), (132, BFLOAT16))
    for dropout_p in (0.0, 0.5)
    for residual in (True, False)
    for dz in (True, False)
]
UNALIGNED = [Case(6, width, *pair, 0.2, x_bias=FLOAT32, shift=1) for width in (64, 1040) for pair in PAIRS]
RMS, EPS_ON_STD = (
    [
        Case(rows, width, *pair, 0.3, residual, dz, x_bias=x_bias, **{variant: True})
        for rows, width, residual, dz, x_bias in (
            (37, 72, True, True, FLOAT32),
            (5, 500, False, False, None),
            (300, 7, True, True, None),
            (3, 2056, True, False, FLOAT32),
            (2, 16384, True, True, None),
        )
        for pair in PAIRS
    ]
    for variant in ("rms", "eps_on_std")
)
WIDE = [
    Case(3, 16384, *pair, 0.1, x_bias=None if shift else pair[0], shift=shift) for pair in PAIRS for shift in (0, 1)
]


ALL = [*SHAPES, *DTYPES, *ARGUMENTS, *UNALIGNED, *RMS, *EPS_ON_STD, *WIDE]
EVERYDAY = [*SHAPES[3:14:3], *DTYPES[:3], *ARGUMENTS[::7], *RMS[:6:5], *EPS_ON_STD[:6:5], UNALIGNED[1]]
CASES = [case if case in EVERYDAY else pytest.param(case, marks=pytest.mark.full) for case in ALL]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case: Case, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    run(case, device, monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("blocks", [1, 17, 18, 37])
def test_weight_gradients_of_many_blocks(
    blocks: int, rms: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One, whole and broken groups of the blocks that add their sums up, in every order of arrival: equal bits."""

    class Blocks:
        def __getattr__(self, name: str) -> object:
            return (lambda *_: grid) if name == "add_layer_norm_bwd_grid" else getattr(extension, name)

    grid = blocks, blocks + -(-blocks // 17)  # rows of partial sums: csrc/common/norm.h
    extension = backend.extension(device.type == "cuda")
    monkeypatch.setattr(backend, "extension", lambda _: Blocks())
    results = []
    for order in ORDERS:
        monkeypatch.setenv("FASTATTN_EMULATOR_ORDER", order)
        torch.manual_seed(0)
        results.append(run(Case(9 * blocks + 2, 40, rms=rms, x_bias=FLOAT32), device, monkeypatch))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# 37 rows: more than two multiprocessors take at once, and not a multiple of a block's rows.
BITS = [Case(37, 64), Case(37, 520, dropout_p=0.1, x_bias=FLOAT32), Case(19, 1040, BFLOAT16, x_bias=BFLOAT16)]


@pytest.mark.parametrize("case", BITS, ids=str)
def test_bits_do_not_depend_on_the_run(case: Case, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal bits in every order of warps, lanes and blocks, and from run to run."""
    results = []
    for order in (*ORDERS, ORDERS[0]):
        monkeypatch.setenv("FASTATTN_EMULATOR_ORDER", order)
        torch.manual_seed(0)
        results.append(run(case, device, monkeypatch))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_refusals(device: torch.device) -> None:
    """Each limit is refused with what was got."""
    x, weight = torch.empty(2, 64, device=device), torch.empty(64, device=device)
    wide = torch.empty(16385, device=device)
    assert backend.unsupported_reason(x, None, weight, weight, 0.0) is None
    for arguments, said in (
        ((x.double(), None, weight, weight), "float64"),
        ((x, None, weight.half(), weight.half()), "torch.float16"),
        ((x.half(), None, weight, weight.half()), "torch.float32 and torch.float16"),
        ((wide[None], None, wide, wide), "16385"),
        ((x.to("meta"), None, weight, weight), "meta"),
    ):
        assert said in backend.unsupported_reason(*arguments, 0.0)
    assert "x_bias in float32" in backend.unsupported_reason(x, None, weight, weight, 0.0, weight.half())


def test_host_runner_from_the_environment(emulator_library: Path) -> None:
    program = """
import fastattn, torch
x, weight = torch.randn(2, 64), torch.ones(64)
print(fastattn.dropout_add_layer_norm(x, x, weight, weight, backend="cuda").shape)
"""
    environment = os.environ | {"FASTATTN_CUDA_EMULATOR": str(emulator_library)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "torch.Size([2, 64])", done.stderr


def test_refuses_a_cpu_tensor_without_the_host_runner() -> None:
    x, weight = torch.empty(2, 64), torch.empty(64)
    assert "got a CPU tensor" in backend.unsupported_reason(x, None, weight, weight, 0.0)
