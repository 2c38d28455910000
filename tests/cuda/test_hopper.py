"""Hopper's TMA, wgmma and barriers compute what PTX defines: on the CPU runner, and on a Hopper GPU where there is one.
And on the runner classic errors are caught. The kernels: hopper.cu.

An error is caught when the result is wrong or the runner reports it, in one of the orders and completions that kernels'
tests run over.
"""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import kernel_library
import pytest
import torch
from emulator_build import ORDERS, SM90_COMPLETIONS
from kernel_library import Kernels

full = pytest.mark.full
SETTINGS = tuple(itertools.product(ORDERS, SM90_COMPLETIONS))
HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.fixture(scope="session")
def runner(build_folder: Path) -> Kernels:
    return kernel_library.build("hopper", build_folder)


@pytest.fixture(scope="session", params=("cpu", "device") if HAS_HOPPER else ("cpu",))
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    if request.param == "device":
        return Kernels(kernel_library.build_for_hopper(tmp_path_factory.mktemp("hopper")), "cuda")
    return request.getfixturevalue("runner")


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


def products(kernels: Kernels, name: str = "bf16 64 64", columns: int = 64, margin: int = 0, bug: int = 0) -> float:
    """The largest error of one of the kernels of this kind, NaN included."""
    heads, keys, guard = 2, 300, 24  # guard: columns after each row, which must not change
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[name[:4]]
    g = torch.Generator().manual_seed(0)
    shape = lambda rows: (heads, rows, columns + guard)  # noqa: E731
    q, k, v = (torch.randn(shape(rows), generator=g).to(kernels.device, dtype) for rows in (64, keys, keys))
    for t in (q, k, v):
        t[..., columns:] = torch.nan
    out = torch.full(shape(64), torch.nan, dtype=dtype, device=kernels.device)
    numbers = [keys, columns, margin, columns + guard]
    kernels.run(name, [q, k, v, out], numbers, bug)
    assert out[..., columns:].isnan().all(), "wrote after the end of a row"
    q, k, v, out = (t[..., :columns].double() for t in (q, k, v, out))
    expected = (q @ k.mT).to(dtype).double() @ v
    error = (out - expected).abs().max() / expected.abs().max() / (2 * torch.finfo(dtype).eps)
    return torch.inf if error.isnan() else error.item()


KERNELS = ["bf16 64 64", "bf16 64 128", "fp16 64 64", "bf16 96 64", "bf16 128 64"]
COLUMNS = {"bf16 64 64": 40, "bf16 96 64": 72}  # fewer than the tile has


@pytest.mark.parametrize("name", [KERNELS[0], *(pytest.param(name, marks=full) for name in KERNELS[1:])])
def test_products(name: str, kernels: Kernels, settings: Callable) -> None:
    """TMA with zeros outside, both kinds of wgmma, stmatrix and the TMA store, in every setting; boxes partly and
    wholly outside the keys and the columns."""
    D = int(name.split()[1])
    cases = [(D, 0), (D, 70), (COLUMNS.get(name, D), 0)]
    for i, setting in enumerate(settings()):
        columns, margin = cases[(i + i // len(SM90_COMPLETIONS)) % len(cases)]  # each with every order and completion
        assert products(kernels, name, columns, margin) < 1, (setting, columns, margin)


@full
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_compiles_for_the_device(tmp_path: Path) -> None:
    """So that on the first machine with a GPU it does not fail for that."""
    assert kernel_library.build_for_hopper(tmp_path).is_file()


# What shows each error of hopper.cu, in the order of its enum: "" is a wrong result or any message of the runner.
# Other waits and releases are planted in the kernels: tests/planted/cuda_faults.py.
BUGS = {
    "no full wait": "",
    "no product fence": r"no wgmma_fence\(\)",
    "no proxy fence": "",
    "no store barrier": "",
    "no store wait": "without a wait",
    "no init fence": r"no fence_barrier_init\(\)",
    "descriptor outside": "shared memory",
}
EVERYDAY = "no full wait", "no product fence", "no proxy fence"


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in EVERYDAY else full) for name in BUGS])
def test_catches(name: str, runner: Kernels, settings: Callable) -> None:
    bug, found = 1 + list(BUGS).index(name), []
    for _ in settings():
        try:
            found += [] if products(runner, bug=bug) < 1 else ["a wrong result"]
        except RuntimeError as error:
            found.append(str(error))
    assert found and all(re.search(BUGS[name], what) for what in found), found
