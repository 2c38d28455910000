"""What all commands do with what cannot be used: exit status 2, and one line on stderr that names the file."""

from __future__ import annotations

import importlib
import io
import pickle
import runpy
import sys
from pathlib import Path
from typing import Any

import command_line
import pytest
import torch
from command_line import folder_lock
from example_runs import DATES, on_text
from translation.checkpoint import save_model
from translation.settings import Settings
from translation.tokens import CharacterTokenizer
from translation.training import build_model

PROGRAMS = [path for path in Path(command_line.__file__).parent.glob("*.py") if "__main__" in path.read_text()]


class Executed:
    """Unpickling it would leave a file."""

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (Path("executed"),))


TRAIN = ["train_translation", *on_text(Path("text"), Path("run")), "--steps", "1"]
ON_DATES = ["train_translation", *DATES, "--steps", "1", "--out", "."]
RESUME = [*ON_DATES, "--resume"]
TRANSLATE = ["translate", "--device", "cpu", "--model", "model.pt"]
CAPTION = ["train_captioning", "--epochs", "1", "--scenes", "4", "--held-out", "2", "--device", "cpu", "--out", "out"]
FINETUNE = ["finetune_huggingface", "--model", "nowhere", "--pairs", "pairs"]
DAMAGED = "is damaged, or not what this version of train_translation.py writes"
CODE = pickle.dumps(Executed())
# The command; the files that are not as they should be: bytes, a link, or None for a missing one; what stderr
# names.
BAD: list[tuple[list[str], dict[str, Any], str]] = [
    (TRAIN, {"text/val.digits": b"300\n"}, "text/val.words, line 2: has no partner; text/val.digits has 1 lines"),
    (TRAIN, {"text/val.digits": b"1\nH\xfcndchen\n"}, "text/val.digits, line 2: not UTF-8"),
    (TRAIN, {"text/val2.digits": b"1\n"}, "text: found val2.digits; needs val2.digits and val2.words"),
    (TRAIN, {"text/train2.jsonl.gz": b"A dog.\n"}, "text/train2.jsonl.gz: cannot be read: Not a gzipped"),
    (TRAIN, {"text/train2.digits-words.tsv": b"1\tone\n2\n"}, "words.tsv, line 2: not text in two languages: '2'"),
    (TRAIN, {"text/train2.jsonl": b'\n{"digits": 1, "words": "a"}'}, "text/train2.jsonl, line 2: not text"),
    ([*TRAIN, "--source", "de", "--target", "fr"], {}, "text: no files train*.de and .fr, .de-fr.tsv or .jsonl"),
    ([*TRAIN, "--max-length", "2"], {}, "no pair of train is left; raise --max-length"),
    (["prepare_text", *TRAIN[11:17], "--out", "text"], {}, "text: holds other files, such as test_a.digits"),
    (RESUME, {}, "last.pt: no such file, so there is nothing to resume"),
    (ON_DATES, {"last.pt": b""}, ".: holds a run already"),
    *((RESUME, {"last.pt": content}, f"last.pt: {DAMAGED}") for content in (b"", CODE)),
    *((TRANSLATE, {"model.pt": content}, f"model.pt: {DAMAGED}") for content in (b"PK\3\4", CODE)),
    ([*TRANSLATE[:4], "weights.pt"], {}, "weights.pt: holds weights alone; give model.pt or last.pt"),
    (TRANSLATE, {"model.pt": None}, "model.pt: cannot be read: No such file"),
    ([*TRANSLATE, "--input", "input"], {"input": b"abc\nm\xe4d\n"}, "input, line 2: not UTF-8"),
    ([*TRANSLATE, "--n-best", "3", "--beam", "2", "abc"], {}, "--n-best 3 needs a beam at least as wide"),
    ([*TRANSLATE, "--export", "text"], {}, "text: folder must be new or empty"),
    ([*TRANSLATE[:4], "text", "--engine", "ctranslate2", "abc"], {}, "text: is not an export of translate.py"),
    (ON_DATES, {"model.partial": "/dev/full"}, "model.pt: cannot be written: No space left on device"),
    (CAPTION, {"out": b""}, "out: cannot be written: File exists"),
    (FINETUNE, {"pairs": b"eins\tuno\nzwei\tdos\tspam\n"}, "pairs, line 2: not text in two languages: 'zwei"),
    (FINETUNE, {"pairs": b"eins\tuno\n"}, "nowhere: cannot be loaded"),
]  # fmt: skip


def tiers(program: str) -> Any:
    return pytest.mark.full if program in ("finetune_huggingface", "train_captioning") else ()  # they take seconds


@pytest.mark.parametrize(
    ("arguments", "files", "message"), [pytest.param(*row, id=row[2], marks=tiers(row[0][0])) for row in BAD]
)
def test_a_bad_input(
    arguments: list[str], files: dict[str, Any], message: str, text: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Nothing in a file is executed."""
    if arguments[0].startswith("finetune"):
        pytest.importorskip("transformers"), pytest.importorskip("accelerate")
    if "ctranslate2" in arguments or "--export" in arguments:
        pytest.importorskip("ctranslate2")
    monkeypatch.chdir(text.parent)
    settings, tokenizer = Settings(layers=1, d_model=16, d_inner=16, heads=2, max_length=16), CharacterTokenizer("abc")
    save_model(Path("model.pt"), build_model(settings, tokenizer.size), settings, tokenizer)
    torch.save(torch.load("model.pt", weights_only=True)["model"], "weights.pt")
    for name, content in files.items():
        if content is None:
            Path(name).unlink()
        elif isinstance(content, str):
            Path(name).symlink_to(content)
        else:
            Path(name).write_bytes(content)
    assert importlib.import_module(arguments[0]).main(arguments[1:]) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("error: ") and message in error.splitlines()[-1]
    assert error.count("error: ") == 1 and "Traceback" not in error and not Path("executed").exists()


def test_a_folder_in_use_and_another_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = importlib.import_module("train_translation").main
    arguments = [*DATES, "--out", str(tmp_path), "--steps", "1"]
    with folder_lock(tmp_path):
        assert main(arguments) == 2
    assert "another run is writing there; choose another --out" in capsys.readouterr().err
    assert main(arguments) == 0
    for options, message in ((["--d-model", "32"], "--d-model was 16, is 32"), (["--dates", "41"], "--dates was 40")):
        assert main([*arguments, "--resume", *options]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("program", [pytest.param(path, id=path.stem, marks=tiers(path.stem)) for path in PROGRAMS])
def test_help(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its own program, also where the locale is ASCII, as with a redirect on Windows."""
    if program.stem == "finetune_huggingface":
        pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "argv", [program.name, "--help"])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(program), run_name="__main__")
    assert sys.stdout.encoding == "utf-8"
