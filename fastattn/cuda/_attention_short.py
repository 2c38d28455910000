"""Attention's backward of short sequences, csrc/attention/short_backward.h: when, and how.

One launch; a bias that batches or heads share takes a second one for its gradient, which is a sum over blocks. Any bias
takes one before, forward and backward, that looks for keys which it hides from all: of a bias that samples share it is
read once there, where each block would have to read its own part twice.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastattn.cuda import DTYPES, _visibility, address, device_index, dropout_constants, extension, stream
from fastattn.masks import AttentionMask


def serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether these sequences are short ones: up to 128 queries and keys."""
    return extension(q.device).attention_is_short(_visibility.shape(q, k, v))


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    mask: AttentionMask | None,
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
    *,
    needs_dbias: bool,
    tf32: bool,
) -> Tensor | None:
    """Fills dq, dk and dv; returns the gradient, if needed, of a bias with keys. lse and dlse are contiguous."""
    module, sizes, dtype, device = extension(q.device), _visibility.shape(q, k, v), DTYPES[q.dtype], device_index(q)
    who, kept = _visibility.elements(mask, q.shape[2], k.shape[2], q.device)
    floats = functools.partial(torch.empty, dtype=torch.float32, device=q.device)
    dbias = key_sums = None
    statistics = (None, None)
    if needs_dbias and mask.bias.shape[2] == 1:  # shared by all queries: a by-product
        key_sums = floats(*q.shape[:2], k.shape[2])
    elif needs_dbias:
        dbias = torch.empty_like(mask.bias, memory_format=torch.contiguous_format)
        if dbias.shape[:2] != q.shape[:2]:
            statistics = floats(2, *lse.shape)
    if k.shape[2] == 0:
        dq.zero_()
    of_groups = module.attention_bwd_short_sums(sizes, dtype, device)
    sums = floats(of_groups) if of_groups > 0 else None
    module.attention_bwd_short(
        [*map(_visibility.rows, (q, k, v, dout, dq, dk, dv))],
        [*map(address, (lse, dlse, *statistics, key_sums, sums))],
        (0, 0, 0) if dbias is None else (address(dbias), *dbias.shape[:2]),
        sizes, softmax_scale, who, _visibility.bias(mask),
        address(rng_state), *dropout_constants(dropout_p), dtype, tf32, device, stream(q),
    )  # fmt: skip
    if key_sums is None:
        return dbias
    return key_sums.sum_to_size(*mask.bias.shape[:2], k.shape[2]).unsqueeze(2).to(mask.bias.dtype)
