"""What is special about linear_cross_entropy, in every backend."""

from __future__ import annotations

from functools import partial

import catalogue
import pytest
import torch
import torch.nn.functional as F
from catalogue import FORMULAS, REDUCTIONS, SMOOTHED, check, skip_without, solve
from helpers import backends_of
from layouts import far
from torch import Tensor

from fastattn import linear_cross_entropy
from fastattn.backends import cross_entropy_chunks as chunks
from fastattn.backends import load_backend
from fastattn.backends.calls import LossCall
from fastattn.check import cases
from fastattn.check.cases import Problem

full = pytest.mark.full
BACKENDS = backends_of("linear_cross_entropy")
KERNELS = backends_of("linear_cross_entropy", kernels_only=True)
EVERY_BACKEND = pytest.mark.parametrize("backend", BACKENDS)
EVERY_REDUCTION = pytest.mark.parametrize(
    "reduction", ["none", *(pytest.param(r, marks=full) for r in REDUCTIONS if r != "none")]
)
EVERY_DTYPE = pytest.mark.parametrize(
    "dtype", [torch.float32, *(pytest.param(dtype, marks=full) for dtype in (torch.bfloat16, torch.float16))]
)
IGNORED = 2  # the class that is padding in the problems of cases.py


make = partial(catalogue.make, "linear_cross_entropy", "")


@pytest.mark.parametrize("backend", ["aten", *(pytest.param(name, marks=full) for name in KERNELS)])
def test_smoothing_over_many_classes(backend: str, device: torch.device) -> None:
    """What smoothing adds to each class is rounded in the same way in all rows, so a careless sum of it adds up in
    weight's gradient. On a CPU PyTorch's loss has this error too, for some gradients of the loss."""
    x, weight, target = torch.randn(600, 16) + 1, torch.randn(1500, 16) * 0.05, torch.randint(0, 1500, (600,))
    weight[17] += 0.3
    target[::20] = 17
    options = {"target": target.to(device), "label_smoothing": 0.1, "reduction": "sum"}
    p = Problem("linear_cross_entropy", "", linear_cross_entropy, {"x": x, "weight": weight}, options)
    check(p.map(lambda t: t.to(device))._replace(douts=(torch.tensor(1 / 1227, device=device),)), backend)


@EVERY_DTYPE
@EVERY_REDUCTION
@EVERY_BACKEND
def test_ignored_rows_reach_nothing(backend: str, reduction: str, dtype: torch.dtype, device: torch.device) -> None:
    """NaN in x, and in dloss where it has rows: loss and gradients are those of any other x, and 0 in these rows."""
    p = make(reduction=reduction, dtype=dtype, device=device, **SMOOTHED)
    kept, dloss = p.options["target"] != IGNORED, torch.randn(p.options["target"].shape, device=device)
    dloss = dloss if reduction == "none" else dloss[0]
    clean = solve(p._replace(douts=(dloss,)), backend)
    dloss = dloss.where(kept, torch.nan) if reduction == "none" else dloss
    dirty = solve(p.but(x=p.tensors["x"].where(kept[:, None], torch.nan))._replace(douts=(dloss,)), backend)
    assert all(torch.equal(dirty[name], clean[name]) for name in clean)
    assert not dirty["grad of x"][~kept].any() and (reduction != "none" or not dirty["out"][~kept].any())


@EVERY_BACKEND
def test_all_ignored(backend: str, device: torch.device) -> None:
    """As in torch: the mean of nothing is NaN, the sum 0; gradients are 0 even of the mean."""
    for reduction in REDUCTIONS:
        p = make(reduction=reduction, device=device, **SMOOTHED)
        p = p.but(target=torch.full_like(p.options["target"], IGNORED), x=p.tensors["x"] * torch.nan)
        loss, *grads = solve(p, backend).values()
        assert loss.isnan().all() if reduction == "mean" else not loss.any()
        assert not any(grad.any() for grad in grads)


@pytest.mark.filterwarnings("ignore:overflow encountered in:RuntimeWarning")  # numpy's, in the interpreter
@EVERY_REDUCTION
@EVERY_BACKEND
def test_large_logits(backend: str, reduction: str, device: torch.device) -> None:
    """Logits of some hundreds, all of them high or low; a bias of -inf that forbids classes, a whole block of them."""
    p = make(reduction=reduction, device=device, label_smoothing=0.1)
    check(p.but(x=p.tensors["x"] * 100), backend)
    for level in (300.0, -300.0):
        check(p.but(bias=p.tensors["bias"] + level), backend)
    p = make(reduction=reduction, tokens=(4,), classes=4200, device=device)
    bias = p.tensors["bias"].index_fill(0, torch.arange(4100, device=device), -torch.inf)
    p = p.but(bias=bias, target=p.options["target"] % 90 + 4105)
    expected = cases.solve(p, FORMULAS["linear_cross_entropy"])
    torch.testing.assert_close(solve(p, backend), expected, rtol=1e-5, atol=1e-5)


def test_aten_makes_no_denormal_numbers_on_a_cpu() -> None:
    """They are slow. With one token dbias is the gradient of the logits."""
    p = make(reduction="none", tokens=(1,), classes=900)
    p = p.but(x=p.tensors["x"] * 15)._replace(douts=(torch.ones(1),))
    x, weight, bias = p.tensors.values()
    log_p = F.log_softmax(F.linear(x.double(), weight.double(), bias.double()), 1)
    smallest_normal = torch.finfo(torch.float32).smallest_normal
    assert ((log_p.exp() > 0) & (log_p.exp() < smallest_normal)).sum() > 50
    dlogits = check(p, "aten")["grad of bias"].abs()
    assert not ((dlogits > 0) & (dlogits < smallest_normal)).any()


@EVERY_BACKEND
def test_float16_with_a_loss_scale(backend: str, device: torch.device) -> None:
    """The gradients of a mean over many tokens and classes are too small for float16 but for the scale in dloss. So are
    those of weight where x is small."""
    p = make(reduction="mean", tokens=(64,), classes=300, dtype=torch.float16, device=device, label_smoothing=0.1)
    p = p.but(x=p.tensors["x"] / 1024)
    got = check(p._replace(douts=(torch.tensor(2.0**14, device=device),)), backend)
    assert got["grad of weight"].isfinite().all()


@pytest.mark.parametrize("backend", KERNELS)
def test_a_kernel_makes_nan_of_a_target_out_of_range(backend: str, device: torch.device) -> None:
    """The public op finds it on a CPU; on a GPU none does, and a kernel must not read past the row. It keeps NaN."""
    skip_without(backend, "linear_cross_entropy", device)
    p, products = make(reduction="none", device=device), load_backend("linear_cross_entropy", backend)
    target = p.options["target"].clone()
    target[:4] = torch.tensor([70, IGNORED, -1, 5])
    x, weight, bias = p.tensors.values()
    x = x.index_fill(0, torch.tensor(3, device=device), torch.nan)
    call = LossCall(x, weight, bias, target, 0.1, IGNORED, 1.0, "none", [True] * 3)
    losses, (dx, _, _) = products.linear_cross_entropy_fwd(call)
    assert losses.isnan().nonzero().flatten().tolist() == [0, 2, 3]
    assert dx.isnan().any(1).nonzero().flatten().tolist() == [0, 2, 3]


@EVERY_BACKEND
def test_targets_of_any_layout_and_integer_type(backend: str, device: torch.device) -> None:
    p = make(reduction="none", tokens=(3, 4), device=device)
    target, expected = p.options["target"], solve(p, backend)["out"]
    for dtype in (torch.int32, torch.uint8):
        assert torch.equal(solve(p.but(target=target.T.contiguous().to(dtype).T), backend)["out"], expected)
    one = p.but(x=p.tensors["x"][0, 0], target=target[0, 0])._replace(douts=())
    torch.testing.assert_close(solve(one, backend)["out"], expected[0, 0])


@EVERY_DTYPE
@pytest.mark.parametrize(
    "backend, reduction",
    [pytest.param(b, r, marks=() if b == "aten" else full) for b in BACKENDS if b != "reference" for r in REDUCTIONS],
)
def test_chunks(
    backend: str, reduction: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits past the budget: tokens are cut, the last chunk ragged; a budget below one row still takes one."""
    p = make(reduction=reduction, tokens=(37,), dtype=dtype, device=device, **SMOOTHED)
    whole = solve(p, backend)
    monkeypatch.setattr(chunks, "LOGITS_BYTES", 10 * 70 * dtype.itemsize)
    check(p, backend)
    monkeypatch.setattr(chunks, "LOGITS_BYTES", 0)
    for name, a in solve(p, backend).items():
        assert (a - whole[name]).norm() <= 20 * torch.finfo(a.dtype).eps * whole[name].norm(), name


@pytest.mark.parametrize("backend", KERNELS)
def test_logits_beyond_2_31_elements(backend: str, device: torch.device) -> None:
    """The kernel that reads rows of logits and writes their gradients in their place."""
    skip_without(backend, "linear_cross_entropy", device)
    rows_of = load_backend("linear_cross_entropy", backend).cross_entropy_rows
    logits, target, results = torch.randn(5, 64, device=device), torch.arange(5, device=device), []
    for t in (logits.clone(), far(logits)):
        losses: Tensor = torch.empty(5, device=device)
        rows_of(LossCall(t, t, None, target, 0.1, -100, 1.0, "none", [True]), t, losses, None, None)
        results.append((losses, t))
    assert all(map(torch.equal, *results))
