"""The position-wise feed-forward network by PyTorch's own operators: the formula, with relu in place."""

from __future__ import annotations

from torch import Tensor

from fastattn._tracing import can_read_values, may_write_in_place
from fastattn.backends.aten.add_layer_norm import dropout_add
from fastattn.backends.cpu_matmul import linear
from fastattn.backends.reference import philox
from fastattn.backends.reference.feed_forward import activate

DIFFERENTIABLE = True


def _dropout(x: Tensor, dropout_p: float, rng_state: Tensor | None) -> Tensor:
    """philox.dropout, by products, which take less time on a CPU than choices."""
    if rng_state is None or not can_read_values(x):
        return philox.dropout(x, dropout_p, rng_state)
    return dropout_add(x, None, dropout_p, rng_state)


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
    """As fastattn.backends.reference.feed_forward.feed_forward, which is the specification."""
    # A matrix: relu in place on a view of one would cost copies in backward.
    hidden = linear(x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0), weight1, bias1)
    in_place = activation == "relu" and may_write_in_place()  # its gradient needs h alone
    hidden = hidden.relu_() if in_place else activate(hidden, activation)
    out = linear(_dropout(hidden, dropout_p, rng_state), weight2, bias2)
    return out.view(*x.shape[:-1], len(weight2))
