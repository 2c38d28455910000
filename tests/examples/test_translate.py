"""`translate.py`: sentences, files, N best, a picture, and the same by CTranslate2."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import train_translation
import translate
from example_runs import TINY
from translation.checkpoint import load_model, save_model
from translation.decoding import bleu, exact_match
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


def translated(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    assert translate.main([*map(str, arguments), "--device", "cpu"]) == 0
    return capsys.readouterr().out.split("\n")[:-1]


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


def test_what_is_cut_or_not_known_is_reported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert translate.main(["--model", str(run), "--device", "cpu", "a" * 40, "abc", "xyz"]) == 0
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        "1 of 3 sentences are cut to 16 tokens",
        "1 of 3 sentences hold characters that the model does not know",
    ]
    assert out.split("\n")[0] == translated(capsys, "--model", run, "a" * 15)[0]


def test_lower_case(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model of text in lower case reads what it is given so."""
    model, tokenizer, settings = load_model(run / "model.pt")
    save_model(run / "model.pt", model, dataclasses.replace(settings, lowercase=True), tokenizer)
    lines = translated(capsys, "--model", run, "abc", "aBC", "ABC")
    assert lines[0] == lines[1] == lines[2]


def test_a_stopped_run_translates_with_its_best_weights(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = translated(capsys, "--model", run, "abc")
    (run / "last.pt").write_bytes((run / "model.pt").read_bytes())
    (run / "model.pt").rename(run / "best.pt")
    for name in ("best.pt", "last.pt"):
        assert translate.main(["--model", str(run), "--device", "cpu", "abc"]) == 0
        out, err = capsys.readouterr()
        assert out.split("\n")[:-1] == lines
        assert err == f"{run}: the run was stopped (--resume ends it): translating with its {name}\n"
        (run / name).unlink()


def test_n_best(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = translated(capsys, "--model", run, "--n-best", 3, "--beam", 4, "abc", "", "fed")
    assert len(lines) == 9 and lines[3:6] == ["", "", ""], "a blank line gives as many lines as any other"
    scores = [float(line.split("\t")[0]) for line in lines[:3]]
    assert scores == sorted(scores, reverse=True) and len(set(lines[:3])) == 3
    assert lines[0].split("\t")[1] == translated(capsys, "--model", run, "--beam", 4, "abc")[0]


def test_plot(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of each token that is written: what the decoder attended to before it wrote it."""
    translated(capsys, "--model", run, "--plot", run / "alignment.png", "abc")
    assert (run / "alignment.png").read_bytes().startswith(b"\x89PNG")
    model, _, _ = load_model(run / "model.pt")
    source, ids = torch.tensor([[4, 5, 2]]), [6, 7, 4]
    weights = translate.attention_weights(model, source, ids)
    for row, expected in enumerate(weights):
        states, *_ = model.encoder(source, None)
        *_, (layer,) = model.decoder(torch.tensor([[BOS, *ids[:row]]]), None, states, None, return_attns=True)
        torch.testing.assert_close(expected, layer.mean(1)[0, -1])
    assert weights.shape == (4, 3)


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
    pairs = [*zip(test.read_text().splitlines(), (trained.text / "test_a.words").read_text().splitlines(), strict=True)]
    assert trained.record["scores"][0]["value"] == pytest.approx(bleu(pairs, lines)[0])
    pytest.importorskip("ctranslate2")
    translated(capsys, "--model", trained.out, "--export", tmp_path / "out", "--quantization", "int8")
    found = translated(capsys, "--model", tmp_path / "out", "--engine", "ctranslate2", "--input", test)
    assert len(found) == len(lines) and sum(a == b for a, b in zip(found, lines, strict=True)) > 6
    assert json.loads((tmp_path / "out" / "fastattn.json").read_text())["settings"]["target"] == "words"


def test_scores() -> None:
    pairs = [("a", "The cat sat on the mat."), ("b", "A dog ran over the grass.")]
    assert exact_match(pairs, ["The cat sat on the mat.", "A dog"]) == 50.0
    value, signature = bleu(pairs, [target for _, target in pairs])
    assert value == pytest.approx(100.0) and "tok:13a" in signature and "version:" in signature
    shouted, lower = (bleu(pairs, [target.upper() for _, target in pairs], lowercase=case) for case in (False, True))
    assert shouted[0] < 50 and lower[0] == pytest.approx(100.0) and "case:lc" in lower[1]
