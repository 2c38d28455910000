"""The captioning example: scenes, the whole command on a few of them, and the model file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import train_captioning
from captioning.scenes import LONGEST, Vocabulary, make_scenes

from fastattn.models import src_trg_mask


def test_scenes() -> None:
    """They depend only on the seed. Videos whose motion features are most alike have the same first motion."""
    scenes, again, others = make_scenes(200, 3), make_scenes(200, 3), make_scenes(200, 4)
    assert scenes.captions == again.captions != others.captions
    assert torch.equal(scenes.image, again.image)
    frames = (scenes.image != 0).any(-1).sum(1)
    assert frames.min() < frames.max() <= LONGEST
    assert torch.equal((scenes.image[:, :, 0] != 0).sum(1), frames)  # a frame whose first feature is 0 is padding
    motions = [caption.split(" ", 3)[3].split(" then ")[0] for caption in scenes.captions]
    starts = scenes.motion[:, :4].mean(1)  # the first motion has at least four frames
    nearest = torch.cdist(starts, starts).fill_diagonal_(torch.inf).argmin(1)
    assert motions == [motions[i] for i in nearest]


def test_captions_as_tokens() -> None:
    scenes, vocabulary = make_scenes(9, 3), Vocabulary()
    rows = torch.tensor([4, 2])
    forwards, backwards = (scenes.tokens(rows, vocabulary, "cpu", b) for b in (False, True))
    words = [vocabulary.words[i] for i in forwards[0].tolist()]
    assert " ".join(word for word in words if word != "<PAD>") == f"<S> {scenes.captions[4]} <S>"
    real = forwards[1] != 0
    assert torch.equal(forwards[1][real], backwards[1][real].flip(0))


def test_the_whole_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    arguments = ["--epochs", "2", "--scenes", "128", "--beam", "2", "--device", "cpu", "--out", str(out)]
    assert train_captioning.main(arguments) == 0
    printed = capsys.readouterr().out
    for phrase in ("epoch  2", "left to right: ", "right to left: ", "of 300 new videos", "videos/s"):
        assert phrase in printed
    record = json.loads((out / "record.json").read_text())
    assert record["epochs"][1]["train_loss"] < record["epochs"][0]["train_loss"]

    content = torch.load(out / "captioner.pt", weights_only=True)
    settings = train_captioning.Settings(**content["settings"])
    model = train_captioning.build_model(settings, Vocabulary(content["words"]))
    model.load_state_dict(content["model"])
    held_out = make_scenes(train_captioning.HELD_OUT, settings.seed + 1)
    model.eval()
    with torch.no_grad():
        loss = train_captioning.loss_of(model, held_out, torch.arange(len(held_out)), settings)
    assert loss.item() == pytest.approx(record["epochs"][1]["val_loss"], rel=1e-4)


def test_loss_is_that_of_both_directions() -> None:
    settings, _ = train_captioning.parse_arguments(["--device", "cpu"])
    vocabulary, scenes, rows = Vocabulary(), make_scenes(5, 3), torch.arange(5)
    model = train_captioning.build_model(settings, vocabulary).eval()
    src = scenes.features(rows, "cpu")
    r2l, l2r = (scenes.tokens(rows, vocabulary, "cpu", b) for b in (True, False))
    predictions = model(src, r2l[:, :-1], l2r[:, :-1], src_trg_mask(src, r2l[:, :-1], l2r[:, :-1], 0))
    losses = []
    for log_p, tokens in zip(predictions, (r2l, l2r), strict=True):
        places = [(i, t) for i in rows.tolist() for t in range(tokens.shape[1] - 1) if tokens[i, t + 1] != 0]
        losses.append(sum(-log_p[i, t, tokens[i, t + 1]] for i, t in places) / len(places))
    torch.testing.assert_close(train_captioning.loss_of(model, scenes, rows, settings), sum(losses) / 2)


def test_files_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "captioner.pt").mkdir()
    tiny = ["--epochs", "1", "--scenes", "8", "--beam", "1", "--device", "cpu"]
    assert train_captioning.main([*tiny, "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith(f"error: {tmp_path / 'captioner.pt'}: cannot be written: Is a directory\n")
    (tmp_path / "file").touch()
    assert train_captioning.main([*tiny, "--out", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'file'}: cannot be written: File exists\n"
