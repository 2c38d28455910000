"""Faults planted in the CUDA kernels: the check of the catalogue must fail.

All faults are compiled at once into a copy of csrc/, for the CPU; planted_bug, a variable of the library, chooses one.
What is compiled, for fault 7:
    expressions          (planted_bug == 7 ? (wrong) : (right))
    statements           if (planted_bug == 7) { wrong } else { right }, if there is a semicolon in `right`
    BUG is in `wrong`    wrong, where BUG is (planted_bug == 7)
"""

from __future__ import annotations

import ctypes
import re
import shutil
from pathlib import Path

import emulator_build
import pytest
from catalogue import check
from emulator_build import CSRC
from planted.cuda_faults import CHANGES, FAULTS, PROBLEMS, SOURCES

import fastattn.backends.cuda

pytestmark = pytest.mark.full
VARIABLE = """#pragma once
extern "C" {
__attribute__((weak, visibility("default"))) int planted_bug = 0;
}
"""


def replace_once(path: Path, right: str, wrong: str) -> None:
    text = path.read_text()
    assert text.count(right) == 1, f"{path.name} has {right!r} {text.count(right)} times"
    path.write_text(text.replace(right, wrong))


def write_mutants(copy: Path) -> None:
    """Makes a copy of csrc/ with CHANGES and FAULTS, numbered from 1 on."""
    shutil.copytree(CSRC, copy, ignore=shutil.ignore_patterns("*.cpp"))
    (copy / "planted.h").write_text(VARIABLE)
    for file, right, wrong in CHANGES:
        replace_once(copy / file, right, wrong)
    # What contains another fault's text comes first; until then @7@ marks the place of fault 7.
    for number, fault in sorted(enumerate(FAULTS, start=1), key=lambda numbered: -len(numbered[1].right)):
        replacement = f"@{number}@"
        if not re.search(r"\bBUG\b", fault.wrong):
            if ";" in fault.right:
                replacement = f"if (planted_bug == {number}) {{\n@{number}@\n}} else {{\n{fault.right}\n}}\n"
            else:
                replacement = f"(planted_bug == {number} ? (@{number}@) : ({fault.right}))"
        replace_once(copy / fault.file, fault.right, replacement)

    def wrong(place: re.Match[str]) -> str:
        return re.sub(r"\bBUG\b", f"(planted_bug == {place[1]})", FAULTS[int(place[1]) - 1].wrong)

    for path in {copy / fault.file for fault in FAULTS}:
        path.write_text('#include "planted.h"\n' + re.sub(r"@(\d+)@", wrong, path.read_text()))


@pytest.fixture(scope="module")
def library(build_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fastattn._C for the CPU, with SOURCES of the copy."""
    copy = tmp_path_factory.mktemp("mutants") / "csrc"
    write_mutants(copy)
    sources = {CSRC / name: copy / name for name in SOURCES}
    all_sources = [sources.get(path, path) for path in emulator_build.extension_sources()]
    return emulator_build.build("_C", all_sources, build_folder)


# Orders and completions: enough to find every fault, and all that the copy as such must pass.
SETTINGS = [("forward", "lazy"), ("reverse", "eager"), ("2", "crossed"), ("2", "lazy"), ("3", "lazy"), ("1", "lazy")]


def fails(
    library: Path, number: int, problem: str, capability: str, setting: tuple[str, str], patch: pytest.MonkeyPatch
) -> bool:
    """Whether a result of the problem is off. number: of the fault, 0 is none."""
    names = ("FASTATTN_EMULATOR_CAPABILITY", "FASTATTN_EMULATOR_ORDER", "FASTATTN_EMULATOR_ASYNC")
    for name, value in zip(names, (capability, *setting), strict=True):
        patch.setenv(name, value)
    fastattn.backends.cuda.load_emulator(library)
    ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "planted_bug").value = number
    try:
        for p in PROBLEMS[problem]():
            check(p, "cuda")
    except (AssertionError, RuntimeError):
        return True
    finally:
        fastattn.backends.cuda.load_emulator(None)
    return False


def capability(file: str) -> str:
    """Of the GPU that is emulated."""
    return "90" if "sm90" in file else "80"


@pytest.mark.parametrize("problem, capability", sorted({(fault.tests, capability(fault.file)) for fault in FAULTS}))
def test_without_a_fault(problem: str, capability: str, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy as such passes, so it is the fault that fails below."""
    assert not any(fails(library, 0, problem, capability, setting, monkeypatch) for setting in SETTINGS)


@pytest.mark.parametrize("number", [pytest.param(n, id=f"{f.tests}: {f.name}") for n, f in enumerate(FAULTS, start=1)])
def test_is_found(number: int, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, file, *_, problem = fault = FAULTS[number - 1]
    found = (fails(library, number, problem, capability(file), setting, monkeypatch) for setting in SETTINGS)
    # Blocks overtake each other in every order, unless they wait for their turns.
    assert all(found) if fault.name.startswith("turns ") else any(found)
