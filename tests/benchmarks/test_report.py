"""benchmarks/report.py as a user runs it: it loses nothing, goes on after a failure, and its ratios are right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import report
import report_markdown
import result_files
import torch

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


def record_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "record.json").read_text())


@pytest.mark.full
def test_a_report_of_one_op_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it was stopped; with other sources everything again."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = ("--out", str(tmp_path), "--quick", "--device", "cpu", "--only", "add_layer_norm")
    assert report.main([*options, "--minutes", "0.001"]) == 0 and record_in(tmp_path)["missing"] == 10
    assert report.main([*options, "--match", "^40x96 fp32"]) == 0 and len(record_in(tmp_path)["rows"]) == 5
    before = record_in(tmp_path)["rows"]
    assert report.main(options) == 0
    record = record_in(tmp_path)
    assert record["missing"] == 0 and record["rows"][:5] == before and record["ceilings"]["byte_per_s"] > 0
    rows = {row["provider"]: row for row in record["rows"]}
    assert all(0 < t["min_ms"] <= t["q1_ms"] <= t["median_ms"] <= t["q3_ms"] for t in rows["torch"]["timings"].values())
    assert rows["aten"]["default"] and rows["torch"]["speed"]["both"] > 0 and "speed" not in rows["aten"]
    monkeypatch.setattr(result_files, "sources", lambda: "another version")
    assert report.main(options) == 0 and len(record_in(tmp_path)["rows"]) == 10
    (older,) = tmp_path.glob("record_*.json")
    assert json.loads(older.read_text())["rows"] == record["rows"]
    assert (tmp_path / "speed_ups.png").stat().st_size > 10_000


PLANTED = """
import os, signal, sys, time

import bench_ops, harness
from cases import NormCase

BENCHMARK = bench_ops.BENCHMARKS[0]

def providers(device):
    reference, *_, plain, _ = BENCHMARK.providers(device)
    crash = harness.rival("crash", lambda *case: os.kill(os.getpid(), signal.SIGSEGV))
    hang = harness.rival("hang", lambda *case: time.sleep(600))
    return [reference, crash, hang, plain._replace(name="after")]

def plan(table):
    return [(harness.Benchmark(**vars(BENCHMARK) | {"providers": providers}), NormCase(40, 96))]

if __name__ == "__main__":
    import report
    report.LIMIT_S = 30.0
    sys.exit(report.main(["--quick", "--device", "cpu", "--out", sys.argv[1]], plan))
"""


@pytest.mark.full
def test_nothing_stops_it(tmp_path: Path) -> None:
    """Neither a crash nor a hang."""
    program = tmp_path / "planted.py"
    program.write_text(PLANTED)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{BENCHMARKS}:{tmp_path}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, program, tmp_path / "out"]
    subprocess.run(command, env=environment, check=True, timeout=600)
    found = {row["provider"]: row["status"] for row in record_in(tmp_path / "out")["rows"]}
    assert found == dict(reference="ok", crash="crashed", hang="timed out", after="ok")


def row(provider: str, ms: float, direction: str = "step", **more: Any) -> dict[str, Any]:
    timings = {direction: {"min_ms": 0.9 * ms, "q1_ms": ms, "median_ms": ms, "q3_ms": ms, "samples": 9}}
    ours = provider.startswith("default") or provider == "reference"
    row = {"op": "o", "case": "c", "provider": provider, "ours": ours, "status": "ok", "timings": timings}
    return row | {"error_over_bound": 0.5, "peak_mib": ms} | ({"default": True} if provider == "default" else {}) | more


def test_ratios_of_a_record() -> None:
    """Samples that alternate count before medians. The reference path and fastattn's own are no rivals."""
    rows = [row("reference", 10.0), row("default", 40.0), row("default, own loss", 30.0)]
    rows += [row("plain", 80.0, speed={"step": 1.9}), row("compiled", 60.0), row("fast", 1.0) | {"status": "failed"}]
    assert result_files.fastest_other(rows, "step") == (1.5, "compiled")
    assert result_files.slowdown(rows, rows[3], "step") == 1.9
    case = {"op": "o", "case": "c", "dtype": "fp32", "work": {"step": {"flop": 2e9, "byte": 1e6}}}
    record = {"ceilings": {"byte_per_s": 1e10, "flop_per_s": {"fp32": 1e11}}, "rows": rows}
    assert result_files.bound_ms(record, case, "step") == 20.0  # 2e9 / 1e11 s; the bytes need 0.1 ms
    assert result_files.bound_ms(record | {"ceilings": None}, case, "step") is None


def test_ratios_of_accelerated_models() -> None:
    """Of time by what alternated, in old records by the fastest samples; of memory the other way round."""
    case = {"op": "accelerate_training", "case": "default dropout: T5 d256 1x32 fp32"}
    ops = {"accelerate_training": {"directions": ["step"]}}
    for alternated, expected in (({}, 1.5), ({"speed": {"step": 1.2}}, 1.2)):
        rows = [row("as it is", 12.0, **alternated) | case, row("default", 8.0) | case]
        found = report_markdown.call_ratios({"ops": ops, "rows": rows}, [case])
        assert found["default dropout, report.loss"] == {("T5 d256", "1x32 fp32"): pytest.approx(expected)}
        assert found["peak memory, default dropout, report.loss"]["T5 d256", "1x32 fp32"] == pytest.approx(8 / 12)


def test_tables_follow_from_the_records() -> None:
    assert all(path.read_text() == text for path, text in report_markdown.pages().items()), "report.py --readme"


def test_committed_records_are_readable() -> None:
    found = report_markdown.committed(BENCHMARKS / "results")
    assert len(found) > 5 and torch.device(found[0][1]["environment"]["device"]["device"]).type == "cuda"
    for _, record in found:
        for op in {row["op"] for row in record["rows"]}:
            assert f"**{op}**" in report_markdown.summary(record) or not record["ops"][op]["directions"]
