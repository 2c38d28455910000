"""The CPU runner of CUDA sources (csrc/emulator): it computes what CUDA defines, and catches classic errors."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import emulator_build
import pytest
import torch
from emulator_build import ELSEWHERE, ORDERS
from torch import Tensor

from fastattn.backends import cuda
from fastattn.backends.cuda import add_layer_norm, attention

THREADS = 128
Runner = Callable[[str], Tensor]


AS_ELSEWHERE = pytest.param(ELSEWHERE, marks=pytest.mark.full)


@pytest.fixture(scope="session", params=[(), AS_ELSEWHERE], ids=["as here", "as elsewhere"])
def library(request: pytest.FixtureRequest, build_folder: Path) -> ctypes.CDLL:
    """errors.cu, as this processor and as others compile it."""
    source = Path(__file__).with_name("errors.cu")
    library = ctypes.CDLL(str(emulator_build.build("errors", [source], build_folder, *request.param)))
    library.run_kernel.restype = ctypes.c_char_p
    return library


@pytest.fixture
def run(library: ctypes.CDLL) -> Runner:
    """Runs a kernel of errors.cu by its name: its output, or RuntimeError with what the runner found."""

    def run(name: str) -> Tensor:
        out = torch.zeros(THREADS)
        if message := library.run_kernel(name.encode(), ctypes.c_void_p(out.data_ptr())):
            raise RuntimeError(message.decode())
        return out

    return run


THREAD = torch.arange(THREADS, dtype=torch.float32)
DEFINED = {
    "neighbour": THREAD.roll(-1),
    "neighbour again": THREAD.roll(-99),
    "shared memory on two devices": THREAD.roll(-1),
    "shuffle": THREAD // 32 * 32 + 5,
    "shuffle xor": (torch.arange(THREADS) ^ 3).float(),
    "ballot": (torch.arange(THREADS) % 3 == 0).float(),
    "half warps": THREAD.view(-1, 16).sum(1, keepdim=True).expand(-1, 16).flatten(),
    "count": torch.cat([torch.full((4,), THREADS / 4.0), torch.zeros(THREADS - 4)]),
    "last block": torch.cat([torch.tensor([8.0, 32.0]), torch.zeros(6), torch.ones(32), torch.zeros(THREADS - 40)]),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", DEFINED)
def test_computes_what_cuda_defines(name: str, order: str, run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTATTN_EMULATOR_ORDER", order)
    assert torch.equal(run(name), DEFINED[name])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("barrier in a branch", "deadlock: 64 threads have finished, 64 threads wait at __syncthreads"),
        ("barrier in both branches", "threads of one block meet at different barriers"),
        ("shuffle with absent lanes", "threads wait at __shfl_xor_sync"),
        ("shuffle from outside the mask", "reads lane 20, which is not in the mask"),
        ("shuffle without own lane", "lane 16 is not in its own mask"),
        ("different collectives", "lanes of one warp meet at different collectives"),
        ("past the end", "a write past the end of shared memory"),
        ("before the start", "a write before the start of shared memory"),
        ("too much shared memory", "167936 bytes of shared memory for a block, of the 166912 of compute capability 80"),
        ("too many threads", "a block has 1 to 1024 threads"),
        ("no blocks", "a grid has 1 to"),
    ],
)
def test_reports(name: str, said: str, run: Runner) -> None:
    """What would hang, or is undefined, on a GPU is an error that says what and where."""
    with pytest.raises(RuntimeError) as error:
        run(name)
    assert said in str(error.value)
    assert torch.equal(run("neighbour"), DEFINED["neighbour"]), "the runner is unusable after an error"


@pytest.mark.bug_class("T7")
@pytest.mark.parametrize(
    ("name", "sound"),
    [
        ("neighbour without barrier", DEFINED["neighbour"]),
        ("neighbour again without barrier", DEFINED["neighbour again"]),
        ("last block without barrier", DEFINED["last block"]),
        ("blocks in order", torch.cat([THREAD[:8], torch.zeros(THREADS - 8)])),
    ],
)
def test_orders_expose_races(name: str, sound: Tensor, run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """What depends on the order in which warps or blocks run is wrong in at least one of the orders that tests use."""
    wrong = []
    for order in ORDERS:
        monkeypatch.setenv("FASTATTN_EMULATOR_ORDER", order)
        if not torch.equal(run(name), sound):
            wrong.append(order)
    assert wrong


def test_blocks_take_turns(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not run("settings").any()
    monkeypatch.setenv("FASTATTN_EMULATOR_ORDER", "forward,reverse")
    monkeypatch.setenv("FASTATTN_EMULATOR_ASYNC", "lazy,eager,crossed")
    assert run("settings")[:6].tolist() == [0, 13, 10, 3, 10, 13]


def test_unknown_order(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTATTN_EMULATOR_ORDER", "sideways")
    with pytest.raises(RuntimeError, match="forward, reverse or a number, got sideways"):
        run("neighbour")


def test_unknown_completion(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTATTN_EMULATOR_ASYNC", "soon")
    with pytest.raises(RuntimeError, match="lazy, eager or crossed, got soon"):
        run("neighbour")


def test_python_has_the_extensions_limits(emulator_library: Path) -> None:
    """Some limits are needed where there is no extension: Python's are equal to those of the C++ headers."""
    extension = cuda._load(emulator_library)
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
