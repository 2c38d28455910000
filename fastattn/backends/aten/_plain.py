"""Attention by matmul, softmax, matmul, which autograd records, or by one call of PyTorch's operator.

For what _blocks.py does not compute: on a GPU, in a trace, with lse, weights or a bias that learns. On a GPU PyTorch's
operator rounds a bias to the dtype of the queries.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastattn._tracing import can_read_values, known_equal, may_write_in_place
from fastattn.backends.reference import philox
from fastattn.masks import AttentionMask

# cuDNN's gradients were wrong for some masks (pytorch issue 196678), so it is not used when there is one.
_MASKED_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | None,
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
    softcap: float | None = None,
    by_operator: bool = False,
    return_lse: bool = False,
    return_weights: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As attention(), with softmax_scale > 0. by_operator: by PyTorch's if it can, which gives out alone."""
    (B, H, Lq, _), Lk = q.shape, k.shape[2]
    bias = None if mask is None else mask.bias if mask.relative_bias is None else mask.dense_relative_bias(Lq, Lk)
    # Of empty calls PyTorch's operators for GPUs refuse some. In a graph a size may be unknown.
    is_empty = Lk == 0 or (not torch.compiler.is_compiling() and q.numel() == 0)
    fused = by_operator and softcap is None and not is_empty
    fused = fused and (rng_state is None or (q.is_cuda and dropout_p < 1))  # it divides by 1 - p
    fused = fused and (bias is None or (q.is_cuda and bias.dtype == q.dtype))
    has_band_alone = mask is not None and mask.band_only and bias is None
    if fused and has_band_alone and known_equal(Lq, Lk) and mask.is_causal(Lq, Lk):
        return torch_attention(q, k, v, None, softmax_scale, dropout_p, is_causal=True), None, None

    masked = has_keys = has_queries = None
    if mask is not None:
        masked, has_keys, has_queries = mask.visible(Lq, Lk, q.device)
        if has_keys is not None:
            q = q.where(has_keys, 0)
    finite = has_queries is None or _known_finite(q, k, v)
    if not finite:  # keys that no query attends to: 0 * NaN must not reach the sums
        if has_queries.shape[1] != 1:
            k, v = repeat_heads(k, v, H)
        k, v = k.where(has_queries, 0), v.where(has_queries, 0)

    if fused:
        out = _one_call(q, k, v, bias, masked, has_keys, softmax_scale, dropout_p)
        return out if has_keys is None else out.where(has_keys, 0), None, None

    k, v = repeat_heads(k, v, H)
    score_mask = masked
    # Adding -inf is cheaper than choosing it, and passes the gradient as it is, but inf - inf would be NaN.
    if masked is not None and softmax_scale <= 1 and finite:
        score_mask = mask.additive(masked, Lq, Lk, torch.promote_types(q.dtype, torch.float32))
    s = _scores(q, k, softmax_scale)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        bias = _without_masked(bias.to(s.dtype), masked, has_keys)  # its gradient is summed as it is made
        s = s.add_(bias) if may_write_in_place() else s + bias
    if score_mask is not None:
        s = add_score_mask(s, score_mask, in_place=may_write_in_place())
    lse = torch.logsumexp(s, dim=-1) if return_lse else None
    weights = torch.softmax(s, dim=-1)
    if rng_state is not None:
        factor = philox.keep_factor(rng_state, B * H * Lq, Lk, dropout_p, weights.dtype)
        weights = weights * factor.view(weights.shape)
    weights = weights.to(q.dtype)
    out = torch.matmul(weights, v)
    if has_keys is not None:
        out = out.where(has_keys, 0)
        lse = None if lse is None else lse.where(has_keys.squeeze(-1), -torch.inf)
        weights = weights.where(has_keys, 0) if return_weights else None
    if not return_weights:
        return out, lse, None
    return out, lse, weights


def _one_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    masked: Tensor | None,
    has_keys: Tensor | None,
    scale: float,
    dropout_p: float,
) -> Tensor:
    if bias is not None:
        score_mask = _without_masked(bias, None, has_keys)
        score_mask = score_mask if masked is None else score_mask.masked_fill(masked, -torch.inf)
    else:
        score_mask = None if masked is None else ~masked
    if q.is_cuda:  # PyTorch's one fused kernel with masks or in float32 has no grouped heads: it would write all scores
        k, v = repeat_heads(k, v, q.shape[1])
    if not q.is_cuda or score_mask is None:
        return torch_attention(q, k, v, score_mask, scale, dropout_p)
    with sdpa_kernel(_MASKED_BACKENDS):
        return torch_attention(q, k, v, score_mask, scale, dropout_p)


def torch_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, dropout_p: float, is_causal: bool = False
) -> Tensor:
    grouped = True if k.shape[1] != q.shape[1] else False  # PyTorch takes no bool of traced sizes
    # Not by its name in torch.nn.functional, where fastattn's function may have been put.
    return torch._C._nn.scaled_dot_product_attention(
        q, k, v, bias, dropout_p, is_causal, scale=scale, enable_gqa=grouped
    )


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """softmax_scale * q k^T in float32 at least. q is scaled before the product, where it is fewer numbers, unless that
    rounds it. A product in float16 would overflow at 65504, so it is one of float32, which is also faster on a CPU."""
    if q.dtype == torch.bfloat16:
        return torch.matmul(q, k.mT).float() * scale
    if q.dtype == torch.float16:
        q, k = q.float(), k.float()
    scores = torch.matmul(q * scale, k.mT)
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def add_score_mask(scores: Tensor, score_mask: Tensor, in_place: bool = True) -> Tensor:
    """The scores with -inf where score_mask has it, or is True."""
    if score_mask.dtype == torch.bool:
        return (scores.masked_fill_ if in_place else scores.masked_fill)(score_mask, -torch.inf)
    return (scores.add_ if in_place else scores.add)(score_mask)


def repeat_heads(k: Tensor, v: Tensor, H: int) -> tuple[Tensor, Tensor]:
    """k and v (B, Hk, ..) with a head for each of the H heads of queries."""
    if k.shape[1] == H:
        return k, v
    return k.repeat_interleave(H // k.shape[1], dim=1), v.repeat_interleave(H // v.shape[1], dim=1)


def _without_masked(bias: Tensor, masked: Tensor | None, has_keys: Tensor | None) -> Tensor:
    """The bias with 0 where it does not count: an -inf there would make NaN of an empty row's softmax."""
    for ignored in (masked, None if has_keys is None else ~has_keys):
        if ignored is not None:
            bias = bias.masked_fill(ignored, 0)
    return bias


def _known_finite(*tensors: Tensor) -> bool:
    """Neither NaN nor inf is in them or in a product of two of their rows: the sums of their squares are finite."""
    if not can_read_values(tensors[0]):
        return False
    # In the order in memory: what a projection gives is transposed. PyTorch's dot of 16-bit numbers is about 50x slower
    # than that of float32.
    laid_out = (t.detach() if t.is_contiguous() else t.detach().transpose(1, 2) for t in tensors)
    flat = (t.reshape(-1).to(torch.promote_types(t.dtype, torch.float32)) for t in laid_out)
    return all(math.isfinite(torch.dot(t, t)) for t in flat)
