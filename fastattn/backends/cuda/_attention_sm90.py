"""Attention's kernels for Hopper, csrc/attention/*_sm90.cu: which calls they serve, and how they are called."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn.backends.cuda import address, compute_capability, device_index, extension, stream

MAX_HEAD_DIM_SUM = 128  # kMaxHeadDimSum
ROW_BLOCK = 128  # kRowBlock
# Whether dq may be the sum of what blocks add in any order, which does not repeat bit for bit, in place of a kernel of
# its own. Only a record that shows it to be faster (benchmarks/results/) turns it on; until then it is turned on by
# tests and by whoever makes that record.
ACCUMULATE_DQ = False
_CAPABILITY = 90  # they are built for sm_90a, which nothing else runs


def suits(capability: int, dtype: torch.dtype, *head_dims: int) -> bool:
    """Whether these kernels serve such tensors where they lie as TMA wants it."""
    is_16_bit = dtype in (torch.bfloat16, torch.float16)
    return is_16_bit and capability == _CAPABILITY and all(head_dim % 8 == 0 for head_dim in head_dims)


def serves(*tensors: Tensor) -> bool:
    """Whether TMA can read and write these (B, H, L, D), too; if not, the kernels of sm_80 do."""
    q = tensors[0]
    return suits(compute_capability(q), q.dtype, *(t.shape[3] for t in tensors)) and all(map(_has_vectors, tensors))


def _has_vectors(t: Tensor) -> bool:
    """Rows, heads and samples start at multiples of 16 bytes, and none is expanded."""
    steps = (t.stride(i) for i in range(3) if t.shape[i] > 1)
    return t.numel() > 0 and t.data_ptr() % 16 == 0 and all(s > 0 and s % 8 == 0 for s in steps)


def forward(call: Any, q: Tensor) -> None:
    """call: AttentionForward, filled. Launches on q's device."""
    next_item = torch.empty(1, dtype=torch.int32, device=q.device)
    extension(q.device).attention_forward_sm90(call, address(next_item), device_index(q), stream(q))


def backward(call: Any, q: Tensor, v: Tensor, bias: Tensor | None, dropout_p: float, dbias: Tensor | None) -> None:
    """call: AttentionBackward, filled. dbias: where the gradient of the bias, one with queries and keys, is written."""
    (B, H, Lq, D), floats = q.shape, {"dtype": torch.float32, "device": q.device}
    padded = torch.empty(2, B, H, -(-Lq // ROW_BLOCK) * ROW_BLOCK, **floats)
    allowed = ACCUMULATE_DQ and not torch.are_deterministic_algorithms_enabled()
    allowed = allowed and bias is None and dropout_p == 0 and max(D, v.shape[3]) <= MAX_HEAD_DIM_SUM
    sums = torch.empty(B, H, Lq, D, **floats) if allowed else None
    extension(q.device).attention_backward_sm90(
        call,
        address(padded[0]),
        address(padded[1]),
        address(sums),
        address(dbias),
        *((0, 0) if dbias is None else dbias.shape[:2]),
        device_index(q),
        stream(q),
    )
