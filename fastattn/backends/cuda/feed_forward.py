"""The CUDA backend of the feed-forward network. Formulas and grids: csrc/feed_forward/.

cuBLAS computes all six products. After z = x weight1^T + bias1, and after dh = dout weight2, one kernel does what is
pointwise: activation and dropout; act', dropout and the columns' sums.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.backends.calls import FeedForwardCall
from fastattn.backends.constants import DTYPES, GATED
from fastattn.backends.cuda import extension, refuse_device

_NUMBERS = {"relu": 0, "gelu": 1, "gelu_tanh": 2, "silu": 3}  # as csrc/feed_forward/feed_forward.h has them
# The number of the function that acts on z or its gate, and whether it is gated.
ACTIVATIONS = {name: (number, False) for name, number in _NUMBERS.items()}
ACTIVATIONS |= {name: (_NUMBERS[gate], True) for name, gate in GATED.items()}


def unsupported_reason(x: Tensor, *_: Any) -> str | None:
    """None, or what is not supported and what the call has."""
    if reason := refuse_device(x):
        return reason
    if x.dtype not in DTYPES:
        return f"the CUDA feed-forward takes float32, bfloat16 and float16, got {x.dtype}"
    return None


def feed_forward_fwd(call: FeedForwardCall) -> tuple[Tensor, Tensor]:
    """out (tokens, d_out), and what the backward needs: for relu h (tokens, d_inner), else z, as wide as weight1."""
    x, weight1, bias1, weight2, bias2, rng_state, activation, dropout_p = call
    number, gated = ACTIVATIONS[activation]
    z = F.linear(x, weight1, bias1)
    h = z if activation == "relu" else torch.empty(len(x), weight2.shape[1], dtype=x.dtype, device=x.device)
    extension(x.is_cuda).feed_forward_fwd(z, h, number, gated, dropout_p, rng_state)
    return F.linear(h, weight2, bias2), z


def feed_forward_dz(dout: Tensor, call: FeedForwardCall, z: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """dout: (tokens, d_out) contiguous; z: from feed_forward_fwd, with relu it is h.

    Returns dz, the gradient of x weight1^T + bias1; h, which weight2 multiplies; and dbias1, None without a bias1.
    """
    x, weight1, bias1, weight2, _, rng_state, activation, dropout_p = call
    module = extension(x.is_cuda)
    tokens, d_inner, columns = dout.shape[0], weight2.shape[1], weight1.shape[0]
    hidden = None if activation == "relu" else torch.empty(tokens, d_inner, dtype=x.dtype, device=x.device)
    h = z if hidden is None else hidden
    dh = torch.mm(dout, weight2)
    dz = torch.empty_like(z) if columns > d_inner else dh
    partial = dbias1 = None
    if bias1 is not None:
        rows = -(-tokens // module.FEED_FORWARD_SUM_ROWS)
        partial = torch.empty(rows * columns, dtype=torch.float32, device=x.device)
        dbias1 = torch.empty(columns, dtype=x.dtype, device=x.device) if tokens > 0 else torch.zeros_like(bias1)
    tensors = dh, z, dz, hidden, partial, dbias1
    module.feed_forward_bwd(*tensors, *ACTIVATIONS[activation], dropout_p, rng_state)
    return dz, h, dbias1
