"""Sequences without their padding: the real tokens of a batch, one sequence below the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn import _dispatch


class Packed:
    """tokens (1, T): the T tokens of seq (B, L) that are not pad_idx, sequence by sequence.

    position (1, T): where each stood in its sequence.     cu_seqlens (B + 1,) int32: where each sequence starts.
    index (T,): where each stood in seq.flatten().
    On a GPU it waits for the device once, to learn T.
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


def worth_it(
    src_seq: Tensor, trg_seq: Tensor, gold: Tensor, src_pad_idx: int, trg_pad_idx: int, *, backend: str | None
) -> bool:
    """Whether a training step is faster without padding: where a quarter or more of (B, Ls) and (B, Lt) tokens is.

    Only where it costs nothing to ask, on a CPU, and where packing changes no result: wherever trg_seq is padding,
    gold is. The kernels that do not run there are left alone, and so is the plain formula, which would compute every
    score between two sequences.
    """
    if src_seq.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    if _dispatch.requested(backend)[0] not in (None, "aten"):
        return False
    trg_padding = trg_seq == trg_pad_idx
    padding = torch.count_nonzero(trg_padding) + torch.count_nonzero(src_seq == src_pad_idx)
    if 4 * int(padding) < trg_seq.numel() + src_seq.numel():
        return False
    return bool((gold[trg_padding] == trg_pad_idx).all())
