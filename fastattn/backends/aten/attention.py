"""Attention by PyTorch's operators. On a CPU it is a loop over the visible blocks of the mask.

    route = decide(q, k, v, mask, softmax_scale, dropout_p)                       once for all layers with one mask
    out = attend_rows(projected, memory, sizes, route, softmax_scale, dropout_p, rng_state)        for each layer

`decide` chooses what computes the blocks, PyTorch's fused operator or products (_blocks.py), finds the blocks that a
mask leaves (_visible.py), and whether packed sequences are computed as a batch (_sequences.py). All other calls, those
on a GPU among them, are plain operators (_plain.py). The fused operator has no weights, no lse, no gradient of a bias
and no second derivative. On a CPU it has no dropout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn._tracing import can_read_values, may_write_in_place
from fastattn.backends import attention_rows, cpu_matmul
from fastattn.backends.aten import _blocks
from fastattn.backends.aten._blocks import BlockAttention, scores_dtype, unstacked
from fastattn.backends.aten._plain import plain_attention, repeat_heads, torch_attention
from fastattn.backends.aten._sequences import UnpackingPlan, plan_unpacking
from fastattn.backends.aten._visible import Visible, visible_blocks
from fastattn.backends.reference import attention as reference
from fastattn.masks import AttentionMask
from fastattn.masks.relative import zero_distance

DIFFERENTIABLE = True

MIN_WEIGHTS = 1 << 14  # of fewer the fused operator is faster: products are called from Python
BLOCKED, TORCH = "blocks", "PyTorch"  # what computes the blocks of a call on a CPU


class Route(NamedTuple):
    """How calls are computed that share a mask, sizes and dtypes.

    mask: without what masks nothing; of packed sequences that are unpacked, that of the batch.
    by: BLOCKED for products, TORCH for PyTorch's fused operator, None for plain operators without blocks.
    products: the dtype of the products.     plan: how packed sequences are unpacked, or None if they are not.
    """

    mask: AttentionMask | None
    by: str | None = None
    visible: Visible | None = None
    products: torch.dtype | None = None
    plan: UnpackingPlan | None = None

    @property
    def is_single_call(self) -> bool:
        """Whether it is one call of PyTorch's operator, which autograd records."""
        return self.by == TORCH and self.visible.is_whole

    def describe(self, q: Tensor, k: Tensor) -> str:
        """For explain()."""
        batch = ""
        scores = q.shape[:3].numel() * k.shape[2]
        if self.plan is not None:
            sequences, longest = self.plan.keys.gather_index.shape
            batch = f"packed sequences are copied to a batch of {sequences} x {longest} keys; "
            scores = q.shape[1] * self.plan.padded
        if self.visible is None:
            return f"{batch}it is computed by matmul, softmax, matmul, with all scores in memory"
        blocks = self.visible.blocks
        share = sum(block.scores for block in blocks) / max(scores, 1)
        by = "products" if self.by == BLOCKED else "PyTorch's fused operator"
        return f"{batch}{share:.0%} of the scores are computed, in {len(blocks)} blocks of the mask, by {by}"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | None,
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
    softcap: float | None = None,
    *,
    return_lse: bool = True,
    return_weights: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As fastattn.backends.reference.attention.attention, which is the specification."""
    route = decide(q, k, v, mask, softmax_scale, dropout_p, softcap, return_lse, return_weights)
    return _attend((q, k, v), route, softmax_scale, dropout_p, rng_state, softcap, return_lse, return_weights)


def formula(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None, *options: Any) -> tuple[Tensor, ...]:
    """out, lse and the weights by the reference, with the dropout of `attention`: where packed sequences are unpacked,
    it is drawn for the batch that they make."""
    plan = None if mask is None else decide(q, k, v, mask, *options[:2], *options[3:]).plan
    if plan is None:
        return reference.attention(q, k, v, mask, *options[:4], return_weights=any(options[5:]))
    q, k, v = plan.queries.unpack(q), plan.keys.unpack(k), plan.keys.unpack(v)
    out, lse, _ = reference.attention(q, k, v, plan.mask, *options[:4])
    return plan.queries.pack(out), plan.queries.pack(lse[..., None]).squeeze(3)


def attend_rows(
    projected: Tensor,
    memory: Sequence[Tensor],
    sizes: attention_rows.Sizes,
    route: Route,
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
) -> Tensor:
    """out (B * L, H * Dv) of a call for which `decide` found this route: see fastattn/backends/attention_rows.py.

    Queries, keys and values of one product are copied by one operator, and their gradients are written as it reads
    them."""
    B, L, H, Hk, Dk, Dv = sizes
    options = route, softmax_scale, dropout_p, rng_state
    is_one = not memory and H == Hk and Dk == Dv and softmax_scale > 0 and route.visible is not None
    is_one = is_one and not route.is_single_call and route.visible.has_keys is None
    if is_one and (route.plan is None or route.plan.queries is route.plan.keys):
        tensors: Sequence[Tensor] = (projected.view(B, L, 3, H, Dk).permute(2, 0, 3, 1, 4),)
    else:
        tensors = attention_rows.heads(projected, memory, sizes)
    out = _attend(tensors, *options, as_rows=True)[0]
    return out if out.dim() == 2 else out.transpose(1, 2).reshape(B * L, H * Dv)


def decide(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | None,
    softmax_scale: float,
    dropout_p: float,
    softcap: float | None = None,
    return_lse: bool = False,
    return_weights: bool = False,
) -> Route:
    """How to compute such calls. Of q, k and v it reads shapes, dtypes and the device, and no values."""
    if not can_read_values(q) or softcap is not None:
        return Route(mask)
    if mask is not None and mask.cu_seqlens_q is not None and not return_weights:
        plan = plan_unpacking(mask, q, k)
        if plan is not None and (return_lse or _unpacks(q, k, v, mask, plan, dropout_p)):
            q, k, v = (
                t.new_empty(()).expand(len(axis.gather_index), t.shape[1], axis.gather_index.shape[1], t.shape[3])
                for t, axis in ((q, plan.queries), (k, plan.keys), (v, plan.keys))
            )
            return decide(q, k, v, plan.mask, softmax_scale, dropout_p, None, return_lse)._replace(plan=plan)
    weights, dtype = q.shape[:3].numel() * k.shape[2], q.dtype
    is_relative = mask is not None and mask.relative_bias is not None
    learns = mask is not None and torch.is_grad_enabled() and mask.any_bias is not None and mask.any_bias.requires_grad
    in_mode = torch._C._len_torch_dispatch_stack() > 0  # nothing is compiled here: see may_write_in_place
    if return_lse or return_weights or weights == 0 or in_mode or (learns and not is_relative):
        return Route(mask)
    by_torch = dropout_p == 0 and v.shape[3] == q.shape[3]
    if is_relative:  # the operator has no gradient of it, and would get a mask as large as all scores of the batch
        by_products = learns or not by_torch or dtype == torch.float16 or not _is_shared(mask)
    else:
        by_products = (mask is None or mask.bias is None) and _uses_products(q, k, mask, dropout_p)
    if by_products:
        # Small products are slower in 16 bits, and all products in float16, which scores may exceed.
        is_wide = dtype == torch.float16 or (weights <= MIN_WEIGHTS and not is_relative)
        products = torch.promote_types(dtype, torch.float32) if is_wide else dtype
        # Adding -inf is cheaper than choosing it, but inf - inf would be NaN.
        is_bool = is_relative or abs(softmax_scale) > 1
        mask_dtype = torch.bool if is_bool else scores_dtype(products, k.shape[2])
        return Route(mask, BLOCKED, visible_blocks(mask, q, k, mask_dtype, by_torch=False), products)
    if by_torch:
        return Route(mask, TORCH, visible_blocks(mask, q, k, dtype, by_torch=True), dtype)
    return Route(mask)


def _is_shared(mask: AttentionMask) -> bool:
    """Whether it is the same for all sentences."""
    return all([t is None or len(t) == 1 for t in (mask.attn_mask, mask.key_padding, mask.query_padding)])


def _unpacks(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, plan: UnpackingPlan, dropout_p: float) -> bool:
    """Whether packed sequences are unpacked. Otherwise each is computed where it is, as a block."""
    if dropout_p > 0 or v.shape[3] != q.shape[3] or not may_write_in_place():
        return True
    weights = q.shape[1] * q.shape[2] * k.shape[2]
    return weights >= MIN_WEIGHTS and algorithm(q, dropout_p) == BLOCKED and plan.pays(q.shape[1])


def _uses_products(q: Tensor, k: Tensor, mask: AttentionMask | None, dropout_p: float) -> bool:
    sequences = 1 if mask is None or mask.cu_seqlens_q is None else max(len(mask.cu_seqlens_q) - 1, 1)
    weights = q.shape[:3].numel() * k.shape[2] // sequences**2  # they are computed one after the other
    # A sequence alone is worth its products without a gradient only if it is long. In bfloat16 PyTorch's backward of
    # few weights takes twice as long as products in float32.
    if weights < (MIN_WEIGHTS if sequences == 1 or torch.is_grad_enabled() else 8 * MIN_WEIGHTS):
        is_slow = q.dtype is torch.bfloat16 and torch.is_grad_enabled() and sequences == 1
        return weights > 0 and (dropout_p > 0 or (is_slow and algorithm(q, dropout_p) == BLOCKED))
    return algorithm(q, dropout_p) == BLOCKED


def algorithm(q: Tensor, dropout_p: float) -> str:
    """Blocks of heads, or PyTorch's operators: its fused one, or with dropout one after the other.

    Measured on two processors with AVX-512, an AMD EPYC, see _blocks.py, and an Intel Xeon without AMX. On that one
    blocks are slower in bfloat16 without a gradient. On both PyTorch's products in float16 are slow. In float32 without
    dropout the two take the same time, and PyTorch's operator keeps no weights."""
    if dropout_p > 0:
        return BLOCKED
    if q.dtype == torch.bfloat16:
        return BLOCKED if torch.is_grad_enabled() or "AMD" in cpu_matmul.cpu_name() else TORCH
    return TORCH


def _attend(
    tensors: Sequence[Tensor],
    route: Route,
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
    softcap: float | None = None,
    return_lse: bool = False,
    return_weights: bool = False,
    as_rows: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """tensors: q, k and v (B, H, L, D); or one of them stacked, if every query has a key and softmax_scale > 0.

    as_rows: out may be (B * Lq, H * Dv)."""
    if softmax_scale <= 0:  # PyTorch's is_causal sets scores to -inf before it scales them, and alpha=0 skips a product
        q, k, v = tensors
        softmax_scale, tensors = (1.0, (q * 0, k, v)) if softmax_scale == 0 else (-softmax_scale, (-q, k, v))
    plan = route.plan
    if plan is not None:
        axes = plan.queries, plan.keys, plan.keys
        tensors = [axis.unpack(t) for t, axis in zip(tensors, axes, strict=False)]
    options, lse, weights = (softmax_scale, dropout_p, rng_state), None, None
    if route.visible is not None:
        out = _attend_blocks(tensors, route, as_rows and plan is None, *options)
    else:
        bias = None if route.mask is None else route.mask.bias
        learns = bias is not None and bias.requires_grad and torch.is_grad_enabled()
        alone = not (return_lse or return_weights or learns)
        q, k, v = tensors
        others = (alone, return_lse, return_weights)
        out, lse, weights = plain_attention(q, k, v, route.mask, *options, softcap, *others)
    if plan is not None:
        out, lse = plan.queries.pack(out), None if lse is None else plan.queries.pack(lse[..., None]).squeeze(3)
    return out, lse, weights


def _attend_blocks(
    tensors: Sequence[Tensor],
    route: Route,
    as_rows: bool,
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
) -> Tensor:
    visible, by_torch, options = route.visible, route.by == TORCH, (softmax_scale, dropout_p, rng_state)
    is_single_call = by_torch and visible.is_whole
    bias = None if route.mask is None else route.mask.any_bias
    layout = tensors[0].shape[-3], tensors[0].dtype, as_rows and visible.has_keys is None
    call = _blocks.Call(visible, by_torch, *options, *layout)
    if not by_torch and bias is not None:  # a relative one
        wide = bias.detach().to(torch.promote_types(route.products, torch.float32))
        zero = zero_distance(bias.shape[1], tensors[0].shape[-2], tensors[-1].shape[-2])
        call = call._replace(relative_bias=wide.expand(call.n_head, -1), zero_distance=zero)
    if visible.has_keys is not None:  # a query without one may be NaN
        q, *others = tensors
        tensors = q.where(visible.has_keys, 0), *others
    learns, out = torch.is_grad_enabled(), None
    if by_torch and not (learns and any([t is not None and t.requires_grad for t in (*tensors, bias)])):
        out = _one_call(call, tensors) if is_single_call else _blocks.forward_by_operator(call, tensors)[0]
        # What is hidden shows in the result, or did no harm: one sum, and not one of k and one of v.
        out = out if visible.unseen is None or math.isfinite(out.sum()) else None
    if out is None:
        tensors = _laid_out(tensors, route)
        out = _one_call(call, tensors) if is_single_call else BlockAttention.apply(call, bias, *tensors)
    return out if visible.has_keys is None else out.where(visible.has_keys, 0)


def _one_call(call: _blocks.Call, tensors: Sequence[Tensor]) -> Tensor:
    """One call of PyTorch's operator. Newer versions of it read grouped heads as they are, without a gradient."""
    (q, k, v), (block,) = unstacked(tensors), call.visible.blocks
    scale, mask, is_causal = call.softmax_scale, block.score_mask, block.is_causal
    if k.shape[1] != q.shape[1]:
        if not ((is_causal and mask is not None) or torch.is_grad_enabled()):
            return torch_attention(q, k, v, mask, scale, 0.0, is_causal)
        k, v = repeat_heads(k, v, q.shape[1])
    return _blocks.operator(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)[0]


def _laid_out(tensors: Sequence[Tensor], route: Route) -> Sequence[Tensor]:
    """The tensors without the keys that no query attends to, if these may hold NaN: 0 * NaN must not reach the sums.
    For products also contiguous, with equally many heads, in their dtype, and (B * H, L, D)."""
    unseen, H = route.visible.unseen, tensors[0].shape[-3]
    if unseen is not None and not all([math.isfinite(t.detach().sum()) for t in tensors[-2:]]):
        q, k, v = unstacked(tensors)
        tensors = q, k.masked_fill(unseen, 0), v.masked_fill(unseen, 0)
    if route.by == TORCH:
        return tensors
    found = []
    for t in tensors:
        t = t.contiguous() if t.dtype is route.products else t.to(route.products, memory_format=torch.contiguous_format)
        found.append((t if t.shape[-3] == H else t.repeat_interleave(H // t.shape[-3], -3)).flatten(-4, -3))
    return found
