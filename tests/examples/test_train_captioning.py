"""The captioning example: scenes, the whole command on a few of them, and the model file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import train_captioning
from captioning.scenes import LONGEST, Scenes, Vocabulary, make_scenes

from fastattn.models import ABDTransformer, src_trg_mask


def test_scenes() -> None:
    """They depend only on the seed. Videos whose motion features are most alike have the same first motion."""
    scenes, again, others = make_scenes(200, 3), make_scenes(200, 3), make_scenes(200, 4)
    assert scenes.captions == again.captions != others.captions and torch.equal(scenes.image, again.image)
    frames = (scenes.image != 0).any(-1).sum(1)
    assert frames.min() < frames.max() <= LONGEST
    assert torch.equal((scenes.image[:, :, 0] != 0).sum(1), frames)  # a frame whose first feature is 0 is padding
    motions = [caption.split(" ", 3)[3].split(" then ")[0] for caption in scenes.captions]
    starts = scenes.motion[:, :4].mean(1)  # the first motion has at least four frames
    nearest = torch.cdist(starts, starts).fill_diagonal_(torch.inf).argmin(1)
    assert motions == [motions[i] for i in nearest]


def loss_by_hand(model: ABDTransformer, scenes: Scenes, rows: list[int]) -> float:
    """The mean over both directions of the mean over the words of all captions, each written out here."""
    vocabulary, src, losses = model.vocab, scenes.features(torch.tensor(rows), "cpu"), []
    tokens = []
    for step in (-1, 1):  # the first decoder writes backwards
        words = [["<S>", *scenes.captions[row].split()[::step], "<S>"] for row in rows]
        ids = [torch.tensor([vocabulary.word2idx[word] for word in caption]) for caption in words]
        tokens.append(torch.nn.utils.rnn.pad_sequence(ids, batch_first=True))
    r2l, l2r = tokens
    predictions = model(src, r2l[:, :-1], l2r[:, :-1], src_trg_mask(src, r2l[:, :-1], l2r[:, :-1], 0))
    for log_p, ids in zip(predictions, tokens, strict=True):
        places = [(i, t) for i in range(len(rows)) for t in range(ids.shape[1] - 1) if ids[i, t + 1] != 0]
        losses.append(sum(-log_p[i, t, ids[i, t + 1]].item() for i, t in places) / len(places))
    return sum(losses) / 2


def test_the_whole_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--epochs", "2", "--scenes", "128", "--held-out", "4", "--beam", "2"]
    arguments += ["--device", "cpu", "--out", str(tmp_path)]
    assert train_captioning.main(arguments) == 0
    printed = capsys.readouterr().out
    for phrase in ("epoch  2", "left to right: ", "right to left: ", "of 4 new videos", "videos/s"):
        assert phrase in printed
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["epochs"][1]["train_loss"] < record["epochs"][0]["train_loss"]

    content = torch.load(tmp_path / "captioner.pt", weights_only=True)
    settings = train_captioning.Settings(**content["settings"])
    model = train_captioning.build_model(settings, Vocabulary(content["words"]))
    model.load_state_dict(content["model"])
    scenes = make_scenes(settings.held_out, settings.seed + 1)
    with torch.no_grad():
        by_hand = loss_by_hand(model.eval(), scenes, [*range(len(scenes))])
        captions = train_captioning.describe(model, make_scenes(5, 7), settings)
    assert by_hand == pytest.approx(record["epochs"][1]["val_loss"], rel=1e-4)
    assert [len(texts) for texts in captions] == [5, 5]
    assert train_captioning.share_right([*scenes.captions[:3], "a red square"], scenes) == 75
