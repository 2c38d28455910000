"""Attention's kernels for Hopper, csrc/attention/*_sm90.cu: which calls they serve, and how they are called."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.cuda import (
    DTYPES,
    _visibility,
    address,
    compute_capability,
    device_index,
    dropout_constants,
    extension,
    stream,
)
from fastattn.masks import AttentionMask

MAX_HEAD_DIM_SUM = 128  # kMaxHeadDimSum
ROW_BLOCK = 128  # kRowBlock
MAX_SHORT = 128  # kMaxShort
COARSE = 64.0  # an lse beyond it is coarse to 16-bit types: half a unit in its last place is 4e-6
# Whether dq may be the sum of what blocks add in any order, which does not repeat bit for bit, in place of a kernel of
# its own. Only a record that shows it to be faster (benchmarks/results/) turns it on; until then it is turned on by
# tests and by who makes that record.
ACCUMULATE_DQ = False
_CAPABILITY = 90  # they are built for sm_90a, which nothing else runs


def serves(*tensors: Tensor) -> bool:
    """Whether TMA can read and write these (B, H, L, D), on this device; if not, the kernels of sm_80 do."""
    x = tensors[0]
    if x.dtype not in (torch.bfloat16, torch.float16) or compute_capability(x) != _CAPABILITY:
        return False
    return all(_has_vectors(t) for t in tensors)


def _has_vectors(t: Tensor) -> bool:
    """Rows, heads and samples start at multiples of 16 bytes, and none is expanded."""
    steps = (t.stride(i) for i in range(3) if t.shape[i] > 1)
    return t.numel() > 0 and t.data_ptr() % 16 == 0 and t.shape[3] % 8 == 0 and all(s > 0 and s % 8 == 0 for s in steps)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: AttentionMask | None,
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
) -> None:
    """Fills out and lse."""
    module = extension(q.device)
    block_m, block_n = module.attention_fwd_sm90_tile(max(q.shape[3], v.shape[3]))
    if k.shape[2] <= MAX_SHORT:  # no lists
        block_m = 0
    who, kept = _visibility.visibility(mask, q.shape[2], k.shape[2], block_m, block_n, False, q.device)
    next_work = torch.empty(1, dtype=torch.int32, device=q.device)
    module.attention_fwd_sm90(
        *map(_visibility.rows, (q, k, v, out)), address(lse), _visibility.shape(q, k, v), softmax_scale, who,
        _visibility.bias(mask), address(rng_state), *dropout_constants(dropout_p), DTYPES[q.dtype], address(next_work),
        device_index(q), stream(q),
    )  # fmt: skip


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    mask: AttentionMask | None,
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
    *,
    needs_dbias: bool,
    exact: bool,
) -> Tensor | None:
    """Fills dq, dk and dv; returns the gradient, if needed, of a bias with keys. lse and dlse are contiguous. exact:
    delta is made from its definition, not from out."""
    module = extension(q.device)
    (B, H, Lq, D), Lk = q.shape, k.shape[2]
    bias = None if mask is None else mask.bias
    exact |= needs_dbias
    dbias = key_sums = sums = None
    coarse = (None, None)  # delta and remainder, where some rows may want them more exactly than others
    if bias is not None and not exact:
        coarse = torch.empty(2, B, H, Lq, dtype=torch.float32, device=q.device)
    if needs_dbias and bias.shape[2] == 1:  # shared by all queries: a by-product of dk
        key_sums = torch.empty(B, H, Lk, dtype=torch.float32, device=q.device)
    elif needs_dbias:
        dbias = torch.empty_like(bias, memory_format=torch.contiguous_format)
    if not exact and _accumulates(max(D, v.shape[3]), bias, dropout_p):
        sums = torch.empty(B, H, Lq, D, dtype=torch.float32, device=q.device)
    padded = torch.empty(3, B, H, -(-Lq // ROW_BLOCK) * ROW_BLOCK, dtype=torch.float32, device=q.device)
    of_queries, of_keys, own_keys, streamed_queries = module.attention_bwd_sm90_tiles(max(D, v.shape[3]))
    by_query, kept = _visibility.visibility(mask, Lq, Lk, of_queries, of_keys, False, q.device)
    by_key, kept_too = _visibility.visibility(mask, Lq, Lk, streamed_queries, own_keys, True, q.device)
    module.attention_bwd_sm90(
        [*map(_visibility.rows, (q, k, v, out, dout, dq, dk, dv))],
        [*map(address, (lse, dlse, *coarse, key_sums))],
        (address(padded[0]), address(padded[1]), address(padded[2]) if exact or bias is not None else 0), address(sums),
        _visibility.shape(q, k, v), softmax_scale, 0.0 if exact else COARSE, by_query, by_key,
        _visibility.bias(mask), (0, 0, 0) if dbias is None else (address(dbias), *bias.shape[:2]),
        address(rng_state), *dropout_constants(dropout_p), DTYPES[q.dtype], device_index(q), stream(q),
    )  # fmt: skip
    if key_sums is None:
        return dbias
    return key_sums.sum_to_size(*bias.shape[:2], Lk).unsqueeze(2).to(bias.dtype)


def _accumulates(head_dim: int, bias: Tensor | None, dropout_p: float) -> bool:
    """Whether dq is such a sum."""
    allowed = ACCUMULATE_DQ and not torch.are_deterministic_algorithms_enabled()
    return allowed and bias is None and dropout_p == 0 and head_dim <= MAX_HEAD_DIM_SUM
