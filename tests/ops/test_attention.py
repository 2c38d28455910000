"""Attention in every backend: the rows of the catalogue against float64, and what is special about attention."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from catalogue import (
    ALL,
    BF16,
    FP16,
    FP32,
    KERNELS,
    check,
    first,
    for_backend,
    judge,
    make,
    poisoned,
    promised_zeros,
    rows,
    sized,
    solve,
)
from layouts import far
from mask_cases import offsets, prefix

from fastattn import AttentionMask, explain
from fastattn.backends.reference import philox

full = pytest.mark.full
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # NaN in the interpreter
EVERY_BACKEND = pytest.mark.parametrize("backend", ALL)
WITH_BIAS = ("reference", "aten", "triton")


@pytest.mark.parametrize(("backend", "name"), rows("attention"))
def test_against_float64(backend: str, name: str, device: torch.device) -> None:
    p = for_backend(sized("attention", name, device), backend)
    got = check(p, backend)
    if "split" in name and backend in KERNELS:  # parts of several sizes, added up: bit for bit the same again
        again = solve(p, backend)
        assert all(torch.equal(got[result], again[result]) for result in got)


HIDDEN: list[tuple[dict[str, Any], int]] = [  # and at most this share of the scores is computed
    ({"window": (64, 64)}, 10),
    ({"key_padding": prefix([1434], 2048)}, 71),
    ({"cu_seqlens_q": offsets(102, 205, 512, 41, 614, 574)}, 25),
]


@pytest.mark.parametrize(("mask", "most"), HIDDEN, ids=range(len(HIDDEN)))
def test_what_is_hidden_costs_nothing(mask: dict[str, Any], most: int) -> None:
    q = torch.zeros(1, 8, 2048, 64)
    said = str(explain("attention", q, q, q, AttentionMask(**mask), backend="aten"))
    assert int(said.split("% of the scores")[0].split()[-1]) <= most


@pytest.mark.parametrize("backend", ["reference", "aten", "triton"])
def test_what_is_returned(backend: str, device: torch.device) -> None:
    """In this order. Of kernels aten computes the weights: with its dropout and a gradient."""
    p = make("attention", B=1, H=1, Lq=5, Lk=6, D=8, mask="causal", return_weights=True, dropout_p=0.3, device=device)
    for lse, weights in itertools.product((False, True), repeat=2):
        douts = tuple(itertools.compress(p.douts, (True, lse, weights)))
        some = p.but(return_lse=lse, return_weights=weights)._replace(douts=douts)
        got, computed_by = solve(some, backend), "aten" if weights and backend in KERNELS else backend
        assert explain(p.function, **some.arguments(), backend=backend).chosen == computed_by
        with philox.reference_dropout_rule(computed_by):
            judge(some, got)


# Of one tensor at a time, hidden from all by structure; a mask for each head with grouped heads among them.
ALONE = {"B": 2, "H": 6, "Hk": 2, "Lq": 70, "Lk": 90, "return_lse": False}
PADDINGS = {"key_padding": prefix([90, 30], 90), "query_padding": prefix([60, 70], 70)}
HEADS = {"attn_mask": (torch.arange(6) != 1)[:, None, None] | (torch.arange(90) > 20)}
HIDING: dict[str, dict[str, Any]] = {
    "paddings": {"mask": PADDINGS},
    "a mask of heads": {"mask": PADDINGS | HEADS},
    "a mask of heads, with lse": {"mask": PADDINGS | HEADS, "return_lse": True},
    "dropout": {"mask": PADDINGS, "dropout_p": 0.3},
    "a band": {"mask": {"window": (3, 0), "align": "bottom_right"}, "Lq": 90, "Lk": 40, "dtype": BF16},
}


@pytest.mark.parametrize(
    ("backend", "case", "name"),
    [
        pytest.param(b, case, name, marks=() if b == "aten" and name != "query" else full)
        for b, case, name in itertools.product(ALL, HIDING, ("query", "key", "value", "dout"))
    ],
)
def test_hidden_nan_stays_in(backend: str, case: str, name: str, device: torch.device) -> None:
    """What lengths, key and query padding, packing and bands exclude may be anything. The rows of the catalogue have it
    in all tensors at once, where what finds one cleans the others."""
    clean = make("attention", **ALONE | HIDING[case], device=device)
    dirty = poisoned(clean)
    if name == "dout":
        check(clean._replace(douts=dirty.douts), backend)
    else:
        check(clean.but(**{name: dirty.tensors[name]}), backend)


@EVERY_BACKEND
def test_gradients_of_rows_without_keys(backend: str, device: torch.device) -> None:
    """A loss gives the lse of such a row any gradient, NaN included: it reaches nothing, not even the bias. Rows that a
    matrix or a bias leaves without keys."""
    p = make("attention", mask="attn_mask", bias=(2, 1, 21, 37) if backend in WITH_BIAS else None, device=device)
    if backend in WITH_BIAS:
        p.tensors["bias"][0, 0, 3] = -torch.inf
    dout, dlse = p.douts
    empty = promised_zeros(p)["grad of query"]
    assert empty.any()
    check(p._replace(douts=(dout, dlse.masked_fill(empty, torch.nan))), backend)


@pytest.mark.parametrize(
    ("hidden_by", "backend"), [*(("attn_mask", b) for b in ALL), *(("bias", b) for b in WITH_BIAS)]
)
def test_what_a_matrix_hides_may_be_any_finite_number(backend: str, hidden_by: str, device: torch.device) -> None:
    """Keys that attn_mask or a bias of -inf alone hides must be finite, as in PyTorch; then they reach nothing, however
    large. NaN there is not promised to stay away."""
    seen = torch.ones(1, 1, 21, 37, dtype=torch.bool, device=device)
    seen[..., 9:12] = False
    seen[:, :, 4] = False
    bias = torch.zeros(seen.shape, device=device).masked_fill(~seen, -torch.inf)
    p = make("attention", H=1, device=device).but(attn_mask=seen if hidden_by == "attn_mask" else bias)
    place = torch.arange(9, 12, device=device)
    large = {name: p.tensors[name].index_fill(2, place, 1e15) for name in ("key", "value")}
    clean, same = solve(p, backend), solve(p.but(**large), backend)
    assert all(torch.equal(clean[name], same[name]) for name in clean)


@pytest.mark.parametrize("dtype", [FP32, pytest.param(BF16, marks=full)])
@pytest.mark.parametrize("backend", WITH_BIAS)
def test_bias_of_the_smallest_number(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    """finfo.min instead of -inf: in part of a row it masks. In all of a row it leaves the uniform average, and only out
    is promised of such a row: its lse is too coarse for gradients. Nothing may overflow on the way."""
    p = make("attention", mask={}, bias=(2, 2, 21, 37), bias_dtype=FP32, dtype=dtype, device=device, return_lse=False)
    p.tensors["bias"][:, :, :, 30:] = torch.finfo(FP32).min
    check(p, backend)
    p.tensors["bias"][1] = torch.finfo(FP32).min
    got = solve(p, backend)
    judge(p, got, ["out"])
    assert all(t.isfinite().all() for t in got.values())


@pytest.mark.parametrize("shift", [-300.0, pytest.param(-95.0, marks=full), pytest.param(300.0, marks=full)])
@EVERY_BACKEND
def test_scores_far_from_zero(backend: str, shift: float, device: torch.device) -> None:
    """lse below log of the smallest float32 (-88.7) and above that of the largest."""
    p = make("attention", B=1, H=1, Lq=64, Lk=70, mask="causal", device=device)
    direction = F.one_hot(torch.tensor(0), 16).to(first(p))
    moved = p.but(query=p.tensors["query"] + 40 * direction, key=p.tensors["key"] + shift / 10 * direction)
    assert (check(moved, backend)["out[1]"].sign() == torch.tensor(shift).sign()).float().mean() > 0.9
    if backend in WITH_BIAS:
        biased = p._replace(tensors=p.tensors | {"bias": torch.full((1, 1, 1, 70), shift, device=device)})
        assert (check(biased, backend)["out[1]"] * shift > 0).all()


@EVERY_BACKEND
def test_scores_beyond_the_numbers_of_float16(backend: str, device: torch.device) -> None:
    """65504 is the largest. Products of q and k that the scale makes small are right. Where scores stay large, which
    decide for one key, nothing overflows. With lse, and without, where aten has another way."""
    for return_lse in (True, False):
        p = make("attention", B=1, H=1, D=32, dtype=FP16, return_lse=return_lse, device=device)
        p = p.but(**{name: p.tensors[name] * 160 for name in ("query", "key")})
        check(p.but(scale=1e-4), backend)
        assert all(t.isfinite().all() for t in solve(p.but(scale=1.0), backend).values())


@full
@EVERY_BACKEND
def test_offsets_beyond_32_bits(backend: str, device: torch.device) -> None:
    """Of a mask; of the tensors: the property of layouts."""
    p = make("attention", B=1, H=1, Lq=20, Lk=20, mask="attn_mask", dtype=BF16, device=device)
    check(p.but(attn_mask={"attn_mask": far(p.options["attn_mask"]["attn_mask"])}), backend)
