"""A linear layer and the cross-entropy of its outputs with label smoothing, the formula.

    z = logit_scale * (x weight^T + bias);    lse = log(sum over classes c of exp(z_c));    t: the target's class
    loss = (1 - label_smoothing) * (lse - z_t) + label_smoothing * mean over classes of (lse - z_c)

Source: Szegedy et al. 2016, "Rethinking the Inception Architecture", section 7; torch.nn.functional.cross_entropy.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

DIFFERENTIABLE = True


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    label_smoothing: float,
    ignore_index: int,
    logit_scale: float,
    reduction: str,
) -> Tensor:
    """x (..., d), weight (classes, d), target (...) int64 -> losses (...), or their mean or sum, float32 or float64.

    label_smoothing: spread over every class, the target's included; it may be a little over 1.
    """
    ignored = target == ignore_index
    x = x.masked_fill(ignored.unsqueeze(-1), 0)  # what it holds there, NaN included, reaches nothing
    logits = F.linear(x, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    return loss_of_logits(logits, target, label_smoothing, ignore_index, reduction)


def loss_of_logits(logits: Tensor, target: Tensor, label_smoothing: float, ignore_index: int, reduction: str) -> Tensor:
    """The second line of the formula, of logits (..., classes), in float32 or float64."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    ignored = target == ignore_index
    log_p = torch.log_softmax(logits, dim=-1)
    loss = -log_p.gather(-1, target.masked_fill(ignored, 0).unsqueeze(-1)).squeeze(-1)
    if label_smoothing > 0:
        loss = (1 - label_smoothing) * loss - label_smoothing * log_p.mean(-1)
    loss = loss.masked_fill(ignored, 0)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / (~ignored).sum()
