"""The CPU runner of CUDA sources (csrc/emulator) catches classic errors, which kernels of errors.cu have. Hopper's:
test_hopper.py. That it computes what CUDA defines is seen by the tests of all kernels, and that it finds errors in them
by tests/planted/test_planted_cuda.py."""

from __future__ import annotations

import re
from pathlib import Path

import kernel_library
import pytest
import torch
from emulator_build import ORDERS
from helpers import run_python
from kernel_library import Kernels
from torch import Tensor

from fastattn.backends import cuda
from fastattn.backends.cuda import add_layer_norm, attention

THREADS = 128
NEIGHBOURS = torch.arange(THREADS).float().roll(-1)


@pytest.fixture(scope="session")
def kernels(build_folder: Path) -> Kernels:
    return kernel_library.build("errors", build_folder)


def run(kernels: Kernels, name: str, bug: int = 0) -> Tensor:
    out = torch.zeros(THREADS)
    kernels.run(name, [out], bug=bug)
    return out


def test_orders_expose_a_race(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """What depends on the order in which warps run is wrong in at least one of the orders that tests use."""
    results = []
    for order in ORDERS:
        monkeypatch.setenv("FASTATTN_EMULATOR_ORDER", order)
        assert torch.equal(run(kernels, "neighbour"), NEIGHBOURS)
        results.append(run(kernels, "neighbour", bug=1))
    assert not all(torch.equal(out, NEIGHBOURS) for out in results)


MISUSES = [  # in the order of errors.cu
    "deadlock: 64 threads have finished, 64 threads wait at __syncthreads",
    "threads of one block meet at different barriers",
    "threads wait at __shfl_xor_sync",
    "a write past the end of shared memory",
]


@pytest.mark.parametrize("bug, said", [*enumerate(MISUSES, start=1)])
def test_reports(bug: int, said: str, kernels: Kernels) -> None:
    """What would hang, or is undefined, on a GPU is an error that names what and where."""
    with pytest.raises(RuntimeError, match=re.escape(said)):
        run(kernels, "misuse", bug)
    assert torch.equal(run(kernels, "neighbour"), NEIGHBOURS), "the runner is unusable after an error"


def test_shared_memory_of_a_block(kernels: Kernels) -> None:
    """What a block may have is asked for on each device, and more is refused."""
    for kib in (64, 80, 64):
        kernels.run("launch", [torch.zeros(THREADS)], [kib << 10])
    with pytest.raises(RuntimeError, match="167936 bytes of shared memory for a block, of the 166912 of"):
        kernels.run("launch", [torch.zeros(THREADS)], [164 << 10])


# --- the extension, built for the CPU ---------------------------------------------------------------------------------


def test_python_has_the_extensions_limits(emulator: None) -> None:
    """Some limits are needed where there is no extension: Python's are equal to those of the C++ headers. And all
    functions are there by which Python knows an older extension."""
    extension = cuda.extension(on_gpu=False)
    assert attention.MAX_HEAD_DIM == extension.ATTENTION_MAX_HEAD_DIM
    assert (add_layer_norm.MAX_HIDDEN, add_layer_norm.TICKETS) == (extension.NORM_MAX_HIDDEN, extension.NORM_TICKETS)
    assert {*cuda.FUNCTIONS} <= {*dir(extension)}


@pytest.mark.full
def test_named_by_the_environment(emulator_library: Path) -> None:
    """The CUDA backend takes CPU tensors where the environment names a build for the CPU."""
    program = """
import fastattn, torch
x = torch.ones(2, 64)
print(fastattn.dropout_add_layer_norm(x, x, x[0], x[0], backend="cuda").shape)
"""
    assert run_python("-c", program, FASTATTN_CUDA_EMULATOR=str(emulator_library)).strip() == "torch.Size([2, 64])"
