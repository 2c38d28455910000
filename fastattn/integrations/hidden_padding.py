"""Padding that nobody sees is not computed.

A loss does not depend on padding: it is hidden as keys, and ignored as labels. So masks that are made within
padding_is_hidden() let a layer on the straight path compute its real tokens alone, as one long sequence. This is done
on a CPU, where counting tokens needs no synchronisation. The layer returns 0 for padding; its output remembers the
sequence, which the next layer reads. The decision is the mask's, since activation checkpointing calls a layer again
outside of the context.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn._tracing import can_read_values
from fastattn.masks import AttentionMask
from fastattn.models.padding import MIN_ELEMENTS, Unpadded
from fastattn.nn.fusible import hook_reason

# The share of padding from which it is left out: gathering and restoring a layer's tokens costs some 2 % of its time.
MIN_SHARE = 1 / 8


class _State(threading.local):
    def __init__(self) -> None:  # not attributes of the class: torch.compile guards that the object has none of its own
        self.is_hidden = False
        self.block_mask: Any = None


_state = _State()


@contextmanager
def padding_is_hidden() -> Iterator[None]:
    """Nobody reads what the model computes of padding, where masks are made within it."""
    before, _state.is_hidden = _state.is_hidden, True
    try:
        yield
    finally:
        _state.is_hidden = before


def may_leave_out_padding() -> bool:
    """Whether a mask is made within padding_is_hidden(). torch.compile traces the model with its padding."""
    return not torch.compiler.is_compiling() and _state.is_hidden


@contextmanager
def padding_of_block(mask: Any) -> Iterator[None]:
    """The modules of a block, which do not get its mask, find it in `pack_tokens`."""
    before, _state.block_mask = _state.block_mask, mask
    try:
        yield
    finally:
        _state.block_mask = before


class Packed(NamedTuple):
    """What a layer computes of its real tokens: its input (1, T, d_model), masks, and the memory (1, Tk, d_model)."""

    x: Tensor
    masks: list[AttentionMask | None]
    memory: Tensor | None
    unpadded: Unpadded


def pack(layer: Any, x: Tensor, masks: Any, memory: Tensor | None) -> Packed | None:
    """The call of a layer without padding, or None: it keeps its padding.

    x (B, L, d_model); masks: of its attentions, which huggingface.attention_mask has made; memory (B, Lk, d_model).
    """
    own, *others = masks
    if getattr(own, "padding", None) is None or hook_reason(layer) is not None:
        return None
    unpadded = _unpadded(own, x)
    if unpadded is None:
        return None
    packed: list[AttentionMask | None] = [own.without_padding]
    if memory is not None:
        (other,) = others
        if (cross := own.__dict__.setdefault("crosses", {}).get(id(other))) is None:
            keys = _unpadded(other, memory)
            if keys is None:
                B, Lk, _ = memory.shape
                starts = torch.arange(0, B * Lk + 1, Lk, dtype=torch.int32)
            else:
                starts = keys.cu_seqlens
            mask = AttentionMask(cu_seqlens_q=unpadded.cu_seqlens, cu_seqlens_k=starts)
            own.crosses[id(other)] = cross = other, mask, keys
        _, mask, keys = cross
        packed.append(mask)
        memory = memory.flatten(0, 1)[None] if keys is None else _tokens(memory, keys)
    return Packed(_tokens(x, unpadded), packed, memory, unpadded)


def restore_padding(out: Tensor, unpadded: Unpadded) -> Tensor:
    """The layer's output (B, L, d_model) from that of its real tokens, which the next layer finds."""
    padded = unpadded.restore_padding(out)
    padded.real_tokens = unpadded, out, padded._version
    return padded


def pack_tokens(module: Any, x: Tensor) -> tuple[Tensor, Unpadded] | None:
    """The real tokens (1, T, d_model) of the input of a module that computes each token by itself, or None.

    Which are real is known of the mask of the block that the module is in, see `padding_of_block`.
    """
    mask = _state.block_mask
    if getattr(mask, "padding", None) is None or hook_reason(module) is not None:
        return None
    unpadded = _unpadded(mask, x)
    return None if unpadded is None else (_tokens(x, unpadded), unpadded)


def _tokens(x: Tensor, unpadded: Unpadded) -> Tensor:
    known = getattr(x, "real_tokens", None)
    # Reentrant checkpointing gives a layer's output another graph, and somebody may have written to it.
    if (
        known is not None
        and known[0] is unpadded
        and known[2] == x._version
        and known[1].requires_grad is x.requires_grad
    ):
        return known[1]
    return unpadded.drop_padding(x)


def _unpadded(mask: Any, x: Tensor) -> Unpadded | None:
    """The real tokens of x under a mask that hides padding, and nothing else but what comes later."""
    if mask is None:
        return None
    if "unpadded" not in mask.__dict__:
        mask.unpadded, padding = None, getattr(mask, "padding", None)
        if padding is not None and can_read_values(x) and x.numel() >= MIN_ELEMENTS:
            real, is_causal = padding
            if real.shape == x.shape[:2] and int(real.sum()) <= (1 - MIN_SHARE) * real.numel():
                (mask.unpadded,) = Unpadded.of((real, False), device=x.device)
                mask.without_padding = AttentionMask(cu_seqlens_q=mask.unpadded.cu_seqlens, is_causal=is_causal)
    return mask.unpadded
