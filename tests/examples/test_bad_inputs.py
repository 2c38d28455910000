"""What a command does with what it cannot use: exit status 2, and one line on stderr that names the file."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import train_translation as train
import translate
from command_line import folder_lock
from example_runs import DATES, on_text
from translation.checkpoint import save_model
from translation.settings import Settings
from translation.tokens import CharacterTokenizer
from translation.training import build_model


class Executed:
    """Unpickling it would leave a file."""

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (Path("executed"),))


TRAIN = [*on_text(Path("text"), Path("run")), "--steps", "1"]
ON_DATES = [*DATES, "--steps", "1", "--out", "."]
RESUME = [*ON_DATES, "--resume"]
TRANSLATE = ["--device", "cpu", "--model", "model.pt"]
DAMAGED = "is damaged, or not what this version of train_translation.py writes"
CODE = pickle.dumps(Executed())
# The command's options, files that are written before it (bytes) or links, and what stderr names.
BAD: list[tuple[Any, list[str], dict[str, bytes | str], str]] = [
    (train, TRAIN, {"text/val.digits": b"300\n"}, "val.words, line 2: has no partner; text/val.digits has 1"),
    (train, TRAIN, {"text/val.digits": b"1\nH\xfcndchen\n"}, "text/val.digits, line 2: not UTF-8"),
    (train, TRAIN, {"text/train2.digits-words.tsv": b"1\tone\n2\n"}, "tsv, line 2: not text in two languages"),
    (train, TRAIN, {"text/train2.jsonl": b'\n{"digits": 1, "words": "a"}'}, "train2.jsonl, line 2: not text"),
    (train, [*TRAIN, "--target", "fr"], {}, "text: found train.digits; needs train.digits and train.fr"),
    (train, RESUME, {}, "last.pt: no such file, so there is nothing to resume"),
    (train, ON_DATES, {"last.pt": b""}, ".: holds a run already"),
    (train, RESUME, {"last.pt": CODE}, f"last.pt: {DAMAGED}"),
    (train, ON_DATES, {"model.partial": "/dev/full"}, "model.pt: cannot be written: No space left on device"),
    (translate, TRANSLATE, {"model.pt": b"PK\3\4"}, f"model.pt: {DAMAGED}"),
    (translate, TRANSLATE, {"model.pt": CODE}, f"model.pt: {DAMAGED}"),
    (translate, [*TRANSLATE[:3], "missing.pt"], {}, "missing.pt: cannot be read: No such file"),
    (translate, [*TRANSLATE[:3], "weights.pt"], {}, "weights.pt: holds weights alone; give model.pt or last.pt"),
]  # fmt: skip


@pytest.mark.parametrize(("program", "options", "files", "message"), BAD, ids=[row[3] for row in BAD])
def test_a_bad_input(
    program: Any, options: list[str], files: dict[str, bytes | str], message: str, text: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Nothing in a file is executed."""
    monkeypatch.chdir(text.parent)
    settings, tokenizer = Settings(layers=1, d_model=16, d_inner=16, heads=2, max_length=16), CharacterTokenizer("abc")
    save_model(Path("model.pt"), build_model(settings, tokenizer.size), settings, tokenizer)
    torch.save(torch.load("model.pt", weights_only=True)["model"], "weights.pt")
    for name, content in files.items():
        Path(name).symlink_to(content) if isinstance(content, str) else Path(name).write_bytes(content)
    assert program.main(options) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("error: ") and message in error.splitlines()[-1]
    assert error.count("error: ") == 1 and "Traceback" not in error and not Path("executed").exists()


def test_a_folder_in_use_and_another_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*DATES, "--out", str(tmp_path), "--steps", "1"]
    with folder_lock(tmp_path):
        assert train.main(arguments) == 2
    assert "another run is writing there; choose another --out" in capsys.readouterr().err
    assert train.main(arguments) == 0
    assert train.main([*arguments, "--resume", "--d-model", "32"]) == 2
    assert "--d-model was 16, is 32" in capsys.readouterr().err
