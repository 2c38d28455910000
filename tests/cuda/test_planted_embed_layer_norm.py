"""Known bugs, planted in a copy of the embedding's kernels: embed_layer_norm_cases.py must fail on each.

Those of the code that it shares with the layer norm: test_planted_add_layer_norm.py. The copy compiles kernels of one
chunk only.
"""

from __future__ import annotations

from pathlib import Path

import planting
import pytest
import torch
from embed_layer_norm_cases import BFLOAT16, FLOAT16, FLOAT32, Case, run
from test_planted_add_layer_norm import Bug

import fastattn.cuda

CASES = [
    Case(37, 72, dropout_p=0.3, indices=torch.int64),
    Case(9, 35, (BFLOAT16, FLOAT32, BFLOAT16, FLOAT16), dropout_p=0.3),
    Case(9, 72, (FLOAT16, FLOAT16, FLOAT32, BFLOAT16), indices=torch.int32),
]
ROOM = "embed_layer_norm"
DISPATCH = (
    "common/norm.cuh",
    "template <class Function>\nvoid shape_switch(",
    """template <class Function>
void shape_switch(int, bool is_aligned, Function&& f) {
  is_aligned ? f(Int<1>{}, Int<1>{}) : f(Int<1>{}, Int<0>{});
}

template <class Function>
void shape_switch_to_all(""",
)
ROWS, ANY = f"{ROOM}/rows.cuh", "common/any.cuh"
BUGS = [
    Bug("no scale in the backward", ROWS, "grad[j] *= source_.scale", "grad[j] *= 1"),
    Bug("dropout of another row", ROWS, "apply(values, row_, col)", "apply(values, row_ + BUG, col)"),
    Bug("positions never begin again", ROWS, "row % source_.length", "row"),
    Bug("the token's row of the table", ROWS, "(known_ ? place : 0)", "(known_ ? token_ % 6 : 0)"),
    Bug("no integers are wide", ROWS, "indices.wide", "false"),
    Bug("index of another row", f"{ROOM}/backward.cu", "p.index[row]", "p.index[row / 2]"),
    Bug("16 bits are bfloat16", ANY, "dtype == DType::bfloat16 ? as_bfloat16[j] : as_half[j]", "as_bfloat16[j]"),
]


@pytest.fixture(scope="module")
def extension(build_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("planted") / "csrc"
    planting.plant(copy, [DISPATCH], [bug[1:] for bug in BUGS])
    return planting.build(build_folder, copy, [f"{ROOM}/forward.cu", f"{ROOM}/backward.cu"])


def fails(extension: Path, bug: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    fastattn.cuda.load_host_runner(extension)
    planting.choose(extension, bug)
    try:
        for case in CASES:
            torch.manual_seed(0)
            run(case, torch.device("cpu"), monkeypatch)
    except (AssertionError, RuntimeError):
        return True
    finally:
        fastattn.cuda.load_host_runner(None)
    return False


def test_without_a_bug(extension: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy as such passes, so it is the bug that fails below."""
    assert not fails(extension, 0, monkeypatch)


@pytest.mark.parametrize("bug", range(1, len(BUGS) + 1), ids=[bug.name for bug in BUGS])
def test_is_caught(bug: int, extension: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fails(extension, bug, monkeypatch)
