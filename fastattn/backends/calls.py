"""Calls as ops hand them to the kernels. The order of the fields: fastattn/ops/_autograd.py."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fastattn.masks import PreparedMask


class AttentionCall(NamedTuple):
    """scaled_dot_product_attention. q (B, H, Lq, Dk), k (B, Hk, Lk, Dk), v (B, Hk, Lk, Dv).

    bias: AttentionMask.any_bias.      rng_state: int64 (seed, offset), or None without dropout.
    masks: in the layouts of the backend's mask_layouts(). The backward gets them without the first, the forward's.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    rng_state: Tensor | None
    masks: list[PreparedMask]
    softmax_scale: float
    dropout_p: float = 0.0
    softcap: float | None = None


class LossCall(NamedTuple):
    """linear_cross_entropy. x (tokens, d) and target (tokens,), int64, are contiguous.

    ignore_index: None where no row is ignored, within a backend.      wanted: which gradients, of x, weight and bias.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    label_smoothing: float
    ignore_index: int | None
    logit_scale: float
    reduction: str
    wanted: list[bool]


class FeedForwardCall(NamedTuple):
    """feed_forward. x (tokens, d) is contiguous; weight1 (d_ff, d), gated (2 * d_ff, d); weight2 (d_out, d_ff)."""

    x: Tensor
    weight1: Tensor
    bias1: Tensor | None
    weight2: Tensor
    bias2: Tensor | None
    rng_state: Tensor | None
    activation: str
    dropout_p: float


class NormCall(NamedTuple):
    """add_layer_norm. x, residual (rows, hidden) are contiguous; without bias RMSNorm. In the backward x is z."""

    x: Tensor
    residual: Tensor | None
    weight: Tensor
    bias: Tensor | None
    x_bias: Tensor | None
    rng_state: Tensor | None
    eps: float
    dropout_p: float
    eps_on_std: bool
