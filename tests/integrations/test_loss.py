"""report.loss of accelerate(): the loss and the gradients of transformers' models, without their logits."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from families import (
    DEVICE,
    FAMILIES,
    GROUPED,
    LENGTHS,
    PAIR,
    STACK,
    TOKENS,
    by_fastattn,
    check_gradients,
    gradients,
    pair,
    tiers,
    tiny,
)
from helpers import autograd_nodes
from torch._dynamo.testing import CompileCounterWithBackend

from fastattn import accelerate, restore

transformers = pytest.importorskip("transformers")
full = pytest.mark.full


def labels_for(model):
    """What report.loss is given: inputs with labels, -100 where there is padding."""
    inputs, real = FAMILIES["bert"].inputs(model)
    inputs = {n: t for n, t in inputs.items() if not n.startswith("decoder")}
    ids = torch.randint(3, 99, (3, max(LENGTHS)), generator=torch.Generator().manual_seed(5)).to(DEVICE)
    return inputs | {"labels": ids.masked_fill(~real, -100)}


def both_losses(theirs, ours, batch, **options):
    """What report.loss gives, after its gradients were compared with those of the expected loss."""
    report = accelerate(ours)
    expected = theirs(**batch).loss if not options else loss_by_options(theirs, batch, **options)
    with by_fastattn():
        found = report.loss(ours, **batch, **options)
    for model, loss in ((theirs, expected), (ours, found)):
        model.zero_grad()
        loss.backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    check_gradients(gradients(getattr(ours, "module", ours)), gradients(theirs))  # module: of DistributedDataParallel
    return found


def loss_by_options(model, batch, label_smoothing=None, num_items_in_batch=None):
    """As transformers' Trainer computes it. Models with an encoder do not read num_items_in_batch."""
    from transformers.trainer_pt_utils import LabelSmoother

    adapted = getattr(model, "get_base_model", lambda: model)()  # peft's
    shifts = type(adapted).__name__.endswith(("LMHeadModel", "ForCausalLM"))
    if label_smoothing is not None:
        return LabelSmoother(epsilon=label_smoothing)(model(**batch), batch["labels"], shift_labels=shifts)
    if shifts:
        return model(**batch, num_items_in_batch=num_items_in_batch).loss
    return model(**batch).loss * (batch["labels"] != -100).sum() / num_items_in_batch


OPTIONS = ({}, {"label_smoothing": 0.1}, {"num_items_in_batch": torch.tensor(40)})


@pytest.mark.parametrize("name", tiers(TOKENS, "marian", "gpt2", "t5gemma"))
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_loss(name, options):
    """The model's own, or that of transformers' LabelSmoother, or as Trainer accumulates; with its gradients. No logits
    are made, but by a model that caps them."""
    theirs, ours, *_ = pair(name)
    loss = both_losses(theirs, ours, labels_for(theirs), **options)
    assert ("NllLossBackward0" in autograd_nodes(loss)) is name.startswith("t5gemma") or options.get("label_smoothing")
    restore(ours)
    assert type(ours.get_output_embeddings()) is torch.nn.Linear


OTHER_SPEECH = dict(hidden_size=32, intermediate_size=64, encoder_num_hidden_layers=1, decoder_num_hidden_layers=1)
OTHER_SPEECH |= dict(encoder_num_attention_heads=4, decoder_num_attention_heads=4, vocab_size=99, pad_token_id=0)
OTHER_SPEECH |= dict(eos_token_id=1, bos_token_id=2, decoder_start_token_id=2)
LABELLED = {"input_ids": torch.tensor([[5, 6, 2]] * 3), "labels": torch.tensor([0, 2, 1]), "attention_mask": None}
OTHER_RULES = {
    "has labels that are no tokens": ("Bart", "ForSequenceClassification", PAIR, LABELLED),
    "labels are shifted before the loss": ("Moonshine", "ForConditionalGeneration", OTHER_SPEECH, {}),
    "smooths its labels": ("BlipText", "LMHeadModel", STACK | dict(encoder_hidden_size=32), {}),
    "adds another loss": ("Bert", "ForPreTraining", STACK, {"next_sentence_label": torch.tensor([0, 1, 1])}),
    "caps its logits": ("Gemma2", "ForCausalLM", GROUPED | dict(head_dim=8, attn_logit_softcapping=None), {}),
    "a decoder alone, unshifted": ("Bart", "ForCausalLM", PAIR | dict(is_decoder=True, is_encoder_decoder=False), {}),
}


@pytest.mark.parametrize("rule", OTHER_RULES)
def test_loss_by_another_rule(rule):
    """The loss is what the model's own code makes of its head's logits."""
    name, kind, options, arguments = OTHER_RULES[rule]
    home = transformers if name != "BlipText" else transformers.models.blip.modeling_blip_text
    torch.manual_seed(0)
    theirs = getattr(home, f"{name}{kind}")(getattr(transformers, f"{name}Config")(**options)).to(DEVICE).eval()
    with torch.no_grad():
        head = theirs.classification_head.out_proj if rule.startswith("has labels") else theirs.get_output_embeddings()
        head.weight.mul_(10)  # far from uniform, so that smoothing and caps show
    batch = {n: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for n, t in arguments.items()}
    texts = labels_for(pair("bert").theirs)
    speech = {"input_values": torch.randn(3, 2000, device=DEVICE), "labels": texts["input_ids"]}
    batch = (speech if name == "Moonshine" else texts) | batch
    ours = copy.deepcopy(theirs)
    found = both_losses(theirs, ours, batch)
    if rule not in ("smooths its labels", "has labels that are no tokens"):
        assert (accelerate(ours).loss(ours, **batch, label_smoothing=0.1) - found).abs() > 1e-3


def test_loss_in_one_thread_logits_in_another():
    """report.loss changes nothing that another thread's call reads."""
    model, found = pair("marian").ours, []
    batch, report = labels_for(model), accelerate(model)
    expected = model(**batch)

    def call_in_another_thread(*_):
        handle.remove()
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(lambda: model(**batch).logits).result())

    handle = model.get_decoder().register_forward_pre_hook(call_in_another_thread)  # on the head it would modify it
    torch.testing.assert_close(report.loss(model, **batch), expected.loss)
    assert type(found[0]) is torch.Tensor and torch.equal(found[0], expected.logits)


@full
@pytest.mark.parametrize("name", ["bert", "marian"])
def test_compiled_loss(name):
    """A compiled model is traced as often as for its own loss, and a compiled step is one graph."""
    counts = []
    for by_report in (False, True):
        model = pair(name).ours.train()
        model.config.use_cache = False
        report, batch = accelerate(model), labels_for(model)
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("eager")
        compiled = torch.compile(model, backend=counter)
        for length in (7, 8, 9):
            part = {n: t[:, :length].contiguous() for n, t in batch.items()}
            loss = report.loss(compiled, **part) if by_report else compiled(**part).loss
            torch.testing.assert_close(loss, model(**part).loss)
        counts.append(counter.frame_count)
    assert counts[0] == counts[1]
    step = torch.compile(lambda batch: report.loss(model, **batch), fullgraph=True, backend="eager")
    torch.testing.assert_close(step(batch), model(**batch).loss)


@pytest.mark.parametrize("change", ["hook", "lora"])
@pytest.mark.parametrize("name", tiers(["marian", "gpt2", "bert", "t5gemma"], "marian"))
def test_loss_with_a_modified_head(name, change):
    """Its logits are computed. The options hold for them too."""
    models, calls = pair(name)[:2], []
    if change == "lora":
        peft = pytest.importorskip("peft")
        heads = [n for n, m in models[0].named_modules() if m is models[0].get_output_embeddings()]
        config = peft.LoraConfig(target_modules=heads, init_lora_weights=False)
        models = [peft.get_peft_model(model, config) for model in models]
        models[1].load_state_dict(models[0].state_dict())
    else:
        for model in models:
            model.get_output_embeddings().register_forward_hook(lambda m, a, out: calls.append(m) or 2 * out)
    both_losses(*models, labels_for(models[0]))
    assert change == "lora" or len(calls) == 2
    both_losses(*models, labels_for(models[0]), label_smoothing=0.1)


def test_loss_errors():
    """Without labels, and where label smoothing would not be that of the model's own loss."""
    report, batch = pair("bert").report, labels_for(pair("bert").ours)
    classifier = tiny("BertForSequenceClassification", "BertConfig", **STACK)
    with pytest.raises(ValueError, match="loss needs labels in the batch"):
        report.loss(classifier, input_ids=batch["input_ids"])
    with pytest.raises(TypeError, match="one cross"):
        report.loss(classifier, **batch | {"labels": torch.ones(3, 2, device=DEVICE)}, label_smoothing=0.1)


@full
@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=str)
def test_data_parallel(options, tmp_path):
    """DistributedDataParallel, which finds the parameters by the graph of its model's output, sums the gradients of
    report.loss."""
    theirs, ours, *_ = pair("marian")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(ours, **options)
        for _ in range(2):
            both_losses(theirs, parallel, labels_for(theirs))
    finally:
        torch.distributed.destroy_process_group()
