"""Known bugs, planted one at a time in a copy of the sources: the checks of layer_norm_checks.py must fail on each.

The copy compiles three of the layer norm's kernels each way, those of float32 that the cases below use.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import host_build
import pytest
import torch
from host_build import ORDERS
from layer_norm_checks import Case, run

import fastattn.cuda

# 520: two warps a row, vectors. 500: one warp a row, element by element. 37 rows: every block takes several turns.
# 1040: weight gradients by a second kernel.
CASES = [*(Case(37, width, dropout_p=0.3, x_bias=torch.float32) for width in (520, 500))]
CASES += [Case(7, 1040, x_bias=torch.float32), Case(9, 500, rms=True)]

ROOM = "add_layer_norm"
DISPATCH = (
    "add_layer_norm/rows.cuh",
    "template <class Function>\nvoid dispatch(",
    """template <class Function>
void dispatch(DType, DType, int chunks, bool is_aligned, Function&& f) {
  if (chunks == 4) return f(float{}, float{}, Int<4>{}, Int<1>{});
  is_aligned ? f(float{}, float{}, Int<2>{}, Int<1>{}) : f(float{}, float{}, Int<2>{}, Int<0>{});
}

template <class Function>
void dispatch_to_all(""",
)


class Bug(NamedTuple):
    name: str
    file: str
    right: str
    wrong: str


BUGS = [
    Bug("no barrier in a row's sum", "common/reduce.cuh", "  __syncthreads();\n", ""),
    Bug("a column too many", "common/vec.cuh", "max(hidden - col, 0)", "max(hidden - col + 1, 0)"),
    Bug("a Philox round less", "common/philox.cuh", "round < 7", "round < 6"),
    Bug("dropout counts elements", "common/philox.cuh", "draw(words, row, col / 8)", "draw(words, row, col)"),
    Bug("no eps", "common/norm.cuh", " + p.eps", ""),
    Bug("columns outside the row counted", "common/norm.cuh", "if (j < inside) square", "square"),
    Bug("statistics of another row", "common/norm_backward.cuh", "p.statistics[row]", "p.statistics[first]"),
    Bug("no mean of g * normal", "common/norm_backward.cuh", " - normal[j] * mean_g_normal", ""),
    Bug("one scratch for all rows", "common/norm_backward.cuh", "shared.sums[turn]", "shared.sums[0]"),
    Bug("dz left out", "add_layer_norm/backward.cu", "grad[j] += dz[j]", "grad[j] += 0 * dz[j]"),
    Bug("a block's rows not added up", "common/norm_backward.cuh", "if (y > 0) dweight", "if (y > 1) dweight"),
    Bug("no barrier between a block's rows", "common/norm_backward.cuh", "    __syncthreads();\n", ""),
    Bug("partial rows left out", "common/norm_backward.cuh", "block = threadIdx.y;", "block = threadIdx.y + 1;"),
    Bug("x_bias in every other chunk", "add_layer_norm/forward.cu", "if (p.x_bias)", "if (p.x_bias && c % 2)"),
    Bug("one row of a block in dx_bias", "common/norm_backward.cuh", "dx_bias.mine + y * blockDim.x", "dx_bias.mine"),
    Bug("dweight in dbias", "common/norm_backward.cuh", "(p.dweight) + col", "(p.dbias) + col"),
    Bug("last block left out", "common/norm_backward.cuh", "start + r < count ?", "start + r + 1 < count ?"),
    Bug("a ticket too few", "common/norm_backward.cuh", "== count - 1", "== count - 2"),
    Bug("tickets kept", "common/norm_backward.cuh", "    if (last) *ticket = 0;\n", ""),
    Bug("tickets not made", "common/norm.cuh", "thread < kTickets)", "thread < 0)"),
    Bug(
        "RMSNorm subtracts the mean",
        "common/norm.cuh",
        "p.bias ? sum[0] / p.hidden : 0.0f",
        "sum[0] / p.hidden",
    ),
]


def fails(extension: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Does a check fail on this build, in one of the orders?"""
    fastattn.cuda.load_host_runner(extension)
    try:
        for order in ORDERS:
            monkeypatch.setenv("FASTATTN_HOST_ORDER", order)
            for case in CASES:
                torch.manual_seed(0)
                run(case, torch.device("cpu"), monkeypatch)
    except (AssertionError, RuntimeError):
        return True
    finally:
        fastattn.cuda.load_host_runner(None)
    return False


def build(folder: Path, copy: Path, changes: list[tuple[str, str, str]], room: str = ROOM) -> Path:
    """The CPU runner with these changes (file, right, wrong) of a room or of what it includes."""
    shutil.copytree(host_build.CSRC, copy, ignore=shutil.ignore_patterns("host", "*.cpp"))
    for file, right, wrong in changes:
        text = (copy / file).read_text()
        assert text.count(right) == 1, f"{file} has {right!r} {text.count(right)} times"
        (copy / file).write_text(text.replace(right, wrong))
    # The other rooms are compiled as they are: once.
    copied = {host_build.CSRC / path.relative_to(copy): path for path in (copy / room).glob("*.cu")}
    return host_build.build("_C", [copied.get(path, path) for path in host_build.extension_sources()], folder)


def test_without_a_bug(build_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy as such passes, so it is the bug that fails below."""
    assert not fails(build(build_folder, tmp_path / "csrc", [DISPATCH]), monkeypatch)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_is_caught(bug: Bug, build_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extension = build(build_folder, tmp_path / "csrc", [DISPATCH, (bug.file, bug.right, bug.wrong)])
    assert fails(extension, monkeypatch)
