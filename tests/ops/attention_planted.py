"""Flash attention in plain PyTorch, tile by tile, with a switch for one bug at a time.

Without a bug it passes every check; test_attention_planted.py shows that each bug fails them. Each stands for a class.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastattn.backends.constants import dropout_scale
from fastattn.backends.reference import philox

TILE = 16

BUGS = {
    "mask one key to the left": "the bool matrix is read at index j + 1",
    "last partial tile skipped": "the ragged last key tile is left out",
    "accumulator not rescaled": "out is not multiplied by exp(old max - new max)",
    "16-bit accumulator": "the output is accumulated in the input dtype",
    "dropout row off by one": "Philox counter row + 1",
    "delta missing": "dS = P dP",
    "dk of one head of the group": "grouped heads are not summed",
    "bias gradient of one sample": "the gradient of a broadcast bias is not summed over the batch",
}


def flash(bug: str | None = None) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """A backend with (or without) a bug, as attention_checks.check takes it."""

    def attend(q, k, v, mask, dropout_p, scale):
        rng_state = philox.draw_rng_state(q.device) if dropout_p > 0 else None
        return _Flash.apply(q, k, v, mask.bias, mask, dropout_p, scale, rng_state, bug)

    return attend


def _visible(mask, q: Tensor, k: Tensor, bug: str | None) -> Tensor:
    B, H, Lq, Lk = (*q.shape[:3], k.shape[2])
    keep = mask.dense(B, H, Lq, Lk, q.device)
    if mask.bias is not None:
        keep = keep & (mask.bias != -torch.inf)
    if bug == "mask one key to the left":
        keep = torch.cat([keep[..., 1:], keep[..., -1:]], -1)
    if bug == "last partial tile skipped" and Lk % TILE:
        keep = keep.clone()
        keep[..., Lk - Lk % TILE :] = False
    return keep


def _multiplier(rng_state: Tensor | None, like: Tensor, dropout_p: float, bug: str | None) -> Tensor | float:
    if rng_state is None:
        return 1.0
    B, H, Lq, Lk = like.shape
    off = 1 if bug == "dropout row off by one" else 0
    keep = philox.keep_mask(rng_state, B * H * Lq + off, Lk, dropout_p)[off:]
    return keep.reshape(like.shape).to(like.dtype) * dropout_scale(dropout_p)


def _probabilities(S: Tensor, lse: Tensor) -> Tensor:
    return torch.exp(S - lse.where(lse > -torch.inf, 0).unsqueeze(-1))


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bias, mask, dropout_p, scale, rng_state, bug):
        keep = _visible(mask, q, k, bug)
        wide = torch.promote_types(q.dtype, torch.float32)
        K, V = (t.to(wide).repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        S = q.to(wide) * scale @ K.mT
        if bias is not None:
            S = S + bias.to(wide).where(keep, 0)
        S = S.masked_fill(~keep, -torch.inf)
        M = _multiplier(rng_state, S, dropout_p, bug)

        peak = S.new_full((*S.shape[:3], 1), -torch.inf)
        total, acc = torch.zeros_like(peak), S.new_zeros(*S.shape[:3], v.shape[-1])
        for n in range(0, S.shape[-1], TILE):
            cols = slice(n, n + TILE)
            peak_new = torch.maximum(peak, S[..., cols].amax(-1, keepdim=True))
            base = peak_new.where(peak_new > -torch.inf, 0)
            P = torch.exp(S[..., cols] - base)
            rescale = torch.exp(peak - base)
            W = P * (M if isinstance(M, float) else M[..., cols])
            total = total * rescale + P.sum(-1, keepdim=True)
            acc = acc * (1 if bug == "accumulator not rescaled" else rescale) + W @ V[..., cols, :]
            if bug == "16-bit accumulator":
                acc = acc.to(q.dtype).to(wide)
            peak = peak_new
        some = total > 0
        out = (acc / total.where(some, 1)).to(q.dtype)
        lse = (torch.log(total) + peak).where(some, -torch.inf).squeeze(-1)
        ctx.save_for_backward(q, K, V, bias, out, lse, S)
        ctx.rest = k.shape[1], M, scale, bug
        weights = (_probabilities(S, lse) * M).to(q.dtype)
        ctx.mark_non_differentiable(weights)
        return out, lse, weights

    @staticmethod
    def backward(ctx, dout, dlse, _):
        q, K, V, bias, out, lse, S = ctx.saved_tensors
        Hk, M, scale, bug = ctx.rest
        dO = dout.to(K.dtype)
        P = _probabilities(S, lse)
        dP = M * (dO @ V.mT)
        delta = 0 if bug == "delta missing" else (dO * out).sum(-1, keepdim=True)
        dS = P * (dP - delta + dlse[..., None])
        dk = (scale * dS.mT @ q.to(K.dtype)).unflatten(1, (Hk, -1))
        dk = dk[:, :, 0] if bug == "dk of one head of the group" else dk.sum(2)
        dv = ((P * M).mT @ dO).unflatten(1, (Hk, -1)).sum(2)
        dbias = None
        if bias is not None:
            of_samples = dS[:1] if bug == "bias gradient of one sample" and bias.shape[0] == 1 else dS
            dbias = of_samples.sum_to_size(bias.shape).to(bias.dtype)
        return scale * (dS @ K).to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), dbias, None, None, None, None, None
