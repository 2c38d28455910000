"""What is left after a failure in the middle: of a checkpoint after a full disk or a kill, of a model after a lack of
memory at every allocation."""

from __future__ import annotations

import gc
import os
import resource
import signal
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


def write(path: Path, value: int) -> None:
    checkpoint.save_atomically({"value": torch.full((999,), value)}, path)


@pytest.mark.parametrize("kills", [False, True], ids=["full disk", "killed"])
def test_a_checkpoint_that_is_written_in_part(kills: bool, tmp_path: Path) -> None:
    """The old file stays whole, and the next write ends well. On a full disk there is one clear error and no other
    file. Of a process whose files may have `limit` bytes a write beyond fails, or the signal SIGXFSZ kills it."""
    path = tmp_path / "last.pt"
    write(path, 1)
    for limit in (0, 1, path.stat().st_size // 2, path.stat().st_size - 1):
        if (child := os.fork()) == 0:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL if kills else signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            try:
                write(path, 2)
            except CommandError as error:
                os._exit(3 if str(error) == f"{path}: cannot be written: File too large" else 4)
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (-signal.SIGXFSZ if kills else 3)
        assert checkpoint.read_file(path)["value"].eq(1).all()
        assert kills or [*tmp_path.iterdir()] == [path]
    write(path, 2)
    assert checkpoint.read_file(path)["value"].eq(2).all() and [*tmp_path.iterdir()] == [path]


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


@pytest.mark.parametrize(
    ("options", "stride"),
    [
        ({}, 61),
        pytest.param({"norm_first": True, "pack_padding": True}, 1, marks=pytest.mark.full),
        pytest.param({"backend": "triton"}, 5, marks=pytest.mark.full),
    ],
)
def test_a_lack_of_memory_in_every_operator(options: dict[str, Any], stride: int) -> None:
    """Of the forward and the backward: the next step is right, nothing is left set, and no tensor is left."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_inner": 16, "n_layers": 1, "n_head": 2, "d_k": 8, "d_v": 8, "n_position": 9}
    model = fastattn.FusedTransformer(12, 12, 0, 0, **sizes, **options)
    tokens = torch.tensor([[3, 4, 5, 6], [7, 8, 0, 0]])

    def step() -> list[Tensor]:
        """The loss and the gradients."""
        torch.manual_seed(1)
        model.zero_grad()
        loss = model.loss(tokens, tokens, tokens)
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

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
