"""AttentionMask, and the format in which kernels read it."""

from fastattn.masks.attention_mask import AttentionMask, get_pad_mask, get_subsequent_mask
from fastattn.masks.conversions import documents_to_cu_seqlens, lengths_to_padding, prefix_lm_mask
from fastattn.masks.kernel_format import Layout, PreparedMask, from_operator_args, prepare, to_operator_args
from fastattn.masks.relative import alibi, alibi_slopes, t5_relative_bias, zero_distance

__all__ = [
    "AttentionMask",
    "Layout",
    "PreparedMask",
    "alibi",
    "alibi_slopes",
    "documents_to_cu_seqlens",
    "from_operator_args",
    "get_pad_mask",
    "get_subsequent_mask",
    "lengths_to_padding",
    "prefix_lm_mask",
    "prepare",
    "t5_relative_bias",
    "to_operator_args",
    "zero_distance",
]
