"""The CUDA backend of the feed-forward network. Formulas, grids and epilogues: csrc/feed_forward/.

Of its six products two have an epilogue: z = x weight1^T, and dh = dout weight2. cuBLAS computes each of them and one
pointwise kernel follows (bias, activation, dropout; act', dropout, the columns' sums). Inside products_by() a kernel of
ours for Hopper computes the product with what follows; no record yet shows it to be faster. cuBLAS does the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import torch
from torch import Tensor

from fastattn.backends.constants import GATED, dropout_constants
from fastattn.backends.cuda import (
    DTYPES,
    address,
    compute_capability,
    device_index,
    extension,
    refuse_device,
    stream,
)

ACTIVATIONS = {"relu": 0, "gelu": 1, "gelu_tanh": 2, "silu": 3}  # as csrc/feed_forward/feed_forward.h numbers them
SUM_ROWS = 64  # kSumRows


class Route(IntEnum):
    """What computes a product that has an epilogue: csrc/feed_forward/bind.h."""

    SM90 = 0
    CUBLAS = 1  # and a pointwise kernel


_route_of_products = Route.CUBLAS


@contextmanager
def products_by(route: Route) -> Iterator[None]:
    """In this context products with an epilogue take the route, where their GPU and their shapes allow it."""
    global _route_of_products
    before, _route_of_products = _route_of_products, route
    try:
        yield
    finally:
        _route_of_products = before


def unsupported_reason(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str,
    dropout_p: float,
) -> str | None:
    """None, or what is refused and what was got."""
    if reason := refuse_device(x):
        return reason
    if x.dtype not in DTYPES:
        return f"the CUDA feed-forward takes float32, bfloat16 and float16, got {x.dtype}"
    return None


def route_of(a: Tensor, b: Tensor, d_ff: int) -> Route:
    """What computes the product of a (tokens, depth) and b, weight1 or weight2 as it lies.

    Our kernel takes 16-bit types in whole aligned vectors of 16 bytes; anything else is cuBLAS's.
    """
    route = _route_of_products
    if route == Route.CUBLAS or a.dtype == torch.float32:
        return Route.CUBLAS
    tokens, depth = a.shape
    if compute_capability(a) != 90:
        return Route.CUBLAS
    if tokens * depth == 0 or tokens >= 2**30 or depth % 8 or d_ff % 8:
        return Route.CUBLAS
    if not (a.is_contiguous() and b.is_contiguous()) or (a.data_ptr() | b.data_ptr()) % 16:
        return Route.CUBLAS
    return route


def _with_bias(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x @ weight.t() if bias is None else torch.addmm(bias, x, weight.t())


def feed_forward_hidden(
    x: Tensor, weight1: Tensor, bias1: Tensor | None, activation: str, dropout_p: float, rng_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x: (tokens, d) contiguous; weight1: (d_ff, d), gated (2 * d_ff, d). Returns h (tokens, d_ff) and what the
    backward wants: relu h itself, else z, as wide as weight1."""
    (tokens, d), columns = x.shape, weight1.shape[0]
    d_ff = columns // (2 if activation in GATED else 1)
    saves_z = activation != "relu"
    route = route_of(x, weight1, d_ff)
    if route == Route.CUBLAS:
        z = _with_bias(x, weight1, bias1)
        h = torch.empty((tokens, d_ff), dtype=x.dtype, device=x.device) if saves_z else z
        operands, bias, stored = (z, None), None, None
    else:
        h = torch.empty((tokens, d_ff), dtype=x.dtype, device=x.device)
        z = torch.empty((tokens, columns), dtype=x.dtype, device=x.device) if saves_z else h
        operands, bias, stored = (x, weight1), _aligned(bias1), z if saves_z else None
    if h.numel() > 0:
        extension(x.device).feed_forward_fwd(
            route, *map(address, operands), d, address(bias), address(stored), address(h),
            tokens, d_ff, *_how(activation), address(rng_state), *dropout_constants(dropout_p),
            DTYPES[x.dtype], device_index(x), stream(x),
        )  # fmt: skip
    return h, z


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
    """weight2: (d_out, d_ff); the others as in feed_forward_hidden. Returns out (tokens, d_out), and for the backward
    what that returns."""
    h, kept = feed_forward_hidden(x, weight1, bias1, activation, dropout_p, rng_state)
    return _with_bias(h, weight2, bias2), (kept,)


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
    """dout: (tokens, d_out), any strides; saved: from feed_forward_fwd, as the rest.

    Returns dx, dweight1, dbias1, dweight2, dbias2, shaped and typed as their inputs; None where a bias is.
    """
    dout = dout.contiguous()
    (tokens, d_out), d_ff, columns = dout.shape, weight2.shape[1], weight1.shape[0]
    (kept,) = saved
    stored = None if activation == "relu" else torch.empty((tokens, d_ff), dtype=x.dtype, device=x.device)
    h = kept if stored is None else stored
    route = route_of(dout, weight2, d_ff)
    if route == Route.CUBLAS:
        dh = dout @ weight2
        dz = torch.empty_like(kept) if columns > d_ff else dh
        operands = dh, None
    else:
        dz = torch.empty_like(kept)
        operands = dout, weight2
    partial = dbias1 = None
    if bias1 is not None:
        partial = torch.empty((-(-tokens // SUM_ROWS), columns), dtype=torch.float32, device=x.device)
        dbias1 = torch.zeros_like(bias1) if kept.numel() == 0 else torch.empty(columns, dtype=x.dtype, device=x.device)
    if kept.numel() > 0:
        extension(x.device).feed_forward_bwd(
            route, *map(address, operands), d_out, address(kept), address(dz), address(stored),
            address(partial), address(dbias1), tokens, d_ff, *_how(activation),
            address(rng_state), *dropout_constants(dropout_p), DTYPES[x.dtype], device_index(x), stream(x),
        )  # fmt: skip
    dbias2 = None if bias2 is None else dout.sum(0)
    return dz @ weight1, dz.t() @ x, dbias1, dout.t() @ h, dbias2


def _how(activation: str) -> tuple[int, bool]:
    """The number of what acts on z or its gate, and whether it is gated."""
    return ACTIVATIONS[GATED.get(activation, activation)], activation in GATED


def _aligned(bias: Tensor | None) -> Tensor | None:
    """As our products read it: contiguous, at a multiple of 16 bytes."""
    if bias is None or (bias.is_contiguous() and bias.data_ptr() % 16 == 0):
        return bias
    return bias.clone(memory_format=torch.contiguous_format)
