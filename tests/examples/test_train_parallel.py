"""The command in several processes, as torchrun starts them: the same training, and any number can continue it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import train_translation
from translation.data import Batch, share_of
from translation_options import DATES, random_examples

COMMAND = Path(train_translation.__file__)
OPTIONS = [*DATES, "--dates", "60"]


def command(processes: int) -> list[str]:
    if processes == 1:
        return [sys.executable, str(COMMAND)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*launcher, str(COMMAND)]


def train(out: Path, processes: int, *options: str) -> list[float]:
    """Runs the command; the losses of all its steps so far."""
    result = subprocess.run(
        [*command(processes), *OPTIONS, *options, "--out", str(out)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("training pairs") == 1, "only one process prints"
    return losses_of(out)


def losses_of(out: Path) -> list[float]:
    return torch.load(out / "last.pt", weights_only=True)["progress"]["losses"]


@pytest.mark.full
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """An epoch and a part of the next in one process; and in two, with batches in two parts each. --graph changes
    nothing on a CPU but the batches."""
    alone = train(tmp_path / "one", 1, "--graph", "--steps", "16")
    assert train(tmp_path / "two", 2, "--graph", "--accumulate", "2", "--steps", "16") == pytest.approx(alone, rel=1e-5)
    records = [json.loads((tmp_path / name / "record.json").read_text()) for name in ("one", "two")]
    values = [{name: found["val_loss"] for name, found in record["candidates"].items()} for record in records]
    assert values[0] == pytest.approx(values[1], rel=1e-5) and {"mean", "best", "last"} == set(values[0])
    assert records[0]["kept"] == records[1]["kept"]
    translations = [(tmp_path / name / "held-out.translations").read_text() for name in ("one", "two")]
    assert translations[0] == translations[1] and translations[0].count("\n") == 5


@pytest.mark.full
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("processes", [2, 4])
def test_fifty_steps(processes: int, kind: str, tmp_path: Path) -> None:
    alone = train(tmp_path / "one", 1, "--steps", "50")
    together = train(tmp_path / "many", processes, "--parallel", kind, "--steps", "50")
    assert len(alone) == 50 and alone[-1] < 0.9 * alone[0]
    assert together == pytest.approx(alone, rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_stopped_run_continues_in_another_number_of_processes(kind: str, tmp_path: Path) -> None:
    """torchrun gets SIGTERM: all processes stop at the same step and save. Then one process continues, then four."""
    alone = train(tmp_path / "one", 1, "--epochs", "60")
    out = tmp_path / "many"
    running = subprocess.Popen(
        [*command(2), *OPTIONS, "--parallel", kind, "--epochs", "1000", "--save-every", "5", "--out", str(out)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    patience = time.monotonic() + 120
    while not (out / "epoch-0002.pt").exists() and running.poll() is None and time.monotonic() < patience:
        time.sleep(0.1)
    running.send_signal(signal.SIGTERM)
    errors = running.communicate(timeout=120)[1]
    stopped = losses_of(out)
    assert "interrupted after step" in errors and 10 < len(stopped) < len(alone)
    assert stopped == pytest.approx(alone[: len(stopped)], rel=1e-4)
    more = str(len(stopped) + 7)
    assert train(out, 1, "--resume", "--steps", more) == pytest.approx(alone[: int(more)], rel=1e-4)
    last = str(len(stopped) + 14)
    options = ("--resume", "--parallel", "fsdp2" if kind == "ddp" else "ddp", "--steps", last)
    assert train(out, 4, *options) == pytest.approx(alone[: int(last)], rel=1e-4)


@pytest.mark.full
def test_dropout_differs_between_processes_and_continues(tmp_path: Path) -> None:
    """The same command draws the same; an interruption changes nothing where the number of processes stays."""
    options = ("--dropout", "0.3", "--steps", "12")
    whole = train(tmp_path / "whole", 2, *options)
    train(tmp_path / "parts", 2, "--dropout", "0.3", "--steps", "5")
    assert train(tmp_path / "parts", 2, *options, "--resume") == whole
    assert train(tmp_path / "one", 1, *options) != pytest.approx(whole, rel=1e-3)


@pytest.mark.full
def test_an_error_of_the_first_process_ends_all_of_them(tmp_path: Path) -> None:
    """A file that only it writes: one line, and no process waits for another."""
    (tmp_path / "last.pt").mkdir()
    result = subprocess.run(
        [*command(2), *OPTIONS, "--steps", "2", "--out", str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert result.returncode != 0
    assert result.stderr.count(f"error: {tmp_path / 'last.pt'}: cannot be written: Is a directory") == 1
    assert "translation/training.py" not in result.stderr, "no traceback of a process"


def test_a_batch_is_shared_by_tokens() -> None:
    """Every sentence once, nearly as many tokens each; and an empty share where there are too few."""
    examples, rows = random_examples(37, 3, 7), np.arange(37)
    shares = [share_of(examples, rows, rank, 3, 2) for rank in range(3)]
    parts = [part for share in shares for part in share.parts]
    assert len(parts) == 6 and sum(len(part.source) for part in parts) == 37
    tokens = [part.tokens for part in parts]
    assert sum(tokens) == shares[0].tokens == shares[2].tokens and max(tokens) - min(tokens) <= 16
    assert sum(part.target_tokens for part in parts) == shares[1].target_tokens

    alone, idle = (share_of(examples, rows[:1], rank, 2, 1).parts[0] for rank in range(2))
    assert alone.target_out.count_nonzero() == examples.index["target"][0] - 1 and not idle.target_out.any()
    assert isinstance(share_of(examples, rows, 0, 1, 1), Batch)
