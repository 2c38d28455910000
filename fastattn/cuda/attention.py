"""The CUDA room of masked attention. Formula, layouts and kernels: csrc/attention/."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fastattn._attention_delta import wants_exact_delta
from fastattn.cuda import DTYPES, address, device_index, dropout_constants, extension, refuse_device, stream
from fastattn.cuda import _attention_short as short
from fastattn.cuda import _attention_sm90 as sm90
from fastattn.cuda import _visibility as who
from fastattn.masks import AttentionMask

MAX_HEAD_DIM = 256  # kMaxHeadDim of csrc/attention/attention.h


def why_not(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None, dropout_p: float) -> str | None:
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


def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | None,
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """q (B, H, Lq, Dk), k (B, Hk, Lk, Dk), v (B, Hk, Lk, Dv) -> out (B, H, Lq, Dv) in q's dtype and memory order,
    lse (B, H, Lq) float32. rng_state: int64 (seed, offset), or None without dropout."""
    out = _empty_like(q, v.shape[3])
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if sm90.serves(q, k, v, out):
        sm90.forward(q, k, v, out, lse, mask, softmax_scale, dropout_p, rng_state)
        return out, lse
    module, sizes, dtype = extension(q.device), who.shape(q, k, v), DTYPES[q.dtype]
    block_m, block_n = module.attention_fwd_tile(sizes, dtype)
    visibility, kept = who.visibility(mask, q.shape[2], k.shape[2], block_m, block_n, False, q.device)
    module.attention_fwd(
        *map(who.rows, (q, k, v, out)), address(lse), sizes, softmax_scale, visibility, who.bias(mask),
        address(rng_state), *dropout_constants(dropout_p), dtype, _tf32(), device_index(q), stream(q),
    )  # fmt: skip
    return out, lse


def attention_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: AttentionMask | None,
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
    needs_dbias: bool,
    grads: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dout as out (B, H, Lq, Dv), any strides; dlse (B, H, Lq) float32 or None; the rest as the forward took and gave
    it. grads: memory for dq, dk, dv. Returns them, in the inputs' dtypes and unless given in their memory order, and
    dbias, as mask.bias, if needed."""
    dout, out = (t if t.stride(3) == 1 else t.contiguous() for t in (dout, out))
    lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
    dq, dk, dv = grads or (_empty_like(t, t.shape[3]) for t in (q, k, v))
    bias = None if mask is None else mask.bias
    dbias = None
    if needs_dbias and bias.shape[3] == 1:
        # A bias that all keys share moves lse by as much, and no probability: its gradient is that of lse.
        dlse_seen = torch.zeros_like(lse) if dlse is None else dlse.where(lse != -torch.inf, 0.0)
        dbias = dlse_seen.sum_to_size(bias.shape[:3]).unsqueeze(3).to(bias.dtype)
    missing = needs_dbias and dbias is None
    if missing and bias.dtype not in (q.dtype, torch.float32):  # kernels write no third type
        mask = mask.with_bias(bias.float())
    options = (lse, dlse, mask, softmax_scale, dropout_p, rng_state)
    if short.serves(q, k, v):
        with_keys = short.backward(q, k, v, dout, dq, dk, dv, *options, needs_dbias=missing, tf32=_tf32())
    else:
        call = sm90.backward if sm90.serves(q, k, v, out, dout, dq, dk, dv) else _backward
        exact = wants_exact_delta(q, dropout_p)
        with_keys = call(q, k, v, out, dout, dq, dk, dv, *options, needs_dbias=missing, exact=exact)
    return dq, dk, dv, with_keys.to(bias.dtype) if missing else dbias


def _backward(
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
    """The kernels that serve every call. Fills dq, dk and dv; returns the gradient, if needed, of a bias with keys."""
    module, sizes, dtype, tf32 = extension(q.device), who.shape(q, k, v), DTYPES[q.dtype], _tf32()
    (B, H, Lq), Lk = q.shape[:3], k.shape[2]
    bias = None if mask is None else mask.bias
    exact |= q.dtype == torch.float32 and not tf32
    delta = torch.empty_like(lse)
    remainder = torch.empty_like(lse) if exact or bias is not None else None
    dbias = key_sums = None
    if needs_dbias and bias.shape[2] == 1:  # shared by all queries: a by-product of dk
        key_sums = torch.empty(B, H, Lk, dtype=torch.float32, device=q.device)
    elif needs_dbias:
        dbias = torch.empty_like(bias, memory_format=torch.contiguous_format)
    own, streamed = module.attention_bwd_tile(sizes, dtype)
    by_query, kept = who.visibility(mask, Lq, Lk, own, streamed, False, q.device)
    by_key, kept_too = who.visibility(mask, Lq, Lk, streamed, own, True, q.device)
    module.attention_bwd(
        [*map(who.rows, (q, k, v, out, dout, dq, dk, dv))],
        [*map(address, (lse, dlse, delta, remainder, key_sums))],
        sizes, softmax_scale, 0.0 if exact or needs_dbias else sm90.COARSE, by_query, by_key, who.bias(mask),
        (0, 0, 0) if dbias is None else (address(dbias), *bias.shape[:2]),
        address(rng_state), *dropout_constants(dropout_p), dtype, tf32, device_index(q), stream(q),
    )  # fmt: skip
    if key_sums is None:
        return dbias
    return key_sums.sum_to_size(*bias.shape[:2], Lk).unsqueeze(2).to(bias.dtype)


def attention_weights(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    mask: AttentionMask | None,
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
    wanted: tuple[range, ...] | Literal["mean", "argmax"],
) -> Tensor:
    """q (B, H, Lq, Dk), k (B, Hk, Lk, Dk), lse (B, H, Lq) of the forward -> weights after dropout, (B, heads, Lq, Lk)
    of the heads in the ranges, or (B, Lq, Lk), their mean; or int64 (B, H, Lq), the key of the largest weight."""
    if wanted == "argmax":
        return _alignment(q, k, mask, softmax_scale)
    module, sizes, dtype, tf32 = extension(q.device), who.shape(q, k, k), DTYPES[q.dtype], _tf32()
    (B, H, Lq), Lk, mean = q.shape[:3], k.shape[2], wanted == "mean"
    weights = torch.empty(B, *([] if mean else [sum(map(len, wanted))]), Lq, Lk, dtype=q.dtype, device=q.device)
    visible, kept = who.elements(mask, Lq, Lk, q.device)
    lse = lse.contiguous()
    exact = q.dtype == torch.float32 and not tf32
    totals = torch.empty_like(lse) if exact or (mask is not None and mask.bias is not None) else None
    place = 0
    for heads in (range(H),) if mean else wanted:
        out = weights if mean else weights[:, place:]
        module.attention_weights(
            *map(who.rows, (q, k)), address(lse), address(totals), (address(out), out.stride(0)),
            (heads.start, heads.step, len(heads)), mean, sizes, softmax_scale, visible, who.bias(mask),
            address(rng_state), *dropout_constants(dropout_p), dtype, tf32, device_index(q), stream(q),
        )  # fmt: skip
        place += len(heads)
    return weights


def _alignment(q: Tensor, k: Tensor, mask: AttentionMask | None, softmax_scale: float) -> Tensor:
    module, sizes, dtype = extension(q.device), who.shape(q, k, k), DTYPES[q.dtype]
    keys = torch.empty(q.shape[:3], dtype=torch.int64, device=q.device)
    block_m, block_n = module.attention_fwd_tile(sizes, dtype)
    visibility, kept = who.visibility(mask, q.shape[2], k.shape[2], block_m, block_n, False, q.device)
    module.attention_alignment(
        *map(who.rows, (q, k)), address(keys), sizes, softmax_scale, visibility, who.bias(mask), dtype, _tf32(),
        device_index(q), stream(q),
    )  # fmt: skip
    return keys


def _empty_like(x: Tensor, head_dim: int) -> Tensor:
    """Uninitialised (B, H, L, head_dim) in x's memory order: (B, L, H, D) when x comes as a view of that."""
    B, H, L, _ = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty(B, L, H, head_dim).transpose(1, 2)
    return x.new_empty(B, H, L, head_dim)


def _tf32() -> bool:
    """float32 is multiplied as torch multiplies it on a GPU, by default exactly."""
    matmul = torch.backends.cuda.matmul
    # torch >= 2.9 refuses to answer the old question once the new one was used; older torch has only the old one.
    return matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
