"""Export of a FusedTransformer to CTranslate2, a C++ engine that translates without PyTorch. Needs its extra.

    export(model, "folder", source_tokens, target_tokens, bos_idx=1, eos_idx=2, unk_idx=3, quantization="int8")
    ctranslate2.Translator("folder").translate_batch([["ein", "Satz", "</s>"]], max_input_length=0)

CTranslate2 reads tokens as strings, and adds none to a source. It knows lengths, so padding needs no token.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastattn.models import Decoder, Encoder, FusedTransformer
from fastattn.nn import (
    DecoderLayer,
    EncoderLayer,
    MultiHeadAttention,
    PositionwiseFeedForward,
    ScaledDotProductAttention,
)
from fastattn.nn.fusible import hook_reason, unfusible_reason
from fastattn.ops.feed_forward import GATED

try:
    from ctranslate2.specs import common_spec, model_spec, transformer_spec
except ImportError as error:
    raise ImportError(
        'fastattn.integrations.ctranslate2 needs ctranslate2: pip install "fastattn[ctranslate2]"'
    ) from error

_ACTIVATIONS = {
    "relu": common_spec.Activation.RELU,
    "gelu": common_spec.Activation.GELU,
    "gelu_tanh": common_spec.Activation.GELUTanh,
    "silu": common_spec.Activation.SWISH,
}
_CANNOT = "model cannot be exported"
_OWN = (FusedTransformer, Encoder, Decoder, nn.ModuleList, EncoderLayer, DecoderLayer)
_OWN += (MultiHeadAttention, ScaledDotProductAttention, PositionwiseFeedForward)


def export(
    model: FusedTransformer,
    folder: str | os.PathLike[str],
    source_tokens: Sequence[str],
    target_tokens: Sequence[str],
    *,
    bos_idx: int,
    eos_idx: int,
    unk_idx: int,
    quantization: str | None = None,
) -> None:
    """Write the model as a folder that ctranslate2.Translator loads. The model does not change.

    folder: new or empty. It appears when all of it is written.
    source_tokens, target_tokens: one string for each id of the vocabulary, without duplicates.
    bos_idx, eos_idx, unk_idx: in target_tokens, what translations begin with, end with, and have for unknown words.
        The last must be among source_tokens too: an unknown word of a source is read as that string.
    quantization: of the stored weights, a name of CTranslate2's, such as "int8" or "float16"; float32 with None.

    Weights may be of any floating dtype and on any device. TypeError where model is no FusedTransformer or a token no
    string. ValueError for other arguments, and where CTranslate2 has no counterpart of the model: where children are
    modified, wrapped or replaced, with norm="rms", qk_norm, softcap or d_v != d_k, or where layers differ in heads,
    activation, norm_first or epsilon. Nothing is written then.
    """
    if not isinstance(model, FusedTransformer):
        raise TypeError(f"model must be a FusedTransformer, got {type(model).__name__}")
    _check_modules(model)
    indices = {"bos_idx": bos_idx, "eos_idx": eos_idx, "unk_idx": unk_idx}
    _check_tokens(model, source_tokens, target_tokens, indices)
    if quantization is not None and quantization not in model_spec.ACCEPTED_MODEL_TYPES:
        expected = ", ".join(model_spec.ACCEPTED_MODEL_TYPES)
        raise ValueError(f"quantization must be None or one of {expected}, got {quantization!r}")
    folder = Path(folder)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"folder must be new or empty, and {folder} is not")

    spec = _spec(model)
    spec.register_source_vocabulary(list(source_tokens))
    spec.register_target_vocabulary(list(target_tokens))
    bos, eos, unk = (target_tokens[index] for index in indices.values())
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = bos, eos, unk
    spec.config.decoder_start_token = bos
    spec.config.layer_norm_epsilon = _only(model, "eps")
    spec.validate()
    spec.optimize(quantization)  # stores a shared weight once
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as unfinished:
        complete = Path(unfinished, "model")
        complete.mkdir()
        spec.save(str(complete))
        if folder.exists():
            folder.rmdir()
        complete.rename(folder)


def _check_modules(model: FusedTransformer) -> None:
    for name, module in model.named_modules():
        reason = hook_reason(module) if type(module) in _OWN else unfusible_reason(module)
        if getattr(module, "softcap", None) is not None:
            reason = f"has softcap={module.softcap}"
        elif getattr(module, "d_v", None) != getattr(module, "d_k", None):
            reason = f"has d_k={module.d_k} and d_v={module.d_v}"
        if reason is not None:
            raise ValueError(f"{_CANNOT}: {name or 'it'} {reason}, which CTranslate2 does not have")


def _check_tokens(
    model: FusedTransformer, source: Sequence[str], target: Sequence[str], indices: dict[str, int]
) -> None:
    embeddings = model.encoder.src_word_emb, model.decoder.trg_word_emb
    for name, tokens, embedding in zip(("source_tokens", "target_tokens"), (source, target), embeddings, strict=True):
        if isinstance(tokens, str) or not all(isinstance(token, str) for token in tokens):
            raise TypeError(f"{name} must be a sequence of strings")
        if len(tokens) != embedding.num_embeddings:
            raise ValueError(f"{name} has {len(tokens)} tokens, expected {embedding.num_embeddings}, one for each id")
        (token, count), *_ = Counter(tokens).most_common(1)
        if count > 1:
            raise ValueError(f"{name} has {token!r} {count} times, expected every token once")
    for name, index in indices.items():
        if not isinstance(index, Integral) or isinstance(index, bool) or not 0 <= index < len(target):
            raise ValueError(f"{name} must be an integer from 0 to {len(target) - 1}, a token, got {index!r}")
    if (unknown := target[indices["unk_idx"]]) not in source:
        raise ValueError(f"source_tokens lacks {unknown!r}, the token of unk_idx, which is read for unknown words")


def _only(model: FusedTransformer, name: str) -> Any:
    """The value that this attribute has in all modules that have it."""
    found: dict[Any, str] = {}
    for path, module in model.named_modules():
        if hasattr(module, name):
            found.setdefault(getattr(module, name), path)
    if len(found) > 1:
        differences = " and ".join(f"{value} in {path}" for value, path in found.items())
        raise ValueError(f"{_CANNOT}: {name} is {differences}, and CTranslate2 has one for all")
    return next(iter(found))


def _spec(model: FusedTransformer) -> transformer_spec.TransformerSpec:
    n_head, n_head_kv, d_k = (_only(model, name) for name in ("n_head", "n_head_kv", "d_k"))
    activation, norm_first = _only(model, "activation"), _only(model, "norm_first")
    options = {
        "pre_norm": norm_first,
        "layernorm_embedding": not norm_first,
        "activation": _ACTIVATIONS[GATED.get(activation, activation)],
        "ffn_glu": activation in GATED,
        "num_heads_kv": None if n_head_kv == n_head else n_head_kv,
        "head_dim": None if n_head * d_k == model.d_model else d_k,
    }
    encoder, decoder = model.encoder, model.decoder
    spec = transformer_spec.TransformerSpec(
        transformer_spec.TransformerEncoderSpec(len(encoder.layer_stack), n_head, **options),
        transformer_spec.TransformerDecoderSpec(len(decoder.layer_stack), n_head, **options),
    )
    for to, stack, table, embedding in (
        (spec.encoder, encoder, spec.encoder.embeddings[0], encoder.src_word_emb),
        (spec.decoder, decoder, spec.decoder.embeddings, decoder.trg_word_emb),
    ):
        table.weight = _numbers(embedding.weight[: embedding.num_embeddings])  # a shared one may have more rows
        to.scale_embeddings = stack.scale_emb
        to.position_encodings.encodings = _numbers(stack.position_enc.rows(stack.position_enc.longest())[0])
        _set_norm(to.layer_norm if norm_first else to.layernorm_embedding, stack.layer_norm)
        for layer_spec, layer in zip(to.layer, stack.layer_stack, strict=True):
            _set_attention(layer_spec.self_attention, layer.slf_attn, ("w_qs", "w_ks", "w_vs"), ("fc",))
            if stack is decoder:
                _set_attention(layer_spec.attention, layer.enc_attn, ("w_qs",), ("w_ks", "w_vs"), ("fc",))
            _set_feed_forward(layer_spec.ffn, layer.pos_ffn)
    bias = model.trg_word_prj.bias
    _set_linear(spec.decoder.projection, model.trg_word_prj.weight, None if bias is None else model.scaled(bias))
    if model.scale_prj:
        spec.decoder.scale_outputs = model.d_model**-0.5  # of the projection's input, not of its bias
    return spec


def _numbers(t: Tensor) -> Any:
    """As a float32 array that shares no memory with t: CTranslate2 quantises arrays in place."""
    return t.detach().to("cpu", torch.float32, copy=True, memory_format=torch.contiguous_format).numpy()


def _set_linear(spec: common_spec.LinearSpec, weight: Tensor, bias: Tensor | None) -> None:
    spec.weight = _numbers(weight)
    if bias is not None:
        spec.bias = _numbers(bias)


def _set_norm(spec: common_spec.LayerNormSpec, norm: nn.Module) -> None:
    spec.gamma, spec.beta = _numbers(norm.weight), _numbers(norm.bias)


def _set_attention(spec: Any, attn: MultiHeadAttention, *joint: tuple[str, ...]) -> None:
    """joint: the linear maps that are one in CTranslate2, for each of its maps."""
    for linear_spec, names in zip(spec.linear, joint, strict=True):
        linears = [getattr(attn, name) for name in names]
        bias = None
        if any(linear.bias is not None for linear in linears):
            biases = [w.weight.new_zeros(len(w.weight)) if w.bias is None else w.bias for w in linears]
            bias = torch.cat(biases)
        _set_linear(linear_spec, torch.cat([linear.weight for linear in linears]), bias)
    spec.queries_scale = 1 / attn.attention.temperature
    _set_norm(spec.layer_norm, attn.layer_norm)


def _set_feed_forward(spec: transformer_spec.FeedForwardSpec, ffn: PositionwiseFeedForward) -> None:
    weight, bias, specs = ffn.w_1.weight, ffn.w_1.bias, [spec.linear_0]
    if ffn.activation in GATED:
        specs.append(spec.linear_0_noact)  # the gate's rows of w_1 come first
    biases = [None] * len(specs) if bias is None else bias.chunk(len(specs))
    for linear_spec, rows, own in zip(specs, weight.chunk(len(specs)), biases, strict=True):
        _set_linear(linear_spec, rows, own)
    _set_linear(spec.linear_1, ffn.w_2.weight, ffn.w_2.bias)
    _set_norm(spec.layer_norm, ffn.layer_norm)
