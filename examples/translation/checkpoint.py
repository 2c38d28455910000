"""Saving and resuming a run, and the weights that may be its result."""

import contextlib
import dataclasses
import io
import os
import random
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from command_line import CommandError, writing
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from fastattn import FusedTransformer
from translation.parallel import Processes
from translation.settings import Settings
from translation.tokens import Tokenizer, load_tokenizer
from translation.training import ONE_PROCESS, Progress, build_model


class ResumeError(CommandError):
    """The run in --out cannot be continued with these options."""


class ModelError(CommandError):
    """A file is damaged, or train_translation.py did not write it."""


def save_atomically(content: dict[str, Any], path: Path) -> None:
    """Writes next to `path` and renames, so that an interruption never leaves half a file. CommandError where it cannot
    be written; what was written until then is deleted."""
    partial = path.with_suffix(".partial")
    with writing(path):
        try:
            with partial.open("wb") as file:
                torch.save(content, file)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def read_file(path: Path) -> Any:
    """Reads what `save_atomically` wrote. Nothing in the file is executed. ModelError where it cannot be read."""
    try:
        data = io.BytesIO(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickles that other programs wrote
            return torch.load(data, map_location="cpu", weights_only=True)
    except Exception as error:  # the class depends on the file
        raise ModelError(f"{path}: is cut off, or not a file that train_translation.py wrote") from error


@contextlib.contextmanager
def content_of(path: Path) -> Iterator[None]:
    """Turns an error of using the content of `path` into a ModelError that names the file."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise ModelError(f"{path}: holds something else than this version of train_translation.py writes") from error


def save_run(
    path: Path,
    model: FusedTransformer,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    settings: Settings,
    tokenizer: Tokenizer,
    data: str,
    processes: Processes = ONE_PROCESS,
) -> None:
    """The whole state of a run, in one file for any number of processes. data: the fingerprint of its pairs."""
    cuda = torch.device(settings.device).type == "cuda"
    # By the names of the parameters, as one process would save them; in the first process only.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    content = {
        "settings": dataclasses.asdict(settings),
        "tokenizer": tokenizer.to_json(),
        "data": data,
        "model": model_state,
        "optimizer": optimizer_state,
        "progress": progress.state(),
        "torch_rng": processes.gather(torch.get_rng_state()),
        "cuda_rng": processes.gather(torch.cuda.get_rng_state(settings.device) if cuda else None),
        "python_rng": random.getstate(),
    }
    processes.in_first(lambda: save_atomically(content, path))


def load_run(path: Path, settings: Settings) -> dict[str, Any]:
    """Reads what `save_run` wrote. ResumeError where there is no run, or its settings differ; ModelError where the file
    is damaged."""
    if not path.exists():
        raise ResumeError(f"{path}: no such file, so there is nothing to resume; leave --resume out to begin")
    content = read_file(path)
    with content_of(path):
        load_tokenizer(content["tokenizer"])
        conflicts = settings.conflicts_with(content["settings"])
    if conflicts:
        raise ResumeError(f"{path}: was trained with other options: {'; '.join(conflicts)}")
    return content


def restore(
    path: Path,
    content: dict[str, Any],
    model: FusedTransformer,
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    data: str,
    processes: Processes = ONE_PROCESS,
) -> Progress:
    """Puts a run that was loaded from `path` into `model`, `optimizer` and the random generators; returns its progress.

    With as many processes as before each continues its own random numbers; with another number they start again.
    """
    with content_of(path):
        if content["data"] != data:
            raise ResumeError(f"{settings.out}: the training text is not the one this run began with")
        states = {"model_state_dict": content["model"], "optim_state_dict": content["optimizer"]}
        set_state_dict(model, optimizer, **states, options=StateDictOptions(full_state_dict=True))
        progress = Progress(**content["progress"])
        if len(content["torch_rng"]) == processes.size:
            torch.set_rng_state(content["torch_rng"][processes.rank])
            if (cuda_rng := content["cuda_rng"][processes.rank]) is not None:
                torch.cuda.set_rng_state(cuda_rng, settings.device)
        else:
            processes.seed(settings.seed, progress.step)
        random.setstate(content["python_rng"])
    return progress


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


def candidates(
    out: Path, weights: dict[str, Tensor], progress: Progress, settings: Settings
) -> dict[str, dict[str, Tensor]]:
    """Copies of the weights that may be the result of a run: `last`, the present ones; `best`, those in best.pt; and
    `mean`, of the last --average checkpoints, `last` included, where that is more than one. Without `best` where no
    epoch has ended. ModelError where a file is damaged."""
    # After a whole number of epochs the present weights are those that the last epoch saved.
    last = progress.epoch if progress.position else progress.epoch - 1
    paths = [epoch_path(out, epoch) for epoch in range(max(1, last - settings.average + 2), last + 1)]
    states = [{name: value.to("cpu", copy=True) for name, value in weights.items()}]
    states += [read_file(path) for path in paths if path.is_file()]
    found = {}
    if len(states) > 1:
        with content_of(out / "epoch-*.pt"):
            found["mean"] = average(states)
    if progress.epochs and (path := out / "best.pt").is_file():
        with content_of(path):
            found["best"] = read_file(path)["model"]
    return found | {"last": states[0]}


def save_model(path: Path, model: FusedTransformer, settings: Settings, tokenizer: Tokenizer) -> None:
    """The trained model: weights, settings and tokenizer, all that translation needs."""
    content = {
        "model": model.state_dict(),
        "settings": dataclasses.asdict(settings),
        "tokenizer": tokenizer.to_json(),
    }
    save_atomically(content, path)


def load_model(path: Path, device: str = "cpu") -> tuple[FusedTransformer, Tokenizer, Settings]:
    """Reads what `save_model` or `save_run` wrote, ready for `decoding.translate`. Nothing in the file is executed.
    ModelError where it cannot be read or used."""
    content = read_file(path)
    if isinstance(content, dict) and content and all(isinstance(value, Tensor) for value in content.values()):
        raise ModelError(f"{path}: holds weights alone, as epoch-*.pt do; give model.pt or last.pt of its folder")
    with content_of(path):
        settings = Settings.checked(content["settings"] | {"device": device})
        tokenizer = load_tokenizer(content["tokenizer"])
        model = build_model(settings, tokenizer.size)
        model.load_state_dict(content["model"])
    return model.eval(), tokenizer, settings
