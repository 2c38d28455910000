"""Every op but attention in every backend against float64, forward and backward, and its limits.

Of attention to queries: test_attention.py. Small calls with any options are in test_fuzz.py; the full tier here has the
sizes that are too large for it.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from checks import ACTIVATIONS, FORMULAS, check, gradcheck, skip_without, solve
from helpers import backends_of

from fastattn.check import cases
from fastattn.check.cases import Problem

Sizes = dict[str, Any]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
REDUCTIONS = ("none", "mean", "sum")
SMOOTHED = {"label_smoothing": 0.1, "logit_scale": 0.4}


def norms() -> tuple[list[Sizes], list[Sizes]]:
    """Several blocks, a ragged last one, several turns of a persistent one; narrow rows that share a warp; rows wider
    than a warp's; one row; odd rows wider than 8192, from where on backwards read their rows twice. Mean 1000, variance
    1: E[z^2] - mean^2 would keep two or three digits of float32's seven. A standard deviation a hundredth of eps: where
    eps is added to it, it is most of the sum."""
    dropped = {"dropout_p": 0.3, "x_bias": True}
    everyday = [
        {"rows": (37,), "hidden": 48, **dropped},
        {"rows": (37,), "hidden": 48, **dropped, "rms": True, "mean": 0.5},
        {"rows": (300,), "hidden": 7, "residual": False},
        {"rows": (5,), "hidden": 1030, "dropout_p": 0.3, "rms": True, "residual": False},
        {"rows": (9,), "hidden": 520, "mean": 1e3},
        {"rows": (37,), "hidden": 72, **dropped, "dtype": BF16},
        {"rows": (37,), "hidden": 72, "x_bias": True, "dtype": FP16, "weight_dtype": FP32},
        {"rows": (37,), "hidden": 48, **dropped, "eps_on_std": True},
        {"rows": (9,), "hidden": 520, "residual": False, "eps_on_std": True, "std": 1e-8},
    ]
    full = [
        {"rows": (rows,), "hidden": hidden, "dropout_p": p, "residual": residual, "x_bias": x_bias, "rms": rms}
        for rows, hidden in ((13, 513), (5, 1030))
        for p, residual, x_bias, rms in (
            (0.0, True, True, False), (0.3, True, False, True), (0.3, False, True, False), (0.0, False, False, True)
        )
    ]  # fmt: skip
    full += [
        {"rows": (2,), "hidden": 3001, **dropped, "dtype": FP16},
        {"rows": (2,), "hidden": 8201, **dropped},
        {"rows": (2,), "hidden": 16384, **dropped, "rms": True, "dtype": BF16},
    ]
    full += [
        {"rows": (rows,), "hidden": hidden, "dropout_p": p, "x_bias": True, "eps_on_std": True, "dtype": dtype}
        for rows, hidden in ((300, 2), (13, 513), (2, 8201), (2, 16384))
        for p, dtype in ((0.3, FP32), (0.0, BF16), (0.3, FP16))
    ]
    return [sizes | {"return_sum": True} for sizes in everyday], [sizes | {"return_sum": True} for sizes in full]


def feed_forwards() -> tuple[list[Sizes], list[Sizes]]:
    """Several tiles each way, ragged; widths that no tile divides; one token."""
    wide = {"dropout_p": 0.3, "tokens": (270,), "d": 33, "d_ff": 150, "d_out": 20}
    everyday = [
        {"activation": "relu", "dropout_p": 0.3},
        {"activation": "gelu", "dropout_p": 0.3, "dtype": BF16},
        {"activation": "geglu_tanh", "has_bias": False},
        {"activation": "swiglu", "dropout_p": 0.3, "dtype": FP16},
        {"activation": "relu", **wide},
        {"activation": "silu", "dropout_p": 0.3, "tokens": (1,), "d": 33, "d_ff": 257, "d_out": 129},
    ]
    full: list[Sizes] = [
        {"activation": a, "dropout_p": 0.3, "tokens": (tokens,), "d": d, "d_ff": d_ff, "d_out": d_out, "dtype": dtype}
        for a, dtype in (("relu", BF16), ("geglu_tanh", FP32))
        for tokens, d, d_ff, d_out in ((270, 72, 136, 40), (1, 33, 257, 129), (3, 50, 129, 65))
    ]
    return everyday, full


def losses() -> tuple[list[Sizes], list[Sizes]]:
    """One class and one token; odd counts; a block of 4096 classes and a ragged second one."""
    everyday = [
        {"reduction": "none", **SMOOTHED},
        {"reduction": "mean", "smooth_over": "others", **SMOOTHED},
        {"reduction": "sum", "has_bias": False},
        {"reduction": "mean", "tokens": (60,), "dtype": BF16, **SMOOTHED},
        {"reduction": "none", "tokens": (60,), "dtype": FP16, **SMOOTHED},
        {"reduction": "mean", "tokens": (1,), "d": 5, "classes": 1, "ignore_index": -100},
        # Of few numbers the formula's largest error may be small by accident.
        {"reduction": "none", "tokens": (3,), "d": 96, "classes": 5001, **SMOOTHED},
        *({"reduction": reduction, "d": 0} for reduction in REDUCTIONS),
    ]
    full: list[Sizes] = [
        {"reduction": reduction, "tokens": (6,), "classes": 8200, "smooth_over": over, **SMOOTHED}
        for reduction, over in (("none", "others"), ("mean", "all"))
    ]
    return everyday, full


def decoding() -> tuple[list[Sizes], list[Sizes]]:
    one = {"heads": 1, "heads_k": 1}
    everyday = [
        {"ancestors": True, "lengths": [37, 20]},
        {"rows": 1, "lengths": [5, 37], "queries": 5, "heads": 4, "heads_k": 2},
        {"lengths": [1, 0], "head_dim": 40, "value_dim": 24},
        {"rows": 1, "queries": 2, "positions": 70, "head_dim": 256, "value_dim": 16},
        {"queries": 1, "positions": 300, "heads": 3, "heads_k": 1, "dtype": BF16},
        {"ancestors": True, "queries": 5, "positions": 70, "head_dim": 64, "dtype": FP16},
        {"ancestors": True, "rows": 7, "queries": 2, "batch": 1, "positions": 700, **one, "dtype": BF16},
        {"lengths": [0, 0]},
        {"queries": 1, "positions": 700, **one, "lengths": [40, 0]},  # one program of several has nothing to read
        {"scale": -0.7},
        {"rows": 3, "heads": 4, "heads_k": 2, "bias": 4},
    ]
    rows = [{"queries": 1, "rows": 1}, {"queries": 5, "rows": 1}, {"queries": 4}, {"queries": 5, "ancestors": True}]
    full: list[Sizes] = [
        {"head_dim": d, "positions": positions, "dtype": dtype, **some, **heads}
        for some in (*rows, {"queries": 40, "rows": 1})
        for d, positions in ((128, 130), (256, 17))
        for dtype in (FP32, BF16)
        for heads in ({}, {"heads": 8, "heads_k": 2, "lengths": [positions, positions // 2]})
    ]
    return everyday, full


CASES = {
    "add_layer_norm": norms(),
    "feed_forward": feed_forwards(),
    "linear_cross_entropy": losses(),
    "decode_attention": decoding(),
}


def make(op: str, device: torch.device, **sizes: Any) -> Problem:
    p = getattr(cases, op)(device=device, **sizes)
    if sizes.get("reduction", "none") == "none":
        return p
    return p._replace(douts=(torch.tensor(1.7, device=device),))  # a drawn one decides how the formula's terms round


@pytest.mark.few(60)
@pytest.mark.bug_class("T11", "T13")
@pytest.mark.parametrize(
    ("backend", "op", "sizes"),
    [
        pytest.param(backend, op, sizes, marks=marks, id=f"{backend}-{op}-{sizes}")
        for op, (everyday, full) in CASES.items()
        for backend in backends_of(op)
        for some, marks in ((everyday, ()), (full, pytest.mark.full))
        for sizes in some
    ],
)
def test_against_float64(backend: str, op: str, sizes: Sizes, device: torch.device) -> None:
    p = make(op, device, **sizes)
    check(p, backend)
    if sizes.get("dtype", FP32) != FP32 and "x_bias" in p.tensors:  # in float32, another dtype
        check(p.but(x_bias=p.tensors["x_bias"].float()), backend)


GRADCHECK: list[tuple[str, Sizes]] = [
    *(
        ("add_layer_norm", {"rows": (3,), "hidden": 5, "x_bias": True, **variant, **some})
        for variant in ({}, {"rms": True}, {"eps_on_std": True})
        for some in ({"dropout_p": 0.3, "return_sum": True}, {"residual": False, "return_sum": True})
    ),
    *(
        ("feed_forward", {"activation": a, "tokens": (3,), "d": 4, "d_ff": 5, "d_out": 3, "dropout_p": 0.3})
        for a in ACTIVATIONS
    ),
    *(
        ("linear_cross_entropy", {"reduction": r, "tokens": (5,), "d": 4, "classes": 6, **SMOOTHED})
        for r in REDUCTIONS
    ),
]  # fmt: skip


@pytest.mark.few(14)
@pytest.mark.parametrize(("op", "sizes"), GRADCHECK, ids=lambda value: str(value))
@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_float64_and_gradcheck(backend: str, op: str, sizes: Sizes, device: torch.device) -> None:
    gradcheck(make(op, device, **sizes, dtype=torch.float64), backend)


EMPTY: list[tuple[str, tuple[int, ...], Sizes]] = [  # the op, the leading dimensions of its result, arguments
    *(("add_layer_norm", rows, {"rows": rows, "x_bias": True, "return_sum": True}) for rows in ((0,), (2, 0))),
    *(("feed_forward", tokens, {"activation": "swiglu", "tokens": tokens}) for tokens in ((0,), (3, 0))),
    *(("linear_cross_entropy", t, {"reduction": r, "tokens": t}) for t in ((0,), (3, 0)) for r in REDUCTIONS),
]


@pytest.mark.bug_class("T12")
@pytest.mark.parametrize(
    ("backend", "op", "shape", "sizes"), [(b, *case) for case in EMPTY for b in backends_of(case[0])], ids=str
)
def test_no_rows(backend: str, op: str, shape: tuple[int, ...], sizes: Sizes, device: torch.device) -> None:
    """Gradients are 0. So is a sum of no losses; the mean of none is NaN, as in torch."""
    for dropout in [{}] if op == "linear_cross_entropy" else [{"dropout_p": p} for p in (0.0, 0.5, 1.0)]:
        got = solve(make(op, device, **sizes, **dropout), backend)
        reduction = sizes.get("reduction", "none")
        assert got["out"].shape[: len(shape)] == (shape if reduction == "none" else ())
        assert got["out"].isnan().all() if reduction == "mean" else not got["out"].any()
        assert not any(t.any() for name, t in got.items() if name.startswith("grad"))


DROPPED: list[tuple[str, Sizes]] = [
    *(
        ("add_layer_norm", {"rows": (5,), "hidden": 24, "residual": residual, "return_sum": True, **variant})
        for variant in ({}, {"rms": True}, {"eps_on_std": True}, {"x_bias": True})
        for residual in (True, False)
    ),
    *(("feed_forward", {"activation": activation, "tokens": (5,)}) for activation in ("relu", "swiglu")),
]


@pytest.mark.few(10)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize(("backend", "op"), [(b, op) for op in dict(DROPPED) for b in backends_of(op)])
def test_everything_dropped(backend: str, op: str, dtype: torch.dtype, device: torch.device) -> None:
    """The result is the last bias, or that of the residual; what is dropped gets the gradient 0, also where float16's
    gradient of the sum is inf."""
    for sizes in (sizes for name, sizes in DROPPED if name == op):
        p = make(op, device, **sizes, dropout_p=1.0, dtype=dtype)
        outputs = [t for name, t in cases.solve(p, FORMULAS[p.op]).items() if name.startswith("out")]
        got = solve(p._replace(douts=tuple(1024 * torch.randn_like(t) for t in outputs)), backend)
        assert all(t.isfinite().all() for name, t in got.items() if name in ("out", "grad of weight"))
        with_gradient = {"grad of bias2"} if op == "feed_forward" else {"grad of bias"}
        if sizes.get("residual"):
            assert torch.equal(got["out[1]"], p.tensors["residual"])
            with_gradient |= {"grad of residual", "grad of weight"}
        else:
            bias = p.tensors.get("bias2", p.tensors.get("bias", torch.zeros_like(got["out"])))
            assert torch.equal(got["out"], bias.expand_as(got["out"]))
            assert "out[1]" not in got or not got["out[1]"].any()
        grads = {name: t for name, t in got.items() if name.startswith("grad")}
        assert not [name for name, t in grads.items() if name not in with_gradient and t.any()]


@pytest.mark.full
@pytest.mark.parametrize(
    "multiprocessors, op, sizes",
    [
        (8, "add_layer_norm", {"rows": (40,), "hidden": 1030}),
        (8, "add_layer_norm", {"rows": (170,), "hidden": 264}),
        (9, "add_layer_norm", {"rows": (170,), "hidden": 264}),
    ],
)
def test_triton_weight_gradients_of_many_programs(
    multiprocessors: int, op: str, sizes: Sizes, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One, whole and broken groups of programs that add their sums up in the launch; a wide row's, in another."""
    skip_without("triton", op, device)
    backward = importlib.import_module("fastattn.kernels.add_layer_norm.backward")
    monkeypatch.setattr(backward, "multiprocessors", lambda x: multiprocessors)
    p = make(op, device, **sizes, **({"x_bias": True, "return_sum": True} if op == "add_layer_norm" else {}))
    first, again = check(p, "triton"), solve(p, "triton")
    assert all(torch.equal(first[name], again[name]) for name in first)
