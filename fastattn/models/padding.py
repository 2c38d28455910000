"""Packing: the real tokens of a padded batch as one long sequence. What a call packs is decided here, once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn._tracing import can_read_values
from fastattn.backends import likely_backend
from fastattn.graphs.graphed_call import round_up
from fastattn.nn.fusible import can_fuse, hook_reason
from fastattn.ops._checks import check_indices

# Of a packed batch that is rounded up: four sizes for each doubling, multiples of 64. Multi30k in batches of 8192
# tokens with their padding takes 20 graphs in 20 epochs, of which the first epoch needs 11, and 0.86 of the tokens.
# Eight sizes: 35 graphs, 0.82.
SIZES = 4, 64


class Packing(NamedTuple):
    """Which padding a call of the model drops: that of the source, and that of the target."""

    source: bool
    target: bool


KEEP_PADDING = Packing(False, False)
# Tokens, padding included, times d_model. In smaller batches what packing adds costs more than the padding. Measured on
# one CPU core, torch 2.13, 2 + 2 layers, a training step with 33 % padding, time with the padding dropped to time with
# it kept, float32 and bfloat16 autocast: 20k elements 1.25 and 1.25; 41k 1.03 and 1.13; 65k 1.02 and 1.06; 82k
# 0.90 and 1.01 (0.88 and 1.00 at d_model 256).
MIN_ELEMENTS = 70_000


def choose_packing(model: Any, src_seq: Tensor, trg_seq: Tensor | None = None, gold: Tensor | None = None) -> Packing:
    """The padding that one call of a FusedTransformer drops: as model.pack_padding decides, or if it is None, what is
    faster on a CPU.

    `loss`, which gives trg_seq and gold, drops all padding if 25 % or more of all tokens are padding. It keeps the
    target's if packing would change the loss: if gold is a real token where trg_seq is padding.
    forward and decoding, and `loss` otherwise, drop the source's padding if 25 % or more of src_seq is padding.
    Nothing is dropped from fewer than MIN_ELEMENTS; on a GPU, where counting would wait for the device; in backends
    other than aten, since the plain formula would compute the scores between all sequences; and if hooks or other
    modules read tensors inside the model.
    """
    if model.pack_padding is not None:
        return Packing(model.pack_padding, model.pack_padding)
    if not can_read_values(src_seq) or likely_backend("attention", src_seq.device, model.decoder.backend) != "aten":
        return KEEP_PADDING
    tokens = src_seq.numel() if gold is None else src_seq.numel() + trg_seq.numel()
    if tokens * model.d_model < MIN_ELEMENTS:
        return KEEP_PADDING
    src_padding = int(torch.count_nonzero(src_seq == model.src_pad_idx))
    packing = Packing(4 * src_padding >= src_seq.numel(), False)
    if gold is not None:
        is_padding = trg_seq == model.trg_pad_idx
        padding = src_padding + int(torch.count_nonzero(is_padding))
        if 4 * padding >= tokens and bool((gold[is_padding] == model.trg_pad_idx).all()):
            packing = Packing(True, True)
    return packing if packing.source and _packing_is_invisible(model) else KEEP_PADDING


def _packing_is_invisible(model: nn.Module) -> bool:
    """Whether only fastattn's own modules, without hooks, read tensors inside the model: there a batch (B, L, ..)
    becomes (1, T, ..)."""
    own = ("fastattn.", "torch.nn.modules.container")
    return all(
        can_fuse(module) or (type(module).__module__.startswith(own) and hook_reason(module) is None)
        for module in model.modules()
        if module is not model
    )


class Unpadded:
    """The T tokens of seq (B, L) that are not pad_idx, sequence after sequence, as `tokens` (1, T) on the device.

    position (1, T): each token's position in its sequence.     index (T,): its index in seq.flatten(), where seq is.
    cu_seqlens (B + 1,) int32: where each sequence starts.
    """

    def __init__(self, seq: Tensor, real: Tensor, cu_seqlens: Tensor, count: int | None, device: torch.device) -> None:
        """Called by `of`. count: T, or None where seq is on a CPU and nonzero() need not wait to learn it."""
        self.shape, self.device = seq.shape, device
        real = real.flatten()
        self.index = (real.nonzero() if count is None else torch.nonzero_static(real, size=count)).squeeze(1)
        self.cu_seqlens = _copied(cu_seqlens, device)
        self.position = _copied((self.index % seq.shape[1])[None], device)
        self.tokens = self.drop_padding(seq)

    @staticmethod
    def of(*padded: tuple[Tensor, int], device: torch.device) -> list[Unpadded]:
        """One of each (seq, pad_idx), which are all on the device, or all on the CPU and packed there.

        From a GPU each T is read, and all in one wait for it. From the CPU nothing waits."""
        reals = [seq != pad_idx for seq, pad_idx in padded]
        starts = [F.pad(real.sum(1).cumsum(0), (1, 0)).to(torch.int32) for real in reals]
        on_cpu = starts[0].device.type == "cpu"
        counts = [None] * len(padded) if on_cpu else torch.stack([start[-1] for start in starts]).tolist()
        found = zip(padded, reals, starts, counts, strict=True)
        return [Unpadded(seq, real, start, count, device) for (seq, _), real, start, count in found]

    def drop_padding(self, x: Tensor) -> Tensor:
        """(B, L, ..), where seq is -> (1, T, ..), on the device."""
        return _copied(x.flatten(0, 1).index_select(0, self.index)[None], self.device)

    def restore_padding(self, x: Tensor) -> Tensor:
        """(1, T, ..), on the device or any other -> (B, L, ..) there, with 0 where there was padding."""
        index = _copied(self.index, x.device)
        padded = x.new_zeros(self.shape.numel(), *x.shape[2:]).index_copy(0, index, x[0])
        return padded.unflatten(0, self.shape)


class PackedBatch(NamedTuple):
    """A batch without its padding, as FusedTransformer.packed_loss reads it.

    numbers: int64, all parts in one tensor: one copy moves it to a GPU, or to where a CUDA graph reads it.
    sizes: of the parts. A graph of the loss repeats these and no other property of the batch.
    """

    numbers: Tensor
    sizes: tuple[int, ...]

    @staticmethod
    def of(
        model: Any, src_seq: Tensor, trg_seq: Tensor, gold: Tensor | None = None, rounded: bool = False
    ) -> tuple[PackedBatch, Unpadded]:
        """The batch where the model is, and what restores the target's padding. gold: (B, Lt), or None for no loss.

        rounded: the sizes are rounded up by SIZES. The tokens added are padding at position 0, and so is their gold. As
        queries they are a sequence without keys, and as keys one without queries: attention gives 0 for them.
        Tokens on a CPU are packed there. For those on a GPU this waits once. It checks positions and devices.
        """
        device = src_seq.device
        model.grow(src_seq, trg_seq)
        check_indices("src_seq", src_seq, "trg_seq", trg_seq)
        if device.type == "cpu" and (model.pack_padding or rounded):  # the model may be on a GPU
            device = next(model.parameters()).device
        pads = model.src_pad_idx, model.trg_pad_idx
        sides = Unpadded.of((src_seq, pads[0]), (trg_seq, pads[1]), device=src_seq.device)
        lengths, offsets = [side.tokens.shape[1] for side in sides], len(src_seq) + 1
        if rounded:
            lengths = [round_up(length, *SIZES) for length in lengths]
            # Empty sequences cost nothing. With room for one in 4 tokens the number of sentences seldom decides.
            offsets = round_up(max(offsets + 2, max(lengths) // 4), *SIZES)
        parts: list[Tensor] = []
        for side, pad_idx, length in zip(sides, pads, lengths, strict=True):
            real = side.tokens.shape[1]
            added = 0, length - real
            queries = F.pad(side.cu_seqlens, (0, offsets - len(side.cu_seqlens)), value=real)
            keys = queries.clone() if rounded else queries[:0]  # none: they are those of the queries
            if rounded:
                queries[-2:], keys[-1:] = length, length
            parts += F.pad(side.tokens[0], added, value=pad_idx), F.pad(side.position[0], added), queries, keys
        parts.append(queries[:0] if gold is None else F.pad(sides[1].drop_padding(gold)[0], added, value=pad_idx))
        # Parts start at multiples of 16 bytes, as other tensors do: kernels are compiled for that.
        numbers = torch.cat([F.pad(part, (0, len(part) % 2)) for part in parts])
        return PackedBatch(_copied(numbers, device), tuple(map(len, parts))), sides[1]

    def parts(self) -> list[Tensor]:
        """Views of numbers: of the source tokens and positions (1, T), cu_seqlens of queries and of keys (n + 1,); the
        same of the target; gold (1, Tt)."""
        found = self.numbers.split([size + size % 2 for size in self.sizes])
        rows = [part[:size] for part, size in zip(found, self.sizes, strict=True)]
        rows[3::4] = [keys if len(keys) else queries for queries, keys in (rows[2:4], rows[6:8])]
        return [row if i % 4 > 1 else row[None] for i, row in enumerate(rows)]


def unpad(x: Tensor, real: Tensor) -> tuple[Tensor, Unpadded]:
    """The real tokens of a padded batch x (B, L, ..) as one row (1, T, ..), sequence after sequence; `pad` undoes it.

    real: bool (B, L), True = a real token, on the device of x. Padding may be anywhere.
    Returns (row, unpadded): unpadded.cu_seqlens (B + 1,) int32 is for AttentionMask(cu_seqlens_q=...), and
    unpadded.position (1, T) int64 has each token's place in its sequence, padding counted. Other tensors of the batch
    follow by unpadded.drop_padding(other). Differentiable. On a GPU it waits once, to learn T.
    Raises TypeError or ValueError that names the argument.
    """
    for name, t in (("x", x), ("real", real)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} must be a Tensor, got {type(t).__name__}")
    if real.dtype != torch.bool:
        raise TypeError(f"real has dtype {real.dtype}, expected bool, True = a real token")
    if real.dim() != 2 or x.shape[:2] != real.shape:
        raise ValueError(f"x has shape {tuple(x.shape)} and real {tuple(real.shape)}, expected (B, L, ..) and (B, L)")
    if real.device != x.device:
        raise ValueError(f"real is on {real.device}, expected {x.device} as x")
    (unpadded,) = Unpadded.of((real, False), device=x.device)
    return unpadded.drop_padding(x), unpadded


def pad(x: Tensor, unpadded: Unpadded) -> Tensor:
    """x (1, T, ..) as the padded batch (B, L, ..) that `unpad` had, with 0 where there was padding. Differentiable.

    unpadded: what `unpad` returned. Raises TypeError or ValueError that names the argument.
    """
    if not isinstance(unpadded, Unpadded):
        raise TypeError(f"unpadded must be what unpad returned with the row, got {type(unpadded).__name__}")
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a Tensor, got {type(x).__name__}")
    if x.shape[:2] != unpadded.tokens.shape:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected (1, {unpadded.tokens.shape[1]}, ..)")
    return unpadded.restore_padding(x)


def _copied(t: Tensor, device: torch.device) -> Tensor:
    """t on the device. A copy from the CPU to a GPU waits for it unless the memory is pinned."""
    if t.device == device:
        return t
    return t.pin_memory().to(device, non_blocking=True)
