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


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("\ufeffein Hund\ta dog\n\nzwei\tdos\n\n".encode(), [("ein Hund", "a dog"), ("zwei", "dos")]),
        (
            "ein\u2028Hund \t a dog\r\nzwei\x0cdrei\tdos\x85tres\r\n".encode(),
            [("ein\u2028Hund", "a dog"), ("zwei\x0cdrei", "dos\x85tres")],
        ),
        (b"eins\tuno\nzwei\tdos\tspam\n", r"line 2: expected source, tab, target, got 'zwei\tdos\tspam'"),
        (b"eins\tuno\nzwei\n", "line 2: expected source, tab, target, got 'zwei'"),
        (b"eins\tuno\n\t\ndrei\t\t\n", "line 3: expected source, tab, target"),
        (b"eins\tuno\nf\xfcnf\tcinco\n", "line 2: not UTF-8"),
        (b"\n\n", "holds no pair"),
        (None, "cannot be read"),
    ],
)
def test_pairs(
    content: bytes | None, found: list[tuple[str, str]] | str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Read from a file, or refused in one line, with the line's number, before a model is loaded."""
    path = tmp_path / "pairs"
    if content is not None:
        path.write_bytes(content)
    if isinstance(found, list):
        assert finetune_huggingface.read_pairs(path) == found
    else:
        assert finetune_huggingface.main(["--model", "nowhere", "--pairs", str(path)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {path}") and found in error and error.count("\n") == 1


def test_a_folder_that_holds_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pairs").write_text("eins\tuno\n")
    for folder, message in ((tmp_path / "nowhere", "no such folder"), (tmp_path, "cannot be loaded")):
        assert finetune_huggingface.main(["--model", str(folder), "--pairs", str(tmp_path / "pairs")]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {folder}: {message}") and error.count("\n") == 1
