"""Hugging Face transformers on fastattn's attention: ``attn_implementation="fastattn"``.

    from fastattn.integrations import huggingface
    model = huggingface.use(AutoModelForSeq2SeqLM.from_pretrained(name))

Padding, causal masks and the tokens of a cache become AttentionMasks. They are built once a forward pass and shared by
all layers, without a tensor of the size of the scores. Masks that transformers composes of functions (sliding windows,
packed positions, overlays) and those of static caches, whose length is a tensor, become one bool tensor, as for its own
"sdpa". Grouped heads are not repeated, and T5's relative bias gets its gradient. Unlike with transformers' "eager", a
query that may attend to nothing gives 0.

Refused, with the reason: soft-capped scores, attention sinks, keys that an indexer chose, and paged caches. `use` also
refuses models such as LED, which do not ask transformers for their attention: they would silently compute something
else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn.integrations.hidden_padding import may_leave_out_padding
from fastattn.masks import AttentionMask
from fastattn.ops.attention import scaled_dot_product_attention

try:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
except ImportError as error:
    raise ImportError(
        'fastattn.integrations.huggingface needs transformers: pip install "fastattn[huggingface]"'
    ) from error

NAME = "fastattn"
_REFUSED = {
    "softcap": "scores are capped by tanh in this model, which fastattn does not compute",
    "s_aux": "this model has attention sinks, which fastattn does not compute",
    "sinks": "this model has attention sinks, which fastattn does not compute",
    "indices": "this model chooses the keys of each query, which fastattn does not read",
    "block_indices": "this model chooses the keys of each query, which fastattn does not read",
    "cache": "continuous batching keeps keys and values in pages, which fastattn does not read",
    "head_mask": "fastattn does not mask heads",
}

# What changes a call of attention, next to its tensors and masks.
CHANGES_ATTENTION = (*_REFUSED, "is_causal", "position_bias")

Model = TypeVar("Model", bound=nn.Module)


def register() -> None:
    """Make ``attn_implementation="fastattn"`` known to transformers, for from_pretrained and configs."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def use(model: Model) -> Model:
    """The model itself, its attention and that of its submodels now fastattn's.

    model: a transformers model, or a module that contains one, such as peft or torch.compile makes.
    save_pretrained does not store the choice: from_pretrained of a saved model needs `use` again.
    Raises TypeError for what holds no transformers model, ValueError for one that computes its attention itself.
    """
    models = [m for m in model.modules() if isinstance(m, PreTrainedModel)] if isinstance(model, nn.Module) else []
    if not models:
        raise TypeError(f"model must be or hold a transformers.PreTrainedModel, got {type(model).__name__}")
    for m in models:
        if not m._can_set_attn_implementation():
            raise ValueError(
                f"{type(m).__name__} computes its attention by itself, without transformers' AttentionInterface, and "
                'would ignore attn_implementation="fastattn"'
            )
    register()
    for m in models:
        m.set_attn_implementation(NAME)
    for m in model.modules():  # the layers of a model inside another one still have the old config
        config = getattr(m, "config", None)
        if isinstance(config, PreTrainedConfig) and config._attn_implementation != NAME:
            config._attn_implementation = NAME
    return model


def implementations(model: nn.Module) -> list[tuple[PreTrainedConfig, str]]:
    """The attention of every config in a model, for restoring it."""
    configs = {id(c): c for m in model.modules() if isinstance(c := getattr(m, "config", None), PreTrainedConfig)}
    for config in list(configs.values()):
        for name in config.sub_configs:
            if isinstance(inner := getattr(config, name, None), PreTrainedConfig):
                configs[id(inner)] = inner
    return [(config, config._attn_implementation) for config in configs.values()]


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | AttentionMask | None,
    dropout: float | None = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention function: query (B, H, Lq, D), key and value (B, Hk, Lk, D) -> (B, Lq, H, D), weights.

    position_bias: (1, H, Lq, Lk), added to the scores. Options that change nothing here are accepted. ValueError for
    options that would change the result and are not supported.
    """
    for name, reason in _REFUSED.items():
        if options.get(name) is not None:
            raise ValueError(f"{type(module).__name__}: {reason}; use another attn_implementation")
    Lq, Lk = query.shape[2], key.shape[2]
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = attention_mask is None and Lq > 1 and bool(is_causal)
    if causal and Lk > Lq:  # the first tokens of a static cache: the rest is not filled yet
        key, value = key[:, :, :Lq], value[:, :, :Lq]
        position_bias = None if position_bias is None else position_bias[..., :Lq]
    if getattr(module, "is_decoder", False) and not getattr(module, "is_causal", True):
        position_bias = None  # T5's attention to the encoder has none, and is given zeros
    result = scaled_dot_product_attention(
        query,
        key,
        value,
        _with_bias(attention_mask, position_bias),
        dropout or 0.0,  # a config may say None
        is_causal=causal,
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
        return_weights=bool(output_attentions),  # peft hands on None
    )
    out, weights = result if output_attentions else (result, None)
    return out.transpose(1, 2).contiguous(), weights


def _with_bias(mask: Tensor | AttentionMask | None, bias: Tensor | None) -> Tensor | AttentionMask | None:
    if bias is None:
        hides_nothing = isinstance(mask, AttentionMask) and mask.band_only and not mask.has_band and mask.bias is None
        return None if hides_nothing else mask
    if isinstance(mask, AttentionMask):
        return mask.with_bias(bias) if mask.bias is None else mask.with_bias(mask.bias + bias)
    if mask is None:
        return AttentionMask(bias=bias)
    return AttentionMask(mask, bias=bias) if mask.dtype == torch.bool else AttentionMask(bias=mask + bias)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | AttentionMask | None = None,
    **options: Any,
) -> AttentionMask | None:
    """transformers' mask function. Query i is at position i + q_offset, key j at j + kv_offset.

    attention_mask: bool (B, L), True = a real token, over all positions so far.
    """
    if isinstance(attention_mask, AttentionMask):  # generate() made it for a static cache before the forward
        return attention_mask
    shape = (batch_size, 1, q_length, kv_length)
    if not isinstance(q_offset, Tensor):
        key_padding = None
        if attention_mask is not None:
            missing = kv_offset + kv_length - attention_mask.shape[1]
            key_padding = F.pad(attention_mask, (0, missing)) if missing > 0 else attention_mask
            key_padding = key_padding[:, kv_offset : kv_offset + kv_length]
        shift = q_offset - kv_offset
        causal = mask_function is causal_mask_function
        if mask_function is bidirectional_mask_function or (causal and q_length == 1 and shift >= kv_length - 1):
            return _Mask(shape, key_padding=key_padding)
        if causal and shift in (0, kv_length - q_length):
            align = "top_left" if shift == 0 else "bottom_right"
            return _Mask(shape, key_padding=key_padding, is_causal=True, align=align)
    else:  # the cache's own counter, which changes while the mask is in use
        q_offset = q_offset.clone()
    dense = sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **options)
    return dense if dense is None else _Mask(shape, dense)


class _Mask(AttentionMask):
    """An AttentionMask that generate() handles as if it were a tensor of this shape."""

    ndim = 4

    def __init__(self, shape: tuple[int, ...], attn_mask: Tensor | None = None, **options: Any) -> None:
        super().__init__(attn_mask, **options)
        self.shape = shape
        # The real tokens and whether keys are causal, where the mask hides nothing else and padding may be left out.
        is_causal = options.get("is_causal", False)
        hides_no_more = attn_mask is None and (shape[2] == shape[3] or not is_causal)
        knows_padding = may_leave_out_padding() and hides_no_more and self.key_padding is not None
        self.padding = (self.key_padding, is_causal) if knows_padding else None

    def contiguous(self) -> _Mask:
        return self
