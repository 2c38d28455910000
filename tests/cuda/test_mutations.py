"""Mutation tests of the CUDA kernels: the checks of tests/ops and tests/cuda must fail on each known bug.

All bugs are compiled at once into a copy of csrc/; planted_bug, a variable of the library, chooses one. A bug replaces
one text of a file, `right`, by `wrong`. What is compiled, for bug 7:
    expressions          (planted_bug == 7 ? (wrong) : (right))
    statements           if (planted_bug == 7) { wrong } else { right }, if there is a semicolon in `right`
    BUG is in `wrong`    wrong, where BUG is (planted_bug == 7): for texts that are neither
The text of one bug may be a part of another one's.
"""

from __future__ import annotations

import ctypes
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import checks
import emulator_build
import pytest
import torch
from attention_checks import backend_call, compare, make, solve, visible
from emulator_build import CSRC
from mask_cases import packed_and_padded

import fastattn.backends.cuda
from fastattn.check import cases

pytestmark = pytest.mark.full
CPU, BF16 = torch.device("cpu"), torch.bfloat16

# --- what is checked --------------------------------------------------------------------------------------------------


def attention(mask: str | dict, is_poisoned: bool = False, **sizes: Any) -> Callable[[], None]:
    """is_poisoned: with NaN in keys and values that take no part."""

    def check() -> None:
        p = given = make(**{"B": 1, "H": 2, "D": 40, "dtype": BF16, "mask": mask} | sizes)
        if is_poisoned:
            excluded = ~visible(p).any(-2)[..., None]
            given = p.but(k=p.k.masked_fill(excluded, torch.nan), v=p.v.masked_fill(excluded, torch.nan))
        compare(p, solve(given, backend_call("cuda", CPU, weights=False)))

    return check


def norms() -> None:
    """520: two warps a row, vectors. 500: one warp a row, element by element. 37 rows: every block takes several turns.
    1040: weight gradients by a second kernel."""
    for rows, hidden, options in (
        (37, 520, {"dropout_p": 0.3, "x_bias": True}),
        (37, 500, {"dropout_p": 0.3, "x_bias": True}),
        (7, 1040, {"x_bias": True}),
        (9, 500, {"rms": True}),
        (9, 500, {"eps_on_std": True, "eps": 1e-2}),
    ):
        checks.check(cases.add_layer_norm(rows=(rows,), hidden=hidden, return_sum=True, **options), "cuda")


def hidden_layers() -> None:
    """relu's h decides in the backward, gating pairs columns; 75 columns are computed element by element."""
    for activation, d_ff in (("swiglu", 264), ("relu", 264), ("gelu", 75)):
        sizes = {"tokens": (150,), "d": 40, "d_ff": d_ff, "d_out": 24}
        checks.check(cases.feed_forward(activation, dropout_p=0.3, **sizes, dtype=BF16), "cuda")


PROBLEMS: dict[str, Callable[[], None]] = {
    "all": attention("attn_mask_2d", Hk=1, Lq=70, Lk=140, dropout_p=0.3),
    "band": attention({"window": (40, 20)}, Lq=150, Lk=200),
    "causal": attention("causal", Lq=400, Lk=400),
    "dropout": attention("causal", Lq=150, Lk=270, dropout_p=0.3),
    "full": attention("none", Lq=200, Lk=520),
    "packed": attention(packed_and_padded(150, 140), B=2, Lq=150, Lk=140),
    "poisoned": attention("key_padding_holes", is_poisoned=True, B=2, Lq=150, Lk=140),
    "norm": norms,
    "hidden": hidden_layers,
}

# --- the bugs ---------------------------------------------------------------------------------------------------------


class Bug(NamedTuple):
    """problem: which must show it."""

    name: str
    problem: str
    file: str
    right: str
    wrong: str

    @property
    def capability(self) -> str:
        """Of the GPU that is emulated."""
        return "90" if "sm90" in self.file else "80"


FORWARD, DQ, DKDV = (f"attention/{name}.cu" for name in ("forward", "backward_dq", "backward_dkdv"))
FORWARD_90, DKDV_90, ROWS_90 = (f"attention/{name}_sm90.cu" for name in ("forward", "backward_dkdv", "backward_rows"))
PIPELINE_90 = "attention/backward_dkdv_sm90_pipeline.cuh"
MASK, BACKWARD = "attention/mask.cuh", "attention/backward_common.cuh"
NORM, HIDDEN, POINTWISE = "add_layer_norm/backward.cu", "feed_forward/hidden.cuh", "feed_forward/pointwise.cu"
SOURCES = (FORWARD, DQ, DKDV, FORWARD_90, DKDV_90, ROWS_90, POINTWISE)
SOURCES += ("add_layer_norm/forward.cu", "add_layer_norm/backward.cu")
# Always in the copy. Less to compile: attention in bfloat16 with head dimensions up to 64, two kernels of the norm, in
# float32. Few heads of attention fit into the L2 cache.
CHANGES = [
    ("attention/sm90.cuh", "32 << 20", "24 << 10"),
    ("attention/tile.cuh", "  dtype_switch(dtype, with_type);", "  with_type(__nv_bfloat16{});"),
    ("attention/tile.cuh", "return with_type(Tf32{});", "return;"),
    ("attention/tile.cuh", "head_dim <= 64 ? f(t, Int<64>{}) : f(t, Int<128>{})", "f(t, Int<64>{})"),
    (
        "add_layer_norm/rows.cuh",
        "template <class Function>\nvoid dispatch(",
        """template <class Function>
void dispatch(DType, DType, int chunks, bool is_aligned, Function&& f) {
  if (chunks == 4) return f(float{}, float{}, Int<4>{}, Int<1>{});
  is_aligned ? f(float{}, float{}, Int<2>{}, Int<1>{}) : f(float{}, float{}, Int<2>{}, Int<0>{});
}

template <class Function>
void dispatch_to_all(""",
    ),
]
K_IS_THERE = "    __syncthreads();  // k is there, and v was read\n"
LEAVE = "    named_barrier_sync(kGroupBarrier + group_, kGroup);\n    if (thread_ == 0) {"
BUGS = [
    Bug("copy not waited for", "band", FORWARD,
        f"    cp_async_wait<0>();\n{K_IS_THERE}", "    __syncthreads();\n"),
    Bug("tile overwritten while it is read", "band", FORWARD, K_IS_THERE, ""),
    Bug("sum not rescaled", "full", FORWARD, "row_sum[half] *= rescale", "row_sum[half] *= 1.0f"),
    Bug("an interval without its last column", "packed", MASK, "end = interval.y;", "end = interval.y - BUG;"),
    Bug("keys that take no part are read", "poisoned", DQ, "takes_part(mask, b, n)", "true"),
    Bug("gradient of lse forgotten", "band", BACKWARD, "delta -= p.dlse[row0 + m]", "delta -= 0.0f"),
    Bug("dropout of another key", "all", DKDV, ">> g & 1", ">> (BUG ? c : g) & 1"),
    Bug("keys not waited for", "full", FORWARD_90,
        "(kind)::value;\n      shared_.full_k", "(kind)::value;\n      if (!BUG) shared_.full_k"),
    Bug("stage released before its product", "full", FORWARD_90,
        "      wgmma_wait<1>(s);\n      release_keys();\n", "      release_keys();\n      wgmma_wait<1>(s);\n"),
    Bug("keys kept by a warpgroup without queries", "causal", FORWARD_90,
        "__syncwarp();\n      release_keys();", "__syncwarp();\n      if (!BUG) release_keys();"),
    Bug("dropout without the scale", "dropout", FORWARD_90,
        "unit = a_.p.softmax_scale * kLog2e", "unit = (BUG && kDropout ? 1.0f : a_.p.softmax_scale) * kLog2e"),
    Bug("a phase that never flips", "causal", "attention/sm90.cuh", "stage = 0, phase ^= 1", "stage = 0"),
    Bug("no rescaling", "causal", FORWARD_90, "out[j] *= rows[row_of(j)].rescale", "out[j] *= 1.0f"),
    Bug("no fence before the store", "causal", FORWARD_90,
        f"    fence_async_proxy();\n{LEAVE}", f"    if (!BUG) fence_async_proxy();\n{LEAVE}"),
    Bug("queries released too early", "causal", DKDV_90,
        "    wgmma_wait<1>(dk, dv);\n", "    wgmma_wait<3>(dk, dv);\n"),
    Bug("the other dS not waited for", "causal", DKDV_90,
        "    named_barrier_sync(kBothBarrier, kConsumers * kGroup);  // both wrote dS and read the last one\n",
        "    (void)0;\n"),
    Bug("a part overwritten before it is sent", "causal", DKDV_90,
        "    if (!has_dq_) return;\n    named_barrier_sync(kEmpty + group_, kGroup + 32);\n",
        "    if (!has_dq_) return;\n    named_barrier_arrive(kEmpty + group_, kGroup + 32);\n"),
    Bug("the last part of dq not sent", "causal", DKDV_90,
        "    hand_over_dq();\n    named", "    if (!BUG) hand_over_dq();\n    named"),
    Bug("turns of lists that are all first", "packed", ROWS_90,
        "shared.earlier[tile] + __popc(shared.listed[tile] & first_bits(warp))", "0"),
    Bug("turns one too low", "causal", PIPELINE_90,
        "return item.n0 / kBlockN - max(m0 - mask.band_hi, 0) / kBlockN;",
        "return max(item.n0 / kBlockN - max(m0 - mask.band_hi, 0) / kBlockN - 1, 0);"),
    Bug("turns not waited for", "causal", PIPELINE_90, "wait_for_count(counters + part, tile.turn);", "(void)0;"),
    Bug("turns passed on too early", "causal", PIPELINE_90, "bulk_wait<0>();", "(void)0;"),
    Bug("no barrier in a row's sum", "norm", "common/reduce.cuh", "  __syncthreads();\n", ""),
    Bug("dropout counts elements", "norm", "common/philox.cuh", "draw(words, row, col / 8)", "draw(words, row, col)"),
    Bug("no mean of g * normal", "norm", NORM, "normal[j] * mean_g_normal", "0.0f"),
    Bug("a ticket too few", "norm", NORM, "count - 1", "count - 2"),
    Bug("no barrier before a block's rows are added", "norm", NORM,
        "    __syncthreads();\n    const int first =", "    if (!BUG) __syncthreads();\n    const int first ="),
    Bug("a row of the block left out", "norm", NORM, "unsigned y = 1;", "unsigned y = 1 + BUG;"),
    Bug("no ratio of standard deviations", "norm", NORM, "p.eps_on_std", "false"),
    Bug("gate not multiplied", "hidden", HIDDEN, "gate[j] *= up[j]", "gate[j] *= BUG ? 1.0f : up[j]"),
    Bug("another chunk's mask", "hidden", HIDDEN,
        "dropout.apply(gate, row, col)", "dropout.apply(gate, row, col ^ (BUG ? 8 : 0))"),
    Bug("this turn's row again", "hidden", POINTWISE, "read(row + kRowThreads)", "read(BUG ? row : row + kRowThreads)"),
    Bug("no barrier before a block's rows are added", "hidden", POINTWISE,
        "  __syncthreads();\n  const int column", "  if (!BUG) __syncthreads();\n  const int column"),
]  # fmt: skip

VARIABLE = """#pragma once
extern "C" {
__attribute__((weak, visibility("default"))) int planted_bug = 0;
}
"""


# --- the tool ---------------------------------------------------------------------------------------------------------


def replace_once(path: Path, right: str, wrong: str) -> None:
    text = path.read_text()
    assert text.count(right) == 1, f"{path.name} has {right!r} {text.count(right)} times"
    path.write_text(text.replace(right, wrong))


def write_mutants(copy: Path) -> None:
    """Makes a copy of csrc/ with CHANGES and BUGS, numbered from 1 on."""
    shutil.copytree(CSRC, copy, ignore=shutil.ignore_patterns("*.cpp"))
    (copy / "planted.h").write_text(VARIABLE)
    for file, right, wrong in CHANGES:
        replace_once(copy / file, right, wrong)
    # What contains another bug's text comes first; until then @7@ marks the place of bug 7.
    for number, bug in sorted(enumerate(BUGS, start=1), key=lambda numbered: -len(numbered[1].right)):
        replacement = f"@{number}@"
        if not re.search(r"\bBUG\b", bug.wrong):
            if ";" in bug.right:
                replacement = f"if (planted_bug == {number}) {{\n@{number}@\n}} else {{\n{bug.right}\n}}\n"
            else:
                replacement = f"(planted_bug == {number} ? (@{number}@) : ({bug.right}))"
        replace_once(copy / bug.file, bug.right, replacement)

    def wrong(place: re.Match[str]) -> str:
        return re.sub(r"\bBUG\b", f"(planted_bug == {place[1]})", BUGS[int(place[1]) - 1].wrong)

    for path in {copy / bug.file for bug in BUGS}:
        path.write_text('#include "planted.h"\n' + re.sub(r"@(\d+)@", wrong, path.read_text()))


@pytest.fixture(scope="module")
def library(build_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fastattn._C for the CPU, with SOURCES of the copy."""
    copy = tmp_path_factory.mktemp("mutants") / "csrc"
    write_mutants(copy)
    sources = {CSRC / name: copy / name for name in SOURCES}
    return emulator_build.build(
        "_C", [sources.get(path, path) for path in emulator_build.extension_sources()], build_folder
    )


# Orders and completions: enough to catch every bug, and all that the copy as such must pass.
SETTINGS = [("forward", "lazy"), ("reverse", "eager"), ("2", "crossed"), ("2", "lazy"), ("3", "lazy"), ("1", "lazy")]


def fails(
    library: Path,
    number: int,
    problem: str,
    capability: str,
    monkeypatch: pytest.MonkeyPatch,
    settings: Iterable[tuple[str, str]] = SETTINGS,
) -> bool:
    """Whether a result of the problem is off in one of the settings. number: of the bug, 0 is none."""
    monkeypatch.setenv("FASTATTN_EMULATOR_CAPABILITY", capability)
    fastattn.backends.cuda.load_emulator(library)
    ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "planted_bug").value = number
    try:
        for order, completion in settings:
            monkeypatch.setenv("FASTATTN_EMULATOR_ORDER", order)
            monkeypatch.setenv("FASTATTN_EMULATOR_ASYNC", completion)
            PROBLEMS[problem]()
    except (AssertionError, RuntimeError):
        return True
    finally:
        fastattn.backends.cuda.load_emulator(None)
    return False


@pytest.mark.parametrize("problem, capability", sorted({(bug.problem, bug.capability) for bug in BUGS}))
def test_without_a_bug(problem: str, capability: str, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy as such passes, so it is the bug that fails below."""
    assert not fails(library, 0, problem, capability, monkeypatch)


NUMBERS = [pytest.param(number, id=f"{bug.problem}, {bug.name}") for number, bug in enumerate(BUGS, start=1)]


@pytest.mark.bug_class("T7")
@pytest.mark.parametrize("number", NUMBERS)
def test_is_caught(number: int, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug = BUGS[number - 1]
    assert fails(library, number, bug.problem, bug.capability, monkeypatch)


@pytest.mark.bug_class("T7")
@pytest.mark.parametrize("setting", SETTINGS, ids="-".join)
@pytest.mark.parametrize("number", [number for number, bug in enumerate(BUGS, 1) if bug.name.startswith("turns ")])
def test_turns_are_caught_in_every_order(
    number: int, setting: tuple[str, str], library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug = BUGS[number - 1]
    assert fails(library, number, bug.problem, bug.capability, monkeypatch, [setting])
