"""Packing: the real tokens of a padded batch as one long sequence, and when that is worth its cost."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn import backends
from fastattn._tracing import can_read_values
from fastattn.backends import Backend
from fastattn.nn.fusible import can_fuse, hook_reason


class Packed:
    """The T tokens of seq (B, L) that are not pad_idx, sequence after sequence, as `tokens` (1, T) on the device.

    position (1, T): each token's place in its sequence.     index (T,): its place in seq.flatten(), where seq is.
    cu_seqlens (B + 1,) int32: where each sequence starts.
    """

    def __init__(self, seq: Tensor, real: Tensor, cu_seqlens: Tensor, count: int | None, device: torch.device) -> None:
        """Called by `of`. count: T, or None where seq is on a CPU and nonzero() need not wait to learn it."""
        self.shape, self.device = seq.shape, device
        real = real.flatten()
        self.index = (real.nonzero() if count is None else torch.nonzero_static(real, size=count)).squeeze(1)
        self.cu_seqlens = _copied(cu_seqlens, device)
        self.position = _copied((self.index % seq.shape[1])[None], device)
        self.tokens = self.pack(seq)

    @staticmethod
    def of(*padded: tuple[Tensor, int], device: torch.device) -> list[Packed]:
        """One of each (seq, pad_idx), which are all on the device, or all on the CPU and packed there.

        From a GPU each T is read, and all in one wait for it. From the CPU nothing waits."""
        reals = [seq != pad_idx for seq, pad_idx in padded]
        starts = [F.pad(real.sum(1).cumsum(0), (1, 0)).to(torch.int32) for real in reals]
        on_cpu = starts[0].device.type == "cpu"
        counts = [None] * len(padded) if on_cpu else torch.stack([start[-1] for start in starts]).tolist()
        return [Packed(seq, *known, device) for (seq, _), *known in zip(padded, reals, starts, counts, strict=True)]

    def pack(self, x: Tensor) -> Tensor:
        """(B, L, ..), where seq is -> (1, T, ..), on the device."""
        return _copied(x.flatten(0, 1).index_select(0, self.index)[None], self.device)

    def unpack(self, x: Tensor) -> Tensor:
        """(1, T, ..), on the device -> (B, L, ..), with 0 where there was padding."""
        index = _copied(self.index, self.device)
        padded = x.new_zeros(self.shape.numel(), *x.shape[2:]).index_copy(0, index, x[0])
        return padded.unflatten(0, self.shape)


def _copied(t: Tensor, device: torch.device) -> Tensor:
    """t on the device. A copy from the CPU to a GPU waits for it unless the memory is pinned."""
    if t.device == device:
        return t
    return t.pin_memory().to(device, non_blocking=True)


def packing_is_invisible(model: nn.Module) -> bool:
    """Whether nobody else looks at what is inside the model, where a batch (B, L, ..) becomes (1, T, ..): no hooks, and
    no modules but fastattn's own."""
    return all(
        can_fuse(module) or (type(module).__module__.startswith(_OWN) and hook_reason(module) is None)
        for module in model.modules()
        if module is not model
    )


_OWN = ("fastattn.", "torch.nn.modules.container")


def source_packing_pays(src_seq: Tensor, src_pad_idx: int, *, backend: Backend | None) -> bool:
    """Whether the encoder alone, without gradients, is faster without padding: as packing_pays, of src_seq only."""
    if not can_read_values(src_seq) or backends.requested(backend)[0] not in (None, "aten"):
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
    if not can_read_values(src_seq) or backends.requested(backend)[0] not in (None, "aten"):
        return False
    trg_padding = trg_seq == trg_pad_idx
    padding = torch.count_nonzero(trg_padding) + torch.count_nonzero(src_seq == src_pad_idx)
    if 4 * int(padding) < trg_seq.numel() + src_seq.numel():
        return False
    return bool((gold[trg_padding] == trg_pad_idx).all())
