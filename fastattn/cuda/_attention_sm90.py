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

MAX_HEAD_DIM_BACKWARD = 128  # kMaxHeadDimSm90Backward
ROW_BLOCK = 128  # kRowBlock
# Whether dq may be the sum of what blocks add in any order, which does not repeat bit for bit. Only a record that shows
# it to be faster (benchmarks/results/) turns it on; until then it is turned on by tests and by who makes that record.
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
    who, kept = _visibility.visibility(mask, q.shape[2], k.shape[2], block_m, block_n, False, q.device)
    next_work = torch.empty(1, dtype=torch.int32, device=q.device)
    module.attention_fwd_sm90(
        *map(_visibility.rows, (q, k, v, out)), address(lse), _visibility.shape(q, k, v), softmax_scale, who,
        _visibility.bias(mask), address(rng_state), *dropout_constants(dropout_p), DTYPES[q.dtype], address(next_work),
        device_index(q), stream(q),
    )  # fmt: skip


def serves_backward(mask: AttentionMask | None, *tensors: Tensor) -> bool:
    """tensors: q, k, v, out, dout, dq, dk, dv."""
    bias = None if mask is None else mask.bias
    narrow = all(t.shape[3] <= MAX_HEAD_DIM_BACKWARD for t in tensors)
    repeats = not ACCUMULATE_DQ or torch.are_deterministic_algorithms_enabled()
    return bias is None and narrow and not repeats and serves(*tensors)


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
) -> None:
    """Fills dq, dk and dv. lse and dlse are contiguous."""
    module = extension(q.device)
    own, streamed = module.attention_bwd_sm90_tile(max(q.shape[3], v.shape[3]))
    by_key, kept = _visibility.visibility(mask, q.shape[2], k.shape[2], streamed, own, True, q.device)
    B, H, Lq, D = q.shape
    rows = torch.empty(2, B, H, -(-Lq // ROW_BLOCK) * ROW_BLOCK, dtype=torch.float32, device=q.device)
    sums = torch.empty(B, H, Lq, D, dtype=torch.float32, device=q.device)
    module.attention_bwd_sm90(
        [*map(_visibility.rows, (q, k, v, out, dout, dq, dk, dv))], (address(lse), address(dlse)),
        (address(sums), address(rows[0]), address(rows[1])), _visibility.shape(q, k, v), softmax_scale, by_key,
        address(rng_state), *dropout_constants(dropout_p), DTYPES[q.dtype], device_index(q), stream(q),
    )  # fmt: skip
