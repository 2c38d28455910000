"""The CUDA backend of masked attention. Formula, layouts and kernels: csrc/attention/."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fastattn._tracing import constant_in_traces
from fastattn.backends.attention_rows import Sizes
from fastattn.backends.calls import AttentionCall
from fastattn.backends.constants import DTYPES, NO_KERNEL, uses_tf32
from fastattn.backends.cuda import compute_capability, extension, refuse_device
from fastattn.masks import AttentionMask, Layout, PreparedMask

MAX_HEAD_DIM = 128  # the extension's ATTENTION_MAX_HEAD_DIM: csrc/attention/attention.h
# Layout.launch: the kernels that read the mask, as csrc/attention/bind.h numbers them. SM90 are built for sm_90a, which
# runs on nothing else.
SM80, SM90 = (80,), (90,)
_NO_MEMORY = None, None


def unsupported_reason(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None, *options: Any) -> str | None:
    """None, or what is not supported and what the call has. options: dropout_p, softcap, return_weights, return_lse."""
    _, softcap, return_weights, _ = options
    if reason := refuse_device(q):
        return reason
    if q.dtype not in DTYPES:
        return f"the CUDA attention takes float32, bfloat16 and float16, got {q.dtype}"
    if max(q.shape[3], v.shape[3]) > MAX_HEAD_DIM:
        dims = f"{q.shape[3]} and {v.shape[3]}"
        return f"the CUDA attention takes head dimensions up to {MAX_HEAD_DIM}, got {dims}: Triton takes more"
    if mask is not None and mask.any_bias is not None:
        return "the CUDA attention takes no bias, such as a float mask or one by distance: Triton takes it"
    if softcap is not None:
        return "the CUDA attention takes no softcap: Triton takes it"
    return f"{NO_KERNEL} the weights" if return_weights else None


def mask_layouts(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, softcap: float | None = None
) -> tuple[Layout, ...]:
    """How the kernels read the mask, and which kernels they are: the forward's layout, and those of the backward, by
    query and by key. The only place that chooses between the kernels."""
    head_dims, capability = (q.shape[3], v.shape[3]), compute_capability(q)
    uses_sm90, width = capability == 90 and q.dtype != torch.float32, MAX_HEAD_DIM
    # Branches, as _tiles takes no symbolic bool or number.
    if any(dim % 8 for dim in head_dims) or q.numel() == 0 or k.numel() == 0 or v.numel() == 0:
        uses_sm90 = False
    if max(head_dims) <= 64:
        width = 64
    tiles = _tiles(q.is_cuda, width, q.dtype, uses_sm90)
    launch = SM90 if uses_sm90 else SM80
    return tuple(Layout(i == 2, tiles[2 * i], tiles[2 * i + 1], launch, uses_sm90) for i in range(3))


@constant_in_traces  # torch.compile cannot trace C++
def _tiles(on_gpu: bool, *call: Any) -> tuple[int, ...]:
    """(rows, columns) of the tiles of the forward, and of the backward by query and by key."""
    return _tiles_of(extension(on_gpu), *call)


@cache
def _tiles_of(module: Any, *call: Any) -> tuple[int, ...]:
    return module.attention_tiles(*call)


def attention_fwd(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """out (B, H, Lq, Dv) in q's dtype and memory order, lse (B, H, Lq) float32."""
    q, k, v, mask = *call[:3], call.masks[0]
    out, softmax_scale = _empty_like(q, v.shape[3]), call.softmax_scale
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if softmax_scale <= 0:  # the kernels take the maximum before they scale
        q, softmax_scale = q * (-1 if softmax_scale < 0 else 0), -softmax_scale or 1.0
    options = _options(q, softmax_scale, call.dropout_p, call.rng_state)
    extension(q.is_cuda).attention_fwd(q, k, v, mask, out, lse, _next_item(mask, q), options)
    return out, lse


def attention_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    call: AttentionCall,
    out: Tensor,
    lse: Tensor,
    needs_dbias: bool,
    grads: Any = None,
) -> tuple[Tensor, Tensor, Tensor, None]:
    """dout as out (B, H, Lq, Dv), any strides; dlse (B, H, Lq) float32 or None; out, lse: from the forward. Returns
    dq, dk, dv in the inputs' dtypes and memory orders, and None, for the bias that it does not have.

    grads: where dq, dk and dv are written, uninitialised; new tensors if None. Any strides with a contiguous last
    dimension; for SM90 rows, heads and samples start at multiples of 16 bytes.
    """
    q, k, v = call[:3]
    dq, dk, dv = grads or [_empty_like(t, t.shape[3]) for t in (q, k, v)]
    lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
    module, work = extension(q.is_cuda), _work(lse, max(q.shape[3], v.shape[3]), call.masks[1])
    options = _options(q, call.softmax_scale, call.dropout_p, call.rng_state)
    module.attention_bwd(dout, dlse, q, k, v, out, lse, *call.masks, dq, dk, dv, work, options)
    return dq, dk, dv, None


def attention_rows_fwd(
    projected: Tensor,
    memory: Sequence[Tensor],
    sizes: Sizes,
    mask: PreparedMask,
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
    bound: Any = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of attention_fwd, as fastattn/backends/attention_rows.py has them. bound: of use in Triton."""
    B, L, H, _, _, Dv = sizes
    out = projected.new_empty(B * L, H * Dv)
    lse = projected.new_empty(B, H, L, dtype=torch.float32)
    call = projected, *(memory or _NO_MEMORY), sizes, mask, out, lse, _next_item(mask, projected)
    options = _options(projected, softmax_scale, dropout_p, rng_state)
    extension(projected.is_cuda).attention_rows_fwd(*call, options)
    return out, lse


def attention_rows_bwd(
    dout: Tensor,
    projected: Tensor,
    memory: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    dprojected: Tensor,
    dmemory: Sequence[Tensor],
    sizes: Sizes,
    masks: Sequence[PreparedMask],
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
    bound: Any = None,
) -> None:
    """Writes dprojected and dmemory, as attention_bwd."""
    module, work = extension(projected.is_cuda), _work(lse, max(sizes[4:]), masks[1])
    call = dout, projected, *(memory or _NO_MEMORY), out, lse, dprojected, *(dmemory or _NO_MEMORY), sizes, *masks
    module.attention_rows_bwd(*call, work, _options(projected, softmax_scale, dropout_p, rng_state))


def _next_item(mask: PreparedMask, q: Tensor) -> Tensor | None:
    """Scratch of Hopper's forward."""
    return torch.empty(1, dtype=torch.int32, device=q.device) if mask.layout.launch == SM90 else None


def _work(lse: Tensor, head_dim: int, by_key: PreparedMask) -> Tensor:
    """Scratch of the backward: delta, and for Hopper's kernels more."""
    if by_key.layout.launch != SM90:
        return torch.empty_like(lse)
    turns = 0 if by_key.tiles is None else by_key.tiles.numel()
    return lse.new_empty(extension(lse.is_cuda).attention_work_sm90(*lse.shape, head_dim, turns))


def _options(q: Tensor, softmax_scale: float, dropout_p: float, rng_state: Tensor | None) -> tuple[Any, ...]:
    """Options of csrc/attention/bind.h."""
    return softmax_scale, dropout_p, rng_state, q.dtype == torch.float32 and uses_tf32()


def _empty_like(x: Tensor, head_dim: int) -> Tensor:
    """Uninitialised (B, H, L, head_dim) in x's memory order: (B, L, H, D) if x is a view of that."""
    B, H, L, _ = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty_strided((B, H, L, head_dim), (L * H * head_dim, head_dim, H * head_dim, 1))
    return x.new_empty(B, H, L, head_dim)
