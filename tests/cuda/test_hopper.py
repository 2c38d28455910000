"""Hopper's TMA, wgmma and barriers compute what PTX defines: on the CPU runner, and on a Hopper GPU where there is one.
And on the runner each classic race is caught. The kernels: hopper.cu.

A race is caught when the result is wrong or the runner reports it, in one of the orders and completions that kernels'
tests run over.
"""

from __future__ import annotations

import itertools
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import kernel_library
import pytest
import torch
from emulator_build import ORDERS, SM90_COMPLETIONS
from kernel_library import Kernels
from torch import Tensor

from fastattn.backends.reference.philox import philox_lanes

full = pytest.mark.full
SETTINGS = tuple(itertools.product(ORDERS, SM90_COMPLETIONS))
HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
PLACES = ["as here", pytest.param("as elsewhere", marks=full), *(["device"] if HAS_HOPPER else [])]


class Place(NamedTuple):
    """Where kernels run."""

    kernels: Kernels
    device: str = "cpu"


@pytest.fixture(scope="session", params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    if request.param == "device":
        return Place(Kernels(kernel_library.compile_for_hopper(tmp_path_factory.mktemp("hopper"))), "cuda")
    return Place(kernel_library.build("hopper", request.getfixturevalue("build_folder"), request.param))


@pytest.fixture(scope="session", params=PLACES[:2])
def runner(request: pytest.FixtureRequest, build_folder: Path) -> Place:
    return Place(kernel_library.build("hopper", build_folder, request.param))


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Iterator[tuple[str, str]]]:
    """Goes through all orders and completions."""
    monkeypatch.setenv("FASTATTN_EMULATOR_CAPABILITY", "90")

    def each() -> Iterator[tuple[str, str]]:
        for order, completion in SETTINGS:
            monkeypatch.setenv("FASTATTN_EMULATOR_ORDER", order)
            monkeypatch.setenv("FASTATTN_EMULATOR_ASYNC", completion)
            yield order, completion

    return each


def products(
    place: Place, name: str = "bf16 64 64", columns: int = 64, margin: int = 0, keys: int = 300, bug: int = 0
) -> float:
    """The largest error of one of the kernels of this kind, NaN included."""
    heads, guard = 2, 24  # columns after each row, which must not change
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[name[:4]]
    g = torch.Generator().manual_seed(0)
    shape = lambda rows: (heads, rows, columns + guard)  # noqa: E731
    q, k, v = (torch.randn(shape(rows), generator=g).to(place.device, dtype) for rows in (64, keys, keys))
    for t in (q, k, v):
        t[..., columns:] = torch.nan
    out = torch.full(shape(64), torch.nan, dtype=dtype, device=place.device)
    place.kernels.run(name, [q, k, v, out], [keys, columns, margin, columns + guard], bug)
    assert out[..., columns:].isnan().all(), "wrote after the end of a row"
    q, k, v, out = (t[..., :columns].double() for t in (q, k, v, out))
    expected = (q @ k.mT).to(dtype).double() @ v
    error = (out - expected).abs().max() / expected.abs().max() / (2 * torch.finfo(dtype).eps)
    return torch.inf if error.isnan() else error.item()


BLOCKS = 8


def turns(place: Place, bug: int = 0) -> Tensor:
    """What the blocks saw."""
    sums, seen = (torch.full((n,), torch.nan, device=place.device) for n in (32, BLOCKS))
    counters = torch.zeros(2, dtype=torch.int32, device=place.device)
    place.kernels.run("turns", [sums, seen, counters], [BLOCKS], bug)
    if not (sums == BLOCKS * (BLOCKS + 1) / 2).all():
        raise RuntimeError("a wrong result")
    return seen


def slip(place: Place, bug: int = 0) -> bool:
    """Around a product of what threads have written."""
    out = torch.full((128,), torch.nan)
    place.kernels.run("slip", [out], bug=bug)
    return torch.equal(out, torch.zeros(128))


KERNELS = ["bf16 64 64", "bf16 64 128", "fp16 64 64", "bf16 96 64", "bf16 96 64 in two", "bf16 128 64"]
COLUMNS = {"bf16 64 64": 40, "bf16 96 64": 72, "bf16 96 64 in two": 72}  # fewer than the tile has


@pytest.mark.parametrize("name", [KERNELS[0], *(pytest.param(name, marks=full) for name in KERNELS[1:])])
def test_products(name: str, place: Place, settings: Callable) -> None:
    """TMA with zeros outside, both kinds of wgmma, stmatrix and the TMA store, in every setting; boxes partly and
    wholly outside the keys and the columns."""
    D = int(name.split()[1])
    cases = [(D, 0), (D, 70), (COLUMNS.get(name, D), 0)]
    for i, setting in enumerate(settings()):
        columns, margin = cases[(i + i // len(SM90_COMPLETIONS)) % len(cases)]  # each with every order and completion
        assert products(place, name, columns, margin) < 1, (setting, columns, margin)


def test_transposed_operands_and_adds(place: Place, settings: Callable) -> None:
    x, y = torch.randn(2, 64, 64).bfloat16().to(place.device)
    expected = x.float().T @ y.float()
    # Tensor cores cut addends off where the largest one's 24 bits end: each loses up to 2^-23 of what is summed up, and
    # so does each sum. For a number these are 64 products and, in 4 steps, the sum so far and the new one; then 1 is
    # added.
    most = (x.float().abs().T @ y.float().abs()).max().item()
    tolerance = {"rtol": 0.0, "atol": (64 + 2 * 4 + 1) * 2.0**-23 * most}
    for _ in settings():
        out, sums = torch.empty(64, 64, device=place.device), torch.ones(64, 64, device=place.device)
        place.kernels.run("transposed", [x, y, out, sums], [0])
        torch.testing.assert_close(out, expected, **tolerance)
        torch.testing.assert_close(sums, 1 + expected, **tolerance)


def test_kept_columns(place: Place) -> None:
    """The dropout rule for a quad, by instructions that add to both halves of a word: the sums must wrap."""
    rows, rng_state = 8192, torch.tensor([1, 7])
    lanes = philox_lanes(rng_state, rows, 32).int() & 0xFFFF
    assert {0, 1, 2, 29999, 30000, 65534, 65535} <= set(lanes.flatten().tolist())
    for threshold in (0, 1, 2, 30000, 65535, 65536):
        kept = torch.full((rows, 32), 7, dtype=torch.int16, device=place.device)
        place.kernels.run("kept columns", [rng_state.to(place.device), kept], [threshold, rows])
        assert torch.equal(kept.cpu(), -(lanes >= threshold).short()), threshold


def test_turns(place: Place, settings: Callable) -> None:
    """Blocks that add in turn. On the runner, what they add is in memory after bulk_wait, unless reads are early."""
    after = torch.arange(1.0, BLOCKS + 1).cumsum(0)
    before = torch.cat([torch.tensor([torch.nan]), after[:-1]])
    for _, completion in settings():
        seen = turns(place)
        if place.device == "cpu":
            torch.testing.assert_close(seen, after if completion == "eager" else before, equal_nan=True)


@full
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_compiles_for_the_device(tmp_path: Path) -> None:
    """So that on the first machine with a GPU it does not fail for that."""
    assert kernel_library.compile_for_hopper(tmp_path).is_file()


# What shows each error of hopper.cu, in the order of its enums: "" is a wrong result or any message of the runner.
BUGS = {
    "products": {
        "no full wait": "",
        "wrong parity": "",
        "no release": "deadlock",
        "released twice": "",
        "no empty wait": "",
        "release before wait": "",
        "no product wait": "",
        "operand overwritten": "",
        "no product fence": r"no wgmma_fence\(\)",
        "no proxy fence": "",
        "fence behind barrier": r"no barrier since fence_async_proxy\(\)",
        "no store barrier": "",
        "no read wait": "",
        "no store wait": "without a wait",
        "wrong bytes": "",
        "no init fence": r"no fence_barrier_init\(\)",
        "not initialised": "never initialised",
        "half a barrier": "deadlock",
        "two counts": "threads and for",
        "descriptor outside": "shared memory",
    },
    "slip": {
        "no barrier behind a proxy fence": r"no barrier since fence_async_proxy\(\)",
        "one thread's fence for all": "only 1 threads of a warpgroup passed",
        "a wait for products is no barrier": "a wrong result",
        "inside a pattern of the swizzle": "the first of eight swizzled lines",
        "uneven operand": "not start at a multiple of 16 bytes",
    },
    "turns": {
        "no wait for the turn": "a wrong result",
        "raised before the wait": r"raise_count \(.*hopper.cu:\d+\): no bulk_wait\(\)",
        "a turn that comes later": r"wait_for_count \(.*hopper.cu:\d+\): waits for a count of 7 at 0",
        "only a wait for reads": "without a wait",
    },
    "misuse": {
        "arrives twice": "a thread arrives twice at barrier 1",
        "diverged": "lanes of one warp meet at different barriers",
        "no such barrier": "barriers 1 to 15 have a name, got 16",
        "not whole warps": "a barrier is for whole warps, got 40",
    },
    "too many registers": {"": "threads wait at more_registers"},
    "more is fewer": {"": "a thread has 168, and asks for 160"},
}
# Of the errors in products, one for each mechanism.
EVERYDAY = "no full wait", "no release", "no product fence", "no proxy fence", "wrong bytes", "not initialised"
CASES = [
    pytest.param(kernel, name, marks=() if kernel != "products" or name in EVERYDAY else full)
    for kernel, bugs in BUGS.items()
    for name in bugs
]
IS_RIGHT: dict[str, Callable[[Place, int], bool]] = {
    "products": lambda place, bug: products(place, bug=bug) < 1,
    "slip": slip,
    "turns": lambda place, bug: turns(place, bug) is not None,
}


@pytest.mark.parametrize("kernel, name", CASES)
def test_catches(kernel: str, name: str, runner: Place, settings: Callable) -> None:
    bug, found = 1 + list(BUGS[kernel]).index(name), []
    is_right = IS_RIGHT.get(kernel, lambda place, bug: place.kernels.run(kernel, [], bug=bug))
    for _ in settings():
        try:
            found += [] if is_right(runner, bug) else ["a wrong result"]
        except RuntimeError as error:
            found.append(str(error))
    # Blocks overtake each other in every setting, unless they wait.
    assert len(found) == len(SETTINGS) if kernel == "turns" else found
    assert all(re.search(BUGS[kernel][name], what) for what in found), found


def test_sound_slip(runner: Place, settings: Callable) -> None:
    assert all(slip(runner) for _ in settings())


def test_refuses_a_tensor_that_tma_cannot_read(runner: Place) -> None:
    x = torch.zeros(260, 64, dtype=torch.bfloat16)  # backend for all four
    with pytest.raises(RuntimeError, match="starts at a multiple of 16 bytes"):
        runner.kernels.run("transposed", [x, x, x, x], [8])
    with pytest.raises(RuntimeError, match="at multiples of 16 bytes"):  # where a bulk copy begins
        runner.kernels.run("transposed", [x, x.view(-1)[4:], x, x], [0])


def test_refuses_tensor_maps_without_a_context(runner: Place) -> None:
    """As the driver does, on a thread that has not used CUDA. The next call makes a context and succeeds."""
    said = []

    def run() -> None:
        for bug in (-1, 0, -1):  # -1: without a context
            try:
                said.append(products(runner, bug=bug))
            except RuntimeError as error:
                said.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "current context" in said[0] and said[1] == said[2] < 1, said
