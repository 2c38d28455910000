"""The CUDA backend of masked attention. Formula, layouts and kernels: csrc/attention/."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.backends.cuda import (
    DTYPES,
    address,
    capability_of,
    compute_capability,
    device_index,
    extension,
    refuse_device,
    stream,
)
from fastattn.backends.cuda import _attention_arguments as arguments
from fastattn.backends.cuda import _attention_sm90 as sm90
from fastattn.masks import AttentionMask, Layout, PreparedMask

MAX_HEAD_DIM = 256  # kMaxHeadDim of csrc/attention/attention.h
MAX_SHORT = 128  # kMaxShort


def unsupported_reason(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None, dropout_p: float) -> str | None:
    """None, or what is refused and what was got."""
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
    """How the kernels want the mask: the forward's, then those of the backward by query and, unless short sequences
    have a kernel of their own, by key. The kernels of short sequences want no lists."""
    place = (q.device.type == "cpu", device_index(q))
    *tiles, has_short_backward = _plan(*place, DTYPES[q.dtype], q.shape[3], v.shape[3])
    forward = Layout(False, *tiles[:2])
    if max(q.shape[2], k.shape[2]) <= MAX_SHORT:
        if has_short_backward:
            return Layout(), Layout()
        forward = Layout()
    return forward, Layout(False, *tiles[2:4]), Layout(True, *tiles[4:])


@torch.compiler.assume_constant_result  # torch.compile does not trace what C++ answers
def _plan(on_cpu: bool, device: int, dtype: int, head_dim_k: int, head_dim_v: int) -> tuple[int, ...]:
    """(own, stream) of the forward, of dq's and of dkdv's kernel; and whether short sequences have a backward."""
    module = extension(torch.device("cpu" if on_cpu else "cuda"))
    head_dim = max(head_dim_k, head_dim_v)
    torch_dtype = next(t for t, number in DTYPES.items() if number == dtype)
    if sm90.suits(capability_of(on_cpu, device), torch_dtype, head_dim_k, head_dim_v):
        tiles = module.attention_tiles_sm90(head_dim)
    else:
        tiles = module.attention_tiles(head_dim, dtype)
    return *tiles, module.attention_has_short_backward(head_dim, dtype, device)


def _has_lists_of(on_hopper: bool, q: Tensor, v: Tensor) -> bool:
    """Whether the mask was prepared for the kernels that serve: where a stride keeps Hopper's from it, it was not."""
    return on_hopper == sm90.suits(compute_capability(q), q.dtype, q.shape[3], v.shape[3])


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
    out = arguments.empty_like(q, v.shape[3])
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    module, on_hopper = extension(q.device), sm90.serves(q, k, v, out)
    call = module.AttentionForward()
    arguments.common(call, q, k, v, lse, bias, softmax_scale, dropout_p, rng_state)
    call.v, call.out = arguments.rows(v), arguments.rows(out)
    call.mask = arguments.mask(module, mask, lists=_has_lists_of(on_hopper, q, v))
    if on_hopper:
        sm90.forward(call, q)
    else:
        module.attention_forward(call, device_index(q), stream(q))
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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dout as out (B, H, Lq, Dv), any strides; dlse (B, H, Lq) float32 or None; masks: in mask_layouts()[1:]; the rest
    as the forward took and gave it. Returns dq, dk, dv in the inputs' dtypes and memory orders, and dbias, as bias."""
    dout, out = (t if t.stride(3) == 1 else t.contiguous() for t in (dout, out))
    lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
    dq, dk, dv = (arguments.empty_like(t, t.shape[3]) for t in (q, k, v))
    bias_dtype = None if bias is None else bias.dtype
    if needs_dbias and bias.dtype not in (q.dtype, torch.float32):  # kernels write no third type
        bias = bias.float()
    is_short = len(masks) == 1
    on_hopper = not is_short and sm90.serves(q, k, v, out, dout, dq, dk, dv)

    dbias = key_sums = delta = None
    if needs_dbias and bias.shape[3] == 1:
        # A bias that all keys share moves lse by as much, and no probability: its gradient is that of lse.
        dlse_of_rows = torch.zeros_like(lse) if dlse is None else dlse.where(lse != -torch.inf, 0.0)
        row_gradient = dlse_of_rows.sum_to_size(bias.shape[:3]).unsqueeze(3).to(bias_dtype)
    elif needs_dbias and bias.shape[2] == 1:  # shared by all queries: a by-product of dk
        key_sums = torch.empty(*q.shape[:2], k.shape[2], dtype=torch.float32, device=q.device)
    elif needs_dbias:
        dbias = torch.empty_like(bias, memory_format=torch.contiguous_format)
    if not on_hopper and not (is_short and (dbias is None or dbias.shape[:2] == q.shape[:2])):
        delta = torch.empty_like(lse)

    module = extension(q.device)
    call = module.AttentionBackward()
    arguments.common(call, q, k, v, lse, bias, softmax_scale, dropout_p, rng_state)
    call.v, call.out, call.dout = map(arguments.rows, (v, out, dout))
    call.dq, call.dk, call.dv = map(arguments.rows, (dq, dk, dv))
    call.dlse, call.delta, call.dbias_keys = address(dlse), address(delta), address(key_sums)
    lists = _has_lists_of(on_hopper, q, v)
    call.by_query = arguments.mask(module, masks[0], lists)
    if is_short:
        if k.shape[2] == 0:
            dq.zero_()
    else:
        call.by_key = arguments.mask(module, masks[1], lists)
    if on_hopper:
        sm90.backward(call, q, v, bias, dropout_p, dbias)
    else:
        shape = (0, 0) if dbias is None else dbias.shape[:2]
        module.attention_backward(call, address(dbias), *shape, is_short, device_index(q), stream(q))

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
    call = module.AttentionWeights()
    arguments.common(call, q, k, k, lse, bias, softmax_scale, dropout_p, rng_state)
    call.weights, call.mean, call.mask = weights.data_ptr(), mean, arguments.mask(module, mask)
    module.attention_weights(call, device_index(q), stream(q))
    return weights
