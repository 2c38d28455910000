"""The position-wise feed-forward network by PyTorch's own operators: each bias rides in its matrix product."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fastattn.reference import philox
from fastattn.reference.feed_forward import activate


def why_not(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str,
    dropout_p: float,
) -> str | None:
    """PyTorch serves everything."""
    return None


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
    """As fastattn.reference.feed_forward.feed_forward, which is the specification."""
    hidden = activate(F.linear(x, weight1, bias1), activation)
    return F.linear(philox.dropout(hidden, dropout_p, rng_state), weight2, bias2)
