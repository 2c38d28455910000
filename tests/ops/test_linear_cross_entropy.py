"""linear_cross_entropy in every backend against float64, forward and backward; and bugs that are to be found."""

from __future__ import annotations

import importlib

import pytest
import torch
from helpers import backends_of
from linear_cross_entropy_checks import (
    BACKENDS,
    IGNORED,
    REDUCTIONS,
    SMOOTHED,
    Results,
    backend_call,
    check,
    exact,
    make,
    plain_backend,
    planted,
    solve,
)


@pytest.mark.parametrize("smooth_over", ["all", "others"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_float32(backend: str, reduction: str, smooth_over: str, device: torch.device) -> None:
    check(make(reduction, smooth_over=smooth_over, device=device, **SMOOTHED), backend_call(backend, device))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_without_smoothing(backend: str, reduction: str, has_bias: bool, device: torch.device) -> None:
    check(make(reduction, has_bias=has_bias, device=device), backend_call(backend, device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_16_bit(backend: str, reduction: str, dtype: torch.dtype, device: torch.device) -> None:
    check(make(reduction, tokens=60, dtype=dtype, device=device, **SMOOTHED), backend_call(backend, device))


# One class and one token; odd counts; a block of 4096 classes and a ragged second one.
@pytest.mark.parametrize(
    "tokens, d, classes", [(1, 5, 1), (1, 33, 65), (5, 16, 1), (33, 5, 129), (40, 33, 7), (3, 24, 5001)]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_sizes(backend: str, tokens: int, d: int, classes: int, device: torch.device) -> None:
    for reduction in ("none", "mean"):
        p = make(reduction, tokens=tokens, d=d, classes=classes, device=device, **SMOOTHED)
        call = backend_call(backend, device)
        check(p.but(ignore_index=-100, target=p.target.clamp_max(classes - 1)), call)
        check(p.but(ignore_index=-100, target=p.target.clamp_max(classes - 1), smooth_over="others"), call)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_blocks_of_classes(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    check(make(tokens=6, classes=8200, dtype=dtype, device=device, **SMOOTHED), backend_call(backend, device))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_float64_and_gradcheck(backend: str, reduction: str, device: torch.device) -> None:
    p = make(reduction, tokens=5, d=4, classes=6, dtype=torch.float64, device=device, **SMOOTHED)
    call = backend_call(backend, device)
    for name, actual, truth in zip(Results._fields, solve(p, call), exact(p), strict=True):
        torch.testing.assert_close(actual, truth, rtol=1e-12, atol=1e-13, msg=name)
    leaves = [t.requires_grad_() for t in (p.x, p.weight, p.bias)]
    assert torch.autograd.gradcheck(lambda x, w, b: call(x, w, p.target, b, **p.options), leaves)


@pytest.mark.parametrize("eps", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_is_torchs_and_the_public_loss(backend: str, eps: float, device: torch.device) -> None:
    """Both smoothings against other people's formulas, in float64."""
    call = backend_call(backend, device)
    for reduction in REDUCTIONS:
        for over in ("all", "others"):
            p = make(reduction, dtype=torch.float64, device=device, label_smoothing=eps, smooth_over=over)
            for name, a, b in zip(Results._fields, solve(p, call), solve(p, plain_backend), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_aten_without_asking_how_many_are_ignored(
    reduction: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does it on a GPU."""
    aten = importlib.import_module("fastattn.aten.linear_cross_entropy")
    monkeypatch.setattr(aten, "_may_wait", lambda x: False)
    p = make(reduction, dtype=dtype, device=device, **SMOOTHED)
    check(p.but(x=p.x.where(p.keep[:, None], torch.nan)), backend_call("aten", device))
    got = solve(p.but(target=torch.full_like(p.target, IGNORED), x=p.x * torch.nan), backend_call("aten", device))
    assert not any(grad.any() for grad in got[1:])


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_aten_never_waits_for_a_device(reduction: str) -> None:
    """On the meta device a tensor has no value: asking for one raises."""
    aten, p = importlib.import_module("fastattn.aten.linear_cross_entropy"), make(reduction, device="meta")
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
    for name, a, b in zip(Results._fields, solve(p, call), solve(p, plain_backend), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_float16_with_a_loss_scale(backend: str, device: torch.device) -> None:
    """The gradients of a mean over many tokens and classes are too small for float16 but for the scale in dloss."""
    p = make(tokens=64, classes=900, dtype=torch.float16, device=device, label_smoothing=0.1)
    got = check(p.but(dloss=torch.tensor(4096.0, device=device)), backend_call(backend, device))
    assert got.dweight.isfinite().all()


@pytest.mark.parametrize("backend", backends_of("linear_cross_entropy", kernels_only=True))
def test_a_kernel_makes_nan_of_a_target_out_of_range(backend: str, device: torch.device) -> None:
    """The public op finds it on a CPU; on a GPU nobody looks, and a kernel must not read past the row."""
    backend_call(backend, device)
    products = importlib.import_module(f"fastattn.{'kernels' if backend == 'triton' else backend}.linear_cross_entropy")
    p = make("none", device=device)
    target = p.target.clone()
    target[0], target[1], target[2] = 70, IGNORED, -1
    options = (0.1, IGNORED, 1.0, "none", (True, True, True))
    losses, (dx, _, _) = products.linear_cross_entropy_fwd(p.x, p.weight, p.bias, target, *options)
    assert losses.isnan().nonzero().flatten().tolist() == [0, 2]
    assert dx.isnan().any(1).nonzero().flatten().tolist() == [0, 2]


# bug -> the problem that must find it (the kinds that every backend is given above) and the result it must be found in.
MEAN, ROWS = make(**SMOOTHED), make("none", **SMOOTHED)
HALF = make(dtype=torch.bfloat16, **SMOOTHED)
PLANTED = {
    "bias missing": (ROWS, "loss"),
    "scale missing": (ROWS, "loss"),
    "the next class": (ROWS, "loss"),
    "ragged tile missing": (ROWS, "loss"),
    "ragged tile not smoothed": (ROWS, "loss"),
    "lse rounded": (ROWS, "loss"),
    "smoothed over the others": (ROWS, "loss"),
    "ignored rows in the loss": (MEAN, "loss"),
    "mean over all rows": (MEAN, "loss"),
    "gradient of the sum": (MEAN, "dx"),
    "gradient without smoothing": (MEAN, "dx"),
    "gradient without scale": (MEAN, "dx"),
    "ignored rows in dx": (MEAN, "dx"),
    "dloss forgotten": (MEAN, "dx"),
    "dbias of one tile": (MEAN, "dbias"),
}


@pytest.mark.parametrize("problem", [MEAN, ROWS, HALF], ids=["mean", "none", "bfloat16"])
def test_the_unplanted_formula_passes(problem) -> None:
    check(problem, planted(None))


@pytest.mark.parametrize("bug", PLANTED)
def test_each_planted_bug_is_found(bug: str) -> None:
    problem, result = PLANTED[bug]
    with pytest.raises(AssertionError, match=f"^{result}: error"):
        check(problem, planted(bug))


@pytest.mark.parametrize("bug", ["ragged tile missing", "gradient without smoothing", "mean over all rows"])
def test_16_bit_tolerance_is_not_idle(bug: str) -> None:
    with pytest.raises(AssertionError):
        check(HALF, planted(bug))


def test_nan_in_an_ignored_row_is_found() -> None:
    p = MEAN.but(x=MEAN.x.where(MEAN.keep[:, None], torch.nan))
    check(p, planted(None))
    with pytest.raises(AssertionError, match="^dweight: error"):
        check(p, planted("ignored rows in dweight"))
