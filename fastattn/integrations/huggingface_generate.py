"""transformers' generate on a CPU, by fastattn's steps: greedy search, sampling and beams of the models in MODELS.

The loops are transformers' own, with their logits processors, stopping criteria, streamers and rules of beams. What
they call is fastattn's: while a loop runs, the model's cache is a StepCache, and a call of the model with it is a step
of fastattn/nn/decoding.py and the model's own output head. Beams copy no keys, and those of the encoder's output are
computed once a source.

A generation is computed so only if everything that a step skips is known to be as transformers made it: `_own_cache`
and `decoder_params` check that once. Every other one runs transformers' own cache and layers.

The searches of fastattn.generate decode these models on every device.
"""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import Seq2SeqLMOutput

from fastattn.integrations.graphed_stacks import GraphedStack
from fastattn.integrations.layers import Accelerated, Attend, TableLayer, accelerated_class
from fastattn.masks._checks import check_token_ids
from fastattn.nn.decoding import PLAIN, DecoderParams, DecoderSteps, EmbeddingParams, StepSublayer, tensors_of
from fastattn.nn.fusible import hook_reason, unfusible_reason
from fastattn.nn.kv_cache import DecoderCache, Memory, check_source, move_padding_to_end
from fastattn.nn.params import NormParams, norm_params
from fastattn.ops import _autocast, _checks

# Tokens of a prompt: longer ones are faster in one forward of transformers' layers. New tokens: fewer do not repay what
# a generation prepares, 3 to 40 ms for 3 layers of width 256 to 6 of 512. Beams or samples of a source: each of them
# reads the keys of all. Measured on one core of an AMD EPYC (Zen 4), float32, against the untouched model: prompts of 8
# tokens before 16 new ones 1.17x and 1.27x as fast, of 32 tokens 0.87x and 1.04x; 4 new tokens 0.78x to 0.99x, 8 of
# them 0.95x to 1.22x; 8 samples of 256 tokens 1.2x, 16 of them 0.98x; as many beams 1.53x and 1.32x.
MAX_PROMPT, MIN_TOKENS, MAX_ROWS = 8, 8, 12

# The argument of forward that is the cache: "past_key_values" before transformers 5.24.
_CACHE = "cache" if "cache" in Seq2SeqLMOutput.__dataclass_fields__ else "past_key_values"

# Folders of models with an encoder, a decoder and an output head, and what their classes begin with.
_FAMILIES = {"bart": "Bart", "marian": "Marian", "mbart": "MBart", "m2m_100": "M2M100", "pegasus": "Pegasus"}
_FAMILIES |= {"whisper": "Whisper", "blenderbot": "Blenderbot", "plbart": "PLBart"}
MODELS = {}
for folder, family in _FAMILIES.items():
    head = "MTModel" if family == "Marian" else "ForConditionalGeneration"
    MODELS[f"transformers.models.{folder}.modeling_{folder}.{family}{head}"] = family
_POSITIONS = ("LearnedPositionalEmbedding", "SinusoidalPositionalEmbedding", "PositionalEmbedding")


class Modified(ValueError):
    """Why fastattn's steps would not be those of a model."""


class StepCache(Cache):
    """The cache of a generation by steps, as transformers' loops see it."""

    def __init__(self, own: DecoderCache) -> None:
        super().__init__(layers=[])
        self.own = own

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.own.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i continues what was row beam_idx[i], of the same source."""
        self.own.reorder(beam_idx.long().view(-1, self.own.rows) % self.own.rows)


class GeneratingModel(Accelerated):
    """A model of MODELS. Its generate runs fastattn's steps, and fastattn.generate decodes it."""

    def __call__(self: Any, *args: Any, **inputs: Any) -> Any:
        cache, parent = inputs.get(_CACHE), cast(Any, super())
        if type(cache) is not StepCache:
            return parent.__call__(*args, **inputs)
        own, tokens = cache.own, inputs["decoder_input_ids"]
        *before, newest = tokens.unflatten(0, (own.batch, own.rows)).unbind(2)
        for column in before:
            _step(column, own)
        logits = self.next_logits(newest, own)
        return Seq2SeqLMOutput(logits=logits.view(len(tokens), 1, -1), **{_CACHE: cache})

    def _prepare_cache_for_generation(self: Any, generation_config: Any, model_kwargs: Any, *args: Any) -> Any:
        given = model_kwargs.get(_CACHE)
        result = cast(Any, super())._prepare_cache_for_generation(generation_config, model_kwargs, *args)
        if isinstance(cache := model_kwargs.get(_CACHE), Cache):
            cache.is_of_this_call = given is None  # a user may give one that an earlier call returned
        return result

    def _sample(self: Any, *prompt: Tensor, **options: Any) -> Any:
        return cast(Any, super())._sample(*prompt, **_with_steps(self, prompt, options))

    def _beam_search(self: Any, *prompt: Tensor, **options: Any) -> Any:
        return cast(Any, super())._beam_search(*prompt, **_with_steps(self, prompt, options))

    # What fastattn.generate reads of a model.

    @property
    def n_trg_vocab(self: Any) -> int | None:
        return getattr(self.get_output_embeddings(), "out_features", None)

    @property
    def src_pad_idx(self: Any) -> int:
        return self.config.pad_token_id

    trg_pad_idx = src_pad_idx

    def start_decoding(self: Any, source: Tensor, beams: int, capacity: int) -> DecoderCache:
        """Encode source, integer (B, Ls), where pad_token_id is padding: see fastattn/generate/loop.py.

        TypeError for a model that reads no text. ValueError where fastattn does not decode it, and for bad input.
        """
        if self.main_input_name != "input_ids":
            raise TypeError(f"{type(self).__name__} reads no text: use model.generate")
        check_token_ids("src_seq", source)
        try:
            params = decoder_params(self)
        except Modified as reason:
            raise ValueError(f"fastattn cannot decode this model, use model.generate: {reason}") from None
        weight = params.embedding.table
        _checks.check_indices("src_seq", source, "the model", weight)
        _checks.check_range("src_seq", source, len(self.get_input_embeddings().weight), "a row of the embedding")
        if capacity > (n_position := len(params.embedding.positions)):
            raise ValueError(f"max_len={capacity} is more than the {n_position} positions of the decoder")
        real = source != self.config.pad_token_id
        check_source(real)
        encoded = self.get_encoder()(input_ids=source, attention_mask=real.long()).last_hidden_state
        return decoder_cache(params, encoded, real, beams, capacity)

    def next_logits(self: Any, tokens: Tensor, cache: DecoderCache) -> Tensor:
        """Logits (B, W, n_vocab) of what follows one new token a beam, integer (B, W)."""
        head, x = self.get_output_embeddings(), _step(tokens, cache)
        logits = cache.linear(head, x, None) if cache.on_device else head(x)
        bias = getattr(self, "final_logits_bias", None)
        return logits if bias is None else logits + bias


def _step(tokens: Tensor, cache: DecoderCache) -> Tensor:
    """The decoder's output (B, W, d_model) for one new token a beam, integer (B, W)."""
    x = cache.steps(tokens, cache)
    cache.advance()
    return x


def _with_steps(model: Any, prompt: tuple[Tensor, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The options of a loop of transformers, with a StepCache where its steps may be fastattn's.

    prompt: what it gets by position, in generate the tokens (rows, length) alone.
    """
    if len(prompt) != 1:
        return options
    try:
        own = _own_cache(model, *prompt, **options)
    except Modified:
        own = None
    return options if own is None else options | {_CACHE: StepCache(own)}


def _own_cache(
    model: Any,
    prompt: Tensor,
    *,
    generation_config: Any = None,
    stopping_criteria: Any = None,
    encoder_outputs: Any = None,
    attention_mask: Tensor | None = None,
    decoder_attention_mask: Tensor | None = None,
    use_cache: bool = False,
    synced_gpus: bool = False,
    logits_processor: Any = None,
    streamer: Any = None,
    tokenizer: Any = None,
    **options: Any,
) -> DecoderCache | None:
    """None where a step of the loop may be another than fastattn's. The arguments are the loop's."""
    config, cache = generation_config, options.pop(_CACHE, None)
    max_length, length = getattr(stopping_criteria, "max_length", None), prompt.shape[1]
    if (
        any(value is not None for value in options.values())
        or not getattr(cache, "is_of_this_call", False)
        or config.cache_implementation not in (None, "dynamic")
        or not use_cache
        or synced_gpus
        or config.is_assistant
        or config.prefill_chunk_size is not None
        or any(c.output_attentions or c.output_hidden_states for c in (config, model.config))
        or config.return_dict_in_generate
        or "prepare_inputs_for_generation" in vars(model)
        or hasattr(model, "_reorder_cache")
        or max_length is None
        or max_length - length < MIN_TOKENS
        or length > MAX_PROMPT
        or (decoder_attention_mask is not None and not decoder_attention_mask.all())
    ):
        return None
    encoded, rows = encoder_outputs[0], max(config.num_beams, config.num_return_sequences)
    real = attention_mask if model.main_input_name == "input_ids" else None  # Whisper's decoder reads no mask
    if (
        encoded.device.type != "cpu"
        or encoded.dtype not in (torch.float32, torch.float64)  # in 16 bits other roundings choose other tokens
        or _autocast.autocast_dtype(encoded.device) is not None
        or len(encoded) != len(prompt)
        or len(prompt) % rows
        or rows > MAX_ROWS
        or (real is not None and real.shape != encoded.shape[:2])
    ):
        return None
    params, real = decoder_params(model), None if real is None else real[::rows] != 0
    unplaced = params.embedding.unplaced_token
    if (
        max_length > len(params.embedding.positions)
        or (length > 1 and unplaced is not None and (prompt == unplaced).any())  # it changes the positions after it
        or (real is not None and not real.any(1).all())  # attention to nothing
    ):
        return None
    own = decoder_cache(params, encoded[::rows], real, rows, max_length - 1)
    return own if own.steps.is_straight else None


def decoder_cache(
    params: DecoderParams, encoded: Tensor, real: Tensor | None, rows: int, capacity: int
) -> DecoderCache:
    """A cache with its steps.

    encoded: (B, Ls, d_model).     real: bool (B, Ls), what of it counts; None if all does.
    """
    (B, Ls), device, memory = encoded.shape[:2], encoded.device, {}
    lengths = torch.full((B,), Ls, dtype=torch.int32, device=device)
    if real is not None and not real.all():
        encoded, lengths = move_padding_to_end(encoded, real)
        encoded = encoded.where((torch.arange(Ls, device=device) < lengths[:, None])[..., None], 0)
    for attention, layer, _, reads_memory in params.sublayers:
        if reads_memory:
            keys_and_values = layer.project(encoded)
            keys, values = (t.unflatten(2, (-1, attention.d_k)).transpose(1, 2).contiguous() for t in keys_and_values)
            memory[layer] = keys, values
    cache = DecoderCache(B, rows, capacity, device, (Memory(memory, lengths),))
    cache.steps = DecoderSteps(params, cache)
    return cache


def decoder_params(model: Any) -> DecoderParams:
    """The decoder of a model of MODELS. Modified if a module that a step skips is not as transformers made it."""
    original = model.original
    family = MODELS[f"{original.__module__}.{original.__qualname__}"]

    def class_of(name: str) -> Any:
        return getattr(sys.modules[original.__module__], family + name, None)

    _check("the model", model, accelerated_class(original, GeneratingModel))
    _check("model", model.model, class_of("Model"))
    decoder, kind = model.model.decoder, class_of("Decoder")
    _check("model.decoder", decoder, kind, accelerated_class(kind, GraphedStack))
    if any(module.training for module in decoder.modules()):
        raise Modified("model.decoder is in training mode")
    embedding, positions = decoder.embed_tokens, decoder.embed_positions
    _check("model.decoder.embed_tokens", embedding, class_of("ScaledWordEmbedding"), nn.Embedding)
    _check("model.decoder.embed_positions", positions, *map(class_of, _POSITIONS))
    if embedding.max_norm is not None or getattr(positions, "max_norm", None) is not None:
        raise Modified("an embedding of model.decoder has max_norm")
    final_norm = _norm(decoder, "layer_norm") if hasattr(decoder, "layer_norm") else None
    scale = getattr(embedding, "embed_scale", 1.0) * (decoder.embed_scale if family in ("Marian", "Pegasus") else 1.0)
    unplaced = None
    if family == "M2M100":
        unplaced, table = positions.padding_idx, positions.weights[positions.padding_idx + 1 :]
    else:
        table = positions.weight[getattr(positions, "offset", 0) :]
    embedded = EmbeddingParams(embedding.weight, scale, table, unplaced, _norm(decoder, "layernorm_embedding"))
    params = DecoderParams(embedded, final_norm, _sublayers(decoder.layers))
    for t in tensors_of(params):
        if type(t) not in PLAIN:
            raise Modified(f"model.decoder has a tensor of {type(t).__name__}")
    return params


def _sublayers(stack: Any) -> tuple[StepSublayer, ...]:
    """Raises Modified unless each is an unmodified layer of ROWS, in eval mode."""
    found: list[StepSublayer] = []
    for n, layer in enumerate(stack):
        path = f"model.decoder.layers.{n}"
        if not issubclass(type(layer), TableLayer) or "original" not in vars(type(layer)):
            raise Modified(f"{path} is a {type(layer).__name__} that is not of accelerate()")
        _check(path, layer, type(layer))
        attend = Attend(_never, None)
        params = [sublayer.params for sublayer in layer.describe([attend, attend])]
        if None in params or not layer._has_own_containers():
            raise Modified(f"a sublayer of {path} is modified")
        found += [StepSublayer(part, layer, reads_memory=n == 1) for n, part in enumerate(params)]
    return tuple(found)


def _norm(decoder: Any, name: str) -> NormParams | None:
    norm = decoder._modules.get(name)
    if norm is None:
        return None
    if (reason := unfusible_reason(norm)) is not None:
        raise Modified(f"model.decoder.{name} {reason}")
    return norm_params(norm, 0.0)


def _check(path: str, module: Any, *kinds: type) -> None:
    """Raise Modified unless a call of the module would be that of one of these classes."""
    if type(module) not in kinds:
        raise Modified(f"{path} is a {type(module).__module__}.{type(module).__qualname__}")
    if (reason := hook_reason(module)) is not None:
        raise Modified(f"{path} {reason}")
    if module._compiled_call_impl is not None:
        raise Modified(f"{path} is compiled")


def _never(*_: Any) -> Any:
    raise AssertionError("a layer is described, and not called")
