"""The CUDA backend of the feed-forward network. Formulas, grids and epilogues: csrc/feed_forward/.

Two of its six products have an epilogue: z = x weight1^T, and dh = dout weight2. cuBLAS computes the product, and one
pointwise kernel does the epilogue (bias, activation, dropout; act', dropout, the columns' sums). Inside
use_gemm_backend(GemmBackend.SM90) our kernel for Hopper computes product and epilogue; no record yet shows it to be
faster. The other products are always cuBLAS's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.backends.constants import DTYPES, GATED
from fastattn.backends.cuda import compute_capability, extension, refuse_device

_NUMBERS = {"relu": 0, "gelu": 1, "gelu_tanh": 2, "silu": 3}  # as csrc/feed_forward/feed_forward.h has them
# The number of the function that acts on z or its gate, and whether it is gated.
ACTIVATIONS = {name: (number, False) for name, number in _NUMBERS.items()}
ACTIVATIONS |= {name: (_NUMBERS[gate], True) for name, gate in GATED.items()}


class GemmBackend(IntEnum):
    """What computes a product that has an epilogue: csrc/feed_forward/bind.h."""

    SM90 = 0
    CUBLAS = 1  # and a pointwise kernel


_gemm_backend = GemmBackend.CUBLAS


@contextmanager
def use_gemm_backend(backend: GemmBackend) -> Iterator[None]:
    """In this context it computes the products with an epilogue, where the GPU and the shapes allow it."""
    global _gemm_backend
    before, _gemm_backend = _gemm_backend, backend
    try:
        yield
    finally:
        _gemm_backend = before


def unsupported_reason(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str,
    dropout_p: float,
) -> str | None:
    """None, or what is not supported and what the call has."""
    if reason := refuse_device(x):
        return reason
    if x.dtype not in DTYPES:
        return f"the CUDA feed-forward takes float32, bfloat16 and float16, got {x.dtype}"
    return None


def choose_gemm_backend(a: Tensor, b: Tensor, d_inner: int) -> GemmBackend:
    """What computes the product of a (tokens, depth) and b, which is weight1 or weight2.

    Our kernel needs a 16-bit type in whole aligned vectors of 16 bytes.
    """
    if _gemm_backend == GemmBackend.CUBLAS or a.dtype == torch.float32 or compute_capability(a) != 90:
        return GemmBackend.CUBLAS
    tokens, depth = a.shape
    if tokens * depth == 0 or tokens >= 2**30 or depth % 8 or d_inner % 8:
        return GemmBackend.CUBLAS
    if not (a.is_contiguous() and b.is_contiguous()) or (a.data_ptr() | b.data_ptr()) % 16:
        return GemmBackend.CUBLAS
    return _gemm_backend


def feed_forward_hidden(
    x: Tensor, weight1: Tensor, bias1: Tensor | None, activation: str, dropout_p: float, rng_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x: (tokens, d_model) contiguous; weight1: (d_inner, d_model), gated (2 * d_inner, d_model).

    Returns h (tokens, d_inner) and what the backward needs: for relu h itself, else z, as wide as weight1.
    """
    tokens, columns = x.shape[0], weight1.shape[0]
    number, gated = ACTIVATIONS[activation]
    d_inner = columns // 2 if gated else columns
    saves_z = activation != "relu"
    gemm = choose_gemm_backend(x, weight1, d_inner)
    if gemm == GemmBackend.CUBLAS:
        z = F.linear(x, weight1, bias1)
        h = torch.empty(tokens, d_inner, dtype=x.dtype, device=x.device) if saves_z else z
        tensors = z, None, None, None, h
    else:
        h = torch.empty(tokens, d_inner, dtype=x.dtype, device=x.device)
        z = torch.empty(tokens, columns, dtype=x.dtype, device=x.device) if saves_z else h
        tensors = x, weight1, _aligned(bias1), z if saves_z else None, h
    extension(x.is_cuda).feed_forward_fwd(int(gemm), *tensors, number, gated, dropout_p, rng_state)
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
    """weight2: (d_out, d_inner); the others as in feed_forward_hidden. Returns out (tokens, d_out), and what
    feed_forward_hidden saves for the backward."""
    h, saved = feed_forward_hidden(x, weight1, bias1, activation, dropout_p, rng_state)
    return F.linear(h, weight2, bias2), (saved,)


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
    """dout: (tokens, d_out), any strides; saved: from feed_forward_fwd, whose arguments the others are.

    Returns dx, dweight1, dbias1, dweight2, dbias2, shaped and typed as their inputs; None for an absent bias.
    """
    dout, (z,), module = dout.contiguous(), saved, extension(x.is_cuda)  # relu: z is h
    tokens, d_inner, columns = dout.shape[0], weight2.shape[1], weight1.shape[0]
    recomputed = None if activation == "relu" else torch.empty(tokens, d_inner, dtype=x.dtype, device=x.device)
    h = z if recomputed is None else recomputed
    gemm = choose_gemm_backend(dout, weight2, d_inner)
    if gemm == GemmBackend.CUBLAS:
        dh = torch.mm(dout, weight2)
        dz = torch.empty_like(z) if columns > d_inner else dh
        operands = dh, None
    else:
        dz = torch.empty_like(z)
        operands = dout, weight2
    partial = dbias1 = None
    if bias1 is not None:
        rows = -(-tokens // module.FEED_FORWARD_SUM_ROWS)
        partial = torch.empty(rows * columns, dtype=torch.float32, device=x.device)
        dbias1 = torch.empty(columns, dtype=x.dtype, device=x.device) if tokens > 0 else torch.zeros_like(bias1)
    tensors = *operands, z, dz, recomputed, partial, dbias1
    module.feed_forward_bwd(int(gemm), *tensors, *ACTIVATIONS[activation], dropout_p, rng_state)
    dbias2 = None if bias2 is None else dout.sum(0)
    return torch.mm(dz, weight1), torch.mm(dz.t(), x), dbias1, torch.mm(dout.t(), h), dbias2


def _aligned(bias: Tensor | None) -> Tensor | None:
    """As our kernel reads it: contiguous, at a multiple of 16 bytes."""
    if bias is None or (bias.is_contiguous() and bias.data_ptr() % 16 == 0):
        return bias
    return bias.clone(memory_format=torch.contiguous_format)
