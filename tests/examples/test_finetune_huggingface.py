"""`python examples/finetune_huggingface.py`: it trains, continues from its checkpoint, and loads a saved model."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import finetune_huggingface  # noqa: E402


@pytest.mark.full
def test_it_trains_and_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--out", str(tmp_path), "--steps"]
    finetune_huggingface.main([*run, "200"])
    assert (tmp_path / "checkpoint-200").is_dir()
    finetune_huggingface.main([*run, "400"])
    assert "MarianDecoderLayer" in (out := capsys.readouterr().out)
    found = [line.split(" -> ")[1].split(" (expected: ") for line in out.splitlines() if " -> " in line][-3:]
    assert sum(made == expected.rstrip(")") for made, expected in found) >= 2


def test_a_model_needs_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        finetune_huggingface.main(["--model", "folder"])
    assert "--model and --pairs go together" in capsys.readouterr().err
