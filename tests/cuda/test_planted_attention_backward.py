"""Known bugs, planted in a copy of the attention's backward: a check of its results must fail on each.

The copy compiles few kernels: bfloat16, head dimension up to 64.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import planting
import pytest
import torch
from attention_checks import Problem, compare, make, plain
from mask_cases import packed_and_padded, scattered
from test_kernels_attention_backward import GRADS, backward

import fastattn.cuda
from fastattn.cuda import attention as backend

DQ, DKDV = (f"attention/{name}.cu" for name in ("backward_dq", "backward_dkdv"))
SHORT, WIDE, BOTH = (f"attention/short_backward{end}" for end in (".cu", "_wide.cu", ".cuh"))
ROWS, BIAS, SHARED = "attention/backward_rows.cu", "attention/bias_gradient.cu", "attention/backward.cuh"
MASK = "attention/mask.cuh"
DISPATCH = [
    ("attention/tile.cuh", "  dtype_switch(dtype, f);", "  f(__nv_bfloat16{});"),
    ("attention/tile.cuh", "return f(Tf32{});", "return;"),
    (SHARED, "with_head_dim(shape, [&](auto head_dim) {", "[&](auto head_dim) {"),
    (SHARED, "f(t, head_dim); }); });", "f(t, head_dim); }); }(Int<64>{});"),
    (SHORT, "    if (head_dim <= 128) f(t, Int<128>{});\n", ""),
    (SHORT, "  if (dtype == DType::float16) with_head_dim(__half{});\n", ""),
    (
        WIDE,
        "with_type(p.dtype, p.tf32, [&](auto t) {",
        "[&](auto f) { p.dtype == DType::float32 ? f(0.0f) : f(__nv_bfloat16{}); }([&](auto t) {",
    ),
]
# Orders and completions: enough to catch every bug, and all that the copy as such must pass.
TRIES = [("forward", "lazy"), ("reverse", "eager")]


def problems() -> dict[str, Problem]:
    bf16 = {"B": 1, "H": 2, "D": 40, "dtype": torch.bfloat16}
    far = torch.zeros(1, 1, 70, 20)
    far[:, :, 3] = -1e8  # float32 is in steps of 8 there, and log 20 is less than half of one
    few, apart = scattered(17, 33, 2, seed=13), {"attn_mask": scattered(3, 300, 2, seed=16)}
    return {
        "all": make(**bf16, Hk=1, Lq=70, Lk=140, mask="attn_mask_2d", bias=(1, 1, 70, 140), dropout_p=0.3),
        "band": make(**bf16, Lq=150, Lk=140, mask={"window": (40, 20)}),
        "keys": make(**bf16, Lq=40, Lk=140, bias=(1, 2, 1, 140)),
        "far": make(**bf16, Hk=1, Lq=70, Lk=20).but(bias=far),
        "short far": make(**bf16, Lq=70, Lk=20).but(bias=far),
        "short": make(**bf16 | {"H": 4}, Hk=2, Lq=70, Lk=50, mask="decoder", dropout_p=0.3),
        "short dbias": make(**bf16, Lq=40, Lk=50, mask="causal", bias=(1, 2, 40, 50), bias_dtype=torch.float32),
        "short keys": make(**bf16, Lq=70, Lk=50, bias=(1, 2, 1, 50)),
        "wide": make(**bf16 | {"H": 4, "D": 80}, Hk=2, Lq=70, Lk=50, mask="decoder", dropout_p=0.3),
        "wide keys": make(**bf16 | {"D": 80}, Lq=40, Lk=50, bias=(1, 2, 1, 50)),
        "wide poisoned": make(**bf16 | {"D": 80}, Lq=40, Lk=90, mask="key_padding_holes"),
        "wide float": make(**bf16 | {"dtype": torch.float32}, Lq=40, Lk=50, mask="causal"),
        "one key": make(**bf16, Lq=70, Lk=140, mask={"attn_mask": scattered(70, 140, 1)}, dropout_p=0.3),
        "two keys": make(**bf16 | {"D": 8}, Hk=1, Lq=17, Lk=33, mask={"attn_mask": few}, dropout_p=0.3, seed=13),
        "few queries": make(**bf16 | {"H": 1, "D": 64}, Lq=3, Lk=300, mask=apart, dropout_p=0.5, seed=16),
        "packed": make(**bf16 | {"B": 2}, Lq=150, Lk=140, mask=packed_and_padded(150, 140)),
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


BUGS = [
    Bug("no delta", "band", DQ,
        "dp[j][e], delta[e / 2], dlse[e / 2])",
        "dp[j][e], BUG ? 0.0f : delta[e / 2], dlse[e / 2])"),
    Bug("no scale", "band", DQ, "dq, p.softmax_scale)", "dq, BUG ? 1.0f : p.softmax_scale)"),
    Bug("waits for too few copies", "band", DQ, "cp_async_wait<kStages - 1>()", "cp_async_wait<kStages>()"),
    Bug("overwrites what is read", "band", DQ,
        "__syncthreads();\n    if (kStages",
        "if (!BUG) __syncthreads();\n    if (kStages"),
    Bug("a tile left out", "band", DQ, "i < steps; i++", "i < steps - BUG; i++"),
    Bug("dlse forgotten", "band", SHARED, "delta -= p.dlse[row0 + m]", "delta -= 0.0f"),
    Bug("dlse of float32 forgotten", "wide float", SHARED, "gradient + probability * dlse", "gradient"),
    Bug("delta of one key rounded", "one key", SHARED, "some |= probability(j) > kAll;", ""),
    Bug("delta of one key without dlse", "one key", DQ, "p.dlse != nullptr && !kDlseApart<T>", "false"),
    Bug("delta of one key kept to itself", "one key", DQ, "if (c == 0) p.delta", "if (c == 0 && !BUG) p.delta"),
    Bug("delta of one tile rounded", "two keys", SHARED, "walk.count == 1", "false"),
    Bug("delta of few queries rounded", "few queries", SHARED, "count <= kFew", "false"),
    Bug("delta of few queries is that of a tile", "few queries", DQ, "i + 1 == ahead", "i + (BUG ? 2 : 1) == ahead"),
    Bug("element mask a column off", "all", SHARED, "(2 * j + i % 2) & 1", "(2 * j + (BUG ? 0 : i % 2)) & 1"),
    Bug("dropout a row off", "all", SHARED, "first_row + query,", "first_row + query + BUG,"),
    Bug("one head of the group", "all", DKDV,
        "h < (h_k + 1) * group; h++) {",
        "h < (BUG ? h_k * group + 1 : (h_k + 1) * group); h++) {"),
    Bug("dv without dropout", "all", DKDV, "s[j][e] = kept(j, e) ? s[j][e] : 0.0f;", ""),
    Bug("dropout of another key", "all", DKDV, ">> g & 1", ">> (BUG ? c : g) & 1"),
    Bug("delta of another tile", "band", DKDV, "shared.delta[stage][query(j, e)]", "shared.delta[0][query(j, e)]"),
    Bug("sums of another half", "keys", DKDV, "key_sum[e / 2] +=", "key_sum[BUG ? 0 : e / 2] +="),
    Bug("no remainder", "far", ROWS, "log2f(sum)", "0.0f"),
    Bug("heads not summed", "all", BIAS, "h += heads", "h += shape.heads"),
    Bug("one share of a row's sum", "short", SHORT, "w < warps / 2; w++", "w < (BUG ? 1 : warps / 2); w++"),
    Bug("P read too early", "short", SHORT, "key, dp);\n    __sync", "key, dp);\n    if (!BUG) __sync"),
    Bug("chunk not waited for", "short", SHORT,
        ": cp_async_wait<0>();",
        ": BUG ? cp_async_wait<1>() : cp_async_wait<0>();"),
    Bug("columns of dq left out", "short", SHORT, "column += 8 * warps", "column += 16 * warps"),
    Bug("sums of one half of the queries", "short keys", SHORT,
        "+ shared.key_sum[1]",
        "+ shared.key_sum[BUG ? 0 : 1]"),
    Bug("sums of the last queries", "short keys", SHORT, "= m0 == 0 ? sum", "= BUG || m0 == 0 ? sum"),
    Bug("dbias of one half", "short dbias", BOTH, "+ e / 2 * 8, key = n", "+ (BUG ? 0 : e / 2 * 8), key = n"),
    Bug("dbias of one head", "short dbias", SHORT, "<float>(dbias, row0", "<float>(dbias, BUG ? 0 : row0"),
    Bug("no remainder for dbias", "short far", SHORT, "sum > 0.0f ? log2f(sum) : 0.0f", "0.0f"),
    Bug("delta of half the queries for dbias", "short far", SHORT, "warp < 2 &&", "warp < (BUG ? 1 : 2) &&"),
    Bug("dS's keys in another order", "wide float", BOTH, "(key + lane % 4 * 2)", "(key + lane % 4 * (2 - BUG))"),
    Bug("queries in another order", "wide float", BOTH, "(row + lane % 4 * 2)", "(row + lane % 4 * (2 - BUG))"),
    Bug("slice not waited for", "wide", WIDE,
        "step++) {\n        cp_async_wait<0>();",
        "step++) {\n        if (!BUG) cp_async_wait<0>();"),
    Bug("scores in the place of slices", "wide", WIDE,
        "__syncthreads();  // the slices",
        "if (!BUG) __syncthreads();  // the slices"),
    Bug("dS read too early", "wide", WIDE, "own, 0, dp);\n        __sync", "own, 0, dp);\n        if (!BUG) __sync"),
    Bug("a head before its time", "wide", WIDE, "__syncthreads();  // also", "if (!BUG) __syncthreads();  // also"),
    Bug("sums of the last head", "wide", WIDE, "if (!is_first)", "if (!BUG && !is_first)"),
    Bug("keys that other queries see", "wide", WIDE, "shared.visible[m / 16]", "shared.visible[BUG ? 0 : m / 16]"),
    Bug("sums of one warp", "wide keys", WIDE, "w < rows / 16", "w < (BUG ? 1 : rows / 16)"),
    Bug("unseen keys in slices", "wide poisoned", WIDE, "return takes_part[row]", "return BUG || takes_part[row]"),
    Bug("padding forgotten", "short poisoned", MASK, "who.bits != nullptr", "false"),
    Bug("a span without its first row", "packed", MASK, "begin = span.x", "begin = span.x + BUG"),
    Bug("a span without its last row", "packed", MASK, "end = span.y;", "end = span.y - BUG;"),
    Bug("spans of queries for keys", "packed", DKDV, "p.by_key;", "BUG ? p.by_query : p.by_key;"),
    Bug("unseen keys loaded", "poisoned", DQ, "key_is_seen(who, b, h, n)", "true"),
    Bug("unseen keys loaded at all", "short poisoned", BOTH, "some |= key_is_seen(who, b, h, n)", "some = true"),
    Bug("dk of the wrong keys", "short", SHORT, "shared.ds, own_key", "shared.ds, BUG ? key : own_key"),
]  # fmt: skip


@pytest.fixture(scope="module")
def extension(build_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("planted") / "csrc"
    planting.plant(copy, DISPATCH, [bug[2:] for bug in BUGS])
    return planting.build(build_folder, copy, [DQ, DKDV, SHORT, WIDE, ROWS, BIAS])


def fails(extension: Path, bug: int, name: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Is a gradient of the problem off, in one of TRIES?"""
    fastattn.cuda.load_host_runner(extension)
    planting.choose(extension, bug)
    monkeypatch.setattr(backend.sm90, "serves", lambda *_: False)
    short = name.startswith(("short", "wide"))
    monkeypatch.setattr(backend.short, "serves", lambda *_: short)
    p = problems()[name]
    try:
        for order, completion in TRIES:
            monkeypatch.setenv("FASTATTN_HOST_ORDER", order)
            monkeypatch.setenv("FASTATTN_HOST_ASYNC", completion)
            # A row that a bias has moved far is judged by the plain softmax, not by exp(S - lse), which errs there.
            low = plain(p) if name.endswith("far") else None
            compare(p, backward(poison(p) if "poisoned" in name else p), GRADS, low)
    except (AssertionError, RuntimeError):
        return True
    finally:
        fastattn.cuda.load_host_runner(None)
    return False


def test_without_a_bug(extension: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy as such passes, so it is the bug that fails below."""
    assert not [name for name in problems() if fails(extension, 0, name, monkeypatch)]


@pytest.mark.parametrize("bug", range(1, len(BUGS) + 1), ids=[bug.name for bug in BUGS])
def test_is_caught(bug: int, extension: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fails(extension, bug, BUGS[bug - 1].problem, monkeypatch)
