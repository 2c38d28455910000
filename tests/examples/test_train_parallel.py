"""The command in several processes, as torchrun starts them: the same training, and any number can continue it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import train_translation
from example_runs import DATES, state_of

pytestmark = pytest.mark.full
OPTIONS = [train_translation.__file__, *DATES, "--dates", "60", "--held-out", "5"]


def start(out: Path, processes: int, *options: str) -> subprocess.Popen[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(torchrun if processes > 1 else []), *OPTIONS, *options, "--out", str(out)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, **pipes)


def train(out: Path, processes: int, *options: str) -> list[float]:
    """Runs the command; the losses of all its steps so far."""
    running = start(out, processes, *options)
    printed, errors = running.communicate(timeout=600)
    assert running.returncode == 0, errors[-3000:]
    assert printed.count("training pairs") == 1, "only one process prints"
    return state_of(out)["progress"]["losses"]


@pytest.mark.parametrize(
    ("processes", "options"), [(2, ["--graph", "--accumulate", "2"]), (4, ["--parallel", "fsdp2"])], ids=str
)
def test_several_processes_train_as_one(processes: int, options: list[str], tmp_path: Path) -> None:
    """The losses, the values of the candidates, the one that is kept, what it translates. --graph changes nothing on a
    CPU but the batches."""
    graph = [option for option in options if option == "--graph"]
    alone = train(tmp_path / "one", 1, *graph, "--steps", "50")
    assert alone[-1] < 0.9 * alone[0]
    assert train(tmp_path / "many", processes, *options, "--steps", "50") == pytest.approx(alone, rel=1e-5)
    one, many = (json.loads((tmp_path / name / "record.json").read_text()) for name in ("one", "many"))
    values = [{name: found["val_loss"] for name, found in record["candidates"].items()} for record in (one, many)]
    assert values[0] == pytest.approx(values[1], rel=1e-5) and {"mean", "best", "last"} == set(values[0])
    assert one["kept"] == many["kept"]
    translations = [(tmp_path / name / "held-out.translations").read_text() for name in ("one", "many")]
    assert translations[0] == translations[1] and translations[0].count("\n") == 5


def test_a_stopped_run_continues_in_another_number_of_processes(tmp_path: Path) -> None:
    """torchrun gets SIGTERM: all processes stop at the same step and save. Then one process continues, then four."""
    out = tmp_path / "many"
    running = start(out, 2, "--epochs", "1000", "--save-every", "5")
    patience = time.monotonic() + 120
    while not (out / "epoch-0002.pt").exists() and running.poll() is None and time.monotonic() < patience:
        time.sleep(0.1)
    running.send_signal(signal.SIGTERM)
    assert "interrupted after step" in running.communicate(timeout=120)[1]
    stopped = state_of(out)["progress"]["losses"]
    more = [str(len(stopped) + n) for n in (7, 14)]
    alone = train(tmp_path / "one", 1, "--epochs", "1000", "--steps", more[1])
    assert stopped == pytest.approx(alone[: len(stopped)], rel=1e-4) and len(stopped) > 10
    assert train(out, 1, "--epochs", "1000", "--resume", "--steps", more[0]) == pytest.approx(alone[:-7], rel=1e-4)
    options = ("--epochs", "1000", "--resume", "--parallel", "fsdp2", "--steps", more[1])
    assert train(out, 4, *options) == pytest.approx(alone, rel=1e-4)


def test_dropout_differs_between_processes_and_continues(tmp_path: Path) -> None:
    """Where the number of processes stays an interruption changes nothing."""
    options = ("--dropout", "0.3", "--steps")
    whole = train(tmp_path / "whole", 2, *options, "12")
    train(tmp_path / "parts", 2, *options, "5")
    assert train(tmp_path / "parts", 2, *options, "12", "--resume") == whole
    assert train(tmp_path / "one", 1, *options, "12") != pytest.approx(whole, rel=1e-3)
