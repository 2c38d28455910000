"""Known bugs, planted in a copy of the feed-forward's sources: the comparison with float64 must fail on each."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import NamedTuple

import host_build
import planting
import pytest
import torch
from feed_forward_checks import check, make
from feed_forward_routes import cuda, hold_to
from host_build import COMPLETIONS, CSRC, ORDERS, SM90_COMPLETIONS

import fastattn.cuda
from fastattn.cuda.feed_forward import Route

SM80, SM90, CUBLAS = Route.SM80, Route.SM90, Route.CUBLAS


class Bug(NamedTuple):
    name: str
    route: Route  # on which it must be found
    file: str
    right: str
    wrong: str


PIECE, GEMM, GEMM_SM90 = "common/gemm_piece.cuh", "common/gemm.cuh", "common/gemm_sm90.cuh"
HIDDEN, PRODUCT, POINTWISE = (f"feed_forward/{name}" for name in ("hidden.cuh", "product.cuh", "pointwise.cu"))
BUGS = [
    Bug("no bias", SM80, HIDDEN, "z[j] += bias[j]", "z[j] += BUG ? 0.0f : bias[j]"),
    Bug("z stored before the bias", SM90, HIDDEN, "if (p.z != nullptr) {", "if (p.z != nullptr && !BUG) {"),
    Bug("the second half's bias is the first's", SM80, HIDDEN,
        "p.bias1, 0, col, up)",
        "p.bias1, 0, col, up && !BUG)"),
    Bug("gate not multiplied", CUBLAS, HIDDEN, "gate[j] *= up[j]", "gate[j] *= BUG ? 1.0f : up[j]"),
    Bug("no rescale of h", CUBLAS, HIDDEN,
        "value * factor * hidden.dropout.scale",
        "value * factor * (BUG ? 1.0f : hidden.dropout.scale)"),
    Bug("another row's mask", CUBLAS, HIDDEN, "dropout.kept(row, col", "dropout.kept(row ^ BUG, col"),
    Bug("another chunk's mask", SM80, HIDDEN,
        "dropout.apply(gate, row, col)",
        "dropout.apply(gate, row, col ^ (BUG ? 8 : 0))"),
    Bug("no slope", SM90, HIDDEN, "grad[j] *= slope * factor", "grad[j] *= (BUG ? 1.0f : slope) * factor"),
    Bug("relu by z, not h", SM80, HIDDEN, "gate[j] > 0.0f ?", "BUG || gate[j] > 0.0f ?"),
    Bug("a piece's chunk of the other run", SM80, PIECE, "(index < 4 ? column0", "(index < 4 || BUG ? column0"),
    Bug("swizzled on one side only", SM80, PIECE,
        "kPieceColumns + (index ^ line % 8)",
        "kPieceColumns + (index ^ (BUG ? threadIdx.x : line) % 8)"),
    Bug("swizzled on one side only", SM90, GEMM_SM90,
        "swizzled(warp * 16 + line, index)",
        "swizzled(warp * 16 + line, index ^ BUG)"),
    Bug("no bias", SM90, GEMM_SM90, "bias != nullptr && n <", "bias != nullptr && !BUG && n <"),
    Bug("tiles at the end of a group twice", SM90, PIECE,
        "min(m_tiles - group * kGroup, kGroup)",
        "BUG ? kGroup : min(m_tiles - group * kGroup, kGroup)"),
    Bug("the last of the depth missing", SM80, GEMM,
        "b_columns && k < g.depth",
        "b_columns && k + 8 * BUG < g.depth"),
    Bug("a copy not waited for", SM80, GEMM,
        "      cp_async_wait<kStages - 2>();\n",
        "      if (!BUG) cp_async_wait<kStages - 2>();\n"),
    Bug("a stage overwritten", SM80, GEMM, "step + kStages - 1) % kStages]", "step + kStages - 1 + BUG) % kStages]"),
    Bug("stages become pieces too early", SM80, GEMM,
        "    __syncthreads();  // the stages",
        "    if (!BUG) __syncthreads();  // the stages"),
    Bug("pairs side by side", SM80, GEMM, "n0 + g.second + n - kHalf", "n0 + (BUG ? kHalf : g.second) + n - kHalf"),
    Bug("pairs side by side", SM90, GEMM_SM90,
        "tile_.n + half * g_.second",
        "tile_.n + half * (BUG ? GemmTile::kHalf : g_.second)"),
    Bug("a stage not waited for", SM90, GEMM_SM90,
        "      shared.full[ring.stage].wait(ring.phase);\n",
        "      if (!BUG) shared.full[ring.stage].wait(ring.phase);\n"),
    Bug("a stage released too early", SM90, GEMM_SM90,
        "      wgmma_wait<1>();\n",
        "      if (!BUG) wgmma_wait<1>();\n"),
    Bug("a stage filled before the first warpgroup read it", SM90, GEMM_SM90,
        "    shared.empty[at.stage].wait(at.phase);\n",
        "    if (!BUG) shared.empty[at.stage].wait(at.phase);\n"),
    Bug("pieces overwritten", SM90, GEMM_SM90,
        "    shared.taken[group].wait(turn ^ 1);\n",
        "    if (!BUG) shared.taken[group].wait(turn ^ 1);\n"),
    Bug("pieces taken before they are handed over", SM90, GEMM_SM90,
        "if (piece == 0) shared", "if (piece == 0 && !BUG) shared"),
    Bug("the tile after the next fetched", SM90, GEMM_SM90,
        "k_ = 0, index_ += gridDim.x;", "k_ = 0, index_ += gridDim.x << BUG;"),
    Bug("a product not waited for", SM90, GEMM_SM90, "    wgmma_wait<0>();\n", "    if (!BUG) wgmma_wait<0>();\n"),
    Bug("a phase that never flips", SM90, GEMM_SM90, "stage = 0, phase ^= 1", "stage = 0, phase ^= BUG ? 0 : 1"),
    Bug("nobody starts the second", SM90, GEMM_SM90, "if (starts_other && k", "if (starts_other && !BUG && k"),
    Bug("sums of one warp", SM90, PRODUCT, "warp < 4; warp++) sum", "warp < (BUG ? 1 : 4); warp++) sum"),
    Bug("no barrier before the sums", SM80, PRODUCT,
        "    sync();\n    const int column",
        "    if (!BUG) sync();\n    const int column"),
    Bug("a piece overwritten under the sums", SM90, PRODUCT,
        "    sync();  // the sums",
        "    if (!BUG) sync();  // the piece"),
    Bug("held rows exchanged", SM90, PRODUCT, "if (i % kAhead == k)", "if ((i ^ BUG) % kAhead == k)"),
    Bug("a block's sums of one row", CUBLAS, POINTWISE,
        "y < kRowThreads; y++) dgate",
        "y < (BUG ? 1 : kRowThreads); y++) dgate"),
    Bug("no barrier before the block's sums", CUBLAS, POINTWISE,
        "  __syncthreads();\n  const int column",
        "  if (!BUG) __syncthreads();\n  const int column"),
    Bug("partial rows left out", CUBLAS, POINTWISE,
        "int64_t row = threadIdx.y; row < rows",
        "int64_t row = threadIdx.y + BUG; row < rows"),
]  # fmt: skip

# relu's h decides in the backward, gating pairs columns; the last has many short tiles for each of the runner's
# multiprocessors, so that who does not wait overtakes.
SIZES = {"tokens": 150, "d": 136, "d_ff": 136, "d_out": 136}
CASES = [
    {"activation": "swiglu"} | SIZES,
    {"activation": "relu"} | SIZES,
    {"activation": "swiglu", "tokens": 280, "d": 72, "d_ff": 264, "d_out": 8},
]


@pytest.fixture(scope="module")
def extension(build_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("planted") / "csrc"
    planting.plant(copy, [], [bug[2:] for bug in BUGS])
    module = Path(__file__).with_name("feed_forward_module.cpp")
    sources = [*sorted((copy / "feed_forward").glob("*.cu")), module]
    return host_build.build("_C", [*sources, CSRC / "common" / "sm90" / "tensor_map.cpp"], build_folder)


def fails(extension: Path, bug: int, route: Route, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Does a check fail, in one of the orders and completions?"""
    hold_to(route, torch.device("cpu"), monkeypatch)
    fastattn.cuda.load_host_runner(extension)
    planting.choose(extension, bug)
    try:
        for order, completion in itertools.product(ORDERS, SM90_COMPLETIONS if route == SM90 else COMPLETIONS):
            monkeypatch.setenv("FASTATTN_HOST_ORDER", order)
            monkeypatch.setenv("FASTATTN_HOST_ASYNC", completion)
            for case in CASES:
                check(make(dropout_p=0.3, dtype=torch.bfloat16, **case), cuda)
    except (AssertionError, RuntimeError):
        return True
    finally:
        fastattn.cuda.load_host_runner(None)
    return False


@pytest.mark.parametrize("route", Route, ids=lambda route: route.name)
def test_without_a_bug(route: Route, extension: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy as such passes, so it is the bug that fails below."""
    assert not fails(extension, 0, route, monkeypatch)


@pytest.mark.parametrize("bug", range(1, len(BUGS) + 1), ids=[f"{bug.route.name}-{bug.name}" for bug in BUGS])
def test_is_caught(bug: int, extension: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fails(extension, bug, BUGS[bug - 1].route, monkeypatch)
