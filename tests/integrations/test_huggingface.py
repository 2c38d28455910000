"""What only transformers' models have: fastattn's attention in their AttentionInterface, caches, and masks of users."""

import copy
import itertools

import pytest
import torch
from families import (
    DEVICE,
    FAMILIES,
    GENERATING,
    GROUPED,
    HUGGINGFACE,
    LENGTHS,
    PAIR,
    by_fastattn,
    check,
    kinds_of,
    pair,
    solve,
    tiers,
    tiny,
    ways,
)

transformers = pytest.importorskip("transformers")

from fastattn import accelerate, restore  # noqa: E402
from fastattn.integrations import huggingface  # noqa: E402
from fastattn.masks import AttentionMask  # noqa: E402

CLOSE = dict(rtol=0, atol=1e-4)


def build(name, **changes):
    return FAMILIES[name].build(**changes)


def attention_alone(theirs):
    """The model as it is, and with fastattn's attention."""
    return theirs, huggingface.use(copy.deepcopy(theirs))


# Caches, masks and positions.


EVERYDAY = ("marian 2 static", "marian 1 dynamic", "gated t5 1 dynamic", "t5 2 dynamic", "llama 1 static")
GENERATIONS = itertools.product(GENERATING, "12", ("dynamic", "static"))


@pytest.mark.parametrize("how", tiers(map(" ".join, GENERATIONS), *EVERYDAY))
def test_generation(how):
    """By greedy search and beams, by fastattn's attention alone too; decoder-only models are padded on the left."""
    name, beams, cache = how.rsplit(maxsplit=2)
    theirs, *ours = build(name), pair(name).ours, attention_alone(build(name))[1]
    inputs, _ = FAMILIES[name].inputs(theirs, left=not theirs.config.is_encoder_decoder)
    inputs = {n: t for n, t in inputs.items() if not n.startswith("decoder")}
    for n in (9, 1):  # a single token: in a static cache the prompt fills all places
        options = dict(max_new_tokens=n, min_new_tokens=n, num_beams=int(beams), do_sample=False)
        options |= dict(cache_implementation=cache, disable_compile=True)
        expected = theirs.generate(**inputs, **options)
        assert all(torch.equal(model.generate(**inputs, **options), expected) for model in ours)


@pytest.mark.parametrize("window", [None, 6, 3])  # 6: longer than the new tokens; 3: the cache drops tokens
@pytest.mark.parametrize("padded", [False, True])
def test_several_tokens_after_a_cache(window, padded):
    """A causal mask that counts from the last key, and padding in front of the tokens."""
    models, found = attention_alone(tiny("MistralForCausalLM", "MistralConfig", sliding_window=window, **GROUPED)), []
    inputs = FAMILIES["llama"].inputs(models[0], left=True)[0]
    ids, real = inputs["input_ids"], inputs["attention_mask"] if padded else torch.ones_like(inputs["attention_mask"])
    with torch.no_grad(), by_fastattn():
        for model in models:
            output, logits = model(ids[:, :4], attention_mask=real[:, :4], use_cache=True), []
            for start, end in ((4, 6), (6, 9)):
                key = "cache" if "cache" in output else "past_key_values"
                output = model(ids[:, start:end], attention_mask=real[:, :end], **{key: output[key]})
                logits.append(output.logits[real[:, start:end].bool()])
            found.append(torch.cat(logits))
    torch.testing.assert_close(*found, **CLOSE)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_a_mask_from_the_user(kind):
    """A 4-D mask is obeyed, of bools or of numbers to add. Eager attention accepts no bools."""
    (theirs, ours, *_), length = pair("llama"), max(LENGTHS)
    ids = FAMILIES["llama"].inputs(theirs)[0]["input_ids"]
    mask = (torch.rand(3, 1, length, length, generator=torch.Generator().manual_seed(1)) < 0.7).tril()
    mask = (mask | torch.eye(length).bool()).to(DEVICE)
    additive = torch.zeros(mask.shape, device=DEVICE).masked_fill(~mask, torch.finfo(torch.float32).min)
    with torch.no_grad(), by_fastattn():
        expected = theirs(ids, attention_mask=additive).logits
        found = ours(ids, attention_mask=mask if kind == torch.bool else additive).logits
    torch.testing.assert_close(found, expected, **CLOSE)


def test_packed_positions():
    """Two sentences in a row, separated by position_ids: equal to each of them alone."""
    model = attention_alone(build("llama"))[1]
    ids = FAMILIES["llama"].inputs(model)[0]["input_ids"][:1]
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]], device=DEVICE)
    with torch.no_grad(), by_fastattn():
        packed = model(ids, position_ids=places, use_cache=False).logits
        alone = [model(part).logits for part in (ids[:, :4], ids[:, 4:])]
    torch.testing.assert_close(packed, torch.cat(alone, 1), **CLOSE)


def test_a_bias_by_distance_of_many_tokens():
    """T5's is a tensor of the distances where one of queries and keys would be large: also after a cache."""
    models, found = pair("t5"), []
    ids = torch.randint(3, 99, (1, 400), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for model in models[:2]:
        loss = model(input_ids=ids, labels=ids.flip(1)).loss
        loss.backward()
        with torch.no_grad(), by_fastattn():
            output = model(input_ids=ids, decoder_input_ids=ids[:, :10], use_cache=True)
            key = "cache" if "cache" in output else "past_key_values"
            output = model(input_ids=ids, decoder_input_ids=ids[:, 10:], **{key: output[key]})
        found.append([loss, output.logits, *(p.grad for p in model.parameters() if p.grad.dim() > 1)])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


def test_large_numbers_in_float16():
    """BART's encoder clamps them."""
    *models, _, inputs, real = pair("bart")[:5]
    for model in models:
        encoder = model.half().get_encoder()
        norm = encoder.layers[-1].final_layer_norm
        norm.weight.data.fill_(300), norm.bias.data.fill_(65_500)
        with by_fastattn():
            out = encoder(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state[real]
        assert (out == torch.finfo(torch.float16).max - 1000).all()


@pytest.mark.parametrize("name", tiers([n for n in HUGGINGFACE if n != "gpt2"], "bart"))  # gpt2's interface gives none
def test_attentions_and_hidden_states(name):
    """Both are eager's, and calls after them still give the same."""
    models = pair(name)
    inputs, real = FAMILIES[name].inputs(models.theirs)
    asked = dict(output_attentions=True, output_hidden_states=True)
    with torch.no_grad():
        outputs = [model(**inputs, **asked) for model in models[:2]]
    kinds = [n for n in outputs[0] if n.endswith(("attentions", "hidden_states")) and outputs[0][n] is not None]
    assert len(kinds) >= 2
    for kind in kinds:
        tensors = [(t,) if isinstance(t := output[kind], torch.Tensor) else t for output in outputs]
        for expected, found in zip(*tensors, strict=True):
            if real.dim() == 2 and found.shape[-2] == real.shape[1]:
                rows = real[:, None, :, None] if found.dim() == 4 else real[:, :, None]
                found, expected = (t.masked_fill(~rows, 0) for t in (found, expected))
            torch.testing.assert_close(found, expected, **CLOSE)
    models.compare()


# Models of several parts, and of other families.


def test_a_layer_with_an_adapter():
    """Which the description of Wav2Vec2's layers lacks."""
    models = pair("stable wav2vec2", adapter_attn_dim=8).train()
    models.compare()
    assert "whole" not in ways(models.ours, lambda: models.solve(models.ours))


def test_a_submodel_whose_attention_is_left():
    """The report gives the reason; the rest of the model gets fastattn's. restore gives each config its own choice
    back. `use` raises the reason, and changes nothing."""
    sizes = {n: size for n, size in PAIR.items() if not n.startswith("encoder")}
    decoder = transformers.TrOCRForCausalLM(transformers.TrOCRConfig(**sizes))
    model = transformers.VisionEncoderDecoderModel(encoder=build("vit").vit, decoder=decoder).to(DEVICE).eval()
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16, device=DEVICE)}
    inputs["decoder_input_ids"] = torch.randint(3, 99, (2, 8), device=DEVICE)

    def state():
        return [part.config._attn_implementation for part in (model.encoder, model.decoder)], kinds_of(model)

    before, expected = state(), solve(model, inputs)
    with pytest.raises(ValueError, match="TrOCR.*by itself, without transformers' AttentionInterface"):
        huggingface.use(model)
    assert state() == before
    report = accelerate(model)
    check(solve(model, inputs), expected, CLOSE)
    reasons = {entry.path: entry.reason for entry in report.entries if "attention" in entry.kind}
    assert reasons["encoder"] is None and "by itself" in reasons["decoder"] and reasons["decoder"] in str(report)
    assert state()[0] == ["fastattn", before[0][1]]
    restore(model)
    assert state() == before


# The interface.


def test_masks_are_structured_and_shared():
    """No tensor of the scores' size is made for padding and causality, and all layers of a stack share one mask."""
    model, masks = attention_alone(build("marian"))[1], []
    for name, module in model.named_modules():
        if name.endswith("attn"):
            note = lambda _module, args, options: masks.append(options["attention_mask"])  # noqa: E731
            module.register_forward_pre_hook(note, with_kwargs=True)
    with by_fastattn():
        model(**FAMILIES["marian"].inputs(model)[0])
    assert len(masks) == 6 and all(isinstance(mask, AttentionMask) and mask.attn_mask is None for mask in masks)
    assert masks[0] is masks[1] and len({id(mask) for mask in masks}) == 3
    assert masks[2].has_band and masks[2].key_padding is not None


@pytest.mark.parametrize("name", ["indices", "cache", "head_mask"])
def test_what_changes_the_result_is_refused(name):
    q = torch.ones(1, 2, 3, 4, device=DEVICE)
    with pytest.raises(ValueError, match="Linear: .*use another attn_implementation"):
        huggingface.attention_forward(torch.nn.Linear(1, 1), q, q, q, None, **{name: q})


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize(("family", "option"), [("gemma2", "softcap"), ("gpt_oss", "s_aux"), ("inkling2", "sinks")])
def test_softcap_and_sinks(family, option, asked):
    """As the family's own attention computes them, with the weights and the gradients. Inkling's are of each query."""
    theirs = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    q, k, v = (t.requires_grad_() for t in torch.randn(3, 2, 4, 5, 8, device=DEVICE).mul(3).unbind())
    sinks = torch.randn((2, 4, 5, 1) if option == "sinks" else 4, device=DEVICE, requires_grad=True)
    module = torch.nn.Linear(1, 1).eval()
    module.num_key_value_groups, module.head_dim, module.sinks = 1, 8, sinks
    mask = torch.zeros(1, 1, 5, 5, device=DEVICE).masked_fill(torch.ones(5, 5, device=DEVICE).triu(1).bool(), -1e9)
    given = {option: 2.0 if option == "softcap" else sinks}
    expected = theirs.eager_attention_forward(module, q, k, v, mask, scaling=0.3, dropout=0.0, **given)
    options = {"scaling": 0.3, "is_causal": True, "output_attentions": asked, **given}
    found = huggingface.attention_forward(module, q, k, v, None, **options)
    leaves = [q, k, v, *([] if option == "softcap" else [sinks])]
    results = [[t for t in result[: 1 + asked] if t is not None] for result in (found, expected)]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    sums = [sum(t.square().sum() for t in result) for result in results]
    torch.testing.assert_close(*[torch.autograd.grad(t, leaves) for t in sums], rtol=1e-4, atol=1e-3)
    options |= {"s_aux": torch.full((4,), -torch.inf, device=DEVICE), "sinks": None, "is_causal": False}  # no sinks
    hidden = AttentionMask(key_padding=torch.zeros(2, 5, dtype=torch.bool, device=DEVICE))
    assert not any(t.any() for t in huggingface.attention_forward(module, q, k, v, hidden, **options)[: 1 + asked])
