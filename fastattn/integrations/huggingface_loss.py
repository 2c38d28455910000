"""The loss of a transformers model, without the logits where its head is a plain Linear."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastattn.integrations.lazy_logits import Head, lazy_logits
from fastattn.nn.fusible import can_fuse
from fastattn.ops._checks import check_positive


def loss(
    model: nn.Module, *, label_smoothing: float = 0.0, num_items_in_batch: Tensor | int | None = None, **batch: Any
) -> Tensor:
    """What model(**batch).loss is, computed by the model's own forward. A scalar.

    model: a transformers model, or what DistributedDataParallel or peft makes of one.
    batch: the model's arguments, with labels; -100 is ignored.
    label_smoothing: of the loss of the tokens, as transformers' Trainer computes it, instead of the model's own.
    num_items_in_batch: the sum over all tokens is divided by it; unless given, by the tokens that count.
    Where the head is an unmodified Linear, and the model passes its logits to cross_entropy, the hidden states are
    multiplied with the head in chunks, in one op with the loss. Elsewhere, and under torch.compile, the logits are
    computed.
    ValueError without labels. TypeError for what holds no transformers model or gives no loss. TypeError for
    label_smoothing or num_items_in_batch under torch.compile, and for a model that does not compute its loss by one
    cross_entropy over its words. RuntimeError where the head's weight or input changes in place before its logits are
    read.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    labels = batch.get("labels")
    if labels is None:
        raise ValueError("loss needs labels in the batch")
    if num_items_in_batch is not None and not isinstance(num_items_in_batch, Tensor):
        check_positive("num_items_in_batch", num_items_in_batch)
    if isinstance(labels, Tensor):
        batch["labels"] = labels.contiguous()  # models view them as one row
    inner = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if inner is None:
        raise TypeError(f"{type(model).__name__} holds no model of transformers")
    options = label_smoothing or None, num_items_in_batch
    if torch.compiler.is_compiling():
        value, losses = getattr(model(**batch), "loss", None), 0
    else:
        if inner.config.is_encoder_decoder and "use_cache" in inspect.signature(inner.forward).parameters:
            batch.setdefault("use_cache", False)  # T5's decoder would fill a cache
        head = inner.get_output_embeddings()
        is_plain = type(head) in (nn.Linear, Head) and can_fuse(head)  # Head: within another thread's call
        with lazy_logits(head if is_plain else None, *options) as request:
            output = model(**batch)
            value, losses = getattr(output, "loss", None), request.losses
            del output
    if value is None:
        raise TypeError(f"{type(inner).__name__} gives no loss for labels")
    if losses != 1 and options != (None, None):
        raise TypeError(
            f"{type(inner).__name__} does not compute its loss by one cross_entropy over its words, or torch.compile "
            "traces it: label_smoothing and num_items_in_batch are not supported"
        )
    return value
