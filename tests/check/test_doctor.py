"""The rule by which results are judged, and the command that applies it on a user's machine."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import gpu_clock
import pytest
import torch

import fastattn
import fastattn.backends.aten.attention
from fastattn.__main__ import main
from fastattn.backends import OPS
from fastattn.check import cases, doctor
from fastattn.check.tolerance import check_error, measure_rounding_scale

INF, NAN = float("inf"), float("nan")


def a_product(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(truth, low, terms): a product of matrices in float64 and in dtype, and T."""
    x = torch.randn(32, 48).to(dtype)
    return x.double() @ x.double().T, x @ x.T, (x.double().square() @ x.double().T.square()).sqrt()


@pytest.mark.parametrize("dtype", doctor.DTYPES, ids=str)
def test_judge_passes_twice_the_error_of_the_plain_formula_and_its_roundings(dtype: torch.dtype) -> None:
    truth, low, terms = a_product(dtype)
    u, c = torch.finfo(dtype).eps / 2, 1 if dtype.itemsize == 2 else 8
    bound = 2 * (low.double() - truth).abs().max() + u * truth.abs().max() + c * u * terms.max()
    assert check_error(low, truth, low, terms).ok
    assert check_error(truth.to(dtype), truth, low, terms).ok
    for factor, passes in ((0.9, True), (1.2, False)):
        moved = truth.clone()
        moved.view(-1)[truth.abs().argmin()] += factor * bound  # where rounding the result itself counts least
        assert check_error(moved.to(dtype), truth, low, terms).ok is passes


def test_judge_of_small_errors() -> None:
    """One that is everywhere counts by the root mean square. Roundings are allowed where the formula is exact."""
    truth, low, terms = a_product(torch.float32)
    everywhere = (truth + 1.5 * (low.double() - truth).abs().max()).float()
    assert (everywhere.double() - truth).abs().max() < 2 * (low.double() - truth).abs().max()
    assert not check_error(everywhere, truth, low, 0 * terms).ok
    half_way = torch.tensor([1.0 + 2.0**-8], dtype=torch.float64)  # between two bfloat16 numbers
    assert check_error(half_way.bfloat16(), half_way, half_way.bfloat16(), 0 * half_way).ok
    zero = torch.zeros(3)
    assert check_error(zero, zero.double(), zero, zero).ok
    assert not check_error(zero + 1e-30, zero.double(), zero, zero).ok
    assert check_error(zero + 2**-24, zero.double(), zero, zero + 1).ok  # what is left where terms of size 1 cancel


def test_judge_of_what_is_not_finite() -> None:
    """NaN never passes, an infinity has to be that of the truth, and a formula that overflows is no excuse."""
    truth, low, terms = a_product(torch.float32)
    for wrong in (NAN, INF, -INF):
        actual = low.clone()
        actual[3, 4] = wrong
        assert not check_error(actual, truth, low, terms).ok and not check_error(actual, truth, actual, terms).ok
    truth[3, 4] = -INF
    assert not check_error(low, truth, low, terms).ok
    for value, passes in ((-INF, True), (INF, False)):
        actual = low.clone()
        actual[3, 4] = value
        assert check_error(actual, truth, low, terms).ok is passes
    truth = torch.tensor([1e6, 1.0], dtype=torch.float64)  # over float16's largest number
    assert check_error(truth.half(), truth, truth.half(), truth).ok
    assert not check_error(torch.tensor([65504.0, 1.0]).half(), truth, truth.half(), truth).ok


def test_rounding_scale_of_a_product_is_that_of_its_terms() -> None:
    """Where they cancel too; and a sum over rows counts its partial sums."""
    x, y = torch.randn(40, 64, dtype=torch.float64), torch.randn(64, 40, dtype=torch.float64)
    truth = {"product": x @ y, "sum": x.sum(0)}
    scale = measure_rounding_scale(
        lambda change: {"product": change(x) @ change(y), "sum": change(x).sum(0)}, truth, 16
    )
    terms = (4 * x.square() @ y.square()).sqrt()  # each factor moves twice: given, and multiplied
    assert (scale["product"] / terms).square().mean().sqrt().item() == pytest.approx(1, rel=0.05)
    assert (scale["sum"] > 1.5 * x.square().sum(0).sqrt()).all()


ON_CPU = ["doctor", "--device", "cpu", "--backend", "reference", "--backend", "aten"]


@pytest.mark.parametrize("problems", ["one of each op", pytest.param("all", marks=pytest.mark.full)])
def test_doctor_reports_every_op_backend_and_gradient(
    problems: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compared = [*cases.problems(torch.device("cpu"))]
    assert {p.op for p in compared} == {*OPS}
    if problems != "all":
        compared = [*{p.op: p for p in compared}.values()]
        monkeypatch.setattr(doctor, "problems", lambda device: compared)
    assert main([*ON_CPU, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True and report["device"] == report["devices"][0]["device"] == "cpu"
    assert report["versions"]["torch"] == torch.__version__
    assert report["versions"]["extension"]["built"] or report["versions"]["extension"]["reason"]
    found = {(c["op"], c["case"], c["backend"], c["dtype"], c["result"]) for c in report["checks"]}
    for p, backend, dtype in itertools.product(compared, ("reference", "aten"), ("float32", "bfloat16", "float16")):
        names = {f"grad of {name}" for name in p.tensors if p.differentiable} | {"out"}
        assert {(p.op, p.case, backend, dtype, name) for name in names} <= found
    assert all(c["ok"] == (c["error"] <= c["bound"]) for c in report["checks"])
    assert all(case["refusals"] == {"reference": None, "aten": None} for case in report["cases"])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[cases.Problem]:
    """The doctor compares and times these two problems alone."""
    found = [cases.attention("planted", Lq=5, Lk=5, is_causal=True), cases.decode_attention("no gradient")]
    monkeypatch.setattr(doctor, "problems", lambda device: found)
    monkeypatch.setattr(doctor, "timed_problems", lambda device: found)
    return found


def test_doctor_names_a_backend_that_is_wrong_or_raises(
    small: list[cases.Problem], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And keeps what it has found at Ctrl-C, or INT at a time limit."""
    module, right = fastattn.backends.aten.attention, fastattn.backends.aten.attention.attention

    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object, **options: object) -> object:
        return right(q, k, v.roll(1, dims=2), *rest, **options)

    def broken(*arguments: object, **options: object) -> object:
        raise RuntimeError("broken on purpose")

    def interrupted(q: torch.Tensor, *rest: object, **options: object) -> object:
        if q.dtype == torch.bfloat16:
            raise KeyboardInterrupt
        return right(q, *rest, **options)

    for planted, line in (
        (wrong, r"OUT OF BOUNDS +attention, planted, aten, float32"),
        (broken, "FAILED +attention, planted, aten, float32: RuntimeError: broken on purpose"),
        (interrupted, r"\nstopped before the end\n0 of [1-9]"),
    ):
        monkeypatch.setattr(module, "attention", planted)
        assert main(ON_CPU) == 1
        text = capsys.readouterr().out
        assert re.search(line, text), text
        assert not re.search(r"(OUT OF BOUNDS|FAILED) +(decode|attention, planted, reference)", text)


def test_time_prints_each_backends_time(
    small: list[cases.Problem], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A backend that fails is named, and the others are timed. A call of every op is in the list."""
    assert {p.op for p in cases.timed_problems(torch.device("cpu"))} == OPS.keys() - {"add_rms_norm"}
    right = doctor.milliseconds

    def planted(call: Any, on_gpu: bool) -> float:
        if call.args == ("reference",):
            raise torch.OutOfMemoryError
        return right(call, on_gpu)

    monkeypatch.setattr(doctor, "milliseconds", planted)
    monkeypatch.setenv("FASTATTN_BACKEND", "decode_attention=reference")
    assert main([*ON_CPU, "--time"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"attention +planted +float32 +reference failed +\*aten [\d.e-]+$", text, re.MULTILINE)
    assert re.search(r"no gradient +bfloat16 +\*reference failed +aten", text)
    assert 'FASTATTN_BACKEND="attention=' in text and "* is the choice, as FASTATTN_BACKEND requests" in text


def test_a_gpus_time_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the host needs five times as long."""
    clock = gpu_clock.GpuClock(monkeypatch)
    assert doctor.milliseconds(lambda: clock.run(5e-4, 1e-4), on_gpu=True) == pytest.approx(0.1)
