"""Known bugs, planted one at a time in a copy of the attention's backward: a check of its results must fail on each.

The copy compiles few kernels: bfloat16, head dimension up to 64.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import host_build
import pytest
import torch
from attention_checks import Problem, compare, make, plain
from host_build import COMPLETIONS
from test_kernels_attention_backward import GRADS, backward

import fastattn.cuda
from fastattn.cuda import attention as room

COPIED = ("backward_dq.cu", "backward_dkdv.cu", "backward_rows.cu", "bias_gradient.cu", "short_backward.cu")
DISPATCH = [
    ("tile.cuh", "  dtype_switch(dtype, f);", "  f(__nv_bfloat16{});"),
    ("tile.cuh", "return f(Tf32{});", "return;"),
    ("backward.cuh", "with_head_dim(shape, [&](auto head_dim) {", "[&](auto head_dim) {"),
    ("backward.cuh", "f(t, head_dim); }); });", "f(t, head_dim); }); }(Int<64>{});"),
    ("short_backward.cu", " : f(t, Int<128>{});", " : void();"),
    ("short_backward.cu", " : with_head_dim(__half{});", " : void();"),
    ("short_backward.cu", "return tf32 ? f(Tf32{}, Int<64>{}) : f(0.0f, Int<64>{});", "return;"),
]


def problems() -> dict[str, Problem]:
    bf16 = {"B": 1, "H": 2, "D": 40, "dtype": torch.bfloat16}
    far = torch.zeros(1, 1, 70, 20)
    far[:, :, 3] = -1e8  # float32 is in steps of 8 there, and log 20 is less than half of one
    return {
        "all": make(**bf16, Hk=1, Lq=70, Lk=140, mask="attn_mask_2d", bias=(1, 1, 70, 140), dropout_p=0.3),
        "band": make(**bf16, Lq=150, Lk=140, mask={"window": (40, 20)}),
        "keys": make(**bf16, Lq=40, Lk=140, bias=(1, 2, 1, 140)),
        "far": make(**bf16, Lq=70, Lk=20).but(bias=far),
        "short": make(**bf16 | {"H": 4}, Hk=2, Lq=70, Lk=50, mask="decoder", dropout_p=0.3),
        "short dbias": make(**bf16, Lq=40, Lk=50, mask="causal", bias=(1, 2, 40, 50), bias_dtype=torch.float32),
        "short float": make(**bf16 | {"dtype": torch.float32}, Lq=40, Lk=50, mask="causal"),
        "poisoned": make(**bf16, Lq=150, Lk=140, mask="key_padding_holes"),
        "short poisoned": make(**bf16, Lq=40, Lk=90, mask="key_padding_holes"),
    }


def poison(p: Problem) -> Problem:
    """NaN in keys and values that nobody sees."""
    unseen = ~p.mask["key_padding"][:, None, :, None]
    return p.but(k=p.k.masked_fill(unseen, torch.nan), v=p.v.masked_fill(unseen, torch.nan))


class Bug(NamedTuple):
    name: str
    problem: str
    file: str
    right: str
    wrong: str


DQ, DKDV, SHORT = "backward_dq.cu", "backward_dkdv.cu", "short_backward.cu"
BUGS = [
    Bug("no delta", "band", DQ, "dp[j][e] - delta[e / 2]", "dp[j][e]"),
    Bug("no scale", "band", DQ, "dq, p.softmax_scale)", "dq, 1.0f)"),
    Bug("waits for too few copies", "band", DQ, "cp_async_wait<kStages - 1>()", "cp_async_wait<kStages>()"),
    Bug("overwrites what is read", "band", DQ, "    __syncthreads();\n    if (kStages == 1)", "    if (kStages == 1)"),
    Bug("a tile left out", "band", DQ, "i < walk.count; i++", "i + 1 < walk.count; i++"),
    Bug("dlse forgotten", "band", "backward.cuh", "delta -= p.dlse[row0 + m]", "delta -= 0.0f"),
    Bug("element mask a column off", "all", "backward.cuh", "bottom) >> (2 * j + i % 2) & 1", "bottom) >> (2 * j) & 1"),
    Bug("dropout a row off", "all", "backward.cuh", "mask.kept(first_row + query,", "mask.kept(first_row + query + 1,"),
    Bug("one head of the group", "all", DKDV, "h < (h_k + 1) * group; h++) {", "h < h_k * group + 1; h++) {"),
    Bug("dv without dropout", "all", DKDV, "s[j][e] = kept(j, e) ? s[j][e] : 0.0f;", ";"),
    Bug("dropout of another key", "all", DKDV, ">> g & 1", ">> c & 1"),
    Bug("delta of another tile", "band", DKDV, "shared.delta[stage][query(j, e)]", "shared.delta[0][query(j, e)]"),
    Bug("sums of another half", "keys", DKDV, "key_sum[e / 2] +=", "key_sum[0] +="),
    Bug("no remainder", "far", "backward_rows.cu", "log2f(sum)", "0.0f"),
    Bug("heads not summed", "all", "bias_gradient.cu", "h += heads", "h += shape.heads"),
    Bug("one share of a row's sum", "short", SHORT, "w < warps / 2; w++", "w < 1; w++"),
    Bug(
        "P read too early",
        "short",
        SHORT,
        "ds, row, key, dp);\n    __syncthreads();",
        "ds, row, key, dp);",
    ),
    Bug("chunk not waited for", "short", SHORT, ": cp_async_wait<0>();", ": cp_async_wait<1>();"),
    Bug("columns of dq left out", "short", SHORT, "column += 8 * warps", "column += 16 * warps"),
    Bug("dbias of one half", "short dbias", SHORT, "m + lane / 4 + e / 2 * 8, key = n", "m + lane / 4, key = n"),
    Bug("dbias of one head", "short dbias", SHORT, "write_dbias<float>(dbias, row0,", "write_dbias<float>(dbias, 0,"),
    Bug("dS's keys in another order", "short float", SHORT, "(n + lane % 4 * 2) * 4;", "(n + lane % 4) * 4;"),
    Bug("queries in another order", "short float", SHORT, "(from + lane % 4 * 2) * kSc", "(from + lane % 4) * kSc"),
    Bug("padding forgotten", "short poisoned", SHORT, "sees<32, true>(who", "sees<32>(who"),
    Bug("unseen keys loaded", "poisoned", DQ, " && key_is_seen(who, b, h, n)", ""),
    Bug("unseen keys loaded at all", "short poisoned", SHORT, "some |= key_is_seen(who, b, h, n)", "some = true"),
    Bug("dk of the wrong keys", "short", SHORT, "(dk, shared.ds, own_key,", "(dk, shared.ds, key,"),
]


def build(folder: Path, copy: Path, changes: list[tuple[str, str, str]]) -> Path:
    shutil.copytree(host_build.CSRC, copy, ignore=shutil.ignore_patterns("host", "*.cpp"))
    for name, right, wrong in changes:
        file = copy / "attention" / name
        text = file.read_text()
        assert text.count(right) == 1, f"{name} has {right!r} {text.count(right)} times"
        file.write_text(text.replace(right, wrong))
    sources = host_build.extension_sources()
    sources = [copy / "attention" / path.name if path.name in COPIED else path for path in sources]
    return host_build.build("_C", sources, folder)


def fails(extension: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Is a gradient of the problem off, however the copies arrive?"""
    fastattn.cuda.load_host_runner(extension)
    monkeypatch.setattr(room.sm90, "serves", lambda *_: False)
    try:
        for completion in COMPLETIONS:
            monkeypatch.setenv("FASTATTN_HOST_ASYNC", completion)
            for order in ("forward", "reverse"):
                monkeypatch.setenv("FASTATTN_HOST_ORDER", order)
                p = problems()[name]
                # A row that a bias has moved far is judged by the plain softmax, not by exp(S - lse), which errs there.
                low = plain(p) if name == "far" else None
                compare(p, backward(poison(p) if "poisoned" in name else p), GRADS, low)
    except (AssertionError, RuntimeError):
        return True
    finally:
        fastattn.cuda.load_host_runner(None)
    return False


def dispatch(problem: str) -> list[tuple[str, str, str]]:
    """Kernels of exact float32 take long to compile: only where they are asked for."""
    file, right, wrong = DISPATCH[-1]
    return [*DISPATCH[:-1], (file, right, "return f(0.0f, Int<64>{});" if problem == "short float" else wrong)]


def test_without_a_bug(build_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy as such passes, so it is the bug that fails below."""
    extension = build(build_folder, tmp_path / "csrc", dispatch("short float"))
    for name in problems():
        assert not fails(extension, name, monkeypatch), name


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_is_caught(bug: Bug, build_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extension = build(build_folder, tmp_path / "csrc", [*dispatch(bug.problem), (bug.file, bug.right, bug.wrong)])
    assert fails(extension, bug.problem, monkeypatch)
