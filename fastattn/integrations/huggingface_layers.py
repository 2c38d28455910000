"""The layers of transformers that accelerate() knows: ROWS, and smaller modules.

Layers of ROWS are computed whole without a cache. With a cache, and where attention weights are asked for, their own
attention is called, and in training what is around it is fused. The layers of Llama, GPT-2, ModernBERT and T5Gemma are
called, and in them fastattn's attention and smaller modules. The first call with output_attentions=True makes
transformers add hooks to the attention modules, which it never removes: from then on layers call them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fastattn.integrations.huggingface import CHANGES_ATTENTION, NAME, _with_bias, register
from fastattn.integrations.huggingface_generate import MODELS, GeneratingModel
from fastattn.integrations.layers import (
    GATED,
    Accelerated,
    Attend,
    AttentionNames,
    FeedForwardNames,
    Paths,
    Row,
    TableLayer,
    accelerated_class,
    activation_name,
    current_dropout,
    find,
    split_paths,
)
from fastattn.masks import AttentionMask
from fastattn.nn.fusible import READ, are_unmodified, is_unmodified
from fastattn.nn.leaves import is_whole
from fastattn.nn.linear import joined, joint_linear, without_gaps
from fastattn.ops import _autocast
from fastattn.ops.add_layer_norm import dropout_add_rms_norm
from fastattn.ops.feed_forward import feed_forward

MAX_DENSE_BIAS = 1 << 17  # scores of a head, for which T5's bias is a tensor of them, as the library has it
_T5_BIASES = ("position_bias", "encoder_decoder_position_bias")
_ARGUMENTS = ("attention_mask", "encoder_hidden_states", "encoder_attention_mask")
_CHANGES_ATTENTION = (*CHANGES_ATTENTION, "cache", "past_key_values")


def _is_default(options: dict[str, Any]) -> bool:
    """Whether a layer's other arguments leave its attention as it is."""
    return not options.get("output_attentions") and all([options.get(name) is None for name in _CHANGES_ATTENTION])


def _class_of(layer: type[nn.Module], name: str) -> Any:
    """A class of a layer's file, by its name without the model's: "SelfOutput" of BertLayer is BertSelfOutput.

    The name of DistilBERT's layer, TransformerBlock, does not begin with the model's."""
    pattern = "(Encoder|Decoder)?Layer(StableLayerNorm)?$|^TransformerBlock$|Block$"
    kind = getattr(sys.modules[layer.__module__], re.sub(pattern, name, layer.__name__))
    mixin: Any = MIXINS.get(f"{kind.__module__}.{kind.__qualname__}")
    return kind if mixin is None else accelerated_class(kind, mixin)


class _Layer(TableLayer):
    """A layer of ROWS. A call that does more than the row describes is the library's own.

    So is a call whose attention has to be called while no gradients are recorded, as in decoding: what is around
    attention would be one operator less.
    """

    in_stack = True
    attention_classes: list[type[nn.Module]]
    container_classes: list[list[type[nn.Module]]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "original" not in vars(cls):
            return
        cls.row = ROWS[f"{cls.original.__module__}.{cls.original.__qualname__}"]
        cls.attention_classes = [_class_of(cls.original, names.kind) for names in cls.row.attentions]
        names = [name.split("|") for name in cls.row.containers.values()]
        cls.container_classes = [[_class_of(cls.original, name) for name in some] for some in names]

    def forward(self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        if not is_whole(hidden_states):
            return self.call_original(hidden_states, *args, **options)
        given = dict(zip(self.row.arguments, args, strict=False)) | options
        mask, states, states_mask = [given.pop(name, None) for name in _ARGUMENTS]
        given.pop("use_cache", None)
        is_default, memory = not given or _is_default(given), () if states is None else (states,)
        is_described = len(args) <= len(self.row.arguments) and (states is None or self._reads_memory())
        if not is_described or not (is_default or torch.is_grad_enabled()) or not self._has_own_containers():
            return self.original.forward(self, hidden_states, *args, **options)
        attends = [self._attend(0, hidden_states, mask, given, is_default)]
        if memory:
            given[self.row.memory] = states
            attends.append(self._attend(1, hidden_states, states_mask, given, is_default))
        out = self.run(hidden_states, attends, *memory)
        if self.row.clamps_float16 and out.dtype is torch.float16:
            limit = torch.finfo(torch.float16).max - 1000
            out = out.clamp(-limit, limit)
        return out

    def _reads_memory(self: Any) -> bool:
        """Whether there is a second attention."""
        return any([module is not None for module in find(self, self.row.memory_paths)])

    def _has_own_containers(self: Any) -> bool:
        """Whether the modules between this one and those that it calls are as the library made them."""
        if not self.container_classes:
            return True
        if self._modules.get("adapter_layer") is not None:  # after the feed-forward, in some of Wav2Vec2's checkpoints
            return False
        found = zip(find(self, self.row.container_paths), self.container_classes, strict=True)
        own = [module is None or any([is_unmodified(module, kind, ()) for kind in kinds]) for module, kinds in found]
        return not _has_any_global_hook() and all(own)

    def _attend(self: Any, n: int, x: Tensor, mask: Any, options: dict[str, Any], is_default: bool) -> Attend:
        """The call of the n-th attention. Its mask is read as huggingface.attention_forward reads it."""
        options, read = {self.row.mask: mask, **options}, mask
        if mask is None and x.shape[1] > 1:
            (module,) = find(self, self.row.attention_paths[n][:1])
            read = AttentionMask(is_causal=True) if getattr(module, "is_causal", False) else None

        def branch(module: nn.Module, x: Tensor) -> Tensor:
            given = {"hidden_states": x, **options}
            return module(*[given.pop(name) for name in self.row.by_position], **given)[0]

        return Attend(branch, read, is_default and (read is None or isinstance(read, AttentionMask)))

    def may_fuse(self: Any, attention: Any, n: int) -> bool:
        return is_unmodified(attention, self.attention_classes[n], ()) and attention.config._attn_implementation == NAME

    def projections(self: Any, maps: list[Any], attention: Any, reads_memory: bool) -> tuple[Any, Any, int]:
        own = [module._parameters for module in maps]
        read = own[:1] if reads_memory else own
        return tuple([p["weight"] for p in read]), tuple([p["bias"] for p in read]), own[1]["weight"].shape[0]

    def project(self: Any, encoder_hidden_states: Tensor) -> tuple[Tensor, ...]:
        maps = find(self, self.row.attention_paths[1])[-2:]
        return joint_linear(encoder_hidden_states, maps, backend="aten", fusible=True)


LONG = 256  # tokens of a sentence


def _is_long(x: Tensor) -> bool:
    """Whether T5's layers are whole on a CPU where is_whole does not say so: they read their bias by distance.

    Measured on one core of an AMD EPYC (Zen 4), width 256, 3 + 3 layers, PyTorch's products, the time of modules by
    that of whole layers: sentences of 256 tokens, a forward 1.03 to 1.08, a training step with dropout 1.02 to 1.09; of
    32 and 64 tokens 0.90 to 0.99 and 0.92 to 1.01.
    """
    return not torch.jit.is_tracing() and x.shape[1] >= LONG


class _T5Block(_Layer):
    """A layer of T5, mT5 or UMT5. The first one of T5's stacks makes the bias by distance, and hands it on."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or not (is_whole(hidden_states) or _is_long(hidden_states)):
            return self.call_original(hidden_states, *args, **options)
        names = self.row.arguments
        given = dict(zip(names, args, strict=False)) | options
        mask, states, states_mask, bias, _ = [given.pop(name, None) for name in (*_ARGUMENTS, *_T5_BIASES)]
        is_default, dtype = _is_default(given), hidden_states.dtype
        is_described = len(args) <= len(names) and (states is None or self._reads_memory())
        # In float16 the library clamps. In a model of 16 bits with `wo` in float32 hidden states are in float32.
        norm = find(self, self.row.feed_forward_paths)[5]
        is_read = dtype is not torch.float16 and getattr(norm, "weight", hidden_states).dtype is dtype
        is_read = is_read and is_described and (is_default or torch.is_grad_enabled())
        if not (is_read and self._has_own_containers()):
            return self.original.forward(self, hidden_states, *args, **options)
        hands_on, own = "position_bias" in names, self._attend(0, hidden_states, mask, given, is_default)
        (attention,) = find(self, self.row.attention_paths[0][:1])
        fuses = own.is_fusible and self.may_fuse(attention, 0) and "compute_bias" not in vars(attention)
        if fuses:
            if bias is None and attention.has_relative_attention_bias:
                length = hidden_states.shape[1]
                bias = attention.by_distance(length, length, hidden_states.device)
            own = own._replace(mask=_with_bias(own.mask, bias))

        def branch(module: nn.Module, x: Tensor) -> Tensor:
            nonlocal bias
            if not hands_on:
                return own.branch(module, x)
            out, bias, *_ = module(x, mask=mask, position_bias=bias, **given)
            return out

        attends, memory = [own._replace(branch=branch, is_fusible=fuses)], () if states is None else (states,)
        if memory:
            of_memory = given | {self.row.memory: states}
            attends.append(self._attend(1, hidden_states, states_mask, of_memory, is_default))
        out = self.run(hidden_states, attends, *memory)
        return (out, bias, None) if hands_on else out


class _T5Bias(Accelerated):
    """T5's attention, mT5's and UMT5's: gives fastattn's attention its bias by distance, not by query and key.

    Layers hand on what compute_bias returns: here (H, Lq + Lk - 1), AttentionMask's relative_bias, where (1, H, Lq, Lk)
    would be large."""

    def by_distance(self: Any, query_length: int, key_length: int, device: Any, past_seen_tokens: Any = 0) -> Tensor:
        """(H, Lq + Lk - 1)."""
        # The last query has all distances, if there are keys in front of the first.
        of_last = (1, query_length + key_length - 1, device, past_seen_tokens + query_length - 1)
        return cast(Any, super()).compute_bias(*of_last)[0, :, 0]

    def compute_bias(
        self: Any, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0
    ) -> Tensor:
        original = cast(Any, super()).compute_bias
        if query_length * key_length <= MAX_DENSE_BIAS or self.config._attn_implementation != NAME:
            return original(query_length, key_length, device, past_seen_tokens)
        return self.by_distance(query_length, key_length, device, past_seen_tokens)


class _MLP(Accelerated):
    """A module of MLPS, in one op where nothing of it is modified.

    The op reads the two maps of a gated one in one weight. Joining them pays in training, not for the few tokens of
    decoding.
    """

    in_stack = True

    paths: Paths

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.paths = split_paths(MLPS[f"{cls.original.__module__}.{cls.original.__qualname__}"])

    def forward(self: Any, x: Tensor) -> Tensor:
        if not is_whole(x):
            return self.call_original(x)
        gate, up, activation, dropout, down = find(self, self.paths)
        maps = [gate, down] if up in (None, gate) else [gate, up, down]
        if (up is None or torch.is_grad_enabled()) and not _has_any_global_hook() and are_unmodified(maps):
            dtype = _autocast.dtype_under_autocast(gate._parameters["weight"])
            name, dropout_p = activation_name(activation), current_dropout(self, dropout)
            name = name if up is None else GATED.get(name)
            *first, last = [module._parameters for module in maps]
            weights = tuple([p["weight"] for p in first])
            if name is not None and isinstance(dropout_p, float):
                weight, bias = weights[0], first[0]["bias"]
                if up is not None:
                    biases = without_gaps(weights, tuple([p["bias"] for p in first]))
                    weight, bias = joined((weights, biases), dtype)
                return feed_forward(x, weight, bias, last["weight"], last["bias"], name, dropout_p)
        return self.original.forward(self, x)


class _RMSNorm(Accelerated):
    """T5LayerNorm and LlamaRMSNorm."""

    eps = property(lambda self: self.variance_epsilon)  # as norm_params reads it

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "original" in vars(cls):  # not a subclass of the user's
            READ[cls] = ("weight",)

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if hidden_states.is_cpu and hidden_states.dtype is self.weight.dtype is torch.float32:
            if not torch.is_grad_enabled():  # 22 us for 34 of 32 tokens of width 256
                return torch.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)
        if not is_whole(hidden_states) or self.weight.dtype not in (hidden_states.dtype, torch.float32):
            return self.original.forward(self, hidden_states)  # each of them has its own rule for the dtype
        return dropout_add_rms_norm(hidden_states, None, self.weight, eps=self.variance_epsilon)


class _GemmaRMSNorm(Accelerated):
    """T5Gemma's and T5Gemma 2's, whose weight is that of others minus 1."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if not is_whole(x) or x.dtype is not self.weight.dtype:
            return self.original.forward(self, x)
        return dropout_add_rms_norm(x, None, 1.0 + self.weight, eps=self.eps)


class _NewGELU(Accelerated):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  transformers' name
        return nn.functional.gelu(input, approximate="tanh")


_FIRST = ("hidden_states",)


def _attention(module: str, dropout: str, norm: str) -> AttentionNames:
    """An attention with the names of BART's."""
    maps = ".q_proj .k_proj .v_proj"
    return AttentionNames(module, "Attention", maps, ".out_proj", ".head_dim", ".dropout", dropout, norm)


def _bart(norm_first: bool, encoder: tuple[str, ...] = _FIRST, decoder: tuple[str, ...] = _FIRST) -> dict[str, Row]:
    """encoder, decoder: by_position of their rows."""
    feed_forward = FeedForwardNames("fc1", "activation_fn", "activation_dropout", "fc2", "dropout", "final_layer_norm")
    attentions = [_attention(name, "dropout", f"{name}_layer_norm") for name in ("self_attn", "encoder_attn")]
    return {
        "EncoderLayer": Row(
            feed_forward, attentions[0], norm_first=norm_first, clamps_float16=True, by_position=encoder
        ),
        "DecoderLayer": Row(feed_forward, *attentions, norm_first=norm_first, by_position=decoder),
    }


def _seamless(*attentions: str) -> Row:
    return Row(
        FeedForwardNames("ffn.fc1", "ffn.act", "ffn.dropout", "ffn.fc2", "ffn_dropout", "ffn_layer_norm"),
        *[_attention(name, "attn_dropout", f"{name}_layer_norm") for name in attentions],
        norm_first=True,
        containers={"ffn": "FeedForwardNetwork"},
        by_position=(),
        memory="encoder_hidden_states",
    )


def _wav2vec2(norm_first: bool) -> Row:
    names = "intermediate_dense intermediate_act_fn intermediate_dropout output_dense output_dropout".split()
    return Row(
        FeedForwardNames._make([*(f"feed_forward.{name}" for name in names), "final_layer_norm", ""]),
        _attention("attention", "dropout", "layer_norm"),
        norm_first=norm_first,
        containers={"feed_forward": "FeedForward"},
    )


_SEAMLESS = {"EncoderLayer": _seamless("self_attn"), "DecoderLayer": _seamless("self_attn", "cross_attention")}
_WAV2VEC2 = {"EncoderLayer": _wav2vec2(False), "EncoderLayerStableLayerNorm": _wav2vec2(True)}
_BERT = Row(
    FeedForwardNames(
        "intermediate.dense",
        "intermediate.intermediate_act_fn",
        "",
        "output.dense",
        "output.dropout",
        "output.LayerNorm",
    ),
    *[
        AttentionNames(
            f"{name}.self",
            kind,
            ".query .key .value",
            f"{name}.output.dense",
            ".attention_head_size",
            ".dropout",
            f"{name}.output.dropout",
            f"{name}.output.LayerNorm",
        )
        for name, kind in (("attention", "SelfAttention"), ("crossattention", "CrossAttention"))
    ],
    norm_first=False,
    containers={
        "attention": "Attention",
        "attention.output": "SelfOutput",
        "crossattention": "Attention",
        "crossattention.output": "SelfOutput",
        "intermediate": "Intermediate",
        "output": "Output",
    },
    memory="encoder_hidden_states",
)
_DISTILBERT = Row(
    FeedForwardNames("ffn.lin1", "ffn.activation", "", "ffn.lin2", "ffn.dropout", "output_layer_norm"),
    AttentionNames(
        "attention",
        "DistilBertSelfAttention",
        ".q_lin .k_lin .v_lin",
        ".out_lin",
        ".attention_head_size",
        ".dropout",
        "",
        "sa_layer_norm",
    ),
    norm_first=False,
    containers={"ffn": "FFN"},
)
_VIT = Row(
    FeedForwardNames("mlp.fc1", "mlp.activation_fn", "", "mlp.fc2", "dropout", "layernorm_after"),
    AttentionNames(
        "attention",
        "Attention",
        ".q_proj .k_proj .v_proj",
        ".o_proj",
        ".head_dim",
        ".attention_dropout",
        "dropout",
        "layernorm_before",
    ),
    norm_first=True,
    containers={"mlp": "MLP"},
    by_position=("hidden_states", "attention_mask"),
)


def _t5(mask: str, memory: str, arguments: tuple[str, ...]) -> dict[str, Row]:
    last, dense = "layer.-1", "layer.-1.DenseReluDense"
    first = ".wi .wi_0 .wi_1"
    feed_forward = FeedForwardNames(first, ".act", ".dropout", ".wo", f"{last}.dropout", f"{last}.layer_norm", dense)
    attentions = []
    for n, name in enumerate(("SelfAttention", "EncDecAttention")):
        names = f"layer.{n}.{name}", "Attention", ".q .k .v", ".o", ".key_value_proj_dim", ".dropout"
        attentions.append(AttentionNames(*names, f"layer.{n}.dropout", f"layer.{n}.layer_norm"))
    containers = {"layer.0": "LayerSelfAttention", "layer.1": "LayerCrossAttention|LayerFF", last: "LayerFF"}
    containers[dense] = "DenseActDense|DenseGatedActDense"
    options: dict[str, Any] = {"mask": mask, "memory": memory, "arguments": arguments}
    return {"Block": Row(feed_forward, *attentions, norm_first=True, containers=containers, **options)}


_T5 = _t5("mask", "key_value_states", ("attention_mask", "position_bias", *_ARGUMENTS[1:], _T5_BIASES[1]))
# A family: its folder, the name of its models, and its layers by the rest of their names.
_FAMILIES = (
    ("bart", "Bart", _bart(norm_first=False)),
    ("marian", "Marian", _bart(norm_first=False)),
    ("mbart", "MBart", _bart(norm_first=True, encoder=(), decoder=())),
    ("m2m_100", "M2M100", _bart(norm_first=True, encoder=(), decoder=())),
    ("pegasus", "Pegasus", _bart(norm_first=True, encoder=(), decoder=())),
    ("whisper", "Whisper", _bart(norm_first=True, encoder=())),
    ("blenderbot", "Blenderbot", _bart(norm_first=True, encoder=(), decoder=())),
    ("blenderbot_small", "BlenderbotSmall", _bart(norm_first=False)),
    ("plbart", "PLBart", _bart(norm_first=False)),
    ("speech_to_text", "Speech2Text", _bart(norm_first=True, encoder=())),
    ("seamless_m4t", "SeamlessM4T", _SEAMLESS),
    ("seamless_m4t_v2", "SeamlessM4Tv2", _SEAMLESS),
    ("bert", "Bert", {"Layer": _BERT}),
    ("roberta", "Roberta", {"Layer": _BERT}),
    ("xlm_roberta", "XLMRoberta", {"Layer": _BERT}),
    ("camembert", "Camembert", {"Layer": _BERT}),
    ("electra", "Electra", {"Layer": _BERT}),
    ("distilbert", "", {"TransformerBlock": _DISTILBERT}),
    ("vit", "ViT", {"Layer": _VIT}),
    ("deit", "DeiT", {"Layer": _VIT}),
    ("wav2vec2", "Wav2Vec2", _WAV2VEC2),
    ("hubert", "Hubert", _WAV2VEC2),
    ("t5", "T5", _T5),
    ("mt5", "MT5", _T5),
    ("umt5", "UMT5", _t5("attention_mask", "encoder_hidden_states", _ARGUMENTS)),
)
_MODELS = "transformers.models."
ROWS = {
    f"{_MODELS}{folder}.modeling_{folder}.{model}{name}": row
    for folder, model, layers in _FAMILIES
    for name, row in layers.items()
}
_T5S = (("t5", "T5"), ("mt5", "MT5"), ("umt5", "UMT5"))  # folders and names, of T5 ByT5 and FLAN-T5 too


def _of_t5(name: str, value: Any, families: Iterable[tuple[str, str]] = _T5S) -> dict[str, Any]:
    return {f"{_MODELS}{folder}.modeling_{folder}.{model}{name}": value for folder, model in families}


# The first map, one that gates or nothing, the activation, a dropout or nothing, and the last map. The first map of
# ModernBERT is both of the first two.
MLPS = {
    f"{_MODELS}llama.modeling_llama.LlamaMLP": ("gate_proj", "up_proj", "act_fn", "", "down_proj"),
    f"{_MODELS}t5gemma.modeling_t5gemma.T5GemmaMLP": ("gate_proj", "up_proj", "act_fn", "dropout", "down_proj"),
    f"{_MODELS}t5gemma2.modeling_t5gemma2.T5Gemma2MLP": ("gate_proj", "up_proj", "act_fn", "dropout", "down_proj"),
    f"{_MODELS}moonshine.modeling_moonshine.MoonshineEncoderMLP": ("fc1", "", "activation_fn", "", "fc2"),
    f"{_MODELS}modernbert.modeling_modernbert.ModernBertMLP": ("Wi", "Wi", "act", "drop", "Wo"),
}
MIXINS: dict[str, type[Accelerated]] = {
    **dict.fromkeys(ROWS, _Layer),
    **dict.fromkeys(MLPS, _MLP),
    **dict.fromkeys(MODELS, GeneratingModel),
    **_of_t5("Block", _T5Block),
    **_of_t5("Attention", _T5Bias),
    **_of_t5("LayerNorm", _RMSNorm),
    f"{_MODELS}llama.modeling_llama.LlamaRMSNorm": _RMSNorm,
    f"{_MODELS}t5gemma.modeling_t5gemma.T5GemmaRMSNorm": _GemmaRMSNorm,
    f"{_MODELS}t5gemma2.modeling_t5gemma2.T5Gemma2RMSNorm": _GemmaRMSNorm,
    "transformers.activations.NewGELUActivation": _NewGELU,
}

register()  # also for models that are read from a pickle
