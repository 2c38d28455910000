"""Known bugs, planted one at a time in a copy of attention's Hopper kernels: the comparison with float64 must fail.

The copy compiles one kernel for each pass, for bfloat16 and head dimensions up to 64.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import NamedTuple

import host_build
import pytest
import torch
from attention_checks import compare, make, solve
from host_build import CSRC, ORDERS, SM90_COMPLETIONS

import fastattn.cuda
from fastattn.cuda import _attention_sm90 as sm90
from fastattn.cuda import attention as room
from fastattn.ops.attention import _Attention

FORWARD, BACKWARD = "attention/forward_sm90.cu", "attention/backward_sm90.cu"
ONE_KERNEL = [
    (FORWARD, "  if (head_dim <= 64) return f(Tiles<64>{});\n", "  (void)head_dim;\n  return f(Tiles<64>{});\n"),
    (FORWARD, "  if (head_dim <= 96) return f(Tiles<96>{});\n", ""),
    (FORWARD, "  if (head_dim <= 128) return f(Tiles<128>{});\n  return f(Tiles<256>{});\n", ""),
    (
        FORWARD,
        "p.dtype == DType::bfloat16 ? run<__nv_bfloat16, Size>(p, next_work, stream) : run<__half, Size>",
        "run<__nv_bfloat16, Size>",
    ),
    (FORWARD, "general ? forward_sm90_kernel<T, Tiles, true> : ", ""),
    (FORWARD, "const bool general =", "[[maybe_unused]] const bool general ="),
    (BACKWARD, "    std::max(p.shape.head_dim_k, p.shape.head_dim_v) <= 64 ? run", "    run"),
    (BACKWARD, " : run<decltype(t), Tiles<128>>(p, scratch, stream);", ";"),
    (
        BACKWARD,
        "p.dtype == DType::bfloat16 ? with_type(__nv_bfloat16{}) : with_type(__half{})",
        "with_type(__nv_bfloat16{})",
    ),
    (BACKWARD, "p.dropout.rng_state != nullptr ? backward_sm90_kernel<T, Tiles, true> : ", ""),
]


class Bug(NamedTuple):
    name: str
    file: str
    right: str
    wrong: str


OF_GROUP = "    named_barrier_sync(kOfGroup + group_, kGroup);"
OF_BOTH = "    named_barrier_sync(kOfBoth, kConsumers * kGroup);"
LEAVE = "    if (thread_ > 0) return;"
WAIT_READ = "    if (thread_ == 0) bulk_wait_read<0>();"
NEXT_TURN = "      named_barrier_arrive(kTurn + (group_ + 1) % Tiles::kConsumers, 2 * kGroup);\n"
WAIT_KEYS = "      shared_.full_k[keys_.stage].wait(keys_.phase);\n      shared_.full_v"
WAIT_VALUES = "      shared_.full_v[values_.stage].wait(values_.phase);\n      named"
WAIT_AND_RELEASE = "      wgmma_wait<1>();\n      release_keys();\n"
BUGS = [
    Bug("keys not waited for", FORWARD, WAIT_KEYS, "      shared_.full_v"),
    Bug("values not waited for", FORWARD, WAIT_VALUES, "      named"),
    Bug("scores not waited for", FORWARD, WAIT_AND_RELEASE, "      release_keys();\n"),
    Bug("keys released too early", FORWARD, WAIT_AND_RELEASE, "      release_keys();\n      wgmma_wait<1>();\n"),
    Bug(
        "values released too early",
        FORWARD,
        "      wgmma_wait<0>();\n      release_values();\n      if (masked)",
        "      release_values();\n      wgmma_wait<0>();\n      if (masked)",
    ),
    Bug("a phase that never flips", "attention/sm90.cuh", "stage = 0, phase ^= 1", "stage = 0"),
    Bug("no turn handed on", FORWARD, NEXT_TURN, ""),
    Bug("no rescaling", FORWARD, "out[j] *= rows[row_of(j)].rescale", "out[j] *= 1.0f"),
    Bug("a masked tile as a full one", FORWARD, "max(work.walk.partial, 1)", "1"),
    Bug(
        "no proxy fence before the store",
        FORWARD,
        f"    fence_async_proxy();\n{OF_GROUP}\n{LEAVE}",
        f"{OF_GROUP}\n{LEAVE}",
    ),
    Bug("no barrier before the store", FORWARD, f"{OF_GROUP}\n{LEAVE}", LEAVE),
    Bug(
        "output overwritten on its way",
        FORWARD,
        f"{WAIT_READ}\n{OF_GROUP}  // the last output has left shared memory\n",
        "",
    ),
    Bug("work of another tile", FORWARD, "attend(work_at<Tiles>(a_, index))", "attend(work_at<Tiles>(a_, index ^ 1))"),
    Bug(
        "queries not waited for",
        BACKWARD,
        "    shared_.full_q[stage].wait(queries_.phase);\n    if (kMasked) clean",
        "    if (kMasked) clean",
    ),
    Bug("one buffer of dS", BACKWARD, "    buffer_ ^= 1;\n", ""),
    Bug("no barrier of both", BACKWARD, f"{OF_BOTH}  // dS of both", "    // dS of both"),
    Bug("no proxy fence before dq", BACKWARD, "    fence_async_proxy();\n\n    wgmma_fence();", "    wgmma_fence();"),
    Bug(
        "queries released too early",
        BACKWARD,
        "    wgmma_wait<0>();\n    if (thread_ == 0) shared_.empty[stage].arrive();\n",
        "    if (thread_ == 0) shared_.empty[stage].arrive();\n    wgmma_wait<0>();\n",
    ),
    Bug(
        "dq overwritten on its way", BACKWARD, f"{WAIT_READ}\n{OF_GROUP}  // the last one has left shared memory\n", ""
    ),
    Bug(
        "dq of the other half",
        BACKWARD,
        "along_lines<kBlockN>(ds_tile, key, row)",
        "along_lines<kBlockN>(ds_tile, key, 64 - row)",
    ),
    Bug("no delta", BACKWARD, " - (e % 2 == 0 ? delta.x : delta.y));", ");"),
    Bug("k overwritten by dk", BACKWARD, f"{OF_BOTH}  // k has been read by both\n", ""),
]

# Band masks alone: the module prepares no others. Several tiles for each block, partial and full ones.
CASES = [dict(B=1, H=2, Lq=400, Lk=400, D=64, mask="causal"), dict(B=1, H=1, Lq=200, Lk=520, D=64, mask="none")]


def attend(q, k, v, mask, dropout_p, scale):
    """The room itself: the front desk would ask why_not() of kernels that this module lacks."""
    out, lse = _Attention.apply(q, k, v, None, mask, scale, dropout_p, None, room)
    return out, lse, None


def fails(extension: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Does a check fail on this build, in one of the orders and completions?"""
    fastattn.cuda.load_host_runner(extension)
    try:
        for order, completion in itertools.product(ORDERS, SM90_COMPLETIONS):
            monkeypatch.setenv("FASTATTN_HOST_ORDER", order)
            monkeypatch.setenv("FASTATTN_HOST_ASYNC", completion)
            for case in CASES:
                p = make(**case, dtype=torch.bfloat16)
                compare(p, solve(p, attend), ("out", "lse", "dq", "dk", "dv"))
    except (AssertionError, RuntimeError):
        return True
    finally:
        fastattn.cuda.load_host_runner(None)
    return False


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTATTN_HOST_CAPABILITY", "90")
    monkeypatch.setattr(sm90, "serves", lambda *_: True)
    monkeypatch.setattr(sm90, "serves_backward", lambda *_: True)
    monkeypatch.setattr(room.short, "serves", lambda *_: False)


def build(folder: Path, copy: Path, changes: list[tuple[str, str, str]]) -> Path:
    names = {FORWARD, BACKWARD, *(file for file, _, _ in changes)}
    for name in names:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CSRC / name, copy / name)
    for file, right, wrong in changes:
        text = (copy / file).read_text()
        assert text.count(right) == 1, f"{file} has {right!r} {text.count(right)} times"
        (copy / file).write_text(text.replace(right, wrong))
    module = Path(__file__).with_name("sm90_module.cpp")
    sources = [copy / FORWARD, copy / BACKWARD, CSRC / "attention" / "bind_sm90.cpp", module]
    return host_build.build("_C", sources, folder)


def test_without_a_bug(build_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy as such passes, so it is the bug that fails below."""
    assert not fails(build(build_folder, tmp_path / "csrc", ONE_KERNEL), monkeypatch)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_is_caught(bug: Bug, build_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extension = build(build_folder, tmp_path / "csrc", [*ONE_KERNEL, (bug.file, bug.right, bug.wrong)])
    assert fails(extension, monkeypatch)
