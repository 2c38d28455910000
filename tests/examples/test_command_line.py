"""What all commands of examples/ have in common."""

import io
import runpy
import sys
from pathlib import Path

import command_line
import pytest

PROGRAMS = [path for path in Path(command_line.__file__).parent.glob("*.py") if "__main__" in path.read_text()]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_output_is_utf8(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the locale is ASCII, as with a redirect on Windows: no text ends the program."""
    if program.stem == "finetune_huggingface":
        pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "argv", [program.name, "--help"])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(program), run_name="__main__")
    assert sys.stdout.encoding == "utf-8"
