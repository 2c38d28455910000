"""Attention by PyTorch's fused operator, by blocks of heads (_blocks.py), or by matmul, softmax, matmul.

The fused operator has no weights and no lse, and we give it no bias: it rounds the sum of score and bias in ways that
depend on which of its backends runs. On a CPU blocks are used with dropout, and where they are faster; on a GPU the
fused operator drops, and has no second derivative.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastattn._tracing import can_read_values, differentiable_gradients, may_write_in_place
from fastattn.backends import timings
from fastattn.backends.aten import _at_once
from fastattn.backends.aten._at_once import AtOnceMask, AttentionAtOnce, add_score_mask, plain_scores, plain_weights
from fastattn.backends.aten._blocks import BLOCK_BYTES, MAX_SAVED_BYTES, BlockedAttention
from fastattn.backends.aten._sequences import UnpackingPlan, plan_unpacking
from fastattn.backends.reference import philox
from fastattn.masks import AttentionMask

DIFFERENTIABLE = True

# cuDNN's gradients were wrong for some masks (pytorch issue 196678), so it is not asked when there is one.
_MASKED_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

MIN_WEIGHTS = 1 << 14  # of fewer the fused operator is faster: blocks are called from Python


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | None,
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
    *,
    return_lse: bool = True,
    return_weights: Literal["all", "mean"] | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As fastattn.backends.reference.attention.attention, which is the specification."""
    if mask is not None and can_read_values(q):
        if mask.key_padding is not None:
            mask = _drop_noop_padding(mask)
        if mask is not None and mask.cu_seqlens_q is not None and return_weights is None:
            plan = plan_unpacking(mask, q, k)
            if plan is not None:
                return _attend_unpacked(q, k, v, plan, softmax_scale, dropout_p, rng_state, return_lse)
    return _attend(q, k, v, mask, softmax_scale, dropout_p, rng_state, return_lse, return_weights)


def _attend_unpacked(
    q: Tensor, k: Tensor, v: Tensor, plan: UnpackingPlan, *options: Any
) -> tuple[Tensor, Tensor | None, None]:
    """Packed sequences as a batch. Dropout counts the places of the unpacked ones. options: see _attend."""
    queries, keys = plan.queries, plan.keys
    inputs = (queries.unpack(q), keys.unpack(k), keys.unpack(v))
    out, lse, _ = _attend(*inputs, plan.mask, *options, None)
    return queries.pack(out), None if lse is None else queries.pack(lse[..., None]).squeeze(3), None


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | None,
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
    return_lse: bool,
    return_weights: Literal["all", "mean"] | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Results as attention()'s. rng_state: None without dropout."""
    B, H, Lq, _ = q.shape
    Lk = k.shape[2]
    bias = None if mask is None else mask.bias
    alone = bias is None and not return_lse and return_weights is None and Lk > 0
    # Not with a scale of 0: see alpha in _blocks.py.
    if alone and softmax_scale != 0 and _uses_blocks(q, k, dropout_p):
        return _attend_by_blocks(q, k, v, mask, softmax_scale, dropout_p, rng_state), None, None
    fused = alone and (rng_state is None or (q.is_cuda and dropout_p < 1))  # 1 - dropout_p divides
    if fused and mask is not None and mask.band_only and Lq == Lk and mask.band(Lq, Lk) == (-Lq, 0):
        return _torch_attention(q, k, v, None, softmax_scale, dropout_p, is_causal=True), None, None

    masked = has_keys = has_queries = None
    if mask is not None:
        masked, has_keys, has_queries = mask.visible(Lq, Lk, q.device)
        if has_keys is not None:
            q = q.where(has_keys, 0)

    if fused and (has_queries is None or (can_read_values(q) and not torch.is_grad_enabled())):
        out = _fused(q, k, v, mask, masked, softmax_scale, dropout_p)
        # Without a gradient, NaN or inf in a key that no query attends to shows in the result, or does no harm.
        if has_queries is None or math.isfinite(out.sum()):
            return (out if has_keys is None else out.where(has_keys, 0)), None, None

    finite = has_queries is None or _known_finite(q, k, v)
    if not finite:  # keys that no query attends to: 0 * NaN must not reach the sums
        if has_queries.shape[1] != 1:
            k, v = _repeat_heads(k, v, H)
        k, v = k.where(has_queries, 0), v.where(has_queries, 0)

    if fused:
        out = _fused(q, k, v, mask, masked, softmax_scale, dropout_p)
        return out if has_keys is None else out.where(has_keys, 0), None, None

    k, v = _repeat_heads(k, v, H)
    score_mask = masked
    # Adding -inf is cheaper than choosing it, and passes the gradient as it is, but inf - inf would be NaN.
    if masked is not None and abs(softmax_scale) <= 1 and finite:
        score_mask = mask.additive(masked, Lq, Lk, torch.promote_types(q.dtype, torch.float32))
    s = plain_scores(q, k, softmax_scale)
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
        weights = None if return_weights is None else weights.where(has_keys, 0)
    if return_weights is None:
        return out, lse, None
    return out, lse, weights if return_weights == "all" else weights.mean(1)


class _BlockMask(NamedTuple):
    """What a mask without a bias means for blocks of heads, of one shape of scores: made once, and read by all layers.

    masked, has_keys: as AttentionMask.visible() has them. additive: masked as a tensor to add to the scores.
    is_causal: no key that comes after its query is visible.
    unseen (n,): the rows of keys (B * H * Lk, D) that no query attends to, and that may hold NaN. None: there are none.
    """

    masked: Tensor | None
    additive: Tensor | None
    has_keys: Tensor | None
    is_causal: bool
    unseen: Tensor | None

    def score_mask(self, softmax_scale: float) -> Tensor | None:
        """Adding -inf is cheaper than choosing it, but inf - inf would be NaN."""
        return self.additive if abs(softmax_scale) <= 1 else self.masked


_NO_MASK = _BlockMask(None, None, None, False, None)
_CPU = torch.device("cpu")


def _block_mask(mask: AttentionMask | None, B: int, H: int, Lq: int, Lk: int, dtype: torch.dtype) -> _BlockMask:
    """additive: in dtype."""
    if mask is None:
        return _NO_MASK

    def build() -> _BlockMask:
        masked, has_keys, has_queries = mask.visible(Lq, Lk, _CPU)
        unseen = None
        if has_queries is not None:
            unseen = (~has_queries).expand(B, H, Lk, 1).flatten().nonzero().squeeze(1)
        additive = None if masked is None else mask.additive(masked, Lq, Lk, dtype)
        return _BlockMask(masked, additive, has_keys, Lq == Lk and mask.has_band and mask.band(Lq, Lk)[1] <= 0, unseen)

    return mask.cached(("blocks", B, H, Lq, Lk, dtype), _CPU, build)


def _attend_by_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | None,
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
) -> Tensor:
    (B, H, Lq, _), Lk, dtype = q.shape, k.shape[2], q.dtype
    acc, at_once, products = _block_dtypes(B, H, Lq, Lk, dtype)
    block_mask = _block_mask(mask, B, H, Lq, Lk, acc if at_once else dtype)
    score_mask, has_keys, unseen = block_mask.score_mask(softmax_scale), block_mask.has_keys, block_mask.unseen
    if has_keys is not None:
        q = q.where(has_keys, 0)
    k, v = _repeat_heads(k, v, H)
    if unseen is not None:  # 0 * NaN must not reach the sums
        k, v = _without_rows(k, unseen), _without_rows(v, unseen)
    # Contiguous once, for all products of both ways.
    if at_once:
        q, k, v = (t.to(products).contiguous().flatten(0, 1) for t in (q, k, v))
        mask = AtOnceMask((B, H, Lq, Lk), score_mask)
        out = AttentionAtOnce.apply(q, k, v, mask, softmax_scale, dropout_p, rng_state).view(B, H, Lq, -1).to(dtype)
    else:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out = BlockedAttention.apply(q, k, v, score_mask, block_mask.is_causal, softmax_scale, dropout_p, rng_state)
    return out if has_keys is None else out.where(has_keys, 0)


def _block_dtypes(B: int, H: int, Lq: int, Lk: int, dtype: torch.dtype) -> tuple[torch.dtype, bool, torch.dtype]:
    """That of the softmax, whether all scores are computed at once, and if so the dtype of the products."""
    acc, weights = torch.float64 if dtype == torch.float64 else torch.float32, B * H * Lq * Lk
    products = acc if weights <= MIN_WEIGHTS else dtype  # small products are slower in 16 bits
    return acc, weights * acc.itemsize <= BLOCK_BYTES, products


# For the calls with which a small model trains, and with the same numbers as _attend_by_blocks: forward and backward of
# rows, (B * L, heads * D), as products give and read them.


class RowsMask(NamedTuple):
    """A mask as attention_rows_fwd reads it, made once for all layers.

    unseen: as of _BlockMask, of the rows of K and V together, (2 * B * H * Lk, D).     products: see _block_dtypes.
    """

    mask: AtOnceMask
    unseen: Tensor | None
    products: torch.dtype


def rows_mask(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None, softmax_scale: float, dropout_p: float
) -> RowsMask | None:
    """None: attention_rows_fwd does not compute such a call. The values of q, k and v are not read."""
    shape = B, H, Lq, Lk = *q.shape[:3], k.shape[2]
    if softmax_scale == 0 or Lk == 0 or k.shape[1] != H or k.shape != v.shape or not _uses_blocks(q, k, dropout_p):
        return None
    acc, at_once, products = _block_dtypes(*shape, q.dtype)
    if mask is None or not at_once:
        return RowsMask(AtOnceMask(shape, None), None, products) if at_once else None
    if mask.bias is not None or mask.cu_seqlens_q is not None:
        return None

    def build() -> RowsMask | None:
        masked, has_keys, has_queries = mask.visible(Lq, Lk, _CPU)
        if has_keys is not None:
            return None
        unseen, score_mask = None, masked
        if has_queries is not None:
            unseen = (~has_queries.squeeze(3)).expand(2, B, H, Lk).flatten().nonzero().squeeze(1)
        if masked is not None and abs(softmax_scale) <= 1:  # see _BlockMask.score_mask
            score_mask = mask.additive(masked, Lq, Lk, acc)
        return RowsMask(AtOnceMask(shape, score_mask), unseen, products)

    return mask.cached(("rows", *shape, q.dtype, softmax_scale), _CPU, build)


def attention_rows_fwd(
    projected: Tensor,
    memory: Sequence[Tensor],
    mask: RowsMask,
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
) -> tuple[Tensor, ...]:
    """out (B * Lq, H * D), and for the backward the weights and the heads that were made of projected.

    projected: queries, keys and values (B * L, 3 * H * D), or where these are in memory, (B, Lk, H * D) each, queries.
    """
    B, H, Lq, _ = mask.mask.scores_shape
    if memory:
        heads = (projected.view(B, Lq, H, -1).transpose(1, 2).contiguous().flatten(0, 1).to(mask.products),)
    else:
        heads = _heads(projected.view(B, Lq, 3, H, -1).permute(2, 0, 3, 1, 4).contiguous(), mask)
    q, k, v = (*heads, *_memory_heads(memory, mask)) if memory else heads
    out, weights = _at_once.forward(q, k, v, mask.mask, softmax_scale, dropout_p, rng_state, saves=True)
    return _as_rows(out, B, H, projected.dtype), weights, *heads


def attention_rows_bwd(
    dout: Tensor,
    weights: Tensor,
    heads: Sequence[Tensor],
    memory: Sequence[Tensor],
    dmemory: Sequence[Tensor],
    mask: RowsMask,
    *options: Any,
) -> Tensor:
    """dprojected. Writes the gradient of the memory into dmemory. options: softmax_scale, dropout_p, rng_state."""
    B, H, Lq, Lk = mask.mask.scores_shape
    dtype, (q, k, v) = dout.dtype, (*heads, *_memory_heads(memory, mask)) if memory else heads
    dout = dout.view(B, Lq, H, -1).transpose(1, 2).contiguous().flatten(0, 1).to(q.dtype)
    if memory:
        dq, *found = _at_once.backward(dout, q, k, v, weights, *options, [torch.empty_like(t) for t in (q, k, v)])
        for grad, t in zip(dmemory, found, strict=True):
            grad.view(B, Lk, H, -1).copy_(t.view(B, H, Lk, -1).transpose(1, 2))
        return _as_rows(dq, B, H, dtype)
    grads = q.new_empty(3, *q.shape)
    _at_once.backward(dout, q, k, v, weights, *options, grads.unbind())
    return grads.view(3, B, H, Lq, -1).permute(1, 3, 0, 2, 4).reshape(B * Lq, -1).to(dtype)


def _heads(split: Tensor, mask: RowsMask) -> tuple[Tensor, ...]:
    """(n, B, H, L, D), the last two K and V, which it may change -> n of (B * H, L, D). 0 * NaN cannot reach a sum."""
    if mask.unseen is not None:
        split[-2:].view(-1, split.shape[4]).index_fill_(0, mask.unseen, 0)
    return split.flatten(1, 2).to(mask.products).unbind()


def _memory_heads(memory: Sequence[Tensor], mask: RowsMask) -> tuple[Tensor, ...]:
    B, H, _, Lk = mask.mask.scores_shape
    return _heads(torch.stack([t.view(B, Lk, H, -1).transpose(1, 2) for t in memory]), mask)


def _as_rows(t: Tensor, B: int, H: int, dtype: torch.dtype) -> Tensor:
    """(B * H, L, D) -> (B * L, H * D)"""
    return t.view(B, H, t.shape[1], -1).transpose(1, 2).reshape(B * t.shape[1], -1).to(dtype)


def _without_rows(t: Tensor, rows: Tensor) -> Tensor:
    """t (B, H, L, D), contiguous, with 0 in these rows of D numbers, unless all is known to be finite. Autograd is not
    told: the gradient of a key that no query attends to is 0 anyway."""
    if t.is_contiguous():
        if _known_finite(t):
            return t
        t = t.clone()
    else:
        t = t.contiguous()
    t.detach().view(-1, t.shape[3]).index_fill_(0, rows, 0)
    return t


BLOCKED, TORCH = "blocks", "PyTorch"  # the algorithms of a call on a CPU, as a record names them


def algorithm(q: Tensor, k: Tensor, dropout_p: float) -> str:
    """Blocks of heads, or PyTorch's operators: its fused one, or with dropout one after the other."""
    return timings.choice("attention by aten", "cpu", lambda: algorithm_key(q, k, dropout_p)) or _rule(q, k, dropout_p)


def algorithm_key(q: Tensor, k: Tensor, dropout_p: float) -> str:
    """The class of calls for which a record names one of the two algorithms."""
    gradient = ("gradient",) if torch.is_grad_enabled() else ()
    return timings.call_class(q.dtype, dropout_p, timings.size_bucket(k.shape[2], "keys", 64, 256, 1024), *gradient)


def _rule(q: Tensor, k: Tensor, dropout_p: float) -> str:
    """What was measured on an AMD EPYC, see _blocks.py."""
    if dropout_p > 0 or q.dtype == torch.bfloat16:  # products in float16 are slow on this processor
        return BLOCKED
    short = k.shape[2] <= 128 and q.shape[:3].numel() * k.shape[2] * q.itemsize <= MAX_SAVED_BYTES
    return BLOCKED if short and torch.is_grad_enabled() else TORCH


def _uses_blocks(q: Tensor, k: Tensor, dropout_p: float) -> bool:
    if not can_read_values(q):
        return False
    B, H, Lq, _ = q.shape
    weights = B * H * Lq * k.shape[2]
    if weights < MIN_WEIGHTS:
        return dropout_p > 0 and weights > 0 and may_write_in_place()
    return algorithm(q, k, dropout_p) == BLOCKED and may_write_in_place()


def _drop_noop_padding(mask: AttentionMask) -> AttentionMask | None:
    """The mask without its key_padding if that masks nothing, as in a batch of equal lengths; None if that was all.

    Requires can_read_values of the mask's tensors.
    """

    def build() -> AttentionMask | None:
        if not mask.key_padding.all():
            return None
        return mask.replace(key_padding=None, bias=None)

    lighter = mask.cached(("without no-op padding",), mask.key_padding.device, build)
    if lighter is None:
        return mask
    if mask.bias is not None:
        return lighter.with_bias(mask.bias)
    return None if lighter.band_only and not lighter.has_band else lighter


def _fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | None,
    masked: Tensor | None,
    scale: float,
    dropout_p: float,
) -> Tensor:
    Lq, Lk = q.shape[2], k.shape[2]
    if q.is_cuda and mask is not None:
        # PyTorch's one fused kernel with masks has no grouped heads: it would write all scores.
        k, v = _repeat_heads(k, v, q.shape[1])
        with sdpa_kernel(_MASKED_BACKENDS):
            return _torch_attention(q, k, v, None if masked is None else ~masked, scale, dropout_p)
    bias = None
    if mask is not None and masked is not None:  # PyTorch would turn a bool mask into this one at every call
        bias = mask.additive(masked, Lq, Lk, q.dtype)
    return _torch_attention(q, k, v, bias, scale, dropout_p)


def _torch_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, dropout_p: float, is_causal: bool = False
) -> Tensor:
    grouped = True if k.shape[1] != q.shape[1] else False  # PyTorch takes no bool of traced sizes
    # Not by its name in torch.nn.functional, where somebody may have put fastattn's function.
    out = torch._C._nn.scaled_dot_product_attention(
        q, k, v, bias, dropout_p, is_causal, scale=scale, enable_gqa=grouped
    )
    if out.requires_grad and not torch.compiler.is_compiling() and type(out.grad_fn).__name__ == _FUSED_ON_A_CPU:
        out.grad_fn.register_hook(_gradients_of_formula)
    return out


_FUSED_ON_A_CPU = "ScaledDotProductFlashAttentionForCpuBackward0"


def _gradients_of_formula(
    gradients: tuple[Tensor | None, ...], doutputs: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...] | None:
    """A hook of PyTorch's fused backward, which has no derivative: with create_graph=True its gradients are replaced by
    the formula's, where autograd asked for them. Takes what PyTorch kept, so that nothing is kept for it."""
    if not torch.is_grad_enabled():
        return None
    node = torch._C._current_autograd_node()
    score_mask = node._saved_attn_mask
    if node._saved_is_causal:
        Lq, Lk = node._saved_query.shape[2], node._saved_key.shape[2]
        score_mask = torch.ones(Lq, Lk, dtype=torch.bool, device=doutputs[0].device).triu_(1)

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = _repeat_heads(k, v, q.shape[1])
        return torch.matmul(plain_weights(q, k, score_mask, node._saved_scale).to(q.dtype), v)

    inputs = (node._saved_query, node._saved_key, node._saved_value)
    made = differentiable_gradients(formula, inputs, doutputs[:1])
    return *(None if old is None else new for old, new in zip(gradients, made, strict=False)), *gradients[3:]


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
    # In the order in memory: what a projection gives is transposed. PyTorch's dot of 16-bit numbers takes fifty times
    # as long as that of float32.
    laid_out = (t.detach() if t.is_contiguous() else t.detach().transpose(1, 2) for t in tensors)
    flat = (t.reshape(-1).to(torch.promote_types(t.dtype, torch.float32)) for t in laid_out)
    return all(math.isfinite(torch.dot(t, t)) for t in flat)


def _repeat_heads(k: Tensor, v: Tensor, H: int) -> tuple[Tensor, Tensor]:
    if k.shape[1] == H:
        return k, v
    return k.repeat_interleave(H // k.shape[1], dim=1), v.repeat_interleave(H // v.shape[1], dim=1)
