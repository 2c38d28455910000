"""Tiny models of transformers with random weights, with their eager attention and with fastattn's."""

import pytest
import torch
import torch.nn.functional as F

transformers = pytest.importorskip("transformers")

from huggingface_models import (  # noqa: E402
    DEVICE,
    LENGTHS,
    MODELS,
    NOT_GENERATING,
    PAIR,
    REFUSED,
    STACK,
    build,
    build_refused,
    check_padded_batch,
    inputs_for,
    skip_unless_traced,
)
from transformers.masking_utils import (  # noqa: E402
    bidirectional_mask_function,
    causal_mask_function,
    eager_mask,
    sdpa_mask,
)

from fastattn import use_backend  # noqa: E402
from fastattn.integrations import huggingface  # noqa: E402
from fastattn.masks import AttentionMask  # noqa: E402

EVERYDAY = ("marian", "t5", "llama")
GENERATE = [pytest.param(n, marks=() if n in EVERYDAY else pytest.mark.full) for n in MODELS if n not in NOT_GENERATING]


def solve(model, **options):
    """Logits where they count, and the gradients of a loss over them."""
    inputs, real = inputs_for(model)
    model.zero_grad()
    logits = model(**inputs, **options).logits[real]
    F.cross_entropy(logits, torch.arange(len(logits), device=DEVICE) % 99).backward()
    return logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def check(ours, theirs):
    (logits, grads), (expected_logits, expected_grads) = ours, theirs
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-4)
    assert grads.keys() == expected_grads.keys()
    for n, expected in expected_grads.items():
        assert (grads[n] - expected).norm() <= 1e-3 * expected.norm() + 1e-6, n


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name):
    model = build(name)
    theirs = solve(model)
    assert huggingface.use(model) is model
    ours = solve(model)
    check(ours, theirs)
    if name == "t5":
        (bias,) = (n for n in ours[1] if "encoder" in n and "relative_attention_bias" in n)
        assert ours[1][bias].norm() > 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_a_padded_batch_equals_its_sentences_alone(name):
    check_padded_batch(huggingface.use(build(name)))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", GENERATE)
def test_generation(name, beams, cache):
    """Greedy and beams; decoder-only models are padded on the left."""
    model = build(name)
    inputs, _ = inputs_for(model, left=not model.config.is_encoder_decoder)
    inputs = {n: t for n, t in inputs.items() if not n.startswith("decoder")}
    options = dict(max_new_tokens=9, min_new_tokens=9, num_beams=beams, do_sample=False)
    options |= dict(cache_implementation=cache, disable_compile=True)
    expected = model.generate(**inputs, **options)
    found = huggingface.use(model).generate(**inputs, **options)
    assert torch.equal(found, expected) and found.shape[1] > 4


def test_a_prompt_that_fills_a_static_cache():
    model = build("llama")
    inputs, _ = inputs_for(model, left=True)
    options = dict(max_new_tokens=1, do_sample=False, cache_implementation="static", disable_compile=True)
    expected = model.generate(**inputs, **options)
    assert torch.equal(huggingface.use(model).generate(**inputs, **options), expected)


def test_several_tokens_after_a_cache():
    """A causal mask that counts from the last key."""
    model = build("llama")
    ids = inputs_for(model)[0]["input_ids"][:1]
    found = []
    for treat in (lambda m: m, huggingface.use):
        model = treat(model)
        with torch.no_grad():
            past = model(ids[:, :4], use_cache=True).past_key_values
            found.append(model(ids[:, 4:], past_key_values=past).logits)
    torch.testing.assert_close(*found, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_a_mask_from_the_user(kind):
    """A 4-D mask reaches the attention unchanged."""
    model, L = build("llama"), max(LENGTHS)
    ids = inputs_for(model)[0]["input_ids"]
    mask = (torch.rand(3, 1, L, L, generator=torch.Generator().manual_seed(1)) < 0.7).tril() | torch.eye(L).bool()
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min).to(DEVICE)
    with torch.no_grad():
        expected = model(ids, attention_mask=additive).logits  # eager accepts no other
        given = mask.to(DEVICE) if kind == torch.bool else additive
        found = huggingface.use(model)(ids, attention_mask=given).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_packed_positions():
    """Two sentences in a row, separated by position_ids: equal to each of them alone."""
    model = huggingface.use(build("llama"))
    ids = inputs_for(model)[0]["input_ids"][:1]
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]], device=DEVICE)
    with torch.no_grad():
        packed = model(ids, position_ids=places, use_cache=False).logits
        alone = [model(part).logits for part in (ids[:, :4], ids[:, 4:])]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=0, atol=1e-4)


def test_sliding_windows():
    options = STACK | dict(num_key_value_heads=2, sliding_window=3)
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**options)).to(DEVICE).eval()
    model.set_attn_implementation("eager")
    theirs = solve(model)
    check(solve(huggingface.use(model)), theirs)


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_gradient_checkpointing(name):
    model = huggingface.use(build(name, **{"dropout" if name == "bart" else "dropout_rate": 0.0})).train()
    expected = solve(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    check(solve(model), expected)


def test_attention_weights():
    model = build("bart")
    inputs, real = inputs_for(model)
    with torch.no_grad():
        expected = model(**inputs, output_attentions=True).encoder_attentions
        found = huggingface.use(model)(**inputs, output_attentions=True).encoder_attentions
    for ours, theirs in zip(found, expected, strict=True):
        visible = real[:, None, :, None].expand_as(ours)
        torch.testing.assert_close(ours[visible], theirs[visible], rtol=0, atol=1e-5)


def test_dropout_is_drawn_by_fastattn():
    """Equal seeds give equal results, other seeds other results; only in training."""
    model = huggingface.use(build("bart", attention_dropout=0.4))
    inputs, real = inputs_for(model)

    def logits(seed):
        torch.manual_seed(seed)
        with torch.no_grad():
            return model(**inputs).logits[real]

    assert torch.equal(logits(1), logits(2))
    model.train()
    assert torch.equal(logits(1), logits(1)) and not torch.equal(logits(1), logits(2))


def test_use_backend_is_followed():
    """It follows use_backend: an unsupported backend raises."""
    model = huggingface.use(build("bart"))
    expected = solve(model)
    with use_backend("reference"):
        check(solve(model), expected)
    with use_backend("triton"), pytest.raises(RuntimeError, match="triton"):
        solve(model.double())


def test_masks_are_structured_and_shared(monkeypatch):
    """No tensor of the scores' size is made for padding and causality, and all layers of a stack share one mask."""
    model, masks = huggingface.use(build("marian")), []
    original = huggingface.scaled_dot_product_attention

    def note(query, key, value, mask, *args, **options):
        masks.append(mask)
        return original(query, key, value, mask, *args, **options)

    monkeypatch.setattr(huggingface, "scaled_dot_product_attention", note)
    with torch.no_grad():
        model(**inputs_for(model)[0])
    assert len(masks) == 6 and all(isinstance(mask, AttentionMask) and mask.attn_mask is None for mask in masks)
    assert masks[0] is masks[1] and len({id(mask) for mask in masks}) == 3
    assert masks[2].has_band and masks[2].key_padding is not None


@pytest.mark.parametrize("name", REFUSED)
def test_use_refuses_what_it_does_not_compute(name):
    """Before anything is changed."""
    model = build_refused(name)
    implementation = model.config._attn_implementation
    with pytest.raises(ValueError, match=f"{type(model).__name__}: .*{REFUSED[name][1]}"):
        huggingface.use(model)
    assert model.config._attn_implementation == implementation


def test_use_needs_a_model_of_transformers():
    with pytest.raises(TypeError, match="hold a transformers.PreTrainedModel, got Linear"):
        huggingface.use(torch.nn.Linear(2, 2))


READERS = {  # of the mask: a router slices it, an attention adds it to its scores, another reads its dtype
    "NllbMoe": ("NllbMoeForConditionalGeneration", PAIR | dict(num_experts=4, encoder_sparse_step=1)),
    "BigBirdPegasus": ("BigBirdPegasusForConditionalGeneration", PAIR),
    "Doge": ("DogeForCausalLM", STACK),
}


@pytest.mark.parametrize("name", READERS)
def test_models_that_read_the_mask(name):
    kind, options = READERS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**options)).to(DEVICE).eval()
    theirs = solve(model)
    check(solve(huggingface.use(model)), theirs)


@pytest.mark.parametrize("config", [transformers.LlamaConfig, transformers.NllbMoeConfig])  # with "sdpa", without
@pytest.mark.parametrize("mask_function", [causal_mask_function, bidirectional_mask_function])
def test_a_mask_is_read_as_transformers_own(config, mask_function):
    """Several tokens after a cache, with padding."""
    padding = torch.tensor([[False, True, True, True, True], [True, True, True, True, False]], device=DEVICE)
    made_for = dict(q_offset=2, mask_function=mask_function, attention_mask=padding, device=DEVICE)
    made_for |= dict(dtype=torch.float16, config=config())
    mask = huggingface.attention_mask(2, 3, 5, **made_for)
    expected = (sdpa_mask if config is transformers.LlamaConfig else eager_mask)(2, 3, 5, **made_for)
    assert isinstance(mask, AttentionMask) and mask.dtype is expected.dtype and mask.shape == expected.shape
    ones = torch.ones_like(expected)
    for read in (
        lambda mask: mask[:, :, -1],
        lambda mask: mask == 0,
        lambda mask: mask != 0,
        lambda mask: torch.cat([mask, mask], -1),
        lambda mask: ones.masked_fill(mask != 0, 0),
        *([lambda mask: ~mask, lambda mask: mask & ones] if expected.dtype is torch.bool else []),
        *([lambda mask: ones + mask, lambda mask: mask * 2] if expected.dtype is not torch.bool else []),
    ):
        assert torch.equal(read(mask), read(expected))
    with pytest.raises(AttributeError, match="the mask of attn_implementation='fastattn' has no 'masked_fill_'"):
        mask.masked_fill_(ones == 0, 0)


def test_what_changes_the_result_is_refused():
    gemma = build_refused("Gemma2")
    gemma.config._attn_implementation = "fastattn"  # by name, without use
    with pytest.raises(ValueError, match="Gemma2Attention: scores are capped"):
        gemma(torch.tensor([[3, 4]], device=DEVICE))
    q = torch.ones(1, 2, 3, 4, device=DEVICE)
    for name in ("softcap", "s_aux", "sinks", "indices", "block_indices", "cache", "head_mask"):
        with pytest.raises(ValueError, match="Linear: .*use another attn_implementation"):
            huggingface.attention_forward(torch.nn.Linear(1, 1), q, q, q, None, **{name: q})


def test_arguments_that_are_none():
    """None for an argument means its default, as in transformers' attention functions and configs."""
    q, module = torch.randn(1, 2, 3, 4, device=DEVICE), torch.nn.Linear(1, 1)
    names = ["dropout", "scaling", "is_causal", "position_bias", "output_attentions"]
    names += ["softcap", "s_aux", "sliding_window"]
    out, weights = huggingface.attention_forward(module, q, q, q, None, **dict.fromkeys(names))
    expected = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    assert weights is None
    module.is_causal = None
    expected = F.scaled_dot_product_attention(q, q, q).transpose(1, 2)
    torch.testing.assert_close(huggingface.attention_forward(module, q, q, q, None)[0], expected, rtol=0, atol=1e-5)


def test_an_encoder_decoder_of_two_models():
    encoder, decoder = build("bert"), build("gpt2", add_cross_attention=True)
    model = transformers.EncoderDecoderModel(encoder=encoder.bert, decoder=decoder).eval()
    ids, mask = (inputs_for(encoder)[0][n] for n in ("input_ids", "attention_mask"))
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, decoder_input_ids=ids).logits
        found = huggingface.use(model)(ids, attention_mask=mask, decoder_input_ids=ids).logits
    assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == {"fastattn"}
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


TASKS = dict.fromkeys(MODELS, "SEQ_2_SEQ_LM") | dict.fromkeys(("gpt2", "llama"), "CAUSAL_LM")
TASKS |= dict.fromkeys(("bert", "roberta"), "FEATURE_EXTRACTION")
TASKS |= dict.fromkeys(("whisper", "vit"))  # none has input_ids, which the classes of tasks pass


@pytest.mark.parametrize("name", MODELS)
def test_lora(name):
    """With a task type peft's classes pass output_attentions=None. `use` accepts the adapted model too."""
    peft = pytest.importorskip("peft")
    options = dict(target_modules="all-linear", init_lora_weights=False, task_type=TASKS[name])
    adapted, found = peft.get_peft_model(build(name), peft.LoraConfig(**options)), []
    for treat in (lambda m: m, huggingface.use):
        found.append(solve(treat(adapted)))
    check(*found)


@pytest.mark.full
def test_use_accepts_a_compiled_model():
    """Also after a call."""
    model = build("bert")
    compiled, (inputs, real) = torch.compile(model, backend="eager"), inputs_for(model)
    with torch.no_grad():
        expected = compiled(**inputs).logits[real]
        assert huggingface.use(compiled) is compiled and model.config._attn_implementation == "fastattn"
        torch.testing.assert_close(compiled(**inputs).logits[real], expected, rtol=0, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("name", ["bart", "t5", "llama", "bert"])
def test_compiled_in_one_graph(name):
    model = build(name)
    inputs, real = inputs_for(model)
    with torch.no_grad():
        skip_unless_traced(model, inputs)
        huggingface.use(model)
        expected = model(**inputs).logits
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs).logits
    torch.testing.assert_close(compiled[real], expected[real], rtol=0, atol=1e-4)
