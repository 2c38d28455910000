"""report.loss computes no padding on a CPU, and gives the loss and the gradients that padding gives."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

import fastattn  # noqa: E402
from fastattn.integrations import hidden_padding, huggingface_layers, layers  # noqa: E402
from fastattn.integrations.hidden_padding import MIN_ELEMENTS  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="padding is left out on a CPU")
B, LENGTH, WIDTH = 16, 72, 64  # large enough for padding to be left out
PAIR = {"layers": 1, "attention_heads": 4, "ffn_dim": 96}
PAIR = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in PAIR.items()}
PAIR |= dict(d_model=WIDTH, decoder_start_token_id=2, forced_eos_token_id=None, dropout=0.0, attention_dropout=0.0)
SPECIAL = dict(vocab_size=99, pad_token_id=1, bos_token_id=0, eos_token_id=2, max_position_embeddings=LENGTH + 2)
BERT = dict(hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96)
BERT |= dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
T5 = dict(d_model=WIDTH, d_kv=16, d_ff=96, num_layers=1, num_heads=4, dropout_rate=0.0, decoder_start_token_id=1)
DISTIL = dict(dim=WIDTH, n_layers=2, n_heads=4, hidden_dim=96, dropout=0.0, attention_dropout=0.0)
ENCODER = SPECIAL | BERT | dict(model_type="bert")
BERTS = dict(encoder=ENCODER, decoder=ENCODER | dict(is_decoder=True, add_cross_attention=True))
BERTS |= dict(decoder_start_token_id=0)
# The model's class, the config's, its arguments, and how many of its layers leave padding out.
MODELS = {
    "bart": ("BartForConditionalGeneration", "BartConfig", PAIR, 2),
    "mbart": ("MBartForConditionalGeneration", "MBartConfig", PAIR, 2),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5, 2),
    "bert": ("BertForMaskedLM", "BertConfig", BERT, 2),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", BERT, 2),
    "distilbert": ("DistilBertForMaskedLM", "DistilBertConfig", DISTIL, 2),
    "two berts": ("EncoderDecoderModel", "EncoderDecoderConfig", BERTS, 4),
}


@pytest.fixture
def packed(monkeypatch):
    """The shapes of what layers computed without padding."""
    shapes, restore = [], hidden_padding.restore_padding

    def restore_and_note(out, unpadded):
        shapes.append(tuple(out.shape))
        return restore(out, unpadded)

    for module in (layers, huggingface_layers):
        monkeypatch.setattr(module, "restore_padding", restore_and_note)
    return shapes


def build(name):
    model_class, config_class, options, _ = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**SPECIAL | options)).train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p)) if p.dim() == 1 else p.mul_(3)
    accelerated = copy.deepcopy(model)
    return model, accelerated, fastattn.accelerate(accelerated)


def batch_of(share=0.4):
    """Sentences with this share of padding."""
    assert B * LENGTH * WIDTH >= MIN_ELEMENTS
    ids, lengths = torch.randint(3, 99, (B, LENGTH)), torch.linspace((1 - 2 * share) * LENGTH, LENGTH, B).round()
    real = torch.arange(LENGTH) < lengths[:, None]
    batch = {"input_ids": ids.masked_fill(~real, 1), "attention_mask": real.long()}
    return batch | {"labels": ids.masked_fill(~real, -100)}, int(real.sum())


def check(model, accelerated, report, batch):
    expected, found = model(**batch).loss, report.loss(accelerated, **batch)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    expected.backward()
    found.backward()
    largest = max(p.grad.abs().max() for p in model.parameters() if p.grad is not None)
    for (name, p), q in zip(model.named_parameters(), accelerated.parameters(), strict=True):
        if p.grad is not None:
            assert (p.grad - q.grad).abs().max() <= 1e-4 * largest, name


@pytest.mark.parametrize("name", ["bart", *(pytest.param(n, marks=pytest.mark.full) for n in MODELS if n != "bart")])
@pytest.mark.parametrize("checkpointing", [None, pytest.param(True, marks=pytest.mark.full), False])
def test_equal(name, checkpointing, packed):
    """checkpointing: None, or whether it is reentrant."""
    model, accelerated, report = build(name)
    if checkpointing is not None:
        accelerated.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    batch, real = batch_of()
    check(model, accelerated, report, batch)
    assert packed == [(1, real, WIDTH)] * len(packed)
    assert len(packed) == MODELS[name][3] * (1 if checkpointing is None else 2)


def test_padding_is_kept_where_it_is_seen(packed):
    model, accelerated, report = build("bart")
    batch, _ = batch_of()
    model(**batch)
    accelerated(**batch)
    assert not packed  # the outputs are the user's
    few, _ = batch_of(share=0.05)
    check(model, accelerated, report, few)
    assert not packed
    seen = []
    accelerated.model.decoder.layers[0].register_forward_hook(lambda module, args, out: seen.append(out))
    report.loss(accelerated, **batch)
    assert len(packed) == 1 and (seen[0] != 0).all()


def test_padding_is_kept_where_it_has_labels(packed):
    model, accelerated, report = build("bert")
    batch, _ = batch_of()
    batch["labels"] = batch["labels"].masked_fill(batch["labels"] == -100, 7)
    check(model, accelerated, report, batch)
    assert not packed


def test_what_is_written_to_a_layer_s_output_counts(packed):
    model, accelerated, report = build("mbart")

    def double(module, args, out):
        out.last_hidden_state.mul_(2)

    for m in (model, accelerated):
        m.model.encoder.register_forward_hook(double)
    check(model, accelerated, report, batch_of()[0])
    assert len(packed) == 2
