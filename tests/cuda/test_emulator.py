"""The CPU runner of CUDA sources (csrc/emulator): it computes what CUDA defines, and catches classic errors. The
kernels: errors.cu. Hopper's: test_hopper.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import kernel_library
import pytest
import torch
from emulator_build import COMPLETIONS, ORDERS
from helpers import round_tf32
from kernel_library import Kernels
from torch import Tensor

from fastattn.backends import cuda
from fastattn.backends.cuda import add_layer_norm, attention

THREADS = 128
PLACES = ["as here", pytest.param("as elsewhere", marks=pytest.mark.full)]


@pytest.fixture(scope="session", params=PLACES)
def kernels(request: pytest.FixtureRequest, build_folder: Path) -> Kernels:
    return kernel_library.build("errors", build_folder, request.param)


def run(kernels: Kernels, name: str, bug: int = 0) -> Tensor:
    out = torch.zeros(THREADS)
    kernels.run(name, [out], bug=bug)
    return out


THREAD = torch.arange(THREADS, dtype=torch.float32)
COLLECTIVES = [  # in the order of errors.cu
    THREAD // 32 * 32 + 5,
    (torch.arange(THREADS) ^ 3).float(),
    (torch.arange(THREADS) % 3 == 0).float(),
    THREAD.view(-1, 16).sum(1, keepdim=True).expand(-1, 16).flatten(),
    torch.cat([torch.full((4,), THREADS / 4.0), torch.zeros(THREADS - 4)]),
]
DEFINED = {
    "neighbour": THREAD.roll(-1),
    "neighbour again": THREAD.roll(-99),
    "last block": torch.cat([torch.tensor([8.0, 32.0]), torch.zeros(6), torch.ones(32), torch.zeros(THREADS - 40)]),
}


@pytest.mark.parametrize("order", ORDERS)
def test_computes_what_cuda_defines(order: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTATTN_EMULATOR_ORDER", order)
    for which, value in enumerate(COLLECTIVES, start=1):
        assert torch.equal(run(kernels, "collective", which), value), which
    for name, value in DEFINED.items():
        assert torch.equal(run(kernels, name), value), name
    for shared in (64 << 10, 80 << 10, 64 << 10):  # what a block may have is asked for on each device
        kernels.run("launch", [torch.zeros(THREADS)], [1, THREADS, shared])


MISUSES = [  # in the order of errors.cu
    "deadlock: 64 threads have finished, 64 threads wait at __syncthreads",
    "threads of one block meet at different barriers",
    "threads wait at __shfl_xor_sync",
    "reads lane 20, which is not in the mask",
    "lane 16 is not in its own mask",
    "lanes of one warp meet at different collectives",
    "a write past the end of shared memory",
    "a write before the start of shared memory",
]


@pytest.mark.parametrize("bug, said", [*enumerate(MISUSES, start=1)])
def test_reports(bug: int, said: str, kernels: Kernels) -> None:
    """What would hang, or is undefined, on a GPU is an error that names what and where."""
    with pytest.raises(RuntimeError, match=re.escape(said)):
        run(kernels, "misuse", bug)
    assert torch.equal(run(kernels, "neighbour"), DEFINED["neighbour"]), "the runner is unusable after an error"


@pytest.mark.parametrize(
    "blocks, threads, shared, said",
    [
        (1, THREADS, 164 << 10, "167936 bytes of shared memory for a block, of the 166912 of compute capability 80"),
        (1, 1056, 0, "a block has 1 to 1024 threads"),
        (0, THREADS, 0, "a grid has 1 to"),
    ],
)
def test_refuses_launches(blocks: int, threads: int, shared: int, said: str, kernels: Kernels) -> None:
    with pytest.raises(RuntimeError, match=said):
        kernels.run("launch", [torch.zeros(THREADS)], [blocks, threads, shared])


RACES = {**DEFINED, "blocks in order": torch.cat([THREAD[:8], torch.zeros(THREADS - 8)])}  # what is right


@pytest.mark.parametrize("name", RACES)
def test_orders_expose_races(name: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """What depends on the order in which warps or blocks run is wrong in at least one of the orders that tests use."""
    results = []
    for order in ORDERS:
        monkeypatch.setenv("FASTATTN_EMULATOR_ORDER", order)
        results.append(run(kernels, name, bug=1))
    assert not all(torch.equal(out, RACES[name]) for out in results)


def test_settings(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks take turns with several of them. An unknown one is an error."""
    assert not run(kernels, "settings").any()
    monkeypatch.setenv("FASTATTN_EMULATOR_ORDER", "forward,reverse")
    monkeypatch.setenv("FASTATTN_EMULATOR_ASYNC", "lazy,eager,crossed")
    assert run(kernels, "settings")[:6].tolist() == [0, 13, 10, 3, 10, 13]
    for name, value, said in (
        ("FASTATTN_EMULATOR_ORDER", "sideways", "forward, reverse or a number, got sideways"),
        ("FASTATTN_EMULATOR_ASYNC", "soon", "lazy, eager or crossed, got soon"),
    ):
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match=said):
            patch.setenv(name, value)
            run(kernels, "neighbour")


# --- mma, ldmatrix and cp.async of csrc/common ------------------------------------------------------------------------

ROUND = {
    "bfloat16": lambda x: x.bfloat16().float(),
    "float16": lambda x: x.half().float(),
    "tf32": round_tf32,
    "float32": lambda x: x,
    "float32 by shuffles": lambda x: x,
}


@pytest.mark.parametrize("name", ROUND)
def test_products(name: str, kernels: Kernels) -> None:
    """a b^T from two tiles, and its product with a third, which reads the first result from the accumulators."""
    a, b, c = torch.randn(16, 32), torch.randn(48, 32), torch.randn(48, 32)
    scores, out = torch.full((16, 48), torch.nan), torch.full((16, 32), torch.nan)
    kernels.run(name, [a, b, c, scores, out])
    round = ROUND[name]
    torch.testing.assert_close(scores, round(a) @ round(b).mT, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, round(scores) @ round(c), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("mode", COMPLETIONS)
def test_copies(mode: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the wait the values are there. Those outside are zero and are not read. A missing wait shows."""
    monkeypatch.setenv("FASTATTN_EMULATOR_ASYNC", mode)
    values, out, early = torch.randn(256), torch.zeros(256), torch.zeros(256)
    values[:32] = torch.nan
    kernels.run("copy", [values, out])
    assert torch.equal(out, torch.cat([torch.zeros(32), values[32:]]))
    kernels.run("copy", [values, early], bug=1)
    assert torch.equal(out, early) == (mode == "eager")


# --- the extension, built for the CPU ---------------------------------------------------------------------------------


def test_python_has_the_extensions_limits(emulator: None) -> None:
    """Some limits are needed where there is no extension: Python's are equal to those of the C++ headers."""
    extension = cuda.extension(on_gpu=False)
    assert attention.MAX_HEAD_DIM == extension.ATTENTION_MAX_HEAD_DIM
    assert (add_layer_norm.MAX_HIDDEN, add_layer_norm.TICKETS) == (extension.NORM_MAX_HIDDEN, extension.NORM_TICKETS)


@pytest.mark.full
def test_named_by_the_environment(emulator_library: Path) -> None:
    """The CUDA backend takes CPU tensors where the environment names a build for the CPU, and nowhere else."""
    x, weight = torch.empty(2, 64), torch.empty(64)
    assert "got a CPU tensor" in add_layer_norm.unsupported_reason(x, None, weight, weight, 0.0)
    program = """
import fastattn, torch
x, weight = torch.randn(2, 64), torch.ones(64)
print(fastattn.dropout_add_layer_norm(x, x, weight, weight, backend="cuda").shape)
"""
    environment = os.environ | {"FASTATTN_CUDA_EMULATOR": str(emulator_library)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "torch.Size([2, 64])", done.stderr
