"""What holds for every op in every backend: seeds, repeated bits, frozen inputs, autocast, layouts, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import cycle, product
from typing import Any

import numpy as np
import pytest
import torch
from checks import skip_without
from helpers import has_kernel
from layouts import LAYOUTS, reversed_dims, sliced, swapped_dims
from small_calls import ALL, EVERY_OP, OPS, WITH_DROPOUT, WITHOUT_GRADIENT, inputs_of, random_tensors, run, scalar
from torch import Tensor

import fastattn
from fastattn import explain
from fastattn.backends import BACKENDS
from fastattn.backends import OPS as REGISTERED
from fastattn.check import cases

KERNELS = ("triton", "cuda")
EVERY_BACKEND = pytest.mark.parametrize("backend", BACKENDS)
# One problem of each op, with dropout where the op has it, and several tiles each way.
PROBLEMS = {problem.op: problem for problem in cases.problems(torch.device("cpu"), large=False)}


@pytest.mark.bug_class("T15")
@pytest.mark.parametrize("name", WITH_DROPOUT)
@EVERY_BACKEND
def test_seeds(backend: str, name: str, device: torch.device) -> None:
    """Equal seeds repeat the results. Another seed gives others, and so does a second call."""
    inputs = inputs_of(name, device)
    first, second = run(name, backend, inputs), run(name, backend, inputs, seed=None)
    assert all(torch.equal(a, b) for a, b in zip(first, run(name, backend, inputs), strict=True))
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], run(name, backend, inputs, seed=6)[0])


@pytest.mark.parametrize("name", [name for name in OPS if name not in WITH_DROPOUT])
@EVERY_BACKEND
def test_without_dropout_no_number_is_drawn(backend: str, name: str, device: torch.device) -> None:
    before = random_states(device)
    run(name, backend, inputs_of(name, device), seed=None)
    assert all(torch.equal(a, b) for a, b in zip(before, random_states(device), strict=True))


def random_states(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device.type == "cuda" else [])]


def implemented(names: Iterable[str]) -> list[tuple[str, str]]:
    """(backend, op) where the backend has the op."""
    return [(b, op) for b, op in product(names, PROBLEMS) if has_kernel(REGISTERED[op].backend_module, b)]


@pytest.mark.few(8)
@pytest.mark.bug_class("T8")
@pytest.mark.parametrize(
    ("backend", "op"),
    [case for case in implemented(BACKENDS) if not torch.cuda.is_available() or case != ("aten", "attention")],
)
def test_equal_bits_run_to_run(backend: str, op: str, device: torch.device, request: pytest.FixtureRequest) -> None:
    """Results and gradients. PyTorch's fused attention may add atomically in its backward on a GPU."""
    skip_without(backend, op, device)
    p = PROBLEMS[op].map(lambda t: t.to(device))
    first = cases.solve(p, backend, torch.bfloat16, torch.bfloat16)
    for _ in range(30 if device.type == "cuda" or request.config.getoption("--full") else 1):
        again = cases.solve(p, backend, torch.bfloat16, torch.bfloat16)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.few(9)
@pytest.mark.bug_class("T20", "T23")
@EVERY_OP
@EVERY_BACKEND
def test_frozen_inputs(backend: str, name: str, device: torch.device) -> None:
    """Only the inputs that require a gradient get one, and it is the one they get among all. Without gradients the
    results are the same."""
    inputs = inputs_of(name, device)
    results = run(name, backend, inputs)
    expected = torch.autograd.grad(scalar(results), inputs)
    for i, want in enumerate(expected):
        some = [t.detach().requires_grad_(i == j) for j, t in enumerate(inputs)]
        scalar(run(name, backend, some)).backward()
        assert torch.equal(some[i].grad, want), i
        assert all(t.grad is None for j, t in enumerate(some) if j != i)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            for got, want in zip(run(name, backend, [t.detach() for t in inputs]), results, strict=True):
                assert not got.requires_grad and torch.equal(got, want)


NOT_FINITE = [name for name in OPS if "attention" not in name]  # of attention: test_attention.py
EVERYDAY_NOT_FINITE = ("rms norm", "feed-forward relu", "loss")


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "name",
    [*(pytest.param(n, marks=() if n in EVERYDAY_NOT_FINITE else pytest.mark.full) for n in NOT_FINITE), "decoding"],
)
@pytest.mark.parametrize("backend", KERNELS)
def test_nan_and_inf_come_out(backend: str, name: str, device: torch.device) -> None:
    """Of one element of each input in turn, where the formula has them in float64. Of an infinity, what is not finite:
    the order of the sums says whether inf - inf comes first."""
    inputs = inputs_of(name, device)
    plants = [(math.nan, False), (math.inf, False), (-math.inf, False)]
    if name in OPS and "loss" not in name:
        plants.append((math.nan, True))  # and what arrives is NaN where the result is, as a loss makes it
    for i, (value, arrives) in product(range(len(inputs)), plants):
        planted = [t.detach().clone() for t in inputs]
        planted[i].view(-1)[planted[i].numel() // 2 + 1] = value
        found = []
        for way, dtype in ((backend, torch.float32), ("reference", torch.float64)):
            given = [t.to(dtype).requires_grad_() for t in planted]
            results = run(name, way, given)
            grads = ()
            if name in OPS:
                douts = [t.detach() for t in random_tensors([t.shape for t in results], device, dtype)]
                douts = [d + t.detach() * 0 if arrives else d for d, t in zip(douts, results, strict=True)]
                grads = torch.autograd.grad(results, given, douts)
            found.append([t.isfinite().logical_not() if value == value else t.isnan() for t in (*results, *grads)])
        for n, (got, want) in enumerate(zip(*found, strict=True)):
            # These kernels multiply by 0 where the formula takes 0: for an ignored row, for what is dropped.
            got = got & want if name.startswith(("loss", "embeddings")) and n == 1 else got
            assert torch.equal(got, want), f"{value} in input {i}: {got.sum()} for {want.sum()} in result {n}"
        assert value == value or found[1][0].any(), f"input {i}: this place reaches nothing"


# How many of the inputs autocast casts; the others keep their dtype, and so does the result where it casts none.
CAST = {"attention": 3, "norm": 0, "rms": 0, "feed-forward": 5, "loss": 3, "embeddings": 0}


@pytest.mark.few(8)
@pytest.mark.bug_class("T18")
@EVERY_OP
@EVERY_BACKEND
def test_autocast(backend: str, name: str, device: torch.device) -> None:
    """Results and gradients are those of inputs that were cast before the call. Gradients have the inputs' dtypes.

    What a sublayer made in 16 bits, the first input of a norm with a residual, is cast to the residual's dtype."""
    inputs, number = inputs_of(name, device), CAST[name.split()[0]]
    if name.startswith("norm"):
        inputs[0] = inputs[0].detach().bfloat16().requires_grad_()
    with torch.autocast(device.type, torch.bfloat16):
        results = run(name, backend, inputs)
    dtypes = [torch.bfloat16 if i < number else torch.float32 for i in range(len(inputs))]
    cast = [t.detach().to(dtype).requires_grad_() for t, dtype in zip(inputs, dtypes, strict=True)]
    expected = run(name, backend, cast)
    assert results[0].dtype == (torch.float32 if "loss" in name or number == 0 else torch.bfloat16)
    for got, want in zip(results, expected, strict=True):
        assert torch.equal(got, want)
    douts = [torch.randn_like(t) for t in results]
    grads = torch.autograd.grad(results, inputs, douts)
    wanted = torch.autograd.grad(expected, cast, [d.to(t.dtype) for d, t in zip(douts, expected, strict=True)])
    for t, got, want in zip(inputs, grads, wanted, strict=True):
        assert got.dtype == t.dtype and torch.equal(got, want.to(t.dtype))


EVERYDAY_LAYOUTS = ("norm with sum and dropout", "rms norm", "feed-forward gated", "loss of each")
EVERYDAY_LAYOUTS += ("attention bias, lse", *WITHOUT_GRADIENT)
WAYS = {**{layout.__name__: (layout,) for layout in LAYOUTS}, "mixed": (sliced, reversed_dims, swapped_dims)}
EVERYDAY_WAYS = ("swapped_dims", "expanded", "mixed")


@pytest.mark.few(10)
@pytest.mark.bug_class("T1", "T2", "T3", "T4", "T5", "T19")
@pytest.mark.parametrize(
    "name, way",
    [
        pytest.param(name, way, marks=() if name in EVERYDAY_LAYOUTS and way in EVERYDAY_WAYS else pytest.mark.full)
        for name, way in product(ALL, WAYS)
    ],
)
@EVERY_BACKEND
def test_layouts(backend: str, name: str, way: str, device: torch.device) -> None:
    """Inputs and gradients of any layout in memory give the results of contiguous ones, and are left as they were."""

    def arrange(tensors: Iterable[Tensor]) -> list[Tensor]:
        pairs = zip(cycle(WAYS[way]), tensors, strict=False)
        return [layout(t.detach()) if t.dim() else t.detach() for layout, t in pairs]

    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        found = []
        given = arrange(inputs_of(name, device, dtype))
        for change in (lambda t: t, lambda t: t.contiguous()):
            inputs = [change(t).detach().requires_grad_() for t in given]
            results = run(name, backend, inputs)
            outputs = [t for t in results if t.requires_grad]
            drawn = random_tensors([t.shape for t in outputs], device)
            douts = [change(d).to(t.dtype) for d, t in zip(arrange(drawn), outputs, strict=True)]
            kept = [t.detach().clone() for t in (*inputs, *results, *douts)]
            grads = torch.autograd.grad(outputs, inputs, douts) if outputs and name in OPS else ()
            found.append([t.detach() for t in (*results, *grads)])
            assert all(map(torch.equal, kept, (*inputs, *results, *douts))), "the backward wrote into what it reads"
        for got, want in zip(*found, strict=True):
            assert (got - want).norm() <= tolerance * want.norm().clamp_min(1)
        if way == "swapped_dims" and backend in KERNELS and name.startswith("attention") and "weights" not in name:
            assert results[0].is_contiguous() and found[0][0].transpose(1, 2).is_contiguous(), "out has q's layout"


@pytest.mark.bug_class("T6")
@EVERY_OP
@EVERY_BACKEND
def test_another_device_than_the_current(backend: str, name: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    found = []
    for device in (torch.device("cuda", 0), torch.device("cuda", 1)):
        with torch.cuda.device(0):
            inputs = inputs_of(name, device)
            results = run(name, backend, inputs)
            grads = torch.autograd.grad(scalar(results), inputs)
        found.append([t.detach().cpu() for t in (*results, *grads)])
    assert all(map(torch.equal, *found))


@pytest.mark.bug_class("T24")
@pytest.mark.parametrize("name", ["norm", "rms norm", "feed-forward", "loss of each", "decoding"])
@EVERY_BACKEND
def test_a_sample_does_not_depend_on_the_others(backend: str, name: str, device: torch.device) -> None:
    """Bit for bit, when those become very large. Attention's own test is in test_attention.py."""
    inputs = [t.detach() for t in inputs_of(name, device)]
    result = run(name, backend, inputs)[0]
    batched = [t for t in inputs if len(t) == len(result)]
    for t in batched:
        t[1:] *= 1e4
    assert batched and torch.equal(run(name, backend, inputs)[0][0], result[0])


def arguments(op: str, width: int = 16) -> dict[str, Any]:
    """Of a small call of an op with every tensor that it takes. width: of what a kernel limits."""
    problem = {
        "attention": lambda: cases.attention(B=1, Lq=3, Lk=3, D=width, bias=(1, 2, 3, 3)),
        "decode_attention": lambda: cases.decode_attention(
            heads=1, heads_k=1, positions=8, head_dim=width, lengths=[8, 5], ancestors=True
        ),
        "add_layer_norm": lambda: cases.add_layer_norm(rows=(2, 3), hidden=width, x_bias=True),
        "add_rms_norm": lambda: cases.add_layer_norm(rows=(2, 3), hidden=width, rms=True),
        "feed_forward": lambda: cases.feed_forward(tokens=(2, 3), d=16, d_ff=16, d_out=16),
        "linear_cross_entropy": lambda: cases.linear_cross_entropy(tokens=(6,), d=16, classes=9),
    }[op]()
    return {name: value for name, value in problem.arguments().items() if isinstance(value, Tensor)}


LIMITS = {("triton", op): 256 for op in ("attention", "decode_attention")} | {("cuda", "attention"): 128}
LIMITS |= {(backend, op): 16384 for backend in KERNELS for op in ("add_layer_norm", "add_rms_norm")}


@pytest.mark.bug_class("T25")
@pytest.mark.parametrize(("backend", "op"), implemented(KERNELS))
def test_refusals(backend: str, op: str, device: torch.device) -> None:
    """What a kernel does not support is refused with the reason, by `explain` and by a call that names the backend."""
    function = PROBLEMS[op].function

    def refusal(change: Callable[[Tensor], Tensor] = lambda t: t, width: int = 16) -> str | None:
        given = {name: change(t.to(device)) if isinstance(t, Tensor) else t for name, t in arguments(op, width).items()}
        if (backend, op) == ("cuda", "attention"):
            del given["attn_mask"]  # a bias, which it does not take: tests/cuda/test_kernels_attention.py
        reason = explain(function, **given).refusals[backend]
        if reason is not None:
            with pytest.raises(RuntimeError) as refused:
                function(**given, backend=backend)
            assert reason in str(refused.value) and function.__name__ in str(refused.value)
        return reason

    if (reason := refusal()) is not None:
        pytest.skip(reason)
    assert "float64" in refusal(lambda t: t.double() if t.is_floating_point() else t)
    assert backend == "triton" or "meta" in refusal(lambda t: t.to("meta"))
    if limit := LIMITS.get((backend, op)):
        assert refusal(width=limit) is None and str(limit + 1) in refusal(width=limit + 1)


TARGET = torch.zeros(4, dtype=torch.int64)
X, ONE, MATRIX = torch.randn(4, 8), torch.ones(8), torch.randn(8, 8)
QUERY, KEYS = torch.randn(2, 3, 1, 8), torch.randn(2, 5, 3, 1, 8)


@pytest.mark.parametrize(
    "call",
    [
        lambda: fastattn.dropout_add_layer_norm(X, X, ONE, ONE, 0.1),  # flash-attention's has dropout_p here
        lambda: fastattn.dropout_add_rms_norm(X, X, ONE, 0.1),
        lambda: fastattn.decode_attention(QUERY, KEYS, KEYS, None, None, 0.5),
    ],
)
def test_options_are_named(call: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match="positional"):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda n: fastattn.dropout_add_layer_norm(X, X, ONE, ONE, eps=n(0.5), dropout_p=n(0)),
        lambda n: fastattn.linear_cross_entropy(X, MATRIX, TARGET, label_smoothing=n(0.125), logit_scale=n(0.5)),
        lambda n: fastattn.decode_attention(QUERY, KEYS, KEYS, scale=n(0.5)),
        lambda n: fastattn.scaled_dot_product_attention(QUERY, QUERY, QUERY, dropout_p=n(0), scale=n(0.5)),
        lambda n: fastattn.feed_forward(X, MATRIX, None, MATRIX, None, dropout_p=n(0)),
    ],
)
def test_numbers_of_numpy(call: Callable[[Any], Tensor]) -> None:
    assert torch.equal(call(np.float32), call(float))
