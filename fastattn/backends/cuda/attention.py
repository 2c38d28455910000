"""The CUDA backend of masked attention. Formula, layouts and kernels: csrc/attention/."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.backends.cuda import (
    DTYPES,
    address,
    compute_capability,
    device_index,
    extension,
    refuse_device,
    stream,
)
from fastattn.backends.cuda import _attention_params as structs
from fastattn.backends.cuda import _attention_sm90 as sm90
from fastattn.masks import AttentionMask, Layout, PreparedMask

MAX_HEAD_DIM = 256  # the extension's ATTENTION_MAX_HEAD_DIM: csrc/attention/attention.h
SM80, SM90, SHORT = (80,), (90,), (128,)  # Layout.launch: the kernels that read the mask


def unsupported_reason(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None, dropout_p: float) -> str | None:
    """None, or what is not supported and what the call has."""
    if reason := refuse_device(q):
        return reason
    if q.dtype not in DTYPES:
        return f"the CUDA attention takes float32, bfloat16 and float16, got {q.dtype}"
    if max(q.shape[3], v.shape[3]) > MAX_HEAD_DIM:
        return f"the CUDA attention takes head dimensions up to {MAX_HEAD_DIM}, got {q.shape[3]} and {v.shape[3]}"
    bias = None if mask is None else mask.bias
    if bias is not None and bias.dtype not in DTYPES:
        return f"the CUDA attention takes a bias in float32, bfloat16 or float16, got {bias.dtype}"
    return None


def mask_layouts(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Layout, ...]:
    """How the kernels read the mask, and which kernels they are: the forward's layout, then those of the backward: by
    query and by key, or by query alone where short sequences have their own kernel, which uses no lists of tiles."""
    empty = q.numel() == 0 or k.numel() == 0 or v.numel() == 0
    uses_sm90 = not empty and sm90.supports(compute_capability(q), q.dtype, q.shape[3], v.shape[3])
    place, head_dim = (q.device.type == "cpu", device_index(q)), max(q.shape[3], v.shape[3])
    *tiles, max_short, has_short_backward = _plan(*place, DTYPES[q.dtype], head_dim, uses_sm90)
    launch = SM90 if uses_sm90 else SM80
    forward = Layout(False, *tiles[:2], launch)
    if max(q.shape[2], k.shape[2]) <= max_short:
        forward = Layout(launch=launch)
        if has_short_backward:
            return forward, Layout(launch=SHORT)
    return forward, Layout(False, *tiles[2:4], launch), Layout(True, *tiles[4:], launch)


@torch.compiler.assume_constant_result  # torch.compile cannot trace C++
def _plan(on_cpu: bool, device: int, dtype: int, head_dim: int, uses_sm90: bool) -> tuple[int, ...]:
    """(rows, columns) of the tiles of the forward, of dq's and of dkdv's kernel; the longest short sequence; whether
    short sequences have their own backward."""
    module = extension(torch.device("cpu" if on_cpu else "cuda"))
    tiles = module.attention_tiles_sm90(head_dim) if uses_sm90 else module.attention_tiles(head_dim, dtype)
    return *tiles, module.ATTENTION_MAX_SHORT, module.attention_has_short_backward(head_dim, dtype, device)


def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: PreparedMask,
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """q (B, H, Lq, Dk), k (B, Hk, Lk, Dk), v (B, Hk, Lk, Dv) -> out (B, H, Lq, Dv) in q's dtype and memory order,
    lse (B, H, Lq) float32. mask: in the first of mask_layouts(). rng_state: int64 (seed, offset), or None without
    dropout."""
    module, uses_sm90 = extension(q.device), mask.layout.launch == SM90
    out = structs.empty_like(q, v.shape[3])
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if uses_sm90:
        q, k, v = map(sm90.aligned, (q, k, v))
    params = module.AttentionForward()
    structs.fill_common(params, q, k, v, lse, bias, softmax_scale, dropout_p, rng_state)
    params.v, params.out = structs.strided_matrix(v), structs.strided_matrix(out)
    params.mask = structs.mask_params(module, mask)
    if uses_sm90:
        sm90.forward(params, q)
    else:
        module.attention_forward(params, device_index(q), stream(q))
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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dout as out (B, H, Lq, Dv), any strides; dlse (B, H, Lq) float32 or None; masks: in mask_layouts()[1:]; the rest
    from the forward. Returns dq, dk, dv in the inputs' dtypes and memory orders, and dbias, as bias."""
    launch = masks[0].layout.launch
    is_short, uses_sm90 = launch == SHORT, launch == SM90
    dq, dk, dv = grads or (structs.empty_like(t, t.shape[3]) for t in (q, k, v))
    if uses_sm90:
        q, k, v, out, dout = map(sm90.aligned, (q, k, v, out, dout))
    else:
        dout, out = (t if t.stride(3) == 1 else t.contiguous() for t in (dout, out))
    lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
    bias_dtype = None if bias is None else bias.dtype
    if needs_dbias and bias.dtype not in (q.dtype, torch.float32):  # the kernels write these two types only
        bias = bias.float()

    dbias = key_sums = delta = None
    if needs_dbias and bias.shape[3] == 1:
        # A bias that all keys share is added to lse and changes no probability: its gradient is that of lse.
        dlse_of_rows = torch.zeros_like(lse) if dlse is None else dlse.where(lse != -torch.inf, 0.0)
        row_gradient = dlse_of_rows.sum_to_size(bias.shape[:3]).unsqueeze(3).to(bias_dtype)
    elif needs_dbias and bias.shape[2] == 1:  # shared by all queries: the kernel of dk sums it
        key_sums = torch.empty(*q.shape[:2], k.shape[2], dtype=torch.float32, device=q.device)
    elif needs_dbias:
        dbias = torch.empty_like(bias, memory_format=torch.contiguous_format)
    if not uses_sm90 and not (is_short and (dbias is None or dbias.shape[:2] == q.shape[:2])):
        delta = torch.empty_like(lse)

    module = extension(q.device)
    params = module.AttentionBackward()
    structs.fill_common(params, q, k, v, lse, bias, softmax_scale, dropout_p, rng_state)
    params.v, params.out, params.dout = map(structs.strided_matrix, (v, out, dout))
    params.dq, params.dk, params.dv = map(structs.strided_matrix, (dq, dk, dv))
    params.dlse, params.delta, params.dbias_keys = address(dlse), address(delta), address(key_sums)
    params.by_query = structs.mask_params(module, masks[0])
    if not is_short:
        params.by_key = structs.mask_params(module, masks[1])
    elif k.shape[2] == 0:
        dq.zero_()
    if uses_sm90:
        sm90.backward(params, q, v, bias, dropout_p, dbias)
    else:
        shape = (0, 0) if dbias is None else dbias.shape[:2]
        module.attention_backward(params, address(dbias), *shape, is_short, device_index(q), stream(q))

    if needs_dbias and bias.shape[3] == 1:
        return dq, dk, dv, row_gradient
    if key_sums is not None:
        dbias = key_sums.sum_to_size(*bias.shape[:2], k.shape[2]).unsqueeze(2)
    return dq, dk, dv, None if dbias is None else dbias.to(bias_dtype)


def attention_weights(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    mask: PreparedMask,
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
    mean: bool,
) -> Tensor:
    """q (B, H, Lq, Dk), k (B, Hk, Lk, Dk), lse (B, H, Lq) of the forward -> weights after dropout, (B, H, Lq, Lk), or
    their mean over the heads, (B, Lq, Lk). mask: prepared by Layout()."""
    (B, H, Lq), Lk = q.shape[:3], k.shape[2]
    lse = lse.contiguous()
    weights = torch.empty(B, *([] if mean else [H]), Lq, Lk, dtype=q.dtype, device=q.device)
    module = extension(q.device)
    params = module.AttentionWeights()
    structs.fill_common(params, q, k, k, lse, bias, softmax_scale, dropout_p, rng_state)
    params.weights, params.mean, params.mask = weights.data_ptr(), mean, structs.mask_params(module, mask)
    module.attention_weights(params, device_index(q), stream(q))
    return weights
