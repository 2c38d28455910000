"""Every class of transformers with a language model's head that a small config makes, untouched and accelerated."""

import contextlib
import copy
import inspect
import itertools
import re
import signal

import pytest
import torch
from families import by_fastattn, gradients

transformers = pytest.importorskip("transformers")

from transformers.models.auto import modeling_auto  # noqa: E402

from fastattn import accelerate, restore  # noqa: E402

KINDS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "PRETRAINING")
NAMES = [getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES").values() for kind in KINDS]
CLASSES = sorted(
    {name for names in NAMES for entry in names for name in ([entry] if isinstance(entry, str) else entry)}
)
VOCABULARY, SECONDS = 120, 120
# The first pattern that is found in the name of a config's integer gives its size; None leaves it.
SIZES = {
    "type_vocab|kernel|stride|dilation|token_type|factor|ratio|expand|scale|interval|mel|feat|channels|chans": None,
    "sparse_step|offset|groups?$": 1,
    "vocab|tokenizer_size": VOCABULARY,
    "image_size|crop_size": 32,
    "patch_size": 8,
    "per_tok|top_?k|moe_k|period": 2,
    "experts": 4,
    "layers|n_layer|depth|num_blocks": 2,
    "heads|n_head": 4,
    "mamba_d_head": 32,
    "head_dim|d_head|d_kv|head_size|rope_dim|rotary_dim|_qk_dim|_v_dim": 16,
    "max_source_positions": 50,
    "intermediate|ffn|d_ff|n_inner|mlp_dim|feed_forward": 64,
    "hidden_size|d_model|n_embd|^dim$|_dim$|embedding_size|d_embed": 64,
    "rank": 8,
    "max_position|n_positions|n_ctx|max_seq|context_length": 64,
}
# Which must not be skipped: the last two read their mask.
NAMED = {"BartForConditionalGeneration", "T5ForConditionalGeneration", "MarianMTModel", "BertForMaskedLM"}
NAMED |= {"NllbMoeForConditionalGeneration", "Qwen2MoeForCausalLM"}
TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "decoder_start_token_id": 2}


def small_config(config):
    """A config of the same class with small sizes, one layer of each type."""
    given, changes, tokens = vars(config), {}, itertools.count(3)
    types = {n: v for n, v in given.items() if re.search("types?$", n) and isinstance(v, list) and v}
    types = {n: list(dict.fromkeys(v)) for n, v in types.items() if isinstance(v[0], str)}
    depth = max([2, *map(len, types.values())])
    heads = [v for n, v in given.items() if re.search("heads|n_head", n) and not re.search("kv|key_value", n)]
    for name, value in given.items():
        size = next((size for pattern, size in SIZES.items() if re.search(pattern, name)), None)
        if name.startswith("_"):
            continue
        elif isinstance(value, transformers.PreTrainedConfig):
            changes[name] = small_config(value)
        elif name in types:
            changes[name] = (types[name] * depth)[:depth]
        elif name in TOKENS:
            changes[name] = TOKENS[name]
        elif name == "head_dim" and value is None:
            changes[name] = 16
        elif name == "rope_parameters" and "rope_theta" in (value or {}):
            n = int(8 * value.get("partial_rotary_factor", 1))
            changes[name] = value | {"mrope_section": [n // 4, n * 3 // 8, n - n // 4 - n * 3 // 8]}
        elif type(value) is int:
            if name.endswith(("token_id", "token_index")):
                size = next(tokens)
            elif size == 2 and "layer" in name:
                size = depth
            elif size == 4 and re.search("kv|key_value", name) and value not in heads:
                size = 2
            changes[name] = value if size is None else min(value, size)
        elif size is not None and isinstance(value, (list, tuple)) and all(type(n) is int for n in value):
            length = depth if len(value) == given.get("num_hidden_layers") else len(value)
            changes[name] = [min(n, size) for n in value[:length]]
    return type(config)(**changes)


def small_model(name):
    kind = getattr(transformers, name)
    config = small_config(kind.config_class())
    for token, number in TOKENS.items():
        if getattr(config, token, None) is None:
            setattr(config, token, number)
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(copy.deepcopy(config)).parameters())
    assert size < 20e6, f"has {size} parameters"
    torch.manual_seed(0)
    model = kind(config)
    with torch.no_grad():  # weights large enough that a wrong mask shows
        for n, p in model.named_parameters():
            if p.dim() > 1 and "norm" not in n:
                p.mul_(3.0)
    return model.eval()


def batches_for(model):
    """Batches of the model's kind of input. One of them fits."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(20, VOCABULARY, (3, 12), generator=generator)
    real = torch.arange(12) < torch.tensor([12, 7, 9])[:, None]
    labels = {"labels": ids.masked_fill(~real, -100)}
    text = {"input_ids": ids.masked_fill(~real, 0), "attention_mask": real.long()}
    shapes = {"pixel_values": [(3, 3, 32, 32)], "input_values": [(3, 16000)]}
    shapes["input_features"] = [s for n in (80, 128) for s in ((3, n, 100), (3, 100, n))]
    names = [name for name in shapes if name in inspect.signature(model.forward).parameters]
    for name in names:
        for shape in shapes[name]:
            signal = {name: torch.randn(shape, generator=generator)}
            yield from (labels | signal | text, labels | signal, labels | signal | {"input_ids": ids})
    yield labels | text


def first_that_works(model):
    reason = None
    for batch in batches_for(model):
        try:
            return batch, solve(model, batch)
        except Exception as error:
            reason = error
    raise reason


@pytest.fixture
def time_limit():
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"took more than {SECONDS} s"))
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)


def solve(model, batch, loss_of=None):
    """What the model returns, and its loss, of which the gradients are; if it has none, of the first output's mean."""
    torch.manual_seed(1)
    model.zero_grad()
    with by_fastattn():
        output = model(**batch)
        tensors = [t for t in output.to_tuple() if isinstance(t, torch.Tensor) and t.requires_grad]
        loss = tensors[0].mean() if output.get("loss") is None else output["loss"]
        if loss_of is not None:
            torch.manual_seed(1)
            loss = loss_of(model, **batch)
    loss.backward()
    return [t.detach() for t in tensors], loss.detach(), gradients(model), output.get("loss") is not None


def generate(model, batch):
    torch.manual_seed(1)
    inputs = {n: t for n, t in batch.items() if n != "labels"}
    if "input_ids" in inputs and not model.config.is_encoder_decoder:
        inputs = {n: t.flip(1) for n, t in inputs.items()}
    return model.generate(**inputs, num_beams=2, do_sample=False, max_new_tokens=6, min_new_tokens=6)


def check(found, expected):
    for ours, theirs in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * (1 + theirs.abs().max().item()))
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-5)
    assert found[2].keys() == expected[2].keys()
    size = torch.stack([g.norm() for g in expected[2].values()]).norm()
    error = torch.stack([(found[2][n] - g).norm() for n, g in expected[2].items()]).norm()
    assert error <= 1e-3 * size, f"gradients off by {error / size:.2g}"


@pytest.mark.full
@pytest.mark.parametrize("name", CLASSES)
def test_class(name, time_limit):
    """Outputs, gradients, generated tokens and report.loss, and after restore every bit."""
    try:
        model = small_model(name)
        batch, expected = first_that_works(model)
    except Exception as error:
        if name in NAMED:  # other families of the documentation are in test_accelerate.py
            raise
        pytest.skip(f"no small model or no batch for it: {type(error).__name__}: {error}")
    tokens = None
    with contextlib.suppress(Exception):  # some models do not generate
        tokens = generate(model, batch)
    report = accelerate(model)
    check(solve(model, batch), expected)
    assert tokens is None or torch.equal(generate(model, batch), tokens)
    if expected[3]:
        check(solve(model, batch, report.loss), expected)
    restore(model)
    for ours, theirs in zip(solve(model, batch)[0], expected[0], strict=True):
        assert torch.equal(ours, theirs)
