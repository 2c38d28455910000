"""Keys and values that incremental decoding keeps, and attention to them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn.masks._checks import check_sizes
from fastattn.nn.linear import Products

AttendInSteps = Callable[..., Tensor]  # (query, key, value, lengths, ancestors), as decode_attention


class Memory(NamedTuple):
    """What every step reads and none changes: keys and values of an encoder's output, for each layer.

    projected: (B, Hk, Ls, Dk) and (B, Hk, Ls, Dv) of each layer, contiguous: all beams of a sequence read them.
    lengths: (B,) int32; keys after them are padding.
    """

    projected: dict[nn.Module, tuple[Tensor, Tensor]]
    lengths: Tensor


def check_source(real: Tensor) -> None:
    """ValueError where a sentence has no token. real: bool (B, Ls). On a GPU it waits, as every generation does."""
    if not real.any(1).all():
        raise ValueError("src_seq has a sentence without tokens")


def move_padding_to_end(x: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """x (B, L, d) with its real vectors before the padding, both in order, and how many are real, (B,) int32.

    real: bool (B, L). Padding may be anywhere. The order of keys changes nothing in attention, which then needs only
    lengths.
    """
    order = real.int().argsort(dim=1, descending=True, stable=True)
    return x.gather(1, order[..., None].expand_as(x)), real.sum(1, dtype=torch.int32)


class DecoderCache:
    """Keys and values of the tokens decoded so far, of B sequences with W beams each; W = 1 without beam search.

    A step writes beam w at the step's position and index w. After a step that chooses new beams, `reorder` records for
    each beam the index of its history at each position (`ancestors`). No key is copied.

    batch, rows, capacity: B, W, and how many tokens of a beam the cache can hold.
    memories: what the layers attend to next to their own past.
    linear: a step's linear maps are called through it.
    Memory: 2 * B * capacity * W * Hk * D numbers a layer, allocated by the first step in the dtype of its keys.

    On a GPU nothing depends on numbers of the host, so that a CUDA graph can repeat a step: the position is a tensor,
    the kernels read all positions, and `lengths` is how many count. On a CPU slices of the cache are faster.
    """

    def __init__(
        self, batch: int, rows: int, capacity: int, device: torch.device | str | int, memories: tuple[Memory, ...] = ()
    ) -> None:
        check_sizes(rows=rows, capacity=capacity)
        check_sizes(least=0, batch=batch)
        self.batch, self.rows, self.capacity, self.memories = batch, rows, capacity, memories
        self.on_device = torch.device(device).type == "cuda"
        self.length = 0  # tokens decoded so far, of every beam
        self.position = torch.zeros(1, dtype=torch.int64, device=device)  # the same as a tensor
        # Keys that count at this step, its own included.
        self.lengths = torch.ones(batch, dtype=torch.int32, device=device)
        self.ancestors: Tensor | None = None  # (B, W, capacity) int32
        self.sentences = torch.arange(batch, device=device)  # each sequence's index in the first batch
        # (1 or attentions, H, 2 * capacity - 1), of a model with a bias by distance: entry n - m + capacity - 1 is
        # added to the score of key n at step m.
        self.relative_bias: Tensor | None = None
        self.linear = Products()  # for the maps of every step
        self.steps: Any = None  # the DecoderSteps that were made for this cache: decoding.py
        self.depth = 0  # what a step computes, for a stack that holds one module twice
        # (B, Hk, capacity, W, D) of each depth and attention: keys and values, in one tensor or in two
        self.past: dict[tuple[int, nn.Module], tuple[Tensor, ...]] = {}

    def attend(
        self,
        layer: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention: AttendInSteps,
        write_and_attend: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        """Add a step's k (B, W, Hk, Dk), v (B, W, Hk, Dv); attention of q (B, W, H, Dk) to its beam's whole past.

        write_and_attend: what does both on a GPU, see ops/decode_attention.py.
        Returns (B, W, H, Dv).
        """
        place = self.depth, layer
        if place not in self.past:
            past = [t.new_empty(self.batch, t.shape[2], self.capacity, self.rows, t.shape[3]) for t in (k, v)]
            self.past[place] = tuple(past)
        keys, values = (t.permute(0, 2, 3, 1, 4) for t in self.past[place])  # (B, capacity, W, Hk, D)
        ancestors = self.ancestors
        if self.on_device and write_and_attend is not None:
            return write_and_attend(q, keys, values, k, v, self.position, self.lengths, ancestors)
        self.write(keys, k)
        self.write(values, v)
        if self.on_device:
            return attention(q, keys, values, self.lengths, ancestors)
        keys, values = keys[:, : self.length + 1], values[:, : self.length + 1]
        ancestors = None if ancestors is None else ancestors[:, :, : self.length + 1]
        return attention(q, keys, values, None, ancestors)

    def step_bias(self) -> Tensor | None:
        """What of relative_bias this step adds, (1 or attentions, H, keys), for the keys that `attend` reads."""
        if self.relative_bias is None:
            return None
        last = self.capacity - 1
        if self.on_device:
            distances = torch.arange(last, last + self.capacity, device=self.position.device) - self.position
            return self.relative_bias.index_select(2, distances)
        return self.relative_bias[:, :, last - self.length : last + 1]

    def attend_memory(self, layer: nn.Module, q: Tensor, attention: AttendInSteps, which: int = 0) -> Tensor:
        """Attention of q (B, W, H, Dk) to the layer's keys of a memory; the W beams are queries of one problem."""
        projected, lengths = self.memories[which]
        keys, values = (t.transpose(1, 2)[:, :, None] for t in projected[layer])  # (B, Ls, 1, Hk, D)
        return attention(q, keys, values, lengths)

    def write(self, buffer: Tensor, value: Tensor, ago: int = 0) -> None:
        """buffer[:, position - ago] = value, of this step. buffer (B, capacity, ..), value (B, ..)."""
        if self.on_device:
            buffer.index_copy_(1, self.position - ago if ago else self.position, value[:, None])
        else:
            buffer[:, self.length - ago] = value

    def fill(self, place: tuple[int, nn.Module], keys: Tensor, values: Tensor) -> None:
        """The first n tokens of an attention, (B * W, Hk, n, D): with `advance` in place of n steps."""
        new = [t.unflatten(0, (self.batch, self.rows)).permute(0, 2, 3, 1, 4) for t in (keys, values)]
        if place not in self.past:
            self.past[place] = tuple([t.new_empty(*t.shape[:2], self.capacity, *t.shape[3:]) for t in new])
        for past, t in zip(self.past[place], new if len(self.past[place]) == 2 else [torch.cat(new, 4)], strict=True):
            past[:, :, : t.shape[2]] = t

    def past_of_beams(self, place: tuple[int, nn.Module]) -> Tensor:
        """Keys and values of an attention next to each other, (B * W, Hk, length, Dk + Dv), each beam's own."""
        past = torch.cat(self.past[place], 4)[:, :, : self.length]
        if self.ancestors is not None:
            index = self.ancestors[:, None, :, : self.length].mT.long()  # (B, 1, length, W)
            past = past.gather(3, index[..., None].expand_as(past))
        return past.permute(0, 3, 1, 2, 4).flatten(0, 1)

    def advance(self, steps: int = 1) -> None:
        """Steps are done: the next one writes at the next position."""
        self.length += steps
        self.position += steps
        if self.on_device:
            self.lengths += steps

    def reorder(self, parents: Tensor) -> None:
        """Beam w continues what was beam parents[b, w]. parents: (B, W) int64. Call it after `advance`."""
        self.make_ancestors()
        past = self.ancestors if self.on_device else self.ancestors[:, :, : self.length]
        past.copy_(past.gather(1, parents[..., None].expand_as(past)))
        if self.on_device:  # restore the identity for positions not yet decoded
            own = torch.arange(self.rows, dtype=torch.int32, device=parents.device)
            future = torch.arange(self.capacity, device=parents.device) >= self.position
            self.ancestors.copy_(own[:, None].where(future, self.ancestors))

    def select(self, sequences: Tensor) -> None:
        """Keep these sequences of the batch, (n,) int64, in this order. Earlier tensors stay as they are."""
        self.batch = len(sequences)
        self.position = self.position.clone()
        self.lengths, self.sentences = self.lengths[sequences], self.sentences[sequences]
        if self.ancestors is not None:
            self.ancestors = self.ancestors[sequences]
        self.past = {place: tuple([t[sequences] for t in past]) for place, past in self.past.items()}
        self.memories = tuple(
            Memory({layer: (k[sequences], v[sequences]) for layer, (k, v) in projected.items()}, lengths[sequences])
            for projected, lengths in self.memories
        )

    def resume(self, other: DecoderCache) -> None:
        """Continue `other`, a cache of the same sizes, at this one's addresses, which a CUDA graph reads."""
        if self.ancestors is not None:
            other.make_ancestors()
        for mine, new in zip(self._tensors(), other._tensors(), strict=False):  # a new cache has no past
            mine.copy_(new)
        self.length = other.length
        self.linear.refresh()

    def pad_memories(self, multiple: int) -> None:
        """Pad memories to a multiple of this many keys. Keys after a memory's length do not count."""
        for projected, _ in self.memories:
            for layer, (k, v) in projected.items():
                if missing := -k.shape[2] % multiple:
                    projected[layer] = F.pad(k, (0, 0, 0, missing)), F.pad(v, (0, 0, 0, missing))

    def memory_tensors(self) -> list[Tensor]:
        return [t for projected, lengths in self.memories for t in (lengths, *chain(*projected.values()))]

    def _tensors(self) -> list[Tensor]:
        """All that steps read and change, the past last."""
        own = [self.position, self.lengths, self.sentences]
        own += [t for t in (self.relative_bias, self.ancestors) if t is not None]
        return own + self.memory_tensors() + list(chain(*self.past.values()))

    def make_ancestors(self) -> None:
        """Of beams that were never reordered, each is its own."""
        if self.ancestors is None:
            own = torch.arange(self.rows, dtype=torch.int32, device=self.position.device)
            self.ancestors = own[:, None].repeat(self.batch, 1, self.capacity)
