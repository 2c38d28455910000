"""`translate.py`: sentences, files, N best, a picture, and the same by CTranslate2."""

from __future__ import annotations

import dataclasses
import io
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import sacrebleu
import torch
import train_translation
import translate
from example_runs import TINY
from translation.checkpoint import load_model, save_model
from translation.tokens import BOS, CharacterTokenizer
from translation.training import build_model


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run whose model was never trained, but whose translations differ."""
    settings, _ = train_translation.parse_arguments([*TINY, "--max-length", "16", "--beam", "2"])
    tokenizer = CharacterTokenizer("abcdef")
    model = build_model(settings, tokenizer.size)
    with torch.no_grad():
        for weight in (w for w in model.parameters() if w.dim() > 1):
            weight.normal_()
    save_model(tmp_path / "model.pt", model, settings, tokenizer)
    return tmp_path


def translated(capsys: pytest.CaptureFixture[str], *arguments: object, warns: str = "") -> list[str]:
    assert translate.main([*map(str, arguments), "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert warns in err
    return out.split("\n")[:-1]


def test_sentences_files_and_the_prompt_agree(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the input, blank lines in their places; and as text that is translated alone."""
    texts = ["abc", "", "fedfed", "a", "  ", "bcdefa", "abc\u2028fed", "f" * 13, "xyz"]
    file = run / "input.txt"
    file.write_text("\ufeff" + "".join(f"{text}\r\n" for text in texts))
    lines = translated(capsys, "--model", run, "--input", file)
    assert lines[1] == lines[4] == "" and len(set(lines)) > 4
    assert translated(capsys, "--model", run / "model.pt", *texts) == lines
    for text, line in zip(texts, lines, strict=True):
        assert translated(capsys, "--model", run, text) == [line]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes()), "utf-8"))
    assert translated(capsys, "--model", run) == lines


def test_other_inputs_and_other_files(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is cut is reported; a model of text in lower case reads what it is given so; a stopped run translates with
    its best weights."""
    cut, _ = translated(capsys, "--model", run, "a" * 40, "xyz", warns="1 of 2 sentences are cut to 16 tokens")
    assert cut == translated(capsys, "--model", run, "a" * 15)[0]
    model, tokenizer, settings = load_model(run / "model.pt")
    (run / "model.pt").unlink()
    save_model(run / "best.pt", model, dataclasses.replace(settings, lowercase=True), tokenizer)
    lines = translated(capsys, "--model", run, "abc", "aBC", warns="translating with its best.pt")
    assert lines[0] == lines[1]


def test_n_best(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = translated(capsys, "--model", run, "--n-best", 3, "--beam", 4, "abc", "", "fed")
    assert len(lines) == 9 and lines[3:6] == ["", "", ""], "a blank line gives as many lines as any other"
    scores = [float(line.split("\t")[0]) for line in lines[:3]]
    assert scores == sorted(scores, reverse=True) and len(set(lines[:3])) == 3
    assert lines[0].split("\t")[1] == translated(capsys, "--model", run, "--beam", 4, "abc")[0]


def test_plots(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of each token that is written: what the decoder attended to before it wrote it. A label for each head."""
    translated(capsys, "--model", run, "--plot", run / "mean.png", "--plot-heads", run / "heads.svg", "abc")
    drawn = (run / "heads.svg").read_text()
    assert (run / "mean.png").exists() and len(re.findall("<!-- layer 1 head [12]: [0-9.]+ tokens -->", drawn)) == 6
    model, _, _ = load_model(run / "model.pt")
    source, ids = torch.tensor([[4, 5, 2]]), [6, 7, 4]
    weights = translate.attention_weights(model, source, ids)
    states, encoder = model.encoder(source, None, return_attns=True)
    torch.testing.assert_close(weights[0], torch.cat(encoder))
    for row in range(4):
        target = torch.tensor([[BOS, *ids[:row]]])
        _, *found = model.decoder(target, model.trg_mask(target), states, None, return_attns=True)
        for whole, (layer,) in zip(weights[1:], found, strict=True):
            torch.testing.assert_close(whole[0, :, row, : layer.shape[3]], layer[0, :, -1])


@pytest.mark.parametrize("options", [["--beam", "1"], ["--n-best", "2"]], ids=str)
def test_both_engines_find_the_same(options: list[str], run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Translations of several lengths, some of them stopped at the limit; scores to 4 digits but for rounding."""
    pytest.importorskip("ctranslate2")
    texts = ["abc", "", "fedfed", "a", "xyz", "bcdefa" * 5]
    expected = translated(capsys, "--model", run, *options, *texts)
    assert translated(capsys, "--model", run, "--export", run / "out")[0].startswith(f"wrote {run / 'out'}")
    found = translated(capsys, "--model", run / "out", "--engine", "ctranslate2", *options, *texts)
    assert [line.split("\t")[-1] for line in found] == [line.split("\t")[-1] for line in expected]
    if "--n-best" in options:
        scores = [[float(line.split("\t")[0]) for line in lines if line] for lines in (found, expected)]
        assert scores[0] == pytest.approx(scores[1], abs=2e-4)


def test_a_trained_model_from_text_to_ctranslate2(
    trained: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files of a run: what it translated and scored at its end, and the same by an export in 8 bits."""
    lines = (trained.out / "test_a.translations").read_text().splitlines()
    test = trained.text / "test_a.digits"
    assert translated(capsys, "--model", trained.out, "--input", test) == lines
    expected = (trained.text / "test_a.words").read_text().splitlines()
    bleu = sacrebleu.corpus_bleu(lines, [expected]).score
    assert trained.record["scores"][0]["value"] == pytest.approx(bleu)
    pytest.importorskip("ctranslate2")
    translated(capsys, "--model", trained.out, "--export", tmp_path / "out", "--quantization", "int8")
    found = translated(capsys, "--model", tmp_path / "out", "--engine", "ctranslate2", "--input", test)
    assert len(found) == len(lines) and sum(a == b for a, b in zip(found, lines, strict=True)) > 6
