"""Of the translation example: the smallest model and short runs, as options of its command; what a run has saved."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from translation.data import Examples

WORDS = "zero one two three four five six seven eight nine".split()
TINY = ["--layers", "1", "--d-model", "16", "--d-inner", "32", "--heads", "2", "--device", "cpu"]
DATES = [*TINY, "--dates", "40", "--held-out", "2", "--batch-tokens", "256", "--warmup", "10", "--max-length", "48"]


def in_words(number: str) -> str:
    return " ".join(WORDS[int(digit)] for digit in number)


def on_text(folder: Path, out: Path) -> list[str]:
    options = ["--data", folder, "--source", "digits", "--target", "words", "--out", out]
    options += ["--vocabulary", 300, "--batch-tokens", 100, "--warmup", 100, "--max-length", 32, "--dropout", 0.1]
    return [*TINY, *map(str, options)]


def random_examples(count: int, shortest: int = 0, longest: int = 19) -> Examples:
    rng = np.random.default_rng(3)
    sides = ([rng.integers(4, 9, n) for n in rng.integers(shortest, longest, count)] for _ in range(2))
    return Examples.of(list(zip(*sides, strict=True)))


def state_of(out: Path) -> dict[str, Any]:
    return torch.load(out / "last.pt", weights_only=True)


def weights_in(path: Path) -> dict[str, Tensor]:
    content = torch.load(path, weights_only=True)
    return content.get("model", content)


@contextmanager
def signal_when_there(path: Path, number: signal.Signals) -> Iterator[None]:
    """Sends this process a signal as soon as `path` exists. The context must take longer than that."""

    def watch() -> None:
        while not path.exists():
            time.sleep(0.001)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield
    thread.join(60)
