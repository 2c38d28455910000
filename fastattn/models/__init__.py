"""Whole models over fastattn.nn."""

from fastattn.generate import Translator
from fastattn.models.stacks import Decoder, Encoder
from fastattn.models.transformer import FusedTransformer

__all__ = ["Decoder", "Encoder", "FusedTransformer", "Translator"]
