"""The captioning example: the whole command on a few scenes, and the model file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import train_captioning
from captioning.scenes import Scenes, Vocabulary, make_scenes

from fastattn.models import ABDTransformer, src_trg_mask


def loss_by_hand(model: ABDTransformer, scenes: Scenes) -> float:
    """The mean over both directions of the mean over the words of all captions, each written out here."""
    src, tokens = scenes.features(torch.arange(len(scenes)), "cpu"), []
    for step in (-1, 1):  # the first decoder writes backwards
        words = [["<S>", *caption.split()[::step], "<S>"] for caption in scenes.captions]
        ids = [torch.tensor([model.vocab.word2idx[word] for word in caption]) for caption in words]
        tokens.append(torch.nn.utils.rnn.pad_sequence(ids, batch_first=True))
    read = [ids[:, :-1] for ids in tokens]
    predictions, losses = model(src, *read, src_trg_mask(src, *read, 0)), []
    for log_p, gold in zip(predictions, (ids[:, 1:] for ids in tokens), strict=True):
        losses.append(-log_p.gather(2, gold[..., None])[..., 0][gold != 0].mean())
    return sum(losses).item() / 2


def test_the_whole_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--epochs", "2", "--scenes", "128", "--held-out", "4", "--beam", "1", "--out", str(tmp_path)]
    assert train_captioning.main([*arguments, "--device", "cpu"]) == 0
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
    assert scenes.captions != make_scenes(settings.held_out, settings.seed).captions
    with torch.no_grad():
        by_hand = loss_by_hand(model.eval(), scenes)
    assert by_hand == pytest.approx(record["epochs"][1]["val_loss"], rel=1e-4)
    assert train_captioning.share_right([*scenes.captions[:3], "a red square"], scenes) == 75
