"""What is special about linear_cross_entropy, in every backend."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import FORMULAS, check, skip_without, solve
from helpers import backends_of
from layouts import far
from torch import Tensor

from fastattn import linear_cross_entropy
from fastattn.backends import cross_entropy_chunks as chunks
from fastattn.backends import load_backend
from fastattn.backends.calls import LossCall
from fastattn.check import cases
from fastattn.check.cases import Problem

BACKENDS = backends_of("linear_cross_entropy")
EVERY_BACKEND = pytest.mark.parametrize("backend", BACKENDS)
KERNELS = backends_of("linear_cross_entropy", kernels_only=True)
IGNORED = 2  # the class that is padding in the problems of cases.py
REDUCTIONS = ("none", "mean", "sum")
EVERY_REDUCTION = pytest.mark.parametrize("reduction", REDUCTIONS)
SMOOTHED = {"label_smoothing": 0.1, "logit_scale": 0.4}
BF16, FP16 = torch.bfloat16, torch.float16


def make(reduction: str, **sizes: Any) -> Problem:
    """The gradient that arrives at a reduced loss is not 1."""
    p = cases.linear_cross_entropy(reduction=reduction, **sizes)
    return p if reduction == "none" else p._replace(douts=(torch.tensor(1.7, device=p.tensors["x"].device),))


def kept(p: Problem) -> Tensor:
    """Which tokens are not ignored."""
    return p.options["target"] != IGNORED


def with_nan(p: Problem) -> Problem:
    """NaN in what is ignored."""
    return p.but(x=p.tensors["x"].where(kept(p)[:, None], torch.nan))


def all_ignored(p: Problem) -> Problem:
    return p.but(target=torch.full_like(p.options["target"], IGNORED), x=p.tensors["x"] * torch.nan)


def has_gradient(results: dict[str, Tensor]) -> bool:
    return any(t.any() for name, t in results.items() if name.startswith("grad"))


@EVERY_REDUCTION
@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_smoothing(backend: str, reduction: str, device: torch.device) -> None:
    """Both kinds, against torch's and the public implementation's loss, in float64."""
    for eps, over in ((0.0, "all"), (0.1, "all"), (0.1, "others"), (1.0, "others")):
        options = {"label_smoothing": eps, "smooth_over": over, "logit_scale": 0.4}
        p = make(reduction, dtype=torch.float64, device=device, **options)
        expected = cases.solve(p, FORMULAS["linear_cross_entropy"])
        torch.testing.assert_close(solve(p, backend), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("backend", ["aten", *(pytest.param(name, marks=pytest.mark.full) for name in KERNELS)])
def test_smoothing_over_many_classes(backend: str, device: torch.device) -> None:
    """What smoothing adds to each class is rounded in the same way in all rows, so a careless sum of it adds up in
    weight's gradient. On a CPU PyTorch's loss has this error too, for some gradients of the loss."""
    x, weight, target = torch.randn(600, 16) + 1, torch.randn(4000, 16) * 0.05, torch.randint(0, 4000, (600,))
    weight[17] += 0.3
    target[::20] = 17
    options = {"target": target.to(device), "label_smoothing": 0.1, "reduction": "sum"}
    p = Problem("linear_cross_entropy", "", linear_cross_entropy, {"x": x, "weight": weight}, options)
    check(p.map(lambda t: t.to(device))._replace(douts=(torch.tensor(1 / 1227, device=device),)), backend)


@pytest.mark.few(6)
@pytest.mark.bug_class("T9", "T10")
@pytest.mark.parametrize("dtype", [torch.float32, FP16])
@EVERY_REDUCTION
@EVERY_BACKEND
def test_ignored_rows_reach_nothing(backend: str, reduction: str, dtype: torch.dtype, device: torch.device) -> None:
    """NaN in x, and in dloss where it has rows: loss and gradients are those of any other x, and 0 in these rows."""
    p = make(reduction, dtype=dtype, device=device, **SMOOTHED)
    clean = solve(p, backend)
    dloss = torch.randn_like(clean["out"])
    clean = solve(p._replace(douts=(dloss,)), backend)
    dloss = dloss.where(kept(p), torch.nan) if reduction == "none" else dloss
    dirty = solve(with_nan(p)._replace(douts=(dloss,)), backend)
    assert all(torch.equal(dirty[name], clean[name]) for name in clean)
    assert not dirty["grad of x"][~kept(p)].any()
    assert reduction != "none" or not dirty["out"][~kept(p)].any()


@EVERY_REDUCTION
def test_aten_without_asking_how_many_are_ignored(
    reduction: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does it on a GPU."""
    aten = importlib.import_module("fastattn.backends.aten.linear_cross_entropy")
    monkeypatch.setattr(aten, "_can_count", lambda x: False)
    p = make(reduction, device=device, **SMOOTHED)
    check(with_nan(p), "aten", formula_of=p)
    assert not has_gradient(solve(all_ignored(p), "aten"))


@pytest.mark.bug_class("T16")
@EVERY_REDUCTION
def test_aten_never_waits_for_a_device(reduction: str) -> None:
    """On the meta device a tensor has no value: asking for one raises."""
    aten, p = importlib.import_module("fastattn.backends.aten.linear_cross_entropy"), make(reduction, device="meta")
    call = LossCall(*p.tensors.values(), p.options["target"], 0.1, IGNORED, 0.5, reduction, [True] * 3)
    loss, grads = aten.linear_cross_entropy_fwd(call)
    assert loss.shape == ((21,) if reduction == "none" else ())
    for made in (grads, aten.linear_cross_entropy_bwd(torch.empty_like(loss), call)):
        assert [grad.shape for grad in made] == [t.shape for t in p.tensors.values()]


@pytest.mark.bug_class("T9")
@EVERY_BACKEND
def test_all_ignored(backend: str, device: torch.device) -> None:
    """As in torch: the mean of nothing is NaN, the sum 0; gradients are 0 even of the mean."""
    for reduction in REDUCTIONS:
        got = solve(all_ignored(make(reduction, device=device, **SMOOTHED)), backend)
        assert got["out"].isnan().all() if reduction == "mean" else not got["out"].any()
        assert not has_gradient(got)


@pytest.mark.bug_class("T13")
@pytest.mark.filterwarnings("ignore:overflow encountered in:RuntimeWarning")  # numpy's, in the interpreter
@EVERY_BACKEND
def test_large_logits(backend: str, device: torch.device) -> None:
    """Logits of some hundreds, all of them high or low; a bias of -inf that forbids classes, a whole block of them."""
    for reduction in ("none", "mean"):
        p = make(reduction, device=device, label_smoothing=0.1)
        check(p.but(x=p.tensors["x"] * 100), backend)
        for level in (300.0, -300.0):
            check(p.but(bias=p.tensors["bias"] + level), backend)
    p = make("none", tokens=(4,), classes=4200, device=device)
    bias = p.tensors["bias"].index_fill(0, torch.arange(4100, device=device), -torch.inf)
    p = p.but(bias=bias, target=p.options["target"] % 90 + 4105)
    expected = cases.solve(p, FORMULAS["linear_cross_entropy"])
    torch.testing.assert_close(solve(p, backend), expected, rtol=1e-5, atol=1e-5)


@EVERY_REDUCTION
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_aten_makes_no_denormal_numbers_on_a_cpu(dtype: torch.dtype, reduction: str) -> None:
    """They are slow. Logits of -inf and NaN act as ever. With one token dbias is the gradient of the logits."""
    p = make(reduction, tokens=(1,), classes=900, dtype=dtype)
    p = p.but(x=p.tensors["x"] * 15)
    p = p._replace(douts=(torch.ones(1 if reduction == "none" else ()),))
    (x, weight, bias), target = p.tensors.values(), p.options["target"]
    log_p = F.log_softmax(F.linear(x.double(), weight.double(), bias.double()), 1)
    smallest_normal = torch.finfo(torch.float32).smallest_normal
    assert ((log_p.exp() > 0) & (log_p.exp() < smallest_normal)).sum() > 50
    dlogits = check(p, "aten")["grad of bias"].abs()
    assert not ((dlogits > 0) & (dlogits < smallest_normal)).any()
    forbidden = torch.arange(900) == (target + 1) % 900
    got = solve(p.but(bias=bias.masked_fill(forbidden, -torch.inf)), "aten")
    assert got["out"].isfinite().all() and not got["grad of bias"][forbidden].any()
    got = solve(p.but(bias=bias.index_fill(0, target, torch.nan)), "aten")
    assert got["out"].isnan().all() and got["grad of bias"].isnan().all()


@EVERY_BACKEND
def test_float16_with_a_loss_scale(backend: str, device: torch.device) -> None:
    """The gradients of a mean over many tokens and classes are too small for float16 but for the scale in dloss."""
    p = make("mean", tokens=(64,), classes=900, dtype=FP16, device=device, label_smoothing=0.1)
    got = check(p._replace(douts=(torch.tensor(4096.0, device=device),)), backend)
    assert got["grad of weight"].isfinite().all()


@pytest.mark.parametrize("backend", KERNELS)
def test_a_kernel_makes_nan_of_a_target_out_of_range(backend: str, device: torch.device) -> None:
    """The public op finds it on a CPU; on a GPU nobody looks, and a kernel must not read past the row. It keeps NaN."""
    skip_without(backend, "linear_cross_entropy", device)
    products = load_backend("linear_cross_entropy", backend)
    p = make("none", device=device)
    target = p.options["target"].clone()
    target[:4] = torch.tensor([70, IGNORED, -1, 5])
    options = (0.1, IGNORED, 1.0, "none", [True] * 3)
    x, weight, bias = p.tensors.values()
    x = x.index_fill(0, torch.tensor(3, device=device), torch.nan)
    losses, (dx, _, _) = products.linear_cross_entropy_fwd(LossCall(x, weight, bias, target, *options))
    assert losses.isnan().nonzero().flatten().tolist() == [0, 2, 3]
    assert dx.isnan().any(1).nonzero().flatten().tolist() == [0, 2, 3]


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
@EVERY_BACKEND
def test_leading_dimensions_and_integer_types(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    p = make("none", tokens=(12,), device=device)
    x, target = p.tensors["x"], p.options["target"]
    rows = solve(p, backend)["out"]
    strided = torch.cat([target.view(3, 4), target.view(3, 4)], 1)[:, :4].to(dtype)
    assert torch.equal(solve(p.but(x=x.view(3, 4, -1), target=strided), backend)["out"].view(-1), rows)
    for reduction in ("mean", "none"):
        assert solve(p.but(x=x[0], target=target[0], reduction=reduction), backend)["out"].shape == ()


@EVERY_REDUCTION
@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend != "reference"])
def test_no_logits_are_kept(backend: str, reduction: str, device: torch.device) -> None:
    """Between forward and backward nothing is (tokens, classes): the inputs, and gradients that the forward made."""
    skip_without(backend, "linear_cross_entropy", device)
    p, saved = make(reduction, tokens=(40,), device=device), []
    inputs = [t.requires_grad_() for t in p.tensors.values()]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        linear_cross_entropy(**p.arguments(), backend=backend)
    made = () if reduction == "none" else inputs
    assert saved == [tuple(t.shape) for t in (*inputs, p.options["target"], *made)]


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@EVERY_REDUCTION
@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend != "reference"])
def test_chunks(
    backend: str, reduction: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits past the budget: tokens are cut, the last chunk ragged; a budget below one row still takes one."""
    p = make(reduction, tokens=(37,), dtype=dtype, device=device, **SMOOTHED)
    whole, parts = solve(p, backend), []
    monkeypatch.setattr(chunks, "_add", lambda *a, add=chunks._add: parts.append(1) or add(*a))
    monkeypatch.setattr(chunks, "LOGITS_BYTES", 10 * 70 * dtype.itemsize)
    check(p, backend)
    monkeypatch.setattr(chunks, "LOGITS_BYTES", 0)
    for name, a in solve(p, backend).items():
        assert (a - whole[name]).norm() <= 20 * torch.finfo(a.dtype).eps * whole[name].norm(), name
    assert len(parts) >= 2 * (3 + 27), "not cut"


@pytest.mark.bug_class("T1")
@pytest.mark.parametrize("backend", KERNELS)
def test_logits_beyond_2_31_elements(backend: str, device: torch.device) -> None:
    """The kernel that reads rows of logits and writes their gradients in their place."""
    skip_without(backend, "linear_cross_entropy", device)
    rows_of = load_backend("linear_cross_entropy", backend).cross_entropy_rows
    logits, target, results = torch.randn(5, 64, device=device), torch.arange(5, device=device), []
    for t in (logits.clone(), far(logits)):
        losses = torch.empty(5, device=device)
        rows_of(LossCall(t, t, None, target, 0.1, -100, 1.0, "none", [True]), t, losses, None, None)
        results.append((losses, t))
    assert all(map(torch.equal, *results))
