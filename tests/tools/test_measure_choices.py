"""tools/measure_choices.py on small problems, in the emulator as an H100: every way of every call runs."""

from __future__ import annotations

import json
from pathlib import Path

import measure_choices
import pytest


@pytest.mark.full
def test_every_way_runs(emulator: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTATTN_EMULATOR_CAPABILITY", "90")
    out = tmp_path / "choices.json"
    call = ["--out", str(out), "--device", "cpu", "--tiny", "--seconds", "0.01"]
    assert measure_choices.main(call) == 0
    rows = json.loads(out.read_text())["rows"]
    assert len({row["section"] for row in rows}) == 5
    for row in rows:
        assert set(row["failed"]) <= {"triton"} and len(row["ms"]) >= 2, row
