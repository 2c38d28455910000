"""The whole command: what it writes, that an interruption loses nothing, and what it says of bad input."""

import io
import itertools
import json
import math
import os
import pickle
import re
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
from translation_options import DATES, on_text

COMMAND = Path(train_translation.__file__)


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


def test_command_with_graphs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trained and resumed, on a CPU without graphs; and steps that compare ops."""
    arguments = [*DATES, "--graph", "--out", str(tmp_path)]
    assert train_translation.main([*arguments, "--steps", "2"]) == 0
    assert train_translation.main([*arguments, "--steps", "4", "--resume"]) == 0
    compared = ["--shadow", "2", "--steps", "1", "--out", str(tmp_path / "compared")]
    assert train_translation.main([*DATES, "--graph", *compared]) == 0
    assert re.search(r"shadow: 1 steps, \d\d calls compared, 0 deviations", capsys.readouterr().out)
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
    assert torch.equal(weights_in(out / "mean.pt")["trg_word_prj.weight"], mean)
    # The loss still falls fast, so the mean is worse than the last epoch.
    values = {name: found["val_loss"] for name, found in record["candidates"].items()}
    assert record["kept"] == "best" and values["last"] == values["best"] == record["val_loss"] < 0.95 * values["mean"]
    model, _, settings = load_model(out / "model.pt")
    assert load_model(out / "best.pt")[2] == settings
    assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in weights_in(out / "best.pt").items())


def weights_in(path: Path) -> dict[str, torch.Tensor]:
    content = torch.load(path, weights_only=True)
    return content.get("model", content)


@pytest.mark.parametrize(
    ("values", "kept", "options"),
    [
        ([3.0, 1.0, 2.0, 1.0], "mean", ()),
        ([3.0, 1.0, 2.0, 1.5], "best", ()),
        ([3.0, 1.0, 1.5, 0.5], "last", ("--steps", "8")),
        ([3.0, 1.0], "best", ("--epochs", "2", "--average", "1")),
        ([10.0, 30.0, 20.0, 25.0, 7.0], "best", ("--keep-best", "bleu")),
    ],
)
def test_the_best_candidate_is_kept(
    values: list[float],
    kept: str,
    options: tuple[str, ...],
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The values of two or three epochs, of the mean, of weights within an epoch; and BLEU on the tests. Of equals the
    mean is kept. Nothing is validated twice."""
    out, left = tmp_path / "run", iter(values)
    if "bleu" in options:
        monkeypatch.setattr(train_translation, "bleu", lambda *arguments: (next(left), "signature"))
    else:
        monkeypatch.setattr(train_translation, "validation_loss", lambda *arguments: next(left))
    assert train_translation.main([*on_text(text, out), "--batch-tokens", "400", "--epochs", "3", *options]) == 0
    assert next(left, None) is None

    record = json.loads((out / "record.json").read_text())
    best = record["candidates"]["best"]
    assert record["kept"] == kept and best == record["epochs"][1]
    assert f"model.pt is the {kept}" in capsys.readouterr().out
    for one, same in (("model.pt", f"{kept}.pt"), ("best.pt", "epoch-0002.pt")):
        torch.testing.assert_close(weights_in(out / one), weights_in(out / same), rtol=0, atol=0)


def test_patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The second epoch of equals is no better one. More patience continues the run; the last epoch stops nothing."""
    losses = iter([3.0, 1.0, 1.0, 2.0, 9.0] + [9.0] + [0.5, 0.6, 0.7, 0.8, 9.0] + [0.6, 9.0])
    monkeypatch.setattr(train_translation, "validation_loss", lambda *arguments: next(losses))
    arguments = [*DATES, "--out", str(tmp_path), "--epochs", "9"]
    for patience, epochs, best in ((2, 4, 2), (1, 4, 2), (3, 8, 5), (4, 9, None)):
        resume = ["--resume"] if (tmp_path / "last.pt").exists() else []
        assert train_translation.main([*arguments, "--patience", str(patience), *resume]) == 0
        assert len(json.loads((tmp_path / "record.json").read_text())["epochs"]) == epochs
        printed = capsys.readouterr().out
        assert (f"stopped early: no epoch was better than epoch {best}\n" in printed) == (best is not None)
    assert next(losses, None) is None


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that is killed after step 5 continues after step 4: every step is there once, also step 5."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr(training, "READ_STEPS", 1)
    arguments = [*DATES, "--out", str(tmp_path), "--epochs", "2", "--save-every", "2", "--tensorboard"]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch.utils.tensorboard", None)
        assert train_translation.main(arguments) == 2
    assert capsys.readouterr().err == "error: --tensorboard needs the package tensorboard: pip install tensorboard\n"
    assert not (tmp_path / "last.pt").exists(), "it ended before training"

    with monkeypatch.context() as patch, pytest.raises(StopIteration):
        step, calls = training.training_step, iter(range(5))
        patch.setattr(training, "training_step", lambda *arguments: (next(calls), step(*arguments))[1])
        train_translation.main(arguments)
    assert train_translation.main([*arguments, "--resume"]) == 0

    progress = torch.load(tmp_path / "last.pt", weights_only=True)["progress"]
    logs = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = [(event.step, event.value) for event in logs.Scalars("loss")]
    assert losses == [(step, pytest.approx(loss)) for step, loss in enumerate(progress["losses"], start=1)]
    assert [event.step for event in logs.Scalars("learning_rate")] == [step for step, _ in losses]
    for name in ("train_loss", "val_loss", "exact_match", "tokens_per_second"):
        found = [(event.step, event.value) for event in logs.Scalars(name)]
        assert found == [(entry["step"], pytest.approx(entry[name])) for entry in progress["epochs"]]


def final_state(out: Path) -> dict[str, Any]:
    """Everything in a finished run that must not depend on interruptions: no clock, no option that may change."""
    state = torch.load(out / "last.pt", weights_only=True)
    progress = {name: value for name, value in state["progress"].items() if name not in ("seconds", "epochs")}
    losses = [[entry["step"], entry["train_loss"], entry["val_loss"]] for entry in state["progress"]["epochs"]]
    found = {"progress": progress, "epochs": losses, "optimizer": state["optimizer"]["state"]}
    found |= {name: weights_in(out / name) for name in ("model.pt", "best.pt", "mean.pt")}
    return found | {name: state[name] for name in ("model", "torch_rng")}


def test_interrupted_run_ends_as_an_uninterrupted_one(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
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
    errors = capfd.readouterr().err
    assert "\nstopping after this step; Ctrl-C again ends at once\n" in errors and "interrupted after step" in errors

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
    for again in (arguments, [*DATES, "--out", str(out)]):
        assert train_translation.main(again) == 2
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
    """The lock ends with its run."""
    arguments = [*on_text(text, tmp_path / "run"), "--epochs", "1"]
    with folder_lock(tmp_path / "run"):
        assert train_translation.main(arguments) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'run'}: another run is writing there; choose another --out\n"
    assert train_translation.main([*arguments, "--steps", "1"]) == 0
    assert train_translation.main([*arguments, "--resume"]) == 0


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
