"""AttentionMask, and what kernels read of one."""

from fastattn.masks.mask import AttentionMask, get_pad_mask, get_subsequent_mask
from fastattn.masks.prepared import BIT_BLOCK, BIT_WORDS, Layout, PreparedMask, flatten, prepare, unflatten

__all__ = [
    "BIT_BLOCK",
    "BIT_WORDS",
    "AttentionMask",
    "Layout",
    "PreparedMask",
    "flatten",
    "get_pad_mask",
    "get_subsequent_mask",
    "prepare",
    "unflatten",
]
