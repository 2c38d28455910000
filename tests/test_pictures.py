"""The committed pictures are what docs/pictures.py draws from the committed records and today's code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[1]
COMMITTED = ROOT / "docs" / "pictures"
TRAINED = ("alignment", "captioner")  # drawn by options, not the same on every machine


def draw(*options: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "docs/pictures.py", *map(str, options)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_committed_pictures_are_up_to_date(tmp_path: Path) -> None:
    committed = {path.name: path.read_text() for path in COMMITTED.glob("*.svg") if path.stem not in TRAINED}
    drawn_by = {version for text in committed.values() for version in re.findall(r"Matplotlib v([\w.]+),", text)}
    assert len(drawn_by) == 1
    done = draw("--out", tmp_path)
    assert done.returncode == 0, done.stderr
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    assert drawn.keys() == committed.keys()
    if drawn_by != {matplotlib.__version__}:
        pytest.skip(f"drawn by matplotlib {drawn_by.pop()}, which may place things otherwise; here is another version")
    assert [name for name in drawn if drawn[name] != committed[name]] == [], "run `python docs/pictures.py`"


@pytest.mark.parametrize("path", sorted(COMMITTED.glob("*.svg")), ids=lambda path: path.stem)
def test_pictures_are_small_and_say_what_they_show(path: Path) -> None:
    text = path.read_text()
    assert len(text) <= 60_000 and "<title>" in text and "<image" not in text
    width = re.search(r'<svg [^>]*width="([\d.]+)pt"', text)
    assert width and 640 <= float(width[1]) * 96 / 72 <= 760


def test_missing_records_are_named(tmp_path: Path) -> None:
    done = draw("--records", tmp_path, "--out", tmp_path)
    assert done.returncode == 1 and "none has transformer by 'default, padding kept'" in done.stderr
