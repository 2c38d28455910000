"""`python -m fastattn tune` with planted calls: what it refuses before it measures, and what it never loses."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gpu_clock
import pytest
import torch

from fastattn import __version__
from fastattn.__main__ import main
from fastattn.backends import timings
from fastattn.check import tune


def fail() -> None:
    raise ValueError("planted\nand more")


def interrupt() -> None:
    raise KeyboardInterrupt


def call(name: str, fast: Callable[[], None], op_name: str = "product") -> tune.TimedCall:
    """The built-in way works; the other does what is planted, in no time if that is nothing."""
    state: list[str] = []

    def step() -> None:
        if state[-1] == "fast":
            fast()
        else:
            sum(range(20000))

    def way(which: str) -> Any:
        state.append(which)
        return nullcontext()

    ways = {which: functools.partial(way, which) for which in ("slow", "fast")}
    return tune.TimedCall(op_name, name, "a call", torch.float32, step, ways, "slow")


def nothing() -> None:
    pass


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[int, Path]]]:
    """Run the command over these calls: its status, and the record's path."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tune, "SECONDS", {"cpu": 0.01})
    measured = tune.tune

    def run(*calls: tune.TimedCall | Exception, options: tuple[str, ...] = ()) -> tuple[int, Path]:
        def table(device: torch.device) -> Iterator[tune.TimedCall]:
            for call in calls:
                if isinstance(call, Exception):
                    raise call
                yield call

        monkeypatch.setattr(tune, "tune", functools.partial(measured, table=table))
        return main(["tune", "--device", "cpu", *options]), timings.user_path(timings.device_name("cpu"))

    timings.reload_records()
    yield run
    timings.reload_records()


def choices(path: Path) -> dict[str, dict[str, str]]:
    return json.loads(path.read_text())["choices"]


def test_what_a_run_does_not_reach_is_kept(run: Any) -> None:
    _, path = run(call("a", nothing), call("b", nothing), call("c", nothing, "attention"))
    assert choices(path) == {"product": {"a": "fast", "b": "fast"}, "attention": {"c": ["fast", "slow"]}}
    assert run(call("b", lambda: time.sleep(0.005)), call("d", nothing))[0] == 0
    assert choices(path) == {"product": {"a": "fast", "b": "slow", "d": "fast"}, "attention": {"c": ["fast", "slow"]}}
    assert sorted(row["class"] for row in json.loads(path.read_text())["rows"]) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    "change", [{"versions": {}}, {"device": "another"}, {"threads": 99}, {"rows": 1}, {"choices": {"product": 3}}]
)
def test_a_record_of_something_else_is_replaced(run: Any, change: dict[str, Any]) -> None:
    _, path = run(call("a", nothing))
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    run(call("b", nothing))
    assert choices(path) == {"product": {"b": "fast"}}


def test_a_run_that_measures_nothing_leaves_the_record(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, path = run(call("a", nothing))
    before = path.read_text()
    for calls, options in (((), ()), ((call("b", interrupt),), ()), ((call("b", nothing),), ("--minutes", "1e-9"))):
        assert run(*calls, options=options)[0] == 1
        assert path.read_text() == before
        assert f"nothing was measured: {path} stays as it was" in capsys.readouterr().out
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_ctrl_c_keeps_what_was_measured(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, path = run(call("a", nothing), call("b", interrupt), call("c", nothing))
    assert status == 0 and choices(path) == {"product": {"a": "fast"}}
    assert "stopped by Ctrl-C: what follows stays as it was" in capsys.readouterr().out


def test_a_way_that_fails_is_left_out(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, path = run(call("a", fail), call("b", nothing))
    assert status == 1 and choices(path) == {"product": {"a": "slow", "b": "fast"}}
    assert "fast failed: ValueError: planted\n" in capsys.readouterr().out
    row = json.loads(path.read_text())["rows"][0]
    assert row["failed"] == {"fast": "ValueError: planted"} and list(row["ms"]) == ["slow"]


def test_a_device_that_breaks_loses_nothing(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, path = run(call("a", nothing), RuntimeError("CUDA error: planted"))
    assert choices(path) == {"product": {"a": "fast"}}
    assert "stopped by RuntimeError: CUDA error: planted" in capsys.readouterr().out


def test_a_gpus_ways_are_ranked_by_the_gpus_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One takes the host longer, the other the GPU: between two events around one call the order was the other one."""
    clock = gpu_clock.GpuClock(monkeypatch)
    costs = {"slow": (20e-6, 50e-6), "fast": (200e-6, 5e-6)}
    state: list[str] = []
    ways = {name: lambda name=name: (state.append(name), nullcontext())[1] for name in costs}
    step = lambda: clock.run(*costs[state[-1]])  # noqa: E731
    planted = tune.TimedCall("attention", "a class", "a call", torch.float32, step, ways, "slow")
    assert tune.measure(planted, gpu_clock.DEVICE) == pytest.approx({"slow": 0.05, "fast": 0.005})
    monkeypatch.setattr(timings, "device_name", lambda device_type: "a GPU")
    monkeypatch.setattr(timings, "compute_capability", lambda device_type: [9, 0])
    found = tune.tune(gpu_clock.DEVICE, 1.0, lambda line: None, lambda device: iter([planted]))
    assert found["choices"] == {"attention": {"a class": ["fast", "slow"]}} and found["capability"] == [9, 0]
    assert "without waits for the host" in found["measured"]


def test_aten_must_be_clearly_faster_than_a_gpus_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = gpu_clock.GpuClock(monkeypatch)
    monkeypatch.setattr(timings, "device_name", lambda device_type: "a GPU")
    monkeypatch.setattr(timings, "compute_capability", lambda device_type: [9, 0])
    monkeypatch.setattr(tune, "_DoctorVerdicts", lambda device: lambda *asked: True)
    for aten, first in ((48e-6, "cuda"), (40e-6, "aten")):
        costs, state = {"aten": aten, "cuda": 50e-6, "triton": 90e-6}, []
        ways = {name: lambda name=name, state=state: (state.append(name), nullcontext())[1] for name in costs}
        step = lambda costs=costs, state=state: clock.run(1e-6, costs[state[-1]])  # noqa: E731
        planted = tune.TimedCall("attention", "a class", "a call", torch.float32, step, ways, "triton")
        found = tune.tune(gpu_clock.DEVICE, 1.0, lambda line: None, lambda device, planted=planted: iter([planted]))
        assert found["choices"]["attention"]["a class"][0] == first


def refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_what_is_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune, "tune", None)  # it must not be called
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    refused(["tune", "--device", "cpu"], "cannot be written: ", capsys)
    monkeypatch.setenv("FASTATTN_BACKEND", "aten")
    refused(["tune", "--device", "cpu"], "with FASTATTN_BACKEND=aten there is nothing to choose", capsys)
    monkeypatch.setenv("FASTATTN_BACKEND", "nosuch")
    refused(["tune", "--device", "cpu"], "FASTATTN_BACKEND must be one of", capsys)


def test_the_command_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    refused([], tune.__doc__.split(": ")[1].split(",")[0], capsys)  # the help, with what tune does
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out == f"fastattn {__version__}\n"
    monkeypatch.setattr("fastattn.check.doctor.examine", lambda *arguments: interrupt())
    with pytest.raises(SystemExit) as stopped:
        main(["doctor"])
    assert stopped.value.code == 130 and capsys.readouterr().err == "stopped by Ctrl-C\n"
