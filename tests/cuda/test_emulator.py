"""The CPU runner of CUDA sources (csrc/emulator) catches classic errors, which kernels of errors.cu have. Hopper's:
test_hopper.py. That it computes what CUDA defines is seen by the tests of all kernels, and that it finds errors in them
by tests/planted/test_planted_cuda.py."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


F32, TENSORS = torch.float32, [torch.zeros(1)] * 7
WRONG_CALLS = [  # of functions of the extension
    ("attention_tiles", (64, F32), TypeError, "attention_tiles() takes 3 arguments, got 2"),
    ("attention_tiles", (None, F32, False), TypeError, "attention_tiles(): argument 1: 'NoneType' object"),
    ("attention_tiles", (64.0, F32, False), TypeError, "attention_tiles(): argument 1: 'float' object"),
    ("attention_tiles", (1 << 31, F32, False), OverflowError, "argument 1: the int is too large"),
    ("attention_tiles", (1 << 63, F32, False), OverflowError, "argument 1: int too big"),
    ("attention_tiles", (64, torch.int8, False), TypeError, "argument 2: torch.float32, torch.bfloat16 or"),
    ("attention_tiles", (64, F32, None), TypeError, "argument 3: a bool is needed"),
    ("attention_fwd", ("q", *TENSORS), TypeError, "argument 1: a torch.Tensor or None is needed"),
    ("attention_fwd", TENSORS + [()], TypeError, "argument 4: a tuple is needed"),
    ("feed_forward_fwd", (*TENSORS[:2], 0, False, "0.1", None), TypeError, "argument 5: must be real number, not str"),
    ("feed_forward_fwd", (*TENSORS[:2], 0, False, 0, None), ValueError, "too few dimensions"),
    ("feed_forward_fwd", (None, None, 0, False, 0, None), AttributeError, "no attribute 'shape'"),
]


@pytest.mark.parametrize("name, arguments, error, said", WRONG_CALLS)
def test_wrong_calls(name: str, arguments: Sequence[Any], error: type, said: str, emulator: None) -> None:
    """Python's own errors, which name the function and the argument; and the references are given back."""
    function, counted = getattr(cuda.extension(on_gpu=False), name), (F32, error, TENSORS[0])
    before = [*map(sys.getrefcount, counted)]
    with pytest.raises(error) as raised:
        function(*arguments)
    assert type(raised.value) is error and said in str(raised.value)
    del raised
    assert [*map(sys.getrefcount, counted)] == before


@pytest.mark.full
def test_named_by_the_environment(emulator_library: Path) -> None:
    """The CUDA backend takes CPU tensors where the environment names a build for the CPU."""
    program = """
import fastattn, torch
x = torch.ones(2, 64)
print(fastattn.dropout_add_layer_norm(x, x, x[0], x[0], backend="cuda").shape)
"""
    assert run_python("-c", program, FASTATTN_CUDA_EMULATOR=str(emulator_library)).strip() == "torch.Size([2, 64])"
