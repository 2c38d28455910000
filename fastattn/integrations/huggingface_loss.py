"""The loss of a transformers model whose head is a plain Linear, without its logits."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

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
        the labels. Labels are shifted by one where the model does so, as decoder-only models do.
    num_items_in_batch: the sum over all tokens is divided by it; unless given, by the tokens that count.
    The hidden states are multiplied with the head in chunks, in one op with the loss. Where the head is modified, as by
    an adapter, the logits are computed.
    ValueError without labels. TypeError for a model without such a head, for one that changes the logits after it, as
    Gemma 2 does, and for one that adds another loss.
    """
    labels = batch.pop("labels", None)
    if labels is None:
        raise ValueError("loss needs labels in the batch")
    inner = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    head = None if inner is None else inner.get_output_embeddings()
    if inner is None or not hasattr(head, "out_features"):  # some models' heads are embeddings
        raise TypeError(f"{type(model).__name__} has no head that gives logits of tokens")
    if inner.config.is_encoder_decoder:
        if "decoder_input_ids" not in batch and "decoder_inputs_embeds" not in batch:
            batch["decoder_input_ids"] = _decoder_inputs(inner, labels)
        batch.setdefault("use_cache", False)
        if "decoder_attention_mask" not in batch:  # after the last label that counts nothing counts
            counts = (labels != IGNORED).long()
            batch["decoder_attention_mask"] = counts.flip(1).cummax(1).values.flip(1)
    if _shifts_labels(inner):
        labels = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    options: dict[str, Any] = {"ignore_index": IGNORED, "label_smoothing": label_smoothing}
    options["reduction"] = "mean" if num_items_in_batch is None else "sum"
    if can_fuse(head):
        total = _loss_at_head(model, inner, head, labels, options, batch)
    else:
        output = model(**batch)
        _check_for_other_losses(inner, output)
        total = F.cross_entropy(output.logits.flatten(0, -2).float(), labels.flatten(), **options)
    return total if num_items_in_batch is None else total / num_items_in_batch


def _loss_at_head(
    model: nn.Module, inner: PreTrainedModel, head: Any, labels: Tensor, options: dict[str, Any], batch: dict[str, Any]
) -> Tensor:
    """The loss, computed where the model calls its head, which then gives empty logits."""
    final_bias, losses, logits, outputs = getattr(inner, "final_logits_bias", None), [], [], []
    bias = head.bias
    if final_bias is not None and not _is_zero(final_bias):
        bias = final_bias.flatten() if bias is None else bias + final_bias.flatten()

    def compute_loss(hidden: Tensor) -> Tensor:
        losses.append(linear_cross_entropy(hidden.flatten(0, -2), head.weight, labels.flatten(), bias, **options))
        logits.append(losses[-1].expand(0, head.weight.shape[0]))
        return logits[-1]

    head.forward = compute_loss
    hook = inner.register_forward_hook(lambda module, args, output: outputs.append(output))
    try:
        with padding_is_hidden() if _ignores_padding(inner, batch, labels) else nullcontext():
            output = model(**batch)
    finally:
        del head.forward
        hook.remove()
    _check_for_other_losses(inner, outputs[-1])
    if not losses or (final_bias is None and outputs[-1].logits is not logits[-1]):
        raise TypeError(f"{type(inner).__name__} changes the logits that its head gives: its loss needs them")
    # The sum of nothing, so that the backward passes the model's outputs, where DistributedDataParallel watches it.
    return losses[-1] + output.logits.sum()


def _is_zero(bias: Tensor) -> bool:
    """Whether a CPU can tell without waiting that it adds nothing, as in most checkpoints: a pass over the logits."""
    return can_read_values(bias) and not bias.requires_grad and not bool(bias.any())


def _check_for_other_losses(inner: PreTrainedModel, output: Any) -> None:
    if getattr(output, "aux_loss", None) is not None:
        raise TypeError(f"{type(inner).__name__} adds another loss to that of its tokens, which is not computed here")


def _decoder_inputs(inner: Any, labels: Tensor) -> Tensor:
    """The labels after a start token, as the model makes them of labels."""
    if hasattr(inner, "prepare_decoder_input_ids_from_labels"):
        return inner.prepare_decoder_input_ids_from_labels(labels=labels)
    ids = F.pad(labels[:, :-1], (1, 0), value=inner.config.decoder_start_token_id)
    return ids.masked_fill(ids == IGNORED, inner.config.pad_token_id)


def _shifts_labels(inner: Any) -> bool:
    """Whether the model's own loss compares logits with the labels that follow them.

    A model that uses the loss_function of its class does as that function; BART and T5, for instance, do without.
    """
    forwards = [inspect.unwrap(vars(c)["forward"]) for c in type(inner).__mro__ if "forward" in vars(c)]
    if not any("loss_function" in forward.__code__.co_names for forward in forwards):
        return False
    if inner.loss_function not in (ForCausalLMLoss, ForMaskedLMLoss):
        raise TypeError(f"{type(inner).__name__} has a loss of its own, {inner.loss_function}")
    return inner.loss_function is ForCausalLMLoss


def _ignores_padding(inner: PreTrainedModel, batch: dict[str, Any], labels: Tensor) -> bool:
    """Whether the loss reads nothing of padding, which a CPU can tell without waiting."""
    mask = batch.get("decoder_attention_mask" if inner.config.is_encoder_decoder else "attention_mask")
    if mask is None or mask.shape != labels.shape or not can_read_values(labels):
        return mask is None
    return not bool(((mask == 0) & (labels != IGNORED)).any())
