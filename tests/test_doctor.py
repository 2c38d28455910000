"""The rule by which results are judged, and the command that applies it on a user's machine."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial

import pytest
import torch

import fastattn.aten.attention
import fastattn.aten.feed_forward
from fastattn import doctor
from fastattn.__main__ import main
from fastattn._problems import problems, solve

INF, NAN = float("inf"), float("nan")


def a_product(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(truth, low): a product of matrices in float64 and in dtype."""
    x = torch.randn(32, 48).to(dtype)
    return x.double() @ x.double().T, x @ x.T


@pytest.mark.parametrize("dtype", doctor.DTYPES, ids=str)
def test_judge_passes_twice_the_error_of_the_plain_formula_and_no_more(dtype: torch.dtype) -> None:
    truth, low = a_product(dtype)
    error = (low.double() - truth).abs().max()
    assert doctor.judge(low, truth, low).ok
    assert doctor.judge(truth.to(dtype), truth, low).ok
    for factor, passes in ((1.9, True), (4.0, False)):
        moved = truth.clone()
        moved.view(-1)[truth.abs().argmin()] += factor * error  # where a rounding of the output counts least
        assert doctor.judge(moved.to(dtype), truth, low).ok is passes


def test_judge_sees_a_small_error_that_is_everywhere() -> None:
    truth, low = a_product(torch.float32)
    everywhere = (truth + 1.5 * (low.double() - truth).abs().max()).float()
    assert (everywhere.double() - truth).abs().max() < 2 * (low.double() - truth).abs().max()
    assert not doctor.judge(everywhere, truth, low).ok


def test_judge_allows_one_rounding_where_the_formula_is_exact() -> None:
    truth = torch.tensor([1.0 + 2.0**-8], dtype=torch.float64)  # half way between two bfloat16 numbers
    exact = truth.bfloat16()
    assert doctor.judge(exact, truth, exact).ok
    zero = torch.zeros(3)
    assert doctor.judge(zero, zero.double(), zero).ok
    assert not doctor.judge(zero + 1e-30, zero.double(), zero).ok


def test_judge_never_passes_nan_and_takes_infinities_literally() -> None:
    truth, low = a_product(torch.float32)
    for wrong in (NAN, INF, -INF):
        actual = low.clone()
        actual[3, 4] = wrong
        assert not doctor.judge(actual, truth, low).ok
        assert not doctor.judge(actual, truth, actual).ok  # a formula that overflows is no excuse
    truth[3, 4], empty = -INF, low.clone()
    assert not doctor.judge(low, truth, low).ok
    empty[3, 4] = -INF
    assert doctor.judge(empty, truth, empty).ok
    empty[3, 4] = INF
    assert not doctor.judge(empty, truth, low).ok


def test_judge_takes_an_overflow_of_the_dtype_as_its_infinity() -> None:
    truth = torch.tensor([1e6, 1.0], dtype=torch.float64)
    assert doctor.judge(truth.half(), truth, truth.half()).ok
    assert not doctor.judge(torch.tensor([65504.0, 1.0]).half(), truth, truth.half()).ok


def test_judge_refuses_what_cannot_be_compared() -> None:
    truth, low = a_product(torch.float32)
    with pytest.raises(ValueError, match="shapes"):
        doctor.judge(low[:1], truth, low)
    with pytest.raises(ValueError, match="dtypes"):
        doctor.judge(low, truth, low.half())
    with pytest.raises(ValueError, match="NaN"):
        doctor.judge(low, truth * NAN, low)


ON_CPU = ["doctor", "--device", "cpu", "--backend", "reference", "--backend", "aten"]


def test_doctor_reports_every_op_backend_and_gradient(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ON_CPU, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert report["device"] == "cpu"
    assert report["versions"]["torch"] == torch.__version__
    assert report["versions"]["extension"]["built"] or report["versions"]["extension"]["reason"]
    assert report["devices"][0]["device"] == "cpu"
    compared = {(c["op"], c["backend"], c["dtype"], c["result"]) for c in report["checks"]}
    results = {
        "attention": ["out", "grad of query", "grad of key", "grad of value", "grad of attn_mask"],
        "add_layer_norm": ["out", "grad of x", "grad of residual", "grad of weight", "grad of bias"],
        "add_rms_norm": ["out", "out[1]", "grad of x", "grad of residual", "grad of weight"],
        "embed_layer_norm": ["out", "grad of embedding", "grad of weight", "grad of bias"],
        "feed_forward": ["out", "grad of x", *(f"grad of {p}" for p in ("weight1", "bias1", "weight2", "bias2"))],
        "linear_cross_entropy": ["out", "grad of x", "grad of weight", "grad of bias"],
    }
    for op, names in results.items():
        for backend in ("reference", "aten"):
            for dtype in ("float32", "bfloat16", "float16"):
                assert {(op, backend, dtype, name) for name in names} <= compared
    assert all(c["ok"] == (c["error"] <= c["bound"]) for c in report["checks"])
    assert all(case["refusals"] == {"reference": None, "aten": None} for case in report["cases"])


def test_the_other_order_of_a_formula_is_the_same_formula() -> None:
    """What sets the bound must be right: in float64 both orders agree, outputs and gradients."""
    orders = [problem for problem in problems(torch.device("cpu")) if problem.other_order]
    assert {problem.op for problem in orders} == {"attention"}
    for problem in orders:
        one, other = (
            solve(problem, partial(function, backend="reference"), torch.float64, torch.float64)
            for function in (problem.function, problem.other_order)
        )
        for name, result in one.items():
            torch.testing.assert_close(other[name], result, rtol=1e-12, atol=1e-12, msg=f"{problem.case}: {name}")


def test_doctor_names_a_backend_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = fastattn.aten.attention.attention

    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object, **options: object) -> object:
        return right(q, k, v.roll(1, dims=2), *rest, **options)

    monkeypatch.setattr(fastattn.aten.attention, "attention", wrong)
    assert main([*ON_CPU, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    bad = [check for check in report["checks"] if not check["ok"]]
    assert {(check["op"], check["backend"]) for check in bad} == {("attention", "aten")}
    assert "causal" in {check["case"] for check in bad}


def test_doctor_survives_a_backend_that_raises(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*arguments: object, **options: object) -> object:
        raise RuntimeError("planted")

    monkeypatch.setattr(fastattn.aten.feed_forward, "feed_forward", broken)
    assert main(ON_CPU) == 1
    text = capsys.readouterr().out
    assert "FAILED  feed_forward, relu, aten, float32: RuntimeError: planted" in text
    assert "FAILED  attention" not in text and "OUT OF BOUNDS" not in text


def test_commands_explain_themselves(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FASTATTN_BACKEND", "nosuch")
    for wrong, told in (
        ([], "NAME"),
        (["doktor"], "doktor"),
        (["doctor", "--device", "abacus"], "abacus"),
        (["doctor"], "FASTATTN_BACKEND must be one of"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(wrong)
        assert stopped.value.code == 2
        assert told in capsys.readouterr().err


def test_doctor_runs_where_triton_is_missing() -> None:
    """In a process in which `import triton` fails: the doctor says so and the rest is examined."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from fastattn.__main__ import main\n"
        "sys.exit(main(['doctor', '--device', 'cpu', '--backend', 'triton']))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert "triton is not installed" in result.stdout and "nothing was compared" in result.stdout
