"""Shared by the commands of this folder: the types of their options, text in and out, and errors that are one line."""

import argparse
import contextlib
import gzip
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor


class CommandError(Exception):
    """The command prints this as one line, and its exit status is 2. The message names the file or the option."""


class DataError(CommandError):
    """The user's files cannot be used; the message names the file and, where possible, the line."""


def run_command(main: Callable[[], int]) -> NoReturn:
    """Runs the program; its exit status is what main() returns. The output is UTF-8, as the files are: an ASCII locale,
    or the encoding of a redirect on Windows, cannot hold every translation."""
    sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    sys.exit(main())


def exit_status(run: Callable[[], None]) -> int:
    """0 after run(), or 2 where a CommandError ends it, with its reason on stderr."""
    try:
        run()
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None


def real_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def at_least(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of an option whose value is a whole number."""

    def bounded(text: str) -> int:
        value = whole_number(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        if most is not None and value > most:
            raise argparse.ArgumentTypeError(f"must be at most {most}, got {value}")
        return value

    return bounded


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


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 file, plain or .gz; see `decode_lines`."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    return decode_lines(raw, path)


def decode_lines(raw: bytes, name: Path | str) -> list[str]:
    """The lines of UTF-8 text, stripped. Only a newline ends a line (U+2028 and the like do not). name: for errors."""
    lines: list[str] = []
    if not raw:
        return lines
    for number, line in enumerate(raw.removesuffix(b"\n").split(b"\n"), start=1):
        try:
            text = line.decode("utf-8").strip("\ufeff \t\r\v\f")
        except UnicodeDecodeError as error:
            raise DataError(f"{name}, line {number}: not UTF-8 ({error.reason} at byte {error.start})") from error
        if "\0" in text:
            raise DataError(f"{name}, line {number}: holds a zero byte; is the file UTF-16? Convert it to UTF-8")
        lines.append(text)
    return lines
