"""The layers of transformers that accelerate() knows.

On the straight path without a cache: BART, Marian, BERT, RoBERTa (post-norm), mBART, M2M100, Pegasus, Whisper, ViT
(pre-norm). With a cache, and where attention weights are asked for, their own attention is called, and what is around
it is fused. So it is in every call of T5, whose attention has a learned bias, and of Llama and GPT-2. The first call
with output_attentions=True makes transformers add hooks to the attention modules, which it never removes: from then on
these layers do so in every call.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn

from fastattn.integrations.hidden_padding import pack_tokens, padding_of_block, restore_padding
from fastattn.integrations.huggingface import CHANGES_ATTENTION, NAME, register
from fastattn.integrations.layers import (
    Accelerated,
    Sublayer,
    activation_name,
    norm_parts,
    run_feed_forward,
    run_gated,
    run_straight,
    run_sublayers,
)
from fastattn.masks import AttentionMask
from fastattn.nn.fusible import all_can_fuse, hook_reason, is_unmodified
from fastattn.nn.linear import joint_linear
from fastattn.nn.params import AttentionParams as AttentionParts
from fastattn.nn.params import FeedForwardParams as FeedForwardParts
from fastattn.nn.params import NormParams as NormParts
from fastattn.nn.params import Params as Parts
from fastattn.nn.residual import PendingResidual, current_dropout_p
from fastattn.ops.add_layer_norm import dropout_add_rms_norm


@functools.cache
def _sibling(original: type[nn.Module], suffix: str, name: str) -> Any:
    """The class in a layer's own file that is called as the layer is, with `name` in place of `suffix`."""
    return getattr(sys.modules[original.__module__], original.__name__.removesuffix(suffix) + name)


def _is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether the module is of this class and only calls its children: nobody would notice if they were called here."""
    return type(module) is kind and hook_reason(module) is None


def _asks_for_nothing(options: dict[str, Any]) -> bool:
    """Whether a layer's other arguments leave its attention as it is."""
    return not options.get("output_attentions") and all(options.get(name) is None for name in CHANGES_ATTENTION)


def _has_no_cache(options: dict[str, Any]) -> bool:
    return options.get("cache") is None and options.get("past_key_values") is None


def _mask_of(attention: Any, mask: Any, length: int) -> tuple[bool, AttentionMask | None]:
    """Whether the straight path knows the mask, and the mask, as huggingface.attention_forward reads it."""
    if mask is None:
        is_causal = length > 1 and getattr(attention, "is_causal", False)
        return True, AttentionMask(is_causal=True) if is_causal else None
    return isinstance(mask, AttentionMask), mask


def _attention_parts(
    attention: Any, kind: type[nn.Module], names: tuple[str, str, str], fc: Any, norm: NormParts, has_memory: bool
) -> AttentionParts | None:
    """Of a module of this class with maps of these names for queries, keys and values, and the map fc that follows."""
    if not is_unmodified(attention, kind, names) or attention.config._attn_implementation != NAME:
        return None
    maps = [attention._modules[name]._parameters for name in (names[:1] if has_memory else names)]
    weights, biases = (tuple([p[name] for p in maps]) for name in ("weight", "bias"))
    head_dim = attention.attention_head_size if hasattr(attention, "attention_head_size") else attention.head_dim
    dropout = attention.dropout if hasattr(attention, "dropout") else attention.attention_dropout
    dropout_p = current_dropout_p(dropout) if isinstance(dropout, nn.Module) else _current(attention, dropout)
    n_head_kv = attention._modules[names[1]].out_features // head_dim
    return AttentionParts(
        weights, biases, fc.weight, fc.bias, norm, n_head_kv, head_dim, head_dim, attention.scaling, dropout_p, None
    )


def _current(module: nn.Module, dropout_p: float) -> float:
    """The probability of functional dropout in a module."""
    return float(dropout_p) if module.training else 0.0


class _PairLayer(Accelerated):
    """An encoder or decoder layer of BART's kind: self_attn, in a decoder encoder_attn, then fc1 and fc2."""

    norm_first = False

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Any = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Any = None,
        *args: Any,
        **options: Any,
    ) -> Tensor:
        crosses = encoder_hidden_states is not None
        if args:
            given = attention_mask, encoder_hidden_states, encoder_attention_mask
            return self.original.forward(self, hidden_states, *given, *args, **options)
        options.pop("use_cache", None)
        out, masks, known = None, [], _asks_for_nothing(options)
        if known and _has_no_cache(options):
            given = (
                (self.self_attn, attention_mask),
                *([(self.encoder_attn, encoder_attention_mask)] if crosses else []),
            )
            for attention, mask in given:
                known_mask, mask = _mask_of(attention, mask, hidden_states.shape[1])
                known = known and known_mask
                masks.append(mask)
            if known:
                out = run_straight(self, hidden_states, masks, encoder_hidden_states)
        if out is None:
            sublayers = [self._attend("self_attn", attention_mask, options)]
            if crosses:
                options["key_value_states"] = encoder_hidden_states
                sublayers.append(self._attend("encoder_attn", encoder_attention_mask, options))
            sublayers.append(Sublayer(self._feed_forward, _current(self, self.dropout), self.final_layer_norm))
            out = run_sublayers(hidden_states, sublayers, self.norm_first)
        if out.dtype is torch.float16 and not hasattr(self, "encoder_attn"):
            limit = torch.finfo(torch.float16).max - 1000
            out = out.clamp(-limit, limit)
        return out

    def _attend(self: Any, name: str, mask: Any, options: dict[str, Any]) -> Sublayer:
        attention, options = getattr(self, name), dict(options)
        norm = getattr(self, f"{name}_layer_norm")
        return Sublayer(lambda x: attention(x, attention_mask=mask, **options)[0], _current(self, self.dropout), norm)

    def _feed_forward(self: Any, x: Tensor) -> Tensor:
        return run_feed_forward(x, self.fc1, self.activation_fn, _current(self, self.activation_dropout), self.fc2)

    def project(self: Any, encoder_hidden_states: Tensor) -> tuple[Tensor, ...]:
        maps = self.encoder_attn.k_proj, self.encoder_attn.v_proj
        if (maps[0].bias is None) is not (maps[1].bias is None):  # Whisper's keys have none
            return tuple([module(encoder_hidden_states) for module in maps])
        return joint_linear(encoder_hidden_states, maps, backend="aten")

    def parts(self: Any, has_memory: bool) -> list[Parts] | None:
        names = ("self_attn", "encoder_attn")[: 1 + has_memory]
        norms = [f"{name}_layer_norm" for name in names]
        activation = activation_name(self.activation_fn)
        if activation is None or not all_can_fuse(self, ("fc1", "fc2", *norms, "final_layer_norm")):
            return None
        kind = _sibling(self.original, "DecoderLayer" if hasattr(self, "encoder_attn") else "EncoderLayer", "Attention")
        dropout_p, parts = _current(self, self.dropout), []
        for name, norm in zip(names, norms, strict=True):
            attention, norm = getattr(self, name), norm_parts(getattr(self, norm), dropout_p)
            maps, is_memory = ("q_proj", "k_proj", "v_proj"), bool(parts)
            if not all_can_fuse(attention, ("out_proj",)):
                return None
            part = _attention_parts(attention, kind, maps, attention.out_proj, norm, is_memory)
            if part is None:
                return None
            parts.append(part)
        weights = self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias
        norm, hidden_p = norm_parts(self.final_layer_norm, dropout_p), _current(self, self.activation_dropout)
        return [*parts, FeedForwardParts(*weights, norm, activation, hidden_p, None)]


class _PreNormPairLayer(_PairLayer):
    norm_first = True


class _BertLayer(Accelerated):
    """A layer of BERT or RoBERTa. One that also attends to an encoder is the library's own."""

    norm_first = False

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Any = None,
        encoder_hidden_states: Tensor | None = None,
        *args: Any,
        **options: Any,
    ) -> Tensor:
        attention = self.attention
        if args or encoder_hidden_states is not None or not self._has_own_structure():
            given = attention_mask, encoder_hidden_states, *args
            return self.original.forward(self, hidden_states, *given, **options)
        if _asks_for_nothing(options) and _has_no_cache(options):
            known, mask = _mask_of(attention.self, attention_mask, hidden_states.shape[1])
            if known and (out := run_straight(self, hidden_states, [mask])) is not None:
                return out

        def attend(x: Tensor) -> Tensor:
            return attention.output.dense(attention.self(x, attention_mask=attention_mask, **options)[0])

        def feed_forward(x: Tensor) -> Tensor:
            first = self.intermediate
            return run_feed_forward(x, first.dense, first.intermediate_act_fn, 0.0, self.output.dense)

        calls = (attend, attention.output), (feed_forward, self.output)
        return run_sublayers(hidden_states, [Sublayer(f, end.dropout, end.LayerNorm) for f, end in calls], False)

    def _has_own_structure(self: Any) -> bool:
        """Whether the modules between this one and those that it calls are as the library made them."""
        if not _is_plain(self.attention, _sibling(self.original, "Layer", "Attention")):
            return False
        modules = {"SelfOutput": self.attention.output, "Intermediate": self.intermediate, "Output": self.output}
        return all([_is_plain(m, _sibling(self.original, "Layer", name)) for name, m in modules.items()])

    def parts(self: Any, has_memory: bool) -> list[Parts] | None:
        attention, first, last = self.attention, self.intermediate, self.output
        activation, names = activation_name(first.intermediate_act_fn), ("dense", "LayerNorm", "dropout")
        if activation is None or not all_can_fuse(attention.output, names) or not all_can_fuse(last, names):
            return None
        if not all_can_fuse(first, ("dense",)) or not all_can_fuse(attention.self, ("dropout",)):
            return None
        norms = [norm_parts(end.LayerNorm, current_dropout_p(end.dropout)) for end in (attention.output, last)]
        kind, maps = _sibling(self.original, "Layer", "SelfAttention"), ("query", "key", "value")
        part = _attention_parts(attention.self, kind, maps, attention.output.dense, norms[0], False)
        weights = first.dense.weight, first.dense.bias, last.dense.weight, last.dense.bias
        return None if part is None else [part, FeedForwardParts(*weights, norms[1], activation, 0.0, None)]


class _ViTLayer(Accelerated):
    norm_first = True

    def forward(self: Any, hidden_states: Tensor, attention_mask: Any = None, *args: Any, **options: Any) -> Tensor:
        if args or not _is_plain(self.mlp, _sibling(self.original, "Layer", "MLP")):
            return self.original.forward(self, hidden_states, attention_mask, *args, **options)
        if _asks_for_nothing(options):
            known, mask = _mask_of(self.attention, attention_mask, hidden_states.shape[1])
            if known and (out := run_straight(self, hidden_states, [mask])) is not None:
                return out

        def attend(x: Tensor) -> Tensor:
            return self.attention(x, attention_mask, **options)[0]

        def feed_forward(x: Tensor) -> Tensor:
            return run_feed_forward(x, self.mlp.fc1, self.mlp.activation_fn, 0.0, self.mlp.fc2)

        calls = (attend, self.layernorm_before), (feed_forward, self.layernorm_after)
        return run_sublayers(hidden_states, [Sublayer(f, self.dropout, norm) for f, norm in calls], True)

    def parts(self: Any, has_memory: bool) -> list[Parts] | None:
        attention, mlp = self.attention, self.mlp
        activation = activation_name(mlp.activation_fn)
        if activation is None or not all_can_fuse(self, ("layernorm_before", "layernorm_after", "dropout")):
            return None
        if not all_can_fuse(mlp, ("fc1", "fc2")) or not all_can_fuse(attention, ("o_proj",)):
            return None
        dropout_p = current_dropout_p(self.dropout)
        norms = [norm_parts(norm, dropout_p) for norm in (self.layernorm_before, self.layernorm_after)]
        kind, maps = _sibling(self.original, "Layer", "Attention"), ("q_proj", "k_proj", "v_proj")
        part = _attention_parts(attention, kind, maps, attention.o_proj, norms[0], False)
        weights = mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight, mlp.fc2.bias
        return None if part is None else [part, FeedForwardParts(*weights, norms[1], activation, 0.0, None)]


class _T5Block(Accelerated):
    """The library's own, which gives its feed-forward the mask, where that knows which tokens are padding."""

    def forward(self: Any, hidden_states: Tensor, attention_mask: Any = None, *args: Any, **options: Any) -> Any:
        with padding_of_block(attention_mask):
            return self.original.forward(self, hidden_states, attention_mask, *args, **options)


class _T5Attention(Accelerated):
    """T5LayerSelfAttention and T5LayerCrossAttention: norm, attention, dropout and the addition."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> tuple[Any, ...]:
        attention = self.SelfAttention if hasattr(self, "SelfAttention") else self.EncDecAttention
        if args and attention is not getattr(self, "SelfAttention", None):
            options["key_value_states"], *args = args
        if args:
            return self.original.forward(self, hidden_states, *args, **options)
        options["mask"] = options.pop("attention_mask", None)
        branch, position_bias, weights = attention(self.layer_norm(hidden_states), **options)
        return PendingResidual(branch, hidden_states).sum(self.dropout), position_bias, weights


def _have_one_dtype(*maps: nn.Module) -> bool:
    """Not so where from_pretrained keeps T5's wo in float32. The module that calls the maps casts then."""
    return len({getattr(getattr(module, "weight", None), "dtype", None) for module in maps}) == 1


class _T5FeedForward(Accelerated):
    """T5LayerFF: norm, feed-forward, dropout and the addition."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        packed = pack_tokens(self, hidden_states)
        if packed is None:
            return self._feed_forward(hidden_states)
        tokens, unpadded = packed
        return restore_padding(self._feed_forward(tokens), unpadded)

    def _feed_forward(self: Any, hidden_states: Tensor) -> Tensor:
        inner, x = self.DenseReluDense, self.layer_norm(hidden_states)
        plain, gated = [_sibling(self.original, "LayerFF", name) for name in ("DenseActDense", "DenseGatedActDense")]
        if _is_plain(inner, plain) and _have_one_dtype(inner.wi, inner.wo):
            branch = run_feed_forward(x, inner.wi, inner.act, inner.dropout, inner.wo)
        elif _is_plain(inner, gated) and _have_one_dtype(inner.wi_0, inner.wi_1, inner.wo):
            branch = run_gated(x, inner.wi_0, inner.wi_1, inner.act, inner.dropout, inner.wo)
        else:
            branch = inner(x)
        return PendingResidual(branch, hidden_states).sum(self.dropout)


class _RMSNorm(Accelerated):
    """T5LayerNorm and LlamaRMSNorm."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if self.weight.dtype not in (hidden_states.dtype, torch.float32):
            return self.original.forward(self, hidden_states)  # each of them has its own rule for the dtype
        return dropout_add_rms_norm(hidden_states, None, self.weight, eps=self.variance_epsilon)


class _LlamaMLP(Accelerated):
    def forward(self: Any, x: Tensor) -> Tensor:
        return run_gated(x, self.gate_proj, self.up_proj, self.act_fn, 0.0, self.down_proj)


class _NewGELU(Accelerated):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  transformers' name
        return nn.functional.gelu(input, approximate="tanh")


_MODELS = "transformers.models."
MIXINS: dict[str, type[Accelerated]] = {
    **{
        f"{_MODELS}{folder}.modeling_{folder}.{name}{side}Layer": mixin
        for mixin, models in (
            (_PairLayer, {"bart": "Bart", "marian": "Marian"}),
            (_PreNormPairLayer, {"mbart": "MBart", "m2m_100": "M2M100", "pegasus": "Pegasus", "whisper": "Whisper"}),
        )
        for folder, name in models.items()
        for side in ("Encoder", "Decoder")
    },
    f"{_MODELS}bert.modeling_bert.BertLayer": _BertLayer,
    f"{_MODELS}roberta.modeling_roberta.RobertaLayer": _BertLayer,
    f"{_MODELS}vit.modeling_vit.ViTLayer": _ViTLayer,
    f"{_MODELS}t5.modeling_t5.T5Block": _T5Block,
    f"{_MODELS}t5.modeling_t5.T5LayerSelfAttention": _T5Attention,
    f"{_MODELS}t5.modeling_t5.T5LayerCrossAttention": _T5Attention,
    f"{_MODELS}t5.modeling_t5.T5LayerFF": _T5FeedForward,
    f"{_MODELS}t5.modeling_t5.T5LayerNorm": _RMSNorm,
    f"{_MODELS}llama.modeling_llama.LlamaRMSNorm": _RMSNorm,
    f"{_MODELS}llama.modeling_llama.LlamaMLP": _LlamaMLP,
    "transformers.activations.NewGELUActivation": _NewGELU,
}

register()  # also for models that are read from a pickle
