"""Whole models over fastattn.nn."""

from fastattn.models.transformer import Decoder, Encoder, FusedTransformer

__all__ = ["Decoder", "Encoder", "FusedTransformer"]
