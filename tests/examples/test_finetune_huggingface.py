"""`finetune_huggingface.py`: it trains, continues from its checkpoint, and saves what a frozen encoder saves."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import command_line
import pytest

PROGRAM = Path(command_line.__file__).parent / "finetune_huggingface.py"


@pytest.mark.full
def test_it_trains_and_continues(tmp_path: Path) -> None:
    pytest.importorskip("transformers"), pytest.importorskip("accelerate")

    def run(*options: str) -> str:  # in another process, because Trainer sets the precision of the whole process
        command = [sys.executable, PROGRAM, "--out", str(tmp_path), *options]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout

    run("--steps", "200")
    assert (tmp_path / "checkpoint-200").is_dir()
    out = run("--steps", "400")
    assert "MarianDecoderLayer" in out
    found = [line.split(" -> ")[1].split(" (expected: ") for line in out.splitlines() if " -> " in line]
    assert sum(made == expected.rstrip(")") for made, expected in found) >= 2
    out = run("--steps", "1", "--freeze", "encoder", "--out", str(tmp_path / "frozen"))
    costs = re.findall(r"^ +([0-9.]+) +([0-9.]+)  MiB of ", out, re.MULTILINE)
    assert len(costs) == 2 and all(float(frozen) < float(whole) for frozen, whole in costs)
