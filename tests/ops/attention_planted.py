"""Flash attention in plain PyTorch, tile by tile, with a switch for one bug at a time.

Without a bug it passes every check; the planted-bug tests show that each bug fails them. The bugs are those that the
field's trackers report and those that this algorithm invites.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastattn.reference import philox

TILE = 16

BUGS = {
    # masks
    "mask one key to the left": "element mask read at index j + 1",
    "mask one query down": "element mask read at index i + 1",
    "mask ignored": "the mask never reaches the scores",
    "partial tile taken as full": "one tile that needs the element mask runs without it",
    "last partial tile skipped": "the ragged last key tile is left out",
    "tile skipped": "one visible key tile is left out",
    "heads share the first head's mask": "mask of head 0 used for all",
    "samples share the first sample's mask": "mask of sample 0 used for all",
    # forward
    "accumulator not rescaled": "out is not multiplied by exp(old max - new max)",
    "sum not rescaled": "the softmax denominator is not multiplied by exp(old max - new max)",
    "scale missing": "scores are not scaled",
    "bias after the scale": "the bias is scaled with the scores",
    "lse in base 2": "lse is returned as log2",
    "lse without the max": "lse = log(sum)",
    "empty row divides by zero": "0 / 0 in a row that sees nothing",
    "wrong key head": "query head h reads key head h mod Hk",
    "16-bit accumulator": "the output is accumulated in the input dtype",
    # dropout
    "dropout row off by one": "Philox counter row + 1",
    "dropout column from the tile": "Philox counter column restarts in each tile",
    "dropout heads share a mask": "Philox counter without the head",
    "dropout without rescale": "kept weights are not divided by 1 - p",
    "dropout before the sum": "the denominator counts only kept weights",
    # backward
    "backward redraws dropout": "the backward uses another offset",
    "dlse dropped": "the gradient of lse is ignored",
    "delta missing": "dS = P dP",
    "dq not scaled": "softmax_scale missing in dq",
    "dk not scaled": "softmax_scale missing in dk",
    "dv without dropout": "dv uses P, not the dropped P",
    "dk of one head of the group": "grouped heads are not summed",
    "bias gradient of one sample": "the gradient of a broadcast bias is not summed over the batch",
    "bias gradient scaled": "softmax_scale multiplies the bias gradient",
    "last key tile without gradient": "dk, dv of the last tile are never written",
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
    if bug == "mask one query down":
        keep = torch.cat([keep[..., 1:, :], keep[..., -1:, :]], -2)
    if bug == "mask ignored":
        keep = torch.ones_like(keep)
    if bug == "heads share the first head's mask":
        keep = keep[:, :1].expand_as(keep)
    if bug == "samples share the first sample's mask":
        keep = keep[:1].expand_as(keep)
    keep = keep.clone()
    if bug == "partial tile taken as full":
        keep[..., TILE:, :TILE] = True
    if bug == "last partial tile skipped" and Lk % TILE:
        keep[..., Lk - Lk % TILE :] = False
    if bug == "tile skipped":
        keep[..., :TILE] = False
    return keep


def _multiplier(rng_state: Tensor | None, like: Tensor, dropout_p: float, bug: str | None) -> Tensor | float:
    if rng_state is None:
        return 1.0
    B, H, Lq, Lk = like.shape
    if bug == "dropout row off by one":
        keep = philox.keep_mask(rng_state, B * H * Lq + 1, Lk, dropout_p)[1:]
    elif bug == "dropout column from the tile":
        keep = philox.keep_mask(rng_state, B * H * Lq, Lk, dropout_p)[:, torch.arange(Lk) % TILE]
    elif bug == "dropout heads share a mask":
        keep = philox.keep_mask(rng_state, Lq, Lk, dropout_p).expand(B, H, Lq, Lk)
    else:
        keep = philox.keep_mask(rng_state, B * H * Lq, Lk, dropout_p)
    keep = keep.reshape(like.shape).to(like.dtype)
    return keep if bug == "dropout without rescale" else keep * philox.rescale(dropout_p)


def _probabilities(S: Tensor, lse: Tensor) -> Tensor:
    return torch.exp(S - lse.where(lse > -torch.inf, 0).unsqueeze(-1))


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bias, mask, dropout_p, scale, rng_state, bug):
        group = q.shape[1] // k.shape[1]
        keep = _visible(mask, q, k, bug)
        heads = torch.arange(q.shape[1])
        heads = heads % k.shape[1] if bug == "wrong key head" else heads // group
        wide = torch.promote_types(q.dtype, torch.float32)
        K, V = k.to(wide)[:, heads], v.to(wide)[:, heads]
        S = q.to(wide) * (1.0 if bug == "scale missing" else scale) @ K.mT
        if bias is not None:
            S = S + bias.to(wide).where(keep, 0) * (scale if bug == "bias after the scale" else 1.0)
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
            summed = W if bug == "dropout before the sum" else P
            total = total * (1 if bug == "sum not rescaled" else rescale) + summed.sum(-1, keepdim=True)
            acc = acc * (1 if bug == "accumulator not rescaled" else rescale) + W @ V[..., cols, :]
            if bug == "16-bit accumulator":
                acc = acc.to(q.dtype).to(wide)
            peak = peak_new
        sees = total > 0
        out = acc / (total if bug == "empty row divides by zero" else total.where(sees, 1))
        lse = torch.log(total) + (0 if bug == "lse without the max" else peak)
        lse = lse.where(sees, -torch.inf).squeeze(-1)
        ctx.save_for_backward(q, K, V, bias, out, lse, S)
        ctx.rest = k.shape[1], M, dropout_p, scale, rng_state, bug
        weights = (_probabilities(S, lse) * M).to(q.dtype)
        ctx.mark_non_differentiable(weights)
        return out.to(q.dtype), lse / 0.6931471805599453 if bug == "lse in base 2" else lse, weights

    @staticmethod
    def backward(ctx, dout, dlse, _):
        q, K, V, bias, out, lse, S = ctx.saved_tensors
        Hk, M, dropout_p, scale, rng_state, bug = ctx.rest
        if bug == "backward redraws dropout" and rng_state is not None:
            M = _multiplier(rng_state + 1, S, dropout_p, bug)
        dO = dout.to(K.dtype)
        P = _probabilities(S, lse)
        dP = M * (dO @ V.mT)
        delta = 0 if bug == "delta missing" else (dO * out).sum(-1, keepdim=True)
        dS = P * (dP - delta + (0 if bug == "dlse dropped" else dlse[..., None]))
        dq = dS @ K * (1 if bug == "dq not scaled" else scale)
        dk = dS.mT @ q.to(K.dtype) * (1 if bug == "dk not scaled" else scale)
        dv = (P if bug == "dv without dropout" else P * M).mT @ dO
        dk, dv = (t.unflatten(1, (Hk, -1)) for t in (dk, dv))
        dk = dk[:, :, 0] if bug == "dk of one head of the group" else dk.sum(2)
        dv = dv.sum(2)
        if bug == "last key tile without gradient":
            for t in (dk, dv):
                t[:, :, (t.shape[2] - 1) // TILE * TILE :] = 0
        dbias = None
        if bias is not None:
            if bug == "bias gradient scaled":
                dS = dS * scale
            if bug == "bias gradient of one sample" and bias.shape[0] == 1:
                dS = dS[:1]
            dbias = dS.sum_to_size(bias.shape).to(bias.dtype)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), dbias, None, None, None, None, None
