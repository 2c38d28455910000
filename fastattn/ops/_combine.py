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
    sinks (H,): floating point, the score for each head, on the scale of the scores; learned or not.
    A query that may attend to nothing has out 0 still. TypeError or ValueError for others.
    Source: Xiao et al. 2023, arXiv:2309.17453; s_aux in transformers.
    """
    _check_result("out", out, lse)
    _checks.check_like("sinks", sinks, "out", out, dtype=False)
    if sinks.shape != (out.shape[-3],):
        raise ValueError(f"sinks has shape {tuple(sinks.shape)}, expected {(out.shape[-3],)}: one for each head")
    sinks = sinks.to(lse.dtype)[:, None]
    return (out * torch.sigmoid(lse - sinks)[..., None]).to(out.dtype), torch.logaddexp(lse, sinks)


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
    sees_none = (lse1 == -torch.inf) & (lse2 == -torch.inf)  # -inf - -inf is NaN
    lse1, lse2 = lse1.masked_fill(sees_none, 0.0), lse2.masked_fill(sees_none, 0.0)
    share1, share2 = (torch.sigmoid(gap)[..., None] for gap in (lse1 - lse2, lse2 - lse1))  # float32, as lse
    return (share1 * out1 + share2 * out2).to(out1.dtype), torch.logaddexp(lse1, lse2).masked_fill(
        sees_none, -torch.inf
    )


def _check_result(name: str, out: Tensor, lse: Tensor) -> None:
    _checks.check_float(name, out)
    _checks.check_like(f"lse of {name}" if name != "out" else "lse", lse, name, out, dtype=False)
    if out.shape[:-1] != lse.shape:
        expected = f"out (B, H, Lq, Dv) and lse (B, H, Lq), got {tuple(out.shape)} and {tuple(lse.shape)}"
        raise ValueError(f"{name} must come from attention with return_lse=True: {expected}")
