"""The CUDA backend of masked attention. Formula, layouts and kernels: csrc/attention/."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn._tracing import constant_in_traces
from fastattn.backends.attention_rows import Sizes
from fastattn.backends.constants import DTYPES, NO_KERNEL, bias_parts, uses_tf32
from fastattn.backends.cuda import compute_capability, extension, multiprocessors, refuse_device
from fastattn.masks import AttentionMask, Layout, PreparedMask, zero_distance

MAX_HEAD_DIM = 256  # the extension's ATTENTION_MAX_HEAD_DIM: csrc/attention/attention.h
# Layout.launch: the kernels that read the mask, as csrc/attention/bind.h numbers them, for the forward followed by the
# rows of their tile. SM90 are built for sm_90a, which runs on nothing else.
SM80, SM90 = (80,), (90,)
_NO_MEMORY = None, None


def unsupported_reason(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | None,
    dropout_p: float,
    softcap: float | None = None,
    return_weights: bool = False,
) -> str | None:
    """None, or what is not supported and what the call has."""
    if reason := refuse_device(q):
        return reason
    if q.dtype not in DTYPES:
        return f"the CUDA attention takes float32, bfloat16 and float16, got {q.dtype}"
    if max(q.shape[3], v.shape[3]) > MAX_HEAD_DIM:
        return f"the CUDA attention takes head dimensions up to {MAX_HEAD_DIM}, got {q.shape[3]} and {v.shape[3]}"
    bias = None if mask is None else mask.any_bias
    if bias is not None and bias.dtype not in DTYPES:
        return f"the CUDA attention takes a bias in float32, bfloat16 or float16, got {bias.dtype}"
    return f"{NO_KERNEL} the weights" if return_weights else None


def mask_layouts(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, softcap: float | None = None
) -> tuple[Layout, ...]:
    """How the kernels read the mask, and which kernels they are: the forward's layout, and those of the backward, by
    query and by key."""
    head_dims, capability = (q.shape[3], v.shape[3]), compute_capability(q)
    uses_sm90 = capability == 90 and q.dtype != torch.float32 and not any(dim % 8 for dim in head_dims)
    if softcap is not None or (bias is not None and bias.dim() == 2):  # Hopper's kernels have neither
        uses_sm90 = False
    if q.numel() == 0 or k.numel() == 0 or v.numel() == 0:  # a branch, as _tiles takes no symbolic bool
        uses_sm90 = False
    rows, columns, dq_rows, dq_columns, dkv_rows, dkv_columns, narrow_rows = _tiles(
        q.is_cuda, max(head_dims), q.dtype, uses_sm90
    )
    launch = SM90 if uses_sm90 else SM80
    if uses_sm90 and bias is not None:  # for which the larger tile has too few registers
        rows = narrow_rows
    forward = Layout(False, rows, columns, (*launch, rows))
    return forward, Layout(False, dq_rows, dq_columns, launch), Layout(True, dkv_rows, dkv_columns, launch)


def _route(mask: PreparedMask, device: torch.device) -> tuple[int, Tensor | None]:
    """attention_fwd's tile_rows_sm90 and next_item: csrc/attention/bind.h."""
    kernels, rows = mask.layout.launch
    return (rows, torch.empty(1, dtype=torch.int32, device=device)) if (kernels,) == SM90 else (0, None)


@constant_in_traces  # torch.compile cannot trace C++
def _tiles(on_gpu: bool, *call: Any) -> tuple[int, ...]:
    """(rows, columns) of the tiles of the forward, of dq's and of dkdv's kernel; the rows of Hopper's other tile of the
    forward."""
    return _tiles_of(extension(on_gpu), *call)


@cache
def _tiles_of(module: Any, *call: Any) -> tuple[int, ...]:
    return *module.attention_tiles(*call), module.ATTENTION_NARROW_ROWS


def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: PreparedMask,
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """q (B, H, Lq, Dk), k (B, Hk, Lk, Dk), v (B, Hk, Lk, Dv) -> out (B, H, Lq, Dv) in q's dtype and memory order,
    lse (B, H, Lq) float32. bias: AttentionMask.any_bias. mask: in the first of mask_layouts(). rng_state: int64 (seed,
    offset), or None without dropout."""
    B, H, Lq, _ = q.shape
    out = _empty_like(q, v.shape[3])
    lse = torch.empty(B, H, Lq, dtype=torch.float32, device=q.device)
    call = q, k, v, _readable(bias, q), _zero_distance(bias, q, k), mask, out, lse, *_route(mask, q.device)
    options = softmax_scale, softcap or 0.0, dropout_p, rng_state, _rounds_to_tf32(q)
    extension(q.is_cuda).attention_fwd(*call, *options)
    return out, lse


def attention_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    masks: tuple[PreparedMask, ...],
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
    needs_dbias: bool,
    grads: tuple[Tensor, Tensor, Tensor] | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dout as out (B, H, Lq, Dv), any strides; dlse (B, H, Lq) float32 or None; masks: in mask_layouts()[1:]; the rest
    from the forward. Returns dq, dk, dv in the inputs' dtypes and memory orders, and dbias, as bias.

    grads: where dq, dk and dv are written, uninitialised; new tensors if None. Any strides with a contiguous last
    dimension; for SM90 rows, heads and samples start at multiples of 16 bytes.
    """
    launch, module = masks[0].layout.launch, extension(q.is_cuda)
    uses_sm90 = launch == SM90
    dq, dk, dv = grads or (_empty_like(q, q.shape[3]), _empty_like(k, k.shape[3]), _empty_like(v, v.shape[3]))
    lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()

    dbias = key_sums = None
    bias_dtype, bias = None if bias is None else bias.dtype, _readable(bias, q)
    zero, by_distance = _zero_distance(bias, q, k), bias is not None and bias.dim() == 2
    if needs_dbias:
        if by_distance:
            dbias = _empty_diagonals(bias, zero, q, k)
        elif bias.shape[3] == 1:
            # A bias that all keys share is added to lse and changes no probability: its gradient is that of lse.
            row_gradient = torch.zeros_like(lse) if dlse is None else dlse.where(lse != -torch.inf, 0.0)
        elif bias.shape[2] == 1:  # shared by all queries: the kernel of dk sums it
            make = torch.zeros if q.shape[2] == 0 else torch.empty  # which writes it after the last queries, if any
            key_sums = make(*q.shape[:2], k.shape[2], dtype=torch.float32, device=q.device)
        else:
            parts = _bias_parts(bias, q, k, uses_sm90)
            if parts != bias.shape[0]:
                bias = bias.float()  # the kernels write dbias in the dtype of the bias: here sums that are added later
            dbias = bias.new_empty(parts, *bias.shape[1:])

    work = sums = order = None
    if uses_sm90:
        work, sums, order = _scratch_sm90(module, lse, max(q.shape[3], v.shape[3]), masks[1], bias is not None)
    else:  # delta
        work = torch.empty_like(lse)
    inputs = dout, dlse, q, k, v, out, lse, bias, zero, *masks, *launch
    outputs = dq, dk, dv, dbias, key_sums, work, sums, order
    options = softmax_scale, softcap or 0.0, dropout_p, rng_state, _rounds_to_tf32(q)
    module.attention_bwd(*inputs, *outputs, *options)

    if needs_dbias and by_distance:
        return dq, dk, dv, _sum_diagonals(dbias, zero, bias.shape[1]).to(bias_dtype)
    if needs_dbias and bias.shape[3] == 1:
        row_gradient = row_gradient.masked_fill(dq[..., 0].isnan(), torch.nan)  # dq is NaN where a row of dS is
        return dq, dk, dv, row_gradient.sum_to_size(bias.shape[:3]).unsqueeze(3).to(bias_dtype)
    if key_sums is not None:
        dbias = key_sums.sum_to_size(*bias.shape[:2], k.shape[2]).unsqueeze(2)
    elif dbias is not None and dbias.shape[0] != bias.shape[0]:
        dbias = dbias.sum(0, keepdim=True)
    return dq, dk, dv, None if dbias is None else dbias.to(bias_dtype)


def _bias_parts(bias: Tensor, q: Tensor, k: Tensor, uses_sm90: bool) -> int:
    """The batch dimension of dbias: a block sums every parts-th sample."""
    (B, H, Lq, _), (shared_b, heads, _, _) = q.shape, bias.shape
    if shared_b != 1 or B == 1:
        return shared_b
    tile = 128 if uses_sm90 else 64  # csrc/attention/bias_gradient_sm90.cu, bias_gradient.cu
    blocks = heads * -(-Lq // tile) * -(-k.shape[2] // tile)
    return bias_parts(B, B * H if heads == 1 else B, blocks, multiprocessors(q))


def _zero_distance(bias: Tensor | None, q: Tensor, k: Tensor) -> int:
    """The column of distance 0 in a bias by distance, (H or 1, R). With packed sequences it is the middle one."""
    if bias is None or bias.dim() != 2:
        return 0
    return zero_distance(bias.shape[1], q.shape[2], k.shape[2])


def _empty_diagonals(bias: Tensor, zero: int, q: Tensor, k: Tensor) -> Tensor:
    """The gradient of a bias by distance as csrc/attention/backward.h has it: (parts, H or 1, tile diagonals, 128)."""
    (B, H, Lq, _), (heads, R) = q.shape, bias.shape
    diagonals = -(-zero // 64) + 1 - ((zero + 1 - R) // 64)
    turns = (B * H if heads == 1 else B) * -(-min(Lq, k.shape[2]) // 64)
    parts = bias_parts(B, turns, heads * diagonals, multiprocessors(q))
    return torch.empty(parts, heads, diagonals, 128, dtype=torch.float32, device=q.device)


def _sum_diagonals(dbias: Tensor, zero: int, length: int) -> Tensor:
    """(H or 1, length) from _empty_diagonals(): the distances of a tile diagonal are half those of the next one."""
    halves = dbias.sum(0).unflatten(2, (2, 64))
    sums = F.pad(halves[:, :, 0], (0, 0, 0, 1)) + F.pad(halves[:, :, 1], (0, 0, 1, 0))
    first = -(-zero // 64) * 64 + 63 - zero
    return sums.flatten(1)[:, first : first + length]


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
    call = projected, *(memory or _NO_MEMORY), sizes, mask, out, lse, *_route(mask, projected.device)
    extension(projected.is_cuda).attention_rows_fwd(
        *call, softmax_scale, dropout_p, rng_state, _rounds_to_tf32(projected)
    )
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
    B, L, H, _, Dk, Dv = sizes
    launch, module = masks[0].layout.launch, extension(projected.is_cuda)
    work = sums = order = None
    if launch == SM90:
        work, sums, order = _scratch_sm90(module, lse, max(Dk, Dv), masks[1], False)
    else:  # delta
        work = torch.empty_like(lse)
    inputs = dout, projected, *(memory or _NO_MEMORY), out, lse, dprojected, *(dmemory or _NO_MEMORY), sizes
    options = *masks, *launch, work, sums, order, softmax_scale, dropout_p
    module.attention_rows_bwd(*inputs, *options, rng_state, _rounds_to_tf32(projected))


def _scratch_sm90(
    module: Any, lse: Tensor, head_dim: int, by_key: PreparedMask, has_bias: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """struct PaddedRows; and of struct PartialSums, if dq is added up, the parts, and the counters and turns:
    backward_sm90.h. by_key: the mask as the kernel of dk and dv reads it."""
    (B, H, L), block = lse.shape, module.ATTENTION_ROW_BLOCK
    rows = B * H * (-(-L // block) * block)
    work = lse.new_empty(2 * rows)
    if has_bias or head_dim > module.ATTENTION_MAX_HEAD_DIM_SUM:
        return work, None, None
    parts = rows // 64 * (2 if head_dim > 64 else 1)
    turns = 0 if by_key.tiles is None else by_key.tiles.numel()
    order = torch.empty(parts + 1 + turns, dtype=torch.int32, device=lse.device)
    return work, lse.new_empty(parts * module.ATTENTION_PART_SIZE), order


def attention_weights(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    mask: PreparedMask,
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
    softcap: float | None = None,
) -> Tensor:
    """q (B, H, Lq, Dk), k (B, Hk, Lk, Dk), lse (B, H, Lq) of the forward -> weights after dropout, (B, H, Lq, Lk).
    mask: prepared by Layout()."""
    weights = torch.empty(*q.shape[:3], k.shape[2], dtype=q.dtype, device=q.device)
    tensors = q, k, lse.contiguous(), _readable(bias, q), _zero_distance(bias, q, k), mask, weights
    options = softmax_scale, softcap or 0.0, dropout_p, rng_state, _rounds_to_tf32(q)
    extension(q.is_cuda).attention_weights(*tensors, *options)
    return weights


def _readable(bias: Tensor | None, q: Tensor) -> Tensor | None:
    """As the kernels read it, and write its gradient: in q's dtype or in float32."""
    return bias if bias is None or bias.dtype in (q.dtype, torch.float32) else bias.float()


def _empty_like(x: Tensor, head_dim: int) -> Tensor:
    """Uninitialised (B, H, L, head_dim) in x's memory order: (B, L, H, D) if x is a view of that."""
    B, H, L, _ = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty_strided((B, H, L, head_dim), (L * H * head_dim, head_dim, H * head_dim, 1))
    return x.new_empty(B, H, L, head_dim)


def _rounds_to_tf32(q: Tensor) -> bool:
    return q.dtype == torch.float32 and uses_tf32()
