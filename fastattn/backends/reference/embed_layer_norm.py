"""The first layer of a Transformer: embedding, positions, dropout and layer normalisation, the formula.

z = dropout(embedding[tokens] * scale + position_table[position])
out = (z - mean(z)) / sqrt(var(z) + eps) * weight + bias
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.backends.reference.add_layer_norm import add_layer_norm

DIFFERENTIABLE = True


def embed_layer_norm(
    tokens: Tensor,
    embedding: Tensor,
    position_table: Tensor,
    weight: Tensor,
    bias: Tensor,
    position: Tensor | None,
    scale: float,
    padding_idx: int | None,
    eps: float,
    dropout_p: float,
    rng_state: Tensor | None,
) -> Tensor:
    """tokens (..., L), embedding (V, d), position_table (n_position, d), weight, bias (d,) -> (..., L, d).

    Sums and statistics are taken in float32 or, for a float64 embedding, in float64; z is never rounded.
    """
    acc = torch.promote_types(embedding.dtype, torch.float32)
    words = embedding_rows(tokens, embedding, padding_idx).to(acc)
    places = position_table[: tokens.shape[-1]] if position is None else position_table[position]
    z = words * scale + places.to(acc)
    return add_layer_norm(z, None, weight, bias, eps, dropout_p, rng_state)[0].to(embedding.dtype)


def embedding_rows(tokens: Tensor, embedding: Tensor, padding_idx: int | None) -> Tensor:
    """embedding[tokens]. PyTorch's own function has no second derivative where there are no tokens."""
    if tokens.numel() == 0:
        return embedding[:0].clone().view(*tokens.shape, embedding.shape[1])
    return F.embedding(tokens, embedding, padding_idx)
