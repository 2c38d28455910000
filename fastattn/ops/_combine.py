"""What can be computed of the results of attention, out (B, H, Lq, Dv) and lse (B, H, Lq), exactly and with gradients:
attention sinks, and attention to keys of which each call had a part. Plain PyTorch on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.ops import _checks

Result = tuple[Tensor, Tensor]


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Result:
    """out and lse of an attention whose softmax has one more score, of a key whose value is 0.

    out (B, H, Lq, Dv), lse (B, H, Lq): of ``scaled_dot_product_attention(..., return_lse=True)``.
    sinks (H,): floating point, the score for each head, on the scale of the scores; learned or not. -inf is no sink.
        Or (B, H, Lq), for each query.
    A query that may attend to nothing has out 0 still. TypeError or ValueError for others.
    Source: Xiao et al. 2023, arXiv:2309.17453; s_aux in transformers.
    """
    _check_result("out", out, lse)
    _checks.check_like("sinks", sinks, "out", out, dtype=False)
    if sinks.shape != (out.shape[-3],) and sinks.shape != lse.shape:
        expected = f"{(out.shape[-3],)}: one for each head, or {tuple(lse.shape)}: one for each query"
        raise ValueError(f"sinks has shape {tuple(sinks.shape)}, expected {expected}")
    sinks = sinks.to(lse.dtype)
    gap, lse = _gap_and_sum(lse, sinks[:, None] if sinks.dim() == 1 else sinks)
    return (out * torch.sigmoid(gap)).to(out.dtype), lse


def merge(first: Result, second: Result) -> Result:
    """out and lse of an attention to the keys of two calls together.

    first, second: (out, lse) of one query tensor with the keys and the mask of each. With dropout each call drops
    weights of its keys. TypeError or ValueError for what does not fit.
    Source: Dao et al. 2023, Flash-Decoding.
    """
    for name, result in (("first", first), ("second", second)):
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"{name} must be a tuple (out, lse), got {type(result).__name__}")
        _check_result(name, *result)
    (out1, lse1), (out2, lse2) = first, second
    _checks.check_like("second", out2, "first", out1)
    if out1.shape != out2.shape:
        raise ValueError(f"first has out of shape {tuple(out1.shape)}, and second of shape {tuple(out2.shape)}")
    gap, lse = _gap_and_sum(lse1, lse2)
    return (torch.sigmoid(gap) * out1 + torch.sigmoid(-gap) * out2).to(out1.dtype), lse  # shares in float32, as lse


def _gap_and_sum(lse1: Tensor, lse2: Tensor) -> Result:
    """lse1 - lse2 (.., 1), whose sigmoid is the share of the first, and the lse of both."""
    sees_none = (lse1 == -torch.inf) & (lse2 == -torch.inf)  # -inf - -inf is NaN
    lse1, lse2 = lse1.masked_fill(sees_none, 0.0), lse2.masked_fill(sees_none, 0.0)
    return (lse1 - lse2)[..., None], torch.logaddexp(lse1, lse2).masked_fill(sees_none, -torch.inf)


def _check_result(name: str, out: Tensor, lse: Tensor) -> None:
    _checks.check_float(name, out)
    _checks.check_like(f"lse of {name}" if name != "out" else "lse", lse, name, out, dtype=False)
    if out.shape[:-1] != lse.shape:
        expected = f"out (B, H, Lq, Dv) and lse (B, H, Lq), got {tuple(out.shape)} and {tuple(lse.shape)}"
        raise ValueError(f"{name} must come from attention with return_lse=True: {expected}")
