"""Saving and resuming a run, and the weights that may be its result."""

import contextlib
import dataclasses
import io
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from command_line import CommandError, replacing
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from fastattn import FusedTransformer
from translation.settings import Settings
from translation.tokens import Tokenizer, load_tokenizer
from translation.training import Progress, Training, build_model


def save_atomically(content: dict[str, Any], path: Path) -> None:
    """Writes `path` as a whole or not at all. CommandError where it cannot be written."""
    with replacing(path) as partial, partial.open("wb") as file:
        torch.save(content, file)


def read_file(path: Path) -> Any:
    """Reads what `save_atomically` wrote. Nothing in the file is executed. CommandError where it cannot be read."""
    try:
        data = io.BytesIO(path.read_bytes())
    except OSError as error:
        raise CommandError(f"{path}: cannot be read: {error.strerror}") from error
    with content_of(path), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pickles that other programs wrote
        return torch.load(data, map_location="cpu", weights_only=True)


@contextlib.contextmanager
def content_of(path: Path) -> Iterator[None]:
    """Turns an error of using the content of `path` into a CommandError that names the file."""
    try:
        yield
    except (CommandError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the class depends on the file
        raise CommandError(f"{path}: is damaged, or not what this version of train_translation.py writes") from error


def save_run(path: Path, run: Training, tokenizer: Tokenizer, data: str) -> None:
    """The whole state of a run, in one file for any number of processes. data: the fingerprint of its pairs."""
    run.read_losses()
    cuda = torch.device(run.settings.device).type == "cuda"
    # By the names of the parameters, as one process would save them; in the first process only.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optimizer_state = get_state_dict(run.model, run.optimizer, options=options)
    content = {
        "settings": dataclasses.asdict(run.settings),
        "tokenizer": tokenizer.to_json(),
        "data": data,
        "model": model_state,
        "optimizer": optimizer_state,
        "progress": vars(run.progress),
        "torch_rng": run.processes.gather(torch.get_rng_state()),
        "cuda_rng": run.processes.gather(torch.cuda.get_rng_state(run.settings.device) if cuda else None),
    }
    run.processes.in_first(lambda: save_atomically(content, path))


def load_run(path: Path, settings: Settings) -> dict[str, Any]:
    """Reads what `save_run` wrote. CommandError where there is no run, it is damaged, or its settings differ."""
    if not path.exists():
        raise CommandError(f"{path}: no such file, so there is nothing to resume; leave --resume out to begin")
    content = read_file(path)
    with content_of(path):
        conflicts = settings.conflicts_with(content["settings"])
    if conflicts:
        raise CommandError(f"{path}: was trained with other options: {'; '.join(conflicts)}")
    return content


def restore(path: Path, content: dict[str, Any], run: Training, data: str) -> None:
    """Puts what was loaded from `path` into a new `run` and the random generators.

    With as many processes as before each continues its own random numbers; with another number they start again.
    """
    processes, device = run.processes, run.settings.device
    with content_of(path):
        if content["data"] != data:
            raise CommandError(f"{path.parent}: the training text is not the one this run began with")
        states = {"model_state_dict": content["model"], "optim_state_dict": content["optimizer"]}
        set_state_dict(run.model, run.optimizer, **states, options=StateDictOptions(full_state_dict=True))
        run.progress = Progress(**content["progress"])
        if len(content["torch_rng"]) == processes.size:
            torch.set_rng_state(content["torch_rng"][processes.rank])
            if (cuda_rng := content["cuda_rng"][processes.rank]) is not None:
                torch.cuda.set_rng_state(cuda_rng, device)
        else:
            processes.seed(run.settings.seed, run.progress.step)


def epoch_path(out: Path, epoch: int) -> Path:
    return out / f"epoch-{epoch:04d}.pt"


def save_epoch(out: Path, weights: dict[str, Tensor], epoch: int, keep: int) -> None:
    """Keeps the weights at the end of the last `keep` epochs."""
    save_atomically(weights, epoch_path(out, epoch))
    epoch_path(out, epoch - keep).unlink(missing_ok=True)


def average(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of every tensor, summed in float64."""
    return {
        name: (sum(state[name].double() for state in states) / len(states)).to(first.dtype)
        for name, first in states[0].items()
    }


def candidates(out: Path, weights: dict[str, Tensor], run: Training) -> dict[str, dict[str, Tensor]]:
    """Copies of the weights that may be the result of a run: `last`, the present ones; `best`, those in best.pt; and
    `mean`, of the last --average checkpoints, `last` included, where that is more than one. Without `best` where no
    epoch has ended. CommandError where a file is damaged."""
    progress = run.progress
    # After a whole number of epochs the present weights are those that the last epoch saved.
    last = progress.epoch if progress.position else progress.epoch - 1
    paths = [epoch_path(out, epoch) for epoch in range(max(1, last - run.settings.average + 2), last + 1)]
    states = [{name: value.to("cpu", copy=True) for name, value in weights.items()}]
    states += [read_file(path) for path in paths if path.is_file()]
    found = {"mean": average(states)} if len(states) > 1 else {}
    if progress.epochs and (out / "best.pt").is_file():
        found["best"] = read_file(out / "best.pt")["model"]
    return found | {"last": states[0]}


def save_model(path: Path, model: FusedTransformer, settings: Settings, tokenizer: Tokenizer) -> None:
    """The trained model: weights, settings and tokenizer, all that translation needs."""
    content = {"settings": dataclasses.asdict(settings), "tokenizer": tokenizer.to_json()}
    save_atomically({"model": model.state_dict(), **content}, path)


def load_model(path: Path, device: str = "cpu") -> tuple[FusedTransformer, Tokenizer, Settings]:
    """Reads what `save_model` or `save_run` wrote, ready for `decoding.translate`; see `read_file`."""
    content = read_file(path)
    with content_of(path):
        if "settings" not in content:
            raise CommandError(f"{path}: holds weights alone; give model.pt or last.pt of its folder")
        settings = Settings(**content["settings"] | {"device": device})
        tokenizer = load_tokenizer(content["tokenizer"])
        model = build_model(settings, tokenizer.size)
        model.load_state_dict(content["model"])
    return model.eval(), tokenizer, settings
