"""The whole command: what it writes, that an interruption loses nothing, and what it says of bad input."""

import io
import itertools
import json
import math
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import train_translation
from command_line import folder_lock
from translation import training
from translation.checkpoint import load_model
from translation.decoding import translate
from translation_options import DATES, TINY

COMMAND = Path(train_translation.__file__)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder of numbers in digits and in words."""
    folder = tmp_path / "text"
    folder.mkdir()
    words = "zero one two three four five six seven eight nine".split()
    held_out = {"val": range(100, 300, 17), "test_a": range(101, 300, 17)}
    train = sorted(set(range(100, 300)).difference(*held_out.values()))
    for name, numbers in {"train": train, **held_out}.items():
        (folder / f"{name}.digits").write_text("".join(f"{number}\n" for number in numbers))
        lines = (" ".join(words[int(digit)] for digit in str(number)) + "\n" for number in numbers)
        (folder / f"{name}.words").write_text("".join(lines))
    return folder


def on_text(folder: Path, out: Path) -> list[str]:
    options = ["--data", folder, "--source", "digits", "--target", "words", "--out", out]
    options += ["--vocabulary", 300, "--batch-tokens", 100, "--warmup", 100, "--max-length", 32, "--dropout", 0.1]
    return [*TINY, *map(str, options)]


def test_the_whole_command(tmp_path: Path) -> None:
    """As a user runs it, from another folder: checkpoint, record and what is printed."""
    arguments = [*DATES, "--epochs", "2", "--out", "run"]
    result = subprocess.run(
        [sys.executable, COMMAND, *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    for phrase in ("million parameters", "epoch   2", "held-out: exact match", "->", "tokens/s"):
        assert phrase in result.stdout

    run = tmp_path / "run"
    record = json.loads((run / "record.json").read_text())
    assert record["settings"]["dates"] == 40 and record["settings"]["data"] is None
    assert [entry["epoch"] for entry in record["epochs"]] == [1, 2]
    assert record["steps"] == record["epochs"][-1]["step"]
    assert {"train_loss", "val_loss", "exact_match", "tokens_per_second"} <= set(record["epochs"][0])
    (score,) = record["scores"]
    assert (score["test"], score["metric"], score["sentences"]) == ("held-out", "exact match", 5)
    assert score["tokens_per_second"] > 0 and record["versions"]["fastattn"]

    model, tokenizer, settings = load_model(run / "model.pt")
    ((translation,),) = translate(model, tokenizer, ["3 March 1998"], settings)
    assert len(translation.text) < settings.max_length


def test_command_with_graphs(tmp_path: Path) -> None:
    """Trained and resumed; on a CPU without graphs, on the padded batches."""
    arguments = [*DATES, "--graph", "--out", str(tmp_path)]
    assert train_translation.main([*arguments, "--steps", "2"]) == 0
    assert train_translation.main([*arguments, "--steps", "4", "--resume"]) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["settings"]["graph"] and record["steps"] == 4


def test_text_is_learned(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    arguments = [*on_text(text, out), "--epochs", "8", "--average", "3"]
    assert train_translation.main(arguments) == 0
    record = json.loads((out / "record.json").read_text())
    assert record["epochs"][-1]["val_loss"] < 0.5 * record["epochs"][0]["val_loss"]
    (score,) = record["scores"]
    assert score["test"] == "test_a" and score["metric"] == "BLEU" and "tok:13a" in score["signature"]
    assert score["signature"] in capsys.readouterr().out
    assert len((out / "test_a.translations").read_text().splitlines()) == 12
    assert sorted(path.name for path in out.glob("epoch-*")) == ["epoch-0006.pt", "epoch-0007.pt", "epoch-0008.pt"]

    states = [torch.load(path, weights_only=True)["trg_word_prj.weight"] for path in sorted(out.glob("epoch-*"))]
    mean = torch.stack(states).double().mean(0).float()
    assert torch.equal(torch.load(out / "model.pt", weights_only=True)["model"]["trg_word_prj.weight"], mean)


def final_state(out: Path) -> dict[str, Any]:
    """Everything in a finished run that must not depend on interruptions: no clock, no option that may change."""
    state = torch.load(out / "last.pt", weights_only=True)
    progress = {name: value for name, value in state["progress"].items() if name not in ("seconds", "epochs")}
    losses = [[entry["step"], entry["train_loss"], entry["val_loss"]] for entry in state["progress"]["epochs"]]
    averaged = torch.load(out / "model.pt", weights_only=True)["model"]
    found = {"progress": progress, "epochs": losses, "averaged": averaged, "optimizer": state["optimizer"]["state"]}
    return found | {name: state[name] for name in ("model", "torch_rng")}


def test_interrupted_run_ends_as_an_uninterrupted_one(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped by --steps within an epoch, by a signal within the next, and killed after a save: equal bit for bit."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train_translation.main([*on_text(text, whole), "--epochs", "4"]) == 0
    steps = len(torch.load(whole / "last.pt", weights_only=True)["progress"]["losses"])
    assert steps % 4 == 0 and steps // 4 > 3, "the interruptions below must be within epochs"

    part = [*on_text(text, parts)]
    assert train_translation.main([*part, "--epochs", "4", "--steps", "2"]) == 0
    assert torch.load(parts / "last.pt", weights_only=True)["progress"]["position"] == 2

    step, calls = training.training_step, []

    def step_and(action: object) -> object:
        def stepping(*arguments: object) -> torch.Tensor:
            calls.append(None)
            loss = step(*arguments)
            if len(calls) == steps // 4 + 1:
                action()
            return loss

        return stepping

    def power_cut() -> None:
        raise RuntimeError("power cut")

    monkeypatch.setattr(training, "training_step", step_and(lambda: signal.raise_signal(signal.SIGTERM)))
    assert train_translation.main([*part, "--epochs", "4", "--resume"]) == 128 + signal.SIGTERM
    assert "interrupted after step" in capsys.readouterr().err

    calls.clear()
    monkeypatch.setattr(training, "training_step", step_and(power_cut))
    with pytest.raises(RuntimeError, match="power cut"):
        train_translation.main([*part, "--epochs", "4", "--resume", "--save-every", "2"])
    monkeypatch.undo()

    assert train_translation.main([*part, "--epochs", "4", "--resume"]) == 0
    torch.testing.assert_close(final_state(parts), final_state(whole), rtol=0, atol=0)


def test_resume_refuses_another_run(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    arguments = [*on_text(text, out), "--epochs", "1"]
    assert train_translation.main([*arguments, "--resume"]) == 2
    assert "nothing to resume" in capsys.readouterr().err
    assert train_translation.main([*arguments, "--steps", "1"]) == 0
    assert train_translation.main(arguments) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert train_translation.main([*arguments, "--resume", "--d-model", "32"]) == 2
    assert "--d-model was 16, is 32" in capsys.readouterr().err
    lines = (text / "train.words").read_text().splitlines()
    (text / "train.words").write_text("\n".join([*lines[:-1], "something else"]) + "\n")
    assert train_translation.main([*arguments, "--resume"]) == 2
    assert "not the one this run began with" in capsys.readouterr().err


def test_resume_refuses_damaged_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, before the first step."""
    arguments, path = [*DATES, "--out", str(tmp_path)], tmp_path / "last.pt"
    assert train_translation.main([*arguments, "--epochs", "1"]) == 0
    capsys.readouterr()
    monkeypatch.setattr(training, "training_step", None)  # it would be called

    def refused(message: str) -> None:
        assert train_translation.main([*arguments, "--epochs", "2", "--resume"]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {path}: {message}") and error.count("\n") == 1

    content = path.read_bytes()
    for damaged in (b"", content[:5000], b"a sentence\n", pickle.dumps(Path.touch)):
        path.write_bytes(damaged)
        refused("is cut off, or not a file that")
    state = torch.load(io.BytesIO(content), weights_only=True)
    others = [{**state, "model": {**state["model"], "trg_word_prj.weight": torch.zeros(3, 4)}}]
    others += [{name: state[name] for name in state if name != lost} for lost in ("tokenizer", "model", "optimizer")]
    for other in others:
        torch.save(other, path)
        refused("holds something else than this version")


def test_one_run_in_a_folder(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lock ends with its run. A run that ends within an epoch prints its loss there."""
    arguments = [*on_text(text, tmp_path / "run"), "--epochs", "1"]
    with folder_lock(tmp_path / "run"):
        assert train_translation.main(arguments) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'run'}: another run is writing there; choose another --out\n"
    assert train_translation.main([*arguments, "--steps", "1"]) == 0
    assert "step 1, within epoch 1: validation" in capsys.readouterr().out
    assert train_translation.main([*arguments, "--resume"]) == 0
    assert "within epoch" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "reason"),
    [("last.pt", "Is a directory"), ("model.pt", "No space left on device"), ("record.json", "Is a directory")],
)
def test_files_that_cannot_be_written(
    name: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that names the file and the reason."""
    if reason == "Is a directory":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).with_suffix(".partial").symlink_to("/dev/full")
    assert train_translation.main([*DATES, "--steps", "1", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.endswith(f"error: {tmp_path / name}: cannot be written: {reason}\n") and "Traceback" not in error


def test_a_run_whose_loss_turns_nan_stops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, losses = training.training_step, itertools.chain([1.0, 1.0, math.nan], itertools.repeat(1.0))
    monkeypatch.setattr(training, "training_step", lambda *arguments: step(*arguments) * next(losses))
    arguments = [*DATES, "--out", str(tmp_path), "--save-every", "2"]
    assert train_translation.main(arguments) == 2
    assert "error: step 3: the loss is nan; begin again with a smaller --lr-scale" in capsys.readouterr().err
    assert torch.load(tmp_path / "last.pt", weights_only=True)["progress"]["step"] == 2, "nothing was saved after it"


def test_bad_data_is_one_line_and_status_2(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (text / "val.digits").write_text("300\n")
    assert train_translation.main(on_text(text, tmp_path / "run")) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {text / 'val.words'}, line 2: has no partner")
    assert error.count("\n") == 1


def test_bad_options(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--heads", "3"], "--heads 3 does not divide --d-model 16"),
        (["--dropout", "1"], "must be at least 0 and below 1"),
        (["--dropout", "x"], "must be a number, got 'x'"),
        (["--epochs", "0"], "must be at least 1"),
        (["--epochs", "x"], "must be a whole number, got 'x'"),
        (["--parallel", "fast"], "invalid choice: 'fast'"),
        (["--device", "nowhere"], "'nowhere' cannot be used"),
        (["--device", "meta"], "'meta' cannot be used"),
        (["--lr-scale", "nan"], "must be above 0 and at most 100, got nan"),
        (["--max-length", "1"], "must be at least 2, got 1"),
        (["--seed", "99999999999999999999"], "must be at most"),
        (["--data", ""], "--data is empty"),
    ):
        with pytest.raises(SystemExit) as stop:
            train_translation.main([*TINY, *arguments])
        assert stop.value.code == 2
        assert message in capsys.readouterr().err
