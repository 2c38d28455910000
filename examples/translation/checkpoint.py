"""Saving and resuming a run, and the averaged weights that are its result."""

import contextlib
import dataclasses
import hashlib
import io
import os
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from command_line import CommandError, writing
from torch import Tensor

from fastattn import FusedTransformer
from translation.data import Example
from translation.parallel import Processes
from translation.settings import Settings
from translation.tokens import Tokenizer, load_tokenizer
from translation.training import ALONE, Progress, build_model

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


class ResumeError(CommandError):
    """The run in --out cannot be continued as asked."""


class ModelError(CommandError):
    """A file is damaged, or is not what train_translation.py wrote."""


@contextlib.contextmanager
def sole_run(out: Path) -> Iterator[None]:
    """Makes the folder of a run and locks it until the context or the process ends. ResumeError where another run has
    locked it. (No lock on Windows, and none where the file system has no locks.)"""
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    with writing(out / ".lock"):
        lock = (out / ".lock").open("a")
    with lock:
        if fcntl:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ResumeError(f"{out}: another run is writing there; choose another --out") from error
            except OSError:
                pass
        yield


def fingerprint(examples: Sequence[Example]) -> str:
    """A hash of the encoded training pairs: a run must be resumed with the text it began with."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(example.source.tobytes())
        digest.update(example.target.tobytes())
    return digest.hexdigest()


def save_atomically(content: dict[str, Any], path: Path) -> None:
    """Writes next to `path` and renames, so that an interruption never leaves half a file. CommandError where it cannot
    be written."""
    partial = path.with_suffix(".partial")
    try:
        with writing(path):
            with partial.open("wb") as file:
                torch.save(content, file)
            os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def read_file(path: Path) -> Any:
    """What `save_atomically` wrote. Nothing in the file is executed. ModelError where it cannot be read."""
    try:
        data = io.BytesIO(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickles that others wrote
            return torch.load(data, map_location="cpu", weights_only=True)
    except Exception as error:  # what a foreign file makes torch raise depends on the file
        raise ModelError(f"{path}: is cut off, or not a file that train_translation.py wrote") from error


@contextlib.contextmanager
def content_of(path: Path) -> Iterator[None]:
    """ModelError, naming the file, where what is done within does not find in its content what it expects."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError, AttributeError) as error:
        raise ModelError(f"{path}: holds something else than this version of train_translation.py writes") from error


def check_tensors(path: Path, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """ModelError where names or shapes are not the expected ones, or a value is NaN or infinite."""
    with content_of(path):
        if {name: t.shape for name, t in found.items()} != {name: t.shape for name, t in expected.items()}:
            raise ValueError("other names or shapes")
        broken = [name for name, t in found.items() if not t.isfinite().all()]
    if broken:
        raise ModelError(f"{path}: {len(broken)} of {len(found)} tensors hold NaN or infinity, such as {broken[0]}")


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
    processes.in_first(lambda: save_atomically(content, path))


def load_run(path: Path, settings: Settings) -> dict[str, Any]:
    """What `save_run` wrote. ResumeError where there is nothing, or the settings have changed; ModelError where the
    file is damaged, or another."""
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
    processes: Processes = ALONE,
) -> Progress:
    """Puts a run that was loaded from `path` into `model`, `optimizer` and the random generators; returns its progress.

    With as many processes as before each draws on where it was; with another number dropout is drawn anew.
    """
    with content_of(path):
        if content["data"] != data:
            raise ResumeError(f"{settings.out}: the training text is not the one this run began with")
        check_tensors(path, content["model"], model.state_dict())
        parameters = dict(model.named_parameters())
        for moment in ("exp_avg", "exp_avg_sq"):
            states = content["optimizer"]["state"]
            check_tensors(path, {name: state[moment] for name, state in states.items()}, parameters)
        for saved, group in zip(content["optimizer"]["param_groups"], optimizer.param_groups, strict=True):
            saved["capturable"] = group["capturable"]  # of this device: the run may have begun on another
        processes.set_state(model, optimizer, content["model"], content["optimizer"])
        progress = Progress(**content["progress"])
        progress.check()
        if len(content["torch_rng"]) == processes.size:
            torch.set_rng_state(content["torch_rng"][processes.rank])
            if (cuda_rng := content["cuda_rng"][processes.rank]) is not None:
                torch.cuda.set_rng_state(cuda_rng, settings.device)
        else:
            processes.seed(settings.seed, progress.step)
        random.setstate(content["python_rng"])
    read_epochs(path.parent, progress.epoch, settings.average, model.state_dict())  # a damaged one is told now
    return progress


def epoch_path(out: Path, epoch: int) -> Path:
    return out / f"epoch-{epoch:04d}.pt"


def save_epoch(out: Path, weights: dict[str, Tensor], epoch: int, keep: int) -> None:
    """Keeps the weights at the end of the last `keep` epochs."""
    save_atomically(weights, epoch_path(out, epoch))
    epoch_path(out, epoch - keep).unlink(missing_ok=True)


def read_epochs(out: Path, last: int, keep: int, expected: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """What `save_epoch` wrote of the `keep` - 1 epochs up to `last`, where they are there. ModelError where a file is
    damaged, or of another model than the `expected` weights."""
    states = []
    for epoch in range(max(1, last - keep + 2), last + 1):
        if (path := epoch_path(out, epoch)).is_file():
            states.append(read_file(path))
            check_tensors(path, states[-1], expected)
    return states


def average(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of every tensor, summed in float64."""
    return {
        name: (sum(state[name].double() for state in states) / len(states)).to(first.dtype)
        for name, first in states[0].items()
    }


def averaged_weights(
    out: Path, weights: dict[str, Tensor], progress: Progress, keep: int
) -> tuple[dict[str, Tensor], int]:
    """The mean of the last `keep` checkpoints, of which the present weights are the last; and how many there were.
    ModelError where one of them is damaged."""
    # After a whole number of epochs the present weights are those that the last epoch saved.
    last = progress.epoch if progress.position else progress.epoch - 1
    states = read_epochs(out, last, keep, weights)
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

    ModelError where the file is not there, is damaged, or is something else.
    """
    content = read_file(path)
    with content_of(path):
        if content and all(isinstance(value, Tensor) for value in content.values()):  # what `save_epoch` wrote
            raise ModelError(f"{path}: holds weights alone; give the model.pt or last.pt of the run")
        settings = dataclasses.replace(Settings(**content["settings"]), device=device)
        settings.check()
        tokenizer = load_tokenizer(content["tokenizer"])
        model = build_model(settings, tokenizer.size)
        check_tensors(path, content["model"], model.state_dict())
        model.load_state_dict(content["model"])
    return model.eval(), tokenizer, settings
