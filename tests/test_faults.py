"""What is left after a failure in the middle: of files after SIGKILL or a full disk at every write, of a model after a
lack of memory at every allocation or an exception from outside."""

from __future__ import annotations

import builtins
import errno
import gc
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
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from translation import checkpoint, prepare
from translation.options import TextSettings
from translation.text import Text

import fastattn
from fastattn.backends import choice

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


@tiers(Checkpoint, Prepared, Exported)
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


@tiers(Checkpoint, Prepared, Exported)
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


# --- a training step --------------------------------------------------------------------------------------------------


class FailAt(TorchDispatchMode):
    """The count-th operator raises, as an allocation does: each one may allocate. calls: how many there were."""

    def __init__(self, count: int, error: type[BaseException] = torch.OutOfMemoryError) -> None:
        super().__init__()
        self.count, self.error, self.calls = count, error, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        if self.calls == self.count:
            raise self.error("planted")
        return func(*args, **(kwargs or {}))


def thread_states() -> list[Any]:
    """What a call sets for its thread and has to set back."""
    return [choice._thread_state.name]


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(o), Tensor) for o in gc.get_objects())


def a_model(**options: Any) -> tuple[fastattn.FusedTransformer, Callable[[], Tensor]]:
    """And its training step, which returns the loss."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_inner": 16, "n_layers": 1, "n_head": 2, "d_k": 8, "d_v": 8, "n_position": 9}
    model = fastattn.FusedTransformer(12, 12, PAD, PAD, **sizes, **options)
    tokens = torch.tensor([[3, 4, 5, 6], [7, 8, PAD, PAD]])

    def step() -> Tensor:
        torch.manual_seed(1)
        model.zero_grad()
        loss = model.loss(tokens, tokens, tokens)
        loss.backward()
        return loss.detach()

    return model, step


def facts(model: nn.Module, step: Callable[[], Tensor]) -> list[Tensor]:
    return [step(), *(p.grad.clone() for p in model.parameters())]


MODELS = {"aten": {}, "norm first": {"norm_first": True, "pack_padding": True}}
MODELS |= {"reference": {"backend": "reference"}, "triton": {"backend": "triton"}}


@pytest.mark.parametrize(
    ("name", "stride"),
    [("aten", 29), *(pytest.param(n, 1 if n != "triton" else 5, marks=pytest.mark.full) for n in MODELS)],
)
def test_a_lack_of_memory_in_every_operator(name: str, stride: int) -> None:
    """Of the forward and the backward: the next step is right, nothing is left set, and no tensor is left."""
    model, step = a_model(**MODELS[name])
    expected, states = facts(model, step), thread_states()
    with FailAt(0) as operators:
        loss = step()
    torch.testing.assert_close(loss, expected[0])
    tensors, count = live_tensors(), operators.calls
    assert count > 100
    for failing in range(1, count + 1, stride):
        with pytest.raises(torch.OutOfMemoryError), FailAt(failing):
            step()
        assert thread_states() == states, failing
        if failing % 10 == 1:
            assert all(map(torch.equal, expected, facts(model, step))), failing
    assert all(map(torch.equal, expected, facts(model, step)))
    assert live_tensors() <= tensors


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("place", "error"), [("head", KeyError), ("module", KeyboardInterrupt), ("parameter", KeyboardInterrupt)]
)
def test_an_exception_of_a_hook(place: str, error: type[BaseException]) -> None:
    """In the forward of a module or of the head, or in the backward, of a parameter in the middle."""
    model, step = a_model()
    expected, states, tensors = facts(model, step), thread_states(), live_tensors()

    def fail(*_: Any) -> None:
        raise error("planted")

    layer = model.encoder.layer_stack[0]
    if place == "module":
        handle = layer.pos_ffn.w_2.register_forward_hook(fail)
    elif place == "parameter":
        handle = layer.pos_ffn.w_2.weight.register_hook(fail)
    else:
        handle = model.trg_word_prj.register_forward_pre_hook(fail)
    for _ in range(2):
        with pytest.raises(error, match="planted"):
            step()
    handle.remove()
    assert thread_states() == states and all(map(torch.equal, expected, facts(model, step)))
    assert live_tensors() <= tensors
