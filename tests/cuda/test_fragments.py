"""mma, ldmatrix and cp.async of csrc/common on the CPU runner, against plain arithmetic. The kernels: fragments.cu."""

from __future__ import annotations

import ctypes
from pathlib import Path

import emulator_build
import pytest
import torch
from helpers import round_tf32
from torch import Tensor

DEPTH, KEYS, COLUMNS = 32, 48, 32
ASYNC = ("lazy", "eager")


ROUND = {
    "bfloat16": lambda x: x.bfloat16().float(),
    "float16": lambda x: x.half().float(),
    "tf32": round_tf32,
    "float32": lambda x: x,
    "float32 by shuffles": lambda x: x,
}


@pytest.fixture(scope="module")
def library(build_folder: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(
        str(emulator_build.build("fragments", [Path(__file__).with_name("fragments.cu")], build_folder))
    )
    library.run_product.restype = ctypes.c_char_p
    return library


def run(library: ctypes.CDLL, name: str, *tensors: Tensor) -> None:
    if message := library.run_product(name.encode(), *(ctypes.c_void_p(t.data_ptr()) for t in tensors)):
        raise RuntimeError(message.decode())


@pytest.mark.parametrize("name", ROUND)
def test_products(name: str, library: ctypes.CDLL) -> None:
    """a b^T from two tiles, and its product with a third, which reads the first result from the accumulators."""
    a, b, c = torch.randn(16, DEPTH), torch.randn(KEYS, DEPTH), torch.randn(KEYS, COLUMNS)
    scores, out = torch.full((16, KEYS), torch.nan), torch.full((16, COLUMNS), torch.nan)
    run(library, name, a, b, c, scores, out)
    round = ROUND[name]
    torch.testing.assert_close(scores, round(a) @ round(b).mT, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, round(scores) @ round(c), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("mode", ASYNC)
def test_copies(mode: str, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the wait the values are there. Those outside are zero and are not read."""
    monkeypatch.setenv("FASTATTN_EMULATOR_ASYNC", mode)
    values, out, unused = torch.randn(256), torch.zeros(256), torch.zeros(1)
    values[:32] = torch.nan
    run(library, "copy", values, unused, unused, unused, out)
    assert torch.equal(out, torch.cat([torch.zeros(32), values[32:]]))


@pytest.mark.bug_class("T7")
def test_a_missing_wait_shows(library: ctypes.CDLL) -> None:
    values, out, unused = torch.randn(256), torch.zeros(256), torch.zeros(1)
    run(library, "copy without a wait", values, unused, unused, unused, out)
    assert not torch.equal(out[128:], values[128:])
