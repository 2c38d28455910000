"""transformers' generate by fastattn's steps: greedy search, sampling and beams of the models in MODELS.

The loops are transformers' own, with their logits processors, stopping criteria, streamers and rules of beams. What
they call is fastattn's: while a loop runs, the model's cache is a StepCache, and a call of the model with it is a step
of fastattn/nn/decoding.py and the model's own output head; on a GPU both are one CUDA graph. Beams copy no keys, and
those of the encoder's output are computed once a source.

A generation is computed so only if everything that a step skips is known to be as transformers made it: `_own_cache`
and `decoder_params` check that once. Every other one runs transformers' own cache and layers.

The searches of fastattn.generate decode these models on every device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import Seq2SeqLMOutput

from fastattn.generate.kept_graphs import Steps
from fastattn.integrations.graphed_stacks import GraphedStack
from fastattn.integrations.layers import Accelerated, Attend, TableLayer, accelerated_class
from fastattn.masks._checks import check_token_ids
from fastattn.nn.decoding import PLAIN, DecoderParams, DecoderSteps, EmbeddingParams, StepSublayer, tensors_of
from fastattn.nn.fusible import hook_reason, unfusible_reason
from fastattn.nn.kv_cache import DecoderCache, Memory, check_source, move_padding_to_end
from fastattn.nn.params import NormParams, norm_params
from fastattn.ops import _checks

# Tokens of a prompt that steps read: more are one forward of transformers' layers. New tokens: fewer do not repay
# what a generation prepares, on a GPU a CUDA graph. Samples or beams of a source: each reads the keys of all, so more
# samples are computed as those of others. Measured on an AMD EPYC (Zen 4), width 256 and 512, float32: by steps 4 to
# 8 tokens of a prompt take 0.88x to 0.97x of the time, 12 as long. The untouched model takes for 2 new tokens 0.97x
# to 1.3x of our time, for 4 1.05x to 1.4x, 16 to 40 samples 1.07x to 1.5x, 16 beams 1.16x to 1.8x, 24 0.95x to 1.5x.
MAX_PROMPT, MIN_TOKENS, MIN_ON_A_GPU, MAX_SAMPLES, MAX_BEAMS = 8, 4, 16, 12, 16  # that on a GPU is estimated
# Weights of a head of which copies are kept, see leaves.py. With them T5 of width 256 with 8000 words generates 4
# tokens as fast, 32 or 64 1.06x to 1.45x as fast.
MAX_HEAD = 1 << 26

# The argument of forward that is the cache: "past_key_values" before transformers 5.24.
_CACHE = "cache" if "cache" in Seq2SeqLMOutput.__dataclass_fields__ else "past_key_values"

# Models with an encoder, a decoder and an output head, and what the names of their classes begin with.
MODELS = {}
for family in "Bart Marian MBart M2M100 Pegasus Whisper Blenderbot PLBart T5 MT5 UMT5".split():
    folder = "m2m_100" if family == "M2M100" else family.lower()
    head = "MTModel" if family == "Marian" else "ForConditionalGeneration"
    MODELS[f"transformers.models.{folder}.modeling_{folder}.{family}{head}"] = family
_OF_THE_LOOP = {"logits_processor", "streamer", "tokenizer"}  # arguments that change no call of the model
_POSITIONS = ("LearnedPositionalEmbedding", "SinusoidalPositionalEmbedding", "PositionalEmbedding")


class Modified(ValueError):
    """Why fastattn's steps would not be those of a model."""


class StepCache(Cache):
    """The cache of a generation by steps, as transformers' loops see it.

    theirs: the empty one that transformers made for it. It reads a long prompt, and is what the generation returns.
    """

    def __init__(self, own: DecoderCache, theirs: Any) -> None:
        super().__init__(layers=[])
        self.own, self.theirs = own, theirs
        self.graph: Steps | None = None
        self.pasts = [(depth, sublayer.module) for depth, sublayer in enumerate(own.steps.params.sublayers)][::3]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.own.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i continues what was row beam_idx[i], of the same source."""
        self.own.reorder(beam_idx.long().view(-1, self.own.rows) % self.own.rows)

    def logits(self, model: Any, tokens: Tensor) -> Tensor:
        """As model.next_logits. On a GPU the next call overwrites them: the loops copy what they keep."""
        if not self.own.on_device:
            return model.next_logits(tokens, self.own)
        if self.graph is None:
            self.graph = Steps(model, cast(Any, _GraphedStep(self.own, model.n_trg_vocab)))
            self.own = self.graph.search.cache
        state = self.graph.search.state
        state["tokens"].copy_(tokens)
        self.graph()
        return state["logits"]

    def read_prompt(self) -> None:
        """Continue what the model has written to `theirs`."""
        for layer, place in zip(self.theirs.self_attention_cache.layers, self.pasts, strict=True):
            self.own.fill(place, layer.keys, layer.values)
        self.own.advance(self.theirs.get_seq_length())

    def filled(self, model: Any) -> Any:
        """`theirs`, with what is in this one. Where it has no keys of the encoder's output, a forward computes them."""
        own, theirs, known = self.own, self.theirs, self.theirs.get_seq_length()
        for layer, place in enumerate(self.pasts):
            d_k = own.steps.params.sublayers[place[0]].params.d_k
            past = own.past_of_beams(place)[:, :, known:]
            theirs.self_attention_cache.update(past[..., :d_k], past[..., d_k:], layer)
            if model.main_input_name != "input_ids" and not theirs.is_updated.get(layer):  # there padding has not moved
                memory, lengths = own.memories[0]
                keys_and_values = [t[:, :, : lengths[0]].repeat_interleave(own.rows, 0) for t in memory[place[1]]]
                theirs.cross_attention_cache.update(*keys_and_values, layer)
                theirs.is_updated[layer] = True
        return theirs


class _GraphedStep:
    """A step as kept_graphs.py repeats it: the newest tokens and the logits have fixed addresses."""

    generator = None

    def __init__(self, cache: DecoderCache, n_vocab: int) -> None:
        self.cache, sizes, device = cache, (cache.batch, cache.rows), cache.position.device
        self.state = {"tokens": torch.zeros(sizes, dtype=torch.int64, device=device)}
        self.state["logits"] = torch.zeros(*sizes, n_vocab, device=device)  # in float32, as the loops read them
        if cache.rows > 1:  # so samples and beams have one graph
            cache.reorder(torch.arange(cache.rows, device=device).expand(sizes))

    def step(self, model: Any) -> None:
        self.state["logits"].copy_(model.next_logits(self.state["tokens"], self.cache))

    def resume(self, other: _GraphedStep) -> None:
        self.cache.resume(other.cache)


class GeneratingModel(Accelerated):
    """A model of MODELS. Its generate runs fastattn's steps, and fastattn.generate decodes it."""

    def __call__(self: Any, *args: Any, **inputs: Any) -> Any:
        cache, parent = inputs.get(_CACHE), cast(Any, super())
        if type(cache) is not StepCache:
            return parent.__call__(*args, **inputs)
        own, tokens = cache.own, inputs["decoder_input_ids"]
        if tokens.shape[1] > (1 if own.on_device else MAX_PROMPT):
            read = parent.__call__(*args, **inputs | {_CACHE: cache.theirs})
            cache.read_prompt()
            return Seq2SeqLMOutput(logits=read.logits, **{_CACHE: cache})
        *before, newest = tokens.unflatten(0, (own.batch, own.rows)).unbind(2)
        for column in before:
            own.steps(column, own)
            own.advance()
        logits = cache.logits(self, newest)
        return Seq2SeqLMOutput(logits=logits.view(len(tokens), 1, -1), **{_CACHE: cache})

    def _prepare_cache_for_generation(self: Any, generation_config: Any, model_kwargs: Any, *args: Any) -> Any:
        given = model_kwargs.get(_CACHE)
        result = cast(Any, super())._prepare_cache_for_generation(generation_config, model_kwargs, *args)
        if isinstance(cache := model_kwargs.get(_CACHE), Cache):
            cache.is_of_this_call = given is None  # a user may give one that an earlier call returned
        return result

    def _sample(self: Any, *prompt: Tensor, **options: Any) -> Any:
        return _generate(cast(Any, super())._sample, self, prompt, options)

    def _beam_search(self: Any, *prompt: Tensor, **options: Any) -> Any:
        return _generate(cast(Any, super())._beam_search, self, prompt, options)

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
        weight, positions = params.embedding.table, params.embedding.positions
        _checks.check_indices("src_seq", source, "the model", weight)
        _checks.check_range("src_seq", source, len(self.get_input_embeddings().weight), "a row of the embedding")
        if positions is not None and capacity > len(positions):
            raise ValueError(f"max_len={capacity} is more than the {len(positions)} positions of the decoder")
        real = source != self.config.pad_token_id
        check_source(real)
        encoded = self.get_encoder()(input_ids=source, attention_mask=real.long()).last_hidden_state
        return decoder_cache(params, encoded, real, beams, capacity)

    def next_logits(self: Any, tokens: Tensor, cache: DecoderCache) -> Tensor:
        """Logits (B, W, n_vocab) of what follows one new token a beam, integer (B, W)."""
        head, x = self.get_output_embeddings(), cache.steps(tokens, cache)
        cache.advance()
        is_row = x.numel() == x.shape[2] and x.dtype is torch.float32  # of which no copy is kept, see cpu_matmul.py
        packs = cache.on_device or is_row or (self.n_trg_vocab or 0) * x.shape[2] <= MAX_HEAD
        logits = cache.linear(head, x, None) if packs else head(x)
        bias = getattr(self, "final_logits_bias", None)
        return logits if bias is None else logits + bias


def _generate(loop: Callable[..., Any], model: Any, prompt: tuple[Tensor, ...], options: dict[str, Any]) -> Any:
    """A loop of transformers, with a StepCache where its steps may be fastattn's.

    prompt: what it gets by position, in generate the tokens (rows, length) alone.
    """
    try:
        own = _own_cache(model, *prompt, **options) if len(prompt) == 1 else None
    except Modified:
        own = None
    if own is None:
        return loop(*prompt, **options)
    cache = StepCache(own, options[_CACHE])
    try:
        result = loop(*prompt, **options | {_CACHE: cache})
        if not isinstance(result, Tensor):  # return_dict_in_generate
            result[_CACHE] = cache.filled(model)
        return result
    finally:
        if cache.graph is not None:
            cache.graph.end()


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
    **options: Any,
) -> DecoderCache | None:
    """None where a step of the loop may be another than fastattn's. The arguments are the loop's."""
    config, cache = generation_config, options.pop(_CACHE, None)
    max_length, length = getattr(stopping_criteria, "max_length", None), prompt.shape[1]
    if (
        any(options[name] is not None for name in options.keys() - _OF_THE_LOOP)
        or not getattr(cache, "is_of_this_call", False)
        or config.cache_implementation not in (None, "dynamic")
        or not use_cache
        or synced_gpus
        or config.is_assistant
        or config.prefill_chunk_size is not None
        or any(c.output_attentions or c.output_hidden_states for c in (config, model.config))
        or "prepare_inputs_for_generation" in vars(model)
        or hasattr(model, "_reorder_cache")
        or max_length is None
        or (decoder_attention_mask is not None and not decoder_attention_mask.all())
    ):
        return None
    encoded, rows = encoder_outputs[0], max(config.num_beams, config.num_return_sequences)
    rows = 1 if encoded.is_cpu and config.num_beams == 1 and rows > MAX_SAMPLES else rows
    real = attention_mask if model.main_input_name == "input_ids" else None  # Whisper's decoder reads no mask
    if (
        encoded.device.type not in ("cpu", "cuda")
        or max_length - length < (MIN_TOKENS if encoded.is_cpu else MIN_ON_A_GPU)
        or len(encoded) != len(prompt)
        or len(prompt) % rows
        or (encoded.is_cpu and rows > MAX_BEAMS)
        or (real is not None and real.shape != encoded.shape[:2])
    ):
        return None
    params, real = decoder_params(model), None if real is None else real[::rows] != 0
    positions, unplaced = params.embedding[2:4]
    if (
        (positions is not None and max_length > len(positions))
        or (length > 1 and unplaced is not None and (prompt == unplaced).any())  # it changes the positions after it
        or (real is not None and not real.any(1).all())  # attention to nothing
    ):
        return None
    head = model.get_output_embeddings()
    if any(t.device != encoded.device for t in (*tensors_of(params), *head.parameters())):  # a model on several devices
        return None
    own = decoder_cache(params, encoded[::rows], real, rows, max_length - 1)
    # A CUDA graph repeats no hook of the head.
    return own if own.steps.is_straight or (own.on_device and unfusible_reason(head) is None) else None


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
    for attention, layer, _, reads_memory, _ in params.sublayers:
        if reads_memory:
            keys_and_values = layer.project(encoded)
            keys, values = (t.unflatten(2, (-1, attention.d_k)).transpose(1, 2).contiguous() for t in keys_and_values)
            memory[layer] = keys, values
    cache = DecoderCache(B, rows, capacity, device, (Memory(memory, lengths),))
    if params.relative_bias is not None:
        cache.relative_bias = params.relative_bias(capacity)
    cache.steps = DecoderSteps(params, cache)
    return cache


def decoder_params(model: Any) -> DecoderParams:
    """The decoder of a model of MODELS. Modified if a module that a step skips is not as transformers made it."""
    original = model.original
    family = MODELS[f"{original.__module__}.{original.__qualname__}"]

    def class_of(name: str) -> Any:
        return getattr(sys.modules[original.__module__], family + name, None)

    _check("the model", model, accelerated_class(original, GeneratingModel))
    if family.endswith("T5"):
        params = _params_of_t5(model, family, class_of)
    else:
        _check("model", model.model, class_of("Model"))
        params = _params_with_positions(model.model.decoder, family, class_of)
    for t in tensors_of(params):
        if type(t) not in PLAIN:
            raise Modified(f"model.decoder has a tensor of {type(t).__name__}")
    return params


def _params_with_positions(decoder: Any, family: str, class_of: Callable[[str], Any]) -> DecoderParams:
    kind = class_of("Decoder")
    _check_stack(decoder, kind, class_of("ScaledWordEmbedding"))
    embedding, positions = decoder.embed_tokens, decoder.embed_positions
    _check("model.decoder.embed_positions", positions, *map(class_of, _POSITIONS))
    if getattr(positions, "max_norm", None) is not None:
        raise Modified("model.decoder.embed_positions has max_norm")
    final_norm = _norm(decoder, "layer_norm") if hasattr(decoder, "layer_norm") else None
    scale = getattr(embedding, "embed_scale", 1.0) * (decoder.embed_scale if family in ("Marian", "Pegasus") else 1.0)
    unplaced = None
    if family == "M2M100":
        unplaced, table = positions.padding_idx, positions.weights[positions.padding_idx + 1 :]
    else:
        table = positions.weight[getattr(positions, "offset", 0) :]
    embedded = EmbeddingParams(embedding.weight, scale, table, unplaced, _norm(decoder, "layernorm_embedding"))
    return DecoderParams(embedded, final_norm, _sublayers(decoder.layers))


def _params_of_t5(model: Any, family: str, class_of: Callable[[str], Any]) -> DecoderParams:
    decoder, config = model.decoder, model.config
    _check_stack(decoder, class_of("Stack"), None)
    if (reason := unfusible_reason(decoder.dropout)) is not None:
        raise Modified(f"model.decoder.dropout {reason}")
    if decoder.embed_tokens.weight.dtype is torch.float16:
        raise Modified("the layers of T5 clamp float16")
    embedded = EmbeddingParams(decoder.embed_tokens.weight, 1.0, None, None, None)
    sublayers, final_norm = _sublayers(decoder.block, family == "UMT5"), _norm(decoder, "final_layer_norm")
    attentions = [layer.layer[0].SelfAttention for layer in decoder.block]
    attentions = attentions if family == "UMT5" else attentions[:1]  # the first layer's bias is that of all
    for attention in attentions:
        table = attention._modules.get("relative_attention_bias")
        is_own = attention.has_relative_attention_bias and "compute_bias" not in vars(attention)
        if not is_own or unfusible_reason(table) is not None:
            raise Modified("a bias by distance of model.decoder is modified")

    def relative_bias(capacity: int) -> Tensor:
        options = 1, 2 * capacity - 1, decoder.embed_tokens.weight.device, capacity - 1
        return torch.stack([attention.compute_bias(*options).view(-1, options[1]) for attention in attentions])

    is_scaled = family != "MT5" and getattr(config, "scale_decoder_outputs", config.tie_word_embeddings)
    return DecoderParams(embedded, final_norm, sublayers, None, config.d_model**-0.5 if is_scaled else 1, relative_bias)


def _check_stack(decoder: Any, kind: Any, embedding: Any) -> None:
    _check("model.decoder", decoder, kind, accelerated_class(kind, GraphedStack))
    if any(module.training for module in decoder.modules()):
        raise Modified("model.decoder is in training mode")
    _check("model.decoder.embed_tokens", decoder.embed_tokens, embedding, nn.Embedding)
    if decoder.embed_tokens.max_norm is not None:
        raise Modified("model.decoder.embed_tokens has max_norm")


def _sublayers(stack: Any, has_biases: bool = False) -> tuple[StepSublayer, ...]:
    """Raises Modified unless each is an unmodified layer of ROWS, in eval mode."""
    found: list[StepSublayer] = []
    for depth, layer in enumerate(stack):
        path = f"layer {depth} of model.decoder"
        if not issubclass(type(layer), TableLayer) or "original" not in vars(type(layer)):
            raise Modified(f"{path} is a {type(layer).__name__} that is not of accelerate()")
        _check(path, layer, type(layer))
        attend = Attend(_never, None)
        params = [sublayer.params for sublayer in layer.describe([attend, attend])]
        if None in params or not layer._has_own_containers():
            raise Modified(f"a sublayer of {path} is modified")
        found += [StepSublayer(part, layer, reads_memory=n == 1) for n, part in enumerate(params)]
        if has_biases:
            found[-3] = found[-3]._replace(bias=depth)
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
