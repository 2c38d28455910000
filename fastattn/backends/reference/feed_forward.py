"""The position-wise feed-forward network, the formula.

    out = dropout(act(x weight1^T + bias1)) weight2^T + bias2

Source: Vaswani et al. 2017, section 3.3; gated forms: Shazeer 2020, "GLU Variants Improve Transformer". There the first
half of weight1's rows makes the gate and the second half the value: act(x G^T) * (x U^T).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.backends.constants import GATED
from fastattn.backends.reference import philox

DIFFERENTIABLE = True


def _gelu_tanh(z: Tensor) -> Tensor:
    return F.gelu(z, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": F.silu,
}


def activate(z: Tensor, activation: str) -> Tensor:
    """Pre-activation (..., d_ff), or (..., 2 * d_ff) for a gated form, -> hidden (..., d_ff)."""
    if activation in GATED:
        gate, up = z.chunk(2, dim=-1)
        return ACTIVATIONS[GATED[activation]](gate) * up
    return ACTIVATIONS[activation](z)


def feed_forward(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str,
    dropout_p: float,
    rng_state: Tensor | None,
) -> Tensor:
    """x (..., d), weight1 (d_ff or 2 * d_ff, d), weight2 (d_out, d_ff) -> (..., d_out)."""
    hidden = activate(F.linear(x, weight1, bias1), activation)
    return F.linear(philox.dropout(hidden, dropout_p, rng_state), weight2, bias2)
