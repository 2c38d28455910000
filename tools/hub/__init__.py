"""fastattn's ops as a kernel of Hugging Face's hub. docs/kernels_hub.md of the repository shows how it is used.

Written by tools/export_hub.py from the sources of fastattn. In this form there are Triton's kernels and PyTorch's
operators, no CUDA C++ kernels and no models.
"""

from typing import Any

from fastattn.backends import use_backend
from fastattn.masks import AttentionMask
from fastattn.ops._combine import add_sinks, merge
from fastattn.ops.add_layer_norm import dropout_add_layer_norm, dropout_add_rms_norm
from fastattn.ops.attention import scaled_dot_product_attention
from fastattn.ops.decode_attention import decode_attention
from fastattn.ops.feed_forward import feed_forward
from fastattn.ops.linear_cross_entropy import linear_cross_entropy

from . import layers

# transformers looks for this name and the next one. It then makes masks as for its own "sdpa".
supports_flash_attn = True


def flash_attn_forward(*args: Any, **options: Any) -> Any:
    """transformers' attention function, for ``attn_implementation``. Its arguments are those of `attention_forward`."""
    from fastattn.integrations.huggingface import attention_forward  # the one module that imports transformers

    return attention_forward(*args, **options)


__all__ = [
    "AttentionMask",
    "add_sinks",
    "decode_attention",
    "dropout_add_layer_norm",
    "dropout_add_rms_norm",
    "feed_forward",
    "flash_attn_forward",
    "layers",
    "linear_cross_entropy",
    "merge",
    "scaled_dot_product_attention",
    "supports_flash_attn",
    "use_backend",
]
