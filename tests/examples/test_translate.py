"""`python examples/translate.py`: sentences, files, a picture, and what it says of files that are no model."""

from __future__ import annotations

import io
import pickle
import sys
from pathlib import Path

import pytest
import torch
import translate
from translation.checkpoint import load_model, save_model
from translation.settings import parse_arguments
from translation.tokens import CharacterTokenizer
from translation.training import build_model

TINY = ["--layers", "1", "--d-model", "16", "--d-inner", "32", "--heads", "2", "--max-length", "16", "--device", "cpu"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run whose model was never trained, but whose translations differ."""
    settings, tokenizer = parse_arguments([*TINY, "--beam", "2"])[0], CharacterTokenizer("abcdef")
    model = build_model(settings, tokenizer.size)
    with torch.no_grad():
        for weight in (w for w in model.parameters() if w.dim() > 1):
            weight.normal_()
    save_model(tmp_path / "model.pt", model, settings, tokenizer)
    return tmp_path


def translated(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    assert translate.main([*map(str, arguments), "--device", "cpu"]) == 0
    return capsys.readouterr().out.split("\n")[:-1]


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert translate.main([*map(str, arguments), "--device", "cpu"]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    return captured.err


def test_sentences_and_files_agree(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the input, blank lines in their places; words that the model does not know are no error."""
    texts = ["abc", "", "fedfed", "a", "  ", "xyz", "bcdefa"]
    file, out = run / "input.txt", run / "output.txt"
    file.write_text("".join(f"{text}\n" for text in texts))
    lines = translated(capsys, "--model", run, "--input", file)
    assert lines[1] == lines[4] == ""
    assert len(set(lines)) > 3
    assert translated(capsys, "--model", run / "model.pt", *texts) == lines
    assert translated(capsys, "--model", run, "--input", file, "--output", out) == []
    assert out.read_text().split("\n")[:-1] == lines
    monkeypatch.setattr(sys, "stdin", io.StringIO(file.read_text()))
    assert translated(capsys, "--model", run) == lines


def test_prompt(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = io.StringIO("abc\nfed\n")
    stdin.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", stdin)
    asked = "".join(translated(capsys, "--model", run))
    expected = translated(capsys, "--model", run, "abc", "fed")
    assert asked == f"> {expected[0]}> {expected[1]}> "


def test_n_best(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = translated(capsys, "--model", run, "--n-best", 3, "--beam", 4, "abc")
    scores = [float(line.split("\t")[0]) for line in lines]
    assert len(lines) == 3
    assert scores == sorted(scores, reverse=True)
    assert lines[0].split("\t")[1] == translated(capsys, "--model", run, "--beam", 4, "abc")[0]
    assert "--n-best 3 needs a beam" in refused(capsys, "--model", run, "--n-best", 3, "--beam", 2, "abc")


def test_long_sentences_are_cut(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert translate.main(["--model", str(run), "--device", "cpu", "a" * 40, "abc"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "1 of 2 sentences are cut to 16 tokens\n"
    assert captured.out.split("\n")[0] == translated(capsys, "--model", run, "a" * 15)[0]
    assert "--max-length 17 is more than the 16" in refused(capsys, "--model", run, "--max-length", 17, "abc")


def test_plot(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    translated(capsys, "--model", run, "--plot", run / "alignment.png", "abc")
    assert (run / "alignment.png").read_bytes().startswith(b"\x89PNG")
    model, tokenizer, _ = load_model(run / "model.pt")
    weights = translate.attention_weights(model, torch.tensor([[4, 5, 2]]), [6, 7])
    assert weights.shape == (3, 3)
    torch.testing.assert_close(weights.sum(1), torch.ones(3))


class _Executed:
    """Unpickling it would leave a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def test_files_that_are_no_model(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = (run / "model.pt").read_bytes()
    content = torch.load(run / "model.pt", weights_only=True)
    for name, data in {
        "half.pt": good[: len(good) // 2],
        "empty.pt": b"",
        "text.pt": b"a sentence\n",
        "pickle.pt": pickle.dumps({"model": 1}),
        "code.pt": pickle.dumps(_Executed(run / "executed")),
    }.items():
        (run / name).write_bytes(data)
        assert "is cut off, or not a file that train_translation.py wrote" in refused(
            capsys, "--model", run / name, "abc"
        )
    torch.save({"model": _Executed(run / "executed")}, run / "zipped code.pt")
    assert "is cut off, or not a file" in refused(capsys, "--model", run / "zipped code.pt", "abc")
    assert not (run / "executed").exists()
    for name, other in {
        "state.pt": content["model"],
        "list.pt": [1, 2],
        "no tokenizer.pt": {**content, "tokenizer": None},
        "other settings.pt": {**content, "settings": {**content["settings"], "unheard_of": 1}},
        "other sizes.pt": {**content, "settings": {**content["settings"], "d_model": 32}},
    }.items():
        torch.save(other, run / name)
        assert "is not a model that this version of train_translation.py wrote" in refused(
            capsys, "--model", run / name, "abc"
        )
    assert "cannot be read: No such file" in refused(capsys, "--model", run / "nothing.pt", "abc")
    assert "nothing.txt: cannot be read" in refused(capsys, "--model", run, "--input", run / "nothing.txt")
    assert "cannot be written" in refused(capsys, "--model", run, "--output", run / "no" / "folder.txt", "abc")
