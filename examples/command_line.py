"""Shared by the commands of this folder: the types of their options, text in, and errors that are one line."""

import argparse
import contextlib
import dataclasses
import gzip
import importlib
import os
import re
import signal
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch
from torch import Tensor
from tqdm import tqdm

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

Main = Callable[[Sequence[str] | None], int]


class CommandError(Exception):
    """The command prints this as one line, and its exit status is 2. The message names the file or the option."""


def command(parse: Callable[[Sequence[str] | None], Any], run: Callable[[Any], int | None]) -> Main:
    """A main(arguments) that returns the exit status: that of run(parse(arguments)), 0 for None; or 2 where a
    CommandError ends it. Its reason is printed on stderr, of all processes of torchrun by the first."""

    def main(arguments: Sequence[str] | None = None) -> int:
        try:
            return run(parse(arguments)) or 0
        except CommandError as error:
            if os.environ.get("RANK", "0") == "0":
                print(f"error: {error}", file=sys.stderr)
            return 2

    return main


def run_command(main: Main) -> NoReturn:
    """Runs the program. The output is UTF-8, as the files are: an ASCII locale, or the encoding of a redirect on
    Windows, cannot hold every translation."""
    sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        status = main(None)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 128 + signal.SIGINT
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while Python ends, a library would print its traceback
    sys.exit(status)


def new_parser(description: str | None, **options: Any) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options
    )


def number(kind: type, condition: str, holds: Callable[[Any], bool]) -> Callable[[str], Any]:
    """The type of an option whose value is an int or a float for which `holds`; `condition` is that in words."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a {'whole ' * (kind is int)}number, got {text!r}") from None
        if not holds(value):
            raise argparse.ArgumentTypeError(f"must be {condition}, got {value}")
        return value

    return parse


positive = number(int, "at least 1", lambda value: value >= 1)
seed_number = number(int, "from 0 to 2^63 - 1", lambda value: 0 <= value < 2**63)


def usable_device(text: str) -> str:
    try:
        torch.zeros(1, device=text).item()  # "meta" has no numbers
    except (RuntimeError, AssertionError) as error:
        reason = re.sub("Expected one of .* device type", "no such device", str(error).splitlines()[0])
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used: {reason}") from error
    return text


def option(help: str, type: Callable | tuple[str, ...], default: Any, with_data: Any = None) -> Any:
    """A field of a dataclass of settings, and an option of the command. type: a function of the text, bool for a flag,
    or the words to choose from. with_data: the default with --data, if that differs."""
    return dataclasses.field(default=default, metadata={"help": help, "type": type, "with_data": with_data})


def flag(name: str) -> str:
    """ "d_model" -> "--d-model"."""
    return "--" + name.replace("_", "-")


def add_options(parser: argparse.ArgumentParser, settings: type) -> None:
    """An option for each field that is one. Those that are not given are not in the result."""
    for field in filter(lambda field: field.metadata, dataclasses.fields(settings)):
        kind, for_data = field.metadata["type"], field.metadata["with_data"]
        note = "" if field.default is None or kind is bool else f" (default {field.default})"
        if for_data is not None:
            note = f" (default {field.default} for dates, {for_data} with --data)"
        options = {"choices": kind} if isinstance(kind, tuple) else {"type": kind}
        options = {"action": "store_true"} if kind is bool else options
        parser.add_argument(flag(field.name), help=field.metadata["help"] + note, default=argparse.SUPPRESS, **options)


def copy_to(device: torch.device | str, t: Tensor) -> Tensor:
    """Copies t from the CPU to the device. A GPU copies from pinned memory, and nothing waits for it."""
    if torch.device(device).type != "cuda":
        return t.to(device)
    return t.pin_memory().to(device, non_blocking=True)  # pinned memory is left as it is


@contextlib.contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Turns an error of writing `path`, or a ValueError of a library about it, into a CommandError with the reason."""
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
    except ValueError as error:
        raise CommandError(f"{path}: {error}") from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write, next to `path`, which it replaces at the end: an interruption never leaves half a file.
    CommandError where it cannot be written; what was written until then is deleted."""
    partial = path.with_suffix(".partial")
    with writing(path):
        try:
            yield partial
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Makes a folder and locks it until the context or the process ends. CommandError where another process has locked
    it. (No lock on Windows, and none where the file system has no locks.)"""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("a")
    with lock:
        try:
            if fcntl:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CommandError(f"{folder}: another run is writing there; choose another --out") from error
        except OSError:
            pass
        yield


def progress_bar(*items: Iterable[Any], **options: Any) -> tqdm:
    """On a terminal it moves all the time; in a file it adds a line now and then. A second's work has none."""
    return tqdm(*items, mininterval=0.2 if sys.stderr.isatty() else 30, leave=False, delay=1, **options)


def lines_of(source: Path | BinaryIO, bad: str | None = None) -> Iterator[str]:
    """The lines of UTF-8 text, stripped, one after the other. Only a newline ends a line (U+2028 and the like do not).

    source: a file, plain or .gz, or standard input. CommandError where it cannot be read; and where a line is not
    UTF-8 or has a zero byte, unless such a line is to be read as `bad`.
    """
    name = source if isinstance(source, Path) else "standard input"
    try:
        if isinstance(source, Path):
            opened = gzip.open(source) if source.suffix == ".gz" else source.open("rb")
        else:
            opened = contextlib.nullcontext(source)
        with opened as file:
            for number, line in enumerate(file, start=1):
                try:
                    text = line.decode("utf-8").strip("\ufeff \t\r\n\v\f")
                    if "\0" in text:
                        raise ValueError("it has a zero byte; is the file UTF-16?")
                except ValueError as error:
                    if bad is None:
                        raise CommandError(f"{name}, line {number}: not UTF-8: {error}") from error
                    text = bad
                yield text
    except (OSError, EOFError, zlib.error) as error:
        raise CommandError(f"{name}: cannot be read: {error}") from error


def columns_of(line: str) -> tuple[str, str]:
    """Source and target, with a tab between them. ValueError where there are not two columns."""
    source, target = line.split("\t")
    return source.strip(), target.strip()


def pairs_of(path: Path, read: Callable[[str], tuple[str, str]], bad: str | None = None) -> Iterator[tuple[str, str]]:
    """read(line) of every line that is not blank. CommandError where that raises a ValueError or a TypeError, unless
    such a line is to be read as two `bad`."""
    for number, line in enumerate(lines_of(path, bad), start=1):
        try:
            if line:
                yield read(line)
        except (ValueError, TypeError) as error:
            if bad is None:
                raise CommandError(f"{path}, line {number}: not text in two languages: {line[:60]!r}") from error
            yield bad, bad


def library(name: str, extra: str) -> Any:
    """A module that not every command needs."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CommandError(f'{name} is missing: pip install ".[{extra}]"') from error
