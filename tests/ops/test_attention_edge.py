"""Attention at its edges: NaN that must reach nothing, rows without keys, no rows at all, extreme scores, bad calls."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from attention_checks import (
    BACKENDS,
    BIAS_BACKENDS,
    KERNEL_BACKENDS,
    NOT_FINITE,
    NOT_FINITE_WITHOUT_BIAS,
    Attend,
    Problem,
    backend_call,
    check,
    check_not_finite,
    expected,
    make,
    make_for_not_finite,
    served,
    solve,
)
from helpers import assert_close_as_torch
from layouts import far
from mask_cases import offsets, prefix

from fastattn import AttentionMask, scaled_dot_product_attention

full = pytest.mark.full
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # NaN in the interpreter


def excluded(p: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Bool (B, Lq) and (B, Lk): queries and keys that padding, packing or the band takes out for all, alone."""
    B, H, Lq, Lk = p.shape
    structure = {name: value for name, value in p.mask.items() if name != "attn_mask"}
    rows, columns = (torch.zeros(B, n, dtype=torch.bool, device=p.q.device) for n in (Lq, Lk))
    for padding in ("query_padding", "key_padding"):
        one = {padding: structure.pop(padding, None)}
        dense = AttentionMask(**one).dense(*p.shape, p.q.device)[:, 0]
        rows, columns = rows | ~dense.any(2), columns | ~dense.any(1)
    dense = AttentionMask(**structure).dense(*p.shape, p.q.device)[:, 0]
    return rows | ~dense.any(2), columns | ~dense.any(1)


def poisoned(p: Problem) -> Problem:
    """NaN, inf and -inf in the queries and keys that are excluded, and in the gradients that arrive at such queries."""
    rows, columns = excluded(p)
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf], device=p.q.device, dtype=p.q.dtype)

    def poison(t: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        where = where[:, None, :, None] if t.dim() == 4 else where[:, None]
        return t.masked_scatter(where.expand_as(t), bad.repeat(t.numel() // 3 + 1)[: t.numel()].to(t.dtype))

    assert rows.any() or columns.any(), "this problem has nothing to poison"
    of_queries = {
        name: poison(getattr(p, name), rows) for name in ("q", "dout", "dlse") if getattr(p, name) is not None
    }
    return p.but(**of_queries, k=poison(p.k, columns), v=poison(p.v, columns))


def same_when_poisoned(p: Problem, attend: Attend) -> None:
    clean, dirty = solve(p, attend), solve(poisoned(p), attend)
    for name, a, b in zip(clean._fields, clean, dirty, strict=True):
        assert a is None or torch.equal(a, b), f"{name}: what is excluded has reached it"


# Two key tiles and two query tiles, some of them not visited.
LONG = {"B": 2, "H": 1, "Lq": 70, "Lk": 140, "D": 16}
POISONED: dict[str, dict[str, Any]] = {
    **{
        kind: {"H": 1, "D": 16, "mask": kind}
        for kind in ("key_padding", "query_padding", "window", "segments", "segments_causal", "segments_and_padding")
    },
    "decoder, bfloat16": {"H": 1, "D": 16, "mask": "decoder", "dtype": torch.bfloat16},
    "more queries than keys": {"H": 1, "Lq": 37, "Lk": 21, "D": 16, "mask": "causal_bottom_right"},
    "everything, grouped": dict(B=1, H=4, Hk=2, D=16, mask="everything", bias=(1, 4, 21, 37), dropout_p=0.3),
    "long, padded": {**LONG, "mask": {"key_padding": prefix([70, 0], 140), "query_padding": prefix([60, 70], 70)}},
    "long, window": {**LONG, "mask": {"window": (3, 0)}},
    "long, packed": {**LONG, "mask": {"cu_seqlens_q": offsets(20, 0, 50), "cu_seqlens_k": offsets(70, 5, 65)}},
}
EVERYDAY_POISON = (
    *("segments_and_padding", "more queries than keys", "everything, grouped", "long, padded", "long, window"),
)


@pytest.mark.few(3)
@pytest.mark.bug_class("T10")
@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in EVERYDAY_POISON else full) for c in POISONED])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_structure_excludes_may_be_nan(backend: str, case: str, device: torch.device) -> None:
    """What lengths, key and query padding, packing and bands exclude may be anything: it changes no bit of a result."""
    attend = backend_call(backend, device)
    p = served(make(**POISONED[case]), backend)
    moved = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in p.mask.items()}
    tensors = ("q", "k", "v", "dout", "dlse", "bias")
    p = p.but(**{n: None if getattr(p, n) is None else getattr(p, n).to(device) for n in tensors}, mask=moved)
    same_when_poisoned(p, attend)


EVERYDAY_NOT_FINITE = ("none", 29), ("none", 70), ("segments", 29), ("bias of queries", 29)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "backend, case, Lk",  # keys in one tile, and in several
    [
        pytest.param(backend, case, Lk, marks=() if (case, Lk) in EVERYDAY_NOT_FINITE else full)
        for backend, case, Lk in itertools.product(KERNEL_BACKENDS, NOT_FINITE, (29, 70))
        if backend != "cuda" or case in NOT_FINITE_WITHOUT_BIAS
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=full)])
def test_nan_and_inf_come_out(backend: str, dtype: torch.dtype, case: str, Lk: int, device: torch.device) -> None:
    check_not_finite(make_for_not_finite(case, 20, Lk, dtype=dtype, device=device), backend_call(backend, device))


@pytest.mark.parametrize(
    "hidden_by, backend", [*(("attn_mask", b) for b in BACKENDS), *(("bias", b) for b in BIAS_BACKENDS)]
)
def test_what_a_matrix_hides_may_be_any_finite_number(backend: str, hidden_by: str, device: torch.device) -> None:
    """Keys that attn_mask or a bias of -inf alone hides must be finite, as in PyTorch; then they reach nothing, however
    large. NaN there is not promised to stay away."""
    attend = backend_call(backend, device)
    p = make(H=1, D=16, mask="none", device=device)
    hidden = torch.zeros(1, 1, 21, 37, dtype=torch.bool, device=device)
    hidden[..., 9:12] = True
    hidden[:, :, 4] = True
    if hidden_by == "bias":
        p = p.but(bias=torch.zeros(hidden.shape, device=device).masked_fill(hidden, -torch.inf))
    else:
        p = p.but(mask={"attn_mask": ~hidden})
    large = {n: getattr(p, n).index_fill(2, torch.arange(9, 12, device=device), 1e15) for n in ("k", "v")}
    clean, same = solve(p, attend), solve(p.but(**large), attend)
    for name, a, b in zip(clean._fields, clean, same, strict=True):
        assert a is None or torch.equal(a, b), f"{name}: what is hidden has reached it"


@pytest.mark.bug_class("T9", "T10")
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_of_the_lse_of_rows_without_keys(backend: str, device: torch.device) -> None:
    """A loss on lse gives such a row any gradient, NaN included: it reaches nothing, not even the bias."""
    attend = backend_call(backend, device, weights=False)
    for bias in ((2, 1, 21, 37), (1, 2, 21, 1)) if backend in BIAS_BACKENDS else (None,):
        p = make(D=16, mask="attn_mask", bias=bias, device=device)
        if bias is None:
            p.mask["attn_mask"][..., 3, :] = False
        else:
            p.bias[0, 0, 3] = -torch.inf
        clean = solve(p, attend)
        dirty = solve(p.but(dlse=p.dlse.masked_fill(clean.lse == -torch.inf, torch.nan)), attend)
        for name, a, b in zip(clean._fields, clean, dirty, strict=True):
            assert a is None or torch.equal(a, b), name


@pytest.mark.bug_class("T9")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_band_that_allows_nothing(backend: str, device: torch.device) -> None:
    """Two bands that exclude each other: no key is visible, though both are said by arithmetic."""
    attend = backend_call(backend, device)
    p = make(B=1, H=1, Lq=20, Lk=50, D=16, device=device)
    mask = AttentionMask(is_causal=True) & AttentionMask(window=(0, None), align="bottom_right")
    assert mask.band_only and not mask.dense(*p.shape, device).any()
    leaves = [torch.full_like(t, torch.nan, requires_grad=True) for t in (p.q, p.k, p.v)]
    out, lse, weights = attend(*leaves, mask, 0.0, p.scale)
    torch.autograd.backward((out, lse), (torch.full_like(p.dout, torch.nan), torch.full_like(p.dlse, torch.nan)))
    assert (lse == -torch.inf).all()
    for t in (out, *([] if weights is None else [weights]), *(leaf.grad for leaf in leaves)):
        assert torch.equal(t, torch.zeros_like(t))


def out_alone(backend: str, device: torch.device) -> Attend:
    """Calls that ask for nothing but out, which have ways of their own in aten. As backend_call."""
    backend_call(backend, device)

    def attend(q, k, v, mask, dropout_p, scale):
        out = scaled_dot_product_attention(q, k, v, mask, dropout_p, scale=scale, enable_gqa=True, backend=backend)
        return out, torch.zeros(out.shape[:3], device=device, requires_grad=True), None

    return attend


@pytest.mark.few(3)
@pytest.mark.parametrize("options", [{"dropout_p": 1.0}, {"scale": 0.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_everything_dropped_and_all_scores_equal(
    backend: str, dtype: torch.dtype, options: dict[str, float], device: torch.device
) -> None:
    """Factors of 0, with which some products leave the memory as it was. As many weights as aten's blocks ask for."""
    lengths = {"Lq": 21, "Lk": 37} if backend in KERNEL_BACKENDS else {"Lq": 90, "Lk": 101}
    p = make(**lengths, D=16, dtype=dtype, mask="key_padding", dlse=False, device=device).but(**options)
    results = check(p, out_alone(backend, device), ("out", "dq", "dk", "dv"))
    assert results.out.any() == ("scale" in options)


@pytest.mark.few(8)
@pytest.mark.bug_class("T12")
@pytest.mark.parametrize("shape", [s for s in itertools.product((2, 0), (2, 0), (5, 0), (7, 0)) if 0 in s], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_lengths(backend: str, dtype: torch.dtype, shape: tuple[int, int, int, int], device: torch.device) -> None:
    options = {"dtype": dtype, "device": device, "requires_grad": True}
    ways = [(backend_call(backend, device), 0.3), *((out_alone(backend, device), p) for p in (0.0, 0.3, 1.0))]
    B, H, Lq, Lk = shape
    sizes = {"q": (B, H, Lq, 8), "k": (B, H, Lk, 8), "v": (B, H, Lk, 16)}
    biases = [torch.zeros(b, h, m, n, **options) for b, h, m, n in ((1, 1, 1, Lk), (1, H, Lq, 1), (B, 1, Lq, Lk))]
    relative_bias = torch.zeros(H, max(Lq + Lk - 1, 0), **options)
    masks = (
        None,
        AttentionMask(is_causal=True, align="bottom_right"),
        AttentionMask(key_padding=torch.ones(B, Lk, dtype=torch.bool, device=device)),
        *(AttentionMask(bias=bias) for bias in biases),
        AttentionMask(relative_bias=relative_bias),
    )
    if backend not in BIAS_BACKENDS:
        masks, biases, relative_bias = masks[:3], [], None
    for (attend, dropout_p), mask in itertools.product(ways, masks):
        leaves = {name: torch.randn(size, **options) for name, size in sizes.items()}
        out, lse, weights = attend(*leaves.values(), mask, dropout_p, 1.0)
        assert out.shape == (B, H, Lq, 16) and not out.any()
        if weights is not None:
            assert lse.shape == (B, H, Lq) and weights.shape == (B, H, Lq, Lk)
            assert Lk > 0 or (lse == -torch.inf).all()
        torch.autograd.backward((out, lse), (torch.ones_like(out), torch.ones_like(lse)))
        for name, leaf in leaves.items():
            assert leaf.grad.shape == leaf.shape and not leaf.grad.any(), name
    for bias in (*biases, *([] if relative_bias is None else [relative_bias])):
        assert bias.grad.shape == bias.shape and not bias.grad.any()


@pytest.mark.bug_class("T9")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BIAS_BACKENDS)
def test_bias_of_the_smallest_number(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    """finfo.min instead of -inf: in part of a row it masks. In all of a row it leaves the uniform average, and only out
    is promised of such a row: its lse is too coarse for gradients. Nothing may overflow on the way."""
    p = make(D=16, dtype=dtype, bias=(2, 2, 21, 37), bias_dtype=torch.float32, dlse=False, device=device)
    p.bias[:, :, :, 30:] = torch.finfo(torch.float32).min
    check(p, backend_call(backend, device))
    p.bias[1] = torch.finfo(torch.float32).min
    results = solve(p, backend_call(backend, device))
    assert_close_as_torch(results.out, *expected(p)["out"], "out")
    for name, t in results._asdict().items():
        assert t is None or t.isfinite().all(), name


@pytest.mark.bug_class("T13")
@pytest.mark.parametrize("shift", [-300.0, pytest.param(-95.0, marks=full), pytest.param(300.0, marks=full)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_far_from_zero(backend: str, shift: float, device: torch.device) -> None:
    """lse below log of the smallest float32 (-88.7) and above that of the largest."""
    p = make(B=1, H=1, Lq=64, Lk=70, D=16, mask="causal", device=device)
    direction = torch.zeros(16, device=device)
    direction[0] = 1
    moved = p.but(q=p.q + 40 * direction, k=p.k + shift / (40 * p.scale) * direction)
    results = check(moved, backend_call(backend, device))
    assert (results.lse.sign() == torch.tensor(shift).sign()).float().mean() > 0.9
    if backend in BIAS_BACKENDS:
        biased = p.but(bias=torch.full((1, 1, 1, 70), shift, device=device))
        assert (check(biased, backend_call(backend, device)).lse * shift > 0).all()


BANDS: tuple[dict[str, Any], ...] = (
    {"is_causal": True},
    {"window": (None, 0)},
    {"is_causal": True, "cu_seqlens_q": offsets(9, 12)},
)


@pytest.mark.parametrize("band", BANDS, ids=lambda band: "-".join(band))
@pytest.mark.parametrize("scale", [0.0, -0.3])
@pytest.mark.parametrize("backend", [pytest.param(b, marks=() if b == "aten" else full) for b in BACKENDS])
def test_a_band_with_a_scale_that_is_not_positive(
    backend: str, scale: float, band: dict[str, Any], device: torch.device
) -> None:
    """-inf times it would be no mask."""
    mask = {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in band.items()}
    p = make(B=1, Lq=21, Lk=21, D=16, mask=mask, dlse=False, device=device).but(scale=scale)
    check(p, out_alone(backend, device), ("out", "dq", "dk", "dv"))


@pytest.mark.parametrize("mask", ["none", pytest.param("causal", marks=full)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_beyond_the_numbers_of_float16(backend: str, mask: str, device: torch.device) -> None:
    """65504 is the largest. Products of q and k that the scale makes small are right. Where scores stay large, which
    decide for one key, nothing overflows."""
    p = make(B=1, H=1, D=32, dtype=torch.float16, mask=mask, dlse=False, device=device)
    p = p.but(q=p.q * 160, k=p.k * 160)
    for attend in (backend_call(backend, device), out_alone(backend, device)):
        check(p.but(scale=1e-4), attend, ("out", "dq", "dk", "dv"))
        results = solve(p.but(scale=1.0), attend)
        assert all(t.isfinite().all() for t in (results.out, results.dq, results.dk, results.dv))


@pytest.mark.parametrize("backend", BACKENDS)
def test_long_rows_keep_float32_sums(backend: str, device: torch.device) -> None:
    """The sums of the softmax and of the values run in float32."""
    for dtype in (torch.bfloat16, torch.float16):
        p = make(B=1, H=1, Lq=16, Lk=1024, D=16, dtype=dtype, device=device)
        check(p.but(v=p.v + 1), backend_call(backend, device, weights=False))


@pytest.mark.bug_class("T1")
@pytest.mark.full
@pytest.mark.parametrize("wide", ["attn_mask", "k", "v", "q"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_beyond_32_bits(backend: str, wide: str, device: torch.device) -> None:
    attend = backend_call(backend, device)
    p = make(B=1, H=1, Lq=20, Lk=20, D=16, mask="attn_mask", dtype=torch.bfloat16, device=device)
    t = p.mask["attn_mask"] if wide == "attn_mask" else getattr(p, wide)
    check(p.but(**({"mask": {wide: far(t)}} if wide == "attn_mask" else {wide: far(t)})), attend)


def q(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(*(shape or (2, 4, 5, 8)), **options)


@pytest.mark.parametrize(
    "other", [{}, {"is_causal": True}, {"bias": torch.arange(9.0)}], ids=lambda o: "".join(o) or "alone"
)
def test_padding_that_hides_nothing_costs_nothing(other: dict[str, Any]) -> None:
    """On a CPU aten leaves it out: the result is that without it, bit for bit, until the mask is edited."""
    p = make(H=2, Lq=9, Lk=9, D=16, mask="none", device=torch.device("cpu"))
    padding = torch.ones(2, 9, dtype=torch.bool)
    mask, without = AttentionMask(key_padding=padding, **other), AttentionMask(**other)

    def attend(mask: AttentionMask, backend: str = "aten") -> torch.Tensor:
        return scaled_dot_product_attention(p.q, p.k, p.v, mask, backend=backend)

    assert torch.equal(attend(mask), attend(without))
    padding[:, 3] = False
    torch.testing.assert_close(attend(mask), attend(mask, "reference"), rtol=0, atol=1e-6)
    assert not torch.allclose(attend(mask), attend(without), atol=1e-3)
