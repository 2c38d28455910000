"""AttentionMask, and what kernels read of one."""

from fastattn.masks.attention_mask import AttentionMask, get_pad_mask, get_subsequent_mask
from fastattn.masks.kernel_format import BIT_BLOCK, BIT_WORDS, Layout, PreparedMask, flatten, prepare, unflatten

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
