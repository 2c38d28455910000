"""Known bugs, planted in a copy of the attention's sources, each standing for a class: a check must fail on each.

The copies compile one kernel of each kind: bfloat16, head dimension up to 64. In them few heads fit into the L2 cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import mutations
import pytest
import torch
from attention_checks import Problem, backend_call, compare, make, solve, visible
from mask_cases import packed_and_padded

import fastattn.backends.cuda

pytestmark = pytest.mark.full

FORWARD, DQ, DKDV, SHORT = (
    f"attention/{name}.cu" for name in ("forward", "backward_dq", "backward_dkdv", "short_backward")
)
FORWARD_90, DQ_90, DKDV_90, ROWS_90 = (
    f"attention/{name}_sm90.cu" for name in ("forward", "backward_dq", "backward_dkdv", "backward_rows")
)
PIPELINE_90 = "attention/backward_dkdv_sm90_pipeline.cuh"
MASK, BACKWARD, SCORES_90 = "attention/mask.cuh", "attention/backward_common.cuh", "attention/backward_scores_sm90.cuh"
# Orders and completions: enough to catch every bug, and all that the copy as such must pass.
TRIES = [("forward", "lazy"), ("reverse", "eager"), ("2", "crossed"), ("2", "lazy"), ("3", "lazy")]


def problems() -> dict[str, Problem]:
    bf16 = {"B": 1, "H": 2, "D": 40, "dtype": torch.bfloat16}
    return {
        "all": make(**bf16, Hk=1, Lq=70, Lk=140, mask="attn_mask_2d", bias=(1, 1, 70, 140), dropout_p=0.3),
        "band": make(**bf16, Lq=150, Lk=200, mask={"window": (40, 20)}),
        "causal": make(**bf16, Lq=400, Lk=400, mask="causal"),
        "dropout": make(**bf16, Lq=150, Lk=270, mask="causal", dropout_p=0.3),
        "full": make(**bf16, Lq=200, Lk=520, mask="none"),
        "packed": make(**bf16 | {"B": 2}, Lq=150, Lk=140, mask=packed_and_padded(150, 140)),
        "short": make(**bf16 | {"H": 4}, Hk=2, Lq=70, Lk=50, mask="decoder", dropout_p=0.3),
        "poisoned": make(**bf16 | {"B": 2}, Lq=150, Lk=140, mask="key_padding_holes"),
    }


def poisoned(p: Problem) -> Problem:
    """NaN in keys and values that take no part."""
    excluded = ~visible(p).any(-2)[..., None]
    return p.but(k=p.k.masked_fill(excluded, torch.nan), v=p.v.masked_fill(excluded, torch.nan))


class Bug(NamedTuple):
    name: str
    problem: str
    file: str
    right: str
    wrong: str


K_IS_THERE = "    __syncthreads();  // k is there, and v was read\n"
LEAVE = "    named_barrier_sync(kGroupBarrier + group_, kGroup);\n    if (thread_ == 0) {"
BUGS = {
    "80": [
        Bug("copy not waited for", "band", FORWARD,
            "    } else {\n      cp_async_wait<0>();\n", "    } else if (!BUG) {\n      cp_async_wait<0>();\n"),
        Bug("first keys not waited for", "short", FORWARD, "cp_async_wait<1>()", "cp_async_wait<2>()"),
        Bug("tile overwritten while it is read", "band", FORWARD, K_IS_THERE, ""),
        Bug("sum not rescaled", "full", FORWARD, "row_sum[half] *= rescale", "row_sum[half] *= 1.0f"),
        Bug("an interval without its last column", "packed", MASK, "end = interval.y;", "end = interval.y - BUG;"),
        Bug("keys that take no part are read", "poisoned", DQ, "takes_part(mask, b, n)", "true"),
        Bug("gradient of lse forgotten", "band", BACKWARD, "delta -= p.dlse[row0 + m]", "delta -= 0.0f"),
        Bug("dropout of another key", "all", DKDV, ">> g & 1", ">> (BUG ? c : g) & 1"),
        Bug("bias of another key", "all", MASK, "2 * r, pair.x)", "2 * r, BUG ? pair.y : pair.x)"),
        Bug("one buffer for two chunks", "short", SHORT, "i % 2 * (2 * ", "(BUG ? 0 : i % 2) * (2 * "),
        Bug("part of a row's sum", "short", SHORT, "w < warps / 2; w++", "w < (BUG ? 1 : warps / 2); w++"),
    ],
    "90": [
        Bug("keys not waited for", "full", FORWARD_90,
            "(kind)::value;\n      shared_.full_k", "(kind)::value;\n      if (!BUG) shared_.full_k"),
        Bug("stage released before its product", "full", FORWARD_90,
            "      wgmma_wait<1>(s);\n      release_keys();\n", "      release_keys();\n      wgmma_wait<1>(s);\n"),
        Bug("keys kept by a warpgroup without queries", "causal", FORWARD_90,
            "__syncwarp();\n      release_keys();", "__syncwarp();\n      if (!BUG) release_keys();"),
        Bug("dropout without the scale", "dropout", FORWARD_90,
            "unit = kGeneral ?", "unit = kGeneral || (BUG && kDropout) ?"),
        Bug("a phase that never flips", "causal", "attention/sm90.cuh", "stage = 0, phase ^= 1", "stage = 0"),
        Bug("no rescaling", "causal", FORWARD_90, "out[j] *= rows[row_of(j)].rescale", "out[j] *= 1.0f"),
        Bug("no fence before the store", "causal", FORWARD_90,
            f"    fence_async_proxy();\n{LEAVE}", f"    if (!BUG) fence_async_proxy();\n{LEAVE}"),
        Bug("scores not waited for", "all", DQ_90, "    wgmma_wait<1>(s);\n", ""),
        Bug("no delta", "all", SCORES_90, "dp[j] - delta_[row_of(j)]", "dp[j]"),
        Bug("queries released too early", "causal", DKDV_90,
            "    finish_step<1>(dk, dv);\n", "    finish_step<3>(dk, dv);\n"),
        Bug("the other dS not waited for", "causal", DKDV_90,
            "    named_barrier_sync(kBothBarrier, kConsumers * kGroup);  // both wrote dS and read the last one\n",
            "    (void)0;\n"),
        Bug("a part overwritten before it is sent", "causal", DKDV_90,
            "    if (!has_dq_) return;\n    named_barrier_sync(kEmpty + group_, kGroup + 32);\n",
            "    if (!has_dq_) return;\n    named_barrier_arrive(kEmpty + group_, kGroup + 32);\n"),
        Bug("the last part of dq not sent", "causal", DKDV_90, "      hand_over_dq();\n", "      (void)0;\n"),
        Bug("turns of lists that are all first", "packed", ROWS_90,
            "shared.earlier[tile] + __popc(shared.listed[tile] & first_bits(warp))", "0"),
        Bug("turns one too low", "causal", PIPELINE_90,
            "return item.n0 / kBlockN - max(m0 - mask.band_hi, 0) / kBlockN;",
            "return max(item.n0 / kBlockN - max(m0 - mask.band_hi, 0) / kBlockN - 1, 0);"),
        Bug("turns not waited for", "causal", PIPELINE_90, "wait_for_count(counters + part, tile.turn);", "(void)0;"),
        Bug("turns passed on too early", "causal", PIPELINE_90, "bulk_wait<0>();", "(void)0;"),
    ],
}  # fmt: skip
CHANGES = [
    ("attention/sm90.cuh", "32 << 20", "24 << 10"),
    ("attention/tile.cuh", "  dtype_switch(dtype, f);", "  f(__nv_bfloat16{});"),
    ("attention/tile.cuh", "return f(Tf32{});", "return;"),
    ("attention/tile.cuh", "  if (head_dim <= 128) return f(Int<128>{});\n  f(Int<256>{});\n", ""),
    (SHORT, "    if (head_dim <= 128) f(t, Int<128>{});\n", ""),
    (SHORT, "  if (dtype == DType::float16) with_type(__half{});\n", ""),
]


@pytest.fixture(scope="module")
def extension(build_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("planted") / "csrc"
    mutations.plant(copy, CHANGES, [bug[2:] for bugs in BUGS.values() for bug in bugs])
    return mutations.build(build_folder, copy, [FORWARD, DQ, DKDV, SHORT, FORWARD_90, DQ_90, DKDV_90, ROWS_90])


def fails(
    extension: Path,
    capability: str,
    number: int,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    tries: Sequence[tuple[str, str]] = TRIES,
) -> bool:
    """Is a result of the problem off, in one of the tries?"""
    monkeypatch.setenv("FASTATTN_EMULATOR_CAPABILITY", capability)
    fastattn.backends.cuda.load_emulator(extension)
    mutations.choose(extension, number)
    try:
        for order, completion in tries:
            monkeypatch.setenv("FASTATTN_EMULATOR_ORDER", order)
            monkeypatch.setenv("FASTATTN_EMULATOR_ASYNC", completion)
            p = problems()[name]
            given = poisoned(p) if name == "poisoned" else p
            compare(p, solve(given, backend_call("cuda", torch.device("cpu"), weights=False)))
    except (AssertionError, RuntimeError):
        return True
    finally:
        fastattn.backends.cuda.load_emulator(None)
    return False


@pytest.mark.parametrize("capability", BUGS)
def test_without_a_bug(capability: str, extension: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy as such passes, so it is the bug that fails below."""
    assert not [name for name in problems() if fails(extension, capability, 0, name, monkeypatch)]


NUMBERED = [(capability, bug) for capability, bugs in BUGS.items() for bug in bugs]


@pytest.mark.parametrize("number", range(1, len(NUMBERED) + 1), ids=[f"{c} {bug.name}" for c, bug in NUMBERED])
def test_is_caught(number: int, extension: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capability, bug = NUMBERED[number - 1]
    assert fails(extension, capability, number, bug.problem, monkeypatch)


TURNS = {bug.name: number for number, (_, bug) in enumerate(NUMBERED, start=1) if bug.name.startswith("turns ")}


@pytest.mark.parametrize("values", TRIES, ids="-".join)
@pytest.mark.parametrize("name", TURNS)
def test_turns_are_caught_in_every_order(
    name: str, values: tuple[str, str], extension: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capability, bug = NUMBERED[TURNS[name] - 1]
    assert fails(extension, capability, TURNS[name], bug.problem, monkeypatch, [values])
