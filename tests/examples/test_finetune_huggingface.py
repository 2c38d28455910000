"""`python examples/finetune_huggingface.py`: it trains, continues from its checkpoint, and loads a saved model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import finetune_huggingface  # noqa: E402


@pytest.mark.full
def test_it_trains_and_continues(tmp_path: Path) -> None:
    def run(steps: str) -> str:  # in another process, because Trainer sets the precision of the whole process
        command = [sys.executable, finetune_huggingface.__file__, "--out", str(tmp_path), "--steps", steps]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout

    run("200")
    assert (tmp_path / "checkpoint-200").is_dir()
    out = run("400")
    assert "MarianDecoderLayer" in out
    found = [line.split(" -> ")[1].split(" (expected: ") for line in out.splitlines() if " -> " in line]
    assert sum(made == expected.rstrip(")") for made, expected in found) >= 2


def test_a_model_needs_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        finetune_huggingface.main(["--model", "folder"])
    assert "--model and --pairs go together" in capsys.readouterr().err
