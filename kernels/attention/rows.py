"""Attention as fastattn/backends/attention_rows.py has it, without a view of each of the heads.

What the first call of a class has launched, the next ones launch with their own addresses.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn.backends import attention_rows
from fastattn.backends.calls import AttentionCall
from fastattn.masks import PreparedMask

from ..common.launch import addresses
from ..common.philox import dropout_constants
from . import arguments
from .backward import attention_bwd
from .forward import attention_fwd


def attention_rows_fwd(
    projected: Tensor,
    memory: Sequence[Tensor],
    sizes: tuple[int, ...],
    mask: PreparedMask,
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
    bound: dict[str, Any],
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of attention_fwd. bound: empty at first, a dictionary for calls that differ in the memory of the
    tensors alone. With a bias it stays so."""
    known = bound.get("forward")
    if known is not None:
        B, L, H, _, _, Dv = sizes
        out = projected.new_empty(B * L, H * Dv)
        lse = torch.empty(B, H, L, dtype=torch.float32, device=projected.device)
        (*heads_at, out_at, lse_at, rng_at), alignment = addresses(projected, *memory, out, lse, rng_state)
        if alignment is True:
            strided = arguments.moved((*_places(heads_at, projected, sizes), out_at), known.strides)
            dropout = None if rng_state is None else (rng_at, *dropout_constants(dropout_p))
            given = *strided, lse_at, None, known.masking, dropout, *known.rest
            tensors = _when_needed(
                lambda: (*attention_rows.heads(projected, memory, sizes), out, lse, *known.mask_tensors, rng_state)
            )
            known.launch.run(projected.get_device(), known.programs, given, tensors)
            return out, lse
    heads = attention_rows.heads(projected, memory, sizes)
    call = AttentionCall(*heads, bias, rng_state, [mask], softmax_scale, dropout_p)
    out, lse = attention_fwd(call, bound if bias is None else None)
    return out.transpose(1, 2).reshape(projected.shape[0], sizes[2] * sizes[5]), lse


def attention_rows_bwd(
    dout: Tensor,
    projected: Tensor,
    memory: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    dprojected: Tensor,
    dmemory: Sequence[Tensor],
    sizes: tuple[int, ...],
    masks: Sequence[PreparedMask],
    softmax_scale: float,
    dropout_p: float,
    rng_state: Tensor | None,
    bound: dict[str, Any],
    bias: Tensor | None = None,
) -> Tensor | None:
    """Writes dprojected and dmemory. Returns the gradient of a bias that needs one. bound: the forward's."""
    short, dq, dkv = bound.get("short"), bound.get("dq"), bound.get("dkv")
    if short is not None or (dq is not None and dkv is not None):
        delta = None if short is not None else torch.empty_like(lse)
        found, alignment = addresses(projected, *memory, out, dout, dprojected, *dmemory, lse, delta, rng_state)
        if alignment is True:
            count = 1 + len(memory)
            q, k, v = _places(found[:count], projected, sizes)
            out_at, dout_at, *grads_at, lse_at, delta_at, rng_at = found[count:]
            dq_at, dk_at, dv_at = _places(grads_at, projected, sizes)
            dropout = None if rng_state is None else (rng_at, *dropout_constants(dropout_p))

            def launch(known: arguments.Bound, strided: tuple[int, ...], rows: tuple[int | None, ...], of: Any) -> None:
                """strided: addresses of the StridedTensors. rows: of lse and what follows it. of(heads, grads): the
                tensors among q, k and v, and lse, at these addresses."""

                def tensors() -> Sequence[Tensor | None]:
                    grads = attention_rows.heads(dprojected, dmemory, sizes)
                    results, vectors = of(grads)
                    heads = attention_rows.heads(projected, memory, sizes)
                    return *heads, *results, *vectors, *known.mask_tensors, rng_state

                given = *arguments.moved(strided, known.strides), *rows, None, known.masking, dropout, *known.rest
                known.launch.run(projected.get_device(), known.programs, given, _when_needed(tensors))

            if short is not None:
                strided = q, k, v, dout_at, dq_at, dk_at, dv_at
                launch(short, strided, (lse_at, None, None), lambda grads: ((dout, *grads), (lse,)))
                return None
            strided = q, k, v, out_at, dout_at, dq_at
            launch(dq, strided, (lse_at, None, delta_at), lambda grads: ((out, dout, grads[0]), (lse, delta)))
            strided = q, k, v, dout_at, dk_at, dv_at
            launch(dkv, strided, (lse_at, delta_at), lambda grads: ((dout, *grads[1:]), (lse, delta)))
            return None
    (B, L, H, _, _, Dv), heads = sizes, attention_rows.heads(projected, memory, sizes)
    dout, out = (t.view(B, L, H, Dv).transpose(1, 2) for t in (dout, out))
    call = AttentionCall(*heads, bias, rng_state, list(masks), softmax_scale, dropout_p)
    learns, grads = bias is not None and bias.requires_grad, attention_rows.heads(dprojected, dmemory, sizes)
    return attention_bwd(dout, None, call, out, lse, learns, grads, bound if bias is None else None)[3]


def _places(found: Sequence[int], projected: Tensor, sizes: tuple[int, ...]) -> Sequence[int]:
    """Where q, k and v begin, from the addresses of what holds them: one tensor, or three."""
    if len(found) == 3:
        return found
    _, _, H, Hk, Dk, _ = sizes
    (q,), size = found, Dk * projected.element_size()
    return q, q + H * size, q + (H + Hk) * size


def _when_needed(tensors: Callable[[], Sequence[Tensor | None]]) -> Iterator[Tensor | None]:
    """A launch reads the tensors themselves only where Triton makes it."""
    yield from tensors()
