"""Known bugs, planted in a copy of the sources: the checks of layer_norm_checks.py must fail on each.

The copy compiles three of the layer norm's kernels each way, those of float32 that the cases below use.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import planting
import pytest
import torch
from host_build import ORDERS
from layer_norm_checks import Case, run

import fastattn.cuda

# 520: two warps a row, vectors. 500: one warp a row, element by element. 37 rows: every block takes several turns.
# 1040: weight gradients by a second kernel.
CASES = [*(Case(37, width, dropout_p=0.3, x_bias=torch.float32) for width in (520, 500))]
CASES += [Case(7, 1040, x_bias=torch.float32), Case(9, 500, rms=True)]

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
    Bug("no eps", "common/norm.cuh", "p.eps", "0.0f"),
    Bug("columns outside the row counted", "common/norm.cuh", "j < inside", "true"),
    Bug("statistics of another row", "common/norm_backward.cuh", "p.statistics[row]", "p.statistics[first]"),
    Bug("no mean of g * normal", "common/norm_backward.cuh", "normal[j] * mean_g_normal", "0.0f"),
    Bug("one scratch for all rows", "common/norm_backward.cuh", "shared.sums[turn]", "shared.sums[0]"),
    Bug("dz left out", "add_layer_norm/backward.cu", "grad[j] += dz[j]", "grad[j] += 0 * dz[j]"),
    Bug("a block's rows not added up", "common/norm_backward.cuh", "if (y > 0) dweight", "if (y > BUG) dweight"),
    Bug("no barrier between a block's rows", "common/norm_backward.cuh", "    __syncthreads();\n", ""),
    Bug("partial rows left out", "common/norm_backward.cuh", "block = threadIdx.y;", "block = threadIdx.y + BUG;"),
    Bug(
        "x_bias in every other chunk", "add_layer_norm/forward.cu", "if (p.x_bias)", "if (p.x_bias && (!BUG || c % 2))"
    ),
    Bug("one row of a block in dx_bias", "common/norm_backward.cuh", "dx_bias.mine + y * blockDim.x", "dx_bias.mine"),
    Bug("dweight in dbias", "common/norm_backward.cuh", "elements<W>(p.dweight)", "elements<W>(p.dbias)"),
    Bug("last block left out", "common/norm_backward.cuh", "start + r < count", "start + r + 1 < count"),
    Bug("a ticket too few", "common/norm_backward.cuh", "count - 1", "count - 2"),
    Bug("tickets kept", "common/norm_backward.cuh", "    if (last) *ticket = 0;\n", ""),
    Bug("tickets not made", "common/norm.cuh", "thread < kTickets", "false"),
    Bug("RMSNorm subtracts the mean", "common/norm.cuh", "p.bias ? sum[0] / p.hidden : 0.0f", "sum[0] / p.hidden"),
]


@pytest.fixture(scope="module")
def extension(build_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("planted") / "csrc"
    planting.plant(copy, [DISPATCH], [bug[1:] for bug in BUGS])
    return planting.build(build_folder, copy, ["add_layer_norm/forward.cu", "add_layer_norm/backward.cu"])


def fails(extension: Path, bug: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Does a check fail, in one of the orders?"""
    fastattn.cuda.load_host_runner(extension)
    planting.choose(extension, bug)
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


def test_without_a_bug(extension: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy as such passes, so it is the bug that fails below."""
    assert not fails(extension, 0, monkeypatch)


@pytest.mark.parametrize("bug", range(1, len(BUGS) + 1), ids=[bug.name for bug in BUGS])
def test_is_caught(bug: int, extension: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fails(extension, bug, monkeypatch)
