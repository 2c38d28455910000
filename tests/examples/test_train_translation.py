"""`train_translation.py`: what a run prints, writes and keeps, that an interruption loses nothing, and its options."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import train_translation
from example_runs import DATES, on_text, signal_when_there, state_of, weights_in
from translation.checkpoint import load_model
from translation.text import Text
from translation.tokens import BOS, EOS


def loss_by_hand(path: Path, weights: dict[str, torch.Tensor], text: Path) -> float:
    """Of the validation text, pair by pair."""
    model, tokenizer, _ = load_model(path)
    model.load_state_dict(weights)
    total = tokens = 0
    for pair in Text(text, "digits", "words").pairs("val"):
        source, target = tokenizer.encode(pair)
        p = model(torch.tensor([[*source, EOS]]), torch.tensor([[BOS, *target]])).double().log_softmax(-1)
        total -= sum(p[i, token].item() for i, token in enumerate([*target, EOS]))
        tokens += len(target) + 1
    return total / tokens


def test_what_a_run_prints_and_writes(trained: SimpleNamespace) -> None:
    record, printed = trained.record, trained.printed
    (score,) = record["scores"]
    for phrase in ("million parameters", "epoch   8", "test_a: BLEU", score["signature"], "    -> ", "tokens/s"):
        assert phrase in printed
    assert len((trained.out / "test_a.translations").read_text().splitlines()) == score["sentences"] == 12
    assert [entry["epoch"] for entry in record["epochs"]] == [*range(1, 9)]
    assert record["steps"] == record["epochs"][-1]["step"] == len(state_of(trained.out)["progress"]["losses"])
    steps, progress = [0, *(entry["step"] for entry in record["epochs"])], state_of(trained.out)["progress"]
    for entry, first, end in zip(record["epochs"], steps, steps[1:], strict=False):
        losses = zip(progress["losses"][first:end], progress["target_tokens"][first:end], strict=True)
        loss_sum, tokens = (sum(values) for values in zip(*((loss * n, n) for loss, n in losses), strict=True))
        assert entry["train_loss"] == pytest.approx(loss_sum / tokens, rel=1e-6)


def test_the_candidates_and_the_one_that_is_kept(trained: SimpleNamespace) -> None:
    """`mean` of the last --average epochs, the `best` one and the `last`: weights and losses by hand. The least loss is
    kept."""
    out, record = trained.out, trained.record
    assert sorted(path.name for path in out.glob("epoch-*")) == ["epoch-0006.pt", "epoch-0007.pt", "epoch-0008.pt"]
    states = [weights_in(path) for path in sorted(out.glob("epoch-*"))]
    files = {name: weights_in(out / f"{name}.pt") for name in ("mean", "best", "last")}
    mean = {name: torch.stack([state[name] for state in states]).double().mean(0).float() for name in states[0]}
    torch.testing.assert_close(files["mean"], mean, rtol=0, atol=0)
    torch.testing.assert_close(files["last"], states[-1], rtol=0, atol=0)
    losses = {name: loss_by_hand(out / "model.pt", weights, trained.text) for name, weights in files.items()}
    assert {name: found["val_loss"] for name, found in record["candidates"].items()} == pytest.approx(losses, rel=1e-5)
    assert record["epochs"][-1]["val_loss"] == pytest.approx(losses["last"], rel=1e-5)
    assert record["candidates"]["best"] == min(record["epochs"], key=lambda entry: entry["val_loss"])
    assert losses[record["kept"]] == min(losses.values()) < 0.99 * max(losses.values())
    assert f"model.pt is the {record['kept']}" in trained.printed
    torch.testing.assert_close(weights_in(out / "model.pt"), files[record["kept"]], rtol=0, atol=0)


def test_the_mean_of_a_run_that_ends_within_an_epoch(text: Path, tmp_path: Path) -> None:
    """The present weights count as the last of the checkpoints."""
    out = tmp_path / "run"
    assert train_translation.main([*on_text(text, out), "--batch-tokens=300", "--steps=13", "--average=3"]) == 0
    assert state_of(out)["progress"]["position"] > 0
    states = [weights_in(path) for path in (*sorted(out.glob("epoch-*"))[-2:], out / "last.pt")]
    mean = {name: torch.stack([state[name] for state in states]).double().mean(0).float() for name in states[0]}
    torch.testing.assert_close(weights_in(out / "mean.pt"), mean, rtol=0, atol=0)


def final_state(out: Path) -> dict[str, Any]:
    """Everything in a finished run that must not depend on interruptions: no clock, no option that may change."""
    state = state_of(out)
    progress = {name: value for name, value in state["progress"].items() if name not in ("seconds", "epochs")}
    losses = [[entry["step"], entry["train_loss"], entry["val_loss"]] for entry in state["progress"]["epochs"]]
    found = {"progress": progress, "epochs": losses, "optimizer": state["optimizer"]["state"]}
    found |= {name: weights_in(out / name) for name in ("model.pt", "best.pt", "mean.pt")}
    return found | {name: state[name] for name in ("model", "torch_rng")}


def test_an_interrupted_run_ends_as_one_that_was_not(text: Path, tmp_path: Path) -> None:
    """Stopped by a signal within an epoch: equal bit for bit."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    part = [*on_text(text, parts), "--save-every", "3", "--epochs", "999"]
    with signal_when_there(parts / "last.pt", signal.SIGTERM):
        assert train_translation.main(part) == 128 + signal.SIGTERM
    steps = str(len(state_of(parts)["progress"]["losses"]) + 25)
    assert train_translation.main([*part, "--resume", "--steps", steps]) == 0
    assert train_translation.main([*on_text(text, whole), "--epochs", "999", "--steps", steps]) == 0
    torch.testing.assert_close(final_state(parts), final_state(whole), rtol=0, atol=0)


def test_options_that_change_how_and_not_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A batch in parts by workers, graphs, which a CPU has not, and steps that are compared; and training goes on."""
    arguments = [*DATES, "--dates", "20", "--graph", "--out"]
    assert train_translation.main([*arguments, str(tmp_path / "plain"), "--steps", "4"]) == 0
    others = ["--accumulate", "2", "--workers", "1", "--shadow", "2", "--beam", "2"]
    assert train_translation.main([*arguments, str(tmp_path / "others"), "--steps", "2", *others]) == 0
    assert re.search(r"shadow: \d steps, \d+ calls compared, 0 deviations", capsys.readouterr().out)
    assert train_translation.main([*arguments, str(tmp_path / "others"), "--steps", "4", "--resume"]) == 0
    plain, other = (state_of(tmp_path / name)["progress"]["losses"] for name in ("plain", "others"))
    assert len(plain) == 4 and other == pytest.approx(plain, rel=1e-4)


def test_a_run_without_patience_and_one_by_bleu(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It ends after the first epoch that is not better. More patience continues it."""
    arguments = [*on_text(text, tmp_path / "run"), "--keep-best", "bleu", "--lr-scale", "4", "--batch-tokens", "200"]
    assert train_translation.main([*arguments, "--epochs", "40", "--patience", "1"]) == 0
    values = [entry["bleu"] for entry in json.loads((tmp_path / "run" / "record.json").read_text())["epochs"]]
    best = values.index(max(values))
    assert best == len(values) - 2 and all(a < b for a, b in zip(values[:-2], values[1:-1], strict=True))
    assert f"stopped early: no epoch was better than epoch {best + 1}\n" in capsys.readouterr().out
    more = ["--resume", "--patience", "2", "--epochs", str(len(values) + 1)]
    assert train_translation.main([*arguments, *more]) == 0
    assert len(json.loads((tmp_path / "run" / "record.json").read_text())["epochs"]) == len(values) + 1


def test_a_loss_that_is_nan_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And nothing is saved after it."""
    arguments = [*DATES, "--out", str(tmp_path), "--steps"]
    assert train_translation.main([*arguments, "2"]) == 0
    state = state_of(tmp_path)
    state["model"]["encoder.layer_norm.weight"].fill_(math.nan)
    torch.save(state, tmp_path / "last.pt")
    assert train_translation.main([*arguments, "9", "--resume", "--save-every", "2"]) == 2
    assert "error: step 3: the loss is nan; begin again with a smaller --lr-scale" in capsys.readouterr().err
    assert state_of(tmp_path)["progress"]["step"] == 2


def test_training_on_prepared_text_is_training_on_the_text(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its options need not be given again. With other text the run is not continued."""
    assert train_translation.main([*on_text(text, tmp_path / "a"), "--steps", "5"]) == 0
    on_it = [o for o in on_text(text, tmp_path / "b") if o not in ("--source", "digits", "--target", "words")]
    on_it[on_it.index("--data") + 1] = str(tmp_path / "a" / "prepared")
    assert train_translation.main([*on_it, "--steps", "5"]) == 0
    states = [state_of(tmp_path / name) for name in "ab"]
    assert states[0]["progress"]["losses"] == states[1]["progress"]["losses"]
    lines = (text / "train.words").read_text().splitlines()
    (text / "train.words").write_text("\n".join([*lines[:-1], "something else"]) + "\n")
    assert train_translation.main([*on_text(text, tmp_path / "a"), "--steps", "6", "--resume"]) == 2
    assert "not the one this run began with" in capsys.readouterr().err


@pytest.mark.full
def test_tensorboard(tmp_path: Path) -> None:
    """Every 20th step once, though the run was interrupted."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    arguments = [*DATES, "--out", str(tmp_path), "--epochs", "99", "--tensorboard"]
    for more in (["--steps", "25"], ["--steps", "45", "--resume"]):
        assert train_translation.main([*arguments, *more]) == 0
    progress = state_of(tmp_path)["progress"]
    logs = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = [(event.step, event.value) for event in logs.Scalars("loss")]
    assert losses == [(step, pytest.approx(progress["losses"][step - 1])) for step in (20, 40)]
    found = [event.value for event in logs.Scalars("val_loss")]
    assert found == pytest.approx([entry["val_loss"] for entry in progress["epochs"]])


@pytest.mark.full
def test_the_commands_of_the_readme(tmp_path: Path) -> None:
    """With fewer dates, from another folder."""

    def printed(program: str, *options: str) -> str:
        command = [sys.executable, Path(train_translation.__file__).with_name(program), *options]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    found = printed("train_translation.py", "--dates", "4000", "--held-out", "50", "--epochs", "8")
    assert float(re.search(r"held-out: exact match ([\d.]+) on 50 sentences", found)[1]) > 50
    found = printed("translate.py", "--model", "runs/dates", "the 3rd of March 1998")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d\n", found)
