"""Whole models over fastattn.nn."""

from fastattn.generate import Translator
from fastattn.models.captioner import ABDTransformer, src_trg_mask
from fastattn.models.padding import Unpadded, pad, unpad
from fastattn.models.stacks import Decoder, Encoder
from fastattn.models.transformer import FusedTransformer

__all__ = [
    "ABDTransformer",
    "Decoder",
    "Encoder",
    "FusedTransformer",
    "Translator",
    "Unpadded",
    "pad",
    "src_trg_mask",
    "unpad",
]
