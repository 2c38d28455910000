"""Every benchmark makes a valid record on a CPU, and times nothing that is wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
NAMES = sorted(path.stem for path in BENCHMARKS.glob("bench_*.py"))
CPU = torch.device("cpu")


def wrong(load: Any, function: Any, ours: bool = False) -> Any:
    """A provider that computes `function` of the leaves instead of the op."""
    harness = load("harness")
    return harness.Provider("wrong", lambda case, inputs, dropout_p: harness.run_of(function, inputs), ours)


def with_provider(load: Any, name: str, provider: Any) -> Any:
    """The benchmark `name` with the reference path, one more provider, and PyTorch's own operators after it."""
    module: ModuleType = load(name)
    harness = load("harness")
    fields = vars(module.BENCHMARK)
    providers = module.providers(CPU)
    peer = next(peer for peer in providers if not peer.ours and not peer.later)
    return harness.Benchmark(**fields | {"providers": lambda device: [providers[0], provider, peer]})


@pytest.mark.parametrize("name", NAMES)
def test_a_script_makes_a_record_and_a_table(
    name: str, load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load(name)
    out = tmp_path / "records" / "record.json"
    assert load("harness").main(module.BENCHMARK, ["--quick", "--device", "cpu", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    table = capsys.readouterr().out

    assert record["complete"] is True
    assert record["ops"][module.BENCHMARK.name]["formula"] in table
    environment = record["environment"]
    assert environment["device"]["name"] and environment["versions"]["torch"] == torch.__version__
    assert environment["threads"] == torch.get_num_threads()
    assert environment["date"].startswith("20")

    cases = [str(case) for case in module.BENCHMARK.cases["quick"]]
    providers = [provider.name for provider in module.providers(CPU) if not provider.later]
    assert [(row["case"], row["provider"]) for row in record["rows"]] == [(c, p) for c in cases for p in providers]
    for row in record["rows"]:
        assert row["case"] in table
        if row["status"] == "refused":
            assert row["reason"] in table
            continue
        assert row["status"] == "ok", row
        assert row["error_over_bound"] <= load("harness").WRONG
        assert list(row["timings"]) == list(module.BENCHMARK.directions)
        for timing in row["timings"].values():
            assert 0 < timing["min_ms"] <= timing["q1_ms"] <= timing["median_ms"] <= timing["q3_ms"]
            assert timing["samples"] >= 5
        assert row["peak_mib"] > 0
    default = [row for row in record["rows"] if row.get("default")]
    assert [row["case"] for row in default] == cases


def test_a_provider_that_returns_zeros_is_not_timed(load: Any) -> None:
    def zeros(x: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        return x * 0 + sum(0 * t.sum() for t in others.values())

    benchmark = with_provider(load, "bench_add_layer_norm", wrong(load, zeros))
    rows = load("harness").measure_all(benchmark, CPU, quick=True)["rows"]
    assert [row["status"] for row in rows] == ["ok", "wrong result", "ok"] * 2
    assert all("timings" not in row for row in rows if row["status"] == "wrong result")


def test_a_provider_that_is_wrong_in_one_gradient_is_not_timed(load: Any) -> None:
    def unscaled(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        total = residual + x
        normal = torch.nn.functional.layer_norm(total, total.shape[-1:], eps=1e-6)
        return normal * weight + (bias + (bias - bias.detach()))  # the value is right, the gradient of bias double

    benchmark = with_provider(load, "bench_add_layer_norm", wrong(load, unscaled))
    harness = load("harness")
    case = benchmark.cases["quick"][0]
    inputs = benchmark.inputs(case, CPU)
    reference, provider, _ = benchmark.providers(CPU)
    checker = harness.Checker(benchmark, case, inputs, reference)
    assert checker.ratio(reference) <= 1 and checker.ratio(provider) > harness.WRONG


LOSSES = {
    "right": (lambda loss: loss, "ok"),
    "value": (lambda loss: loss + 0.1 * loss.detach(), "wrong result"),
    "gradient": (lambda loss: 1.1 * loss - 0.1 * loss.detach(), "wrong result"),
}


@pytest.mark.parametrize("planted", LOSSES)
def test_a_step_with_a_wrong_loss_is_not_timed(planted: str, load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """fastattn's backends are measured with FusedTransformer.loss, so that is what is checked."""
    change, status = LOSSES[planted]
    models, harness, module = load("models"), load("harness"), load("bench_transformer")
    fused_loss = models.fused_loss
    monkeypatch.setattr(models, "fused_loss", lambda *arguments: change(fused_loss(*arguments)))
    case = module.BENCHMARK.cases["quick"][0]
    inputs = module.make_inputs(case, CPU)
    reference, default, *_ = module.providers(CPU)
    for provider, wanted in ((default, status), (reference, "ok")):
        checker = harness.Checker(module.BENCHMARK, case, inputs, reference)
        row = harness.measure_provider(module.BENCHMARK, case, provider, inputs, checker, CPU, 0.01)
        assert row["status"] == wanted, row


@pytest.mark.parametrize("ours", [True, False])
def test_a_failure_is_recorded_and_fails_the_script_when_it_is_ours(
    ours: bool, load: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(**leaves: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("planted")

    benchmark = with_provider(load, "bench_feed_forward", wrong(load, broken, ours))
    assert load("harness").main(benchmark, ["--quick", "--device", "cpu"]) == int(ours)
    assert "failed: RuntimeError: planted" in capsys.readouterr().out


def test_the_part_of_attention_that_is_compared_is_the_same_problem(load: Any) -> None:
    """With grouped heads, a mask and dropout: the reference on the part equals the part of the reference."""
    cases, harness, module = load("cases"), load("harness"), load("bench_attention")
    reference = module.providers(CPU)[0]
    for mask in ("full", "causal", "padding", "blocks", "alibi", "bias"):
        heads_k = None if mask == "bias" else 2
        case = cases.AttentionCase(2, 4, 70, 80, 16, mask, heads_k=heads_k, dropout_p=0.0 if mask == "bias" else 0.2)
        checker = harness.Checker(module.BENCHMARK, case, module.make_inputs(case, CPU), reference)
        assert checker.ratio(reference) < 0.7


def test_a_script_runs_by_itself() -> None:
    command = [sys.executable, str(BENCHMARKS / "bench_add_layer_norm.py"), "--quick", "--device", "cpu"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert "reference" in result.stdout


def test_torch_compile_is_checked_and_timed(load: Any) -> None:
    module, harness = load("bench_attention"), load("harness")
    reference, *_ = providers = module.providers(CPU)
    compiled = next(provider for provider in providers if provider.later)
    case = module.BENCHMARK.cases["quick"][0]
    inputs = module.BENCHMARK.inputs(case, CPU)
    checker = harness.Checker(module.BENCHMARK, case, inputs, reference)
    row = harness.measure_provider(module.BENCHMARK, case, compiled, inputs, checker, CPU, 0.01)
    assert row["status"] == "ok", row
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_a_pinned_kernel_that_did_not_run_is_refused(load: Any) -> None:
    peers, module, harness = load("attention_peers"), load("bench_attention"), load("harness")
    case = module.BENCHMARK.cases["quick"][0]
    inputs = module.make_inputs(case, CPU)
    backends = torch.nn.attention.SDPBackend
    with pytest.raises(harness.Refused, match="pinned, but math ran"):
        peers.torch_sdpa("flash (CPU)", backends.MATH).make(case, inputs, 0.0)
    with pytest.raises(harness.Refused, match="no such kernel"):
        peers.torch_sdpa("cudnn", backends.CUDNN_ATTENTION).make(case, inputs, 0.0)
    assert peers.torch_sdpa("math", backends.MATH).make(case, inputs, 0.0).notes == {"ran": "math"}


@pytest.mark.skipif(importlib.util.find_spec("pytest_benchmark") is None, reason="pytest-benchmark is not installed")
def test_pytest_benchmark_collects_the_scripts() -> None:
    command = [sys.executable, "-m", "pytest", str(BENCHMARKS / "bench_add_layer_norm.py"), "--benchmark-only", "-q"]
    command += ["--benchmark-max-time=0.01", "--benchmark-min-rounds=1", "-p", "no:cacheprovider", "-k", "forward"]
    # Under pytest-xdist its variables would tell the new process that it is a worker, where nothing is timed.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "test_add_layer_norm[40x96 fp32-reference-forward]" in result.stdout
