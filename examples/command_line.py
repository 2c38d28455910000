"""Shared by the commands of this folder: the types of their options, and errors that are one line."""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor


class CommandError(Exception):
    """The command prints this as one line, and its exit status is 2. The message names the file or the option."""


def at_least(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of an option whose value is a whole number."""

    def whole_number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        if most is not None and value > most:
            raise argparse.ArgumentTypeError(f"must be at most {most}, got {value}")
        return value

    return whole_number


positive, seed_number = at_least(1), at_least(0, 2**63 - 1)


def usable_device(text: str) -> str:
    try:
        torch.zeros(1, device=text).item()  # "meta" has no numbers
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used: {reason}") from error
    return text


def copy_to(device: torch.device | str, t: Tensor) -> Tensor:
    """Copies t from the CPU to the device. A GPU copies from pinned memory, and nothing waits for it."""
    if torch.device(device).type != "cuda":
        return t.to(device)
    return t.pin_memory().to(device, non_blocking=True)


@contextlib.contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Turns an error of writing `path` into a CommandError with the path and the reason."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # On a full disk torch.save raises an error without the reason; the system's own error came before it.
        cause: BaseException | None = error
        while cause and not isinstance(cause, OSError):
            cause = cause.__context__
        if not cause:
            raise
        raise CommandError(f"{path}: cannot be written: {cause.strerror or cause}") from error
