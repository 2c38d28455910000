"""Counts what one training step asks of the device: `python tests/models/launches.py [backend ...]` prints the table.

A launch is an operator that writes memory, as PyTorch dispatches it below autograd, or a Triton kernel; views,
allocations and reads of a number by the host are none. Counts depend on layers and options, not on widths or lengths,
so the base model of "Attention Is All You Need" (6 + 6 layers) is counted with narrow ones. (But one head, or one
sentence, would make copies of some transposes needless.)
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from plain_transformer import PlainTransformer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fastattn import FusedTransformer, use_backend

ROOT = Path(__file__).resolve().parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAD, VOCAB = 0, 40
NARROW = dict(d_word_vec=16, d_model=16, d_inner=32, n_head=2, d_k=8, d_v=8, n_position=16)
# Operators that start no kernel, beyond views: memory without a value, and numbers read by the host. aminmax is a look
# at tokens that a CPU's public ops take, and a GPU's do not.
SILENT = {"_unsafe_view", "aminmax", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class Launches(TorchDispatchMode):
    """Within its context, `by_op` counts launches and `by_place` tells where in the package each came from."""

    def __init__(self) -> None:
        super().__init__()
        self.by_op: Counter[str] = Counter()
        self.by_place: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not _is_view(func) and name not in SILENT and _has_tensor(out):
            self.count(name)
        return out

    def count(self, name: str) -> None:
        self.by_op[name] += 1
        self.by_place[name, _place()] += 1

    @property
    def total(self) -> int:
        return self.by_op.total()


def _is_view(func: Any) -> bool:
    """Whether every output is an argument's memory seen otherwise."""
    returns = func._schema.returns
    return func.is_view or (
        bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    )


def _has_tensor(out: Any) -> bool:
    return any(isinstance(t, Tensor) for t in (out if isinstance(out, (tuple, list)) else (out,)))


def _place() -> str:
    """The innermost line of the package on the stack; the backward of PyTorch's own operators has none."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ("fastattn", "kernels"):
            return f"{path.relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "autograd, or the loss of a plain model"


@contextmanager
def counted() -> Iterator[Launches]:
    """Counts PyTorch's operators and Triton's kernels, be they compiled or interpreted."""
    mode = Launches()
    with _triton_counted(mode), mode:
        yield mode


@contextmanager
def _triton_counted(mode: Launches) -> Iterator[None]:
    try:
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield
        return

    def counting(kind: type) -> Any:
        run = kind.run

        def launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            mode.count(f"triton {kernel.__name__}")
            with _disable_current_modes():  # the interpreter moves tensors about by operators of its own
                return run(kernel, *args, **kwargs)

        return patch.object(kind, "run", launch)

    with counting(InterpretedFunction), counting(JITFunction):
        yield


def base_model(kind: type[nn.Module] = FusedTransformer, **changes: Any) -> nn.Module:
    """The base model's structure, narrow, in training."""
    torch.manual_seed(1)
    return kind(VOCAB, VOCAB, PAD, PAD, **NARROW | dict(n_layers=6) | changes).to(DEVICE).train()


def small_batch() -> tuple[Tensor, Tensor, Tensor]:
    """src_seq (2, 8), trg_seq and gold (2, 7), with padding at the end of one sentence each. Lengths differ, as they
    do in a corpus: the attention to the source then has a mask of its own to prepare."""
    tokens = torch.randint(3, VOCAB, (2, 16), generator=torch.Generator().manual_seed(2))
    src_seq, trg_seq, gold = tokens[:, :8].clone(), tokens[:, 8:15].clone(), tokens[:, 9:].clone()
    src_seq[1, 6:], trg_seq[0, 5:], gold[0, 5:] = PAD, PAD, PAD
    return src_seq.to(DEVICE), trg_seq.to(DEVICE), gold.to(DEVICE)


def step_launches(model: nn.Module, backend: str | None = None, label_smoothing: float = 0.1) -> Launches:
    """Of one forward, loss and backward from gradients that are None, as after zero_grad()."""
    src_seq, trg_seq, gold = small_batch()
    model.zero_grad(set_to_none=True)
    with use_backend(backend), counted() as launches:
        if isinstance(model, PlainTransformer):
            logits = model(src_seq, trg_seq)
            loss = F.cross_entropy(logits, gold.flatten(), ignore_index=PAD, label_smoothing=label_smoothing)
        else:
            loss = model.loss(src_seq, trg_seq, gold, label_smoothing)
        loss.backward()
    return launches


def main(backends: list[str]) -> None:
    """Prints the launches of a step by each backend, with and without dropout, and where most come from."""
    print(f"{'launches a step, 6 + 6 layers':34s}{'dropout 0.1':>12s}{'dropout 0':>12s}")
    for name in backends:
        kind = PlainTransformer if name == "plain" else FusedTransformer
        with_dropout, without = (
            step_launches(base_model(kind, dropout=p, attn_dropout=p), None if name == "plain" else name)
            for p in (0.1, 0.0)
        )
        print(f"{name:34s}{with_dropout.total:12d}{without.total:12d}")
        if name not in ("plain", "reference"):
            for (op, place), count in with_dropout.by_place.most_common(25):
                print(f"    {count:5d}  {op:34s} {place}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["plain", "reference", "aten", "triton"])
