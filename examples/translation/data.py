"""Encoded sentence pairs, batches of sentences of similar length, and the loader that builds them."""

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from command_line import copy_to
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from translation.tokens import BOS, EOS, PAD

# Pairs are sorted by their longer side within pools of this many: batches have little padding, and differ every epoch.
POOL = 8192
INDEX = np.dtype([("start", "<i8"), ("source", "<i4"), ("target", "<i4")])


class MappedFile(np.memmap):
    """A worker that does not share the memory of its parent maps the file itself."""

    def __reduce__(self) -> tuple[object, ...]:
        return MappedFile, (self.filename, self.dtype, "r")


@dataclass(frozen=True)
class Examples:
    """N encoded pairs, in memory or in files that all processes of a machine map.

    tokens: (T,) of every pair its source and EOS, then BOS, its target and EOS, without padding.
    index: (N,) INDEX: where a pair starts in tokens, and the lengths of its two parts.
    """

    tokens: np.ndarray
    index: np.ndarray

    def __len__(self) -> int:
        return len(self.index)

    @classmethod
    def of(cls, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], dtype: str = "<i4") -> "Examples":
        """From the ids of source and target of each pair, without BOS and EOS."""
        index = np.zeros(len(pairs), INDEX)
        index["source"] = [len(source) + 1 for source, _ in pairs]
        index["target"] = [len(target) + 2 for _, target in pairs]
        ends = (index["source"] + index["target"]).cumsum(dtype=np.int64)
        index["start"][1:] = ends[:-1]
        parts = chain.from_iterable((source, (EOS, BOS), target, (EOS,)) for source, target in pairs)
        return cls(np.fromiter(chain.from_iterable(parts), dtype), index)


class Batch(NamedTuple):
    """Padded int64 token ids. The decoder reads `target_in` (BOS first); `target_out` (EOS last) is its target."""

    source: Tensor  # (B, Ls)
    target_in: Tensor  # (B, Lt)
    target_out: Tensor  # (B, Lt)


class Step(NamedTuple):
    """What one process computes of a step's batch, in parts whose gradients are added up."""

    parts: list[Batch]
    tokens: int  # source and target tokens of the whole batch, padding not counted
    target_tokens: int  # tokens the loss is averaged over, of the whole batch

    def to(self, device: torch.device) -> "Step":
        """On a GPU: from pinned memory, so nothing waits."""
        return self._replace(parts=[Batch(*(copy_to(device, t) for t in part)) for part in self.parts])


def plan_batches(
    examples: Examples, batch_tokens: int, rng: np.random.Generator | None = None, length_step: int = 1
) -> list[np.ndarray]:
    """The numbers of the pairs in each batch: pairs with similar longer sides, and at most `batch_tokens` padded tokens
    of either side.

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
    plan = [order[first:end] for first, end in bounds]  # views: some 10 bytes a pair
    return [plan[i] for i in rng.permutation(len(plan))] if rng else plan


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
    return Batch(source, target[:, :-1], target[:, 1:])


@dataclass(frozen=True)
class Batches(Dataset[Step]):
    """The planned batches by their numbers: the share of process `rank` of `size` in each, in `accumulate` parts."""

    examples: Examples
    plan: Sequence[np.ndarray]
    rank: int = 0
    size: int = 1
    accumulate: int = 1

    def __getitem__(self, number: int) -> Step:
        """All parts of all processes together are the batch; they have nearly as many tokens as each other.

        Where there are fewer sentences than parts, a part has one sentence of which no token counts, for the processes
        must compute equally many.
        """
        rows = self.plan[number]
        index = self.examples.index[rows]
        by_length = rows[np.lexsort((index["source"], index["target"]))]
        parts = []
        for first in range(self.rank * self.accumulate, (self.rank + 1) * self.accumulate):
            dealt = by_length[first :: self.size * self.accumulate]
            part = collate(self.examples, dealt if len(dealt) else by_length[:1])
            parts.append(part if len(dealt) else part._replace(target_out=torch.full_like(part.target_out, PAD)))
        target_tokens = int(index["target"].sum()) - len(rows)
        return Step(parts, int(index["source"].sum()) + target_tokens, target_tokens)

    def load(self, device: torch.device, skip: int = 0, workers: int = 0) -> Iterator[Step]:
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
        for step in loader:
            yield step.to(device)


def ignore_signals(worker: int) -> None:
    """A signal to all processes of a group stops the training, which then ends its workers."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
