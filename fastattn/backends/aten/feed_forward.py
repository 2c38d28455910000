"""The position-wise feed-forward network by PyTorch's own operators: the formula, with relu in place."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn._tracing import can_read_values, may_write_in_place
from fastattn.backends.aten.add_layer_norm import dropout_add
from fastattn.backends.constants import dropout_scale
from fastattn.backends.cpu_matmul import linear, mm, product
from fastattn.backends.reference import philox
from fastattn.backends.reference.feed_forward import activate

DIFFERENTIABLE = True


def _dropout(x: Tensor, dropout_p: float, rng_state: Tensor | None) -> Tensor:
    """philox.dropout, by products, which take less time on a CPU than choices. In float16 x may be a gradient that is
    inf, and inf * 0 would be NaN."""
    if rng_state is None or x.dtype == torch.float16 or not can_read_values(x):
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


def feed_forward_fwd(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str,
    dropout_p: float,
    rng_state: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """As feed_forward of a matrix x, and what the backward reads: the hidden units, and for others than relu what they
    are made of."""
    z = product(x, weight1, bias1)
    hidden = z.relu_() if activation == "relu" else activate(z, activation)
    hidden = _dropout(hidden, dropout_p, rng_state)
    return product(hidden, weight2, bias2), (hidden,) if activation == "relu" else (hidden, z)


def feed_forward_bwd(
    dout: Tensor,
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str,
    dropout_p: float,
    rng_state: Tensor | None,
    saved: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
    """Gradients of x, weight1, bias1, weight2 and bias2; None for an absent bias."""
    hidden, dhidden = saved[0], mm(dout, weight2)
    if activation == "relu":  # what was dropped is 0 too
        dz = torch.ops.aten.threshold_backward.default(dhidden, hidden, 0)
        if rng_state is not None:
            dz.mul_(dropout_scale(dropout_p))
    else:
        dhidden = _dropout(dhidden, dropout_p, rng_state)
        with torch.enable_grad():
            z = saved[1].detach().requires_grad_()
            made = activate(z, activation)
        (dz,) = torch.autograd.grad(made, z, dhidden)
    dbias1, dbias2 = (None if b is None else d.sum(0) for b, d in ((bias1, dz), (bias2, dout)))
    return mm(dz, weight1), mm(dz.t(), x), dbias1, mm(dout.t(), hidden), dbias2
