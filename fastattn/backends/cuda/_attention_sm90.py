"""Attention's kernels for Hopper, csrc/attention/*_sm90.cu: which calls they can compute, and their launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn.backends.cuda import address, device_index, extension, stream

# Whether dq may be a sum to which blocks add in any order, in place of a kernel that owns dq. The sum is not equal bit
# for bit in each run. It stays off until a record (benchmarks/results/) shows it to be faster; tests turn it on.
ACCUMULATE_DQ = False
_CAPABILITY = 90  # built for sm_90a, which runs on nothing else


def supports(capability: int, dtype: torch.dtype, head_dim_k: int, head_dim_v: int) -> bool:
    """Whether these kernels compute attention of such tensors, none of which is empty. See `aligned` for strides."""
    is_16_bit = dtype in (torch.bfloat16, torch.float16)
    return is_16_bit and capability == _CAPABILITY and head_dim_k % 8 == 0 and head_dim_v % 8 == 0


def aligned(t: Tensor) -> Tensor:
    """t, or a copy that TMA can read: rows, heads and samples start at multiples of 16 bytes, and none is expanded."""
    steps = (t.stride(i) for i in range(3) if t.shape[i] > 1)
    if t.stride(3) == 1 and t.data_ptr() % 16 == 0 and all(step > 0 and step % 8 == 0 for step in steps):
        return t
    return t.clone(memory_format=torch.contiguous_format)


def forward(params: Any, q: Tensor) -> None:
    """params: AttentionForward, filled. Launches on q's device."""
    next_item = torch.empty(1, dtype=torch.int32, device=q.device)
    extension(q.device).attention_forward_sm90(params, address(next_item), device_index(q), stream(q))


def backward(params: Any, q: Tensor, v: Tensor, bias: Tensor | None, dropout_p: float, dbias: Tensor | None) -> None:
    """params: AttentionBackward, filled. dbias: the gradient of a bias that has queries and keys, to be written."""
    module, (B, H, Lq, D), floats = extension(q.device), q.shape, {"dtype": torch.float32, "device": q.device}
    block = module.ATTENTION_ROW_BLOCK
    shift, delta = torch.empty(2, B, H, -(-Lq // block) * block, **floats)
    accumulate = ACCUMULATE_DQ and not torch.are_deterministic_algorithms_enabled() and bias is None
    accumulate = accumulate and dropout_p == 0 and max(D, v.shape[3]) <= module.ATTENTION_MAX_HEAD_DIM_SUM
    dq_sum = torch.empty(B, H, Lq, D, **floats) if accumulate else None
    pointers = map(address, (shift, delta, dq_sum, dbias))
    sharing = (0, 0) if dbias is None else dbias.shape[:2]
    module.attention_backward_sm90(params, *pointers, *sharing, device_index(q), stream(q))
