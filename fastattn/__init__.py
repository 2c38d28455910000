"""fastattn: encoder-decoder Transformers in PyTorch with fused kernels, by changing one import.

Fused kernels for masked attention, residual + dropout + layer normalisation, the position-wise feed-forward network and
the output projection with its loss. A plain PyTorch path is their specification. `python -m fastattn
doctor` compares the two here.
"""

from fastattn import generate
from fastattn.backends import use_backend
from fastattn.check.explain import Explanation, ModelExplanation, explain
from fastattn.check.shadow import shadow
from fastattn.graphs.training_step import GraphedStep
from fastattn.integrations.accelerate import accelerate, restore
from fastattn.masks import AttentionMask, get_pad_mask, get_subsequent_mask
from fastattn.models import FusedTransformer
from fastattn.ops._combine import add_sinks, merge
from fastattn.ops.add_layer_norm import dropout_add_layer_norm, dropout_add_rms_norm
from fastattn.ops.attention import scaled_dot_product_attention
from fastattn.ops.decode_attention import decode_attention
from fastattn.ops.feed_forward import feed_forward
from fastattn.ops.linear_cross_entropy import linear_cross_entropy

__version__ = "0.1.0"

__all__ = [
    "AttentionMask",
    "Explanation",
    "FusedTransformer",
    "GraphedStep",
    "ModelExplanation",
    "accelerate",
    "add_sinks",
    "decode_attention",
    "dropout_add_layer_norm",
    "dropout_add_rms_norm",
    "explain",
    "feed_forward",
    "generate",
    "get_pad_mask",
    "get_subsequent_mask",
    "linear_cross_entropy",
    "merge",
    "restore",
    "scaled_dot_product_attention",
    "shadow",
    "use_backend",
]
