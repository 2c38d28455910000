"""transformers' generate of accelerated models on a CPU: the tokens of the untouched model, by fastattn's steps.

What fastattn.generate finds with them: tests/generate.
"""

from __future__ import annotations

import contextlib
import copy
import cProfile
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import DEVICE, SPECIAL, tiers, tiny
from recorded_graph import Recorder, decoding_as_on_a_gpu, recorder  # noqa: F401
from search_cases import HUGGINGFACE, SUBJECTS, THEIR_PAD, THEIR_VOCAB, accelerated, untouched
from torch import Tensor, nn
from translation.dates import date_corpus

from fastattn import generate, use_backend
from fastattn.models import Translator
from fastattn.nn.decoding import DecoderSteps

transformers = pytest.importorskip("transformers")

PAD, EOS = THEIR_PAD, 2
CACHE = "cache" if "cache" in transformers.modeling_outputs.Seq2SeqLMOutput.__annotations__ else "past_key_values"
MODELS = (*HUGGINGFACE, "t5", "mt5", "whisper")


def source(model: Any, batch: int = 4, seed: int = 0) -> dict[str, Tensor]:
    """The arguments of generate: sentences that are padded at the end."""
    generator = torch.Generator().manual_seed(seed)
    if model.main_input_name == "input_features":
        return {"input_features": torch.randn(batch, 8, 24, generator=generator)}
    tokens = torch.randint(4, THEIR_VOCAB, (batch, 9), generator=generator)
    real = torch.arange(9) < torch.tensor([9, 3, 6, 8])[torch.arange(batch) % 4, None]
    return {"input_ids": tokens.masked_fill(~real, PAD), "attention_mask": real.long()}


def steps_in(call: Callable[[], Any]) -> tuple[int, Any]:
    """How many steps of fastattn's a call runs, and its result."""
    profiled = cProfile.Profile()
    result = profiled.runcall(call)
    return sum(entry.callcount for entry in profiled.getstats() if entry.code is DecoderSteps.__call__.__code__), result


# Options of generate that are made for a model.
MADE = ("stopping_criteria", "cache", "past_key_values")


def run(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    torch.manual_seed(0)
    options = dict(max_new_tokens=12, do_sample=False) | options
    given = {name: copy.copy(value) for name, value in inputs.items()}  # generate repeats an encoder's output
    return model.generate(**given, **{n: make(model) if n in MADE else make for n, make in options.items()})


def compare(plain: Any, ours: Any, inputs: dict[str, Any], by_steps: bool | None = True, **options: Any) -> Tensor:
    """Equal tokens, by fastattn's steps or by transformers'. None: a CUDA graph may run the steps."""
    expected = run(plain, inputs, **options)
    steps, found = steps_in(lambda: run(ours, inputs, **options))
    assert by_steps is None or (steps > 0) == by_steps
    if not isinstance(expected, Tensor):
        assert type(found) is type(expected) and found.keys() == expected.keys()
        for name in expected.keys() - {CACHE}:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-4)
        layers = (
            [output[CACHE].self_attention_cache.layers for output in (found, expected)]
            if by_steps is not False
            else [(), ()]
        )
        for ours_of_layer, theirs in zip(*layers, strict=True):
            kept = [(layer.keys, layer.values) for layer in (ours_of_layer, theirs)]
            torch.testing.assert_close(*kept, rtol=1e-4, atol=1e-4)
        return expected.sequences
    torch.testing.assert_close(found, expected)
    return expected


# --- calls by fastattn's steps ----------------------------------------------------------------------------------------


class Stop(transformers.StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Tensor, **options: Any) -> Tensor:
        return (input_ids == 7).any(1) | (input_ids.shape[1] > 9)


PROMPT = torch.tensor([[3, 9, 14, 5]]).expand(4, -1)
OUTPUT: dict[str, Any] = dict(return_dict_in_generate=True, output_scores=True)
STOP: dict[str, Any] = dict(stopping_criteria=lambda _: transformers.StoppingCriteriaList([Stop()]))
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": dict(),
    "beams": dict(num_beams=4),
    "early stopping": dict(num_beams=3, early_stopping=True, length_penalty=0.3),
    "late stopping": dict(num_beams=3, early_stopping="never", length_penalty=2.0, num_return_sequences=3),
    "many ends": dict(num_beams=3, eos_token_id=[EOS, *range(5, 90, 5)]),
    "forced tokens": dict(num_beams=2, forced_bos_token_id=8, forced_eos_token_id=EOS),
    "n-grams": dict(num_beams=2, no_repeat_ngram_size=2, repetition_penalty=1.3),
    "no EOS": dict(eos_token_id=THEIR_VOCAB + 9, min_new_tokens=4),
    "samples": dict(do_sample=True, num_return_sequences=5, top_p=0.9, temperature=0.8),
    "many samples": dict(do_sample=True, num_return_sequences=14),
    "sampled beams": dict(do_sample=True, num_beams=3, num_return_sequences=2),
    "a prompt": dict(decoder_input_ids=PROMPT, num_beams=2),
    "a long prompt": dict(decoder_input_ids=torch.arange(3, 27).expand(4, -1), num_beams=2),
    "an output": dict(return_dict_in_generate=True, output_scores=True, output_logits=True, num_beams=3),
    "an output, greedy": OUTPUT,
    "an output after a long prompt": dict(decoder_input_ids=torch.arange(3, 27).expand(4, -1), **OUTPUT, num_beams=2),
    "a stopping criterion": STOP,
}


def encoded(plain: Any, inputs: dict[str, Tensor]) -> dict[str, Any]:
    with torch.no_grad():
        return {"encoder_outputs": plain.get_encoder()(**inputs), "attention_mask": inputs["attention_mask"]}


SOURCES: dict[str, Callable[[Any, dict[str, Tensor]], dict[str, Any]]] = {
    "left": lambda plain, inputs: {name: t.flip(1) for name, t in inputs.items()},
    "no padding": lambda plain, inputs: {name: t[:1] for name, t in inputs.items()},
    "no mask": lambda plain, inputs: {"input_ids": inputs["input_ids"]},
    "a bool mask": lambda plain, inputs: inputs | {"attention_mask": inputs["attention_mask"].bool()},
    "an encoder's output": encoded,
}
CALLS = [(family, options, "") for family in MODELS for options in OPTIONS]
CALLS += [(family, "beams", of) for family in HUGGINGFACE for of in SOURCES]
EVERYDAY = [(family, "beams", "") for family in ("bart", "m2m100", "t5", "whisper")]
EVERYDAY += [("umt5", "beams", ""), ("umt5", "many samples", "")]
EVERYDAY += [("bart", "beams", of) for of in ("left", "an encoder's output")]
EVERYDAY += [
    ("marian", name, "") for name in ("greedy", "late stopping", "n-grams", "samples", "a prompt", "an output")
]
EVERYDAY += [(family, "an output after a long prompt", "") for family in ("t5", "whisper")]


@pytest.mark.parametrize(
    ("family", "options", "of"), [pytest.param(*c, marks=() if c in EVERYDAY else pytest.mark.full) for c in CALLS]
)
def test_tokens(family: str, options: str, of: str) -> None:
    plain = untouched(family)
    ours, inputs = accelerated(plain), source(plain)
    found = compare(plain, ours, SOURCES[of](plain, inputs) if of else inputs, **OPTIONS[options])
    assert len(inputs) == 1 or len(found) == 1 or len({tuple(tokens) for tokens in found.tolist()}) > 1


@pytest.mark.parametrize("family", ["marian", "t5"])
def test_weights_may_change_between_generations(family: str) -> None:
    """Also by .data, which changes neither a tensor's version nor its address."""
    plain, other = untouched(family), untouched(family, 1)
    ours, inputs = accelerated(plain), source(plain)
    before = compare(plain, ours, inputs)
    for p, new in zip(ours.parameters(), other.parameters(), strict=True):
        p.data.copy_(new)
    if family == "marian":
        ours.final_logits_bias = other.final_logits_bias
    assert not torch.equal(compare(other, ours, inputs), before)


@pytest.mark.full
def test_a_trained_t5() -> None:
    """Dates, as people write them, to ISO dates."""
    pairs, _, held_out = date_corpus(6000, 80, writings=2, seed=0)
    letters = sorted({letter for pair in pairs for text in pair for letter in text})

    def encoded_texts(texts: list[str]) -> Tensor:
        rows = [torch.tensor([3 + letters.index(letter) for letter in text] + [EOS]) for text in texts]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)

    sizes = dict(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=PAD)
    plain = tiny("T5ForConditionalGeneration", "T5Config", 1.0, **SPECIAL | sizes).cpu().train()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3)
    for chosen in torch.randint(len(pairs), (700, 48)).tolist():
        source_ids, labels = (encoded_texts([pairs[i][side] for i in chosen]) for side in (0, 1))
        labels = labels.masked_fill(labels == PAD, -100)
        loss = plain(input_ids=source_ids, attention_mask=(source_ids != PAD).long(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    source_ids, expected = (encoded_texts([pair[side] for pair in held_out]) for side in (0, 1))
    inputs = {"input_ids": source_ids, "attention_mask": (source_ids != PAD).long()}
    for num_beams in (1, 4):
        found = compare(plain.eval(), accelerated(plain), inputs, **OUTPUT, num_beams=num_beams)
        assert (found[:, 1:] == expected).all(1).sum() > 40


# --- calls that are transformers' own ---------------------------------------------------------------------------------


def _cache(model: Any) -> Any:
    return transformers.EncoderDecoderCache(*[transformers.DynamicCache(config=model.config) for _ in range(2)])


THEIRS: dict[str, dict[str, Any]] = {
    "attentions": dict(return_dict_in_generate=True, output_attentions=True),
    "hidden states": dict(output_hidden_states=True),
    "no cache": dict(use_cache=False),
    "a cache": {CACHE: _cache},
    "tokens of the source": dict(prompt_lookup_num_tokens=2),
    "a masked prompt": dict(
        decoder_input_ids=PROMPT, decoder_attention_mask=torch.tensor([[1, 0, 1, 1]]).expand(4, -1)
    ),
    "few tokens": dict(max_new_tokens=1),
    "many beams": dict(num_beams=20),
    "more tokens than positions": dict(max_new_tokens=100, **STOP),
}


@pytest.mark.parametrize("options", tiers(THEIRS, "attentions", "no cache", "a cache", "a masked prompt", "few tokens"))
def test_calls_of_transformers(options: str) -> None:
    plain = untouched("marian")
    single = options == "tokens of the source"
    inputs = source(plain, batch=1 if single else 4)
    for num_beams in (1,) if single else (1, 3):
        compare(plain, accelerated(plain), inputs, by_steps=False, **dict(num_beams=num_beams) | THEIRS[options])


def test_a_cache_that_an_earlier_call_returned() -> None:
    plain = untouched("marian")
    inputs, found = source(plain), []
    for model in (plain, accelerated(plain)):
        before = run(model, inputs, return_dict_in_generate=True, max_new_tokens=4)
        more = {"decoder_input_ids": before.sequences, CACHE: before[CACHE], "max_new_tokens": 9}
        found.append(steps_in(lambda model=model, more=more: model.generate(**inputs, **more)))
    assert found[1][0] == 0 and torch.equal(found[0][1], found[1][1])


def test_padding_in_a_prompt() -> None:
    """M2M100 gives it no position, and counts the positions after it without it. A first token may be padding."""
    plain = untouched("m2m100")
    ours, prompt = accelerated(plain), torch.tensor([[3, PAD, 9]]).expand(4, -1)
    compare(plain, ours, source(plain), by_steps=False, decoder_input_ids=prompt)
    for model in (plain, ours):
        model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = PAD
    compare(plain, ours, source(plain), num_beams=3, eos_token_id=THEIR_VOCAB + 1)
    plain.get_output_embeddings().weight.data[PAD] *= 3  # padding is chosen
    found = compare(plain, accelerated(plain), source(plain), num_beams=3, eos_token_id=THEIR_VOCAB + 1)
    assert (found[:, 1:-1] == PAD).any()


# --- changed models ---------------------------------------------------------------------------------------------------


def _own_forward(module: Any) -> None:
    module.forward = functools.partial(type(module).forward, module)


def _train(layer: Any) -> None:
    layer.dropout = layer.activation_dropout = 0.0
    layer.train()


def _hook(module: Any) -> None:
    module.register_forward_hook(lambda _module, _args, out: out)


def _without_bias(attention: Any) -> None:
    attention.compute_bias = lambda *args, **options: 0 * type(attention).compute_bias(attention, *args, **options)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "forward of a layer": lambda model: _own_forward(model.model.decoder.layers[0]),
    "another activation": lambda model: setattr(model.model.decoder.layers[1], "activation_fn", nn.Tanh()),
    "a layer in training mode": lambda model: _train(model.model.decoder.layers[1]),
    "compiled": lambda model: model.model.decoder.compile(backend="eager"),
    "hook of a map": lambda model: _hook(model.model.decoder.layers[1].encoder_attn.k_proj),
    "hook of the decoder": lambda model: _hook(model.model.decoder),
    "T5's dropout": lambda model: _hook(model.decoder.dropout),
    "T5's container": lambda model: _hook(model.decoder.block[1].layer[1]),
    "T5's table": lambda model: _hook(model.decoder.block[0].layer[0].SelfAttention.relative_attention_bias),
    "no bias in T5": lambda model: setattr(
        model.decoder.block[0].layer[0].SelfAttention, "has_relative_attention_bias", False
    ),
    "T5's bias": lambda model: _without_bias(model.decoder.block[0].layer[0].SelfAttention),
}
EVERY_DAY = (
    "forward of a layer",
    "a layer in training mode",
    "hook of a map",
    "T5's dropout",
    "T5's container",
    "T5's bias",
)


@pytest.mark.parametrize("change", tiers(CHANGES, *EVERY_DAY))
def test_changed_models(change: str) -> None:
    """Where a module that a step skips is changed, transformers' generate is its own; fastattn.generate raises."""
    plain = untouched("t5" if "T5" in change else "mbart")
    ours, inputs = accelerated(plain), source(plain)
    for model in (plain, ours):
        CHANGES[change](model)
    compare(plain, ours, inputs, by_steps=False, num_beams=2)
    if change != "a layer in training mode":  # fastattn.generate decodes in eval mode
        with pytest.raises(ValueError, match="cannot decode this model, use model.generate: "):
            generate.greedy(ours, inputs["input_ids"], max_len=5, bos_idx=3, eos_idx=EOS)


def test_a_hook_on_the_head() -> None:
    """It is called, without leaving the steps."""
    plain = untouched("mbart")
    ours = accelerated(plain)
    for model in (plain, ours):
        model.lm_head.register_forward_hook(lambda _module, _args, out: out.roll(1, -1))
    compare(plain, ours, source(plain))


ROUNDED: dict[str, tuple[torch.dtype, Any]] = {
    "bfloat16": (torch.bfloat16, contextlib.nullcontext),
    "float16": (torch.float16, contextlib.nullcontext),
    "autocast": (torch.float32, functools.partial(torch.autocast, "cpu", torch.bfloat16)),
}


@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize("family", tiers([n for n in MODELS if n != "whisper"], "marian", "umt5"))
def test_16_bits(family: str, kind: str) -> None:
    """A step's logits are as near to those of float64 as the untouched model's. Where two tokens are within rounding of
    each other, another one may be chosen. In float16 T5's layers clamp, which no step does."""
    (dtype, context), plain = ROUNDED[kind], untouched(family)
    exact, plain = copy.deepcopy(plain).double(), plain.to(dtype)
    ours, inputs = accelerated(plain), source(plain, 300)
    prefix = torch.randint(3, THEIR_VOCAB, (300, 12), generator=torch.Generator().manual_seed(0))
    is_theirs = "t5" in family and dtype is torch.float16
    with torch.no_grad(), context():
        assert steps_in(lambda: run(ours, inputs, num_beams=2))[0] == (0 if is_theirs else 12)
        if is_theirs:
            return
        cache = ours.start_decoding(inputs["input_ids"], 1, 12)
        found = torch.cat([ours.next_logits(tokens, cache) for tokens in prefix.split(1, 1)], 1)
        theirs = plain(**inputs, decoder_input_ids=prefix).logits
    with torch.no_grad():
        truth = exact(**inputs, decoder_input_ids=prefix).logits
    error, their_error = ((t.double() - truth).square().mean().sqrt() for t in (found, theirs))
    assert error <= their_error and found.dtype is theirs.dtype  # 0.91 to 0.99 of it


def test_modes() -> None:
    plain = untouched("marian")
    ours, inputs = accelerated(plain), source(plain)
    with use_backend("reference"):
        assert steps_in(lambda: run(ours, inputs))[0] == 0
    assert steps_in(lambda: run(ours.double(), inputs))[0] == 12


GRAPHED = [(family, options) for family in MODELS for options in OPTIONS]
EVERY_GRAPH = [
    ("marian", "beams"),
    ("marian", "samples"),
    ("t5", "an output after a long prompt"),
    ("umt5", "a prompt"),
]


@pytest.mark.parametrize(
    ("family", "options"), [pytest.param(*g, marks=() if g in EVERY_GRAPH else pytest.mark.full) for g in GRAPHED]
)
def test_on_a_gpu(family: str, options: str, recorder: Recorder) -> None:  # noqa: F811
    """A step is a CUDA graph in transformers' loop, here a recorded one, which is kept for the next generation: of
    other sources, also of other lengths, of other weights, and of samples in place of beams."""
    plain = untouched(family).to(DEVICE)
    ours, made = accelerated(plain), []
    given = {n: v.to(DEVICE) if isinstance(v, Tensor) else v for n, v in OPTIONS[options].items()}
    for seed in range(3):
        inputs = {name: t.to(DEVICE) for name, t in source(plain, seed=seed).items()}
        if seed and "input_ids" in inputs:
            inputs = {name: t[:, : 9 - seed] for name, t in inputs.items()}
        with decoding_as_on_a_gpu(), use_backend(None if DEVICE == "cuda" else "reference"):
            compare(plain, ours, inputs, None, **dict(max_new_tokens=16) | given)
        made.append((recorder.captures, recorder.replays > 8 * len(made)))
        with torch.no_grad():
            for p in (*plain.parameters(), *ours.parameters()):
                p.mul_((1.2, 1 / 1.2)[seed % 2])
    assert DEVICE == "cuda" or made == [(1, True)] * 3


def test_limits_of_a_model() -> None:
    """Positions that the decoder does not have, and another token of padding, would change results silently."""
    ours, src = accelerated(untouched("bart")), SUBJECTS["bart"].source(4, 9)
    with pytest.raises(ValueError, match="max_len=65 is more than the 64 positions of the decoder"):
        generate.greedy(ours, src, max_len=65, bos_idx=3, eos_idx=EOS)
    with pytest.raises(ValueError, match="src_pad_idx is 0, and the model's 1"):
        Translator(ours, 2, 9, 0, PAD, 3, EOS)
