"""Public op: masked scaled dot-product attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fastattn import _dispatch
from fastattn.masks import AttentionMask
from fastattn.ops import _arguments as arguments
from fastattn.ops import _library, _weights
from fastattn.reference.philox import draw_rng_state


def _query(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | AttentionMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **options: Any,
) -> tuple[torch.device, tuple[Tensor, Tensor, Tensor, AttentionMask | None, float]]:
    """Check a call's arguments and bring them into the form that backends take: (device, (q, k, v, mask, dropout_p))."""
    arguments.check_float("query", query)
    dtype = arguments.autocast_dtype(query.device)
    if dtype is not None:
        query, key, value = (arguments.cast(t, dtype) if isinstance(t, Tensor) else t for t in (query, key, value))
    alike = arguments.alike(query, key, value)
    for name, t in (("query", query), ("key", key), ("value", value)):
        if not alike:
            arguments.check_like(name, t, "query", query)
        if t.dim() != 4:
            raise ValueError(f"{name} has {t.dim()} dimensions {tuple(t.shape)}, expected 4: (B, H, L, D)")
    B, H, Lq, Dk = query.shape
    Hk, Lk = key.shape[1:3]
    arguments.check_shape("key", key, (B, Hk, Lk, Dk), "(B, Hk, Lk, Dk)")
    arguments.check_shape("value", value, (B, Hk, Lk, value.shape[3]), "(B, Hk, Lk, Dv)")
    if Hk != H and not enable_gqa:
        raise ValueError(f"key has {Hk} heads and query {H}: pass enable_gqa=True for grouped-query attention")
    if Hk != H and (Hk == 0 or H % Hk != 0):
        raise ValueError(f"key has {Hk} heads, which must divide the {H} heads of query")
    if Dk == 0 or value.shape[3] == 0:
        raise ValueError(f"query and value need a head dimension, got {tuple(query.shape)} and {tuple(value.shape)}")
    arguments.check_dropout(dropout_p)
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (int, float))):
        raise TypeError(f"scale must be a number or None, got {type(scale).__name__}")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    mask = AttentionMask.of(attn_mask)
    if is_causal:
        causal = AttentionMask(is_causal=True)
        mask = causal if mask is None else mask & causal
    if mask is not None:
        mask.check(B, H, Lq, Lk, query.device)
    if not query.stride(3) == key.stride(3) == value.stride(3) == 1:
        query, key, value = (t if t.stride(3) == 1 else t.contiguous() for t in (query, key, value))
    return query.device, (query, key, value, mask, float(dropout_p))


@_dispatch.register("attention", _query)
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | AttentionMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: bool = False,
    return_weights: bool | Sequence[int] | Literal["mean", "argmax"] = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """out = dropout(softmax(scale * query key^T + bias, where the mask allows)) value, without storing the scores.

    A drop-in for torch.nn.functional.scaled_dot_product_attention that takes every mask, together with ``is_causal``.

    query (B, H, Lq, Dk), key (B, Hk, Lk, Dk), value (B, Hk, Lk, Dv): float32, bfloat16, float16 (float64 in reference
        and aten), one dtype and device, any strides. Under torch.autocast they are cast to its dtype.
    attn_mask: bool, True = attend, or floating point, added to the scores and differentiable; either broadcasts to
        (B, H, Lq, Lk). Or an AttentionMask, built once a batch and shared by layers.
    dropout_p: the probability of dropping a weight, by the rule of fastattn/reference/philox.py; pass 0.0 in eval.
    is_causal: query i sees key j when j <= i, on top of attn_mask. For other alignments see AttentionMask.
    scale: default Dk ** -0.5.
    enable_gqa: allows Hk < H; query head h reads key head h // (H // Hk).
    return_lse: also return lse (B, H, Lq), float32, the natural logarithm of the softmax's sum, -inf where nothing is
        seen; differentiable.
    return_weights: True: also return the weights after dropout, (B, H, Lq, Lk). A sequence of heads: of those, in that
        order, (B, len, Lq, Lk). "mean": their mean over the heads, (B, Lq, Lk). "argmax", an alignment: int64
        (B, H, Lq), the key with the largest weight before dropout, the first of equal ones, -1 where nothing is seen.
        Weights and mean are differentiable in the backends reference and aten; the kernels recompute them from lse,
        without a gradient, and write nothing of the size of the scores for a mean or an alignment.
    backend: "reference", "aten", "triton" or "cuda"; default the first that can serve, see ``explain``.

    Returns out (B, H, Lq, Dv) in query's dtype, or a tuple (out[, lse][, weights]). A query that sees nothing gives 0.
    Raises TypeError or ValueError naming the argument, RuntimeError if the backend asked for cannot serve.
    Source: Vaswani et al. 2017, equation 1; Dao 2023, FlashAttention-2, arXiv:2307.08691.
    """
    device, call = _query(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    name, module = _dispatch.choose("attention", device, call, backend)
    q, k, v, mask, dropout_p = call
    wanted = _weights.wanted(return_weights, q.shape[1])
    softmax_scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    rng_state = draw_rng_state(device) if dropout_p > 0 else None
    options = (softmax_scale, dropout_p, rng_state)
    with arguments.no_autocast(device):
        if hasattr(module, "attention"):
            out, lse, weights = module.attention(q, k, v, mask, *options, return_lse=return_lse, return_weights=wanted)
        else:
            traced = torch.compiler.is_compiling()
            if traced:
                out, lse = _library.attention(q, k, v, mask, *options, name)
            else:
                out, lse = _Attention.apply(q, k, v, None if mask is None else mask.bias, mask, *options, module)
            weights = None
            if wanted is not None:
                with torch.no_grad():
                    given = (q, k, lse.detach(), mask, *options, wanted)
                    weights = _library.attention_weights(*given, name) if traced else module.attention_weights(*given)
    if not return_lse and wanted is None:
        return out
    return (out,) + ((lse,) if return_lse else ()) + ((weights,) if wanted is not None else ())


class _Attention(torch.autograd.Function):
    """Straight from autograd to the launch. bias is an input of its own so that it gets its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        mask: AttentionMask | None,
        softmax_scale: float,
        dropout_p: float,
        rng_state: Tensor | None,
        module: Any,
    ) -> tuple[Tensor, Tensor]:
        out, lse = module.attention_fwd(q, k, v, mask, softmax_scale, dropout_p, rng_state)
        ctx.save_for_backward(q, k, v, bias, out, lse, rng_state)
        ctx.mask = None if mask is None else mask.with_bias(None)
        ctx.options = (softmax_scale, dropout_p, module)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, bias, out, lse, rng_state = ctx.saved_tensors
        softmax_scale, dropout_p, module = ctx.options
        mask = None if ctx.mask is None else ctx.mask.with_bias(bias)
        dout = torch.zeros_like(out) if dout is None else dout
        options = (softmax_scale, dropout_p, rng_state, ctx.needs_input_grad[3])
        grads = module.attention_bwd(dout, dlse, q, k, v, out, lse, mask, *options, _gradients_as_one(q, k, v))
        return *grads, None, None, None, None, None


def _gradients_as_one(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Memory for dq, dk, dv that lie as q, k, v do, where these are the heads of one product (B, L, all heads' widths):
    so that its own backward finds its gradient in one piece. None where they are not."""
    B, _, L, _ = q.shape
    widths = [t.shape[1] * t.shape[3] for t in (q, k, v)]
    address, N = q.data_ptr(), sum(widths)
    for t, width in zip((q, k, v), widths, strict=True):
        if t.data_ptr() != address or t.stride() != (L * N, t.shape[3], N, 1):
            return None
        address += width * t.element_size()
    parts = q.new_empty(B, L, N).split(widths, -1)
    return tuple(part.unflatten(2, (-1, t.shape[3])).transpose(1, 2) for part, t in zip(parts, (q, k, v), strict=True))
