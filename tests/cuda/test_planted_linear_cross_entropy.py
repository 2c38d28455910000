"""Known bugs, planted in a copy of the cross-entropy's source: the comparison with float64 must fail on each."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import host_build
import planting
import pytest
import torch
from cross_entropy_checks import Case, run
from host_build import ORDERS

import fastattn.cuda

ROWS = "linear_cross_entropy/rows.cu"


class Bug(NamedTuple):
    name: str
    right: str
    wrong: str


BUGS = [
    Bug("no barrier before a row's sums", "    __syncthreads();\n", "    if (!BUG) __syncthreads();\n"),
    Bug("sums of a warp less", "i < warps; i++) {", "i < warps - BUG; i++) {"),
    Bug("a warp's sums by its own peak", "shared.total[i] * power(shared.peak[i])",
        "shared.total[i] * (BUG ? 1.0f : power(shared.peak[i]))"),
    Bug("a lane's sum by its own peak", "warp_sum(total * power(own))", "warp_sum(total * (BUG ? 1.0f : power(own)))"),
    Bug("a sum kept when the peak rises", "    total *= power(before);\n", "    if (!BUG) total *= power(before);\n"),
    Bug("the wrong end for a negative scale", "    if (k < 0.0f) {\n", "    if (k < 0.0f && !BUG) {\n"),
    Bug("natural powers", "p.logit_scale * kLog2e", "p.logit_scale * (BUG ? 1.0f : kLog2e)"),
    Bug("no bias in a chunk", "v[j] += more[j]", "v[j] += BUG ? 0.0f : more[j]"),
    Bug("no bias behind the chunks", "(bias != nullptr ? float", "(bias != nullptr && !BUG ? float"),
    Bug("classes behind the chunks left out", "int col = chunks * kChunk + threadIdx.x;",
        "int col = (chunks + BUG) * kChunk + threadIdx.x;"),
    Bug("a chunk too few", "int first = threadIdx.x; first < chunks;",
        "int first = threadIdx.x; first < chunks - BUG;"),
    Bug("every load the first", "        if (index < chunks) chunk[i] = read(index);\n",
        "        if (index < chunks) chunk[i] = read(BUG ? first : index);\n"),
    Bug("what is kept past the end of shared memory", "threadIdx.y * chunks", "(threadIdx.y + BUG) * chunks"),
    Bug("every row the block's first", "blockDim.y + threadIdx.y", "blockDim.y + (BUG ? 0 : threadIdx.y)"),
    Bug("rows too near", "index_of_row * p.stride", "index_of_row * (p.stride - 8 * BUG)"),
    Bug("ignored targets looked up", "if (label == p.ignore_index)", "if (label == p.ignore_index && !BUG)"),
    Bug("an ignored row keeps its chunks", "int index = threadIdx.x; index < chunks;",
        "int index = threadIdx.x; index < chunks - BUG;"),
    Bug("an ignored row keeps its last classes", "T(0.0f); });", "BUG ? row.logits[col] : T(0.0f); });"),
    Bug("no smoothing of the loss", "if (p.on_each != 0.0f)", "if (p.on_each != 0.0f && !BUG)"),
    Bug("no smoothing of the gradient", "power(v[j]), share, -p.on_each)",
        "power(v[j]), share, BUG ? 0.0f : -p.on_each)"),
    Bug("the loss not scaled", "fmaf(p.logit_scale, below", "fmaf(BUG ? 1.0f : p.logit_scale, below"),
    Bug("the gradient not scaled", "known ? p.logit_scale : NAN", "known ? (BUG ? 1.0f : p.logit_scale) : NAN"),
    Bug("the first row's dloss", "index_of_row * p.dloss_stride", "index_of_row * (BUG ? 0 : p.dloss_stride)"),
    Bug("not divided by the count", "if (p.count != nullptr)", "if (p.count != nullptr && !BUG)"),
    Bug("the target of another chunk", "label / kChunk == index", "label / kChunk == index + BUG"),
    Bug("another class of the chunk", "label % kChunk == j", "label % kChunk == (j ^ BUG)"),
    Bug("no target behind the chunks", "col == label ?", "col == label && !BUG ?"),
    Bug("the gradient of a loss alone", "  if (!p.has_gradient) return;\n  float",
        "  if (!p.has_gradient && !BUG) return;\n  float"),
]  # fmt: skip

CASES = [
    Case(83, torch.bfloat16, rows=6),
    Case(83, torch.bfloat16, rows=6, gap=0),
    Case(2061, rows=2),
    Case(4104, torch.float16, logit_scale=-40.0, dloss="one"),
]


@pytest.fixture(scope="module")
def extension(build_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("planted") / "csrc"
    planting.plant(copy, [], [(ROWS, bug.right, bug.wrong) for bug in BUGS])
    module = Path(__file__).with_name("linear_cross_entropy_module.cpp")
    return host_build.build("_C", [copy / ROWS, module], build_folder)


def fails(extension: Path, bug: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Does a check fail, in one of the orders?"""
    fastattn.cuda.load_host_runner(extension)
    planting.choose(extension, bug)
    try:
        for order in ORDERS:
            monkeypatch.setenv("FASTATTN_HOST_ORDER", order)
            for case in CASES:
                run(case, torch.device("cpu"))
                run(case, torch.device("cpu"), needs_gradient=False)
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
