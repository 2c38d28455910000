"""Reading line-aligned text, and batches of sentences of similar length."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from command_line import DataError, copy_to, read_lines
from torch import Tensor

from translation.tokens import BOS, EOS, PAD, Tokenizer

Pair = tuple[str, str]

# Sentences are sorted by length within pools of this many: batches have little padding, and differ every epoch.
POOL = 8192


@dataclass(frozen=True)
class Corpus:
    """Sentence pairs (source, target). `tests` maps the name of a test set, such as "test_2016", to its pairs."""

    train: list[Pair]
    val: list[Pair]
    tests: dict[str, list[Pair]]


@dataclass(frozen=True)
class Example:
    """One encoded pair: source = tokens EOS, target = BOS tokens EOS, both 1-D int32."""

    source: np.ndarray
    target: np.ndarray

    @property
    def length(self) -> int:
        return max(len(self.source), len(self.target))


@dataclass(frozen=True)
class Batch:
    """Padded int64 token ids. The decoder reads `target_in` (BOS first); `target_out` (EOS last) is its target."""

    source: Tensor  # (B, Ls)
    target_in: Tensor  # (B, Lt)
    target_out: Tensor  # (B, Lt)
    tokens: int  # source and target tokens, padding not counted
    target_tokens: int  # tokens the loss is averaged over

    @property
    def parts(self) -> "list[Batch]":
        return [self]


@dataclass(frozen=True)
class Share:
    """One process's share of a batch, in parts whose gradients are added up; tokens and target_tokens are all of it."""

    parts: list[Batch]
    tokens: int
    target_tokens: int


def read_corpus(folder: str | Path, source: str, target: str, lowercase: bool = False) -> Corpus:
    """Reads train, val and every test* file of two languages: `train.de`, `train.en.gz`, ...; `lowercase` lowers all.

    Raises DataError where a file is missing, empty, not UTF-8, or does not pair line by line with its partner.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    if source == target:
        raise DataError(f"{folder}: source and target are both {source!r}; name two languages")
    names = sorted(
        {path.name.removesuffix(".gz").removesuffix(f".{source}") for path in _files(folder, "test*", source)}
    )

    def pairs(name: str) -> list[Pair]:
        found = read_pairs(folder, name, source, target)
        return [(s.lower(), t.lower()) for s, t in found] if lowercase else found

    return Corpus(pairs("train"), pairs("val"), {name: pairs(name) for name in names})


def read_pairs(folder: Path, name: str, source: str, target: str) -> list[Pair]:
    """The line-aligned pairs of `folder/name.source[.gz]` and `folder/name.target[.gz]`."""
    source_path, target_path = _find(folder, name, source), _find(folder, name, target)
    source_lines, target_lines = read_lines(source_path), read_lines(target_path)
    for path, lines in ((source_path, source_lines), (target_path, target_lines)):
        if not any(lines):
            raise DataError(f"{path}, line 1: the file is empty")
    if len(source_lines) != len(target_lines):
        (short, fewer), (long, more) = sorted(
            [(source_path, len(source_lines)), (target_path, len(target_lines))], key=lambda item: item[1]
        )
        raise DataError(
            f"{long}, line {fewer + 1}: has no partner; this file has {more} lines and {short} has {fewer}. "
            "Line N of one must translate line N of the other."
        )
    return list(zip(source_lines, target_lines, strict=True))


def _files(folder: Path, pattern: str, language: str) -> list[Path]:
    return [*folder.glob(f"{pattern}.{language}"), *folder.glob(f"{pattern}.{language}.gz")]


def _find(folder: Path, name: str, language: str) -> Path:
    found = _files(folder, name, language)
    if not found:
        raise DataError(f"{folder / name}.{language}: no such file, nor {name}.{language}.gz")
    return found[0]


def encode(pairs: Sequence[Pair], tokenizer: Tokenizer, max_length: int) -> tuple[list[Example], int]:
    """Encoded pairs, and how many were left out because a side was blank or longer than `max_length` tokens."""
    sources = tokenizer.encode([source for source, _ in pairs])
    targets = tokenizer.encode([target for _, target in pairs])
    examples = [
        Example(np.array([*source, EOS], dtype=np.int32), np.array([BOS, *target, EOS], dtype=np.int32))
        for source, target in zip(sources, targets, strict=True)
        if source and target
    ]
    examples = [example for example in examples if example.length <= max_length]
    return examples, len(pairs) - len(examples)


def plan_batches(
    examples: Sequence[Example], batch_tokens: int, rng: random.Random | None = None, length_step: int = 1
) -> list[list[int]]:
    """Groups examples of similar length into batches of at most `batch_tokens` padded source, or target, tokens.

    Lengths are padded to multiples of `length_step`. Returns indices. With `rng` the order of examples and batches is
    random and depends on the generator alone, so an interrupted epoch can be resumed. A single example longer than
    `batch_tokens` is a batch of its own.
    """
    order = list(range(len(examples)))
    if rng:
        rng.shuffle(order)
    batches: list[list[int]] = []
    for start in range(0, len(order), POOL):
        pool = sorted(order[start : start + POOL], key=lambda i: (len(examples[i].target), len(examples[i].source)))
        batch: list[int] = []
        longest = 0
        for i in pool:
            length = -(-examples[i].length // length_step) * length_step
            longest = max(longest, length)
            if batch and longest * (len(batch) + 1) > batch_tokens:
                batches.append(batch)
                batch, longest = [], length
            batch.append(i)
        batches.append(batch)
    if rng:
        rng.shuffle(batches)
    return batches


def pad(sequences: Sequence[np.ndarray]) -> Tensor:
    """(B, longest) int64, PAD on the right."""
    padded = np.full((len(sequences), max(map(len, sequences))), PAD, dtype=np.int64)
    for row, sequence in zip(padded, sequences, strict=True):
        row[: len(sequence)] = sequence
    return torch.from_numpy(padded)


def collate(examples: Sequence[Example], device: torch.device) -> Batch:
    """Pads examples into one batch on `device`, by one copy to it."""
    source = pad([example.source for example in examples])
    target = pad([example.target for example in examples])
    target_tokens = sum(len(example.target) - 1 for example in examples)
    parts = (source, target[:, :-1], target[:, 1:])
    copied = copy_to(device, torch.cat([part.flatten() for part in parts])).split([part.numel() for part in parts])
    source, target_in, target_out = (t.view(part.shape) for t, part in zip(copied, parts, strict=True))
    return Batch(
        source=source,
        target_in=target_in,
        target_out=target_out,
        tokens=sum(len(example.source) for example in examples) + target_tokens,
        target_tokens=target_tokens,
    )


def share_of(examples: Sequence[Example], device: torch.device, rank: int, size: int, accumulate: int) -> Batch | Share:
    """The share of process `rank` of `size` in a batch, in `accumulate` parts of nearly as many tokens.

    All parts of all processes together are the batch. Where there are fewer sentences than parts, a part has one
    sentence of which no token counts, for the processes must compute equally many.
    """
    if size * accumulate == 1:
        return collate(examples, device)
    by_length = sorted(examples, key=lambda example: (len(example.target), len(example.source)))
    parts = []
    for number in range(rank * accumulate, (rank + 1) * accumulate):
        dealt = by_length[number :: size * accumulate]
        batch = collate(dealt or by_length[:1], device)
        parts.append(batch if dealt else replace(batch, target_out=torch.full_like(batch.target_out, PAD)))
    target_tokens = sum(len(example.target) - 1 for example in examples)
    return Share(parts, sum(len(example.source) for example in examples) + target_tokens, target_tokens)


def batches_of(
    examples: Sequence[Example],
    plan: Sequence[Sequence[int]],
    device: torch.device,
    skip: int = 0,
    *,
    rank: int = 0,
    size: int = 1,
    accumulate: int = 1,
) -> Iterator[Batch | Share]:
    """The planned batches from number `skip` on, or the shares of a process in them."""
    for indices in plan[skip:]:
        yield share_of([examples[i] for i in indices], device, rank, size, accumulate)
