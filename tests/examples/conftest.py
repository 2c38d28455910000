"""Text that is small and can be learned, and a run that was trained on it."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import train_translation
from example_runs import in_words, on_text


def write_text(folder: Path) -> Path:
    folder.mkdir()
    held_out = {"val": range(100, 300, 17), "test_a": range(101, 300, 17)}
    train = sorted(set(range(100, 300)).difference(*held_out.values()))
    for name, numbers in {"train": train, **held_out}.items():
        (folder / f"{name}.digits").write_text("".join(f"{number}\n" for number in numbers))
        (folder / f"{name}.words").write_text("".join(in_words(str(number)) + "\n" for number in numbers))
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder of numbers in digits and in words."""
    return write_text(tmp_path / "text")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A run on such text: its folder, what it printed and its record. The rate is so high that epochs get worse too."""
    folder = tmp_path_factory.mktemp("trained")
    text, out, printed = write_text(folder / "text"), folder / "run", io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert train_translation.main([*on_text(text, out), "--epochs", "8", "--lr-scale", "4", "--average", "3"]) == 0
    return SimpleNamespace(
        text=text, out=out, printed=printed.getvalue(), record=json.loads((out / "record.json").read_text())
    )
