"""transformers' generate of accelerated models on a CPU: the tokens of the untouched model, by fastattn's steps.

The models are small, their weights random and so large that tokens depend on the source and on the tokens before.
"""

import copy
import functools
import io
import sys

import plain_search
import pytest
import torch
from families import tiers
from torch import nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel

from fastattn import accelerate, generate, restore, use_backend
from fastattn.models import Translator
from fastattn.nn.decoding import DecoderSteps

transformers = pytest.importorskip("transformers")

full = pytest.mark.full
FAMILIES = {
    "Marian": "MTModel",
    "Bart": "ForConditionalGeneration",
    "MBart": "ForConditionalGeneration",
    "M2M100": "ForConditionalGeneration",
    "Pegasus": "ForConditionalGeneration",
    "Whisper": "ForConditionalGeneration",
    "Blenderbot": "ForConditionalGeneration",
    "PLBart": "ForConditionalGeneration",
}
TEXT = [name for name in FAMILIES if name != "Whisper"]
PAD, BOS, EOS, N_VOCAB = 1, 0, 2, 60
SIZES = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in dict(attention_heads=4).items()}
SIZES |= dict(encoder_layers=1, decoder_layers=2, encoder_ffn_dim=64, decoder_ffn_dim=64, d_model=32)


@functools.cache
def _built(family, seed=0):
    torch.manual_seed(seed)
    options = SIZES | dict(vocab_size=N_VOCAB, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)
    options |= dict(forced_eos_token_id=None, decoder_start_token_id=3, scale_embedding=True, use_cache=True)
    options |= dict(attn_implementation="sdpa")
    if family == "Whisper":
        options |= dict(num_mel_bins=8, max_source_positions=7, max_target_positions=64)
        options |= dict(suppress_tokens=None, begin_suppress_tokens=None)
    else:
        options |= dict(max_position_embeddings=64)
    config = getattr(transformers, f"{family}Config")(**options)
    model = getattr(transformers, family + FAMILIES[family])(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            scale = 0.1 if p.dim() == 1 else (1.0 if "embed" in name or "shared" in name else 1.5 * 32**-0.5)
            if p.requires_grad:
                p.copy_(scale * torch.randn(p.shape, generator=generator) + ("norm" in name and "weight" in name))
        head = torch.randn(N_VOCAB, 32, generator=generator)
        model.get_output_embeddings().weight = nn.Parameter(head)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_(generator=generator)
    return model


def untouched(family, seed=0):
    return copy.deepcopy(_built(family, seed))


def accelerated(model):
    model = copy.deepcopy(model)
    accelerate(model)
    return model


def source(model, left=False, batch=4, seed=0):
    """The arguments of generate. left: padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    if model.main_input_name == "input_features":
        return {"input_features": torch.randn(batch, 8, 14, generator=generator)}
    tokens = torch.randint(4, N_VOCAB, (batch, 9), generator=generator)
    real = torch.arange(9) < torch.tensor([9, 3, 6, 8])[torch.arange(batch) % 4, None]
    real = real.flip(1) if left else real
    return {"input_ids": tokens.masked_fill(~real, PAD), "attention_mask": real.long()}


def steps_in(call):
    """How many steps of fastattn's a call runs, and its result."""
    steps = 0

    def note(frame, event, _):
        nonlocal steps
        steps += event == "call" and frame.f_code is DecoderSteps.__call__.__code__

    sys.setprofile(note)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    return steps, result


def run(model, inputs, **options):
    torch.manual_seed(0)
    options = dict(max_new_tokens=12, do_sample=False) | options
    return model.generate(**inputs, **{n: make(model) if n in MADE else make for n, make in options.items()})


def compare(plain, ours, inputs, **options):
    """Equal tokens, by fastattn's steps."""
    expected = run(plain, inputs, **options)
    steps, found = steps_in(lambda: run(ours, inputs, **options))
    assert torch.equal(found, expected)
    assert steps > 0
    return expected


class Stop(transformers.StoppingCriteria):
    def __call__(self, input_ids, scores, **options):
        return (input_ids == 7).any(1) | torch.full((len(input_ids),), input_ids.shape[1] > 9)


class Streamer:
    def __init__(self):
        self.tokens = []

    def put(self, tokens):
        self.tokens.append(tokens.tolist())

    def end(self):
        self.tokens.append("end")


def combined(firsts, seconds, first, everyday):
    """All pairs; in the everyday tier those of one first value with some of the others."""
    pairs = [(a, b) for a in firsts for b in seconds]
    marks = [() if a == first and b in everyday else full for a, b in pairs]
    return [pytest.param(*pair, marks=mark) for pair, mark in zip(pairs, marks, strict=True)]


# Options of generate that are made for a model.
MADE = ("stopping_criteria", "assistant_model", "cache", "past_key_values", "custom_generate")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_beams", [1, 4])
def test_tokens(family, num_beams):
    plain = untouched(family)
    found = compare(plain, accelerated(plain), source(plain), num_beams=num_beams)
    assert len({tuple(tokens) for tokens in found.tolist()}) > 2


@pytest.mark.parametrize("family", tiers(FAMILIES, "M2M100"))
def test_sentences_end_at_different_steps(family):
    plain = untouched(family)
    ours, inputs = accelerated(plain), source(plain)
    first, *others = run(plain, inputs)[:, -12:].tolist()
    end = next(token for token in first if any(token not in tokens for tokens in others))
    for num_beams in (1, 3):
        found = compare(plain, ours, inputs, num_beams=num_beams, eos_token_id=[end, EOS])
        assert num_beams > 1 or len(set((found == PAD).sum(1).tolist())) > 1


OPTIONS = {
    "length penalty": dict(num_beams=3, length_penalty=0.3),
    "early stopping": dict(num_beams=3, early_stopping=True),
    "late stopping": dict(num_beams=3, early_stopping="never", length_penalty=2.0),
    "all beams": dict(num_beams=3, num_return_sequences=3),
    "forced tokens": dict(num_beams=2, forced_bos_token_id=8, forced_eos_token_id=EOS),
    "n-grams": dict(num_beams=2, no_repeat_ngram_size=2, repetition_penalty=1.3),
    "no EOS": dict(eos_token_id=N_VOCAB + 9, min_new_tokens=4),
    "sampling": dict(do_sample=True, top_k=20, temperature=0.8),
    "samples": dict(do_sample=True, num_return_sequences=5, top_p=0.9),
    "sampled beams": dict(do_sample=True, num_beams=3, num_return_sequences=2),
    "a prompt": dict(decoder_input_ids=torch.tensor([[3, 9, 14, 5]]).expand(4, -1), num_beams=2),
    "a mask of a prompt": dict(decoder_input_ids=torch.full((4, 2), 3), decoder_attention_mask=torch.ones(4, 2)),
    "a stopping criterion": dict(stopping_criteria=lambda _: transformers.StoppingCriteriaList([Stop()])),
    "scores": dict(output_scores=True),
}


EVERYDAY_OPTIONS = ("late stopping", "forced tokens", "n-grams", "samples", "sampled beams", "a prompt")
EVERYDAY_OPTIONS += ("a stopping criterion",)


@pytest.mark.parametrize("family, options", combined(FAMILIES, OPTIONS, "Marian", EVERYDAY_OPTIONS))
def test_options(family, options):
    plain = untouched(family)
    compare(plain, accelerated(plain), source(plain), **OPTIONS[options])


@pytest.mark.parametrize("family", tiers(TEXT, "Bart"))
@pytest.mark.parametrize("which", ["left", "no padding", "no mask", "a bool mask", "an encoder's output"])
def test_sources(family, which):
    plain = untouched(family)
    inputs = source(plain, left=which == "left")
    if which == "no padding":
        inputs = source(plain, batch=1)
    elif which == "no mask":
        del inputs["attention_mask"]
    elif which == "a bool mask":
        inputs["attention_mask"] = inputs["attention_mask"].bool()
    elif which == "an encoder's output":
        with torch.no_grad():
            output = plain.get_encoder()(**inputs)
        inputs = {"encoder_outputs": output, "attention_mask": inputs["attention_mask"]}
    for num_beams in (1, 3):
        given = {name: copy.copy(value) for name, value in inputs.items()}  # generate repeats an encoder's output
        assert torch.equal(run(plain, given, num_beams=num_beams), compare_ours(plain, inputs, num_beams))


def compare_ours(plain, inputs, num_beams):
    given = {name: copy.copy(value) for name, value in inputs.items()}
    steps, found = steps_in(lambda: run(accelerated(plain), given, num_beams=num_beams))
    assert steps > 0
    return found


def test_a_streamer_gets_each_token():
    plain = untouched("Marian")
    streamed = []
    for model in (plain, accelerated(plain)):
        streamer = Streamer()
        run(model, source(plain, batch=1), streamer=streamer)
        streamed.append(streamer.tokens)
    assert streamed[0] == streamed[1]
    assert len(streamed[0]) > 2


@full
@pytest.mark.parametrize("family", FAMILIES)
def test_random_problems(family):
    for seed in range(20):
        plain = untouched(family, seed)
        ours, inputs = accelerated(plain), source(plain, seed % 2 == 1, 1 + seed % 5, seed)
        for num_beams in (1, 2 + seed % 4):
            compare(plain, ours, inputs, num_beams=num_beams)


def test_weights_may_change_between_generations():
    """Also by .data, which changes neither a tensor's version nor its address."""
    plain, other = untouched("Marian"), untouched("Marian", 1)
    ours, inputs = accelerated(plain), source(plain)
    before = compare(plain, ours, inputs)
    for p, new in zip(ours.parameters(), other.parameters(), strict=True):
        p.data.copy_(new)
    ours.final_logits_bias = other.final_logits_bias
    assert not torch.equal(compare(other, ours, inputs), before)


def test_a_wrong_position_shows():
    plain = untouched("Marian")
    wrong = accelerated(plain)
    wrong.model.decoder.embed_positions.weight.data = wrong.model.decoder.embed_positions.weight.roll(1, 0)
    with pytest.raises(AssertionError):
        compare(plain, wrong, source(plain))


# What is transformers' own.


def _cache(model):
    caches = [transformers.DynamicCache(config=model.config) for _ in range(2)]
    return transformers.EncoderDecoderCache(*caches)


def test_a_cache_that_an_earlier_call_returned():
    plain = untouched("Marian")
    ours, found = accelerated(plain), []
    for model in (plain, ours):
        before = run(model, source(plain), return_dict_in_generate=True, max_new_tokens=4)
        more = {"decoder_input_ids": before.sequences, CACHE: before[CACHE]}
        found.append(steps_in(lambda model=model, more=more: model.generate(**source(plain), **more, max_new_tokens=9)))
    assert found[1][0] == 0
    assert torch.equal(found[0][1], found[1][1])


CACHE = "cache" if "cache" in transformers.modeling_outputs.Seq2SeqLMOutput.__annotations__ else "past_key_values"


def own_loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **inputs):
    cache = inputs[CACHE]
    assert type(cache) is transformers.EncoderDecoderCache
    model(**model.prepare_inputs_for_generation(input_ids, **inputs))
    assert cache.get_seq_length() == 1
    cache.batch_select_indices(torch.tensor([0]))
    return cache.self_attention_cache.layers[0].keys


THEIRS = {
    "an output": dict(return_dict_in_generate=True, output_scores=True),
    "attention weights": dict(return_dict_in_generate=True, output_attentions=True),
    "hidden states": dict(output_hidden_states=True),
    "no cache": dict(use_cache=False),
    "a static cache": dict(cache_implementation="static"),
    "a cache": {CACHE: _cache},
    "an assistant": dict(assistant_model=lambda _: untouched("Marian", 1)),
    "tokens of the source": dict(prompt_lookup_num_tokens=2),
    "a masked prompt": dict(
        decoder_input_ids=torch.tensor([[3, 9, 14, 5]]).expand(4, -1),
        decoder_attention_mask=torch.tensor([[1, 0, 1, 1]]).expand(4, -1),
    ),
    "few tokens": dict(max_new_tokens=1),
    "many samples": dict(num_beams=1, num_return_sequences=20, do_sample=True),
    "many beams": dict(num_beams=20),
    "a long prompt": dict(decoder_input_ids=torch.arange(3, 40).expand(4, -1)),
    "more tokens than positions": dict(
        max_new_tokens=100, stopping_criteria=OPTIONS["a stopping criterion"]["stopping_criteria"]
    ),
    "a loop": dict(custom_generate=lambda _: own_loop),
}


EVERYDAY_CALLS = ("an output", "no cache", "a static cache", "a cache", "a masked prompt", "few tokens", "a loop")


@pytest.mark.parametrize("num_beams, options", combined((1, 3), THEIRS, 1, EVERYDAY_CALLS))
def test_calls_of_transformers(num_beams, options):
    if num_beams > 1 and options in ("an assistant", "tokens of the source"):
        pytest.skip("transformers has no beams there")
    if options == "an assistant" and CACHE == "past_key_values":
        pytest.skip("transformers 5.15 itself raises there")
    plain, options = untouched("Marian"), dict(num_beams=num_beams) | THEIRS[options]
    inputs = source(plain, batch=1 if {"assistant_model", "prompt_lookup_num_tokens"} & options.keys() else 4)
    expected = run(plain, inputs, **options)
    steps, found = steps_in(lambda: run(accelerated(plain), inputs, **options))
    assert steps == 0
    if not isinstance(expected, torch.Tensor):
        assert type(found) is type(expected)
        expected, found = expected.sequences, found.sequences
    torch.testing.assert_close(found, expected)


def _hook(module, *_):
    module.calls = getattr(module, "calls", 0) + 1


def _own_forward(module):
    module.forward = functools.partial(type(module).forward, module)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Shifted(nn.Module):
    def forward(self, weight):
        return weight + 0.1


def _double(model):
    model.model.decoder.layers[1].encoder_attn.v_proj.__class__ = Doubled


def _subclass(module):
    module.__class__ = type("Other", (type(module),), {})


def _train(model):
    for layer in model.model.decoder.layers:
        layer.dropout = layer.activation_dropout = 0.0
        layer.train()


def _shift(model):
    parametrize.register_parametrization(model.model.decoder.layers[0].fc1, "weight", Shifted())


CHANGES = {
    "hook of the model": lambda model: model.register_forward_hook(_hook),
    "hook of its body": lambda model: model.model.register_forward_hook(_hook),
    "hook of the decoder": lambda model: model.model.decoder.register_forward_pre_hook(_hook),
    "hook of the embedding": lambda model: model.model.decoder.embed_tokens.register_forward_hook(_hook),
    "hook of positions": lambda model: model.model.decoder.embed_positions.register_forward_hook(_hook),
    "hook of the first norm": lambda model: model.model.decoder.layernorm_embedding.register_forward_hook(_hook),
    "hook of the last norm": lambda model: model.model.decoder.layer_norm.register_forward_hook(_hook),
    "hook of a layer": lambda model: model.model.decoder.layers[1].register_forward_hook(_hook),
    "hook of attention": lambda model: model.model.decoder.layers[1].encoder_attn.register_forward_hook(_hook),
    "hook of a map": lambda model: model.model.decoder.layers[0].self_attn.k_proj.register_forward_hook(_hook),
    "hook of a norm": lambda model: model.model.decoder.layers[0].final_layer_norm.register_forward_hook(_hook),
    "hook of an activation": lambda model: model.model.decoder.layers[0].activation_fn.register_forward_hook(_hook),
    "forward of the model": _own_forward,
    "forward of the decoder": lambda model: _own_forward(model.model.decoder),
    "forward of a layer": lambda model: _own_forward(model.model.decoder.layers[0]),
    "another class of map": _double,
    "another class of model": _subclass,
    "another class of decoder": lambda model: _subclass(model.model.decoder),
    "another class of layer": lambda model: _subclass(model.model.decoder.layers[0]),
    "another activation": lambda model: setattr(model.model.decoder.layers[1], "activation_fn", nn.Tanh()),
    "a parametrisation": _shift,
    "max_norm": lambda model: setattr(model.model.decoder.embed_tokens, "max_norm", 1.0),
    "training mode": _train,
    "compiled": lambda model: model.model.decoder.compile(backend="eager"),
    "eager attention": lambda model: model.set_attn_implementation("eager"),
}


EVERYDAY_CHANGES = ("hook of the model", "hook of the decoder", "hook of a map", "forward of a layer", "training mode")
EVERYDAY_CHANGES += ("another class of layer", "a parametrisation")


@pytest.mark.parametrize("change", tiers(CHANGES, *EVERYDAY_CHANGES))
def test_changed_models(change):
    """Where a module that a step skips is changed, transformers' generate is its own; fastattn.generate raises."""
    plain = untouched("MBart")
    ours, inputs = accelerated(plain), source(plain)
    for model in (plain, ours):
        CHANGES[change](model)
    expected = run(plain, inputs, num_beams=2)
    steps, found = steps_in(lambda: run(ours, inputs, num_beams=2))
    assert steps == 0
    assert torch.equal(found, expected)
    if change != "training mode":  # fastattn.generate decodes in eval mode
        with pytest.raises(ValueError, match="cannot decode this model, use model.generate: "):
            generate.greedy(ours, inputs["input_ids"], max_len=5, bos_idx=3, eos_idx=EOS)


def test_the_output_head_is_called():
    plain = untouched("Bart")
    ours = accelerated(plain)
    for model in (plain, ours):
        model.lm_head.register_forward_hook(lambda *call: call[-1].roll(1, -1))
        model.lm_head.register_forward_hook(_hook)
    compare(plain, ours, source(plain))
    assert ours.lm_head.calls == plain.lm_head.calls == 12


def test_global_hooks_and_modes():
    """16 bits round otherwise, and other roundings choose other tokens."""
    plain = untouched("Marian")
    ours, inputs = accelerated(plain), source(plain)
    handle = nn.modules.module.register_module_forward_hook(_hook)
    try:
        assert steps_in(lambda: run(ours, inputs))[0] == 0
    finally:
        handle.remove()
    with use_backend("reference"):
        assert steps_in(lambda: run(ours, inputs))[0] == 0
    with torch.autocast("cpu", torch.bfloat16):
        assert steps_in(lambda: run(ours, inputs))[0] == 0
    assert steps_in(lambda: run(ours, inputs))[0] == 12
    assert steps_in(lambda: run(ours.double(), inputs))[0] == 12
    assert steps_in(lambda: run(ours.bfloat16(), inputs))[0] == 0
    for options in (dict(layers=False), dict(attention=False)):
        half = copy.deepcopy(plain)
        accelerate(half, **options)
        steps, found = steps_in(lambda model=half: run(model, inputs))
        assert steps == 0
        assert torch.equal(found, run(plain, inputs))


def test_padding_in_a_prompt():
    """M2M100 gives it no position, and counts the positions after it without it."""
    plain = untouched("M2M100")
    ours, prompt = accelerated(plain), torch.tensor([[3, PAD, 9]]).expand(4, -1)
    steps, found = steps_in(lambda: run(ours, source(plain), decoder_input_ids=prompt))
    assert steps == 0
    assert torch.equal(found, run(plain, source(plain), decoder_input_ids=prompt))
    plain.config.decoder_start_token_id = ours.config.decoder_start_token_id = PAD
    plain.generation_config.decoder_start_token_id = ours.generation_config.decoder_start_token_id = PAD
    compare(plain, ours, source(plain))
    plain.get_output_embeddings().weight.data[PAD] *= 3  # padding is chosen
    found = compare(plain, accelerated(plain), source(plain), num_beams=3, eos_token_id=N_VOCAB + 1)
    assert (found[:, 1:-1] == PAD).any()


def test_a_source_without_tokens():
    plain = untouched("Marian")
    inputs = source(plain)
    inputs["attention_mask"][1] = 0
    ours = accelerated(plain)
    assert steps_in(lambda: run(ours, inputs))[0] == 0


class OtherMarian(transformers.MarianMTModel):
    pass


def test_classes():
    """Subclasses are left; copies and pickles decode so too; restore gives the class back."""
    plain = untouched("Marian")
    ours, inputs = accelerated(plain), source(plain)
    report = accelerate(plain)
    assert ("", "MarianMTModel", None) in report.taken
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    expected = run(untouched("Marian"), inputs)
    for model in (copy.deepcopy(ours), torch.load(buffer, weights_only=False), plain):
        steps, found = steps_in(lambda model=model: run(model, inputs))
        assert steps > 0
        assert torch.equal(found, expected)
    restore(plain)
    assert type(plain) is transformers.MarianMTModel
    assert steps_in(lambda: run(plain, inputs))[0] == 0
    other = OtherMarian(plain.config).eval()
    assert ("", "OtherMarian") in [entry[:2] for entry in accelerate(other).left]
    assert type(other) is OtherMarian


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_generate_is_transformers_own():
    plain = untouched("Marian")
    ours = accelerated(plain).cuda()
    inputs = {name: t.cuda() for name, t in source(plain).items()}
    steps, found = steps_in(lambda: run(ours, inputs))
    assert steps == 0
    assert torch.equal(found, run(plain.cuda(), inputs))


# By name, with fastattn's rules.


def probabilities(model, tokens):
    """As plain_search.of_model, of one sentence (1, Ls)."""

    @functools.cache
    @torch.no_grad()
    def of_prefix(prefix):
        inputs = {"input_ids": tokens, "attention_mask": (tokens != PAD).long()}
        logits = model(**inputs, decoder_input_ids=torch.tensor([prefix])).logits
        return logits[0, -1].double().log_softmax(-1).tolist()

    return lambda prefix: of_prefix(tuple(prefix))


@pytest.mark.parametrize("family", tiers(TEXT, "M2M100"))
def test_searches_by_name(family):
    plain = untouched(family)
    ours, tokens = accelerated(plain).train(), source(plain)["input_ids"][:3]
    limits = dict(max_len=5, bos_idx=3, eos_idx=37)
    searches = [probabilities(plain, sentence[None]) for sentence in tokens]
    expected = [plain_search.greedy(search, **limits) for search in searches]
    steps, found = steps_in(lambda: generate.greedy(ours, tokens, **limits))
    assert steps > 0
    assert ours.training
    assert found == generate.greedy(AveragedModel(ours), tokens, **limits) == expected
    beams = generate.beam_search(ours, tokens, beam_size=3, length_penalty=0.7, n_best=2, **limits)
    for search, found in zip(searches, beams, strict=True):
        expected = plain_search.beam_search(search, 3, length_penalty=0.7, n_best=2, **limits)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        torch.testing.assert_close([s for _, s in found], [s for _, s in expected], rtol=0, atol=1e-4)
    sampled = [generate.sample(ours, tokens, top_k=1, **limits), generate.greedy(ours, tokens, **limits)]
    assert sampled[0] == sampled[1]
    found = Translator(ours, 3, 6, PAD, PAD, 3, 37).translate(tokens)
    assert all(sentence[0] == 3 and len(sentence) > 1 for sentence in found)


def test_searches_that_cannot_be():
    ours, tokens = accelerated(untouched("Bart")), source(untouched("Bart"))["input_ids"]

    def greedy(model=ours, tokens=tokens, max_len=5, eos_idx=EOS):
        return generate.greedy(model, tokens, max_len=max_len, bos_idx=3, eos_idx=eos_idx)

    with pytest.raises(TypeError, match="got BartForConditionalGeneration, which has no start_decoding"):
        greedy(untouched("Bart"))
    with pytest.raises(TypeError, match="WhisperForConditionalGeneration reads no text: use model.generate"):
        greedy(accelerated(untouched("Whisper")))
    with pytest.raises(TypeError, match="src_seq must be a Tensor, got list"):
        greedy(tokens=tokens.tolist())
    with pytest.raises(ValueError, match=r"src_seq has shape \(9,\), expected \(B, L\)"):
        greedy(tokens=tokens[0])
    with pytest.raises(TypeError, match="src_seq"):
        greedy(tokens=tokens.float())
    with pytest.raises(ValueError, match="src_seq"):
        greedy(tokens=tokens + N_VOCAB)
    with pytest.raises(ValueError, match="src_seq has a sentence without tokens"):
        greedy(tokens=torch.full_like(tokens, PAD))
    with pytest.raises(ValueError, match="max_len=65 is more than the 64 positions of the decoder"):
        greedy(max_len=65)
    with pytest.raises(ValueError, match=f"eos_idx must be below {N_VOCAB}"):
        greedy(eos_idx=N_VOCAB)
    with pytest.raises(ValueError, match="src_pad_idx is 0, and the model's 1"):
        Translator(ours, 2, 9, 0, PAD, 3, EOS)
