"""Padding whose outputs are unused is not computed.

A loss does not depend on padding: it is hidden as keys, and ignored as labels. So masks that are made within
padding_is_hidden() let a layer whose sublayers are all fused compute its real tokens alone, as one long sequence. This
is done on a CPU, where counting tokens needs no synchronisation. The decision is the mask's (`Padding`), since
activation checkpointing calls a layer again outside of the context. A layer returns 0 for padding. The next layer finds
the sequence in `_streams`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fastattn._tracing import can_read_values
from fastattn.masks import AttentionMask
from fastattn.models.padding import MIN_ELEMENTS, Unpadded
from fastattn.nn.fusible import hook_reason

# The share of padding from which it is left out: gathering and restoring a layer's tokens costs some 2 % of its time.
MIN_SHARE = 1 / 8

_is_hidden = ContextVar("padding_is_hidden", default=False)


@contextmanager
def padding_is_hidden() -> Iterator[None]:
    """What the model computes of padding is unused, where masks are made within this context."""
    token = _is_hidden.set(True)
    try:
        yield
    finally:
        _is_hidden.reset(token)


def may_leave_out_padding() -> bool:
    """Whether a mask is made within padding_is_hidden(). torch.compile traces the model with its padding."""
    return not torch.compiler.is_compiling() and _is_hidden.get()


class Padding:
    """The padding of a mask that hides it, and nothing else but what comes later. A forward's layers share it.

    real: bool (B, L), True = a real token.     is_causal: whether the mask also hides what comes later.
    mask: that of the real tokens alone, after `unpad`.
    """

    mask: AttentionMask

    def __init__(self, real: Tensor, is_causal: bool) -> None:
        self.real, self.is_causal = real, is_causal
        self._unpadded: list[Unpadded | None] = []  # what `unpad` decided
        self._cross_masks: dict[Unpadded | int, AttentionMask] = {}

    def unpad(self, x: Tensor) -> Unpadded | None:
        """The real tokens of x (B, L, d_model), or None: it keeps its padding. Decided for the first x."""
        if not self._unpadded:
            is_large = can_read_values(x) and x.numel() >= MIN_ELEMENTS and self.real.shape == x.shape[:2]
            if is_large and int(self.real.sum()) <= (1 - MIN_SHARE) * self.real.numel():
                (unpadded,) = self._unpadded = Unpadded.of((self.real, False), device=x.device)
                self.mask = AttentionMask(cu_seqlens_q=unpadded.cu_seqlens, is_causal=self.is_causal)
            else:
                self._unpadded = [None]
        return self._unpadded[0]

    def cross_mask(self, unpadded: Unpadded, keys: Unpadded | None, memory: Tensor) -> AttentionMask:
        """Of queries without padding. keys: of the memory (B, Lk, d_model), None where it keeps its padding."""
        B, Lk, _ = memory.shape
        if (mask := self._cross_masks.get(keys or Lk)) is None:
            starts = torch.arange(0, B * Lk + 1, Lk, dtype=torch.int32) if keys is None else keys.cu_seqlens
            mask = AttentionMask(cu_seqlens_q=unpadded.cu_seqlens, cu_seqlens_k=starts)
            self._cross_masks[keys or Lk] = mask
        return mask


class _Stream(NamedTuple):
    """What is known of a tensor (B, L, d_model): its padding, and its real tokens while its version is this one."""

    padding: Padding
    tokens: Tensor | None = None
    version: int = 0


_streams = WeakTensorKeyDictionary()  # what is known of a tensor lives as long as the tensor


def _stream_of(x: Tensor) -> _Stream | None:
    return None if torch.compiler.is_compiling() or not _streams else _streams.get(x)


def padding_of(mask: Any) -> Padding | None:
    """The padding that may be left out under a mask, which huggingface.attention_mask has made, or None."""
    return getattr(mask, "padding", None)


class Packed(NamedTuple):
    """What a layer computes of its real tokens: its input (1, T, d_model), masks, and the memory (1, Tk, d_model)."""

    x: Tensor
    masks: list[AttentionMask | None]
    memory: tuple[Tensor, ...]
    padding: Padding


def pack(layer: Any, x: Tensor, masks: Any, memory: tuple[Tensor, ...] = ()) -> Packed | None:
    """The call of a layer without padding, or None: it keeps its padding.

    x (B, L, d_model); masks: of its attentions; memory: of the second one, (B, Lk, d_model).
    """
    padding = padding_of(masks[0])
    if padding is None or hook_reason(layer) is not None or (unpadded := padding.unpad(x)) is None:
        return None
    packed = [padding.mask]
    if memory:
        (states,), others = memory, padding_of(masks[1])
        keys = None if others is None else others.unpad(states)
        packed.append(padding.cross_mask(unpadded, keys, states))
        memory = (states.flatten(0, 1)[None] if keys is None else _tokens(states, others),)
    return Packed(_tokens(x, padding), packed, memory, padding)


def restore_padding(out: Tensor, padding: Padding) -> Tensor:
    """The layer's output (B, L, d_model) from that of its real tokens, which the next layer finds."""
    padded = padding.unpad(out).restore_padding(out)
    _streams[padded] = _Stream(padding, out, padded._version)
    return padded


def note_padding(out: Tensor, x: Tensor, mask: Any, is_self_attention: bool) -> None:
    """Remember the padding of what an attention made of x, for a module that does not get the mask."""
    padding = padding_of(mask) if is_self_attention else getattr(_stream_of(x), "padding", None)
    if padding is not None:
        _streams[out] = _Stream(padding)


def pack_tokens(module: Any, x: Tensor) -> tuple[Tensor, Padding] | None:
    """The real tokens (1, T, d_model) of a module's input, where its padding is known and may be left out, or None."""
    known = _stream_of(x)
    if known is None or hook_reason(module) is not None or known.padding.unpad(x) is None:
        return None
    return _tokens(x, known.padding), known.padding


def _tokens(x: Tensor, padding: Padding) -> Tensor:
    known = _stream_of(x)
    if known is not None and known.padding is padding and known.tokens is not None and known.version == x._version:
        # Reentrant checkpointing gives a layer's output another graph.
        if known.tokens.requires_grad is x.requires_grad:
            return known.tokens
    return padding.unpad(x).drop_padding(x)
