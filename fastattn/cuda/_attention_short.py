"""Attention's backward of short sequences in one launch, csrc/attention/short_backward.cu: when, and how."""

from __future__ import annotations

from torch import Tensor

from fastattn.cuda import DTYPES, _visibility, address, device_index, dropout_constants, extension, stream
from fastattn.masks import AttentionMask


def serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a block holds all keys of a head, and there are enough of them: csrc/attention/short_backward.h."""
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
) -> None:
    """Fills dq, dk and dv. lse and dlse are contiguous."""
    who, kept = _visibility.elements(mask, q.shape[2], k.shape[2], q.device)
    if k.shape[2] == 0:
        dq.zero_()
    extension(q.device).attention_bwd_short(
        [*map(_visibility.rows, (q, k, v, dout, dq, dk, dv))], (address(lse), address(dlse)),
        _visibility.shape(q, k, v), softmax_scale, who, _visibility.bias(mask),
        address(rng_state), *dropout_constants(dropout_p), DTYPES[q.dtype], device_index(q), stream(q),
    )  # fmt: skip
