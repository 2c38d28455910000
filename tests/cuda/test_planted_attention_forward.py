"""Known bugs, planted in a copy of the attention's forward: a check of its results must fail on each.

The copy compiles one kernel of each kind: bfloat16, head dimension up to 64.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import planting
import pytest
import torch
from attention_checks import Problem, backend_call, compare, make, solve, visible
from mask_cases import packed_and_padded, prefix
from weights_checks import ask, check

import fastattn.cuda
from fastattn.cuda import attention as backend

TILE = "attention/tile.cuh"
COPIED = [f"attention/{name}.cu" for name in ("forward", "weights", "alignment", "prepare")]
DISPATCH = [
    (TILE, "  dtype_switch(dtype, f);", "  f(__nv_bfloat16{});"),
    (TILE, "return f(Tf32{});", "return;"),
    (TILE, "  if (head_dim <= 128) return f(Int<128>{});\n  f(Int<256>{});\n", ""),
]
# Orders and completions: enough to catch every bug, and all that the copy as such must pass.
TRIES = [("forward", "lazy"), ("reverse", "eager")]


def problems() -> dict[str, Problem]:
    bf16 = {"B": 1, "H": 2, "D": 40, "dtype": torch.bfloat16}
    far = torch.zeros(1, 1, 70, 90)
    far[:, :, 3] = torch.finfo(torch.float32).min
    hidden = torch.zeros(1, 1, 70, 90).masked_fill(torch.rand(90) < 0.3, -torch.inf)
    return {
        "all": make(**bf16, Hk=1, Lq=70, Lk=140, mask="attn_mask_2d", bias=(1, 1, 70, 140), dropout_p=0.3),
        "heads": make(B=1, H=4, Hk=2, D=40, Lq=20, Lk=30, dtype=torch.bfloat16, mask="attn_mask"),
        "band": make(**bf16, Lq=150, Lk=200, mask={"window": (40, 20)}),
        "full": make(**bf16, Lq=70, Lk=200, mask={}),
        "lists": make(**bf16, Lq=150, Lk=280, mask="segments_causal"),
        "bits": make(**bf16, Lq=50, Lk=140, mask="everything"),
        "spans": make(B=2, H=1, D=40, Lq=60, Lk=140, dtype=torch.bfloat16, mask=packed_and_padded(60, 140)),
        "padding": make(**bf16, Lq=70, Lk=280, mask={"key_padding": prefix([200], 280)}),
        "far": make(**bf16, Lq=70, Lk=90).but(bias=far),
        "short": make(**bf16, Lq=100, Lk=120, mask={"key_padding": prefix([70], 120)}),
        "unseen": make(B=2, H=1, D=40, Lq=40, Lk=90, dtype=torch.bfloat16, mask="key_padding_holes"),
        "hidden by a bias": make(**bf16, Lq=70, Lk=90).but(bias=hidden),
        # For what return_weights asks besides the weights of all heads.
        "some heads": make(**{**bf16, "H": 4}, Hk=2, Lq=40, Lk=140, mask="decoder", bias=(1, 4, 1, 140), dropout_p=0.3),
        "equal weights": equals(make(**{**bf16, "H": 4}, Lq=70, Lk=200, mask="causal_bottom_right")),
    }


def equals(p: Problem) -> Problem:
    """Every key is there twice, in a tile that is visited late and in one that is visited early."""
    return p.but(k=torch.cat([p.k[:, :, :100], p.k[:, :, :100]], 2))


def poisoned(p: Problem) -> Problem:
    """NaN in keys and values that nobody sees."""
    unseen = ~visible(p)[:, : p.k.shape[1]].any(-2)[..., None]
    return p.but(k=p.k.masked_fill(unseen, torch.nan), v=p.v.masked_fill(unseen, torch.nan))


class Bug(NamedTuple):
    name: str
    problem: str
    file: str
    right: str
    wrong: str


FORWARD, PREPARE, SCORES = "attention/forward.cu", "attention/prepare.cu", "attention/scores.cuh"
WALK, WEIGHTS, ALIGNMENT = "attention/walk.cuh", "attention/weights.cu", "attention/alignment.cu"
MASK = "attention/mask.cuh"
K_IS_THERE = "    __syncthreads();  // k is there, and v was read\n"
QUAD_MAX = "fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2))"
BUGS = [
    Bug("k not waited for", "full", FORWARD, f"    cp_async_wait<0>();\n{K_IS_THERE}", K_IS_THERE),
    Bug("v overwritten", "full", FORWARD, K_IS_THERE, ""),
    Bug("k overwritten", "full", FORWARD, "    __syncthreads();  // v is there, and k was read\n", ""),
    Bug("the last partial tile not masked", "band", FORWARD, "i < walk.partial", "i + 1 < walk.partial"),
    Bug("sum not rescaled", "full", FORWARD, "row_sum[half] *= rescale", "row_sum[half] *= 1.0f"),
    Bug("accumulator not rescaled", "full", FORWARD, "+ j % 2] *= rescale;", "+ j % 2] *= BUG ? 1.0f : rescale;"),
    Bug("nothing seen yet", "lists", FORWARD, "max == -kInfinity ? 0.0f : max", "max"),
    Bug("dropout of another row", "all", FORWARD, "row + 8 * half, n0", "row + (BUG ? 0 : 8 * half), n0"),
    Bug("another key head", "heads", FORWARD, "h / (p.shape.heads / p.shape.key_heads)", "h % p.shape.key_heads"),
    Bug("lse in another unit", "full", FORWARD, "(exponent.unit * kLn2)", "kLn2"),
    Bug("unseen keys loaded", "unseen", FORWARD, "key_is_seen(who, b, h, n)", "true"),
    Bug("a tail that is seen left out", "short", WALK,
        "!some_key_is_seen<kKeys>(",
        "!(BUG ? every_key_is_seen<kKeys> : some_key_is_seen<kKeys>)("),
    Bug("tiles without a list called full", "unseen", WALK, "  walk.left = walk.partial = walk.count;\n", ""),
    Bug("padding forgotten", "unseen", MASK, "who.bits != nullptr", "false"),
    Bug("padding of another lane", "unseen", MASK, " + c] >>", " + (BUG ? 0 : c)] >>"),
    Bug("padding of the first keys", "unseen", MASK, "column % kBitBlock / 4", "0"),
    Bug("a span without its first key", "spans", MASK, "begin = span.x", "begin = span.x + BUG"),
    Bug("a span without its last key", "spans", MASK, "end = span.y;", "end = span.y - BUG;"),
    Bug("the sequence before", "spans", PREPARE, "offsets[middle] <= position", "offsets[middle] < position"),
    Bug("a window from the start", "spans", PREPARE, "row - own.y + other.y", "at"),
    Bug("queries of padding see", "spans", PREPARE, "p.padding[b * p.padding_stride_b + row]", "true"),
    Bug("a key seen by padding alone", "spans", PREPARE, "has_some(queries, from, to)", "true"),
    Bug("a key seen by other sequences", "spans", PREPARE, "to = span.y;", "to = BUG ? p.seqlen_q : span.y;"),
    Bug("queries of another warp", "short", FORWARD, "+ own * kTile", "+ (BUG ? 0 : own) * kTile"),
    Bug("rows past the end of a tile", "short", TILE,
        "% threads != 0) && at >=",
        "% threads != 0) && at - BUG * kRows * kVectors >="),
    Bug("a row's maximum over two lanes", "full", "common/softmax.cuh", QUAD_MAX, "value"),
    Bug("calls of a quad swapped", "all", "common/philox.cuh", "<< 8 * lane;", "<< 8 * (lane ^ BUG);"),
    Bug("the bias of another query", "all", SCORES, "bias(query, key)", "bias(m, key)"),
    Bug("a mask's columns swapped", "all", SCORES, "(seen >> j & 1)", "(seen >> (j ^ 1) & 1)"),
    Bug("columns past the width", "full", TILE,
        "column < x.columns && inside(row));",
        "(BUG || column < x.columns) && inside(row));"),
    Bug("weights as coarse as lse", "far", WEIGHTS, "1.0f / total :", "(BUG ? 1.0f : 1.0f / total) :"),
    Bug("another head of the mean", "some heads", WEIGHTS, "(means ? i : place)", "(means ? 0 : place)"),
    Bug("the sum for the mean", "some heads", WEIGHTS, "(means ? p.heads : 1)", "1"),
    Bug("heads one apart", "some heads", WEIGHTS, "p.head_step", "(p.head_step < 0 ? -1 : 1)"),
    Bug("q and k overwritten", "some heads", WEIGHTS, "    __syncthreads();  // q and k were read\n", ""),
    Bug("the key tile of another block", "some heads", WEIGHTS, "(adds_up ? i : static_cast<int>(blockIdx.y))", "i"),
    Bug("dropout where weights add up", "some heads", WEIGHTS, "dropout.active() && !adds_up", "dropout.active()"),
    Bug("hidden keys aligned", "some heads", ALIGNMENT, "i < walk.partial", "false"),
    Bug("an alignment without the bias", "some heads", ALIGNMENT, "p.bias.data != nullptr", "false"),
    Bug("columns of a quad mixed up", "some heads", ALIGNMENT, "n0 + j / 2 * 8 + 2 * c", "n0 + j / 2 * 8 + c"),
    Bug("half a quad compared", "some heads", ALIGNMENT, "apart < 4", "apart < 2"),
    Bug("the last of equal keys", "equal weights", ALIGNMENT, "its_key < key", "its_key > key"),
    Bug("bits in another order", "bits", MASK, "bit / 2 * 8 + word * 2", "bit / 2 * 8 + word"),
    Bug("lists without the class before", "padding", PREPARE, "+ total + __popc", "+ (BUG ? 0 : total) + __popc"),
    Bug("the end of an interval", "bits", PREPARE, "n < span.y", "n <= span.y"),
    Bug("partial tiles called full", "lists", PREPARE, "every &= word == inside;", ""),
    Bug("a bias hides nothing", "hidden by a bias", PREPARE, "bias(query, n) != -kInfinity", "true"),
]  # fmt: skip


@pytest.fixture(scope="module")
def extension(build_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("planted") / "csrc"
    planting.plant(copy, DISPATCH, [bug[2:] for bug in BUGS])
    return planting.build(build_folder, copy, COPIED)


def fails(extension: Path, bug: int, name: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Is a result of the problem off, in one of TRIES?"""
    fastattn.cuda.load_host_runner(extension)
    planting.choose(extension, bug)
    monkeypatch.setattr(backend.sm90, "serves", lambda *_: False)
    torch.manual_seed(0)
    p = problems()[name]
    try:
        for order, completion in TRIES:
            monkeypatch.setenv("FASTATTN_HOST_ORDER", order)
            monkeypatch.setenv("FASTATTN_HOST_ASYNC", completion)
            if name in ("some heads", "equal weights"):
                check_wishes(p)
                continue
            actual = solve(poisoned(p), backend_call("cuda", torch.device("cpu")), needs="")
            compare(p, actual, ("out", "weights") if name == "far" else ("out", "lse", "weights"))
            if name == "far":  # where the plain formula's lse is no better
                torch.testing.assert_close(actual.weights.float().sum(-1), torch.ones(p.shape[:3]), rtol=0, atol=0.02)
    except (AssertionError, RuntimeError):
        return True
    finally:
        fastattn.cuda.load_host_runner(None)
    return False


def check_wishes(p: Problem) -> None:
    if p.bias is None:
        keys = ask("cuda")(p, "argmax")
        assert (keys[keys >= 0] < 100).all(), "not the first of equal keys"
    check(p, ask("cuda"))


def test_without_a_bug(extension: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy as such passes, so it is the bug that fails below."""
    assert not [name for name in problems() if fails(extension, 0, name, monkeypatch)]


@pytest.mark.parametrize("bug", range(1, len(BUGS) + 1), ids=[bug.name for bug in BUGS])
def test_is_caught(bug: int, extension: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fails(extension, bug, BUGS[bug - 1].problem, monkeypatch)
