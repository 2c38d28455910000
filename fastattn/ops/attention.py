"""Masked scaled dot-product attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastattn import backends
from fastattn._tracing import is_traced
from fastattn.backends import Backend, Implementation
from fastattn.backends.calls import AttentionCall
from fastattn.backends.reference.philox import draw_rng_state
from fastattn.masks import AttentionMask, PreparedMask, prepare
from fastattn.ops import _autocast, _checks, _watch
from fastattn.ops._autograd import Grads, Needs, Operator


def _validate(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | AttentionMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    softcap: float | None = None,
    return_weights: bool = False,
    return_lse: bool = False,
    **options: Any,
) -> tuple[torch.device, tuple[Any, ...]]:
    """Check a call's arguments. Returns (device, inputs), the inputs as backends take them."""
    query, key, value = _autocast.autocast_inputs(query, key, value)
    if not _checks.same_dtype_and_device(query, key, value):
        _checks.check_float("query", query)
        for name, t in (("key", key), ("value", value)):
            _checks.check_like(name, t, "query", query)
    q, k, v = query.shape, key.shape, value.shape
    fits = len(q) == len(k) == len(v) == 4 and q[0] == k[0] == v[0] and k[1] == v[1]
    if not (fits and (q[1] == k[1] or (enable_gqa and q[1] > 0 < k[1] and q[1] % k[1] == 0))):
        query, key, value, attn_mask = _broadcast(query, key, value, attn_mask, enable_gqa)
        q, k, v = query.shape, key.shape, value.shape
    (B, H, Lq, Dk), (_, Hk, Lk, _), Dv = q, k, v[3]
    if k[0] != B or k[3] != Dk or v[0] != B or v[1] != Hk or v[2] != Lk:
        _checks.check_shape("key", key, (B, Hk, Lk, Dk), "(B, Hk, Lk, Dk)")
        _checks.check_shape("value", value, (B, Hk, Lk, Dv), "(B, Hk, Lk, Dv)")
    if Dk == 0 or Dv == 0:
        raise ValueError(f"query and value need a head dimension, got {tuple(query.shape)} and {tuple(value.shape)}")
    flags = {"return_lse": return_lse, "return_weights": return_weights}
    _checks.check_flags(is_causal=is_causal, enable_gqa=enable_gqa, **flags)
    _checks.check_dropout(dropout_p)
    if scale is not None and not isinstance(scale, torch.SymFloat):
        _checks.check_finite("scale", scale)
    if softcap is not None:
        _checks.check_positive("softcap", softcap)
        softcap = float(softcap)
    if isinstance(attn_mask, Tensor) and attn_mask.dtype == torch.bool and attn_mask.dim() == 3:
        if attn_mask.shape[0] == B == H > 1:
            advice = "pass attn_mask[:, None] if it holds one mask for each sequence, attn_mask[None] for each head"
            raise ValueError(f"attn_mask has shape {tuple(attn_mask.shape)}, and both B and H are {B}: {advice}")
    mask = attn_mask if isinstance(attn_mask, AttentionMask) else AttentionMask.of(attn_mask)
    if is_causal:
        causal = AttentionMask(is_causal=True)
        mask = causal if mask is None else mask & causal
    if mask is not None:
        mask.check(B, H, Lq, Lk, query.device)
        if mask.bias is not None:
            mask = mask.with_one_bias(Lq, Lk, torch.promote_types(query.dtype, torch.float32))
    if not query.stride(3) == key.stride(3) == value.stride(3) == 1:
        query, key, value = (t if t.stride(3) == 1 else t.contiguous() for t in (query, key, value))
    return query.device, (query, key, value, mask, float(dropout_p), softcap, return_weights, return_lse)


def _broadcast(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | AttentionMask | None, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | AttentionMask | None]:
    """Tensors (..., L, D) as (B, H, L, D): B all dimensions before the heads, of the one size that they broadcast to.

    key and value get the heads of query, or equally many that query's heads share.
    """
    named = {"query": query, "key": key, "value": value}
    for name, t in named.items():
        if t.dim() < 2:
            raise ValueError(f"{name} has shape {tuple(t.shape)}, expected (..., L, D)")
        named[name] = t[(None,) * (4 - t.dim())] if t.dim() < 4 else t
    batch = _common_shape(*(t.shape[:-3] for t in named.values()))
    heads = [t.shape[-3] for t in named.values()]
    if enable_gqa:
        H = heads[0]
        for name, h in zip(named, heads, strict=True):
            if h != H and (h == 0 or H % h != 0):
                raise ValueError(f"{name} has {h} heads, which must divide the {H} heads of query")
    elif 1 in heads or heads[0] == heads[1] == heads[2]:
        (H,) = _common_shape(*((h,) for h in heads))
    else:
        found = f"query, key and value have {heads[0]}, {heads[1]} and {heads[2]} heads"
        raise ValueError(f"{found} in the layout (B, H, L, D), expected equally many, or enable_gqa=True to share them")
    shared = heads[1] == heads[2] and heads[0] == H > 0  # the ops repeat heads of keys and values by themselves
    for name, t in named.items():
        h = t.shape[-3]
        if h != H and not (shared and name != "query"):
            t = t.repeat_interleave(H // h, dim=-3)
        if t.shape[:-3] != batch:
            t = t.expand(*batch, *t.shape[-3:]).contiguous()
        named[name] = t.flatten(0, -4)
    if isinstance(attn_mask, Tensor) and attn_mask.dim() > 3:
        if any(n != 1 for n in attn_mask.shape[:-3]):
            if attn_mask.dim() > len(batch) + 3 or _common_shape(attn_mask.shape[:-3], batch) != batch:
                raise ValueError(f"attn_mask has shape {tuple(attn_mask.shape)}, expected to broadcast to the scores")
            attn_mask = attn_mask.expand(*batch, *attn_mask.shape[-3:])
        attn_mask = attn_mask.flatten(0, -4)
    return named["query"], named["key"], named["value"], attn_mask


def _common_shape(*shapes: torch.Size | tuple[int, ...]) -> torch.Size:
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError as error:
        raise ValueError(f"query, key, value or attn_mask have dimensions that do not broadcast: {error}") from None


class InvalidValue(ValueError, RuntimeError):
    """Also what torch's own function raises."""


class InvalidType(TypeError, RuntimeError):
    """Also what torch's own function raises."""


@backends.register("attention", _validate)
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
    softcap: float | None = None,
    return_lse: bool = False,
    return_weights: bool = False,
    backend: Backend | None = None,
) -> Any:
    """out = dropout(softmax(scale * query key^T + bias, where the mask allows)) value, without storing the scores.

    With softcap the scores are softcap * tanh(scale * query key^T / softcap) + bias.

    A drop-in for torch.nn.functional.scaled_dot_product_attention that takes every mask, together with ``is_causal``.

    query (B, H, Lq, Dk), key (B, Hk, Lk, Dk), value (B, Hk, Lk, Dv): float32, bfloat16, float16 (float64 in reference
        and aten), one dtype and device, any strides. Under torch.autocast they are cast to its dtype.
        Any number of dimensions from (L, D) on: those before the heads are the batch (an AttentionMask's B is their
        product), those that are missing are 1, and sizes of 1 are broadcast, all as torch's function has it.
    attn_mask: bool, True = attend, or floating point, added to the scores and differentiable; either broadcasts to
        (B, H, Lq, Lk). Or an AttentionMask, built once a batch and shared by layers. A bool mask of three dimensions is
        refused where it can mean two things: (B, 1 or Lq, Lk), as ``get_pad_mask`` gives, with B = H.
    dropout_p: the probability of dropping a weight; 0.0 in eval. The rule: fastattn/backends/reference/philox.py.
    is_causal: query i attends to key j when j <= i, on top of attn_mask. For other alignments see AttentionMask.
    scale: default Dk ** -0.5.
    enable_gqa: allows Hk < H; query head h reads key head h // (H // Hk).
    softcap: positive; the scores stay between -softcap and softcap, before a bias is added. Unless given, no cap.
    return_lse: also return lse (B, H, Lq), float32 (float64 for float64 inputs), the natural logarithm of the softmax's
        sum, -inf where a query may attend to nothing; differentiable.
    return_weights: also return the weights after dropout, (B, H, Lq, Lk); differentiable. The kernels never store them:
        aten computes such a call, unless reference is requested.
    backend: "reference", "aten", "triton" or "cuda"; default the first that supports the call, see ``explain``.

    Keys and values that padding, the lengths, packing or a band hide from every query may be NaN and reach nothing;
    others that a query does not see must be finite, as in PyTorch. A bias of -inf masks. A finite one that moves a
    whole row to where float32 is coarse, such as finfo.min on all keys of a query, leaves its gradients inexact.

    Returns out (B, H, Lq, Dv) in query's dtype, or a tuple ``(out[, lse][, weights])``; without the leading dimensions
    that were not there. A query that may attend to nothing gives 0. Nested tensors are left to torch's function.
    Raises TypeError or ValueError naming the argument, RuntimeError if the backend asked for does not support it. The
    errors about arguments of torch's function are also RuntimeErrors, which that function raises.
    Source: Vaswani et al. 2017, equation 1; Dao 2023, FlashAttention-2, arXiv:2307.08691.
    """
    if isinstance(query, Tensor) and query.is_nested and not (return_lse or return_weights or backend or softcap):
        if isinstance(attn_mask, AttentionMask):
            raise TypeError("attn_mask must be a Tensor for nested tensors, got AttentionMask")
        tensors = (query, key, value, attn_mask, dropout_p, is_causal)
        return torch._C._nn.scaled_dot_product_attention(*tensors, scale=scale, enable_gqa=enable_gqa)
    try:
        given = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        device, inputs = _validate(*given, softcap=softcap, return_weights=return_weights, return_lse=return_lse)
    except ValueError as error:
        raise InvalidValue(str(error)) from None
    except TypeError as error:
        raise InvalidType(str(error)) from None
    chosen = backends.choose("attention", device, inputs, backend)
    q, k, v, mask, dropout_p, softcap, *_ = inputs
    softmax_scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    rng_state = draw_rng_state(device, chosen.name) if dropout_p > 0 else None
    op_args = (q, k, v, mask, softmax_scale, dropout_p, rng_state, softcap, return_lse, return_weights)
    if _watch.current is None:
        out, lse, weights = _attend(chosen, *op_args)
    else:
        formula = _watch.attention_formula(chosen)
        out, lse, weights = _watch.current.run("attention", _attend, chosen, formula, op_args)
    if not query.dim() == key.dim() == value.dim() == 4:
        leading = _leading(query, key, value, out.shape[1])
        out, lse = out.view(*leading, *out.shape[2:]), lse if lse is None else lse.view(*leading, -1)
        if return_weights:
            weights = weights.view(*leading, *weights.shape[-2:])
    if not return_lse and not return_weights:
        return out
    return (out,) + ((lse,) if return_lse else ()) + ((weights,) if return_weights else ())


def _attend(chosen: Implementation, *op_args: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """out, lse and the weights of a call that is known to be valid. lse and weights may be None if not returned."""
    q, k, v, mask, softmax_scale, dropout_p, rng_state, softcap, return_lse, return_weights = op_args
    with _autocast.no_autocast(q.device):
        if chosen.differentiable:
            *given, _, _ = op_args
            return chosen.module.attention(*given, return_lse=return_lse, return_weights=return_weights)
        known_mask = _NO_MASK if mask is None else mask
        bias = known_mask.any_bias
        needs_gradient = _needs_gradient(q, k, v, bias)
        prepared = prepare_masks(chosen, q, k, v, known_mask, needs_gradient=needs_gradient, softcap=softcap)
        call = AttentionCall(q, k, v, bias, rng_state, prepared, softmax_scale, dropout_p, softcap)
        out, lse = _Attention.apply(call, chosen)
        return out, lse if return_lse else None, None


def prepare_masks(
    chosen: Implementation,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | None,
    *,
    needs_gradient: bool,
    softcap: float | None = None,
) -> list[PreparedMask]:
    """The mask as the kernels of a call read it: in the forward's layout, then in those of the backward."""
    mask = _NO_MASK if mask is None else mask
    layouts, build = chosen.module.mask_layouts(q, k, v, mask.any_bias, softcap), partial(_prepare, chosen.name, q)
    layouts = layouts if needs_gradient else layouts[:1]
    return mask.prepare_all(q.shape[2], k.shape[2], layouts, q.device, build)


def _prepare(backend: str, q: Tensor, *restriction: Any) -> PreparedMask:
    """masks.prepare() for a backend's kernels: in one launch where Triton runs; the formula is what can be traced."""
    if is_traced():
        return prepare(*restriction)
    if backend == "triton" or (q.is_cuda and backends.unsupported_reason("mask", "triton", (q,)) is None):
        return backends.load_backend("mask", "triton").prepare_mask(*restriction)
    return prepare(*restriction)


def _leading(query: Tensor, key: Tensor, value: Tensor, heads: int) -> tuple[int, ...]:
    """The result's dimensions before (L, D), where it has not four dimensions."""
    most = max(t.dim() for t in (query, key, value)) - 2
    return (*torch.broadcast_shapes(*(t.shape[:-3] for t in (query, key, value))), heads)[:most] if most else ()


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


class _Attention(Operator, name="attention"):
    """Saved are out and lse."""

    results, outputs, inputs, call = 2, 2, 4, AttentionCall

    @staticmethod
    def forward(call: AttentionCall, backend: Implementation) -> tuple[Tensor, Tensor]:
        return backend.module.attention_fwd(call)

    @staticmethod
    def forward_fake(call: AttentionCall, backend: Implementation) -> tuple[Tensor, Tensor]:
        q = call.q
        return _in_layout_of(q, call.v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)

    @staticmethod
    def keep(call: AttentionCall, outputs: tuple[Tensor, ...]) -> tuple[AttentionCall, Grads]:
        return call._replace(masks=call.masks[1:]), outputs

    @staticmethod
    def gradients(dresults: Grads, call: AttentionCall, saved: Grads, needs: Needs, backend: Implementation) -> Grads:
        (dout, dlse), (out, lse) = dresults, saved
        dout = torch.zeros_like(out) if dout is None else dout
        return backend.module.attention_bwd(dout, dlse, call, out, lse, call.bias is not None and needs[3])

    @staticmethod
    def gradients_fake(dresults: Grads, call: AttentionCall, saved: Grads, needs: Needs, *_: Any) -> Grads:
        bias = call.bias if needs[3] else None
        grads = [_in_layout_of(t, t.shape[3]) for t in call[:3]]
        return *grads, None if bias is None else bias.new_empty(bias.shape)


def _in_layout_of(x: Tensor, head_dim: int) -> Tensor:
    """As backends allocate: heads inside positions where x has them so, the layout of a projection viewed as heads."""
    B, H, L, _ = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty(B, L, H, head_dim).transpose(1, 2)
    return x.new_empty(B, H, L, head_dim)


_NO_MASK = AttentionMask()
