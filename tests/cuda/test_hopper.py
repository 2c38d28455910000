"""Hopper's TMA, wgmma and barriers compute what PTX defines: on the CPU runner, and on a Hopper GPU where there is one.
And on the runner each classic race is caught.

A race is caught when the result is wrong or the runner reports it, in one of the orders and completions that kernels'
tests run over.
"""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import emulator_build
import pytest
import torch
from emulator_build import CSRC, ELSEWHERE, ORDERS, SM90_COMPLETIONS

from fastattn.backends.reference.philox import philox_lanes

SETTINGS = tuple(itertools.product(ORDERS, SM90_COMPLETIONS))
Setting = Callable[[tuple[str, str]], None]


SOURCE = Path(__file__).with_name("hopper.cu")
HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
RUNNERS = {"as here": (), "as elsewhere": ELSEWHERE}  # hopper.cu as this processor and as others compile it
PLACES = ["as here", pytest.param("as elsewhere", marks=pytest.mark.full), *(["device"] if HAS_HOPPER else [])]


def loaded(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for function in (
        library.run_products,
        library.run_transposed,
        library.run_slip,
        library.run_kept_columns,
        library.run_turns,
    ):
        function.restype = ctypes.c_char_p
    return library


@pytest.fixture(scope="session", params=PLACES[:2])
def library(request: pytest.FixtureRequest, build_folder: Path) -> ctypes.CDLL:
    return loaded(emulator_build.build("hopper", [SOURCE], build_folder, *RUNNERS[request.param]))


def compile_for_device(folder: Path) -> Path:
    target = folder / "hopper.so"
    options = "-std=c++17 -O2 -shared -Xcompiler=-fPIC -gencode=arch=compute_90a,code=sm_90a".split()
    sources = [SOURCE, CSRC / "common" / "sm90" / "tensor_map.cpp"]
    command = ["nvcc", *options, f"-I{CSRC}", *sources, "-o", target]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


class Place(NamedTuple):
    """Where sound kernels run."""

    library: ctypes.CDLL
    device: str


@pytest.fixture(scope="session", params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    if request.param == "device":
        return Place(loaded(compile_for_device(tmp_path_factory.mktemp("hopper"))), "cuda")
    folder = request.getfixturevalue("build_folder")
    return Place(loaded(emulator_build.build("hopper", [SOURCE], folder, *RUNNERS[request.param])), "cpu")


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Setting:
    """Sets an order and a completion."""

    def set_both(values: tuple[str, str]) -> None:
        for name, value in zip(("FASTATTN_EMULATOR_ORDER", "FASTATTN_EMULATOR_ASYNC"), values, strict=True):
            monkeypatch.setenv(name, value)

    monkeypatch.setenv("FASTATTN_EMULATOR_CAPABILITY", "90")
    return set_both


def products(
    library: ctypes.CDLL, name: str, dtype: torch.dtype, D: int, keys: int = 300, margin: int = 0, device: str = "cpu"
) -> float:
    """Runs a kernel of hopper.cu: its largest error, NaN included. RuntimeError with what the runner found."""
    heads, guard = 2, 24  # columns after each row, which must not change
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(heads, rows, D + guard, generator=g).to(device, dtype) for rows in (64, keys, keys))
    for t in (q, k, v):
        t[..., D:] = torch.nan
    out = torch.full((heads, 64, D + guard), torch.nan, dtype=dtype, device=device)
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in (q, k, v, out))
    if message := library.run_products(name.encode(), *pointers, heads, keys, D, margin, D + guard):
        raise RuntimeError(message.decode())
    assert out[..., D:].isnan().all(), "wrote after the end of a row"
    q, k, v, out = (t[..., :D].double() for t in (q, k, v, out))
    expected = (q @ k.mT).to(dtype).double() @ v
    error = (out - expected).abs().max() / expected.abs().max()
    return torch.inf if error.isnan() else error.item()


KERNELS = ["bf16 64 64", "bf16 64 128", "fp16 64 64", "bf16 96 64", "bf16 96 64 in two", "bf16 128 64"]
COLUMNS = {"bf16 64 64": 40, "bf16 96 64": 72, "bf16 96 64 in two": 72}  # fewer than the tile has


@pytest.mark.parametrize("name", KERNELS)
def test_products(name: str, place: Place, setting: Setting) -> None:
    """TMA with zeros outside, both kinds of wgmma, stmatrix and the TMA store, in every setting; boxes partly and
    wholly outside the keys and the columns."""
    kind, D, *_ = name.split()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[kind]
    cases = [(int(D), 0), (int(D), 70), (COLUMNS.get(name, int(D)), 0)]
    for i, values in enumerate(SETTINGS):
        setting(values)
        columns, margin = cases[(i + i // len(SM90_COMPLETIONS)) % len(cases)]  # each with every order and completion
        error = products(place.library, name, dtype, columns, margin=margin, device=place.device)
        assert error < 2 * torch.finfo(dtype).eps, (values, columns, margin)


@pytest.mark.parametrize("values", SETTINGS, ids="-".join)
def test_transposed_operands_and_adds(values: tuple[str, str], place: Place, setting: Setting) -> None:
    setting(values)
    x, y = torch.randn(2, 64, 64).bfloat16().to(place.device)
    out, sums = torch.empty(64, 64, device=place.device), torch.ones(64, 64, device=place.device)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, y, out, sums)]
    assert place.library.run_transposed(*pointers, 0) == b""
    expected = x.float().T @ y.float()
    # Tensor cores cut addends off where the largest one's 24 bits end: each loses up to 2^-23 of what is summed up, and
    # so does each sum. For a number these are 64 products and, in 4 steps, the sum so far and the new one; then 1 is
    # added.
    most = (x.float().abs().T @ y.float().abs()).max().item()
    tolerance = {"rtol": 0.0, "atol": (64 + 2 * 4 + 1) * 2.0**-23 * most}
    torch.testing.assert_close(out, expected, **tolerance)
    torch.testing.assert_close(sums, 1 + expected, **tolerance)


@pytest.mark.parametrize("threshold", [0, 1, 2, 30000, 65535, 65536])
def test_kept_columns(threshold: int, place: Place, setting: Setting) -> None:
    """The dropout rule for a quad, by instructions that add to both halves of a word: the sums must wrap."""
    setting(SETTINGS[0])
    rows, rng_state = 8192, torch.tensor([1, 7])
    kept = torch.full((rows, 32), 7, dtype=torch.int16, device=place.device)
    on_device = rng_state.to(place.device)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (on_device, kept)]
    assert place.library.run_kept_columns(pointers[0], threshold, pointers[1], rows) == b""
    lanes = philox_lanes(rng_state, rows, 32).int() & 0xFFFF
    assert {0, 1, 2, 29999, 30000, 65534, 65535} <= set(lanes.flatten().tolist())
    assert torch.equal(kept.cpu(), -(lanes >= threshold).short())


@pytest.mark.full
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_compiles_for_the_device(tmp_path: Path) -> None:
    """So that on the first machine with a GPU it does not fail for that."""
    assert compile_for_device(tmp_path).is_file()


def test_refuses_a_tensor_that_tma_cannot_read(library: ctypes.CDLL) -> None:
    x = torch.zeros(260, 64, dtype=torch.bfloat16)  # backend for all four
    pointers = [ctypes.c_void_p(x.data_ptr())] * 4
    assert b"starts at a multiple of 16 bytes" in library.run_transposed(*pointers, 8)
    pointers[1] = ctypes.c_void_p(x.data_ptr() + 8)  # where a bulk copy begins
    assert b"at multiples of 16 bytes" in library.run_transposed(*pointers, 0)


def test_refuses_tensor_maps_without_a_context(library: ctypes.CDLL) -> None:
    """As the driver does, on a thread that has not used CUDA. The next call makes a context and succeeds."""
    said = []

    def run() -> None:
        for name in ("no context", "bf16 64 64", "no context"):
            try:
                said.append(products(library, name, torch.bfloat16, 64))
            except RuntimeError as error:
                said.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "current context" in said[0] and said[1] == said[2] < 0.1, said


RACES = {  # what shows the error: a wrong result, or what the runner says
    "no full wait": "",
    "wrong parity": "",
    "no release": "deadlock",
    "released twice": "",
    "no empty wait": "",
    "release before wait": "",
    "no product wait": "",
    "operand overwritten": "",
    "no product fence": "no wgmma_fence()",
    "no proxy fence": "",
    "fence behind barrier": "no barrier since fence_async_proxy()",
    "no store barrier": "",
    "no read wait": "",
    "no store wait": "without a wait",
    "wrong bytes": "",
    "no init fence": "no fence_barrier_init()",
    "not initialised": "never initialised",
    "half a barrier": "deadlock",
    "two counts": "threads and for",
    "arrives twice": "a thread arrives twice at barrier 1",
    "diverged": "lanes of one warp meet at different barriers",
    "no such barrier": "barriers 1 to 15 have a name, got 16",
    "not whole warps": "a barrier is for whole warps, got 40",
    "too many registers": "threads wait at more_registers",
    "more is fewer": "a thread has 168, and asks for 160",
    "descriptor outside": "shared memory",
}


@pytest.mark.few(16)
@pytest.mark.parametrize("name", RACES)
def test_catches(name: str, library: ctypes.CDLL, setting: Setting) -> None:
    found = []
    for values in SETTINGS:
        setting(values)
        try:
            if products(library, name, torch.bfloat16, 64) > 2 * torch.finfo(torch.bfloat16).eps:
                found.append("a wrong result")
        except RuntimeError as error:
            found.append(str(error))
    assert found
    assert all(RACES[name] in what for what in found if RACES[name]), found


TURNS = {  # in the order of hopper.cu's TurnBug: what shows them
    "in turn": None,
    "no wait for the turn": "a wrong result",
    "raised before the wait": r"raise_count \(.*hopper.cu:\d+\): no bulk_wait\(\)",
    "a turn that comes later": r"wait_for_count \(.*hopper.cu:\d+\): waits for a count of 7 at 0",
    "only a wait for reads": "without a wait",
}
BLOCKS = 8


def sum_in_turns(library: ctypes.CDLL, name: str, device: str = "cpu") -> torch.Tensor:
    """What the blocks saw. RuntimeError with what the runner found, or for a wrong sum."""
    sums, seen = torch.full((32,), torch.nan, device=device), torch.full((BLOCKS,), torch.nan, device=device)
    counters = torch.zeros(2, dtype=torch.int32, device=device)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (sums, seen, counters)]
    if message := library.run_turns(list(TURNS).index(name), *pointers, BLOCKS):
        raise RuntimeError(message.decode())
    if not (sums == BLOCKS * (BLOCKS + 1) / 2).all():
        raise RuntimeError("a wrong result")
    return seen


@pytest.mark.bug_class("T7")
def test_turns(place: Place, setting: Setting) -> None:
    """Blocks that add in turn. On the runner, what they add is in memory after bulk_wait, unless reads are early."""
    after = torch.arange(1.0, BLOCKS + 1).cumsum(0)
    before = torch.cat([torch.tensor([torch.nan]), after[:-1]])
    for values in SETTINGS:
        setting(values)
        seen = sum_in_turns(place.library, "in turn", place.device)
        if place.device == "cpu":
            torch.testing.assert_close(seen, after if values[1] == "eager" else before, equal_nan=True)


@pytest.mark.parametrize("name", [name for name, shown in TURNS.items() if shown])
def test_catches_wrong_turns(name: str, library: ctypes.CDLL, setting: Setting) -> None:
    """In every setting: blocks overtake each other unless they wait."""
    for values in SETTINGS:
        setting(values)
        with pytest.raises(RuntimeError, match=TURNS[name]):
            sum_in_turns(library, name)


SLIPS = {  # in the order of hopper.cu's Slip: what shows them
    "none": None,
    "no barrier behind a proxy fence": "no barrier since fence_async_proxy()",
    "one thread's fence for all": "only 1 threads of a warpgroup passed",
    "a wait for products is no barrier": "a wrong result",
    "inside a pattern of the swizzle": "the first of eight swizzled lines",
    "uneven operand": "not start at a multiple of 16 bytes",
}


@pytest.mark.parametrize("name", SLIPS)
def test_catches_slips(name: str, library: ctypes.CDLL, setting: Setting) -> None:
    """Around a product of what threads have written."""
    found = []
    for values in SETTINGS:
        setting(values)
        out = torch.full((128,), torch.nan)
        message = library.run_slip(list(SLIPS).index(name), ctypes.c_void_p(out.data_ptr())).decode()
        if message or not torch.equal(out, torch.zeros(128)):
            found.append(message or "a wrong result")
    assert bool(found) == (SLIPS[name] is not None)
    assert all(SLIPS[name] in what for what in found), found
