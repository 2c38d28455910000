"""Attention by PyTorch's fused operator, by blocks of heads (_blocks.py), or by matmul, softmax, matmul.

On a CPU the first two compute the visible blocks of a mask alone (_visible.py). The fused operator has no weights, no
lse, and no gradient of a bias. On a CPU it has no dropout, and on a GPU it rounds a bias to the dtype of the queries,
and has no second derivative.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastattn._tracing import can_read_values, known_equal, may_write_in_place
from fastattn.backends import timings
from fastattn.backends.aten import _at_once, _fused
from fastattn.backends.aten._at_once import AtOnceMask, AttentionAtOnce, add_score_mask, plain_scores, repeat_heads
from fastattn.backends.aten._blocks import BLOCK_BYTES, MAX_SAVED_BYTES, BlockedAttention
from fastattn.backends.aten._sequences import PackedAxis, UnpackingPlan, plan_unpacking
from fastattn.backends.aten._visible import Visible, visible_blocks
from fastattn.backends.reference import philox
from fastattn.masks import AttentionMask

DIFFERENTIABLE = True

_CPU = torch.device("cpu")
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
            if plan is not None and (return_lse or _unpacks(q, k, v, mask, plan, dropout_p)):
                return _attend_unpacked(q, k, v, plan, softmax_scale, dropout_p, rng_state, return_lse)
    return _attend(q, k, v, mask, softmax_scale, dropout_p, rng_state, return_lse, return_weights)


def _unpacks(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, plan: UnpackingPlan, dropout_p: float) -> bool:
    """Whether packed sequences are unpacked. Otherwise each is computed where it is, as a block."""
    if dropout_p > 0 or v.shape[3] != q.shape[3] or not may_write_in_place():
        return True
    return _uses_blocks(q, k, mask, dropout_p) and plan.pays(q.shape[1])


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
    if softmax_scale <= 0:  # PyTorch's is_causal sets scores to -inf before it scales them, and alpha=0 skips a product
        q, softmax_scale = (-q, -softmax_scale) if softmax_scale < 0 else (q * 0, 1.0)
    bias = None if mask is None else mask.bias
    # Of empty calls PyTorch's operators for GPUs refuse some. In a graph a size may be unknown.
    is_empty = Lk == 0 or (not torch.compiler.is_compiling() and q.numel() == 0)
    alone = not _learns_bias(mask) and not return_lse and return_weights is None and not is_empty
    if alone and (way := _way(q, k, v, mask, softmax_scale, dropout_p)) is not None:
        if way == TORCH:
            return _attend_fused(q, k, v, mask, softmax_scale), None, None
        return _attend_by_blocks(q, k, v, mask, softmax_scale, dropout_p, rng_state), None, None
    fused = alone and (rng_state is None or (q.is_cuda and dropout_p < 1))  # 1 - dropout_p divides
    fused = fused and (bias is None or (q.is_cuda and bias.dtype == q.dtype))
    has_band_alone = mask is not None and mask.band_only and bias is None
    if fused and has_band_alone and known_equal(Lq, Lk) and mask.is_causal(Lq, Lk):
        return _torch_attention(q, k, v, None, softmax_scale, dropout_p, is_causal=True), None, None

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
        out = _fused_whole(q, k, v, mask, masked, has_keys, softmax_scale, dropout_p)
        return out if has_keys is None else out.where(has_keys, 0), None, None

    k, v = repeat_heads(k, v, H)
    score_mask = masked
    # Adding -inf is cheaper than choosing it, and passes the gradient as it is, but inf - inf would be NaN.
    if masked is not None and softmax_scale <= 1 and finite:
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


def describe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | None,
    dropout_p: float,
    return_lse: bool = False,
    return_weights: bool | str = False,
) -> str:
    """How `attention` computes a call on a CPU, for explain()."""
    if mask is not None and mask.key_padding is not None:
        mask = _drop_noop_padding(mask)
    plan = None if mask is None or mask.cu_seqlens_q is None else plan_unpacking(mask, q, k)
    if plan is not None and not return_weights and (return_lse or _unpacks(q, k, v, mask, plan, dropout_p)):
        sequences, longest = plan.keys.gather_index.shape
        return f"packed sequences are copied to a batch of {sequences} x {longest} keys"
    is_whole = return_lse or return_weights or _learns_bias(mask) or k.shape[2] == 0
    way = None if is_whole else _way(q, k, v, mask, 1.0, dropout_p)
    if way is None:
        return "it is computed by matmul, softmax, matmul, with all scores in memory"
    by = "products of a few heads at a time" if way == BLOCKED else "PyTorch's fused operator"
    visible = visible_blocks(mask, q, k, q.dtype, by_torch=way == TORCH)
    computed = sum(math.prod(part.stop - part.start for part in block[:3]) for block in visible.blocks)
    share = computed / max(q.shape[0] * q.shape[2] * k.shape[2], 1)
    return f"{share:.0%} of the scores are computed, in {len(visible.blocks)} blocks of the mask, by {by}"


def _learns_bias(mask: AttentionMask | None) -> bool:
    return mask is not None and mask.bias is not None and mask.bias.requires_grad and torch.is_grad_enabled()


def _way(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None, softmax_scale: float, dropout_p: float
) -> str | None:
    """BLOCKED or TORCH: what computes out alone on a CPU. None: neither."""
    if not (can_read_values(q) and may_write_in_place()):
        return None
    sequences = 1 if mask is None or mask.cu_seqlens_q is None else max(len(mask.cu_seqlens_q) - 1, 1)
    if (mask is None or mask.bias is None) and _uses_blocks(q, k, mask, dropout_p, sequences):
        return BLOCKED
    return TORCH if dropout_p == 0 and v.shape[3] == q.shape[3] and q.shape[:3].numel() > 0 else None


def _attend_fused(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None, softmax_scale: float) -> Tensor:
    visible = visible_blocks(mask, q, k, q.dtype, by_torch=True)
    needs_gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    out = None
    if not needs_gradient:
        block = visible.blocks[0] if visible.is_whole else None
        if block is not None and k.shape[1] != q.shape[1] and not (block.is_causal and block.score_mask is not None):
            # Newer versions of PyTorch read grouped heads as they are.
            out = _torch_attention(q, k, v, block.score_mask, softmax_scale, 0.0, block.is_causal)
        else:
            out, _ = _fused.forward(q, k, v, visible, softmax_scale)
        # What is hidden shows in the result, or did no harm: one sum, and not one of k and one of v.
        out = out if visible.unseen is None or math.isfinite(out.sum()) else None
    if out is None:
        q, k, v = _hide(q, k, v, visible, copies=False)
        out = _fused.FusedAttention.apply(q, k, v, visible, softmax_scale)
    return out if visible.has_keys is None else out.where(visible.has_keys, 0)


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
    # Adding -inf is cheaper than choosing it, but inf - inf would be NaN.
    mask_dtype = torch.bool if softmax_scale > 1 else acc if at_once else products
    visible = visible_blocks(mask, q, k, mask_dtype, most_scores=BLOCK_BYTES // products.itemsize, cuts=not at_once)
    q, k, v = _hide(q, k, v, visible, copies=True)
    k, v = repeat_heads(k, v, H)
    q, k, v = (t.to(products).contiguous() for t in (q, k, v))  # once, for all products of both ways
    if at_once:
        (block,) = visible.blocks
        heads, at_once_mask = (t.flatten(0, 1) for t in (q, k, v)), AtOnceMask((B, H, Lq, Lk), block.score_mask)
        out = AttentionAtOnce.apply(*heads, at_once_mask, softmax_scale, dropout_p, rng_state).view(B, H, Lq, -1)
    else:
        out = BlockedAttention.apply(q, k, v, visible, softmax_scale, dropout_p, rng_state)
    out = out.to(dtype)
    return out if visible.has_keys is None else out.where(visible.has_keys, 0)


def _hide(q: Tensor, k: Tensor, v: Tensor, visible: Visible, copies: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Without what may be NaN and must reach nothing. copies: k and v are made contiguous anyway."""
    if visible.has_keys is not None:
        q = q.where(visible.has_keys, 0)
    if visible.unseen is not None:  # 0 * NaN must not reach the sums
        k, v = (_without_rows(t, visible.unseen, copies) for t in (k, v))
    return q, k, v


def _block_dtypes(B: int, H: int, Lq: int, Lk: int, dtype: torch.dtype) -> tuple[torch.dtype, bool, torch.dtype]:
    """That of the softmax, whether all scores are computed at once, and the dtype of the products."""
    acc, weights = torch.float64 if dtype == torch.float64 else torch.float32, B * H * Lq * Lk
    # Small products are slower in 16 bits, and all products in float16, which scores may exceed.
    products = acc if weights <= MIN_WEIGHTS or dtype == torch.float16 else dtype
    return acc, weights * acc.itemsize <= BLOCK_BYTES, products


# For the calls with which a small model trains, and with the same numbers as _attend_by_blocks: forward and backward of
# rows, (B * L, heads * D), as products give and read them.


class RowsMask(NamedTuple):
    """A mask as attention_rows_fwd reads it, made once for all layers.

    unseen: as of Visible, of the rows of K and V together, (2 * B * H * Lk, D).     products: see _block_dtypes.
    queries, keys: of packed sequences, which are computed as a batch, as mask describes it.
    """

    mask: AtOnceMask
    unseen: Tensor | None
    products: torch.dtype
    queries: PackedAxis | None = None
    keys: PackedAxis | None = None


def rows_mask(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None, softmax_scale: float, dropout_p: float
) -> RowsMask | None:
    """None: attention_rows_fwd does not compute such a call. The values of q, k and v are not read."""
    if mask is not None and mask.cu_seqlens_q is not None:
        plan = plan_unpacking(mask, q, k) if can_read_values(q) else None
        if plan is None or not _unpacks(q, k, v, mask, plan, dropout_p):
            return None
        axes = plan.queries, plan.keys, plan.keys
        batch = (
            t.new_empty(()).expand(len(a.gather_index), t.shape[1], a.gather_index.shape[1], t.shape[3])
            for t, a in zip((q, k, v), axes, strict=True)
        )
        found = rows_mask(*batch, plan.mask, softmax_scale, dropout_p)
        return None if found is None else found._replace(queries=plan.queries, keys=plan.keys)
    shape = B, H, Lq, Lk = *q.shape[:3], k.shape[2]
    if (
        softmax_scale == 0
        or Lk == 0
        or k.shape[1] != H
        or k.shape != v.shape
        or not _uses_blocks(q, k, mask, dropout_p)
    ):
        return None
    acc, at_once, products = _block_dtypes(*shape, q.dtype)
    if mask is None or not at_once:
        return RowsMask(AtOnceMask(shape, None), None, products) if at_once else None
    if mask.bias is not None:
        return None

    def build() -> RowsMask | None:
        masked, has_keys, has_queries = mask.visible(Lq, Lk, _CPU)
        if has_keys is not None:
            return None
        unseen, score_mask = None, masked
        if has_queries is not None:
            unseen = (~has_queries.squeeze(3)).expand(2, B, H, Lk).flatten().nonzero().squeeze(1)
        if masked is not None and abs(softmax_scale) <= 1:  # see _attend_by_blocks
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
    Of packed sequences B is 1, and L the number of tokens.
    """
    B, H, Lq, _ = mask.mask.scores_shape
    if mask.queries is not None:
        n = 1 if memory else 3
        split = mask.queries.unpack_rows(projected.view(len(projected), n, H, -1).permute(1, 2, 0, 3))
        heads = (split[0].flatten(0, 1).to(mask.products),) if memory else _heads(split, mask)
    elif memory:
        heads = (projected.view(B, Lq, H, -1).transpose(1, 2).contiguous().flatten(0, 1).to(mask.products),)
    else:
        heads = _heads(projected.view(B, Lq, 3, H, -1).permute(2, 0, 3, 1, 4).contiguous(), mask)
    q, k, v = (*heads, *_memory_heads(memory, mask)) if memory else heads
    out, weights = _at_once.forward(q, k, v, mask.mask, softmax_scale, dropout_p, rng_state, saves=True)
    return _as_rows(out, mask, projected.dtype), weights, *heads


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
    if mask.queries is None:
        dout = dout.view(B, Lq, H, -1).transpose(1, 2).contiguous()
    else:
        (dout,) = mask.queries.unpack_rows(dout.view(1, len(dout), H, -1).transpose(1, 2))
        dout = mask.queries.clear_beyond_end(dout)
    dout = dout.flatten(0, 1).to(q.dtype)
    if memory:
        dq, *found = _at_once.backward(dout, q, k, v, weights, *options, [torch.empty_like(t) for t in (q, k, v)])
        for grad, t in zip(dmemory, found, strict=True):
            if mask.keys is None:
                grad.view(B, Lk, H, -1).copy_(t.view(B, H, Lk, -1).transpose(1, 2))
            else:
                mask.keys.pack_rows(t.view(1, B, H, Lk, -1).to(grad.dtype), out=grad)
        return _as_rows(dq, mask, dtype)
    grads = q.new_empty(3, *q.shape)
    _at_once.backward(dout, q, k, v, weights, *options, grads.unbind())
    grads = grads.view(3, B, H, Lq, -1)
    if mask.queries is None:
        return grads.permute(1, 3, 0, 2, 4).reshape(B * Lq, -1).to(dtype)
    return mask.queries.pack_rows(grads).flatten(1).to(dtype)


def _heads(split: Tensor, mask: RowsMask) -> tuple[Tensor, ...]:
    """(n, B, H, L, D), the last two K and V, which it may change -> n of (B * H, L, D). 0 * NaN cannot reach a sum."""
    if mask.unseen is not None:
        split[-2:].view(-1, split.shape[4]).index_fill_(0, mask.unseen, 0)
    return split.flatten(1, 2).to(mask.products).unbind()


def _memory_heads(memory: Sequence[Tensor], mask: RowsMask) -> tuple[Tensor, ...]:
    B, H, _, Lk = mask.mask.scores_shape
    if mask.keys is None:
        return _heads(torch.stack([t.view(B, Lk, H, -1).transpose(1, 2) for t in memory]), mask)
    split = memory[0].new_empty(2, B, H, Lk, memory[0].shape[2] // H)
    for t, part in zip(memory, split, strict=True):
        mask.keys.unpack_rows(t.view(1, -1, H, part.shape[3]).transpose(1, 2), out=part)
    return _heads(split, mask)


def _as_rows(t: Tensor, mask: RowsMask, dtype: torch.dtype) -> Tensor:
    """Heads of queries (B * H, L, D) -> (rows, H * D)"""
    B, H, L, _ = mask.mask.scores_shape
    if mask.queries is None:
        return t.view(B, H, L, -1).transpose(1, 2).reshape(B * L, -1).to(dtype)
    return mask.queries.pack_rows(t.view(1, B, H, L, -1)).flatten(1).to(dtype)


def _without_rows(t: Tensor, rows: Tensor, copies: bool) -> Tensor:
    """t (B, H, L, D) with 0 in these rows of D numbers, unless all is known to be finite. Autograd is not told: the
    gradient of a key that no query attends to is 0 anyway."""
    if (t.is_contiguous() or not copies) and math.isfinite(t.detach().sum()):
        return t
    t = t.clone(memory_format=torch.contiguous_format)
    t.detach().view(-1, t.shape[3]).index_fill_(0, rows, 0)
    return t


BLOCKED, TORCH = "blocks", "PyTorch"  # the algorithms of a call on a CPU, as a record names them


def algorithm(q: Tensor, k: Tensor, mask: AttentionMask | None, dropout_p: float) -> str:
    """Blocks of heads, or PyTorch's operators: its fused one, or with dropout one after the other."""
    recorded = timings.choice("attention by aten", "cpu", lambda: algorithm_key(q, k, mask, dropout_p))
    return recorded or _rule(q, k, dropout_p)


def algorithm_key(q: Tensor, k: Tensor, mask: AttentionMask | None, dropout_p: float) -> str:
    """The class of calls for which a record names one of the two algorithms."""
    is_causal = mask is not None and mask.is_causal(q.shape[2], k.shape[2])
    traits = () if mask is None else ("causal",) if is_causal else ("mask",)
    gradient = ("gradient",) if torch.is_grad_enabled() else ()
    keys = timings.size_bucket(k.shape[2], "keys", 64, 256, 1024)
    return timings.call_class(q.dtype, dropout_p, keys, *traits, *gradient)


def _rule(q: Tensor, k: Tensor, dropout_p: float) -> str:
    """What was measured on two processors with AVX-512, an AMD EPYC, see _blocks.py, and an Intel Xeon without AMX. On
    that one blocks are slower in bfloat16 without a gradient. On both PyTorch's products in float16 are slow."""
    if dropout_p > 0:
        return BLOCKED
    if q.dtype == torch.bfloat16:
        return BLOCKED if torch.is_grad_enabled() or "AMD" in timings.device_name("cpu") else TORCH
    short = k.shape[2] <= 128 and q.shape[:3].numel() * k.shape[2] * q.itemsize <= MAX_SAVED_BYTES
    return BLOCKED if short and torch.is_grad_enabled() else TORCH


def _uses_blocks(q: Tensor, k: Tensor, mask: AttentionMask | None, dropout_p: float, sequences: int = 1) -> bool:
    """sequences: as many are packed in q and k, and computed one after the other."""
    if not can_read_values(q):
        return False
    B, H, Lq, _ = q.shape
    weights = B * H * Lq * k.shape[2] // sequences**2
    # A sequence alone is worth its products without a gradient only if it is long.
    if weights < (MIN_WEIGHTS if sequences == 1 or torch.is_grad_enabled() else 8 * MIN_WEIGHTS):
        return dropout_p > 0 and weights > 0 and may_write_in_place()
    return algorithm(q, k, mask, dropout_p) == BLOCKED and may_write_in_place()


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


def _fused_whole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | None,
    masked: Tensor | None,
    has_keys: Tensor | None,
    scale: float,
    dropout_p: float,
) -> Tensor:
    """All scores in one call of PyTorch's operator: on a GPU, and on any device where values cannot be read."""
    if mask is None:
        return _torch_attention(q, k, v, None, scale, dropout_p)
    if mask.bias is not None:
        score_mask = _without_masked(mask.bias, None, has_keys)
        score_mask = score_mask if masked is None else score_mask.masked_fill(masked, -torch.inf)
    else:
        score_mask = None if masked is None else ~masked
    if not q.is_cuda:
        return _torch_attention(q, k, v, score_mask, scale, dropout_p)
    # PyTorch's one fused kernel with masks has no grouped heads: it would write all scores.
    k, v = repeat_heads(k, v, q.shape[1])
    with sdpa_kernel(_MASKED_BACKENDS):
        return _torch_attention(q, k, v, score_mask, scale, dropout_p)


def _torch_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, dropout_p: float, is_causal: bool = False
) -> Tensor:
    grouped = True if k.shape[1] != q.shape[1] else False  # PyTorch takes no bool of traced sizes
    # Not by its name in torch.nn.functional, where somebody may have put fastattn's function.
    return torch._C._nn.scaled_dot_product_attention(
        q, k, v, bias, dropout_p, is_causal, scale=scale, enable_gqa=grouped
    )


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
