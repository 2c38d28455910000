"""What is left after a failure in the middle: of a checkpoint after SIGKILL or a full disk at every write, of a model
after a lack of memory at every allocation or an exception of the user's code."""

from __future__ import annotations

import builtins
import errno
import gc
import io
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import CommandError
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from translation import checkpoint

import fastattn
from fastattn.backends import requested

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


def write(folder: Path, value: int) -> None:
    checkpoint.save_atomically({"value": torch.full((999,), value)}, folder / "last.pt")


def read(folder: Path) -> int:
    """The value that was written, whole."""
    (value,) = {*checkpoint.read_file(folder / "last.pt")["value"].tolist()}
    return value


def test_killed_at_every_write(tmp_path: Path) -> None:
    """What is there is the old or the new file, whole; and the next write ends well."""
    found = []
    for count in range(1, 200):
        write(tmp_path, 1)
        if (child := os.fork()) == 0:
            ticks = iter([*[False] * (count - 1), True])
            try:
                with each_write(lambda _, ticks=ticks: next(ticks, False) and os.kill(os.getpid(), signal.SIGKILL)):
                    write(tmp_path, 2)
            finally:
                os._exit(0)
        was_killed = os.waitpid(child, 0)[1] == signal.SIGKILL
        found.append(read(tmp_path))
        if not was_killed:
            break
    assert found[0] == 1 and found[-1] == 2 and len(found) > 3 and found == sorted(found)


def test_a_full_disk_at_every_write(tmp_path: Path) -> None:
    """One clear error, the old file whole, and no temporary file. Files can still be removed."""
    write(tmp_path, 1)
    before = {*tmp_path.iterdir()}
    for count in range(1, 200):
        ticks, failed = iter(range(1, count)), []

        def tick(name: str, ticks: Iterator[int] = ticks, failed: list[bool] = failed) -> None:
            if name not in ("unlink", "rmdir") and not failed and next(ticks, None) is None:
                failed.append(True)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        try:
            with each_write(tick):
                write(tmp_path, 2)
        except CommandError as error:
            assert "No space left on device" in str(error) and "\n" not in str(error)
            assert {*tmp_path.iterdir()} == before and read(tmp_path) == 1
        else:
            assert not failed, "an error was swallowed"
            break
    assert count > 3 and read(tmp_path) == 2


# --- a training step --------------------------------------------------------------------------------------------------


class FailAt(TorchDispatchMode):
    """The count-th operator raises, as an allocation does: each one may allocate. calls: how many there were."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.calls = count, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        if self.calls == self.count:
            raise torch.OutOfMemoryError("planted")
        return func(*args, **(kwargs or {}))


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(o), Tensor) for o in gc.get_objects())


def a_model(**options: Any) -> tuple[fastattn.FusedTransformer, Callable[[], list[Tensor]]]:
    """And its training step, which returns the loss and the gradients."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_inner": 16, "n_layers": 1, "n_head": 2, "d_k": 8, "d_v": 8, "n_position": 9}
    model = fastattn.FusedTransformer(12, 12, 0, 0, **sizes, **options)
    tokens = torch.tensor([[3, 4, 5, 6], [7, 8, 0, 0]])

    def step() -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        loss = model.loss(tokens, tokens, tokens)
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    return model, step


MODELS = {"aten": {}, "norm first": {"norm_first": True, "pack_padding": True}}
MODELS |= {"reference": {"backend": "reference"}, "triton": {"backend": "triton"}}


@pytest.mark.parametrize(
    ("name", "stride"),
    [("aten", 61), *(pytest.param(n, 1 if n != "triton" else 5, marks=pytest.mark.full) for n in MODELS)],
)
def test_a_lack_of_memory_in_every_operator(name: str, stride: int) -> None:
    """Of the forward and the backward: the next step is right, nothing is left set, and no tensor is left."""
    _, step = a_model(**MODELS[name])
    expected = step()
    with FailAt(0) as operators:
        step()
    tensors, count = live_tensors(), operators.calls
    assert count > 100
    for failing in range(1, count + 1, stride):
        with pytest.raises(torch.OutOfMemoryError), FailAt(failing):
            step()
        assert requested(None)[0] is None, failing
        if failing % 10 == 1:
            assert all(map(torch.equal, expected, step())), failing
    assert all(map(torch.equal, expected, step()))
    assert live_tensors() <= tensors


@pytest.mark.parametrize("place", ["head", pytest.param("module", marks=pytest.mark.full), "parameter"])
def test_an_exception_of_a_hook(place: str) -> None:
    """In the forward of a module or of the head, or in the backward, of a parameter in the middle."""
    model, step = a_model()
    expected, tensors = step(), live_tensors()

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt("planted")

    w_2 = model.encoder.layer_stack[0].pos_ffn.w_2
    register = {
        "head": model.trg_word_prj.register_forward_pre_hook,
        "module": w_2.register_forward_hook,
        "parameter": w_2.weight.register_hook,
    }[place]
    handle = register(fail)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt, match="planted"):
            step()
    handle.remove()
    assert requested(None)[0] is None and all(map(torch.equal, expected, step()))
    assert live_tensors() <= tensors
