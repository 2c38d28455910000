"""Fixtures and the two tiers of all tests.

Without a GPU, Triton kernels run in Triton's interpreter, and CUDA kernels through csrc/emulator.
"""

from __future__ import annotations

import gc
import os
import threading

import torch

if not torch.cuda.is_available():  # before Triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import emulator_build
import hypothesis
import pytest
from emulator_build import ORDERS, SM90_COMPLETIONS
from hypothesis import HealthCheck, Phase
from hypothesis.stateful import run_state_machine_as_test
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

import fastattn.backends.cuda

GUARD = 64  # elements before and after each tensor: 16 divides their bytes, as it divides those of PyTorch's addresses


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="every combination, mutation tests, fuzzing, wheels")
    parser.addoption("--only-gpu", action="store_true", help="without the tests that run CUDA kernels in csrc/emulator")
    parser.addoption("--fuzz", metavar="N", type=int, default=200, help="examples of each fuzz test of the full tier")
    parser.addoption("--part", metavar="I/N", default="1/1", help="only the I-th of N equal parts of the tests")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # two xdist workers on two cores
    gc.disable()  # until all tests are collected


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --full or `-m gates`, the everyday tier; of that, one part."""
    chosen = items[:]
    if not config.getoption("--full") and config.getoption("-m") != "gates":
        chosen = [i for i in items if not (i.get_closest_marker("full") or i.get_closest_marker("gates"))]
    if config.getoption("--only-gpu"):
        chosen = [item for item in chosen if not _needs_emulator(item)]
    part, parts = map(int, config.getoption("--part").split("/"))
    chosen = chosen[len(chosen) * (part - 1) // parts : len(chosen) * part // parts]
    # Those that take long come before the many short ones of other files, so that no worker waits for one at the end.
    chosen.sort(key=lambda item: not item.nodeid.startswith(("tests/tools/", "tests/test_types.py")))
    config.hook.pytest_deselected(items=list({*items} - {*chosen}))
    items[:] = chosen


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is there by now stays: no later collection of garbage has to visit it. If csrc/ is built for the CPU, that
    begins now, next to the first tests, of which those that need it wait for it."""
    gc.collect()
    gc.freeze()
    gc.enable()
    needed = any(_needs_emulator(item) or _parameter(item, {"cuda"}) for item in session.items)
    if needed and not session.config.option.collectonly and not emulator_build.unsupported_reason():
        build = "_C", emulator_build.extension_sources(), emulator_build.BUILD_DIR
        threading.Thread(target=emulator_build.build, args=build, daemon=True).start()


def _needs_emulator(item: pytest.Item) -> bool:
    """Whether a test builds csrc/ for the CPU, by a fixture or as the place where it runs."""
    fixtures = {"build_folder", "emulator_library", "emulator"}
    return bool(fixtures.intersection(item.fixturenames)) or _parameter(item, {"cpu"})  # as tests/cuda names it


def _parameter(item: pytest.Item, values: set[str]) -> bool:
    """Whether a parameter of the test is one of these."""
    given = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return any(v in values for v in given if isinstance(v, str))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels are tested: the GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def build_folder() -> Path:
    """Where builds of csrc/ for the CPU are kept between sessions."""
    if reason := emulator_build.unsupported_reason():
        pytest.skip(reason)
    return emulator_build.BUILD_DIR


@pytest.fixture(scope="session")
def emulator_library(build_folder: Path) -> Path:
    """fastattn._C, built for the CPU."""
    return emulator_build.build("_C", emulator_build.extension_sources(), build_folder)


@pytest.fixture
def emulator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, emulator_library: Path) -> Iterator[None]:
    """CUDA kernels run on the CPU during a test.

    A race may show in one order of warps or one completion of asynchronous work only. Every test in every setting would
    take twelve times as long. So in each launch the blocks use the settings in turn. The first one follows from the
    test's id: it differs between tests, and a failure repeats. A setting from the environment is used as it is.
    """
    settings = {"FASTATTN_EMULATOR_ORDER": ORDERS, "FASTATTN_EMULATOR_ASYNC": SM90_COMPLETIONS}
    if not any(name in os.environ for name in settings):
        for name, values in settings.items():
            first = zlib.crc32(request.node.nodeid.encode()) % len(values)
            monkeypatch.setenv(name, ",".join(values[first:] + values[:first]))
        said = " ".join(f"{name}={os.environ[name]}" for name in settings)
        request.node.add_report_section("setup", "settings of csrc/emulator", said)
    fastattn.backends.cuda.load_emulator(emulator_library)
    yield
    fastattn.backends.cuda.load_emulator(None)


def change_new_tensors(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor], *methods: str) -> None:
    """What torch.empty, its variants and these methods return goes through `change`."""

    def changed(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrapped(*arguments: Any, **options: Any) -> Tensor:
            made = make(*arguments, **options)
            return made if torch.compiler.is_compiling() else change(made)

        return wrapped

    of_tensors = "new_empty", "new_empty_strided", *methods
    for place, names in ((torch, ("empty", "empty_like", "empty_strided")), (Tensor, of_tensors)):
        for name in names:
            monkeypatch.setattr(place, name, changed(getattr(place, name)))


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty and its variants return NaN (integers: the largest), which shows an output that no kernel wrote.

    torch's deterministic mode does the same, but users do not run in it.
    """

    @torch.no_grad()
    def poison(t: Tensor) -> Tensor:
        if type(t) is not Tensor or t.is_meta:
            return t
        if t.is_floating_point():
            return t.fill_(torch.nan)
        return t if t.dtype == torch.bool or t.is_complex() else t.fill_(torch.iinfo(t.dtype).max)

    change_new_tensors(monkeypatch, poison)


@pytest.fixture
def guard_zones(monkeypatch: pytest.MonkeyPatch, poisoned_memory: None) -> Iterator[None]:
    """Fails a test where a kernel has written before or after a tensor of torch.empty and its variants."""
    zones: list[tuple[Tensor, int]] = []

    @torch.no_grad()
    def guarded(t: Tensor) -> Tensor:
        """The tensor, with its numbers, inside a larger memory of sevens."""
        if type(t) is not Tensor or t.is_meta or t.numel() == 0:
            return t
        with _disable_current_modes():  # a test that notes what a call allocates must not see this
            size = t.untyped_storage().nbytes() // t.itemsize
            whole = t.new_full((size + 2 * GUARD,), 7)
            whole[GUARD:-GUARD] = t.as_strided((size,), (1,), 0)
            zones.append((whole, size))
            return t.set_(whole.untyped_storage(), GUARD, t.shape, t.stride())

    change_new_tensors(monkeypatch, guarded, "new_zeros")
    yield
    for whole, size in zones:
        outside = torch.cat([whole[:GUARD], whole[GUARD + size :]])
        assert (outside == 7).all(), "a kernel has written outside of a tensor"


@pytest.fixture(autouse=True)
def one_seed() -> None:
    torch.manual_seed(20170612)


@pytest.fixture
def fuzz(request: pytest.FixtureRequest) -> Callable[..., None]:
    """fuzz(check, strategy, share): check(example) for share * --fuzz examples. One that fails is made small. Without a
    strategy check is a RuleBasedStateMachine.

    In the everyday tier they are three, always the same. In the full tier they differ from run to run: a failure prints
    the seed that repeats it.
    """
    everyday = request.node.get_closest_marker("full") is None
    given_seed = request.config.getoption("--hypothesis-seed")

    def run(check: Callable[..., Any], strategy: Any = None, share: float = 1.0) -> None:
        settings = hypothesis.settings(
            max_examples=max(round(share * (3 if everyday else request.config.getoption("--fuzz"))), 1),
            derandomize=everyday,
            deadline=None,
            database=None,
            print_blob=True,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            stateful_step_count=20,
        )
        test = check if strategy is None else hypothesis.given(strategy)(lambda example: check(example))
        if not everyday and given_seed is None:
            seed = random.SystemRandom().getrandbits(32)
            print(f"--hypothesis-seed={seed}")
            test = hypothesis.seed(seed)(test)
        run_state_machine_as_test(test, settings=settings) if strategy is None else settings(test)()

    return run
