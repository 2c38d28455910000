"""Masked scaled dot-product attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from fastattn import _dispatch
from fastattn._transforms import differentiable_gradients
from fastattn.masks import AttentionMask, Layout, flatten, unflatten
from fastattn.ops import _arguments as arguments
from fastattn.ops._operator import Operator
from fastattn.reference import attention as reference
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
    """Check a call's arguments and bring them into the form of backends: (device, (q, k, v, mask, dropout_p))."""
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
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (int, float, torch.SymFloat))):
        raise TypeError(f"scale must be a number or None, got {type(scale).__name__}")
    if scale is not None and not -math.inf < scale < math.inf:
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
    return_weights: bool | Literal["mean"] = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """out = dropout(softmax(scale * query key^T + bias, where the mask allows)) value, without storing the scores.

    A drop-in for torch.nn.functional.scaled_dot_product_attention that takes every mask, together with ``is_causal``.

    query (B, H, Lq, Dk), key (B, Hk, Lk, Dk), value (B, Hk, Lk, Dv): float32, bfloat16, float16 (float64 in reference
        and aten), one dtype and device, any strides. Under torch.autocast they are cast to its dtype.
    attn_mask: bool, True = attend, or floating point, added to the scores and differentiable; either broadcasts to
        (B, H, Lq, Lk). Or an AttentionMask, built once a batch and shared by layers.
    dropout_p: the probability of dropping a weight, by the rule of fastattn/reference/philox.py; pass 0.0 in eval.
    is_causal: query i attends to key j when j <= i, on top of attn_mask. For other alignments see AttentionMask.
    scale: default Dk ** -0.5.
    enable_gqa: allows Hk < H; query head h reads key head h // (H // Hk).
    return_lse: also return lse (B, H, Lq), float32, the natural logarithm of the softmax's sum, -inf where a query may
        attend to nothing; differentiable.
    return_weights: True: also return the weights after dropout, (B, H, Lq, Lk). "mean": their mean over the heads,
        (B, Lq, Lk). Differentiable in the backends reference and aten; the kernels recompute them from lse, without a
        gradient, and write nothing of the size of all heads' scores for a mean.
    backend: "reference", "aten", "triton" or "cuda"; default the first that can serve, see ``explain``.

    Values that key padding, the lengths, packing or a band exclude may be NaN and reach nothing; keys and values that
    only attn_mask or a bias hides must be finite, as in PyTorch. A bias of -inf masks. A finite one that moves a whole
    row to where float32 is coarse, such as finfo.min on all keys of a query, leaves the gradients of that row inexact.

    Returns out (B, H, Lq, Dv) in query's dtype, or a tuple (out[, lse][, weights]). A query that may attend to nothing
    gives 0.
    Raises TypeError or ValueError naming the argument, RuntimeError if the backend asked for cannot serve.
    Source: Vaswani et al. 2017, equation 1; Dao 2023, FlashAttention-2, arXiv:2307.08691.
    """
    device, call = _query(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    name, module = _dispatch.choose("attention", device, call, backend)
    q, k, v, mask, dropout_p = call
    wanted = _checked_weights(return_weights, q.shape[1])
    softmax_scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    rng_state = draw_rng_state(device) if dropout_p > 0 else None
    options = (softmax_scale, dropout_p, rng_state)
    with arguments.no_autocast(device):
        if hasattr(module, "attention"):
            out, lse, weights = module.attention(q, k, v, mask, *options, return_lse=return_lse, return_weights=wanted)
        else:
            mask = _NO_MASK if mask is None else mask
            layouts = module.mask_layouts(q, k, v, mask.bias)
            if not _needs_gradient(q, k, v, mask.bias):
                layouts = layouts[:1]
            prepared = [mask.prepare(q.shape[2], k.shape[2], layout, device) for layout in layouts]
            out, lse = _Attention.call(q, k, v, mask.bias, *flatten(prepared), *options, name, remember=mask)
            weights = None
            if wanted is not None:
                prepared = [mask.prepare(q.shape[2], k.shape[2], Layout(), device)]
                with torch.no_grad():
                    given = (q, k, lse.detach(), mask.bias, *flatten(prepared), *options, wanted == "mean", name)
                    weights = (_weights_operator if torch.compiler.is_compiling() else _weights)(*given)
    if not return_lse and wanted is None:
        return out
    return (out,) + ((lse,) if return_lse else ()) + ((weights,) if wanted is not None else ())


def _checked_weights(return_weights: bool | Literal["mean"], heads: int) -> Literal["all", "mean"] | None:
    if not isinstance(return_weights, bool) and return_weights != "mean":
        raise ValueError(f'return_weights must be a bool or "mean", got {return_weights!r}')
    if return_weights == "mean" and heads == 0:
        raise ValueError('return_weights is "mean", and query has no heads')
    return "mean" if return_weights == "mean" else "all" if return_weights else None


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


class _Attention(Operator, name="attention"):
    """The mask comes as `flatten` takes it apart: the forward's layout first, then those of the backward."""

    results, outputs, inputs = 2, 2, 4

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        masks: list[Tensor],
        mask_numbers: list[int],
        softmax_scale: float,
        dropout_p: float,
        rng_state: Tensor | None,
        backend: str,
    ) -> tuple[Tensor, Tensor]:
        mask, *_ = unflatten(masks, mask_numbers)
        module = _dispatch.load_backend("attention", backend)
        return module.attention_fwd(q, k, v, bias, mask, softmax_scale, dropout_p, rng_state)

    @staticmethod
    def forward_fake(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        return _in_layout_of(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> None:
        q, k, v, bias, masks, mask_numbers, softmax_scale, dropout_p, rng_state, backend = inputs
        of_backward = masks[mask_numbers[2].bit_count() :], mask_numbers[3:]
        ctx.save_for_backward(q, k, v, *outputs, bias, rng_state, *of_backward[0])
        ctx.options = (of_backward[1], softmax_scale, dropout_p, backend)

    @staticmethod
    def backward(
        ctx: Any, gradients: Callable[..., Any], dout: Tensor | None, dlse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, bias, rng_state, *masks = ctx.saved_tensors
        mask_numbers, softmax_scale, dropout_p, backend = ctx.options
        dout = torch.zeros_like(out) if dout is None else dout
        needs_dbias = bias is not None and ctx.needs_input_grad[3]
        options = (softmax_scale, dropout_p, rng_state, needs_dbias, backend)
        return gradients(dout, dlse, q, k, v, out, lse, bias, masks, mask_numbers, *options)

    @staticmethod
    def formula_gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, _, _, bias, rng_state, *_ = ctx.saved_tensors
        _, softmax_scale, dropout_p, _ = ctx.options

        def formula(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
            mask = ctx.remembered.with_bias(bias)
            return reference.attention(q, k, v, mask, softmax_scale, dropout_p, rng_state)[:2]

        return differentiable_gradients(formula, (q, k, v, bias), (dout, dlse))

    @staticmethod
    def gradients(
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        bias: Tensor | None,
        masks: list[Tensor],
        mask_numbers: list[int],
        softmax_scale: float,
        dropout_p: float,
        rng_state: Tensor | None,
        needs_dbias: bool,
        backend: str,
    ) -> tuple[Tensor | None, ...]:
        module = _dispatch.load_backend("attention", backend)
        options = (unflatten(masks, mask_numbers), softmax_scale, dropout_p, rng_state, needs_dbias)
        return module.attention_bwd(dout, dlse, q, k, v, out, lse, bias, *options)

    @staticmethod
    def gradients_fake(*arguments: Any) -> tuple[Tensor | None, ...]:
        _, _, q, k, v, _, _, bias, *_, needs_dbias, _ = arguments
        return *(_in_layout_of(t, t.shape[3]) for t in (q, k, v)), torch.empty_like(bias) if needs_dbias else None


def _in_layout_of(x: Tensor, head_dim: int) -> Tensor:
    """As backends allocate: heads inside positions where x has them so, the layout of a projection viewed as heads."""
    B, H, L, _ = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty(B, L, H, head_dim).transpose(1, 2)
    return x.new_empty(B, H, L, head_dim)


def _weights(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    masks: list[Tensor],
    mask_numbers: list[int],
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
    mean: bool,
    backend: str,
) -> Tensor:
    module = _dispatch.load_backend("attention", backend)
    (mask,) = unflatten(masks, mask_numbers)
    return module.attention_weights(q, k, lse, bias, mask, softmax_scale, dropout_p, rng_state, mean)


_weights_operator = torch.library.custom_op("fastattn::attention_weights", _weights, mutates_args=())


@_weights_operator.register_fake
def _(q: Tensor, k: Tensor, *options: Any) -> Tensor:
    mean = options[-2]
    return q.new_empty(q.shape[0], *([] if mean else [q.shape[1]]), q.shape[2], k.shape[2])


_NO_MASK = AttentionMask()
