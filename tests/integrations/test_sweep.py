"""Every class of transformers for text with a head over words that a small config makes, untouched and accelerated."""

import contextlib
import copy
import itertools
import re

import pytest
import torch
from families import by_fastattn, gradients

transformers = pytest.importorskip("transformers")

from transformers.models.auto import modeling_auto  # noqa: E402

from fastattn import accelerate, restore  # noqa: E402

KINDS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM")
NAMES = [getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES").values() for kind in KINDS]
CLASSES = sorted(
    {name for names in NAMES for entry in names for name in ([entry] if isinstance(entry, str) else entry)}
)
VOCABULARY = 120
# The first pattern that is found in the name of a config's integer gives its size; None leaves it.
SIZES = {
    "type_vocab|kernel|stride|dilation|token_type|factor|ratio|expand|scale|interval|mel|feat|channels|chans": None,
    "sparse_step|offset|groups?$": 1,
    "vocab|tokenizer_size": VOCABULARY,
    "per_tok|top_?k|moe_k|period": 2,
    "experts": 4,
    "layers|n_layer|depth|num_blocks": 2,
    "heads|n_head": 4,
    "mamba_d_head": 32,
    "head_dim|d_head|d_kv|head_size|rope_dim|rotary_dim|_qk_dim|_v_dim": 16,
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


def small_batch():
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(20, VOCABULARY, (3, 12), generator=generator)
    real = torch.arange(12) < torch.tensor([12, 7, 9])[:, None]
    labels = ids.masked_fill(~real, -100)
    return {"input_ids": ids.masked_fill(~real, 0), "attention_mask": real.long(), "labels": labels}


def solve(model, batch, loss_of=None):
    """The loss and its gradients."""
    torch.manual_seed(1)
    model.zero_grad()
    with by_fastattn():
        loss = model(**batch)["loss"] if loss_of is None else loss_of(model, **batch)
    loss.backward()
    return loss.detach(), gradients(model)


def generate(model, batch):
    torch.manual_seed(1)
    inputs = {n: t for n, t in batch.items() if n != "labels"}
    if not model.config.is_encoder_decoder:
        inputs = {n: t.flip(1) for n, t in inputs.items()}
    return model.generate(**inputs, num_beams=2, do_sample=False, max_new_tokens=6, min_new_tokens=6)


def check(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
    assert found[1].keys() == expected[1].keys()
    size = torch.stack([g.norm() for g in expected[1].values()]).norm()
    error = torch.stack([(found[1][n] - g).norm() for n, g in expected[1].items()]).norm()
    assert error <= 1e-3 * size, f"gradients off by {error / size:.2g}"


@pytest.mark.full
@pytest.mark.parametrize("name", CLASSES)
def test_class(name):
    """The loss, also by report.loss, its gradients, generated tokens, and after restore the loss to the last bit."""
    batch = small_batch()
    try:
        model = small_model(name)
        expected = solve(model, batch)
    except Exception as error:
        if name in NAMED:  # other families of the documentation are in test_accelerate.py
            raise
        pytest.skip(f"no small model, or it takes no text: {type(error).__name__}: {error}")
    tokens = None
    with contextlib.suppress(Exception):  # some models do not generate
        tokens = generate(model, batch)
    report = accelerate(model)
    for loss_of in (None, report.loss):
        check(solve(model, batch, loss_of), expected)
    assert tokens is None or torch.equal(generate(model, batch), tokens)
    restore(model)
    assert torch.equal(solve(model, batch)[0], expected[0])
