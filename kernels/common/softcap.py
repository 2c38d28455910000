"""A soft limit for scores, on the device."""

import triton
import triton.language as tl


@triton.jit
def cap(scores, softcap):
    """softcap * tanh(scores / softcap), and its slope, 1 - tanh^2.

    Up to 0.5 tanh is a polynomial. There the formula with e = exp(-2 |x|) cancels: an error of 1e-7 in tanh is one of
    softcap * 1e-7 in the score, however small that is. The coefficients are a fit to (tanh(x) / x - 1) / x^2, with an
    error of tanh of 1.4e-8, relatively.
    """
    x = scores * (1.0 / softcap)
    square = x * x
    cubic = -0.3333314955 + square * (0.1332598776 + square * (-0.0530529507 + square * 0.0172569938))
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    tanh = tl.where(tl.abs(x) < 0.5, x + x * (square * cubic), tl.where(x < 0.0, -far, far))
    return softcap * tanh, 1.0 - tanh * tanh
