"""Known bugs in a copy of csrc/, all compiled at once: planted_bug, a variable of the library, selects one.

A bug replaces one text of a file, `right`, by `wrong`. What is compiled, for bug 7:
    expressions          (planted_bug == 7 ? (wrong) : (right))
    statements           if (planted_bug == 7) { wrong } else { right }, if there is a semicolon in `right`
    BUG is in `wrong`    wrong, where BUG is (planted_bug == 7): for texts that are neither
The text of one bug may be a part of another one's.
"""

from __future__ import annotations

import ctypes
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import emulator_build
from emulator_build import CSRC

VARIABLE = """#pragma once
extern "C" {
__attribute__((weak, visibility("default"))) int planted_bug = 0;
}
"""


def plant(copy: Path, changes: Iterable[tuple[str, str, str]], bugs: Iterable[tuple[str, str, str]]) -> None:
    """Makes a copy of csrc/ with changes (file, right, wrong) that are always there, and bugs, numbered from 1 on."""
    shutil.copytree(CSRC, copy, ignore=shutil.ignore_patterns("*.cpp"))
    (copy / "planted.h").write_text(VARIABLE)
    for file, right, wrong in changes:
        _replace(copy / file, right, wrong)
    numbered = dict(enumerate(bugs, start=1))
    # What contains another bug's text comes first; until then @7@ marks the place of bug 7.
    for number, (file, right, wrong) in sorted(numbered.items(), key=lambda bug: -len(bug[1][1])):
        _replace(copy / file, right, f"@{number}@" if _by_hand(wrong) else _choice(number, right))
    for file in {file for file, _, _ in numbered.values()}:
        text = re.sub(r"@(\d+)@", lambda found: _written(int(found[1]), numbered), (copy / file).read_text())
        (copy / file).write_text(f'#include "planted.h"\n{text}')


def choose(library: Path, bug: int) -> None:
    """From now on this bug is there, in kernels of a library that plant()'s copy was built into; 0: none."""
    ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "planted_bug").value = bug


def build(folder: Path, copy: Path, names: Iterable[str]) -> Path:
    """fastattn._C for the CPU, with these sources of the copy; the others as they are, compiled for all tests once."""
    copied = {CSRC / name: copy / name for name in names}
    return emulator_build.build("_C", [copied.get(path, path) for path in emulator_build.extension_sources()], folder)


def _replace(path: Path, right: str, wrong: str) -> None:
    text = path.read_text()
    assert text.count(right) == 1, f"{path.name} has {right!r} {text.count(right)} times"
    path.write_text(text.replace(right, wrong))


def _by_hand(wrong: str) -> bool:
    return re.search(r"\bBUG\b", wrong) is not None


def _choice(number: int, right: str) -> str:
    if ";" in right:
        return f"if (planted_bug == {number}) {{\n@{number}@\n}} else {{\n{right}\n}}\n"
    return f"(planted_bug == {number} ? (@{number}@) : ({right}))"


def _written(number: int, bugs: dict[int, tuple[str, str, str]]) -> str:
    return re.sub(r"\bBUG\b", f"(planted_bug == {number})", bugs[number][2])
