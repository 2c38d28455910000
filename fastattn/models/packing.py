"""Packing: the real tokens of a padded batch as one long sequence, and when that is worth its cost."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn import _dispatch
from fastattn._dispatch import Backend
from fastattn._transforms import can_read_values
from fastattn.nn.unmodified import is_unmodified, why_observed


class Packed:
    """The T tokens of seq (B, L) that are not pad_idx, sequence after sequence, as `tokens` (1, T).

    position (1, T): each token's place in its sequence.     index (T,): its place in seq.flatten().
    cu_seqlens (B + 1,) int32: where each sequence starts.
    On a GPU the constructor waits for the device once, to read T.
    """

    def __init__(self, seq: Tensor, pad_idx: int) -> None:
        self.shape = seq.shape
        real = seq != pad_idx
        self.index = real.flatten().nonzero().squeeze(1)
        self.cu_seqlens = F.pad(real.sum(1).cumsum(0), (1, 0)).to(torch.int32)
        self.position = (self.index % seq.shape[1])[None]
        self.tokens = self.pack(seq)

    def pack(self, x: Tensor) -> Tensor:
        """(B, L, ..) -> (1, T, ..)"""
        return x.flatten(0, 1).index_select(0, self.index)[None]

    def unpack(self, x: Tensor) -> Tensor:
        """(1, T, ..) -> (B, L, ..), with 0 where there was padding."""
        padded = x.new_zeros(self.shape.numel(), *x.shape[2:]).index_copy(0, self.index, x[0])
        return padded.unflatten(0, self.shape)


def packs_unnoticed(model: nn.Module) -> bool:
    """Whether nobody else looks at what is inside the model, where a batch (B, L, ..) becomes (1, T, ..): no hooks, and
    no modules but fastattn's own."""
    return all(
        is_unmodified(module) or (type(module).__module__.startswith(_OWN) and why_observed(module) is None)
        for module in model.modules()
        if module is not model
    )


_OWN = ("fastattn.", "torch.nn.modules.container")


def source_packing_pays(src_seq: Tensor, src_pad_idx: int, *, backend: Backend | None) -> bool:
    """Whether the encoder alone, without gradients, is faster without padding: as packing_pays, of src_seq only."""
    if not can_read_values(src_seq) or _dispatch.requested(backend)[0] not in (None, "aten"):
        return False
    return 4 * int(torch.count_nonzero(src_seq == src_pad_idx)) >= src_seq.numel()


def packing_pays(
    src_seq: Tensor, trg_seq: Tensor, gold: Tensor, src_pad_idx: int, trg_pad_idx: int, *, backend: Backend | None
) -> bool:
    """Whether a training step is faster without padding: a quarter or more of all tokens of src_seq and trg_seq is.

    False on a GPU, where counting would wait for the device, and in backends other than aten: the plain formula would
    compute the scores between all sequences. False too where packing would change the loss: where gold is a real token
    and trg_seq is padding.
    """
    if not can_read_values(src_seq) or _dispatch.requested(backend)[0] not in (None, "aten"):
        return False
    trg_padding = trg_seq == trg_pad_idx
    padding = torch.count_nonzero(trg_padding) + torch.count_nonzero(src_seq == src_pad_idx)
    if 4 * int(padding) < trg_seq.numel() + src_seq.numel():
        return False
    return bool((gold[trg_padding] == trg_pad_idx).all())
