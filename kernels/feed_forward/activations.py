"""Activations and their slopes in Triton, on float32 tiles. tanh is written through the exponential function.

A gated form applies one of them to its gate: reglu relu, geglu gelu, geglu_tanh gelu_tanh, swiglu silu.
"""

import triton
import triton.language as tl

from fastattn.backends import constants

GATED_FORMS = constants.GATED

SQRT_HALF: tl.constexpr = tl.constexpr(0.7071067811865476)
INV_SQRT_TAU: tl.constexpr = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)
TANH_SCALE: tl.constexpr = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
TANH_CUBIC: tl.constexpr = tl.constexpr(0.044715)
# Write tensor * constant below: the interpreter of triton 3.9 makes a constant of constant * tensor.


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """act(z)."""
    if ACTIVATION == "relu":
        return tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if ACTIVATION == "gelu":
        return 0.5 * z * (1 + tl.erf(z * SQRT_HALF))
    if ACTIVATION == "gelu_tanh":  # (1 + tanh(u)) / 2 = sigmoid(2 u)
        return z * tl.sigmoid((z + z * TANH_CUBIC * z * z) * TANH_SCALE)
    return z * tl.sigmoid(z)


@triton.jit
def activate_and_slope(z, ACTIVATION: tl.constexpr):
    """act(z) and act'(z)."""
    if ACTIVATION == "relu":
        return activate(z, "relu"), tl.where(z <= 0, 0.0, 1.0)
    if ACTIVATION == "gelu":
        below = 0.5 * (1 + tl.erf(z * SQRT_HALF))
        return z * below, below + z * INV_SQRT_TAU * tl.exp(-0.5 * z * z)
    if ACTIVATION == "gelu_tanh":
        twice_u = (z + z * TANH_CUBIC * z * z) * TANH_SCALE
        power = tl.exp(-tl.abs(twice_u))
        inverse = 1 / (1 + power)
        smaller = power * inverse  # of share and 1 - share
        share = tl.where(twice_u < 0, smaller, 1 - smaller)
        rise = smaller * inverse  # share * (1 - share), which would cancel, and z^3 makes much of it
        return z * share, share + z * rise * TANH_SCALE * (1 + z * (3 * TANH_CUBIC) * z)
    share = tl.sigmoid(z)
    return z * share, share + z * share * (1 - share)
