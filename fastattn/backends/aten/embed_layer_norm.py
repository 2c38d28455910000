"""Embedding, positions, dropout and layer normalisation by PyTorch's own operators: four of them where a plain model
has seven, and none that copies.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.backends.reference import philox
from fastattn.backends.reference.embed_layer_norm import embedding_rows

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
    """As fastattn.backends.reference.embed_layer_norm.embed_layer_norm, which is the specification."""
    hidden = embedding.shape[1]
    words = embedding_rows(tokens, embedding, padding_idx)
    places = position_table[: tokens.shape[-1]] if position is None else F.embedding(position, position_table)
    acc = torch.promote_types(embedding.dtype, torch.float32)
    if embedding.dtype != acc or position_table.dtype != acc or weight.dtype != acc:  # a cast that changes nothing
        words, places, weight, bias = (t.to(acc) for t in (words, places, weight, bias))  # still costs a call
    z = words.add_(places) if scale == 1 else torch.add(places, words, alpha=scale)
    if rng_state is not None:
        z.mul_(philox.keep_factor(rng_state, tokens.numel(), hidden, dropout_p, acc).view(z.shape))
    out = F.layer_norm(z, (hidden,), weight, bias, eps)
    return out if out.dtype == embedding.dtype else out.to(embedding.dtype)
