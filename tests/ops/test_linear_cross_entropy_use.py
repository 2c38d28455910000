"""linear_cross_entropy in use: strides, frozen inputs, a second backward, what is kept, chunks, autocast, compiling,
wrong arguments. What it computes: test_linear_cross_entropy.py.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from linear_cross_entropy_checks import (
    BACKENDS,
    IGNORED,
    REDUCTIONS,
    SMOOTHED,
    Results,
    backend_call,
    check,
    make,
    solve,
)

from fastattn import explain, linear_cross_entropy
from fastattn.ops import _library_cross_entropy as _library


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides(backend: str, device: torch.device) -> None:
    """Transposed weight, sliced and unaligned x, sliced target, expanded dloss and x."""
    p, call = make("none", device=device, **SMOOTHED), backend_call(backend, device)
    check(p.but(weight=p.weight.T.contiguous().T, x=torch.cat([p.x, p.x], 1)[:, : p.x.shape[1]]), call)
    unaligned = torch.empty(p.x.numel() + 1, device=device)[1:].view_as(p.x).copy_(p.x)
    check(p.but(x=unaligned, target=p.target.repeat_interleave(2)[::2]), call)
    check(p.but(x=p.x[:1].expand_as(p.x), dloss=p.dloss[:1].expand_as(p.dloss)), call)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_leading_dimensions_and_integer_types(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    p, call = make("none", tokens=12, device=device), backend_call(backend, device)
    rest = {"ignore_index": IGNORED, "reduction": "none"}
    rows = call(p.x, p.weight, p.target, p.bias, **rest)
    assert torch.equal(call(p.x.view(3, 4, -1), p.weight, p.target.view(3, 4).to(dtype), p.bias, **rest).view(-1), rows)
    assert call(p.x[0], p.weight, p.target[0], p.bias).shape == ()
    assert call(p.x[0], p.weight, p.target[0], p.bias, **rest).shape == ()


@pytest.mark.parametrize("needs", ["x", "w", "b", "xw", "xb"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_frozen_inputs(backend: str, reduction: str, needs: str, device: torch.device) -> None:
    """Only those get a gradient that ask for one, and it is right."""
    p, call = make(reduction, device=device), backend_call(backend, device)
    everything, some = solve(p, call), solve(p, call, needs)
    for name, letter, a, b in zip(Results._fields[1:], "xwb", everything[1:], some[1:], strict=True):
        assert torch.equal(a, b) if letter in needs else b is None, name


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_bits_run_to_run(backend: str, reduction: str, device: torch.device) -> None:
    p, call = make(reduction, tokens=40, device=device, **SMOOTHED), backend_call(backend, device)
    first = solve(p, call)
    for _ in range(1 if device.type == "cpu" else 30):
        for name, a, b in zip(Results._fields, first, solve(p, call), strict=True):
            assert torch.equal(a, b), name


@pytest.mark.parametrize("dloss", [1.0, -0.5])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_backward(backend: str, reduction: str, dloss: float, device: torch.device) -> None:
    """On one graph: equal gradients, which add up; and no graph where none is asked for, with an equal loss."""
    p, call = make(reduction, device=device), backend_call(backend, device)
    x, weight, bias = (t.detach().requires_grad_() for t in (p.x, p.weight, p.bias))
    loss = call(x, weight, p.target, bias, **p.options)
    dloss = torch.full_like(loss, dloss)
    once = solve(p.but(dloss=dloss), call)
    loss.backward(dloss, retain_graph=True)
    loss.backward(dloss)
    for name, leaf, grad in zip(Results._fields[1:], (x, weight, bias), once[1:], strict=True):
        assert torch.equal(leaf.grad, 2 * grad), name
    with torch.no_grad():
        evaluated = call(x, weight, p.target, bias, **p.options)
    assert not evaluated.requires_grad and torch.equal(evaluated, loss.detach())
    with torch.inference_mode():
        assert torch.equal(call(x, weight, p.target, bias, **p.options), evaluated)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend != "reference"])
def test_no_logits_are_kept(backend: str, reduction: str, device: torch.device) -> None:
    """Between forward and backward nothing is (tokens, classes): the gradients, or the inputs."""
    p, call, kept = make(reduction, tokens=40, device=device), backend_call(backend, device), []
    inputs = [t.detach().requires_grad_() for t in (p.x, p.weight, p.bias)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        call(inputs[0], inputs[1], p.target, inputs[2], **p.options)
    assert kept == [tuple(t.shape) for t in (*inputs, p.target)][: 4 if reduction == "none" else 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend != "reference"])
def test_chunks(
    backend: str, reduction: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits past the budget: tokens are cut, the last chunk ragged; a budget below one row still takes one."""
    p, call = make(reduction, tokens=37, dtype=dtype, device=device, **SMOOTHED), backend_call(backend, device)
    module = "aten.linear_cross_entropy" if backend == "aten" else "_cross_entropy_products"
    products, whole, parts = importlib.import_module(f"fastattn.{module}"), solve(p, call), []
    monkeypatch.setattr(products, "_add", lambda *a, add=products._add: parts.append(1) or add(*a))
    monkeypatch.setattr(products, "LOGITS_BYTES", 10 * 70 * dtype.itemsize)
    check(p, call)
    monkeypatch.setattr(products, "LOGITS_BYTES", 0)
    for name, a, b in zip(Results._fields, solve(p, call), whole, strict=True):
        assert (a - b).norm() <= 20 * torch.finfo(a.dtype).eps * b.norm(), name
    assert len(parts) >= 2 * (3 + 27), "not cut"


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast(backend: str, device: torch.device) -> None:
    p, call = make(device=device, **SMOOTHED), backend_call(backend, device)
    with torch.autocast(device.type, torch.bfloat16):
        got = solve(p, call)
    want = solve(p.but(x=p.x.bfloat16(), weight=p.weight.bfloat16(), bias=p.bias.bfloat16()), call)
    assert got.loss.dtype == got.dx.dtype == got.dweight.dtype == torch.float32
    for name, a, b in zip(Results._fields, got, want, strict=True):
        assert torch.equal(a, b.to(a.dtype)), name


@pytest.mark.parametrize("value", [70, -1, -100, 2**40])
def test_a_target_out_of_range_is_told_on_a_cpu(value: int) -> None:
    p = make()
    p.target[5] = value
    with pytest.raises(ValueError, match=f"target has the value {value}, expected 0 to 69 or ignore_index=2"):
        solve(p, backend_call("aten", torch.device("cpu")))


@pytest.mark.parametrize("reduction, dtype", [("none", torch.float32), ("mean", torch.float32), ("sum", torch.float16)])
@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend != "reference"])
def test_library_operators(backend: str, reduction: str, dtype: torch.dtype, device: torch.device) -> None:
    backend_call(backend, device)
    p = make(reduction, tokens=6, dtype=dtype, has_bias=reduction != "sum", device=device)
    inputs = [None if t is None else t.requires_grad_() for t in (p.x, p.weight, p.bias)]
    asked = [t is not None for t in inputs]
    options = (0.1, IGNORED, 0.5, reduction, asked, backend)
    torch.library.opcheck(_library.linear_cross_entropy_op, (*inputs, p.target, *options))


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled(backend: str, reduction: str, device: torch.device) -> None:
    """One graph without a break, and the eager call's results; one input asks for no gradient."""
    p, call = make(reduction, device=device, **SMOOTHED), backend_call(backend, device)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for name, a, b in zip(Results._fields, solve(p, compiled, "xw"), solve(p, call, "xw"), strict=True):
        torch.testing.assert_close(a, b, msg=name)


def test_triton_refuses_float64(device: torch.device) -> None:
    backend_call("triton", device)
    p = make(dtype=torch.float64, device=device)
    explanation = explain("linear_cross_entropy", p.x, p.weight, p.target, p.bias)
    assert "float64" in explanation.refusals["triton"] and explanation.chosen == "aten"


X, WEIGHT, TARGET = torch.zeros(2, 4, 8), torch.zeros(12, 8), torch.zeros(2, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    "name, value, error",
    [
        ("x", X.long(), TypeError),
        ("x", None, TypeError),
        ("x", torch.zeros(()), ValueError),
        ("weight", torch.zeros(12, 7), ValueError),
        ("weight", torch.zeros(0, 8), ValueError),
        ("weight", torch.zeros(12), ValueError),
        ("weight", WEIGHT.bfloat16(), TypeError),
        ("weight", None, TypeError),
        ("bias", torch.zeros(8), ValueError),
        ("bias", torch.zeros(12, device="meta"), ValueError),
        ("bias", torch.zeros(12, dtype=torch.float64), TypeError),
        ("target", TARGET.view(-1), ValueError),
        ("target", TARGET.float(), TypeError),
        ("target", TARGET.bool(), TypeError),
        ("target", None, TypeError),
        ("target", TARGET.to("meta"), ValueError),
        ("label_smoothing", 1.1, ValueError),
        ("label_smoothing", float("nan"), ValueError),
        ("label_smoothing", None, TypeError),
        ("smooth_over", "none", ValueError),
        ("ignore_index", 0.5, TypeError),
        ("logit_scale", float("inf"), ValueError),
        ("logit_scale", torch.ones(()), TypeError),
        ("reduction", "batchmean", ValueError),
        ("backend", "fast", ValueError),
    ],
)
def test_bad_inputs_are_named(name: str, value: object, error: type[Exception]) -> None:
    call: dict[str, Any] = {"x": X, "weight": WEIGHT, "target": TARGET, "bias": torch.zeros(12)} | {name: value}
    with pytest.raises(error, match=name):
        linear_cross_entropy(**call)
