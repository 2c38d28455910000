"""benchmarks/report.py as a user runs it: it loses nothing, goes on after a failure, and says what was measured."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import report
import report_markdown
import result_files
import tables
import torch
from cases import ATTENTION_DROPOUT

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


def record_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "record.json").read_text())


@pytest.mark.full
def test_a_report_of_one_op_goes_on_and_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*options: str) -> str:
        assert report.main(options) == 0
        return capsys.readouterr().out

    options = ("--out", str(tmp_path), "--quick", "--device", "cpu", "--only", "add_layer_norm")
    assert "1 measurements, 0" in run(*options, "--minutes", "0.001", "--match", "dropout.* fp32: aten$")
    said = run(*options, "--minutes", "0.001")
    assert "10 measurements, 0 of them done before" in said and record_in(tmp_path)["missing"] == 10
    run(*options)
    record = record_in(tmp_path)
    assert record["missing"] == 0 and record["ceilings"]["byte_per_s"] > 0
    rows = {row["provider"]: row for row in record["rows"]}
    assert rows["triton"]["status"] == rows["cuda"]["status"] == "refused"
    for name in ("reference", "aten", "torch"):
        assert rows[name]["status"] == "ok" and 0 < rows[name]["error_over_bound"] <= 1
        for timed in rows[name]["timings"].values():
            assert 0 < timed["min_ms"] <= timed["q1_ms"] <= timed["median_ms"] <= timed["q3_ms"]
    assert rows["aten"]["default"] and rows["torch"]["speed"]["both"] > 0 and "speed" not in rows["aten"]
    assert "| 40x96 fp32 |" in (tmp_path / "report.md").read_text()
    assert "10 measurements, 10 of them done before" in run(*options) and record_in(tmp_path)["rows"] == record["rows"]
    assert "10 measurements in both; of fastattn, 0 got slower" in run("--compare", str(tmp_path), str(tmp_path))
    with pytest.raises(SystemExit):
        report.main(["--out", str(tmp_path), "--only", "atention"])
    assert "no benchmark atention; there are accelerate, accelerate_inference, " in capsys.readouterr().err
    monkeypatch.setattr(result_files, "sources", lambda: "another version")
    run(*options, "--minutes", "0.001")
    assert record_in(tmp_path)["missing"] == 10
    (older,) = tmp_path.glob("record_*.json")
    assert json.loads(older.read_text())["rows"] == record["rows"]


@pytest.mark.full
def test_a_report_of_everything(tmp_path: Path) -> None:
    """Every quick case by every provider is right and timed."""
    command = [sys.executable, BENCHMARKS / "report.py", "--out", tmp_path, "--quick", "--device", "cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}  # host_time needs Triton's launch path
    done = subprocess.run([*command, "--minutes", "10"], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    record = record_in(tmp_path)
    assert record["missing"] == 0
    names = {benchmark.name for benchmark in tables.BENCHMARKS}
    assert {row["op"] for row in record["rows"]} == {case["op"] for case in record["cases"]} == names
    for row in record["rows"]:
        assert row["status"] in ("ok", "refused"), row
    for case in record["cases"]:
        rows = result_files.case_rows(record, case)
        assert sum(row.get("default", False) for row in rows) == 1, case


PLANTED = """
import os, signal, sys, time

import bench_add_layer_norm, harness, result_files, torch
from cases import NormCase

result_files.sources = lambda: "one version"  # others may edit while this runs

def zeros(x, **others):
    return x * 0 + sum(0 * t.sum() for t in others.values())

def double_gradient(x, residual, weight, bias):
    out = torch.nn.functional.layer_norm(residual + x, x.shape[-1:], weight, bias, 1e-6)
    return out + (bias - bias.detach())

def crash(**leaves):
    os.kill(os.getpid(), signal.SIGSEGV)

def no_memory(**leaves):
    raise torch.OutOfMemoryError("planted: tried to allocate 1 TiB")

def hang(**leaves):
    time.sleep(600)

def providers(device):
    reference, *_, plain, _ = bench_add_layer_norm.BENCHMARK.providers(device)
    ours = harness.Provider("zeros", lambda case, inputs, dropout_p: harness.function_run(zeros, inputs))
    planted = [double_gradient, crash, no_memory, hang]
    others = [harness.rival(f.__name__, lambda case, inputs, dropout_p, f=f: f) for f in planted]
    return [reference, ours, *others, plain._replace(name="after")]

def plan(table):
    fields = vars(bench_add_layer_norm.BENCHMARK)
    return [(harness.Benchmark(**fields | {"providers": providers}), NormCase(40, 96))]

if __name__ == "__main__":
    import report
    report.LIMIT_S = float(sys.argv[2])
    sys.exit(report.main(["--quick", "--device", "cpu", "--out", sys.argv[1]], plan))
"""


@pytest.mark.full
def test_killed_in_the_middle_it_goes_on_and_nothing_stops_it(tmp_path: Path) -> None:
    """Wrong results, a crash, no memory, a hang; killed during the hang, and run again."""
    program = tmp_path / "planted.py"
    program.write_text(PLANTED)
    command = [sys.executable, program, tmp_path / "out"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{BENCHMARKS}:{tmp_path}", "OMP_NUM_THREADS": "1"}
    written = tmp_path / "out" / "record.json"
    with subprocess.Popen([*command, "300"], env=environment, stdout=subprocess.DEVNULL) as process:
        end = time.monotonic() + 180
        while process.poll() is None and not (written.exists() and len(record_in(tmp_path / "out")["rows"]) == 5):
            assert time.monotonic() < end, "five providers were not measured in time"
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    before = record_in(tmp_path / "out")
    assert before["missing"] == 2

    done = subprocess.run([*command, "5"], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1, done.stderr  # "zeros" counts as one of fastattn's backends
    record = record_in(tmp_path / "out")
    assert record["rows"][:5] == before["rows"] and record["ceilings"] == before["ceilings"]
    status = {row["provider"]: row["status"] for row in record["rows"]}
    assert status == {
        "reference": "ok",
        "zeros": "wrong result",
        "double_gradient": "wrong result",
        "crash": "crashed",
        "no_memory": "out of memory",
        "hang": "timed out",
        "after": "ok",
    }
    assert all(("timings" in row) == (row["status"] == "ok") for row in record["rows"])
    written = (tmp_path / "out" / "report.md").read_text()
    for said in ("crashed: the process ended with signal SIGSEGV", "timed out: not done in 5 s", "1 TiB"):
        assert said in written


def timed(median: float) -> dict[str, float]:
    return {"min_ms": median * 0.9, "q1_ms": median * 0.95, "median_ms": median, "q3_ms": median * 1.05, "samples": 9}


@pytest.fixture
def record() -> dict[str, Any]:
    """Made-up figures: one training step, and its memory at four lengths."""

    def row(op: str, case: str, provider: str, mib: float = 1.0, **more: Any) -> dict[str, Any]:
        row = {"op": op, "case": case, "provider": provider, "ours": True, "status": "ok", "timings": {}}
        return row | {"error_over_bound": 0.5, "peak_mib": mib} | more

    def step(provider: str, ms: float, **more: Any) -> dict[str, Any]:
        return row("transformer", "a step", provider, timings={"step": timed(ms)}, **more)

    lengths = (32, 64, 128, 256)
    grown = {"op": "memory", "dtype": "fp32", "work": {}}
    work = {"step": {"flop": 2e9, "byte": 1e6, "token": 100.0}}
    return {
        "environment": result_files.environment(torch.device("cpu")),
        "ceilings": {"byte_per_s": 1e10, "flop_per_s": {"fp32": 1e11}},
        "missing": 0,
        "ops": {
            "transformer": {"formula": "f", "directions": ["step"], "rates": ["token"]},
            "memory": {"formula": "m", "directions": [], "rates": []},
            "attention": {"formula": "a", "directions": ["both"], "rates": []},
        },
        "cases": [
            {"op": "transformer", "case": "a step", "dtype": "fp32", "series": None, "work": work},
            *(grown | {"case": f"step of {n}", "series": ["step memory", n]} for n in lengths),
        ],
        "rows": [
            step("reference", 100.0),
            step("default", 40.0, default=True),
            step("default, padding kept", 48.0),
            step("plain PyTorch", 80.0, ours=False, speed={"step": 1.9}),
            step("torch.compile of plain PyTorch", 60.0, ours=False),
            step("default, own loss", 50.0),
            *(row("memory", f"step of {n}", "reference", 3.0 * n) for n in lengths),
            *(row("memory", f"step of {n}", "default", 1.5 * n, default=True) for n in lengths),
        ],
    }


def test_tables_and_plots_of_a_record(record: dict[str, Any], tmp_path: Path) -> None:
    """Of 40 ms; the bound is 2e9 / 1e11 s = 20 ms; what was measured alternately counts before the medians."""
    text = report_markdown.write_report(record, tmp_path).read_text()
    assert "| a step | 40 | 1.50x torch.compile of plain PyTorch | 1.90x | 1.20x | 1.20x | 50% | 2.50x |\n" in text
    assert "| step of 64 | 96.0 | - | 2.00x |\n" in text
    assert "## transformer" in text and "## memory" in text and "## attention" not in text  # of which there is no case
    assert "![memory.png](memory.png)" in text and (tmp_path / "memory.png").stat().st_size > 10_000
    record["conditions"] = {"loop_us": 1234.5, "clocks.sm": "1980"}
    record["rows"][1] |= {"first_s": 2.5, "pool_mib": 70.0}
    text = report_markdown.write_report(record, tmp_path).read_text()
    assert "\nMeasured by timing.conditions: loop_us 1.23e+03, clocks.sm 1980.\n" in text
    assert "| default (first call 2.5 s) |" in text and "| 1.0 + 70 of graphs |\n" in text
    record["rows"][4]["status"] = "failed"
    line = "| a step | 40 | 1.90x plain PyTorch | 1.90x | 1.52x | 1.20x | 50% | 2.50x |"
    assert line in report_markdown.summary(record)


def test_compare_flags_what_is_beyond_the_quartiles(
    record: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def compared(change: Callable[[list[dict[str, Any]]], Any]) -> tuple[int, str]:
        after = copy.deepcopy(record)
        change(after["rows"])
        for name, given in (("a.json", record), ("b.json", after)):
            result_files.save(given, tmp_path / name)
        status = report.main(["--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")])
        return status, capsys.readouterr().out

    def slower(place: int, ms: float) -> Callable[[list[dict[str, Any]]], Any]:
        return lambda rows: rows[place]["timings"].update(step=timed(ms))

    assert compared(lambda rows: None)[0] == 0
    status, said = compared(slower(1, 43.0))  # 95 % of 43 is still within 105 % of 40
    assert status == 0 and "default, step: 40 -> 43 ms, 1.07x \n" in said
    status, said = compared(slower(1, 60.0))
    assert status == 1 and "default, step: 40 -> 60 ms, 1.50x slower" in said
    assert compared(slower(3, 160.0))[0] == 0  # a rival may get slower
    status, said = compared(lambda rows: rows[-1].update(peak_mib=500.0))
    assert status == 1 and "default, memory: 384.0 -> 500.0 MiB more" in said
    status, said = compared(lambda rows: rows[1].update(status="failed", reason="planted"))
    assert status == 1 and "ok -> failed planted" in said


def with_host_time(record: dict[str, Any]) -> dict[str, Any]:
    """A record that has nothing but the host time of one case."""

    def row(provider: str, ms: float, launches: int | None, ours: bool = True) -> dict[str, Any]:
        timings = {direction: timed(ms) for direction in ("forward", "backward")} | {"both": timed(2 * ms)}
        more = {"timings": timings, "of_plain": {"both": ms / 8}, "launches": launches, "error_over_bound": None}
        return {"provider": provider, "ours": ours, "status": "ok", "peak_mib": None} | more

    missing = {"provider": "cuda", "ours": True, "status": "refused", "reason": "not yet"}
    found = [row("plain PyTorch", 8.0, None, ours=False), row("triton", 4.0, 150), missing]
    directions = ["forward", "backward", "both"]
    case = {"op": "host_time", "case": "6+6 layers d64/128 fp32", "dtype": "fp32", "series": None, "work": {}}
    return record | {
        "ops": {"host_time": {"formula": "h", "directions": directions, "rates": []}},
        "cases": [case],
        "rows": [{"op": case["op"], "case": case["case"]} | row for row in found],
    }


def test_host_time_is_a_table_and_a_sentence(record: dict[str, Any], tmp_path: Path) -> None:
    """150 launches of 4 us are 0.6 of 8 ms."""
    hosts = with_host_time(record)
    text = report_markdown.write_report(hosts, tmp_path).read_text()
    assert "| 6+6 layers d64/128 fp32 | plain PyTorch | 8 | 8 | 16 | 100% | - | - |\n" in text
    assert "| 6+6 layers d64/128 fp32 | triton | 4 | 4 | 8 | 50% | 150 | 54% |\n" in text
    assert "| 6+6 layers d64/128 fp32 | cuda: not yet | - | - | - | - | - | - |\n" in text
    both = [(Path("report_a.json"), record), (Path("report_b.json"), hosts)]
    said = report_markdown.results(both)
    assert "| a step | 40 |" in said and "of 6+6 layers" in said and "\n`triton` 50% in fp32\n" in said
    assert "results/report_b.json" in said and "`triton`" not in report_markdown.results(both[:1])


def test_an_epoch_is_a_table_of_all_providers(record: dict[str, Any], tmp_path: Path) -> None:
    """1000 tokens in 2 s. Of three calls a graph was replayed at two."""
    case = {"op": "epoch", "case": "20 pairs", "dtype": "fp32", "series": None}
    row = {
        "status": "ok",
        "timings": {"epoch": timed(2000.0)},
        "first_s": 9.0,
        "error_over_bound": 0.5,
        "peak_mib": None,
    }
    row |= {"op": "epoch", "case": "20 pairs", "ours": True, "pool_mib": 0.0}
    graphs = {"provider": "default, graphs", "replays": 2, "eager": 1, "pool_mib": 70.0}
    refused = {"provider": "default, GraphedStep", "status": "refused", "reason": "not here"}
    record |= {
        "ops": {"epoch": {"formula": "e", "directions": ["epoch"], "rates": ["token"]}},
        "cases": [case | {"work": {"epoch": {"flop": 1e9, "byte": 1e6, "token": 1000.0}}}],
        "rows": [row | {"provider": "default", "default": True}, row | graphs, row | refused],
    }
    text = report_markdown.write_report(record, tmp_path).read_text()
    assert "| 20 pairs | default | 500 tokens/s | 9 | 2 | - | 0 |\n" in text
    assert "| 20 pairs | default, graphs | 500 tokens/s | 9 | 2 | 67% | 70 |\n" in text
    assert "| 20 pairs | default, GraphedStep: not here | - | - | - | - | - |\n" in text


def test_masks_are_a_table_and_a_sentence(record: dict[str, Any], tmp_path: Path) -> None:
    """Alternating samples count. A case without torch's time is left out, of the means too."""
    ops = {"attention_masks": {"formula": "m", "directions": ["training", "inference"], "rates": []}}
    cases, rows = [], []
    for mask, size, speed in (("full", 128, 1.0), ("full", 512, None), ("packed", 128, 4.0), ("packed", 512, 2.0)):
        case = {"op": "attention_masks", "case": f"{mask}, 1x{size} fp32"}
        cases.append(case | {"dtype": "fp32", "series": None, "work": {}})
        timings = {direction: timed(1.0) for direction in ("training", "inference")}
        row = case | {"status": "ok", "timings": timings, "error_over_bound": 0.5, "peak_mib": 1.0}
        rows.append(row | {"provider": "fastattn", "ours": True, "default": True})
        if speed:
            rows.append(row | {"provider": "torch", "ours": False, "speed": {"training": 1.0, "inference": speed}})
    masks = record | {"ops": ops, "cases": cases, "rows": rows}
    text = report_markdown.write_report(masks, tmp_path).read_text()
    assert "| mask | 1x128 fp32 | 1x512 fp32 |\n" in text and "| full | 1.00 / 1.00 | - |\n" in text
    assert "| packed | 4.00 / 1.00 | 2.00 / 1.00 |\n| geometric mean | 2.00 / 1.00 | 2.00 / 1.00 |\n" in text
    said = " ".join(report_markdown.results([(Path("report_masks.json"), masks)]).split())
    assert "is 1.41 times as fast as torch's operator in the geometric mean, from 1.00 to 4.00;" in said
    assert "by over 5 % faster in 2 calls and slower in 0. By mask: packed 1.68, full 1.00 (`benchmarks/" in said


def test_accelerated_models_are_a_line_for_each_record_and_dropout(record: dict[str, Any]) -> None:
    def renamed(name: str, **changes: str) -> dict[str, Any]:
        of_step = {key: [r for r in record[key] if r["op"] == "transformer"] for key in ("cases", "rows")}
        return {key: [r | {"op": "accelerate", "case": name} | changes for r in of_step[key]] for key in of_step}

    one, two, default = renamed("T5 a step"), renamed("BERT a step"), renamed(f"BART a step{ATTENTION_DROPOUT}0")
    two["rows"][4] = two["rows"][4] | {"timings": {"step": timed(90.0)}}  # torch.compile; plain PyTorch is 1.9x
    half = renamed("T5 half a step", dtype="bf16")
    both = record | {key: one[key] + two[key] + default[key] + half[key] for key in one}
    said = report_markdown.figures([(Path("report_a.json"), both), (Path("report_b.json"), record | one)])
    same = "1.50x (1.50x to 1.50x) | 1.20x (1.20x to 1.20x)"
    line = f"| {report_markdown.machine(record).partition(';')[0]} |"
    assert f"{line} 0.1 | 1.69x (1.50x to 1.90x) | 1.35x (1.20x to 1.52x) | {same} |\n" in said
    assert f"{line} 0 (BART) | {same} | - | - |\n{line} 0.1 | {same} | - | - |\n" in said
    words = " ".join(said.split())
    assert "of T5 and BERT, a quarter padding" in words and "`benchmarks/results/report_b.json`):" in words


def test_calls_of_accelerated_models_are_tables_and_a_summary(record: dict[str, Any]) -> None:
    """A wrong result has no cell. In the README it replaces the table of dropout 0.1."""
    ops, cases, rows = {}, [], []

    def add(op: str, direction: str, case: str, *found: tuple[str, float | None, float]) -> None:
        ops[op] = {"formula": "f", "directions": [direction], "rates": []}
        cases.append({"op": op, "case": case, "dtype": "fp32", "series": None, "work": {}})
        for provider, ms, mib in found:
            row = {"op": op, "case": case, "provider": provider, "ours": provider != "as it is", "status": "ok"}
            if provider == "default":
                row["default"] = True
            row |= {"timings": {direction: timed(ms)}} if ms else {"status": "wrong result", "reason": "planted"}
            rows.append(row | {"error_over_bound": 0.5, "peak_mib": mib})

    def call(kind: str, cell: str, ms: float | None) -> None:
        add("accelerate_inference", "call", f"{kind}: {cell}", ("as it is", 12.0, 1.0), ("default", ms, 1.0))

    call("forward", "T5 d256 1x32 fp32", 8.0)
    call("forward", "T5 d256 8x64 fp32", 12.5)
    call("forward", "BART d256 1x32 fp32", 6.0)
    call("forward", "T5 d512 1x32 bf16", 12.0)
    call("greedy", "T5 d256 1x32 fp32", 4.0)
    call("4 beams", "T5 d256 1x32 fp32", 24.0)
    call("4 beams", "BART d256 1x32 fp32", None)
    step = (("as it is", 10.0, 100.0), ("default", 5.0, 80.0), ("default, own loss", 8.0, 104.0))
    add("accelerate_training", "step", "default dropout, no padding: T5 d256 1x32 fp32", *step)
    calls = record | {"ops": ops, "cases": cases, "rows": rows}
    tables = report_markdown.call_tables([(Path("report_a.json"), record), (Path("report_b.json"), calls)])
    assert "`benchmarks/results/report_b.json`" in tables and report_markdown.call_tables([]) == ""
    assert "**A forward**: geometric mean 1.30, least 0.96 (T5 d256 8x64 fp32)." in tables
    assert "|  | 1x32 fp32 | 8x64 fp32 | 1x32 bf16 |\n" in tables
    assert "| T5 d256 | 1.50 | 0.96 | - |\n| BART d256 | 2.00 | - | - |\n| T5 d512 | - | - | 1.00 |\n" in tables
    assert "| greedy / 4 beams | 1x32 fp32 |\n|---|---:|\n| T5 d256 | 3.00 / 0.50 |\n" in tables
    assert "| T5 d256, no padding | 1.25 / 2.00 |\n" in tables and "static" not in tables
    assert "own loss: geometric mean 1.04, most 1.04" in tables and "| T5 d256, no padding | 1.04 / 0.80 |\n" in tables
    assert "- default, 1 of 7 cases: wrong result: planted" in report_markdown.summary(calls)

    figures = report_markdown.figures([(Path("report_b.json"), calls)])
    assert "`accelerate`, 2 families of models" in figures and "|  | d256 fp32 | d512 bf16 |\n" in figures
    assert "| a forward | 1.42x (0.96x to 2.00x) | 1.00x (1.00x to 1.00x) |\n" in figures
    assert "| `generate`, 4 beams | 0.50x (0.50x to 0.50x) | - |\n" in figures


def test_the_readmes_figures_come_from_the_records(record: dict[str, Any]) -> None:
    readme = f"before\n{report_markdown.BEGIN}old\n{report_markdown.END}after\n"
    text = report_markdown.with_figures(readme, report_markdown.figures([(Path("report_here.json"), record)]))
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| a step | 40 | 1.50x torch.compile of plain PyTorch | 1.20x | 1.20x |" in text
    assert report_markdown.NO_GPU in text
    of_gpu = copy.deepcopy(record)
    gpu = {"device": "cuda:0", "name": "Some GPU", "capability": "9.0", "memory_gib": 80.0}
    of_gpu["environment"]["device"] = gpu
    of_gpu["cases"].append({"op": "attention", "case": "long", "dtype": "fp32", "series": None, "work": {}})
    for provider, ms, ours in (("cuda", 2.0, True), ("sdpa", 3.0, False)):
        timings = {"both": timed(ms)}
        more = {"provider": provider, "ours": ours, "default": ours, "timings": timings}
        of_gpu["rows"].append(of_gpu["rows"][0] | {"op": "attention", "case": "long"} | more)
    step = of_gpu["rows"][1]
    next(row for row in of_gpu["rows"] if row["provider"].startswith("torch.compile"))["speed"] = {"step": 1.2}
    next(row for row in of_gpu["rows"] if row["provider"] == "plain PyTorch")["speed"] = {"step": 1.1}
    graphed = {"provider": "default, GraphedStep", "default": False, "timings": {"step": timed(20.0)}}
    of_gpu["rows"].append(step | graphed)
    both = report_markdown.figures([(Path("report_there.json"), of_gpu), (Path("report_here.json"), record)])
    assert report_markdown.NO_GPU not in both and "| a step | 40 | 1.50x torch.compile of plain PyTorch |" in both
    # Of the two times shown; alternating samples of another machine's state may name another rival.
    assert "| a step | 60 torch.compile of plain PyTorch | 40: 1.50x | not measured yet | 20: 3.00x |" in both
    assert "the GPU's time alone: attention 1.50x." in both and "load" not in both
    words = "60 ms, fastattn in turn with it 50 (1.20x), with `GraphedStep` 20 (3.00x)"
    assert words in " ".join(both.split())
    assert "Not measured: alternatives with CUDA graphs" in " ".join(both.split())
    rival = of_gpu["rows"][3] | {"provider": "torch.compile of plain PyTorch, CUDA graphs", "timings": {}}
    of_gpu["rows"] += [step | graphed | {"provider": "default, graphs"}, rival | {"timings": {"step": timed(50.0)}}]
    of_gpu["rows"][1] = step | {"timings": {"step": timed(40.0) | {"device_ms": 9.0}}}
    of_gpu["ops"]["accelerate"] = of_gpu["ops"]["transformer"]
    of_gpu["cases"].append(of_gpu["cases"][0] | {"op": "accelerate"})
    of_gpu["rows"] += [row | {"op": "accelerate"} for row in of_gpu["rows"] if row["op"] == "transformer"]
    before = copy.deepcopy(of_gpu)
    before["rows"][1] = step | {"timings": {"step": timed(30.0) | {"device_ms": None}}}
    of_gpu["environment"]["load_before"], before["environment"]["load_before"] = 3.5, 0.5
    words = report_markdown.figures([(Path("report_there.json"), of_gpu), (Path("report_before.json"), before)])
    assert "| a step | 50 torch.compile of plain PyTorch, CUDA graphs | 40: 1.25x | 20: 2.50x | 20: 2.50x |" in words
    assert "Accelerated models: 1.10x." in " ".join(words.split())
    said = "in 2 runs, by how busy the host was (load 0.5 to 3.5): fastattn 30 to 40 ms (GPU 9)."
    assert said in " ".join(words.split()) and "not measured" not in words.lower()
    with pytest.raises(ValueError, match="must hold the markers"):
        report_markdown.with_figures("no markers\n", "text")


def test_committed_tables_are_those_of_the_committed_records() -> None:
    """If not: python benchmarks/report.py --readme."""
    found = report_markdown.committed(BENCHMARKS / "results")
    assert report_markdown.RESULTS.read_text() == report_markdown.results(found)
    figures, calls = report_markdown.figures(found), report_markdown.call_tables(found)
    for page, text in ((report_markdown.README, figures), (report_markdown.YOUR_MODEL, calls)):
        assert (written := page.read_text()) == report_markdown.with_figures(written, text)
