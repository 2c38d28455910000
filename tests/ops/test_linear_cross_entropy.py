"""linear_cross_entropy in every backend against float64, forward and backward."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import backends_of
from linear_cross_entropy_checks import (
    BACKENDS,
    IGNORED,
    REDUCTIONS,
    SMOOTHED,
    Results,
    backend_call,
    check,
    make,
    plain_formula,
    solve,
)

from fastattn.backends import cross_entropy_chunks as chunks

KERNELS = backends_of("linear_cross_entropy", kernels_only=True)
BF16, FP16 = torch.bfloat16, torch.float16

# One class and one token; odd counts; a block of 4096 classes and a ragged second one.
EVERYDAY: list[dict[str, Any]] = [
    {"reduction": "none", **SMOOTHED},
    {"reduction": "mean", "smooth_over": "others", **SMOOTHED},
    {"reduction": "sum", "has_bias": False},
    {"reduction": "mean", "tokens": 60, "dtype": BF16, **SMOOTHED},
    {"reduction": "none", "tokens": 60, "dtype": FP16, **SMOOTHED},
    {"reduction": "mean", "tokens": 1, "d": 5, "classes": 1, "ignore_index": -100},
    {"reduction": "none", "tokens": 3, "d": 24, "classes": 5001, **SMOOTHED},
    *({"reduction": reduction, "d": 0} for reduction in REDUCTIONS),
]
FULL: list[dict[str, Any]] = [
    {"reduction": reduction, "smooth_over": over, "dtype": dtype, "has_bias": bias, **SMOOTHED}
    for reduction in REDUCTIONS
    for over, dtype, bias in (("all", torch.float32, False), ("others", BF16, True), ("all", FP16, True))
]
FULL += [
    {"reduction": reduction, "tokens": tokens, "d": d, "classes": classes, "smooth_over": over, **SMOOTHED}
    for tokens, d, classes in ((1, 33, 65), (5, 16, 3), (33, 5, 129), (40, 33, 7), (6, 32, 8200))
    for reduction, over in (("none", "others"), ("mean", "all"))
]


@pytest.mark.parametrize("case", [*EVERYDAY, *(pytest.param(case, marks=pytest.mark.full) for case in FULL)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_against_float64(backend: str, case: dict[str, Any], device: torch.device) -> None:
    p = make(**case, device=device)
    check(p.but(target=p.target.clamp_max(len(p.weight) - 1)), backend_call(backend, device))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_float64_and_gradcheck(backend: str, reduction: str, device: torch.device) -> None:
    """And both smoothings against torch's and the public implementation's loss."""
    call = backend_call(backend, device)
    for eps, over in ((0.0, "all"), (0.1, "all"), (0.1, "others"), (1.0, "others")):
        p = make(reduction, dtype=torch.float64, device=device, label_smoothing=eps, smooth_over=over, logit_scale=0.4)
        for name, a, b in zip(Results._fields, solve(p, call), solve(p, plain_formula), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13, msg=name)
    p = make(reduction, tokens=5, d=4, classes=6, dtype=torch.float64, device=device, **SMOOTHED)
    leaves = [t.requires_grad_() for t in (p.x, p.weight, p.bias)]
    assert torch.autograd.gradcheck(lambda x, w, b: call(x, w, p.target, b, **p.options), leaves)


@pytest.mark.parametrize("dtype", [torch.float32, FP16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_ignored_rows_reach_nothing(backend: str, reduction: str, dtype: torch.dtype, device: torch.device) -> None:
    """NaN in x, and in dloss where it has rows: loss and gradients are those of any other x, and 0 in these rows."""
    p, call = make(reduction, dtype=dtype, device=device, **SMOOTHED), backend_call(backend, device)
    hidden = ~p.keep
    dloss = p.dloss.where(p.keep, torch.nan) if reduction == "none" else p.dloss
    clean = solve(p, call)
    dirty = solve(p.but(x=p.x.where(p.keep[:, None], torch.nan), dloss=dloss), call)
    for name, a, b in zip(Results._fields, dirty, clean, strict=True):
        assert torch.equal(a, b), name
    assert not dirty.dx[hidden].any()
    assert reduction != "none" or not dirty.loss[hidden].any()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_aten_without_asking_how_many_are_ignored(
    reduction: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does it on a GPU."""
    aten = importlib.import_module("fastattn.backends.aten.linear_cross_entropy")
    monkeypatch.setattr(aten, "_can_count", lambda x: False)
    p = make(reduction, device=device, **SMOOTHED)
    check(p.but(x=p.x.where(p.keep[:, None], torch.nan)), backend_call("aten", device))
    got = solve(p.but(target=torch.full_like(p.target, IGNORED), x=p.x * torch.nan), backend_call("aten", device))
    assert not any(grad.any() for grad in got[1:])


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_aten_never_waits_for_a_device(reduction: str) -> None:
    """On the meta device a tensor has no value: asking for one raises."""
    aten, p = importlib.import_module("fastattn.backends.aten.linear_cross_entropy"), make(reduction, device="meta")
    call = (p.x, p.weight, p.bias, p.target, 0.1, IGNORED, 0.5, reduction, (True, True, True))
    loss, grads = aten.linear_cross_entropy_fwd(*call)
    assert loss.shape == p.dloss.shape
    for made in (grads, aten.linear_cross_entropy_bwd(p.dloss, *call)):
        assert [grad.shape for grad in made] == [t.shape for t in (p.x, p.weight, p.bias)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_ignored(backend: str, device: torch.device) -> None:
    """As in torch: the mean of nothing is NaN, the sum 0; gradients are 0 even of the mean."""
    call = backend_call(backend, device)
    for reduction in REDUCTIONS:
        p = make(reduction, device=device, **SMOOTHED)
        p = p.but(target=torch.full_like(p.target, IGNORED), x=p.x * torch.nan)
        got = solve(p, call)
        assert got.loss.isnan().all() if reduction == "mean" else not got.loss.any()
        assert not any(grad.any() for grad in got[1:])


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens(backend: str, shape: tuple[int, ...], device: torch.device) -> None:
    call, p = backend_call(backend, device), make(d=16, device=device)
    for reduction in REDUCTIONS:
        x, target = torch.zeros(*shape, 16, device=device), torch.zeros(shape, dtype=torch.int64, device=device)
        leaves = [t.detach().requires_grad_() for t in (x, p.weight, p.bias)]
        loss = call(leaves[0], leaves[1], target, leaves[2], reduction=reduction)
        loss.sum().backward()
        assert loss.shape == (shape if reduction == "none" else ())
        assert loss.isnan() if reduction == "mean" else not loss.any()
        assert not any(t.grad.any() for t in leaves[1:]) and leaves[0].grad.shape == x.shape


@pytest.mark.filterwarnings("ignore:overflow encountered in:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("backend", BACKENDS)
def test_large_logits(backend: str, device: torch.device) -> None:
    """Logits of some hundreds, all of them high or low; a bias of -inf that forbids classes, a whole block of them."""
    call = backend_call(backend, device)
    for reduction in ("none", "mean"):
        p = make(reduction, device=device, label_smoothing=0.1)
        check(p.but(x=p.x * 100), call)
        for level in (300.0, -300.0):
            check(p.but(bias=p.bias + level), call)
    p = make("none", tokens=4, classes=4200, device=device)
    p = p.but(bias=p.bias.index_fill(0, torch.arange(4100, device=device), -torch.inf), target=p.target % 90 + 4105)
    for name, a, b in zip(Results._fields, solve(p, call), solve(p, plain_formula), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_aten_makes_no_denormal_numbers_on_a_cpu(dtype: torch.dtype, reduction: str) -> None:
    """They are slow. Logits of -inf and NaN act as ever. With one token dbias is the gradient of the logits."""
    call = backend_call("aten", torch.device("cpu"))
    p = make(reduction, tokens=1, classes=900, dtype=dtype)
    p = p.but(x=p.x * 15, dloss=torch.ones_like(p.dloss))
    log_p = F.log_softmax(F.linear(p.x.double(), p.weight.double(), p.bias.double()), 1)
    smallest_normal = torch.finfo(torch.float32).smallest_normal
    assert ((log_p.exp() > 0) & (log_p.exp() < smallest_normal)).sum() > 50
    dlogits = check(p, call).dbias.abs()
    assert not ((dlogits > 0) & (dlogits < smallest_normal)).any()
    forbidden = torch.arange(900) == (p.target + 1) % 900
    got = solve(p.but(bias=p.bias.masked_fill(forbidden, -torch.inf)), call)
    assert got.loss.isfinite().all() and not got.dbias[forbidden].any()
    got = solve(p.but(bias=p.bias.index_fill(0, p.target, torch.nan)), call)
    assert got.loss.isnan().all() and got.dbias.isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_float16_with_a_loss_scale(backend: str, device: torch.device) -> None:
    """The gradients of a mean over many tokens and classes are too small for float16 but for the scale in dloss."""
    p = make(tokens=64, classes=900, dtype=torch.float16, device=device, label_smoothing=0.1)
    got = check(p.but(dloss=torch.tensor(4096.0, device=device)), backend_call(backend, device))
    assert got.dweight.isfinite().all()


@pytest.mark.parametrize("backend", KERNELS)
def test_a_kernel_makes_nan_of_a_target_out_of_range(backend: str, device: torch.device) -> None:
    """The public op finds it on a CPU; on a GPU nothing checks it, and a kernel must not read past the row."""
    backend_call(backend, device)
    products = importlib.import_module(
        f"fastattn.{'kernels' if backend == 'triton' else 'backends.cuda'}.linear_cross_entropy"
    )
    p = make("none", device=device)
    target = p.target.clone()
    target[0], target[1], target[2] = 70, IGNORED, -1
    options = (0.1, IGNORED, 1.0, "none", (True, True, True))
    losses, (dx, _, _) = products.linear_cross_entropy_fwd(p.x, p.weight, p.bias, target, *options)
    assert losses.isnan().nonzero().flatten().tolist() == [0, 2]
    assert dx.isnan().any(1).nonzero().flatten().tolist() == [0, 2]


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_leading_dimensions_and_integer_types(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    p, call = make("none", tokens=12, device=device), backend_call(backend, device)
    rest = {"ignore_index": IGNORED, "reduction": "none"}
    rows = call(p.x, p.weight, p.target, p.bias, **rest)
    target = torch.cat([p.target.view(3, 4), p.target.view(3, 4)], 1)[:, :4].to(dtype)
    assert torch.equal(call(p.x.view(3, 4, -1), p.weight, target, p.bias, **rest).view(-1), rows)
    assert call(p.x[0], p.weight, p.target[0], p.bias).shape == ()
    assert call(p.x[0], p.weight, p.target[0], p.bias, **rest).shape == ()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend != "reference"])
def test_no_logits_are_kept(backend: str, reduction: str, device: torch.device) -> None:
    """Between forward and backward nothing is (tokens, classes): the inputs, and gradients that the forward made."""
    p, call, kept = make(reduction, tokens=40, device=device), backend_call(backend, device), []
    inputs = [t.detach().requires_grad_() for t in (p.x, p.weight, p.bias)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        call(inputs[0], inputs[1], p.target, inputs[2], **p.options)
    made = () if reduction == "none" else inputs
    assert kept == [tuple(t.shape) for t in (*inputs, p.target, *made)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend != "reference"])
def test_chunks(
    backend: str, reduction: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits past the budget: tokens are cut, the last chunk ragged; a budget below one row still takes one."""
    p, call = make(reduction, tokens=37, dtype=dtype, device=device, **SMOOTHED), backend_call(backend, device)
    whole, parts = solve(p, call), []
    monkeypatch.setattr(chunks, "_add", lambda *a, add=chunks._add: parts.append(1) or add(*a))
    monkeypatch.setattr(chunks, "LOGITS_BYTES", 10 * 70 * dtype.itemsize)
    check(p, call)
    monkeypatch.setattr(chunks, "LOGITS_BYTES", 0)
    for name, a, b in zip(Results._fields, solve(p, call), whole, strict=True):
        assert (a - b).norm() <= 20 * torch.finfo(a.dtype).eps * b.norm(), name
    assert len(parts) >= 2 * (3 + 27), "not cut"


@pytest.mark.parametrize("value", [70, -1, -100, 2**40])
def test_a_target_out_of_range_is_told_on_a_cpu(value: int) -> None:
    p = make()
    p.target[5] = value
    with pytest.raises(ValueError, match=f"target has the value {value}, expected 0 to 69 or ignore_index=2"):
        solve(p, backend_call("aten", torch.device("cpu")))
