"""Known bugs, planted in copies of csrc/: the checks of the small ops must fail on each.

A copy compiles only the kernels that its cases use.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import add_layer_norm_cases
import checks
import linear_cross_entropy_cases
import mutations
import pytest
import torch
from emulator_build import ORDERS

import fastattn.backends.cuda
from fastattn.check import cases

pytestmark = pytest.mark.full
CPU, FP32, BF16, FP16 = torch.device("cpu"), torch.float32, torch.bfloat16, torch.float16


class Bug(NamedTuple):
    name: str
    file: str
    right: str
    wrong: str


class Plant(NamedTuple):
    """An op's bugs. changes: of the copy, always there. check: runs all cases, raises where one fails."""

    sources: list[str]
    changes: list[tuple[str, str, str]]
    bugs: list[Bug]
    check: Callable[[pytest.MonkeyPatch], None]


def norm_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """520: two warps a row, vectors. 500: one warp a row, element by element. 37 rows: every block takes several turns.
    1040: weight gradients by a second kernel."""
    case = add_layer_norm_cases.Case
    cases = [case(37, width, dropout_p=0.3, x_bias=FP32) for width in (520, 500)]
    for one in (*cases, case(7, 1040, x_bias=FP32), case(9, 500, rms=True), case(9, 500, eps_on_std=True)):
        torch.manual_seed(0)
        add_layer_norm_cases.run(one, CPU, monkeypatch)


def feed_forward_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """relu's h decides in the backward, gating pairs columns; 75 columns are computed element by element."""
    for activation, d_ff in (("swiglu", 264), ("relu", 264), ("gelu", 75)):
        sizes = {"tokens": (150,), "d": 40, "d_ff": d_ff, "d_out": 24, "dtype": BF16}
        checks.check(cases.feed_forward(activation, dropout_p=0.3, **sizes), "cuda")


def decode_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beams by their ancestors, keys that ten queries share, and both divided among blocks; tensor cores."""
    for case in (
        {"ancestors": True, "lengths": [37, 20]},
        {"queries": 5, "rows": 1, "heads": 4, "lengths": [37, 5], "value_dim": 40},
        {"batch": 1, "queries": 2, "positions": 1100, "heads": 1, "heads_k": 1, "ancestors": True, "lengths": [1001]},
        {"queries": 5, "rows": 1, "heads": 4, "positions": 150, "lengths": [150, 5], "value_dim": 72, "dtype": BF16},
    ):
        checks.check(cases.decode_attention(**case), "cuda")


def cross_entropy_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    case = linear_cross_entropy_cases.Case
    for one in (
        case(83, BF16, rows=6),
        case(83, BF16, rows=6, gap=0),
        case(2061, rows=2),
        case(4104, FP16, logit_scale=-40.0, dloss="one"),
        case(42001, rows=1),  # 40 chunks more than shared memory holds
    ):
        linear_cross_entropy_cases.run(one, CPU)
        linear_cross_entropy_cases.run(one, CPU, needs_gradient=False)


NORM_DISPATCH = (
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
HIDDEN, POINTWISE = "feed_forward/hidden.cuh", "feed_forward/pointwise.cu"
ROWS, DECODE = "linear_cross_entropy/rows.cu", "decode_attention/forward.cu"
PLANTS = {
    "add_layer_norm": Plant(
        ["add_layer_norm/forward.cu", "add_layer_norm/backward.cu"],
        [NORM_DISPATCH],
        [
            Bug("no barrier in a row's sum", "common/reduce.cuh", "  __syncthreads();\n", ""),
            Bug("dropout counts elements", "common/philox.cuh", "draw(words, row, col / 8)", "draw(words, row, col)"),
            Bug("no mean of g * normal", "common/norm_backward.cuh", "normal[j] * mean_g_normal", "0.0f"),
            Bug("a ticket too few", "common/norm_backward.cuh", "count - 1", "count - 2"),
            Bug("no barrier before a block's rows are added", "common/norm_backward.cuh",
                "    __syncthreads();\n    const int first =", "    if (!BUG) __syncthreads();\n    const int first ="),
            Bug("a row of the block left out", "common/norm_backward.cuh", "unsigned y = 1;", "unsigned y = 1 + BUG;"),
            Bug("no ratio of standard deviations", "common/norm_backward.cuh", "p.eps_on_std", "false"),
        ],
        norm_cases,
    ),
    "feed_forward": Plant(
        [POINTWISE],
        [],
        [
            Bug("gate not multiplied", HIDDEN, "gate[j] *= up[j]", "gate[j] *= BUG ? 1.0f : up[j]"),
            Bug("another chunk's mask", HIDDEN,
                "dropout.apply(gate, row, col)", "dropout.apply(gate, row, col ^ (BUG ? 8 : 0))"),
            Bug("this turn's row again", POINTWISE, "read(row + kRowThreads)", "read(BUG ? row : row + kRowThreads)"),
            Bug("no barrier before a block's rows are added", POINTWISE,
                "  __syncthreads();\n  const int column", "  if (!BUG) __syncthreads();\n  const int column"),
        ],
        feed_forward_cases,
    ),
    "decode_attention": Plant(
        [DECODE],
        [],
        [
            Bug("no barrier before the groups meet", DECODE,
                "  __syncthreads();\n  work.write(shared.f", "  if (!BUG) __syncthreads();\n  work.write(shared.f"),
            Bug("no barrier before the warps meet", DECODE,
                "  __syncthreads();\n  work.write(shared, kW", "  if (!BUG) __syncthreads();\n  work.write(shared, kW"),
            Bug("values of other positions", DECODE, "t / 2 * 8 + 2 * c + t % 2", "4 * c + t"),
            Bug("a total of one lane", DECODE, "  total = quad_sum(total);\n", ""),
            Bug("a warp's keys of this turn again", DECODE, "load_keys(next_turn, next_row);", "load_keys(turn, row);"),
            Bug("sums kept when the peak rises", DECODE,
                "sums[d][j][0] *= rescale, sums[d][j][1] *= rescale;", ""),
            Bug("lanes of a key left out", DECODE, "int step = lanes / 2", "int step = lanes / (BUG ? 4 : 2)"),
            Bug("read after the length", DECODE, "min(begin + span, length)", "begin + span"),
            Bug("ancestors of another query", DECODE, "first_query * p.ancestors_stride_w", "0"),
            Bug("a total kept when the peak rises", DECODE, "      total[i] *= rescale;\n", ""),
            Bug("keys of this turn again", DECODE,
                "read(k[a], keys, p.k, next_turn,", "read(k[a], keys, p.k, BUG ? turn : next_turn,"),
            Bug("row of this turn again", DECODE, "next_row[a] = row_of(next_turn, a)",
                "next_row[a] = row_of(BUG ? turn : next_turn, a)"),
            Bug("a group left out", DECODE, "int g = 0; g < groups; g++) {", "int g = BUG; g < groups; g++) {"),
            Bug("the splits' weights are equal", DECODE, "power<T>(p.lse[split * rows + row] - shift)", "1.0f"),
            Bug("queries of a tile share a head", DECODE, "(first + i) % group", "first % group"),
        ],
        decode_cases,
    ),
    "linear_cross_entropy": Plant(
        [ROWS],
        [],
        [
            Bug("no barrier before a row's sums", ROWS, "    __syncthreads();\n", "    if (!BUG) __syncthreads();\n"),
            Bug("a sum kept when the peak rises", ROWS,
                "    total *= power(before);\n", "    if (!BUG) total *= power(before);\n"),
            Bug("classes after the chunks left out", ROWS,
                "int col = chunks * kChunk + threadIdx.x;", "int col = (chunks + BUG) * kChunk + threadIdx.x;"),
            Bug("rows too near", ROWS, "row_index * p.stride", "row_index * (p.stride - 8 * BUG)"),
            Bug("a chunk neither held nor read again", ROWS, "each_chunk(held,", "each_chunk(held + BUG,"),
            Bug("held chunks of another thread", ROWS, "copy(chunk, kept[index])", "copy(chunk, kept[index ^ BUG])"),
            Bug("the target of another chunk", ROWS, "label / kChunk == index", "label / kChunk == index + BUG"),
        ],
        cross_entropy_cases,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def build(build_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    built: dict[str, Path] = {}

    def library(op: str) -> Path:
        if op not in built:
            copy, plant = tmp_path_factory.mktemp(op) / "csrc", PLANTS[op]
            mutations.plant(copy, plant.changes, [(bug.file, bug.right, bug.wrong) for bug in plant.bugs])
            built[op] = mutations.build(build_folder, copy, plant.sources)
        return built[op]

    return library


def fails(library: Path, op: str, bug: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Does a check fail, in one of the orders? bug: from 1 on, 0 is none."""
    fastattn.backends.cuda.load_emulator(library)
    mutations.choose(library, bug)
    try:
        for order in ORDERS:
            monkeypatch.setenv("FASTATTN_EMULATOR_ORDER", order)
            PLANTS[op].check(monkeypatch)
    except (AssertionError, RuntimeError):
        return True
    finally:
        fastattn.backends.cuda.load_emulator(None)
    return False


BUGS = [(op, number, bug) for op, plant in PLANTS.items() for number, bug in enumerate(plant.bugs, start=1)]


@pytest.mark.parametrize("op", PLANTS)
def test_without_a_bug(op: str, build: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy as such passes, so it is the bug that fails below."""
    assert not fails(build(op), op, 0, monkeypatch)


@pytest.mark.parametrize("op, number, bug", BUGS, ids=[f"{op}-{bug.name}" for op, _, bug in BUGS])
def test_is_caught(
    op: str, number: int, bug: Bug, build: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fails(build(op), op, number, monkeypatch)
