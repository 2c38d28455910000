"""`finetune_huggingface.py`: it trains, and continues from its checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import command_line
import pytest

PROGRAM = Path(command_line.__file__).parent / "finetune_huggingface.py"


@pytest.mark.full
def test_it_trains_and_continues(tmp_path: Path) -> None:
    pytest.importorskip("transformers"), pytest.importorskip("accelerate")

    def run(steps: str) -> str:  # in another process, because Trainer sets the precision of the whole process
        command = [sys.executable, PROGRAM, "--out", str(tmp_path), "--steps", steps]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout

    run("200")
    assert (tmp_path / "checkpoint-200").is_dir()
    out = run("400")
    assert "MarianDecoderLayer" in out
    found = [line.split(" -> ")[1].split(" (expected: ") for line in out.splitlines() if " -> " in line]
    assert sum(made == expected.rstrip(")") for made, expected in found) >= 2
