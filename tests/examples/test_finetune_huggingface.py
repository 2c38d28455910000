"""`finetune_huggingface.py`: it trains, continues from its checkpoint, and reads pairs."""

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


def test_pairs(tmp_path: Path) -> None:
    (tmp_path / "pairs").write_bytes("\ufeffein\u2028Hund \t a dog\r\n\nzwei\x0cdrei\tdos\x85tres\r\n".encode())
    pairs = finetune_huggingface.read_pairs(tmp_path / "pairs")
    assert pairs == [("ein\u2028Hund", "a dog"), ("zwei\x0cdrei", "dos\x85tres")]
