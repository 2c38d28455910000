"""Saving and resuming a run, and the averaged weights that are its result."""

import dataclasses
import hashlib
import io
import os
import random
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastattn import FusedTransformer
from translation.data import Example
from translation.parallel import Processes
from translation.settings import Settings
from translation.tokens import Tokenizer, load_tokenizer
from translation.training import ALONE, Progress, build_model


class ResumeError(Exception):
    """The run in --out cannot be continued as asked."""


class ModelError(Exception):
    """A file is not a trained model."""


def fingerprint(examples: Sequence[Example]) -> str:
    """A hash of the encoded training pairs: a run must be resumed with the text it began with."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(example.source.tobytes())
        digest.update(example.target.tobytes())
    return digest.hexdigest()


def save_atomically(content: dict[str, Any], path: Path) -> None:
    """Writes beside `path` and renames, so that an interruption never leaves half a file."""
    partial = path.with_suffix(".partial")
    torch.save(content, partial)
    os.replace(partial, path)


def save_run(
    path: Path,
    model: FusedTransformer,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    settings: Settings,
    tokenizer: Tokenizer,
    data: str,
    processes: Processes = ALONE,
) -> None:
    """The whole state of a run, in one file whatever the number of processes. data: the fingerprint of its pairs."""
    cuda = torch.device(settings.device).type == "cuda"
    of_model, of_optimizer = processes.state(model, optimizer)
    content = {
        "settings": dataclasses.asdict(settings),
        "tokenizer": tokenizer.to_json(),
        "data": data,
        "model": of_model,
        "optimizer": of_optimizer,
        "progress": progress.state(),
        "torch_rng": processes.gather(torch.get_rng_state()),
        "cuda_rng": processes.gather(torch.cuda.get_rng_state(settings.device) if cuda else None),
        "python_rng": random.getstate(),
    }
    if processes.is_first:
        save_atomically(content, path)


def load_run(path: Path, settings: Settings) -> dict[str, Any]:
    """What `save_run` wrote. ResumeError where there is nothing, or the settings have changed."""
    if not path.is_file():
        raise ResumeError(f"{path}: no such file, so there is nothing to resume; leave --resume out to begin")
    content = torch.load(path, map_location="cpu", weights_only=True)
    conflicts = settings.conflicts_with(content["settings"])
    if conflicts:
        raise ResumeError(f"{path}: was trained with other options: {'; '.join(conflicts)}")
    return content


def restore(
    content: dict[str, Any],
    model: FusedTransformer,
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    data: str,
    processes: Processes = ALONE,
) -> Progress:
    """Puts a loaded run into `model`, `optimizer` and the random generators; returns its progress.

    With as many processes as before each draws on where it was; with another number dropout is drawn anew.
    """
    if content["data"] != data:
        raise ResumeError(f"{settings.out}: the training text is not the one this run began with")
    processes.set_state(model, optimizer, content["model"], content["optimizer"])
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


def averaged_weights(
    out: Path, weights: dict[str, Tensor], progress: Progress, keep: int
) -> tuple[dict[str, Tensor], int]:
    """The mean of the last `keep` checkpoints, of which the present weights are the last; and how many there were."""
    # After a whole number of epochs the present weights are those that the last epoch saved.
    last = progress.epoch if progress.position else progress.epoch - 1
    paths = [epoch_path(out, epoch) for epoch in range(max(1, last - keep + 2), last + 1)]
    states = [torch.load(path, map_location="cpu", weights_only=True) for path in paths if path.is_file()]
    states.append({name: value.cpu() for name, value in weights.items()})
    return average(states), len(states)


def save_model(path: Path, model: FusedTransformer, settings: Settings, tokenizer: Tokenizer) -> None:
    """The trained model: weights, settings and tokenizer, all that translating needs."""
    content = {
        "model": model.state_dict(),
        "settings": dataclasses.asdict(settings),
        "tokenizer": tokenizer.to_json(),
    }
    save_atomically(content, path)


def load_model(path: Path, device: str = "cpu") -> tuple[FusedTransformer, Tokenizer, Settings]:
    """What `save_model` or `save_run` wrote, ready for `decoding.translate`. Nothing in the file is executed.

    ModelError where the file is not there, or is something else.
    """
    try:
        data = io.BytesIO(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickles that others wrote
            content = torch.load(data, map_location="cpu", weights_only=True)
    except Exception as error:  # what a foreign file makes torch raise depends on the file
        raise ModelError(f"{path}: is cut off, or not a file that train_translation.py wrote") from error
    try:
        settings = dataclasses.replace(Settings(**content["settings"]), device=device)
        tokenizer = load_tokenizer(content["tokenizer"])
        model = build_model(settings, tokenizer.size)
        model.load_state_dict(content["model"])
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise ModelError(f"{path}: is not a model that this version of train_translation.py wrote") from error
    return model.eval(), tokenizer, settings
