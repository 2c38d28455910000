"""What the sublayers of a layer consist of: the one description that every layer is computed from.

The modules of this package make it of their parameters (MultiHeadAttention.params, PositionwiseFeedForward.params), and
accelerated classes make it from a table that names the children. run_layer.py computes it; decoding.py its steps.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from fastattn.backends import Backend


class NormParams(NamedTuple):
    """The end of a sublayer: a dropout, with its current probability, and a LayerNorm, or without a bias an RMSNorm.

    weight, bias: (d_model,)."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    dropout_p: float


class AttentionParams(NamedTuple):
    """An attention sublayer.

    weights, biases: of the projections of queries, keys and values, (rows, d_model) each, or of one projection with all
        their rows. Where keys and values come projected, the queries' alone. A projection without a bias has None.
    fc (d_model, n_head * d_v), fc_bias: of the projection that follows the heads.
    dropout_p: on the attention weights.
    """

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
    fc: Tensor
    fc_bias: Tensor | None
    norm: NormParams
    n_head_kv: int
    d_k: int
    d_v: int
    softmax_scale: float
    dropout_p: float
    backend: Backend | None


class FeedForwardParams(NamedTuple):
    """A feed-forward sublayer.

    weights1, biases1: of the first map, (rows, d_model), or of the two that a gated activation reads, the gate first.
    weight2: (d_model, d_inner).     dropout_p: on the hidden units.
    """

    weights1: tuple[Tensor, ...]
    biases1: tuple[Tensor | None, ...]
    weight2: Tensor
    bias2: Tensor | None
    norm: NormParams
    activation: str
    dropout_p: float
    backend: Backend | None


Params = AttentionParams | FeedForwardParams


def norm_params(norm: nn.Module, dropout_p: float) -> NormParams:
    """Of an unmodified norm, of a class in fusible.READ, and the dropout before it."""
    own = norm._parameters
    return NormParams(own["weight"], own.get("bias"), norm.eps, dropout_p)
