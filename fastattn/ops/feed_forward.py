"""The position-wise feed-forward network."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from fastattn import backends
from fastattn.backends import Backend, Implementation
from fastattn.backends.calls import FeedForwardCall
from fastattn.backends.constants import GATED
from fastattn.backends.reference import feed_forward as reference
from fastattn.backends.reference.feed_forward import ACTIVATIONS
from fastattn.backends.reference.feed_forward import activate as activate  # for fastattn.nn
from fastattn.backends.reference.philox import draw_rng_state
from fastattn.ops import _autocast, _checks, _watch
from fastattn.ops._autograd import Grads, Needs, Operator

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "reglu", "geglu", "geglu_tanh", "swiglu"]


def _validate(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: Activation = "relu",
    dropout_p: float = 0.0,
    **options: Any,
) -> tuple[torch.device, tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Activation, float]]:
    """Check a call's arguments. Returns (device, inputs): the inputs are what unsupported_reason takes."""
    if activation not in ACTIVATIONS and activation not in GATED:
        raise ValueError(f"activation must be one of {', '.join((*ACTIVATIONS, *GATED))}, got {activation!r}")
    x, weight1, bias1, weight2, bias2 = _autocast.autocast_inputs(x, weight1, bias1, weight2, bias2)
    biases = (weight1 if bias1 is None else bias1, weight2 if bias2 is None else bias2)
    is_uniform = _checks.same_dtype_and_device(x, weight1, weight2, *biases)
    if not is_uniform:
        _checks.check_float("x", x)
    if x.dim() == 0:
        raise ValueError("x has no dimensions, expected (..., d)")
    if not is_uniform:
        for name, t in (("weight1", weight1), ("bias1", bias1), ("weight2", weight2), ("bias2", bias2)):
            if t is not None or name in ("weight1", "weight2"):
                _checks.check_like(name, t, "x", x)
    if weight1.dim() != 2 or weight2.dim() != 2:
        raise ValueError(f"weight1 and weight2 must be matrices, got {tuple(weight1.shape)} and {tuple(weight2.shape)}")
    d, (rows, halves) = x.shape[-1], (weight1.shape[0], 2 if activation in GATED else 1)
    _checks.check_shape("weight1", weight1, (rows, d), "(d_ff, d) or, for a gated activation, (2 * d_ff, d)")
    if rows % halves:
        raise ValueError(f"weight1 has {rows} rows, but the gated activation {activation!r} needs an even number")
    d_ff = weight2.shape[1]
    if halves == 2 and rows == d_ff > 0:
        expected = f"(2 * d_ff, d) = {(2 * d_ff, d)} for the gated activation {activation!r}"
        raise ValueError(f"weight1 has shape {tuple(weight1.shape)}, expected {expected}, as weight2 has d_ff = {d_ff}")
    _checks.check_shape("weight2", weight2, (weight2.shape[0], rows // halves), "(d_out, d_ff)")
    if bias1 is not None:
        _checks.check_shape("bias1", bias1, (rows,), "the rows of weight1")
    if bias2 is not None:
        _checks.check_shape("bias2", bias2, (weight2.shape[0],), "the rows of weight2")
    _checks.check_dropout(dropout_p)
    return x.device, (x, weight1, bias1, weight2, bias2, activation, float(dropout_p))


@backends.register("feed_forward", _validate)
def feed_forward(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: Activation = "relu",
    dropout_p: float = 0.0,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """out = dropout(act(x weight1^T + bias1)) weight2^T + bias2.

    x (..., d): float32, bfloat16, float16 (float64 in reference and aten); weights as torch.nn.Linear holds them, in
        x's dtype. Under torch.autocast all are cast to its dtype.
    activation: "relu", "gelu", "gelu_tanh", "silu", with weight1 (d_ff, d) and bias1 (d_ff,); or, gated, "reglu",
        "geglu", "geglu_tanh", "swiglu", with weight1 (2 * d_ff, d): act(first half) * second half.
    weight2 (d_out, d_ff), bias2 (d_out,): of the second linear map. Biases may be None.
    dropout_p: the probability of dropping a hidden unit; 0.0 in eval. The rule: fastattn/backends/reference/philox.py.
    backend: "reference", "aten", "triton" or "cuda"; default the first that supports the call, see ``explain``.

    Returns (..., d_out) in x's dtype.
    Raises TypeError or ValueError naming the argument, RuntimeError if the backend asked for does not support it.
    Source: Vaswani et al. 2017, section 3.3; Shazeer 2020, "GLU Variants Improve Transformer", arXiv:2002.05202.
    """
    device, inputs = _validate(x, weight1, bias1, weight2, bias2, activation, dropout_p)
    chosen = backends.choose("feed_forward", device, inputs, backend)
    rng_state = draw_rng_state(device, chosen.name) if dropout_p > 0 else None
    op_args = *inputs, rng_state
    with _autocast.no_autocast(device):
        return _watch.run("feed_forward", feed_forward_unchecked, chosen, reference.feed_forward, op_args)


def feed_forward_unchecked(chosen: Implementation, x: Tensor, *op_args: Any) -> Tensor:
    """``feed_forward`` of a call that is known to be valid, by the chosen backend, without torch.autocast.

    x, op_args: as the reference takes them."""
    if chosen.differentiable:
        return chosen.module.feed_forward(x, *op_args)
    *parameters, activation, dropout_p, rng_state = op_args
    matrix = x if x.dim() == 2 and x.is_contiguous() else _checks.as_matrix(x)
    call = FeedForwardCall._make((matrix, *parameters, rng_state, activation, dropout_p))
    (out,) = _FeedForward.apply(call, chosen)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1])


class _FeedForward(Operator, name="feed_forward"):
    """Saved is the hidden layer, after relu or before another activation."""

    results, outputs, inputs, call = 1, 2, 5, FeedForwardCall

    @staticmethod
    def forward(call: FeedForwardCall, backend: Implementation) -> tuple[Tensor, Tensor]:
        return backend.module.feed_forward_fwd(call)

    @staticmethod
    def forward_fake(call: FeedForwardCall, backend: Implementation) -> tuple[Tensor, Tensor]:
        rows = call.x.shape[0]
        return call.x.new_empty(rows, call.weight2.shape[0]), call.x.new_empty(rows, call.weight1.shape[0])

    @staticmethod
    def keep(call: FeedForwardCall, outputs: tuple[Tensor, ...]) -> tuple[FeedForwardCall, Grads]:
        return call, outputs[1:]

    @staticmethod
    def gradients(dresults: Grads, call: FeedForwardCall, saved: Grads, needs: Needs, backend: Implementation) -> Grads:
        dout = dresults[0].contiguous()
        dz, h, dbias1 = backend.module.feed_forward_dz(dout, call, *saved)
        return (
            torch.mm(dz, call.weight1) if needs[0] else None,
            torch.mm(dz.t(), call.x) if needs[1] else None,
            dbias1.to(call.x.dtype) if needs[2] else None,
            torch.mm(dout.t(), h) if needs[3] else None,
            dout.sum(0) if needs[4] else None,
        )

    @staticmethod
    def gradients_fake(dresults: Grads, call: FeedForwardCall, saved: Grads, needs: Needs, *_: Any) -> Grads:
        return tuple(call.x.new_empty(t.shape) if need else None for t, need in zip(call[:5], needs, strict=True))
