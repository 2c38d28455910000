"""What holds for every op in every backend: its numbers, bits, seeds, inputs and limits.

The calls are those of tests/catalogue.py. The everyday tier tries each property with one call of each op in each
backend, the full tier with all. Further derivatives and torch.compile: test_derived.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import cycle, product
from typing import Any
from unittest import mock

import pytest
import torch
from catalogue import (
    FORMULAS,
    KERNELS,
    SIZES,
    VARIANTS,
    WITH_DROPOUT,
    WITH_GRADIENT,
    check,
    every,
    for_backend,
    inputs_of,
    random_tensors,
    rows,
    run,
    scalar,
    sized,
    skip_without,
    solve,
    with_douts,
)
from helpers import backends_of
from layouts import LAYOUTS, reversed_dims, sliced, swapped_dims
from mask_cases import offsets
from torch import Tensor

from fastattn import explain
from fastattn.backends import OPS
from fastattn.check import cases
from fastattn.check.cases import Problem

full = pytest.mark.full
CPU = ("reference", "aten")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    "op, backend, name",
    [pytest.param(op, *row.values, marks=row.marks) for op in SIZES if op != "attention" for row in rows(op)],
)
def test_against_float64(op: str, backend: str, name: str, device: torch.device) -> None:
    """Results and gradients of every size that the backends treat in another way. Of attention: test_attention.py."""
    p = sized(op, name, device)
    check(p, backend)
    if "x_bias" in p.tensors and p.tensors["x_bias"].dtype != FP32:  # which may have another dtype
        check(p.but(x_bias=p.tensors["x_bias"].float()), backend)


@every(VARIANTS)
def test_is_the_formula(name: str, backend: str, device: torch.device) -> None:
    """In float64 where the backend has it, with gradients as finite differences have them."""
    p = VARIANTS[name].map(lambda t: t.to(device))
    if backend in KERNELS:
        check(p, backend)
        return
    p = p.map(lambda t: t.double() if t.is_floating_point() else t)
    check(p, backend)

    def call(*tensors: Tensor) -> Any:
        torch.manual_seed(cases.SEED)  # one draw of dropout
        return p.function(**p.arguments(dict(zip(p.tensors, tensors, strict=True))), backend=backend)

    if p.differentiable:
        assert torch.autograd.gradcheck(call, [t.requires_grad_() for t in p.tensors.values()], fast_mode=True)


@every(WITH_DROPOUT)
def test_seeds(name: str, backend: str, device: torch.device) -> None:
    """Equal seeds repeat the results. Another seed gives others, and so does a second call."""
    inputs = inputs_of(name, device)
    first, second = run(name, backend, inputs), run(name, backend, inputs, seed=None)
    assert all(torch.equal(a, b) for a, b in zip(first, run(name, backend, inputs), strict=True))
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], run(name, backend, inputs, seed=6)[0])


@every(
    [name for name in VARIANTS if name not in WITH_DROPOUT],
    everyday=("attention grouped", "norm", "feed-forward", "loss", "decoding"),
)
def test_without_dropout_no_number_is_drawn(name: str, backend: str, device: torch.device) -> None:
    before = random_states(device)
    run(name, backend, inputs_of(name, device), seed=None)
    assert all(torch.equal(a, b) for a, b in zip(before, random_states(device), strict=True))


def random_states(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device.type == "cuda" else [])]


# One problem of each op, with dropout where the op has it, and several tiles each way: the last ones.
PROBLEMS = {problem.op: problem for problem in cases.problems(torch.device("cpu"), large=False)}


@pytest.mark.parametrize(
    "op, backend",
    [
        pytest.param(op, b, marks=full if b == "triton" and not torch.cuda.is_available() else ())
        for op in PROBLEMS
        for b in backends_of(OPS[op].backend_module)
        if not torch.cuda.is_available() or (b, op) != ("aten", "attention")
    ],
)
def test_equal_bits_run_to_run(op: str, backend: str, device: torch.device, request: pytest.FixtureRequest) -> None:
    """Results and gradients. PyTorch's fused attention may add atomically in its backward on a GPU."""
    p = PROBLEMS[op].map(lambda t: t.to(device))
    first = solve(p, backend, given=BF16, dtype=BF16)
    for _ in range(30 if device.type == "cuda" or request.config.getoption("--full") else 1):
        again = solve(p, backend, given=BF16, dtype=BF16)
        assert all(torch.equal(first[name], again[name]) for name in first)


@every()
def test_frozen_inputs(name: str, backend: str, device: torch.device) -> None:
    """Only the inputs that require a gradient get one, and it is the one they get among all. Without gradients the
    results are the same. A kernel's feed-forward computes no product for others."""
    inputs = inputs_of(name, device)
    results = run(name, backend, inputs)
    expected = torch.autograd.grad(scalar(results), inputs)
    products: list[int] = []
    for i, want in enumerate(expected):
        some = [t.detach().requires_grad_(i == j) for j, t in enumerate(inputs)]
        with mock.patch("torch.mm", wraps=torch.mm) as mm:
            scalar(run(name, backend, some)).backward()
        assert torch.equal(some[i].grad, want), i
        products.append(mm.call_count)
        assert all(t.grad is None for j, t in enumerate(some) if j != i)
    if name == "feed-forward" and backend in KERNELS:  # one for x or a weight, none for a bias
        assert [n - min(products) for n in products] == [1, 1, 0, 1, 0]
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            for got, want in zip(run(name, backend, [t.detach() for t in inputs]), results, strict=True):
                assert not got.requires_grad and torch.equal(got, want)


@every([name for name in WITH_GRADIENT if "lse" in name or "sum" in name or "alone" in name], everyday=WITH_GRADIENT)
def test_one_output_used(name: str, backend: str, device: torch.device) -> None:
    """The gradients of each result alone are those of all results where the others' are 0."""
    inputs = inputs_of(name, device)
    results = run(name, backend, inputs)
    for used in range(len(results)):
        douts = [torch.randn_like(t) if i == used else torch.zeros_like(t) for i, t in enumerate(results)]
        options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        expected = torch.autograd.grad(results, inputs, douts, **options)
        alone = torch.autograd.grad(results[used], inputs, douts[used], **options)
        torch.testing.assert_close(alone, expected, rtol=1e-5, atol=1e-5)


# How many of the inputs autocast casts; the others keep their dtype, and so does the result where it casts none.
CAST = {"attention": 3, "decoding": 3, "norm": 0, "rms": 0, "feed-forward": 5, "loss": 3}


@every((*WITH_GRADIENT, "decoding"))
def test_autocast(name: str, backend: str, device: torch.device) -> None:
    """Results and gradients are those of inputs that were cast before the call. Gradients have the inputs' dtypes.

    What a sublayer made in 16 bits, the first input of a norm with a residual, is cast to the residual's dtype."""
    inputs, number = inputs_of(name, device), CAST[name.split()[0]]
    if "residual" in VARIANTS[name].tensors:
        inputs[0] = inputs[0].detach().bfloat16().requires_grad_()
    with torch.autocast(device.type, BF16):
        results = run(name, backend, inputs)
    dtypes = [BF16 if i < number else FP32 for i in range(len(inputs))]
    cast = [t.detach().to(dtype).requires_grad_() for t, dtype in zip(inputs, dtypes, strict=True)]
    expected = run(name, backend, cast)
    assert results[0].dtype == (FP32 if "loss" in name or number == 0 else BF16)
    assert all(torch.equal(got, want) for got, want in zip(results, expected, strict=True))
    if name in WITH_GRADIENT:
        douts = [torch.randn_like(t) for t in results]
        grads = torch.autograd.grad(results, inputs, douts)
        wanted = torch.autograd.grad(expected, cast, [d.to(t.dtype) for d, t in zip(douts, expected, strict=True)])
        for t, got, want in zip(inputs, grads, wanted, strict=True):
            assert got.dtype == t.dtype and torch.equal(got, want.to(t.dtype))
    if backend in CPU:  # float64 stays
        exact = inputs_of(name, device, torch.float64)
        with torch.autocast(device.type, BF16):
            assert torch.equal(run(name, backend, exact)[0], run(name, backend, exact)[0])
            assert run(name, backend, exact)[0].dtype == torch.float64


# Without masks and dropout: 0 times NaN, where something is hidden, is not promised to be 0 or NaN.
PLANTED = {name: p for name, p in VARIANTS.items() if p.op != "attention"} | {
    "attention": VARIANTS["attention"],
    "attention, long": cases.attention(B=1, H=1, Lq=20, Lk=70, D=16, bias=(1, 1, 20, 70), return_lse=True),
}
EVERYDAY_PLANTED = ("attention", "attention, long", "rms norm", "feed-forward relu", "decoding")


@pytest.mark.parametrize(
    "name, backend", [pytest.param(n, b, marks=() if n in EVERYDAY_PLANTED else full) for n in PLANTED for b in KERNELS]
)
@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # NaN in the interpreter
def test_nan_and_inf_come_out(name: str, backend: str, device: torch.device) -> None:
    """Of one element of each input in turn, where the formula has them in float64. Of an infinity, what is not finite:
    inf - inf may come first or not, by the order of the sums."""
    p = for_backend(PLANTED[name], backend).map(lambda t: t.to(device))
    skip_without(backend, p.op, device)
    p = with_douts(p) if p.differentiable else p
    plants = [(math.nan, False), (math.inf, False)]
    if p.differentiable and p.op != "linear_cross_entropy":
        plants.append((math.nan, True))  # and what arrives is NaN where the result is, as a loss makes it
    for tensor, (value, arrives) in product(p.tensors, plants):
        planted = p.but(**{tensor: p.tensors[tensor].clone()})
        planted.tensors[tensor].view(-1)[p.tensors[tensor].numel() // 2 + 3] = value
        if arrives:
            outputs = cases.solve(planted._replace(differentiable=False), "reference").values()
            planted = planted._replace(douts=tuple(d + out * 0 for d, out in zip(p.douts, outputs, strict=True)))
        exact = planted.map(lambda t: t.double() if t.is_floating_point() else t)
        exact = exact._replace(douts=tuple(d.double() for d in planted.douts))
        found = cases.solve(planted, backend), cases.solve(exact, "reference")
        for result in found[0]:
            got, want = (~f[result].isfinite() if value == value else f[result].isnan() for f in found)
            # These kernels multiply by 0 where the formula takes 0, for an ignored row.
            got = got & want if name.startswith("loss") and result == "grad of x" else got
            assert torch.equal(got, want), f"{value} in {tensor}: {got.sum()} for {want.sum()} in {result}"
            assert value == value or result != "out" or want.any(), f"{tensor}: this place reaches nothing"


# What autograd keeps for the backward next to inputs and integers: of a loss no logits, of a feed-forward network one
# tensor as wide as weight1 has rows, and no dropout mask.
KEPT: dict[str, tuple[Problem, list[tuple[int, int]]]] = {
    "loss": (cases.linear_cross_entropy(tokens=(40,), reduction="none"), []),
    "feed-forward": (cases.feed_forward("gelu", tokens=(40,), d_ff=56, dropout_p=0.3), [(40, 56)]),
    "feed-forward gated": (cases.feed_forward("swiglu", tokens=(40,), d_ff=56, dropout_p=0.3), [(40, 112)]),
}


@pytest.mark.parametrize("name, backend", [("loss", "aten"), *((name, b) for name in KEPT for b in KERNELS)])
def test_what_is_kept_for_the_backward(name: str, backend: str, device: torch.device) -> None:
    p, expected = KEPT[name]
    skip_without(backend, p.op, device)
    given = p.map(lambda t: t.to(device))
    tensors = {name: t.requires_grad_() for name, t in given.tensors.items()}
    pointers, kept = {t.data_ptr() for t in tensors.values()}, []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        p.function(**given.arguments(tensors), backend=backend)
    kept = [t for t in kept if t.data_ptr() not in pointers and t.is_floating_point()]
    assert [tuple(t.shape) for t in kept] == expected


WAYS = {**{layout.__name__: (layout,) for layout in LAYOUTS}, "mixed": (sliced, reversed_dims, swapped_dims)}


@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way == "mixed" else full) for way in WAYS])
@every(VARIANTS)
def test_layouts(name: str, backend: str, way: str, device: torch.device) -> None:
    """Inputs and gradients of any layout in memory give the results of contiguous ones, and are left as they were."""

    def arrange(tensors: Iterable[Tensor]) -> list[Tensor]:
        pairs = zip(cycle(WAYS[way]), tensors, strict=False)
        return [layout(t.detach()) if t.dim() else t.detach() for layout, t in pairs]

    for dtype, tolerance in ((FP32, 1e-5), (BF16, 0.05)) if backend == "cuda" else ((FP32, 1e-5),):
        found = []
        given = arrange(inputs_of(name, device, dtype))
        for change in (lambda t: t, lambda t: t.contiguous()):
            inputs = [change(t).detach().requires_grad_() for t in given]
            results = run(name, backend, inputs)
            outputs = [t for t in results if t.requires_grad]
            drawn = random_tensors([t.shape for t in outputs], device)
            douts = [change(d).to(t.dtype) for d, t in zip(arrange(drawn), outputs, strict=True)]
            kept = [t.detach().clone() for t in (*inputs, *results, *douts)]
            grads = torch.autograd.grad(outputs, inputs, douts) if name in WITH_GRADIENT else ()
            found.append([t.detach() for t in (*results, *grads)])
            assert all(map(torch.equal, kept, (*inputs, *results, *douts))), "the backward wrote into what it reads"
        for got, want in zip(*found, strict=True):
            assert (got - want).norm() <= tolerance * want.norm().clamp_min(1)
        if way == "swapped_dims" and backend in KERNELS and name in WITH_GRADIENT and "attention" in name:
            assert results[0].is_contiguous() and found[0][0].transpose(1, 2).is_contiguous(), "out has q's layout"


BATCHED = ("attention grouped", "norm", "rms norm", "feed-forward", "loss of each", "decoding")


@every(BATCHED, everyday=BATCHED)
def test_a_sample_does_not_depend_on_the_others(name: str, backend: str, device: torch.device) -> None:
    """Bit for bit, when those become very large."""
    inputs = [t.detach() for t in inputs_of(name, device)]
    result = run(name, backend, inputs)[0]
    batched = [t for t in inputs if len(t) == len(result)]
    for t in batched:
        t[1:] *= 1e4
    assert batched and torch.equal(run(name, backend, inputs)[0][0], result[0])


def empty_attention(dimension: str, kind: str) -> Problem:
    """Each kind with a bias that is summed over other dimensions. Packed keys in two tiles, others in one."""
    sizes = {"B": 2, "H": 2, "Lq": 21, "Lk": 140 if kind == "packed" else 29, dimension: 0}
    B, H, Lq, Lk = sizes.values()
    mask, bias = {
        "padding": ({"key_padding": torch.ones(B, Lk) > 0, "query_padding": torch.ones(B, Lq) > 0}, (1, H, 1, Lk)),
        "matrix": ({"attn_mask": torch.ones(B, 1, Lq, Lk) > 0}, (H, Lq + Lk - 1)),
        "packed": ({"cu_seqlens_q": offsets(0, Lq), "cu_seqlens_k": offsets(Lk, 0)}, (B, 1, Lq, 1)),
    }[kind]
    return cases.attention(**sizes, mask=mask, **{"bias" if len(bias) == 4 else "relative_bias": bias})


EMPTY: dict[str, Problem] = {
    **{f"attention without {n}": cases.attention(**{n: 0}, is_causal=True, dropout_p=0.3, return_lse=True)
       for n in ("B", "H", "Lq", "Lk")},
    **{f"attention without {n}, {kind}": empty_attention(n, kind)
       for n in ("B", "H", "Lq", "Lk") for kind in ("padding", "matrix", "packed")},
    "attention without H, two of keys": cases.attention(H=0, Hk=2),
    **{f"decoding without {n}, {rows} rows": cases.decode_attention(**{"queries": 3, n: 0}, rows=rows, ancestors=True)
       for n in ("batch", "queries", "heads", "positions") for rows in (1, 3)},
    **{f"norm of {rows}": cases.add_layer_norm(rows=rows, x_bias=True, return_sum=True, dropout_p=p)
       for rows, p in (((0,), 0.0), ((2, 0), 0.5), ((0,), 1.0))},
    "rms norm without rows": cases.add_layer_norm(rows=(0, 2), rms=True, residual=False),
    **{f"feed-forward without {n}, {a}": cases.feed_forward(a, **{"tokens": (3, 5), n: empty}, dropout_p=0.5)
       for n, empty in (("tokens", (3, 0)), ("d", 0), ("d_ff", 0), ("d_out", 0)) for a in ("relu", "swiglu")},
    **{f"loss without tokens, {r}": cases.linear_cross_entropy(tokens=(3, 0), reduction=r)
       for r in ("none", "mean", "sum")},
}  # fmt: skip


@pytest.mark.parametrize(
    "name, backend", [(n, b) for n, p in EMPTY.items() for b in backends_of(OPS[p.op].backend_module)]
)
def test_empty_dimensions(name: str, backend: str, device: torch.device) -> None:
    """Results and gradients are the formula's: sums of nothing are 0, and the mean of no losses is NaN."""
    p = for_backend(EMPTY[name], backend).map(lambda t: t.to(device))
    truth = cases.solve(p, FORMULAS[p.op], dtype=torch.float64)
    for result, got in solve(p, backend).items():
        torch.testing.assert_close(got.double(), truth[result], rtol=1e-4, atol=1e-5, equal_nan=True)


DROPPED = {name: VARIANTS[name].but(dropout_p=1.0) for name in WITH_DROPOUT if name in WITH_GRADIENT}
DROPPED["norm of nothing"] = cases.add_layer_norm(residual=False, return_sum=True, dropout_p=1.0)


@pytest.mark.parametrize("dtype", [FP16, *(pytest.param(dtype, marks=full) for dtype in (FP32, BF16))])
@pytest.mark.parametrize(
    "name, backend", [(n, b) for n, p in DROPPED.items() for b in backends_of(OPS[p.op].backend_module)]
)
def test_everything_dropped(name: str, backend: str, dtype: torch.dtype, device: torch.device) -> None:
    """What is dropped gets the gradient 0, also where float16's gradient of a sum is inf."""
    p = DROPPED[name].map(lambda t: t.to(device))
    shapes = [t.shape for n, t in cases.solve(p, FORMULAS[p.op]).items() if n.startswith("out")]
    p = p._replace(douts=tuple(1024 * t.detach() for t in random_tensors(shapes, device)))
    got, truth = solve(p, backend, given=dtype, dtype=dtype), cases.solve(p, FORMULAS[p.op], dtype, torch.float64)
    for result, want in truth.items():
        if not want.any():
            assert not got[result].any(), result
        elif result.startswith("out"):
            torch.testing.assert_close(got[result].double(), want, rtol=0.01, atol=0.01)


def wide(op: str, width: int) -> Problem:
    if "attention" in op:
        return (
            cases.attention(B=1, Lq=3, Lk=3, D=width) if op == "attention" else cases.decode_attention(head_dim=width)
        )
    return cases.add_layer_norm(rows=(2,), hidden=width, rms="rms" in op)


LIMITS = {("attention", "triton"): 256, ("decode_attention", "triton"): 256, ("attention", "cuda"): 128}
LIMITS |= {(op, backend): 16384 for op in ("add_layer_norm", "add_rms_norm") for backend in KERNELS}


@pytest.mark.parametrize(
    "op, backend", [(op, b) for op in PROBLEMS for b in backends_of(OPS[op].backend_module, kernels_only=True)]
)
def test_a_named_backend_refuses_with_the_reason(op: str, backend: str, device: torch.device) -> None:
    """By `explain`, and by the call."""
    skip_without(backend, op, device)

    def refusal(p: Problem) -> str | None:
        p = p.map(lambda t: t.to(device))
        reason = explain(p.function, **p.arguments()).refusals[backend]
        if reason is not None:
            with pytest.raises(RuntimeError) as refused:
                p.function(**p.arguments(), backend=backend)
            assert reason in str(refused.value) and p.function.__name__ in str(refused.value)
        return reason

    small = next(p for p in VARIANTS.values() if p.op == op)
    assert refusal(small) is None
    assert "float64" in refusal(small.map(lambda t: t.double() if t.is_floating_point() else t))
    if limit := LIMITS.get((op, backend)):
        assert refusal(wide(op, limit)) is None and str(limit + 1) in refusal(wide(op, limit + 1))
