"""Attention of one new token per row to a cache of keys and values: a step of decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import backends
from fastattn._tracing import is_traced
from fastattn.backends import Backend, Implementation
from fastattn.backends.constants import PACKAGE
from fastattn.backends.reference import decode_attention as reference
from fastattn.ops import _autocast, _checks, _watch


def _validate(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor | None = None,
    ancestors: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[torch.device, tuple[Any, ...]]:
    """Check a call's arguments. Returns (device, inputs): the inputs are what unsupported_reason takes."""
    _checks.check_float("query", query)
    query, key, value = _autocast.autocast_inputs(query, key, value)
    is_uniform = _checks.same_dtype_and_device(query, key, value)
    for name, t, dims, meaning in (
        ("query", query, 4, "(B, W, H, Dk)"),
        ("key", key, 5, "(B, M, R, Hk, Dk)"),
        ("value", value, 5, "(B, M, R, Hk, Dv)"),
    ):
        if not is_uniform:
            _checks.check_like(name, t, "query", query)
        if t.dim() != dims:
            raise ValueError(f"{name} has {t.dim()} dimensions {tuple(t.shape)}, expected {dims}: {meaning}")
    B, W, H, Dk = query.shape
    _, M, R, Hk, _ = key.shape
    _checks.check_shape("key", key, (B, M, R, Hk, Dk), "(B, M, R, Hk, Dk)")
    _checks.check_shape("value", value, (B, M, R, Hk, value.shape[4]), "(B, M, R, Hk, Dv)")
    if Hk == 0 or H % Hk != 0:
        raise ValueError(f"key has {Hk} heads, which must divide the {H} heads of query")
    if Dk == 0 or value.shape[4] == 0:
        raise ValueError(f"query and value need a head dimension, got {tuple(query.shape)} and {tuple(value.shape)}")
    if ancestors is None and R != 1 and R != W:  # `in` is false of symbolic sizes
        raise ValueError(f"key has {R} rows and query {W}: without ancestors key has one row, or as many as query")
    for name, t, shape, meaning in (
        ("lengths", lengths, (B,), "(B,)"),
        ("ancestors", ancestors, (B, W, M), "(B, W, M)"),
    ):
        if t is not None:
            _checks.check_indices(name, t, "query", query)
            _checks.check_shape(name, t, shape, meaning)
            if t.dtype != torch.int32:
                raise TypeError(f"{name} has dtype {t.dtype}, expected torch.int32")
    if bias is not None:
        _checks.check_float("bias", bias)
        _checks.check_like("bias", bias, "query", query, dtype=False)
        if bias.dim() != 2 or (bias.shape[0] != 1 and bias.shape[0] != H) or bias.shape[1] != M:
            raise ValueError(f"bias has shape {tuple(bias.shape)}, expected {(H, M)}: (H, M), or {(1, M)}")
        bias = bias if bias.stride(1) == 1 else bias.contiguous()
    if scale is not None:
        _checks.check_finite("scale", scale)
    if softcap is not None:
        _checks.check_positive("softcap", softcap)
        softcap = float(softcap)
    if torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in (query, key, value, bias)]):
        raise ValueError(
            "decode_attention has no gradient, and query, key, value or bias requires one: call it under "
            "torch.no_grad(), or scaled_dot_product_attention in its place"
        )
    if not query.stride(3) == key.stride(4) == value.stride(4) == 1:
        query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    return query.device, (query, key, value, lengths, ancestors, bias, softcap)


@backends.register("decode_attention", _validate)
def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor | None = None,
    ancestors: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """out = softmax(scale * query key^T) value, of W queries for each of B sequences, over a cache of their keys.

    query (B, W, H, Dk): float32, bfloat16, float16 (float64 in reference and aten). W is the number of beams, or 1.
    key (B, M, R, Hk, Dk), value (B, M, R, Hk, Dv): likewise, any strides. M positions, each with R rows; the heads of
        query share those of key in groups of H / Hk. To read less than was allocated, pass a slice: cache[:, :length].
    lengths (B,): int32, the positions of each sequence that count, M unless given. What follows them may be
        anything, NaN included.
    ancestors (B, W, M): int32, the row in which query w finds position j. An entry outside of 0 .. R - 1 masks the
        position. So a beam's history is found without copying the cache when beams are reordered. Without ancestors
        query w reads row w, or, where R = 1, all read the same keys, as in the attention to an encoder's output.
    bias (H or 1, M): floating point, finite, added to the scores of each position, for all sequences and queries. For
        a query at position m that is relative_bias[:, Lq - 1 - m :] of an AttentionMask.
    scale: of the scores, 1 / sqrt(Dk) unless given.
    softcap: as scaled_dot_product_attention has it, positive; before the bias is added.
    backend: "reference", "aten", "triton" or "cuda"; default the first that supports the call, see ``explain``.

    Returns out (B, W, H, Dv), contiguous. A query without a visible position gives 0. There is no gradient.
    Raises TypeError or ValueError naming the argument, RuntimeError if the backend asked for does not support it.
    ValueError if query, key, value or bias requires a gradient, unless under torch.no_grad().
    Source: Vaswani et al. 2017, section 3.2.1; kernels split the keys as Dao et al. 2023, "Flash-Decoding for
    long-context inference".
    """
    device, inputs = _validate(query, key, value, lengths, ancestors, bias=bias, scale=scale, softcap=softcap)
    chosen = backends.choose("decode_attention", device, inputs, backend)
    softmax_scale = query.shape[3] ** -0.5 if scale is None else float(scale)
    op_args = (*inputs[:5], softmax_scale, *inputs[5:])
    with _autocast.no_autocast(device):
        return _watch.run("decode_attention", _attend, chosen, reference.decode_attention, op_args)


def write_and_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    new_key: Tensor,
    new_value: Tensor,
    position: Tensor,
    lengths: Tensor,
    ancestors: Tensor | None,
    *,
    scale: float,
    bias: Tensor | None = None,
    backend: Backend | None,
) -> Tensor:
    """decode_attention, where key[:, position] = new_key and value[:, position] = new_value come first.

    new_key (B, W, Hk, Dk), new_value (B, W, Hk, Dv), for a cache with W rows. position: int64 (1,), and lengths are
    position + 1. The Triton kernel writes what it reads of them.
    """
    device, inputs = _validate(query, key, value, lengths, ancestors, bias=bias)
    chosen = backends.choose("decode_attention", device, inputs, backend)
    is_as_given = inputs[1] is key and inputs[2] is value and new_key.dtype is key.dtype is new_value.dtype
    if chosen.name == "triton" and is_as_given and _watch.current is None and not is_traced():
        return chosen.module.decode_attention_fwd(*inputs[:5], float(scale), inputs[5], new=(new_key, new_value))
    for t, new in ((key, new_key), (value, new_value)):
        t.index_copy_(1, position, new[:, None])
    return decode_attention(query, key, value, lengths, ancestors, bias=bias, scale=scale, backend=backend)


def _attend(chosen: Implementation, *op_args: Any) -> Tensor:
    if chosen.differentiable:
        return chosen.module.decode_attention(*op_args)
    if is_traced():
        return _operator(*op_args, chosen.name)
    return chosen.module.decode_attention_fwd(*op_args)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    ancestors: Tensor | None,
    softmax_scale: float,
    bias: Tensor | None,
    softcap: float | None,
    backend: str,
) -> Tensor:
    module = backends.load_backend("decode_attention", backend)
    return module.decode_attention_fwd(q, k, v, lengths, ancestors, softmax_scale, bias, softcap)


_operator = torch.library.custom_op(f"{PACKAGE}::decode_attention", _forward, mutates_args=())


@_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[4])
