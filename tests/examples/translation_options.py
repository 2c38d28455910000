"""Of the translation example: the smallest model and short runs, as options of its command; random pairs."""

from pathlib import Path

import numpy as np
from translation.data import Examples
from translation.tokens import Rows

TINY = ["--layers", "1", "--d-model", "16", "--d-inner", "32", "--heads", "2", "--device", "cpu"]
DATES = [*TINY, "--dates", "40", "--held-out", "5", "--batch-tokens", "256", "--warmup", "10", "--max-length", "48"]


def random_examples(count: int, shortest: int = 0, longest: int = 19) -> Examples:
    rng = np.random.default_rng(3)
    sides = ([rng.integers(4, 9, n) for n in rng.integers(shortest, longest, count)] for _ in range(2))
    return Examples.of(*map(Rows.of, sides))


def on_text(folder: Path, out: Path) -> list[str]:
    options = ["--data", folder, "--source", "digits", "--target", "words", "--out", out]
    options += ["--vocabulary", 300, "--batch-tokens", 100, "--warmup", 100, "--max-length", 32, "--dropout", 0.1]
    return [*TINY, *map(str, options)]
