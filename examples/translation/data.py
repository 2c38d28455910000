"""Encoded sentence pairs, batches of sentences of similar length, and the loader that builds them."""

import hashlib
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from command_line import copy_to
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from translation.tokens import BOS, EOS, PAD, Rows, places

# Pairs are sorted by their longer side within pools of this many: batches have little padding, and differ every epoch.
POOL = 8192
INDEX = np.dtype([("start", "<i8"), ("source", "<i4"), ("target", "<i4")])


@dataclass(frozen=True)
class Examples:
    """N encoded pairs, in memory or in files that all processes of a machine map.

    tokens: (T,) of every pair its source and EOS, then BOS, its target and EOS, without padding.
    index: (N,) INDEX: where a pair starts in tokens, and the lengths of its two parts.
    """

    tokens: np.ndarray
    index: np.ndarray
    folder: Path | None = None

    def __len__(self) -> int:
        return len(self.index)

    @classmethod
    def map(cls, folder: Path, dtype: str) -> "Examples":
        """The files that `prepare.py` wrote."""
        parts = (("tokens", dtype), ("index", INDEX))
        return cls(*(np.memmap(folder / f"train.{name}", kind, "r") for name, kind in parts), folder)

    @classmethod
    def of(cls, source: Rows, target: Rows, dtype: str = "<i4") -> "Examples":
        """From the ids of both sides, without BOS and EOS."""
        index = np.empty(len(source.lengths), INDEX)
        index["source"], index["target"] = source.lengths + 1, target.lengths + 2
        sizes = source.lengths + target.lengths + 3
        index["start"] = starts = sizes.cumsum() - sizes
        tokens = np.empty(sizes.sum(), dtype)
        tokens[places(starts, source.lengths)] = source.values
        middle = starts + source.lengths
        tokens[middle], tokens[middle + 1], tokens[starts + sizes - 1] = EOS, BOS, EOS
        tokens[places(middle + 2, target.lengths)] = target.values
        return cls(tokens, index)

    def __reduce__(self) -> tuple[object, ...]:
        """A worker that does not share the memory of its parent maps the files itself."""
        if self.folder:
            return Examples.map, (self.folder, self.tokens.dtype.str)
        return Examples, (self.tokens, self.index)

    def fingerprint(self) -> str:
        """Equal for equal pairs in memory."""
        return hashlib.sha256(self.index.tobytes() + self.tokens.tobytes()).hexdigest()


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

    def pin_memory(self) -> "Batch":
        return self._each(lambda t: t.pin_memory())

    def to(self, device: torch.device) -> "Batch":
        """On a GPU: from pinned memory, so nothing waits."""
        return self._each(lambda t: copy_to(device, t))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        tensors = {name: change(getattr(self, name)) for name in ("source", "target_in", "target_out")}
        return replace(self, **tensors)


@dataclass(frozen=True)
class Share:
    """One process's share of a batch, in parts whose gradients are added up; tokens and target_tokens are all of it."""

    parts: list[Batch]
    tokens: int
    target_tokens: int

    def pin_memory(self) -> "Share":
        return replace(self, parts=[part.pin_memory() for part in self.parts])

    def to(self, device: torch.device) -> "Share":
        return replace(self, parts=[part.to(device) for part in self.parts])


class Plan(Sequence[np.ndarray]):
    """Batches, each the numbers of its pairs: some 10 bytes a pair, however many there are."""

    def __init__(self, order: np.ndarray, bounds: np.ndarray) -> None:
        """order: the pairs. bounds: (batches, 2), each batch's first place in order, and the first after it."""
        self.order, self.bounds = order, bounds

    def __len__(self) -> int:
        return len(self.bounds)

    def __getitem__(self, number: int) -> np.ndarray:
        first, end = self.bounds[number]
        return self.order[first:end]


def plan_batches(
    examples: Examples, batch_tokens: int, rng: np.random.Generator | None = None, length_step: int = 1
) -> Plan:
    """Groups pairs with similar longer sides into batches of at most `batch_tokens` padded source, or target, tokens.

    Lengths are padded to multiples of `length_step`. With `rng` the order of pairs and batches is random and depends on
    the generator alone, so an interrupted epoch can be resumed. A single pair longer than `batch_tokens` is a batch.
    """
    order = np.arange(len(examples), dtype=np.int32 if len(examples) < 1 << 31 else np.int64)
    if rng:
        rng.shuffle(order)
    bounds = []
    for start in range(0, len(order), POOL):
        index = examples.index[order[start : start + POOL]]
        longest = -(-np.maximum(index["source"], index["target"]) // length_step) * length_step
        by_length = np.lexsort((index["source"], index["target"], longest))
        order[start : start + POOL] = order[start : start + POOL][by_length]
        longest = longest[by_length]
        first = 0
        while first < len(longest):
            candidates = longest[first : first + max(1, batch_tokens // longest[first])]
            padded = candidates * np.arange(1, len(candidates) + 1)
            end = first + max(1, int(padded.searchsorted(batch_tokens, "right")))
            bounds.append((start + first, start + end))
            first = end
    plan = np.array(bounds, np.int64).reshape(-1, 2)
    return Plan(order, rng.permutation(plan) if rng else plan)


def pad(sequences: Sequence[np.ndarray]) -> Tensor:
    """(B, longest) int64, PAD on the right."""
    lengths = np.array([len(sequence) for sequence in sequences])
    return _padded(np.concatenate(sequences), lengths.cumsum() - lengths, lengths)


def _padded(tokens: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> Tensor:
    """(n, longest) int64: row i has lengths[i] tokens from starts[i] on, then PAD."""
    columns = np.arange(lengths.max())
    inside = columns < lengths[:, None]
    places = np.where(inside, starts[:, None] + columns, 0)
    return torch.from_numpy(np.where(inside, tokens[places], PAD).astype(np.int64))


def collate(examples: Examples, rows: np.ndarray) -> Batch:
    """Pads the pairs of these numbers into one batch."""
    index = examples.index[rows]
    source = _padded(examples.tokens, index["start"], index["source"])
    target = _padded(examples.tokens, index["start"] + index["source"], index["target"])
    target_tokens = int(index["target"].sum()) - len(rows)
    return Batch(source, target[:, :-1], target[:, 1:], int(index["source"].sum()) + target_tokens, target_tokens)


def share_of(examples: Examples, rows: np.ndarray, rank: int, size: int, accumulate: int) -> Batch | Share:
    """The share of process `rank` of `size` in a batch, in `accumulate` parts of nearly as many tokens.

    All parts of all processes together are the batch. Where there are fewer sentences than parts, a part has one
    sentence of which no token counts, for the processes must compute equally many.
    """
    if size * accumulate == 1:
        return collate(examples, rows)
    index = examples.index[rows]
    by_length = rows[np.lexsort((index["source"], index["target"]))]
    parts = []
    for number in range(rank * accumulate, (rank + 1) * accumulate):
        dealt = by_length[number :: size * accumulate]
        batch = collate(examples, dealt if len(dealt) else by_length[:1])
        parts.append(batch if len(dealt) else replace(batch, target_out=torch.full_like(batch.target_out, PAD)))
    target_tokens = int(index["target"].sum()) - len(rows)
    return Share(parts, int(index["source"].sum()) + target_tokens, target_tokens)


@dataclass(frozen=True)
class Batches(Dataset[Batch | Share]):
    """The planned batches by their numbers, or the shares of a process in them."""

    examples: Examples
    plan: Sequence[np.ndarray]
    rank: int = 0
    size: int = 1
    accumulate: int = 1

    def __getitem__(self, number: int) -> Batch | Share:
        return share_of(self.examples, self.plan[number], self.rank, self.size, self.accumulate)

    def load(self, device: torch.device, skip: int = 0, workers: int = 0) -> Iterator[Batch | Share]:
        """All from number `skip` on, in order, on the device. They are the same for any number of workers, processes
        that build batches ahead."""
        loader = DataLoader(
            self,
            batch_size=None,  # an item is a batch already
            sampler=range(skip, len(self.plan)),
            num_workers=workers,
            worker_init_fn=ignore_signals,
            prefetch_factor=8 if workers else None,
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),  # it draws a number, which dropout's generator must not notice
        )
        for batch in loader:
            yield batch.to(device)


def ignore_signals(worker: int) -> None:
    """A signal to all processes of a group stops the training, which then ends its workers."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
