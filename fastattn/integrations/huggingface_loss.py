"""The loss of a transformers model whose head is a plain Linear, without its logits."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fastattn._tracing import can_read_values
from fastattn.integrations.hidden_padding import padding_is_hidden
from fastattn.nn.fusible import can_fuse
from fastattn.ops.linear_cross_entropy import linear_cross_entropy

IGNORED = -100


def loss(
    model: nn.Module,
    *,
    label_smoothing: float = 0.0,
    num_items_in_batch: Tensor | int | None = None,
    **batch: Any,
) -> Tensor:
    """What model(**batch).loss is, or with label_smoothing what transformers' Trainer makes of it. A scalar.

    model: a transformers model with a language model's head, or what DistributedDataParallel or peft makes of one.
    batch: the model's arguments, with labels (B, L); -100 is ignored. Without decoder_input_ids the model makes them of
        the labels. A decoder-only model's labels are shifted by one, as by itself.
    num_items_in_batch: the sum over all tokens is divided by it; unless given, by the tokens that count.
    The hidden states are multiplied with the head in chunks, in one op with the loss. Where the head is modified, as by
    an adapter, the logits are computed.
    ValueError without labels, TypeError for a model without such a head.
    """
    labels = batch.pop("labels", None)
    if labels is None:
        raise ValueError("loss needs labels in the batch")
    inner = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    head = None if inner is None else inner.get_output_embeddings()
    if not hasattr(head, "out_features"):  # some models' heads are embeddings
        raise TypeError(f"{type(model).__name__} has no head that gives logits of tokens")
    if inner.config.is_encoder_decoder and "decoder_input_ids" not in batch and "decoder_inputs_embeds" not in batch:
        batch["decoder_input_ids"] = _decoder_input_ids(inner, labels)
    if inner.config.is_encoder_decoder:
        batch.setdefault("use_cache", False)
        if "decoder_attention_mask" not in batch:  # after the last label that counts nothing counts
            counts = (labels != IGNORED).long()
            batch["decoder_attention_mask"] = counts.flip(1).cummax(1).values.flip(1)
    if type(inner).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        labels = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    options = {"ignore_index": IGNORED, "label_smoothing": label_smoothing}
    options["reduction"] = "mean" if num_items_in_batch is None else "sum"
    if not can_fuse(head):
        logits = model(**batch).logits
        total = F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), **options)
    else:
        bias, found = getattr(inner, "final_logits_bias", None), []
        if bias is not None:
            bias = bias.flatten() if head.bias is None else head.bias + bias.flatten()

        def compute_loss(hidden: Tensor) -> Tensor:
            rows = hidden.flatten(0, -2)
            found.append(
                linear_cross_entropy(
                    rows, head.weight, labels.flatten(), head.bias if bias is None else bias, **options
                )
            )
            return hidden.new_empty(0, head.weight.shape[0])

        head.forward = compute_loss
        try:
            with padding_is_hidden() if _ignores_padding(inner, batch, labels) else nullcontext():
                model(**batch)
        finally:
            del head.forward
        (total,) = found
    return total if num_items_in_batch is None else total / num_items_in_batch


def _decoder_input_ids(model: Any, labels: Tensor) -> Tensor:
    """The labels shifted to the right, as the model's own forward shifts them."""
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return model.prepare_decoder_input_ids_from_labels(labels=labels)
    shifted = F.pad(labels[:, :-1], (1, 0), value=model.config.decoder_start_token_id)
    return shifted.masked_fill(shifted == IGNORED, model.config.pad_token_id)


def _ignores_padding(model: PreTrainedModel, batch: dict[str, Any], labels: Tensor) -> bool:
    """Whether the loss reads nothing of padding, which a CPU can tell without waiting."""
    mask = batch.get("decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask")
    if mask is None or mask.shape != labels.shape or not can_read_values(labels):
        return mask is None
    return not bool(((mask == 0) & (labels != IGNORED)).any())
