"""What only transformers' models have: fastattn's attention in their AttentionInterface, caches, outputs, files."""

import copy
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from families import (
    DEVICE,
    FAMILIES,
    GENERATING,
    GROUPED,
    HUGGINGFACE,
    LENGTHS,
    PAIR,
    STACK,
    TOKENS,
    by_fastattn,
    check,
    eager,
    outputs_of,
    pair,
    solve,
    tiers,
    tiny,
    ways,
)
from torch._dynamo.testing import CompileCounterWithBackend

transformers = pytest.importorskip("transformers")

from transformers.masking_utils import (  # noqa: E402
    bidirectional_mask_function,
    causal_mask_function,
    eager_mask,
    sdpa_mask,
)

from fastattn import accelerate, restore, use_backend  # noqa: E402
from fastattn.integrations import huggingface  # noqa: E402
from fastattn.masks import AttentionMask  # noqa: E402

full = pytest.mark.full
CLOSE = dict(rtol=0, atol=1e-4)


def build(name, **changes):
    return FAMILIES[name].build(**changes)


def attention_alone(name, **changes):
    """The model as it is, and with fastattn's attention."""
    theirs = build(name, **changes)
    return theirs, huggingface.use(copy.deepcopy(theirs))


TREATMENTS = {"accelerate": lambda name: pair(name)[:2], "attention": attention_alone}
treatments = pytest.mark.parametrize("treatment", TREATMENTS)


# Inputs and outputs.


@pytest.mark.bug_class("T24")
@treatments
@pytest.mark.parametrize("name", tiers(HUGGINGFACE, "marian", "t5", "bert", "llama"))
def test_a_padded_batch_equals_its_sentences_alone(name, treatment):
    model = TREATMENTS[treatment](name)[1]
    with torch.no_grad():
        inputs, real = FAMILIES[name].inputs(model)
        logits = model(**inputs).logits
        for n in range(3):
            alone, there = FAMILIES[name].inputs(model, slice(n, n + 1))
            torch.testing.assert_close(logits[n][real[n]], model(**alone).logits[there], **CLOSE)


EVERYDAY = ("marian accelerate 2 static", "marian attention 1 dynamic", "gated t5 accelerate 1 dynamic")
EVERYDAY += ("t5 attention 2 dynamic", "llama attention 1 static")
GENERATIONS = itertools.product(GENERATING, TREATMENTS, "12", ("dynamic", "static"))


@pytest.mark.parametrize("how", tiers(map(" ".join, GENERATIONS), *EVERYDAY))
def test_generation(how):
    """By greedy search and beams; decoder-only models are padded on the left."""
    name, treatment, beams, cache = how.rsplit(maxsplit=3)
    theirs, ours = TREATMENTS[treatment](name)
    inputs, _ = FAMILIES[name].inputs(theirs, left=not theirs.config.is_encoder_decoder)
    inputs = {n: t for n, t in inputs.items() if not n.startswith("decoder")}
    options = dict(max_new_tokens=9, min_new_tokens=9, num_beams=int(beams), do_sample=False)
    options |= dict(cache_implementation=cache, disable_compile=True)
    expected = theirs.generate(**inputs, **options)
    assert torch.equal(ours.generate(**inputs, **options), expected) and expected.shape[1] > 4


def test_a_prompt_that_fills_a_static_cache():
    theirs, ours = attention_alone("llama")
    inputs, _ = FAMILIES["llama"].inputs(theirs, left=True)
    options = dict(max_new_tokens=1, do_sample=False, cache_implementation="static", disable_compile=True)
    assert torch.equal(ours.generate(**inputs, **options), theirs.generate(**inputs, **options))


@pytest.mark.parametrize("window", [None, 6])  # longer than the new tokens
def test_several_tokens_after_a_cache(window):
    """A causal mask that counts from the last key."""
    theirs = tiny("MistralForCausalLM", "MistralConfig", sliding_window=window, **GROUPED)
    models, found = (theirs, huggingface.use(copy.deepcopy(theirs))), []
    ids = FAMILIES["llama"].inputs(models[0])[0]["input_ids"][:1]
    with torch.no_grad(), by_fastattn():
        for model in models:
            past = model(ids[:, :4], use_cache=True).past_key_values
            found.append(model(ids[:, 4:], past_key_values=past).logits)
    torch.testing.assert_close(*found, **CLOSE)


@pytest.mark.bug_class("T25")
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@pytest.mark.parametrize("name", tiers(["llama", "bert", "gpt2"], "llama"))
def test_a_mask_from_the_user(name, kind):
    """A 4-D mask is obeyed, of bools or of numbers to add. Eager attention accepts no bools."""
    (theirs, ours, *_), length = pair(name), max(LENGTHS)
    ids = FAMILIES[name].inputs(theirs)[0]["input_ids"]
    mask = (torch.rand(3, 1, length, length, generator=torch.Generator().manual_seed(1)) < 0.7).tril()
    mask = (mask | torch.eye(length).bool()).to(DEVICE)
    additive = torch.zeros(mask.shape, device=DEVICE).masked_fill(~mask, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = theirs(ids, attention_mask=additive).logits
        found = ours(ids, attention_mask=mask if kind == torch.bool else additive).logits
    torch.testing.assert_close(found, expected, **CLOSE)


def test_large_numbers_in_float16():
    """BART's encoder clamps them."""
    *models, _, inputs, real, _ = pair("bart")
    for model in models:
        encoder = model.half().get_encoder()
        norm = encoder.layers[-1].final_layer_norm
        norm.weight.data.fill_(300), norm.bias.data.fill_(65_500)
        with by_fastattn():
            out = encoder(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state[real]
        assert (out == torch.finfo(torch.float16).max - 1000).all()


def test_packed_positions():
    """Two sentences in a row, separated by position_ids: equal to each of them alone."""
    model = attention_alone("llama")[1]
    ids = FAMILIES["llama"].inputs(model)[0]["input_ids"][:1]
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]], device=DEVICE)
    with torch.no_grad():
        packed = model(ids, position_ids=places, use_cache=False).logits
        alone = [model(part).logits for part in (ids[:, :4], ids[:, 4:])]
    torch.testing.assert_close(packed, torch.cat(alone, 1), **CLOSE)


@pytest.mark.parametrize("name", tiers([n for n in HUGGINGFACE if n != "gpt2"], "bart"))  # gpt2's interface gives none
def test_attentions_and_hidden_states(name):
    """Both are eager's, and calls after them still give the same."""
    models = pair(name)
    inputs, real = FAMILIES[name].inputs(models.theirs)
    with torch.no_grad():
        expected, found = (
            model(**inputs, output_attentions=True, output_hidden_states=True) for model in (models.theirs, models.ours)
        )
    kinds = [n for n in expected if n.endswith(("attentions", "hidden_states")) and expected[n] is not None]
    assert len(kinds) >= 2
    for kind in kinds:
        expected_all, found_all = ((t,) if isinstance(t, torch.Tensor) else t for t in (expected[kind], found[kind]))
        for a, b in zip(found_all, expected_all, strict=True):
            if real.dim() == 2 and a.shape[-2] == real.shape[1]:
                rows = real[:, None, :, None].expand_as(a) if a.dim() == 4 else real[:, :, None].expand_as(a)
                a, b = a[rows], b[rows]
            torch.testing.assert_close(a, b, **CLOSE)
    models.compare()


@full
@pytest.mark.parametrize("activation", ["relu", "silu", "gelu_new", "tanh", "quick_gelu"])
@pytest.mark.parametrize("name", ["marian", "mbart", "bert", "vit"])
def test_activations(name, activation):
    """Also those that fastattn does not know."""
    pair(name, **{"hidden_act" if name in ("bert", "vit") else "activation_function": activation}).compare()


@full
@pytest.mark.parametrize("name", ["marian", "t5"])
def test_one_compiled_graph_for_all_lengths(name):
    """Source and target may be equally long. Without an eager call before, in a thread whose state is new."""
    theirs, ours, *_ = pair(name)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(ours, dynamic=True, backend=counter)

    def call(model, batch, source, target):
        drawn = (torch.randint(3, 99, (batch, n), generator=torch.Generator().manual_seed(n)) for n in (source, target))
        ids, decoder_ids = (t.to(DEVICE) for t in drawn)
        with torch.no_grad():
            return model(input_ids=ids, attention_mask=torch.ones_like(ids), decoder_input_ids=decoder_ids).logits

    sizes = (3, 7, 5), (2, 9, 4), (4, 6, 6)
    with ThreadPoolExecutor(1) as pool:
        found = list(pool.map(lambda of: call(compiled, *of), sizes))
    torch.testing.assert_close(found, [call(theirs, *of) for of in sizes], **CLOSE)
    assert counter.frame_count == 1


@full
def test_use_accepts_a_compiled_model():
    """Also after a call."""
    model = build("bert")
    compiled, (inputs, real) = torch.compile(model, backend="eager"), FAMILIES["bert"].inputs(model)
    with torch.no_grad():
        expected = compiled(**inputs).logits[real]
        assert huggingface.use(compiled) is compiled and model.config._attn_implementation == "fastattn"
        torch.testing.assert_close(compiled(**inputs).logits[real], expected, **CLOSE)


# The model's own tools.


@pytest.mark.parametrize("name", tiers(HUGGINGFACE, "bart"))
def test_save_pretrained(name, tmp_path):
    """What is saved is the library's own model."""
    models = pair(name)
    models.ours.save_pretrained(tmp_path)
    loaded = eager(type(models.theirs).from_pretrained(tmp_path))
    if "pickle" not in FAMILIES[name].lacks:  # a parametrised module has a class of its own
        assert [type(m) for m in loaded.modules()] == [type(m) for m in models.theirs.modules()]
    found, expected = (models.solve(model, grad=False).outputs[0] for model in (loaded, models.theirs))
    assert torch.equal(found, expected)


@full
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", [n for n in HUGGINGFACE if "sdpa" not in FAMILIES[n].lacks])
def test_another_attention_is_set_later(name, implementation):
    """It is called, and restore still undoes everything."""
    models = pair(name)
    models.ours.set_attn_implementation(implementation)
    models.compare()
    assert "whole" not in ways(models.ours, lambda: models.solve(models.ours))
    restore(models.ours)
    assert models.ours.config._attn_implementation == "eager"


@full
@pytest.mark.parametrize(
    "name", [n for n in TOKENS if n not in ("two berts", "deit and bert")]
)  # which have no such call
def test_a_larger_vocabulary(name):
    models = pair(name)
    for model in models[:2]:
        torch.manual_seed(6)
        model.resize_token_embeddings(120)
    models.compare()


TASKS = dict.fromkeys(HUGGINGFACE, "SEQ_2_SEQ_LM") | dict.fromkeys(("gpt2", "llama"), "CAUSAL_LM")
TASKS |= dict.fromkeys((n for n in TOKENS if n not in GENERATING), "FEATURE_EXTRACTION")


@pytest.mark.parametrize("name", tiers(HUGGINGFACE, "marian", "llama", "vit"))
def test_lora_for_a_task(name):
    """With a task type peft's classes pass output_attentions=None. `use` accepts the adapted model too."""
    peft = pytest.importorskip("peft")
    model = build(name)
    task = TASKS[name] if model.main_input_name == "input_ids" else None  # the classes of tasks pass input_ids
    options = dict(target_modules="all-linear", init_lora_weights=False, task_type=task)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**options))
    inputs, real = FAMILIES[name].inputs(adapted)
    expected = solve(adapted, inputs, real)
    assert huggingface.use(adapted) is adapted
    check(solve(adapted, inputs, real), expected, CLOSE)


# Models of several parts, and of other families.


@full
def test_a_layer_with_an_adapter():
    """Which the description of Wav2Vec2's layers lacks."""
    models = pair("stable wav2vec2", adapter_attn_dim=8).train()
    models.compare()
    assert "whole" not in ways(models.ours, lambda: models.solve(models.ours))


def test_the_report_names_modules():
    report = accelerate(build("marian"))
    lines = str(report).splitlines()
    assert lines[0].split() == ["modules", "class", "the", "first", "why"]
    assert any(line.split()[:3] == ["taken", "2", "MarianEncoderLayer"] for line in lines)
    assert any("MarianMTModel: attention" in line for line in lines)
    assert {entry.path for entry in report.taken} >= {"model.encoder.layers.0", "model.decoder.layers.1"}


# name -> the reason why its attention is left, and its config's arguments
REFUSED = {
    "LEDForConditionalGeneration": (
        "by itself, without transformers' AttentionInterface",
        PAIR | dict(max_encoder_position_embeddings=16, attention_window=4, max_decoder_position_embeddings=16),
    ),
}


def build_refused(name):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name.split('For')[0]}Config")(**REFUSED[name][1])
    return getattr(transformers, name)(config).to(DEVICE).eval()


@pytest.mark.parametrize("name", REFUSED)
def test_attention_that_is_left(name):
    """The report gives the reason, and the model is right. `use` raises it, and changes nothing."""
    model, reason = build_refused(name), REFUSED[name][0]
    implementation, kinds = model.config._attn_implementation, [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=f"{name}: .*{reason}"):
        huggingface.use(model)
    assert model.config._attn_implementation == implementation
    ids = torch.randint(3, 99, (2, 8), device=DEVICE)
    with torch.no_grad():
        expected = model(ids).logits
        report = accelerate(model)
        torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-5)
    (entry,) = (entry for entry in report.left if "attention" in entry.kind)
    assert entry.kind == f"{name}: attention" and reason in entry.reason and entry.reason in str(report)
    assert model.config._attn_implementation == implementation
    assert not any("Layer" in entry.kind and entry.kind != "LayerNorm" for entry in report.taken)
    restore(model)
    assert [type(m) for m in model.modules()] == kinds


def test_a_submodel_whose_attention_is_left():
    """The rest of the model gets fastattn's."""
    encoder = build("vit").config
    decoder = transformers.TrOCRConfig(**{n: size for n, size in PAIR.items() if not n.startswith("encoder")})
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 2, 1
    model = transformers.VisionEncoderDecoderModel(config=config).to(DEVICE).eval()
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16, device=DEVICE)}
    inputs["decoder_input_ids"] = torch.randint(3, 99, (2, 8), device=DEVICE)
    configs = [m.config for m in model.modules() if isinstance(m, transformers.PreTrainedModel)]
    before = [c._attn_implementation for c in configs]
    with torch.no_grad():
        expected = model(**inputs).logits
        report = accelerate(model)
        torch.testing.assert_close(model(**inputs).logits, expected, rtol=0, atol=1e-5)
        entries = {entry.path: entry.reason for entry in report.entries if "attention" in entry.kind}
        assert entries.keys() == {"encoder", "decoder"} and entries["encoder"] is None
        assert "by itself" in entries["decoder"]
        assert model.encoder.config._attn_implementation == "fastattn"
        assert model.decoder.config._attn_implementation == before[-1]
        restore(model)
        assert [c._attn_implementation for c in configs] == before
        assert torch.equal(model(**inputs).logits, expected)


def check_two_models(decoder):
    theirs = transformers.EncoderDecoderModel(encoder=build("bert").bert, decoder=decoder)
    theirs = eager(theirs)
    ours = copy.deepcopy(theirs)
    report = accelerate(ours)
    inputs = FAMILIES["bert"].inputs(theirs.encoder)[0]
    with torch.no_grad():
        logits = [model(**inputs, decoder_input_ids=inputs["input_ids"]).logits for model in (theirs, ours)]
        torch.testing.assert_close(*logits, **CLOSE)
    assert {m.config._attn_implementation for m in ours.modules() if hasattr(m, "config")} == {"fastattn"}
    return theirs, ours, report, inputs


def test_an_encoder_decoder_of_two_models():
    check_two_models(build("gpt2", add_cross_attention=True))


@full
def test_generation_by_bert():
    """Its layers attend to an encoder's states, and to a cache."""
    config = build("bert", is_decoder=True, add_cross_attention=True).config
    torch.manual_seed(0)
    theirs, ours, report, inputs = check_two_models(transformers.BertLMHeadModel(config))
    assert sum(entry.kind == "BertLayer" for entry in report.taken) == 4
    options = dict(max_new_tokens=9, min_new_tokens=9, num_beams=2, decoder_start_token_id=0, pad_token_id=1)
    assert torch.equal(ours.generate(**inputs, **options), theirs.generate(**inputs, **options))


READERS = {  # of the mask: a router slices it, an attention adds it to its scores, another reads its dtype
    "NllbMoeForConditionalGeneration": PAIR | dict(num_experts=4, encoder_sparse_step=1),
    "BigBirdPegasusForConditionalGeneration": PAIR,
    "DogeForCausalLM": STACK,
    "MistralForCausalLM": GROUPED | dict(sliding_window=3),  # and one with a window
}


@pytest.mark.parametrize("name", READERS)
def test_models_that_read_the_mask(name):
    theirs = tiny(name, f"{name.split('For')[0]}Config", 1.0, **READERS[name])
    inputs, real = FAMILIES["bert"].inputs(theirs)
    ours = huggingface.use(copy.deepcopy(theirs))
    check(solve(ours, inputs, real), solve(theirs, inputs, real), CLOSE)


# The interface.


def test_use_needs_a_model_of_transformers():
    with pytest.raises(TypeError, match="hold a transformers.PreTrainedModel, got Linear"):
        huggingface.use(torch.nn.Linear(2, 2))


def test_a_backend_that_cannot_serve_raises():
    model = attention_alone("bart")[1].double()
    with use_backend("triton"), pytest.raises(RuntimeError, match="triton"):
        outputs_of(model, FAMILIES["bart"].inputs(model)[0])


def test_masks_are_structured_and_shared():
    """No tensor of the scores' size is made for padding and causality, and all layers of a stack share one mask."""
    model, masks = attention_alone("marian")[1], []
    for name, module in model.named_modules():
        if name.endswith("attn"):
            note = lambda _module, args, options: masks.append(options["attention_mask"])  # noqa: E731
            module.register_forward_pre_hook(note, with_kwargs=True)
    with by_fastattn():
        model(**FAMILIES["marian"].inputs(model)[0])
    assert len(masks) == 6 and all(isinstance(mask, AttentionMask) and mask.attn_mask is None for mask in masks)
    assert masks[0] is masks[1] and len({id(mask) for mask in masks}) == 3
    assert masks[2].has_band and masks[2].key_padding is not None


# With "sdpa", and without. Of the second only the model's class tells.
@pytest.mark.parametrize("config", [transformers.LlamaConfig, transformers.NllbMoeModel.config_class])
@pytest.mark.parametrize("mask_function", [causal_mask_function, bidirectional_mask_function])
def test_a_mask_is_read_as_transformers_own(config, mask_function):
    """Several tokens after a cache, with padding."""
    padding = torch.tensor([[False, True, True, True, True], [True, True, True, True, False]], device=DEVICE)
    made_for = dict(q_offset=2, mask_function=mask_function, attention_mask=padding, device=DEVICE)
    made_for |= dict(dtype=torch.float16, config=config())
    with by_fastattn():
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


@pytest.mark.bug_class("T25")
def test_what_changes_the_result_is_refused():
    q = torch.ones(1, 2, 3, 4, device=DEVICE)
    for name in ("indices", "block_indices", "cache", "head_mask"):
        with pytest.raises(ValueError, match="Linear: .*use another attn_implementation"):
            huggingface.attention_forward(torch.nn.Linear(1, 1), q, q, q, None, **{name: q})


@pytest.mark.parametrize(("family", "option"), [("gemma2", "softcap"), ("gpt_oss", "s_aux"), ("inkling2", "sinks")])
def test_softcap_and_sinks(family, option):
    """As the family's own attention computes them, with the weights and the gradients. Inkling's are of each query."""
    theirs = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    q, k, v = (t.requires_grad_() for t in torch.randn(3, 2, 4, 5, 8, device=DEVICE).mul(3).unbind())
    sinks = torch.randn((2, 4, 5, 1) if option == "sinks" else 4, device=DEVICE, requires_grad=True)
    module = torch.nn.Linear(1, 1).eval()
    module.num_key_value_groups, module.head_dim, module.sinks = 1, 8, sinks
    mask = torch.zeros(5, 5, device=DEVICE).masked_fill(torch.ones(5, 5, device=DEVICE).triu(1).bool(), -1e9)[
        None, None
    ]
    given = {option: 2.0 if option == "softcap" else sinks}
    expected = theirs.eager_attention_forward(module, q, k, v, mask, scaling=0.3, dropout=0.0, **given)
    options = {"scaling": 0.3, "is_causal": True, "output_attentions": True, **given}
    found = huggingface.attention_forward(module, q, k, v, None, **options)
    leaves = [q, k, v, *([] if option == "softcap" else [sinks])]
    torch.testing.assert_close(found, expected[:2], rtol=1e-4, atol=1e-5)
    sums = [(out.square() + weights.square().sum()).sum() for out, weights in (found, expected[:2])]
    torch.testing.assert_close(*[torch.autograd.grad(t, leaves) for t in sums], rtol=1e-4, atol=1e-3)
    options |= {"s_aux": torch.full((4,), -torch.inf, device=DEVICE), "sinks": None, "is_causal": False}  # no sinks
    hidden = AttentionMask(key_padding=torch.zeros(2, 5, dtype=torch.bool, device=DEVICE))
    assert not any(t.any() for t in huggingface.attention_forward(module, q, k, v, hidden, **options))


def test_attention_is_one_graph_for_torch_compile():
    """With what models hand on next to its arguments."""
    q, module = torch.randn(1, 2, 3, 4, device=DEVICE, requires_grad=True), torch.nn.Linear(1, 1)
    compiled = torch.compile(huggingface.attention_forward, backend="eager", fullgraph=True)
    options = dict(dropout=0.0, scaling=0.5, use_cache=False, softcap=None)
    found, expected = (f(module, q, q, q, None, **options)[0] for f in (compiled, huggingface.attention_forward))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


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
