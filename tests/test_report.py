"""The report loses nothing, stops for nothing, and says what was measured."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
CATALOGUE = "planted_catalogue"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(what: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def processes_with(text: str) -> list[int]:
    """The running processes that have this file open as their output."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "fd" / "1") == text:
                found.append(int(process.name))
        except OSError:
            continue  # ended, or not ours to see
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="asks /proc which processes are left")
def test_killed_in_the_middle_it_goes_on_and_nothing_stops_it(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong result, a crash, no memory, a hang; killed during the hang, and run again."""
    options = ["--quick", "--out", str(tmp_path), "--device", "cpu"]
    program = f"import sys; sys.path[:0] = {[str(ROOT / 'benchmarks'), str(ROOT / 'tests')]}\n"
    program += "import records; records.sources = lambda: 'one version'\n"  # others may edit while this runs
    program += f"import report; report.main({[*options, '--limit', '300']}, {CATALOGUE!r})"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    log = tmp_path / "rows.jsonl"
    with subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.DEVNULL) as process:
        wait_for(lambda: len(lines(log)) == 5 or process.poll() is not None, 120)  # ceilings and four providers
        process.send_signal(signal.SIGKILL)
    before = log.read_text()
    assert process.returncode == -signal.SIGKILL
    wait_for(lambda: not processes_with(str(tmp_path / "worker.log")), 10)  # nobody is left sleeping

    monkeypatch.setattr(load("records"), "sources", lambda: "one version")
    said = load("report").main([*options, "--limit", "5"], CATALOGUE)
    assert said == 1  # "zeros" counts as one of fastattn's backends
    assert log.read_text().startswith(before)
    assert len(lines(log)) == 7
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["missing"] == 0
    status = {row["provider"]: row["status"] for row in record["rows"]}
    assert status == {
        "reference": "ok",
        "zeros": "wrong result",
        "crash": "crashed",
        "no memory": "out of memory",
        "hang": "timed out",
        "after": "ok",
    }
    for row in record["rows"]:
        assert ("timings" in row) == (row["status"] == "ok")
    written = (tmp_path / "report.md").read_text()
    assert "crash: crashed: the process ended with signal SIGSEGV" in written
    assert "hang: timed out: not done in 5 s" in written
    assert "zeros: wrong result" in written
    assert "1 TiB" in written

    log.write_text(log.read_text() + '{"run": "torn')  # a third run has nothing to do, whatever its log ends with
    assert load("report").main([*options, "--minutes", "1"], CATALOGUE) == 1
    assert json.loads((tmp_path / "record.json").read_text())["rows"] == record["rows"]


def test_a_torn_line_spoils_no_other(load: Any, tmp_path: Path) -> None:
    report, path = load("report"), tmp_path / "rows.jsonl"
    path.write_text('{"run": "a", "op": "x"}\n{"run": "b", "op": "y"}\n{"run": "a", "op"')
    log = report.Log(path, "a")
    assert log.rows == [{"op": "x"}]  # neither another run's nor the torn one
    log.append({"op": "z"})
    assert report.Log(path, "a").rows == [{"op": "x"}, {"op": "z"}]
    assert report.Log(path, "b").rows == [{"op": "y"}]


def test_other_code_is_another_run(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, records = load("report"), load("records")
    made = [report.Report(tmp_path, CPU, "quick", None, CATALOGUE, 1.0).log.run for _ in range(2)]
    monkeypatch.setattr(records, "sources", lambda: "changed")
    made.append(report.Report(tmp_path, CPU, "quick", None, CATALOGUE, 1.0).log.run)
    assert made[0] == made[1] != made[2]


def test_no_time_is_said_and_starts_nothing(load: Any, tmp_path: Path) -> None:
    assert load("report").main(["--quick", "--out", str(tmp_path), "--device", "cpu", "--minutes", "0"]) == 0
    assert not (tmp_path / "worker.log").exists()
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["missing"] > 20 and record["rows"] == []
    assert f"{record['missing']} measurements are missing" in (tmp_path / "report.md").read_text()


def test_the_order_is_the_tables_and_what_compiles_comes_later(load: Any) -> None:
    report, plan = load("report"), load("catalogue").plan("cpu")
    ceilings, *jobs = report.jobs_of(plan, CPU, quick=False)
    assert ceilings.index is None
    slow = [job for job in jobs if job.provider.startswith("torch.compile")]
    fast = [job for job in jobs if job not in slow]
    assert slow and not [job for job in report.jobs_of(plan, CPU, quick=True) if job in slow]
    assert [job.index for job in fast] == sorted(job.index for job in fast)
    assert jobs.index(slow[0]) > jobs.index(next(job for job in fast if job.index == 12))
    steps = [jobs.index(job) for job in slow if isinstance(plan[job.index][1], load("cases").StepCase)]
    assert min(steps) > jobs.index(slow[0])  # whole models last
    assert jobs[0] == (0, "reference")


def test_every_provider_of_a_gpu_has_a_name_of_its_own(load: Any) -> None:
    plan = load("catalogue").plan("cuda")
    jobs = load("report").jobs_of(plan, torch.device("cuda"), quick=False)
    assert len(set(jobs)) == len(jobs)
    named = {job.provider for job in jobs}
    assert {
        "triton",
        "cuda",
        "sdpa cudnn",
        "flex + mask building",
        "FlashAttention-4",
        "Liger-Kernel",
        "quack",
    } <= named


def test_an_unknown_benchmark_is_refused(load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load("report").main(["--out", str(tmp_path), "--only", "atention"])
    assert "no benchmark atention" in capsys.readouterr().err


def timed(median: float) -> dict[str, float]:
    return {"min_ms": median * 0.9, "q1_ms": median * 0.95, "median_ms": median, "q3_ms": median * 1.05, "samples": 9}


def step_row(provider: str, median: float, **notes: Any) -> dict[str, Any]:
    row = {"op": "transformer", "case": "a step", "provider": provider, "ours": True, "status": "ok"}
    return row | {"error_over_bound": 0.5, "timings": {"step": timed(median)}, "peak_mib": 1.0} | notes


def attention_rows(length: int, reference: float, default: float) -> list[dict[str, Any]]:
    rows = []
    for provider, median, ours in (("reference", reference, True), ("aten", default, True), ("sdpa", default, False)):
        row = {"op": "attention", "case": f"length {length}", "provider": provider, "ours": ours, "status": "ok"}
        row |= {"error_over_bound": 0.5, "peak_mib": float(length)}
        row["timings"] = {direction: timed(median) for direction in ("forward", "backward", "both")}
        rows.append(row | ({"default": True} if provider == "aten" else {}))
    return rows


def memory_row(length: int, provider: str, mib: float) -> dict[str, Any]:
    row = {"op": "memory", "case": f"step of {length}", "provider": provider, "ours": True, "status": "ok"}
    row |= {"error_over_bound": 0.5, "timings": {}, "peak_mib": mib}
    return row | ({"default": True} if provider == "default" else {})


@pytest.fixture
def record(load: Any) -> dict[str, Any]:
    """A record of made-up figures: one step and a curve over four lengths."""
    lengths = (32, 64, 128, 256)
    work = {"flop": 2e9, "byte": 1e6, "token": 100.0}
    step = {"op": "transformer", "case": "a step", "dtype": "fp32", "series": None, "work": {"step": work}}
    curve = [
        {"op": "attention", "case": f"length {n}", "dtype": "fp32", "series": ["attention d64", n]}
        | {"work": {direction: work for direction in ("forward", "backward", "both")}}
        for n in lengths
    ]
    grown = [
        {"op": "memory", "case": f"step of {n}", "dtype": "fp32", "series": ["step memory", n], "work": {}}
        for n in lengths
    ]
    rows = [
        *(
            memory_row(n, provider, mib * n)
            for n in lengths
            for provider, mib in (("reference", 3.0), ("default", 1.5))
        ),
        step_row("reference", 100.0),
        step_row("default", 40.0, default=True),
        step_row("default, attention by reference", 70.0, without="attention"),
        step_row("default, feed_forward by reference", 38.0, without="feed_forward"),
        step_row("plain PyTorch", 80.0, ours=False),
        step_row("torch.compile of plain", 50.0, ours=False),
        *(row for n in lengths for row in attention_rows(n, n / 2, n / 8)),
    ]
    attention = {"formula": "some", "baseline": "reference", "directions": ["forward", "backward", "both"]}
    return {
        "environment": load("records").environment(CPU),
        "ceilings": {"byte_per_s": 1e10, "flop_per_s": {"fp32": 1e11}},
        "missing": 0,
        "ops": {
            "transformer": {"formula": "f", "baseline": "reference", "directions": ["step"], "rates": ["token"]},
            "attention": attention | {"rates": ["flop"]},
            "memory": {"formula": "m", "baseline": "reference", "directions": [], "rates": []},
        },
        "cases": [step, *curve, *grown],
        "rows": rows,
    }


def test_summary_and_shares(load: Any, record: dict[str, Any]) -> None:
    summary = list(load("report_markdown").summary(record))
    # 100, 80 and 50 ms against 40; the bound is 2e9 / 1e11 s = 20 ms.
    assert "| a step | 40 | 2.50x | 2.00x | 1.25x | 1.25x torch.compile of plain | 50% |" in summary
    assert "| length 64 | 8 | 4.00x | 1.00x | - | 1.00x sdpa | 250% |" in summary
    assert "| step of 64 | 96.0 | 2.00x | - |" in summary
    record["ceilings"]["byte_per_s"] = 1e7  # now the bytes are the bound: 100 ms
    assert load("records").bound_ms(record, record["cases"][0], "step") == pytest.approx(100)


def test_plots_are_drawn_from_what_is_there(load: Any, record: dict[str, Any], tmp_path: Path) -> None:
    plots = load("report_plots")
    step = [row for row in record["rows"] if row["op"] == "transformer"]
    assert plots.contributions(step) == (100.0, 40.0, {"attention": 30.0, "feed_forward": -2.0})
    kept = next(row for row in step if row.get("without") == "attention")  # 70 ms
    against = [row if row is kept or not row.get("without") else row | {"against": kept["provider"]} for row in step]
    assert plots.contributions(against) == (100.0, 40.0, {"attention": 30.0, "feed_forward": -32.0})
    with pytest.MonkeyPatch.context() as patch:
        titles = []
        patch.setattr(plots, "_save", lambda figure, out, name: titles.extend(a.get_title() for a in figure.axes))
        plots._memory(plots._series(record), tmp_path)
    assert titles == ["attention d64", "step memory"]
    names = plots.draw(record, tmp_path)
    assert names == ["speed_attention_d64.png", "memory.png", "roofline.png", "step.png"]
    assert all((tmp_path / name).stat().st_size > 10_000 for name in names)
    assert plots.draw(record | {"rows": []}, tmp_path) == []


def test_a_machine_without_matplotlib_measures_and_another_draws(
    load: Any, record: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load("records").save(record, tmp_path / "record.json")
    monkeypatch.delitem(sys.modules, "report_plots", raising=False)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        assert load("report").main(["--render", str(tmp_path)]) == 0
    assert "No plots" in (tmp_path / "report.md").read_text() and not list(tmp_path.glob("*.png"))
    assert load("report").main(["--render", str(tmp_path / "record.json")]) == 0
    assert "![step.png](step.png)" in (tmp_path / "report.md").read_text() and (tmp_path / "step.png").exists()


def test_compare_flags_what_is_beyond_the_quartiles(
    load: Any, record: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def compared(**medians: float) -> tuple[int, str]:
        after = copy.deepcopy(record)
        for row in after["rows"]:
            if row["provider"] in medians and row["op"] == "transformer":
                row["timings"]["step"] = timed(medians[row["provider"]])
        load("records").save(after, tmp_path / "b.json")
        return load("report").main(["--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]), (
            capsys.readouterr().out
        )

    load("records").save(record, tmp_path / "a.json")
    assert compared()[0] == 0
    status, said = compared(default=43.0)  # 95 % of 43 is still within 105 % of 40
    assert status == 0 and "default, step: 40 -> 43 ms, 1.07x \n" in said
    status, said = compared(default=60.0)
    assert status == 1 and "default, step: 40 -> 60 ms, 1.50x slower" in said
    status, said = compared(default=20.0)
    assert status == 0 and "0.50x faster" in said
    assert compared(**{"plain PyTorch": 160.0})[0] == 0  # a peer may get slower
    grown = copy.deepcopy(record)
    next(row for row in grown["rows"] if row["op"] == "memory" and row.get("default"))["peak_mib"] *= 1.1
    load("records").save(grown, tmp_path / "b.json")
    assert load("report").main(["--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 1
    assert "step of 32: default, memory: 48.0 -> 52.8 MiB more\n" in capsys.readouterr().out
    gone = copy.deepcopy(record)
    next(row for row in gone["rows"] if row.get("default")).update(status="failed", reason="planted")
    load("records").save(gone, tmp_path / "b.json")
    assert load("report").main(["--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 1
    assert "ok -> failed planted" in capsys.readouterr().out


def test_the_readme_says_what_the_records_say(
    load: Any, record: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme, path = load("report_readme"), tmp_path / "README.md"
    results = tmp_path / "results"
    results.mkdir()
    path.write_text(f"before\n{readme.BEGIN}old\n{readme.END}after\n")
    assert readme.main(write=False, readme=path, results=results) == 1
    assert readme.main(write=True, readme=path, results=results) == 0
    assert "No record from a GPU has been made yet" in path.read_text()

    load("records").save(record, results / "report_here.json")
    assert readme.main(write=False, readme=path, results=results) == 1  # a record came
    assert readme.main(write=True, readme=path, results=results) == 0
    assert readme.main(write=False, readme=path, results=results) == 0
    text = path.read_text()
    assert text.startswith("before\n") and text.endswith("after\n")
    assert record["environment"]["device"]["name"] in text and "No record from a GPU" in text
    path.write_text(text.replace("2.50x", "2.60x"))
    capsys.readouterr()
    assert readme.main(write=False, readme=path, results=results) == 1
    assert "2.60x" in capsys.readouterr().err

    on_gpu = copy.deepcopy(record)
    on_gpu["environment"]["device"] = {"device": "cuda:0", "name": "Some GPU", "capability": "9.0", "memory_gib": 80.0}
    load("records").save(on_gpu, results / "report_there.json")
    readme.main(write=True, readme=path, results=results)
    assert "No record from a GPU" not in path.read_text()
    assert re.search(r"Some GPU.*CPU", path.read_text(), re.DOTALL), "the GPU comes first"
    path.write_text("no markers\n")
    with pytest.raises(ValueError, match="must hold the markers"):
        readme.main(write=False, readme=path, results=results)


def test_this_readme_is_written_from_these_records(load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("report").main(["--check"]) == 0, capsys.readouterr().err
