"""`python examples/translate.py`: sentences, files, a picture, and what it says of files that are no model."""

from __future__ import annotations

import io
import json
import pickle
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import translate
from command_line import sha256_of
from translation.checkpoint import load_model, save_model
from translation.settings import parse_arguments
from translation.tokens import CharacterTokenizer
from translation.training import build_model
from translation_options import TINY


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run whose model was never trained, but whose translations differ."""
    settings, tokenizer = (
        parse_arguments([*TINY, "--max-length", "16", "--beam", "2"])[0],
        CharacterTokenizer("abcdef"),
    )
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


def give_stdin(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), "utf-8"))


def test_sentences_and_files_agree(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the input, blank lines in their places; words that are not in the vocabulary are no error."""
    texts = ["abc", "", "fedfed", "a", "  ", "xyz", "bcdefa"]
    file = run / "input.txt"
    file.write_text("".join(f"{text}\n" for text in texts))
    lines = translated(capsys, "--model", run, "--input", file)
    assert lines[1] == lines[4] == ""
    assert len(set(lines)) > 3
    assert translated(capsys, "--model", run / "model.pt", *texts) == lines
    give_stdin(monkeypatch, file.read_bytes())
    assert translated(capsys, "--model", run) == lines


def test_a_stopped_run_translates_with_its_best_weights(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = translated(capsys, "--model", run, "abc")
    for name in ("last.pt", "best.pt"):
        (run / name).write_bytes((run / "model.pt").read_bytes())
    (run / "model.pt").unlink()
    for name in ("best.pt", "last.pt"):
        assert translate.main(["--model", str(run), "--device", "cpu", "abc"]) == 0
        out, err = capsys.readouterr()
        assert out.split("\n")[:-1] == lines
        assert err == f"{run}: the run was stopped (--resume ends it): translating with its {name}\n"
        (run / name).unlink()
    assert "model.pt: cannot be read" in refused(capsys, "--model", run, "abc")


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        ("abc\u2028fed\nabc\x0cfed\n".encode(), 2),
        (b"abc\r\nfed", 2),
        (b"", 0),
        (b"\n\n", 2),
        (b"abc\nm\xe4d\n", "line 2: not UTF-8"),
        (b"a\0b\0", "line 1: holds a zero byte"),
    ],
)
def test_standard_input_is_read_as_a_file(
    content: bytes, lines: int | str, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "input.txt").write_bytes(content)
    for name, options in ((run / "input.txt", ["--input", run / "input.txt"]), ("standard input", [])):
        give_stdin(monkeypatch, content)
        if isinstance(lines, int):
            assert len(translated(capsys, "--model", run, *options)) == lines
        else:
            assert f"{name}, {lines}" in refused(capsys, "--model", run, *options)


def test_unknown_characters_are_reported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert translate.main(["--model", str(run), "--device", "cpu", "xyz", "abc"]) == 0
    assert capsys.readouterr().err == "1 of 2 sentences hold characters that the model does not know\n"


def test_output_is_utf8_in_every_locale(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, settings = load_model(run / "model.pt")
    save_model(run / "model.pt", model, settings, CharacterTokenizer("äöüßéè"))
    lines = translated(capsys, "--model", run, "äöü", "èé")
    assert not any(map(str.isascii, lines))
    monkeypatch.setattr(sys, "argv", ["translate.py", "--model", str(run), "--device", "cpu", "äöü", "èé"])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(translate.__file__, run_name="__main__")
    assert sys.stdout.buffer.getvalue().decode().split("\n")[:-1] == lines


def test_standard_output_that_is_full(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert translate.main(["--model", str(run), "--device", "cpu", "abc"]) == 2
        monkeypatch.undo()
        assert "standard output: cannot be written: No space left on device" in capsys.readouterr().err
        with pytest.raises(OSError):
            full.close()


def test_prompt(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = io.StringIO("abc\nfed\n")
    stdin.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", stdin)
    answers = "".join(translated(capsys, "--model", run))
    expected = translated(capsys, "--model", run, "abc", "fed")
    assert answers == f"> {expected[0]}> {expected[1]}> "


def test_n_best(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = translated(capsys, "--model", run, "--n-best", 3, "--beam", 4, "abc", "", "fed")
    assert len(lines) == 9 and lines[3:6] == ["", "", ""], "a blank line gives as many lines as any other"
    scores = [float(line.split("\t")[0]) for line in lines[:3]]
    assert scores == sorted(scores, reverse=True)
    assert lines[0].split("\t")[1] == translated(capsys, "--model", run, "--beam", 4, "abc")[0]
    assert "--n-best 3 needs a beam" in refused(capsys, "--model", run, "--n-best", 3, "--beam", 2, "abc")


def test_long_sentences_are_cut(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert translate.main(["--model", str(run), "--device", "cpu", "a" * 40, "abc"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "1 of 2 sentences are cut to 16 tokens\n"
    assert captured.out.split("\n")[0] == translated(capsys, "--model", run, "a" * 15)[0]


def test_plot(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    translated(capsys, "--model", run, "--plot", run / "alignment.png", "abc")
    assert (run / "alignment.png").read_bytes().startswith(b"\x89PNG")
    model, tokenizer, _ = load_model(run / "model.pt")
    weights = translate.attention_weights(model, torch.tensor([[4, 5, 2]]), [6, 7])
    assert weights.shape == (3, 3)
    torch.testing.assert_close(weights.sum(1), torch.ones(3))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("no/x.png", "abc", "{}: cannot be written: No such file or directory"),
        ("x.xyz", "abc", "{}: Format 'xyz' is not supported"),
        ("x.png", " ", "--plot {}: nothing to draw"),
    ],
)
def test_a_picture_that_cannot_be_drawn(
    name: str, text: str, message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The translation is printed all the same."""
    assert translate.main(["--model", str(run), "--device", "cpu", "--plot", str(run / name), text]) == 2
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1 == captured.err.count("\n")
    assert f"error: {message.format(run / name)}" in captured.err


def test_a_model_of_an_earlier_version(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was saved without the newer options."""
    lines = translated(capsys, "--model", run, "abc")
    content = torch.load(run / "model.pt", weights_only=True)
    for name in ("workers", "keep_best", "max_ratio"):
        del content["settings"][name]
    torch.save(content, run / "earlier.pt")
    assert translated(capsys, "--model", run / "earlier.pt", "abc") == lines


@pytest.fixture
def exported(run: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The run's model, exported to CTranslate2."""
    pytest.importorskip("ctranslate2")
    folder = run / "exported"
    assert translated(capsys, "--model", run, "--export", folder)[0].startswith(f"wrote {folder}")
    return folder


@pytest.mark.parametrize("options", [["--beam", "1"], ["--beam", "4"], ["--n-best", "2"]], ids=str)
def test_both_engines_find_the_same(
    options: list[str], run: Path, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Translations of several lengths, some of them stopped at the limit; scores to 4 digits but for rounding."""
    texts = ["abc", "", "fedfed", "a", "xyz", "bcdefa" * 5]
    expected = translated(capsys, "--model", run, *options, *texts)
    found = translated(capsys, "--model", exported, "--engine", "ctranslate2", *options, *texts)
    assert [line.split("\t")[-1] for line in found] == [line.split("\t")[-1] for line in expected]
    if "--n-best" in options:
        scores = [[float(line.split("\t")[0]) for line in lines if line] for lines in (found, expected)]
        assert scores[0] == pytest.approx(scores[1], abs=2e-4)


def test_quantised_export(run: Path, exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    translated(capsys, "--model", run, "--export", run / "int8", "--quantization", "int8")
    assert (run / "int8" / "model.bin").stat().st_size < (exported / "model.bin").stat().st_size
    assert len(translated(capsys, "--model", run / "int8", "--engine", "ctranslate2", "abc", "fed")) == 2
    error = refused(capsys, "--model", run, "--export", run / "int4", "--quantization", "int4")
    assert "quantization must be None or one of" in error
    assert "folder must be new or empty" in refused(capsys, "--model", run, "--export", exported)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.bin", lambda content: content[:-100]),
        ("model.bin", lambda content: content[:200] + b"\xff" + content[201:]),
        ("config.json", lambda content: b"{}"),
        ("more.bin", lambda content: b""),
        ("fastattn.json", lambda content: content[:-9]),
        ("fastattn.json", lambda content: b"[" * 10**5),
        ("fastattn.json", lambda content: b"[]"),
        ("fastattn.json", lambda content: content.replace(b'"max_length": 16', b'"max_length": "16; rm"')),
        ("fastattn.json", lambda content: content.replace(b'"max_length": 16', b'"max_length": -16')),
        ("fastattn.json", lambda content: content.replace(b'"max_length": 16', b'"max_length": null')),
        ("fastattn.json", lambda content: content.replace(b"abcdef", b"abcdeg")),
        ("fastattn.json", lambda content: pickle.dumps(_Executed(Path("executed")))),
        ("model.bin", None),
        ("fastattn.json", None),
    ],
)
def test_exports_that_are_damaged(
    name: str,
    change: Callable[[bytes], bytes] | None,
    exported: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(exported)
    path = exported / name
    if change:
        content = change(path.read_bytes() if path.exists() else b"")
        path.write_bytes(content)
    else:
        path.unlink()
    error = refused(capsys, "--model", exported, "--engine", "ctranslate2", "abc")
    assert error.startswith(f"error: {exported}: ") and not Path("executed").exists()


def test_a_hostile_model_whose_hash_is_right(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """CTranslate2 itself refuses it."""
    (exported / "model.bin").write_bytes((exported / "model.bin").read_bytes()[:-100])
    facts = json.loads((exported / "fastattn.json").read_text())
    facts["sha256"]["model.bin"] = sha256_of(exported / "model.bin")
    (exported / "fastattn.json").write_text(json.dumps(facts))
    error = refused(capsys, "--model", exported, "--engine", "ctranslate2", "abc")
    assert "is not an export of translate.py that can be used" in error


class _Executed:
    """Unpickling it would leave a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def test_files_that_are_no_model(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing in them is executed."""
    good = (run / "model.pt").read_bytes()
    content = torch.load(run / "model.pt", weights_only=True)
    for name, data in {
        "half.pt": good[: len(good) // 2],
        "empty.pt": b"",
        "text.pt": b"a sentence\n",
        "code.pt": pickle.dumps(_Executed(run / "executed")),
    }.items():
        (run / name).write_bytes(data)
        message = f"{name}: is cut off, or not a file that train_translation.py wrote"
        assert message in refused(capsys, "--model", run / name, "abc")
    torch.save({"model": _Executed(run / "executed")}, run / "zipped code.pt")
    assert "is cut off, or not a file" in refused(capsys, "--model", run / "zipped code.pt", "abc")
    assert not (run / "executed").exists()
    torch.save(content["model"], run / "epoch-0001.pt")
    message = f"{run / 'epoch-0001.pt'}: holds weights alone, as epoch-*.pt do; give model.pt or last.pt of its folder"
    assert message in refused(capsys, "--model", run / "epoch-0001.pt", "abc")
    others = [[1, 2], {}, {**content, "model": None}]
    others += [{**content, "settings": {**content["settings"], "unheard_of": 1}}]
    others += [{**content, "settings": {**content["settings"], "d_model": 32}}]
    others += [{**content, "tokenizer": tokenizer} for tokenizer in (None, "{}", '{"characters": 1}', "no JSON")]
    for other in others:
        torch.save(other, run / "other.pt")
        message = f"{run / 'other.pt'}: holds something else than this version of train_translation.py writes"
        assert message in refused(capsys, "--model", run / "other.pt", "abc")
    assert "cannot be read: No such file" in refused(capsys, "--model", run / "nothing.pt", "abc")
    assert "nothing.txt: cannot be read" in refused(capsys, "--model", run, "--input", run / "nothing.txt")
