"""Shared by the commands of this folder: the types of their options, text in and out, and errors that are one line."""

import argparse
import contextlib
import gzip
import hashlib
import io
import os
import re
import signal
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch
from torch import Tensor
from tqdm import tqdm

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


class CommandError(Exception):
    """The command prints this as one line, and its exit status is 2. The message names the file or the option."""


class DataError(CommandError):
    """The user's files cannot be used; the message names the file and, where possible, the line."""


def run_command(main: Callable[[], int]) -> NoReturn:
    """Runs the program; its exit status is what main() returns. The output is UTF-8, as the files are: an ASCII locale,
    or the encoding of a redirect on Windows, cannot hold every translation."""
    sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        status = main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 128 + signal.SIGINT
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while Python ends, a library would print its traceback
    sys.exit(status)


def exit_status(run: Callable[[], int | None]) -> int:
    """What run() returns, 0 for None; or 2 where a CommandError ends it. Its reason is printed on stderr, of all
    processes of torchrun by the first."""
    try:
        return run() or 0
    except CommandError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        return 2


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
        reason = re.sub("Expected one of .* device type", "no such device", str(error).splitlines()[0])
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used: {reason}") from error
    return text


def copy_to(device: torch.device | str, t: Tensor) -> Tensor:
    """Copies t from the CPU to the device. A GPU copies from pinned memory, and nothing waits for it."""
    if torch.device(device).type != "cuda":
        return t.to(device)
    return t.pin_memory().to(device, non_blocking=True)  # pinned memory is left as it is


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


@contextlib.contextmanager
def folder_lock(folder: Path, wait: bool = False) -> Iterator[None]:
    """Makes a folder and locks it until the context or the process ends. CommandError where another process has locked
    it, unless it is to wait. (No lock on Windows, and none where the file system has no locks.)"""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with writing(folder / ".lock"):
        lock = (folder / ".lock").open("a")
    with lock:
        if fcntl:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError as error:
                raise CommandError(f"{folder}: another run is writing there; choose another --out") from error
            except OSError:
                pass
        yield


def progress_bar(*items: Iterable[Any], **options: Any) -> tqdm:
    """On a terminal it moves all the time; in a file it adds a line now and then. A second's work has none."""
    return tqdm(*items, mininterval=0.2 if sys.stderr.isatty() else 30, leave=False, delay=1, **options)


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 file, plain, .gz or .zst; see `lines_of`."""
    return list(lines_of(path))


def lines_of(source: Path | BinaryIO, name: str = "", bad: str | None = None) -> Iterator[str]:
    """The lines of UTF-8 text, stripped, one after the other. Only a newline ends a line (U+2028 and the like do not).

    source: a file, plain, .gz or .zst; or one that is open, with its name for errors. DataError where a line is not
    UTF-8, unless it is to be read as `bad`, or holds a zero byte, and where the file cannot be read.
    """
    name = name or str(source)
    number = 1
    try:
        with open_bytes(source) if isinstance(source, Path) else contextlib.nullcontext(source) as file:
            for number, line in enumerate(file, start=1):
                try:
                    text = line.decode("utf-8").strip("\ufeff \t\r\n\v\f")
                except UnicodeDecodeError:
                    if bad is None:
                        raise
                    yield bad
                    continue
                if "\0" in text:
                    raise DataError(
                        f"{name}, line {number}: holds a zero byte; is the file UTF-16? Convert it to UTF-8"
                    )
                yield text
    except UnicodeDecodeError as error:
        raise DataError(f"{name}, line {number}: not UTF-8 ({error.reason} at byte {error.start})") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{name}: cannot be read: {error}") from error


def open_bytes(path: Path) -> Any:
    """The content of a file, unpacked where its name ends in .gz or .zst."""
    if path.suffix == ".gz":
        return gzip.open(path)
    if path.suffix == ".zst":  # of the packages that read it, pyarrow notices a file that is cut off
        return io.BufferedReader(arrow(path).input_stream(str(path), compression="zstd"))
    return path.open("rb")


def arrow(path: Path) -> Any:
    """The module pyarrow, which reads this file."""
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(f'{path}: needs pyarrow: pip install ".[text]"') from error
    return pyarrow


def blocks_of(path: Path) -> Iterator[bytes]:
    """The content of a file in pieces: a process holds one of them."""
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            yield block


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    for block in blocks_of(path):
        digest.update(block)
    return digest.hexdigest()
