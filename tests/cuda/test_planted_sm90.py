"""Known bugs, planted in a copy of attention's Hopper kernels: the comparison with float64 must fail.

The copy compiles one kernel for each purpose, for bfloat16 and head dimensions up to 64.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import host_build
import planting
import pytest
import torch
from attention_checks import compare, make, solve
from torch import Tensor

import fastattn.cuda
from fastattn import AttentionMask
from fastattn.cuda import _attention_sm90 as sm90
from fastattn.cuda import _visibility
from fastattn.cuda import attention as backend
from fastattn.ops.attention import _Attention
from fastattn.reference import attention as reference
from fastattn.reference import philox

NAMES = ("forward", "backward_rows", "backward_dq", "backward_dkdv", "bias_gradient")
FORWARD, ROWS, DQ, DKDV, DBIAS = SOURCES = tuple(f"attention/{name}_sm90.cu" for name in NAMES)
SHARED, SCORES = "attention/backward_sm90.cuh", "attention/backward_scores_sm90.cuh"
DELTA = "attention/backward.cuh"
FOUR_TILES = """  if (head_dim <= 64) return f(Tiles<64>{});
  if (head_dim <= 96) return f(Tiles<96>{});
  if (head_dim <= 128) return f(Tiles<128>{});
  return f(Tiles<256>{});
"""
ONE_TILE = "  (void)head_dim;\n  return f(Tiles<64>{});\n"
TWO_TYPES = "p.dtype == DType::bfloat16 ? "
GENERAL_DQ = "backward_dq_sm90_kernel<T, Tiles, true>"
# The kernels of the backward that take a bias; where dq is a sum, and in the forward, those that do not. One stage of
# values, as for wide heads: with two, the producer is held back by the keys before it could overwrite values in use.
ONE_KERNEL = [
    (FORWARD, FOUR_TILES, ONE_TILE),
    (
        FORWARD,
        f"{TWO_TYPES}run<__nv_bfloat16, Size>(p, next_work, stream) : run<__half, Size>",
        "run<__nv_bfloat16, Size>",
    ),
    (FORWARD, "general ? forward_sm90_kernel<T, Tiles, true> : ", ""),
    (FORWARD, "const bool general =", "[[maybe_unused]] const bool general ="),
    (SHARED, FOUR_TILES, ONE_TILE),
    (DQ, f"{TWO_TYPES}run<__nv_bfloat16, Size>(p, rows, stream) : run<__half, Size>", "run<__nv_bfloat16, Size>"),
    (
        DQ,
        "is_general(p) ? backward_dq_sm90_kernel<T, Tiles, true> : backward_dq_sm90_kernel<T, Tiles, false>",
        GENERAL_DQ,
    ),
    (DQ, "kValueStages = kHeadDim <= 128 ? kStages : 1", "kValueStages = 1"),
    (DKDV, f"{TWO_TYPES}run<__nv_bfloat16, Size>(p, rows, stream) : run<__half, Size>", "run<__nv_bfloat16, Size>"),
    (
        DKDV,
        "is_general(p) ? start<Makes::dk_dv, T, Tiles, true>(a, stream) : start<Makes::dk_dv, T, Tiles, false>",
        "start<Makes::dk_dv, T, Tiles, true>",
    ),
    (DKDV, f"{TWO_TYPES}with_type(__nv_bfloat16{{}}) : with_type(__half{{}})", "with_type(__nv_bfloat16{})"),
    (DKDV, "head_dim(p) <= 64 ? run_with_sum", "run_with_sum"),
    (
        DBIAS,
        "bias_gradient_sm90_kernel<__nv_bfloat16> : bias_gradient_sm90_kernel<__half>",
        "bias_gradient_sm90_kernel<__nv_bfloat16>",
    ),
    (DBIAS, TWO_TYPES, ""),
    (DKDV, "\n                      : run_with_sum<decltype(t), Tiles<128>>(p, rows, sum, stream);", ";"),
]


class Bug(NamedTuple):
    name: str
    file: str
    right: str
    wrong: str
    on: str = "plain"  # of CASES


OF_GROUP = "    named_barrier_sync(kOfGroup + group_, kGroup);"
OF_BOTH = "named_barrier_sync(kOfBoth, kConsumers * kGroup);"
LEAVE = "    if (thread_ > 0) return;"
WAIT_READ = "    if (thread_ == 0) bulk_wait_read<0>();"
NEXT_TURN = "      named_barrier_arrive(kTurn + (group_ + 1) % Tiles::kConsumers, 2 * kGroup);\n"
FENCE_AND_LEAVE = f"    fence_async_proxy();\n{OF_GROUP}\n{LEAVE}"
WAIT_FOR_ALL = "    wgmma_wait<0>();\n"
WAIT_FOR_DOUT = "shared_.full_dout[gradients_.stage].wait(gradients_.phase);\n    if constexpr"
WAIT_VALUES = "shared_.full_v[values_.stage].wait(values_.phase);\n      named"
WAIT_AND_RELEASE = "      wgmma_wait<1>();\n      release_keys();\n"
BUGS = [
    Bug("keys not waited for", FORWARD, "i + 1);\n      shared_.full_k", "i + 1);\n      if (!BUG) shared_.full_k"),
    Bug("values not waited for", FORWARD, WAIT_VALUES, f"if (!BUG) {WAIT_VALUES}"),
    Bug("scores not waited for", FORWARD, WAIT_AND_RELEASE, "      release_keys();\n"),
    Bug("keys released too early", FORWARD, WAIT_AND_RELEASE, "      release_keys();\n      wgmma_wait<1>();\n"),
    Bug(
        "values released too early",
        FORWARD,
        "wgmma_wait<0>();\n      release_values();\n      if (masked)",
        "if (BUG) release_values();\n      wgmma_wait<0>();\n      if (!BUG) release_values();\n      if (masked)",
    ),
    Bug("a phase that never flips", "attention/sm90.cuh", "stage = 0, phase ^= 1", "stage = 0"),
    Bug("no turn handed on", FORWARD, NEXT_TURN, ""),
    Bug("no rescaling", FORWARD, "out[j] *= rows[row_of(j)].rescale", "out[j] *= 1.0f"),
    Bug("a masked tile as a full one", FORWARD, "max(work.walk.partial, 1)", "1"),
    Bug("no proxy fence before the store", FORWARD, FENCE_AND_LEAVE, f"{OF_GROUP}\n{LEAVE}"),
    Bug("no barrier before the store", FORWARD, f"{OF_GROUP}\n{LEAVE}", LEAVE),
    Bug(
        "output overwritten on its way",
        FORWARD,
        f"{WAIT_READ}\n{OF_GROUP}  // the last output has left shared memory\n",
        "",
    ),
    Bug("work of another tile", FORWARD, "work_at<Tiles>(a_, index))", "work_at<Tiles>(a_, index ^ BUG))"),
    Bug("dq: keys not waited for", DQ, "    shared_.full_k[keys_.stage].wait(keys_.phase);\n", ""),
    Bug("dq: values not waited for", DQ, "    shared_.full_v[values_.stage].wait(values_.phase);\n", ""),
    Bug("dq: scores not waited for", DQ, "    wgmma_wait<1>();\n", ""),
    Bug(
        "dq: values released too early",
        DQ,
        f"{WAIT_FOR_ALL}    release(shared_.empty_v, values_);\n",
        f"    release(shared_.empty_v, values_);\n{WAIT_FOR_ALL}",
    ),
    Bug(
        "dq: keys released too early",
        DQ,
        "      wgmma_wait<0>();\n    }\n    release(shared_.empty_k",
        "      if (BUG) release(shared_.empty_k, keys_);\n"
        "      wgmma_wait<0>();\n    }\n    if (!BUG) release(shared_.empty_k",
    ),
    Bug("dq: no proxy fence before the store", DQ, FENCE_AND_LEAVE, f"{OF_GROUP}\n{LEAVE}"),
    Bug("dq: no delta", SCORES, "dp[j] - delta_[row_of(j)]", "dp[j]"),
    Bug("dq: masked keys are seen", SCORES, "if (kMasked && !is_seen(j)) s[j] = 0.0f;", ""),
    Bug("dq: remainder of half the rows", DQ, "dq[row_of(j)] += s[j]", "dq[0] += s[j]", "bias"),
    Bug("dq: delta of one key rounded", SCORES, "attention::find_delta", "if (!BUG) attention::find_delta", "one key"),
    Bug("dq: delta without dlse", SCORES, "mean - (a_.p.dlse != nullptr ? a_.p.dlse[row] : 0.0f)", "mean", "one key"),
    Bug("dq: delta of one key kept to itself", DQ, "      rows_.keep();\n", "", "one key"),
    Bug("dq: delta of one tile rounded", DELTA, "walk.count == 1", "false", "one tile"),
    Bug("dbias: parts not waited for", DBIAS, "    wait_for_part();\n    wgmma_fence();", "    wgmma_fence();", "bias"),
    Bug("dbias: products not waited for", DBIAS, "    wgmma_wait<kUnderWay>();\n", "", "bias"),
    Bug("dbias: parts released too early", DBIAS, "part_ - 1 - kUnderWay", "part_ - 1", "bias"),
    Bug("dbias: a tile left out", DBIAS, "m0 + row, n0,", "m0 + row, n0 + BUG * kBlock,", "bias"),
    Bug("queries not waited for", DKDV, "    shared_.full_q[queries_.stage].wait(queries_.phase);\n", ""),
    Bug("gradients not waited for", DKDV, WAIT_FOR_DOUT, f"if (!BUG) {WAIT_FOR_DOUT}"),
    Bug(
        "queries released too early",
        DKDV,
        f"{WAIT_FOR_ALL}    release(shared_.empty_q, queries_);\n",
        f"    release(shared_.empty_q, queries_);\n{WAIT_FOR_ALL}",
    ),
    Bug("no delta", DKDV, "dp[j + e] - (e % 2 == 0 ? delta.x : delta.y)", "dp[j + e]"),
    Bug(
        "no proxy fence before the store of dk",
        DKDV,
        "dropout_.scale() : 1.0f);\n    fence",
        "dropout_.scale() : 1.0f);\n    if (!BUG) fence",
    ),
    Bug("sum: one buffer of dS", DKDV, "    buffer_ ^= 1;\n", "", "sum"),
    Bug("sum: no barrier of both", DKDV, f"{OF_BOTH}  // dS", f"if (!BUG) {OF_BOTH}  // dS", "sum"),
    Bug(
        "sum: no proxy fence before dq",
        DKDV,
        "ds[column / 16]);\n    fence",
        "ds[column / 16]);\n    if (!BUG) fence",
        "sum",
    ),
    Bug(
        "sum: dq overwritten on its way",
        DKDV,
        f"{WAIT_READ}\n{OF_GROUP}  // the last one has left shared memory\n",
        "",
        "sum",
    ),
    Bug("sum: dq of the other half", DKDV, "(ds_tile, key, row)", "(ds_tile, key, BUG ? 64 - row : row)", "sum"),
    Bug("sum: k overwritten by dk", DKDV, f"{OF_BOTH}  // k has", f"if (!BUG) {OF_BOTH}  // k has", "sum"),
]

# Band masks alone: the module prepares no others. Several tiles for each block, partial and full ones.
CASES = {
    "plain": [dict(B=1, H=2, Lq=400, Lk=400, D=64, mask="causal"), dict(B=1, H=1, Lq=200, Lk=520, D=64, mask="none")],
    "bias": [dict(B=3, H=1, Lq=150, Lk=200, D=64, mask="causal", bias=(1, 1, 150, 200))],
}
CASES["sum"] = CASES["plain"]
CASES["one key"] = [
    dict(B=1, H=2, dropout_p=0.3, Lq=300, Lk=400, D=64, mask={"window": (0, 0), "align": "bottom_right"})
]
CASES["one tile"] = [dict(B=1, H=2, dropout_p=0.5, Lq=17, Lk=33, D=8, mask={"window": (1, 0)})]
# Orders and completions: enough to catch every bug, and all that the copy as such must pass.
TRIES = [("2", "lazy"), ("2", "crossed"), ("3", "lazy")]


def attend(q, k, v, mask, dropout_p, scale):
    """The backend itself: the public op would ask about kernels that this module lacks. The forward is there without
    bias and dropout only."""
    bare = mask.bias is None and dropout_p == 0
    backends = backend if bare else SimpleNamespace(attention_fwd=formula, attention_bwd=backend.attention_bwd)
    rng_state = philox.draw_rng_state(q.device) if dropout_p > 0 else None
    out, lse = _Attention.apply(q, k, v, mask.bias, mask, scale, dropout_p, rng_state, backends)
    return out, lse, None


def formula(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out, lse, _ = reference.attention(q.float(), k.float(), v.float(), *rest)  # so that lse is as exact as a kernel's
    return out.to(q.dtype), lse


def fails(extension: Path, bug: int, on: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Does a check fail, in one of TRIES?"""
    monkeypatch.setattr(sm90, "ACCUMULATE_DQ", on == "sum")
    fastattn.cuda.load_host_runner(extension)
    planting.choose(extension, bug)
    try:
        for order, completion in TRIES:
            monkeypatch.setenv("FASTATTN_HOST_ORDER", order)
            monkeypatch.setenv("FASTATTN_HOST_ASYNC", completion)
            for case in CASES[on]:
                p = make(**case, dtype=torch.bfloat16)
                compare(p, solve(p, attend), ("out", "lse", "dq", "dk", "dv", "dbias"))
    except (AssertionError, RuntimeError):
        return True
    finally:
        fastattn.cuda.load_host_runner(None)
    return False


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTATTN_HOST_CAPABILITY", "90")
    monkeypatch.setattr(sm90, "serves", lambda *_: True)
    monkeypatch.setattr(backend.short, "serves", lambda *_: False)
    monkeypatch.setattr(_visibility, "seen_keys", every_key)
    # Tests ask torch for it, so that what is uninitialised is NaN.
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)


def every_key(_: AttentionMask, _Lq: int, Lk: int, device: torch.device) -> Tensor:
    """seen_keys() of a mask and a bias that hide none."""
    return torch.full((1, 1, -(-Lk // 128), 4), -1, dtype=torch.int32, device=device)


@pytest.fixture(scope="module")
def extension(build_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("planted") / "csrc"
    planting.plant(copy, ONE_KERNEL, [bug[1:4] for bug in BUGS])
    module = Path(__file__).with_name("sm90_module.cpp")
    sources = [*(copy / name for name in SOURCES), module]
    return host_build.build("_C", sources, build_folder)


@pytest.mark.parametrize("on", CASES)
def test_without_a_bug(on: str, extension: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy as such passes, so it is the bug that fails below."""
    assert not fails(extension, 0, on, monkeypatch)


@pytest.mark.parametrize("bug", range(1, len(BUGS) + 1), ids=[bug.name for bug in BUGS])
def test_is_caught(bug: int, extension: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fails(extension, bug, BUGS[bug - 1].on, monkeypatch)
