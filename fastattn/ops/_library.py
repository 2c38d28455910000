"""The kernels as torch.library operators, for torch.compile, torch.export and opcheck.

Eager calls do not pass here: they go from autograd.Function straight to the launch, which costs a third of the time on
the host. Each operator calls the same functions of a backend, named by ``backend``; its fake says shapes, dtypes and strides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn._dispatch import load_backend
from fastattn.masks import AttentionMask
from fastattn.ops._weights import Wanted, ranges


def _zeros_if_none(t: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if t is None else t


# --- attention ---------------------------------------------------------------------------------------------------
# An operator takes a mask apart: its tensors, of which the bias has a gradient, and the bounds of its bands.


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | None,
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """(out, lse), differentiable, as one operator in a traced graph."""
    mask = AttentionMask() if mask is None else mask
    masks, bounds = mask.flatten()
    return attention_op(q, k, v, mask.bias, *masks, bounds, softmax_scale, dropout_p, rng_state, backend)


def attention_weights(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    mask: AttentionMask | None,
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
    wanted: Wanted,
    backend: str,
) -> Tensor:
    """The weights, without a gradient, as one operator in a traced graph."""
    mask = AttentionMask() if mask is None else mask
    masks, bounds = mask.flatten()
    # An operator takes the heads apart from what is made of them.
    heads, made = ([], wanted) if isinstance(wanted, str) else ([h for run in wanted for h in run], "heads")
    options = (softmax_scale, dropout_p, rng_state, heads, made, backend)
    return attention_weights_op(q, k, lse, mask.bias, *masks, bounds, *options)


@torch.library.custom_op("fastattn::attention", mutates_args=())
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    attn_mask: Tensor | None,
    key_padding: Tensor | None,
    query_padding: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    bounds: list[int],
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    masks = (attn_mask, key_padding, query_padding, cu_seqlens_q, cu_seqlens_k)
    mask = AttentionMask.unflatten(masks, bounds, bias)
    return load_backend("attention", backend).attention_fwd(q, k, v, mask, softmax_scale, dropout_p, rng_state)


@attention_op.register_fake
def _(q, k, v, *options):
    return _in_layout_of(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


def _in_layout_of(x: Tensor, head_dim: int) -> Tensor:
    """As the rooms allocate: heads inside positions where x has them so, the layout of a projection seen as heads."""
    B, H, L, _ = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty(B, L, H, head_dim).transpose(1, 2)
    return x.new_empty(B, H, L, head_dim)


@torch.library.custom_op("fastattn::attention_weights", mutates_args=())
def attention_weights_op(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    attn_mask: Tensor | None,
    key_padding: Tensor | None,
    query_padding: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    bounds: list[int],
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
    heads: list[int],
    made: str,
    backend: str,
) -> Tensor:
    masks = (attn_mask, key_padding, query_padding, cu_seqlens_q, cu_seqlens_k)
    mask = AttentionMask.unflatten(masks, bounds, bias)
    wanted = ranges(heads) if made == "heads" else made
    module = load_backend("attention", backend)
    return module.attention_weights(q, k, lse, mask, softmax_scale, dropout_p, rng_state, wanted)


@attention_weights_op.register_fake
def _(q, k, *options):
    B, H, Lq = q.shape[:3]
    heads, made, _ = options[-3:]
    if made == "argmax":
        return q.new_empty(B, H, Lq, dtype=torch.int64)
    return q.new_empty(B, *([] if made == "mean" else [len(heads)]), Lq, k.shape[2])


@torch.library.custom_op("fastattn::attention_backward", mutates_args=())
def attention_backward_op(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    attn_mask: Tensor | None,
    key_padding: Tensor | None,
    query_padding: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    bounds: list[int],
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
    needs_dbias: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    masks = (attn_mask, key_padding, query_padding, cu_seqlens_q, cu_seqlens_k)
    mask = AttentionMask.unflatten(masks, bounds, bias)
    dq, dk, dv, dbias = load_backend("attention", backend).attention_bwd(
        dout, dlse, q, k, v, out, lse, mask, softmax_scale, dropout_p, rng_state, needs_dbias
    )
    return dq, dk, dv, q.new_empty(0) if dbias is None else dbias


@attention_backward_op.register_fake
def _(dout, dlse, q, k, v, out, lse, bias, *options):
    needs_dbias = options[-2]
    dbias = torch.empty_like(bias) if needs_dbias else q.new_empty(0)
    return *(_in_layout_of(t, t.shape[3]) for t in (q, k, v)), dbias


def _attention_setup(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias, *masks, bounds, softmax_scale, dropout_p, rng_state, backend = inputs
    ctx.save_for_backward(q, k, v, *output, rng_state, bias, *masks)
    ctx.options = (bounds, softmax_scale, dropout_p, backend)
    ctx.set_materialize_grads(False)


def _attention_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, rng_state, bias, *masks = ctx.saved_tensors
    bounds, softmax_scale, dropout_p, backend = ctx.options
    needs_dbias = bias is not None and ctx.needs_input_grad[3]
    dout = _zeros_if_none(dout, out)
    options = (softmax_scale, dropout_p, rng_state, needs_dbias, backend)
    dq, dk, dv, dbias = attention_backward_op(dout, dlse, q, k, v, out, lse, bias, *masks, bounds, *options)
    return dq, dk, dv, dbias if needs_dbias else None, *(None,) * 10


attention_op.register_autograd(_attention_backward, setup_context=_attention_setup)


# --- dropout + residual + layer normalisation ----------------------------------------------------------------------


def add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    rng_state: Tensor | None,
    x_bias: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """(out, z), differentiable, as one operator in a traced graph. Without bias RMSNorm."""
    return add_layer_norm_op(x, residual, weight, bias, eps, dropout_p, rng_state, x_bias, backend)[:2]


@torch.library.custom_op("fastattn::add_layer_norm", mutates_args=())
def add_layer_norm_op(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    rng_state: Tensor | None,
    x_bias: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    module = load_backend("add_layer_norm", backend)
    out, z, statistics = module.add_layer_norm_fwd(x, residual, weight, bias, eps, dropout_p, rng_state, x_bias)
    return out, z.clone() if z is x else z, statistics  # an operator's output must not be its input


@add_layer_norm_op.register_fake
def _(x, residual, weight, bias, eps, dropout_p, rng_state, x_bias, backend):
    statistics = x.new_empty(2 * x.shape[0] + load_backend("add_layer_norm", backend).TICKETS, dtype=torch.float32)
    return torch.empty_like(x), torch.empty_like(x), statistics


@torch.library.custom_op("fastattn::add_layer_norm_backward", mutates_args=())
def add_layer_norm_backward_op(
    dout: Tensor,
    dz: Tensor | None,
    z: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    statistics: Tensor,
    dropout_p: float,
    rng_state: Tensor | None,
    has_residual: bool,
    x_bias: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    module = load_backend("add_layer_norm", backend)
    dx, dresidual, *sums = module.add_layer_norm_bwd(
        dout, dz, z, weight, bias, statistics, dropout_p, rng_state, has_residual, x_bias
    )
    dresidual = z.new_empty(0) if dresidual is None else dresidual.clone() if dresidual is dx else dresidual
    return dx, dresidual, *(weight.new_empty(0) if t is None else t for t in sums)


@add_layer_norm_backward_op.register_fake
def _(dout, dz, z, weight, bias, statistics, dropout_p, rng_state, has_residual, x_bias, backend):
    dresidual = torch.empty_like(z) if has_residual else z.new_empty(0)
    sums = (weight.new_empty(0) if t is None else torch.empty_like(t) for t in (weight, bias, x_bias))
    return torch.empty_like(z), dresidual, *sums


def _add_layer_norm_setup(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    _, residual, weight, bias, _, dropout_p, rng_state, x_bias, backend = inputs
    _, z, statistics = output
    ctx.save_for_backward(z, weight, bias, statistics, rng_state, x_bias)
    ctx.options = (dropout_p, residual is not None, backend)
    ctx.set_materialize_grads(False)


def _add_layer_norm_backward(ctx: Any, dout: Tensor | None, dz: Tensor | None, *_: None) -> tuple:
    z, weight, bias, statistics, rng_state, x_bias = ctx.saved_tensors
    dropout_p, has_residual, backend = ctx.options
    dout = _zeros_if_none(dout, z).contiguous()
    dz = None if dz is None else dz.contiguous()
    dx, dresidual, dweight, dbias, dx_bias = add_layer_norm_backward_op(
        dout, dz, z, weight, bias, statistics, dropout_p, rng_state, has_residual, x_bias, backend
    )
    dresidual, dbias = dresidual if has_residual else None, None if bias is None else dbias
    return dx, dresidual, dweight, dbias, None, None, None, None if x_bias is None else dx_bias, None


add_layer_norm_op.register_autograd(_add_layer_norm_backward, setup_context=_add_layer_norm_setup)


# --- feed-forward --------------------------------------------------------------------------------------------------


def feed_forward(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str,
    dropout_p: float,
    rng_state: Tensor | None,
    recompute: bool,
    backend: str,
) -> Tensor:
    """out, differentiable, as one operator in a traced graph."""
    return feed_forward_op(x, weight1, bias1, weight2, bias2, activation, dropout_p, rng_state, recompute, backend)[0]


@torch.library.custom_op("fastattn::feed_forward", mutates_args=())
def feed_forward_op(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str,
    dropout_p: float,
    rng_state: Tensor | None,
    recompute: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    module = load_backend("feed_forward", backend)
    out, (kept,) = module.feed_forward_fwd(x, weight1, bias1, weight2, bias2, activation, dropout_p, rng_state)
    return out, x.new_empty(0, weight1.shape[0]) if recompute else kept


@feed_forward_op.register_fake
def _(x, weight1, bias1, weight2, bias2, activation, dropout_p, rng_state, recompute, backend):
    tokens = x.shape[0]
    kept = x.new_empty(0 if recompute else tokens, weight1.shape[0])  # h of relu, else z
    return x.new_empty(tokens, weight2.shape[0]), kept


@torch.library.custom_op("fastattn::feed_forward_backward", mutates_args=())
def feed_forward_backward_op(
    dout: Tensor,
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str,
    dropout_p: float,
    rng_state: Tensor | None,
    kept: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    module = load_backend("feed_forward", backend)
    if len(kept) < len(x):
        kept = module.feed_forward_hidden(x, weight1, bias1, activation, dropout_p, rng_state)[1]
    grads = module.feed_forward_bwd(dout, x, weight1, bias1, weight2, bias2, activation, dropout_p, rng_state, (kept,))
    dx, dweight1, dbias1, dweight2, dbias2 = (x.new_empty(0) if grad is None else grad for grad in grads)
    return dx, dweight1, dbias1, dweight2, dbias2


@feed_forward_backward_op.register_fake
def _(dout, x, weight1, bias1, weight2, bias2, activation, dropout_p, rng_state, kept, backend):
    dx, dweight1, dbias1, dweight2, dbias2 = (
        x.new_empty(0) if t is None else x.new_empty(t.shape) for t in (x, weight1, bias1, weight2, bias2)
    )
    return dx, dweight1, dbias1, dweight2, dbias2


def _feed_forward_setup(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    x, weight1, bias1, weight2, bias2, activation, dropout_p, rng_state, _, backend = inputs
    ctx.save_for_backward(x, weight1, bias1, weight2, bias2, rng_state, output[1])
    ctx.options = (activation, dropout_p, backend)


def _feed_forward_backward(ctx: Any, dout: Tensor, *_: Tensor) -> tuple:
    x, weight1, bias1, weight2, bias2, rng_state, kept = ctx.saved_tensors
    activation, dropout_p, backend = ctx.options
    weights = (weight1, bias1, weight2, bias2)
    dx, dweight1, dbias1, dweight2, dbias2 = feed_forward_backward_op(
        dout.contiguous(), x, *weights, activation, dropout_p, rng_state, kept, backend
    )
    dbias1, dbias2 = (None if b is None else db for b, db in ((bias1, dbias1), (bias2, dbias2)))
    return dx, dweight1, dbias1, dweight2, dbias2, None, None, None, None, None


feed_forward_op.register_autograd(_feed_forward_backward, setup_context=_feed_forward_setup)
