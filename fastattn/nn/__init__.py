"""Modules over the ops, named like those of the public PyTorch implementation of "Attention Is All You Need"."""

from fastattn.nn.attention import MultiHeadAttention, ScaledDotProductAttention
from fastattn.nn.feed_forward import PositionwiseFeedForward
from fastattn.nn.kv_cache import DecoderCache, Memory
from fastattn.nn.layers import DecoderLayer, EncoderLayer
from fastattn.nn.position import PositionalEncoding
from fastattn.nn.residual import PendingResidual

__all__ = [
    "DecoderCache",
    "DecoderLayer",
    "EncoderLayer",
    "Memory",
    "MultiHeadAttention",
    "PendingResidual",
    "PositionalEncoding",
    "PositionwiseFeedForward",
    "ScaledDotProductAttention",
]
