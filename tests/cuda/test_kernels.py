"""What is special about the CUDA kernels of all ops but attention: sizes at which they switch, warp orders, alignment.

They run on the CPU through csrc/emulator, and on a GPU where there is one. conftest.py puts guard zones around what
they write. What every backend must do: tests/ops.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checks import ACTIVATIONS, check
from emulator_build import ORDERS
from torch import Tensor

from fastattn.backends import load_backend, unsupported_reason
from fastattn.backends.calls import FeedForwardCall, NormCall
from fastattn.backends.cuda import add_layer_norm as norm
from fastattn.backends.cuda import feed_forward
from fastattn.backends.reference import philox
from fastattn.check import cases
from fastattn.check.cases import Problem
from fastattn.ops.feed_forward import _FeedForward

FLOAT32, BFLOAT16, FLOAT16 = DTYPES = torch.float32, torch.bfloat16, torch.float16
full = pytest.mark.full
Call = tuple[str, dict[str, Any]]  # a function of fastattn/check/cases.py and its arguments


def make(call: Call, device: torch.device) -> Problem:
    op, arguments = call
    return getattr(cases, op)(**arguments, device=device)


# --- the tables: each op's sizes on both sides of every switch --------------------------------------------------------


def layer_norm(rows: int, hidden: int, **options: Any) -> Call:
    options = {"x_bias": True, "dropout_p": 0.3, "return_sum": True, "eps": 1e-2} | options
    return "add_layer_norm", {"rows": (rows,), "hidden": hidden, **options}


# x, and weight and bias
PAIRS = [(FLOAT32, FLOAT32), (BFLOAT16, FLOAT32), (BFLOAT16, BFLOAT16), (FLOAT16, FLOAT32), (FLOAT16, FLOAT16)]
PAIRS = [{"dtype": dtype, "weight_dtype": weight_dtype} for dtype, weight_dtype in PAIRS]
# Chunks and warps of a row, forward and backward; vectors and single elements. From 8193 on x_bias has no sum.
WIDTHS = (1, 7, 8, 256, 264, 520, 1000, 1032, 2048, 4104, 8192, 8200, 16383, 16384)
NORM = [
    *(layer_norm(5, hidden, x_bias=hidden % 16 > 0) for hidden in (100, 512, 1024, 3001)),
    layer_norm(9, 1040, dropout_p=0.0),
    layer_norm(37, 64, dtype=BFLOAT16, weight_dtype=FLOAT32, residual=False, dropout_p=0.0),
    layer_norm(37, 132, dtype=BFLOAT16, return_sum=False),
    layer_norm(37, 72, rms=True),
    layer_norm(5, 500, rms=True, dtype=BFLOAT16, residual=False, x_bias=False, return_sum=False),
    layer_norm(37, 72, eps_on_std=True),
    layer_norm(5, 500, eps_on_std=True, dtype=FLOAT16, residual=False, x_bias=False, return_sum=False),
]
NORM_FULL = [
    *(layer_norm(5 if hidden < 4096 else 2, hidden, x_bias=x_bias) for hidden in WIDTHS for x_bias in (True, False)),
    *(layer_norm(9, hidden, **pair) for pair in PAIRS for hidden in (72, 500, 1040)),
    *(layer_norm(3, 16384, **pair, x_bias=x_bias) for pair in PAIRS for x_bias in (True, False)),
    *(
        layer_norm(37, hidden, dtype=BFLOAT16, weight_dtype=FLOAT32, dropout_p=p, residual=residual, return_sum=z)
        for hidden, p, residual, z in itertools.product((64, 132), (0.0, 0.5), (True, False), (True, False))
    ),
    *(
        layer_norm(rows, hidden, **pair, **variant, x_bias=x_bias, residual=residual)
        for rows, hidden, x_bias, residual in (
            (37, 72, True, True),
            (5, 500, False, False),
            (300, 7, False, True),
            (3, 2056, True, True),
            (2, 16384, False, True),
        )
        for pair in PAIRS
        for variant in ({"rms": True}, {"eps_on_std": True})
    ),
]

# Several blocks each way, all of them ragged; in vectors and, of 299 columns, element by element.
HIDDEN = {"tokens": (150,), "d": 72, "d_out": 104}


EVERYDAY: list[Call] = [
    *NORM,
    *(
        ("feed_forward", {**HIDDEN, "activation": activation, "d_ff": d_ff, "dropout_p": p, "dtype": dtype})
        for activation in ("relu", "swiglu")
        for d_ff, dtype, p in ((296, BFLOAT16, 0.3), (299, BFLOAT16, 0.3), (296, FLOAT16, 0.0))
    ),
]
FULL: list[Call] = [
    *NORM_FULL,
    *(
        ("feed_forward", {**HIDDEN, "activation": activation, "d_ff": d_ff, "dropout_p": p, "dtype": dtype})
        for activation in ACTIVATIONS
        for dtype, p in ((BFLOAT16, 0.3), (FLOAT16, 0.0))
        for d_ff in (296, 299)
    ),
]


def name_of(value: Any) -> str:
    return "-".join(map(str, [value[0], *value[1].values()])).replace("torch.", "")


@pytest.mark.parametrize("call", [*EVERYDAY, *(pytest.param(call, marks=full) for call in FULL)], ids=name_of)
def test_against_float64(call: Call, device: torch.device) -> None:
    p = make(call, device)
    check(p, "cuda")
    if "x_bias" in p.tensors and p.tensors["x"].dtype != FLOAT32:  # x_bias may be in float32
        check(p.but(x_bias=p.tensors["x_bias"].float()), "cuda")


# More blocks, warps and turns than one. Norms: 37 rows are more than two multiprocessors take at once, and not a
# multiple of a block's rows.
SEVERAL: list[Call] = [
    layer_norm(37, 64, x_bias=False, dropout_p=0.0),
    layer_norm(37, 520),
    layer_norm(19, 1040, dtype=BFLOAT16),
    *(
        ("feed_forward", dict(activation=a, dropout_p=0.3, tokens=(140,), d=40, d_ff=264, d_out=40, dtype=BFLOAT16))
        for a in ("gelu", "reglu")
    ),
]


def assert_equal_in_every_order(solve_it: Callable[[], dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for order in (*ORDERS, ORDERS[0]):
        monkeypatch.setenv("FASTATTN_EMULATOR_ORDER", order)
        results.append(solve_it())
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in other)


@pytest.mark.few(3)
@pytest.mark.bug_class("T7", "T8")
@pytest.mark.parametrize("call", SEVERAL, ids=name_of)
def test_bits_do_not_depend_on_the_run(call: Call, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal bits in every order of warps, lanes and blocks, and from run to run."""
    p = make(call, device)
    assert_equal_in_every_order(lambda: check(p, "cuda"), monkeypatch)


@pytest.mark.few(5)
@pytest.mark.bug_class("T5")
@pytest.mark.parametrize("dtype, shift", [(FLOAT32, 1), (FLOAT16, 1), (BFLOAT16, 4)])
@pytest.mark.parametrize(
    "call",
    [
        layer_norm(6, 64, weight_dtype=FLOAT32),
        layer_norm(6, 1040),
        ("feed_forward", {"activation": "gelu", "dropout_p": 0.3, "tokens": (70,), "d": 40, "d_ff": 72}),
    ],
    ids=name_of,
)
def test_off_a_boundary(call: Call, dtype: torch.dtype, shift: int, device: torch.device) -> None:
    """Each tensor in turn, and all of them, begin at an address that 16 does not divide."""
    p = make((call[0], call[1] | {"dtype": dtype}), device)

    def moved(t: Tensor) -> Tensor:
        return t.new_empty(t.numel() + shift)[shift:].view(t.shape).copy_(t)

    for names in (*([name] for name in p.tensors), [*p.tensors]):
        check(p.but(**{name: moved(p.tensors[name]) for name in names}), "cuda")


# --- one op each ------------------------------------------------------------------------------------------------------


@pytest.mark.bug_class("T7", "T8")
@full
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("blocks", [1, 17, 18, 37])
def test_weight_gradients_of_many_blocks(
    blocks: int, rms: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One, whole and broken groups of the blocks that add their sums up, in every order of arrival: equal bits."""

    class Blocks:
        def __getattr__(self, name: str) -> object:
            return (lambda *_: grid) if name == "add_layer_norm_bwd_grid" else getattr(extension, name)

    grid = blocks, blocks + -(-blocks // 17)  # rows of partial sums: csrc/add_layer_norm/add_layer_norm.h
    extension = norm.extension(device.type == "cuda")
    monkeypatch.setattr(norm, "extension", lambda _: Blocks())
    p = make(layer_norm(9 * blocks + 2, 40, rms=rms), device)
    assert_equal_in_every_order(lambda: check(p, "cuda"), monkeypatch)


@pytest.mark.parametrize("eps_on_std", [False, True])
def test_statistics_of_a_norm(eps_on_std: bool, device: torch.device) -> None:
    """Those of z before it is rounded. Another backward of the same forward finds them, and the tickets, unchanged."""
    p = make(layer_norm(37, 132, dtype=BFLOAT16), device)
    x, residual, weight, bias, x_bias = (p.tensors[n] for n in ("x", "residual", "weight", "bias", "x_bias"))
    call = NormCall(x, residual, weight, bias, x_bias, None, 1e-2, 0.0, eps_on_std)
    out, z, statistics = norm.add_layer_norm_fwd(call)
    made = statistics.clone()
    norm.add_layer_norm_bwd(out, None, call._replace(x=z), statistics, True)
    assert torch.equal(statistics, made) and not statistics[2 * 37 :][: norm.TICKETS].any()
    exact = x.double() + x_bias.double() + residual.double()
    torch.testing.assert_close(statistics[:37], exact.mean(-1).float())
    rstd = 1 / (exact.std(-1) + 1e-2) if eps_on_std else (exact.var(-1, correction=0) + 1e-2).rsqrt()
    torch.testing.assert_close(statistics[37 : 2 * 37], rstd.float())
    _, same, _ = norm.add_layer_norm_fwd(call._replace(residual=None, x_bias=None, eps_on_std=False))
    assert same is x


def test_a_norm_refuses_dtypes(device: torch.device) -> None:
    x, weight = torch.empty(2, 64, device=device), torch.empty(64, device=device)
    for arguments, said in (
        ((x, None, weight.half(), weight.half()), "torch.float16"),
        ((x.half(), None, weight, weight.half()), "torch.float32 and torch.float16"),
        ((x.half(), x, weight.half(), weight.half()), "the result's torch.float32"),
    ):
        assert said in norm.unsupported_reason(*arguments, 0.0)
    assert "x_bias in float32" in norm.unsupported_reason(x, None, weight, weight, 0.0, weight.half())


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
def test_triton_saves_the_same(activation: str, device: torch.device) -> None:
    """The forward by one and the backward by the other: what they save is the same, and so is the mask."""
    sizes = dict(tokens=(70,), d=40, d_ff=72, d_out=48, dtype=BFLOAT16, device=device)
    p = cases.feed_forward(activation, dropout_p=0.3, **sizes)
    order = ("x", "weight1", "bias1", "weight2", "bias2", "activation", "dropout_p")
    if reason := unsupported_reason("feed_forward", "triton", [p.arguments()[name] for name in order]):
        pytest.skip(reason)
    both = load_backend("feed_forward", "triton"), feed_forward
    for one, other in (both, both[::-1]):

        class Mixed(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *inputs, one=one):
                ctx.call = FeedForwardCall(*inputs[:5], philox.draw_rng_state(device), *inputs[5:])
                out, *ctx.kept = one.feed_forward_fwd(ctx.call)
                return out

            @staticmethod
            def backward(ctx, dout, other=other):
                module = SimpleNamespace(module=other)
                return *_FeedForward.gradients([dout], ctx.call, ctx.kept, [True] * 5, module), None, None

        check(p, lambda mixed=Mixed, **given: mixed.apply(*(given[name] for name in order)))


@pytest.mark.bug_class("T4", "T5")
def test_strides_of_a_feed_forward(device: torch.device) -> None:
    """What does not come in whole aligned vectors."""
    sizes = dict(tokens=(70,), d=40, d_ff=72, d_out=48, dtype=BFLOAT16, device=device)
    p = cases.feed_forward("gelu", dropout_p=0.3, **sizes)
    weight1, weight2, bias1 = (p.tensors[name] for name in ("weight1", "weight2", "bias1"))
    dout = torch.randn(1, 48, dtype=BFLOAT16, device=device).expand(70, 48)
    check(p.but(bias1=torch.stack([bias1, bias1], 1)[:, 0])._replace(douts=(dout,)), "cuda")
    check(p.but(weight1=weight1.T.contiguous().T, weight2=weight2.T.contiguous().T), "cuda")
    check(p.but(weight2=torch.cat([weight2, weight2], 1)[:, :72]), "cuda")
    check(cases.feed_forward("swiglu", dropout_p=0.3, **sizes | {"d": 44, "d_ff": 75, "d_out": 52}), "cuda")
