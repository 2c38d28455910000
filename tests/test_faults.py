"""What is left after a failure in the middle: of files after SIGKILL or a full disk at every write, of a model after a
lack of memory at every allocation or an exception from outside."""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import CommandError
from translation import checkpoint, prepare
from translation.options import TextSettings
from translation.text import Text

import fastattn
from fastattn.check import tune

PAD = 0

# --- files ------------------------------------------------------------------------------------------------------------


@contextmanager
def each_write(tick: Callable[[str], None]) -> Iterator[None]:
    """tick(name) comes before every write, rename and removal of Python code. Of a write one half comes before it."""

    class File(io.FileIO):
        def write(self, data: Any) -> int:
            half = len(data) // 2
            super().write(data[:half])
            tick("write")
            return half + super().write(data[half:])

    def opened(file: Any, mode: str = "r", buffering: int = -1, encoding: str | None = None, *others: Any) -> Any:
        if not set(mode) & set("wax"):
            return kept["open"](file, mode, buffering, encoding, *others)
        tick("open")
        raw = io.BufferedWriter(File(file, mode.replace("b", "").replace("t", "")))
        return raw if "b" in mode else io.TextIOWrapper(raw, encoding or "utf-8")

    def counted(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            tick(name)
            return kept[name](*arguments, **options)

        return call

    places = [(builtins, "open"), (io, "open"), (os, "replace"), (os, "rename"), (os, "unlink"), (os, "rmdir")]
    kept = {name: getattr(module, name) for module, name in places}
    try:
        for module, name in places:
            setattr(module, name, opened if name == "open" else counted(name))
        yield
    finally:
        for module, name in places:
            setattr(module, name, kept[name])


def killed_at(count: int, write: Callable[[], None]) -> bool:
    """Run write() in a fork that SIGKILL ends at the count-th tick. Returns whether it came so far."""
    if (child := os.fork()) == 0:
        ticks = iter(range(1, count))
        try:
            with each_write(lambda _: os.kill(os.getpid(), signal.SIGKILL) if next(ticks, None) is None else None):
                write()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1] == signal.SIGKILL


def fails_at(count: int, write: Callable[[], None]) -> Exception | None:
    """The error of write() on a disk that is full from the count-th tick on: one more file can only be removed."""
    ticks, failed = iter(range(1, count)), []

    def tick(name: str) -> None:
        if name not in ("unlink", "rmdir") and not failed and next(ticks, None) is None:
            failed.append(True)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with each_write(tick):
        try:
            write()
        except Exception as error:
            return error
    assert not failed, "an error was swallowed"
    return None


class Checkpoint:
    """A writer: write(folder, value), read(folder) -> value, which raises one clear error where it is unfinished."""

    error: type[Exception] = CommandError
    in_place = False  # whether the old state goes before the new one is whole; it is then recognised as unfinished

    def write(self, folder: Path, value: int) -> None:
        checkpoint.save_atomically({"value": torch.full((999,), value)}, folder / "last.pt")

    def read(self, folder: Path) -> int:
        values = checkpoint.read_file(folder / "last.pt")["value"].tolist()
        assert len({*values}) == 1
        return values[0]


class Record(Checkpoint):
    """Of tune."""

    error = OSError  # the command turns it into one line

    def write(self, folder: Path, value: int) -> None:
        tune._write({"value": value, "rows": [0] * 999}, folder / "cpu.json")

    def read(self, folder: Path) -> int:
        return fastattn.backends.timings.json.loads((folder / "cpu.json").read_text())["value"]


class Prepared(Checkpoint):
    in_place = True

    def write(self, folder: Path, value: int) -> None:
        text = folder.parent / f"text {value}"
        for number in (1, 2) if value == 1 else ():
            (folder.parent / f"text {number}").mkdir()
            for name in ("train.a", "train.b", "val.a", "val.b", "test.a", "test.b"):
                (folder.parent / f"text {number}" / name).write_text(f"{number} and {number}\n" * 5)
        settings = TextSettings(
            source="a", target="b", vocabulary=300, max_length=32, max_ratio=9.0, keep_duplicates=True, lowercase=False
        )
        prepare.prepare(Text(text, "a", "b", False), settings, folder)

    def read(self, folder: Path) -> int:
        return int(prepare.load_prepared(folder).val_pairs[0][0].split()[0])


class Exported(Checkpoint):
    """For CTranslate2, into a new folder. value: 2 for the new one, which is all that there is."""

    error = OSError

    def write(self, folder: Path, value: int) -> None:
        pytest.importorskip("ctranslate2")
        from fastattn.integrations.ctranslate2 import export

        if value == 2:
            words = [f"t{i}" for i in range(9)]
            sizes = {"d_model": 8, "d_inner": 8, "n_layers": 1, "n_head": 2, "d_k": 4, "d_v": 4, "n_position": 9}
            model = fastattn.FusedTransformer(9, 9, PAD, PAD, **sizes)
            export(model, folder / "model", words, words, bos_idx=1, eos_idx=2, unk_idx=3)

    def read(self, folder: Path) -> int:
        import ctranslate2

        if not (folder / "model").exists():
            return 1
        ctranslate2.Translator(str(folder / "model")).translate_batch([["t4"]], max_decoding_length=4)
        return 2


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != ".lock"}


def tiers(*kinds: type) -> Any:
    slow = {Prepared, Exported}
    return pytest.mark.parametrize(
        "kind", [pytest.param(kind, marks=pytest.mark.full if kind in slow else ()) for kind in kinds]
    )


@tiers(Checkpoint, Record, Prepared, Exported)
def test_killed_at_every_write(kind: type[Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there is the old or the new, whole, or recognised; and the next write ends well."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # for a fork
    writer, old, found = kind(), tmp_path / "old", []
    old.mkdir()
    writer.write(old, 1)
    for count in range(1, 200):
        folder = tmp_path / str(count)
        shutil.copytree(old, folder)
        was_killed = killed_at(count, lambda folder=folder: writer.write(folder, 2))
        try:
            found.append(writer.read(folder))
        except CommandError as error:
            assert kind.in_place and "\n" not in str(error) and str(folder) in str(error)
            found.append(0)
        if not was_killed:
            break
        if found[-1] != 2 or kind is not Exported:  # into a folder that is not empty nothing is exported
            writer.write(folder, 2)
        assert writer.read(folder) == 2
    assert found[0] == 1 and found[-1] == 2 and len(found) > 3
    assert (0 in found) is kind.in_place and [f for f in found if f] == sorted(f for f in found if f)


@tiers(Checkpoint, Record, Prepared, Exported)
def test_a_full_disk_at_every_write(kind: type[Checkpoint], tmp_path: Path) -> None:
    """One clear error, the old file whole, and no temporary file."""
    writer, folder = kind(), tmp_path / "folder"
    folder.mkdir()
    writer.write(folder, 1)
    before = names(folder)
    for count in range(1, 200):
        if (error := fails_at(count, lambda: writer.write(folder, 2))) is None:
            break
        assert isinstance(error, kind.error) and "\n" not in str(error), repr(error)
        assert "No space left on device" in str(error)
        if kind.in_place:
            with suppress(CommandError):
                assert writer.read(folder) == 1
            assert names(folder) <= before
        elif writer.read(folder) == 1:
            assert names(folder) == before
    assert count > 3 and writer.read(folder) == 2
