"""Attention's backward of short sequences, csrc/attention/short_backward.cu: when, and how.

One launch; a bias that batches or heads share takes a second one for its gradient, which is a sum over blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.cuda import DTYPES, _visibility, address, device_index, dropout_constants, extension, stream
from fastattn.masks import AttentionMask


def serves(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> bool:
    """Whether a block holds all keys of a head, and there are enough of them: csrc/attention/short_backward.h.

    bias: of which a gradient is wanted that only kernels can make; served unless queries share it.
    """
    if bias is not None and bias.shape[2:] != (q.shape[2], k.shape[2]):
        return False
    return extension(q.device).attention_is_short(_visibility.shape(q, k, v), DTYPES[q.dtype], device_index(q))


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
    """Fills dq, dk and dv; returns the gradient, if needed, of the bias. lse and dlse are contiguous."""
    who, kept = _visibility.elements(mask, q.shape[2], k.shape[2], q.device)
    dbias, statistics = None, (None, None)
    if needs_dbias:
        dbias = torch.empty_like(mask.bias, memory_format=torch.contiguous_format)
        if dbias.shape[:2] != q.shape[:2]:
            statistics = torch.empty(2, *lse.shape, dtype=torch.float32, device=q.device)
    if k.shape[2] == 0:
        dq.zero_()
    extension(q.device).attention_bwd_short(
        [*map(_visibility.rows, (q, k, v, dout, dq, dk, dv))], (*map(address, (lse, dlse, *statistics)),),
        (0, 0, 0) if dbias is None else (address(dbias), *dbias.shape[:2]),
        _visibility.shape(q, k, v), softmax_scale, who, _visibility.bias(mask),
        address(rng_state), *dropout_constants(dropout_p), DTYPES[q.dtype], tf32, device_index(q), stream(q),
    )  # fmt: skip
    return dbias
