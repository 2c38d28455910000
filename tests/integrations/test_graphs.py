"""accelerate(model, graphs=True): next to the same model without graphs. Where there is no GPU, graphs are recorded."""

import copy
import inspect
import pickle
import random
import warnings

import numpy as np
import pytest
import torch
from families import DEVICE, FAMILIES, GENERATING, HUGGINGFACE, STACK, causal, padding, tiers, tiny
from recorded_graph import recorded_calls  # noqa: F401
from torch import nn

from fastattn import accelerate, restore, use_backend
from fastattn.graphs import stats
from fastattn.graphs.graphed_call import EAGER, NEW_SHAPE

pytestmark = pytest.mark.usefixtures("recorded_calls")
DECODES = {"is_decoder": True, "add_cross_attention": True}
MEMORY = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(1))
GRAPHED = [name for name in HUGGINGFACE if name not in ("gpt2", "t5gemma 2")]


@pytest.fixture(autouse=True)
def no_host_reads():
    """aten's operators for a CPU read values, which a capture refuses."""
    with use_backend(None if DEVICE == "cuda" else "reference"):
        yield


def graphed(name, **changes):
    """The family's model in training mode with graphs, its report, and a copy without graphs."""
    ours = FAMILIES[name].build(**changes).train()
    report = accelerate(ours, graphs=True)
    eager = copy.deepcopy(ours)
    accelerate(eager, graphs=False)
    return ours, report, eager


def batch_of(model, n, source=9, target=6):
    """The n-th of a training set, padded to these lengths. Every third has no mask."""
    generator = torch.Generator().manual_seed(n)
    drawn = lambda *shape: torch.randint(3, 99, shape, generator=generator).to(DEVICE)  # noqa: E731
    real = [torch.arange(k) < torch.tensor([k, k - n % 2, max(k // 2, 1)])[:, None] for k in (source, target)]
    source_real, target_real = (mask.to(DEVICE) for mask in real)
    config, kind = model.config, model.main_input_name
    if kind == "input_ids":
        batch = {"input_ids": drawn(3, source).masked_fill(~source_real, 1)}
        if n % 3:
            batch["attention_mask"] = source_real.long()
        labels = batch["input_ids"].masked_fill(~source_real, -100)
    else:
        batch = {key: t for key, t in FAMILIES["bert"].inputs(model)[0].items() if not key.startswith("decoder")}
        batch[kind] = batch[kind] * (1 + n % 5)
        labels = drawn(3) if kind == "pixel_values" else drawn(3, 4)
    if config.is_encoder_decoder:
        labels = drawn(3, target).masked_fill(~target_real, -100)
    return batch | {"labels": labels}


def check_step(models, losses, tolerance=1e-5):
    """The losses, and the gradients relative to the largest of all."""
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*(loss.detach() for loss in losses), rtol=tolerance, atol=tolerance)
    ours, eager = ({n: p.grad for n, p in model.named_parameters()} for model in models)
    pairs = [(name, g, eager[name]) for name, g in ours.items()]
    largest = max(g.abs().max() for _, _, g in pairs if g is not None)
    for name, found, expected in pairs:
        assert (found is None) == (expected is None), name
        assert found is None or (found - expected).abs().max() <= 10 * tolerance * largest, name


LENGTHS = ((9, 6), (12, 7), (9, 8), (17, 3), (12, 15))


@pytest.mark.parametrize("name", tiers(GRAPHED, "marian", "t5"))
@pytest.mark.filterwarnings("ignore:Version v4.12.0")
def test_training(name):
    """Thirty steps of changing lengths by an optimizer, the loss the model's own, as the Trainer has it, and
    report.loss in turn, with generate in between. Lengths that are padded to the same multiple of 8 share graphs."""
    ours, report, eager = graphed(name)
    models = ours, eager
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-3)
    for n in range(30):
        batch = batch_of(ours, n, *LENGTHS[n % len(LENGTHS)])
        if name == "llama":  # on a CPU transformers reads positions where there is no mask
            batch.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))
        count = {"num_items_in_batch": 20 + n} if "kwargs" in inspect.signature(ours.forward).parameters else {}
        losses = [report.loss(m, **batch) if n % 2 else m(**batch, **count).loss for m in models]
        check_step(models, losses, 1e-4 if "t5" in name else 1e-5)
        optimizer.step()
        with torch.no_grad():
            for p, q in zip(ours.parameters(), eager.parameters(), strict=True):
                q.copy_(p)
                p.grad = q.grad = None
        if n in (4, 20) and name in GENERATING:
            del batch["labels"]
            found = [model.generate(**batch, max_new_tokens=4, do_sample=False) for model in models]
            assert torch.equal(*found)
    done = stats(ours)
    assert done.replays > 20 and done.captures <= 9 and not stats(eager).replays
    assert set(done.eager) <= {"a new shape", "no gradient is recorded"}


def left(batch):
    return {"attention_mask": batch["attention_mask"].flip(1)}


def positions(batch):
    return {"position_ids": torch.arange(batch["input_ids"].shape[1], device=DEVICE)[None]}


def scores(batch):
    length = batch["input_ids"].shape[1]
    return {"attention_mask": torch.ones(3, 1, length, length, device=DEVICE).tril().bool()}


def embeddings(batch):
    return {"inputs_embeds": batch["input_ids"][..., None] * torch.ones(32, device=DEVICE) / 99, "input_ids": None}


# The family, its changes, what is changed of a batch, and whether batches of 9 and of 10 tokens share a graph.
LENGTHS_OF_GRAPHS = {
    "mask": ("bert", {}, lambda b: {}, True),
    "no mask": ("bert", {}, lambda b: {"attention_mask": None}, True),
    "left": ("bert", {}, left, True),
    "types": ("bert", {}, lambda b: {"token_type_ids": b["input_ids"] % 2}, True),
    "as long as positions": ("bert", {"max_position_embeddings": 16}, lambda b: {}, True),
    "fewer positions": ("bert", {"max_position_embeddings": 15}, lambda b: {}, False),
    "positions": ("bert", {}, positions, False),
    "a mask of scores": ("bert", {}, scores, False),
    "one mask": ("bert", {}, lambda b: {"attention_mask": b["attention_mask"][1:2]}, False),
    "embeddings": ("bert", {}, embeddings, False),
    "a memory": ("bert", DECODES, lambda b: {"encoder_hidden_states": MEMORY.to(DEVICE)}, True),
    "no embedding of padding": ("t5", {"pad_token_id": 99}, lambda b: {}, False),
    "its own mask": ("t5gemma", {}, lambda b: {"attention_mask": None}, False),
    "roberta": ("roberta", {"max_position_embeddings": 16}, lambda b: {}, True),
}


@pytest.mark.parametrize("case", LENGTHS_OF_GRAPHS)
def test_padding(case):
    """Results and gradients are those without padding."""
    name, changes, change, is_shared = LENGTHS_OF_GRAPHS[case]
    ours, _, eager = graphed(name, **changes)
    for length in (9, 9, 9, 10, 10):
        batch = batch_of(ours, 1, length)
        batch |= change(batch)
        if name == "t5":
            batch["labels"] = batch["input_ids"] % 7
        losses = []
        for model in (ours, eager):
            model.zero_grad()
            losses.append(model(**batch).loss)
        check_step((ours, eager), losses, 1e-4 if "t5" in name else 1e-5)
    done = stats(ours.get_encoder() if ours.config.is_encoder_decoder else ours)
    assert (done.captures, done.replays) == (1, 3 if is_shared else 1)


TRAINED = {
    "accumulation": dict(gradient_accumulation_steps=2, label_smoothing_factor=0.1, bf16=True),
    "evaluation": dict(eval_strategy="steps", eval_steps=3, predict_with_generate=True, generation_max_length=6)
    | dict(train_sampling_strategy="group_by_length", max_grad_norm=0.1, lr_scheduler_type="cosine"),
}


def sentences(count):
    """All batches have the same multiple of 8 as lengths."""
    generator = random.Random(count)
    draw = lambda: [generator.randint(3, 98) for _ in range(generator.randint(9, 14))]  # noqa: E731
    rows = [{"input_ids": draw(), "labels": draw(), "unused": "text"} for _ in range(count)]
    return [row | {"attention_mask": [1] * len(row["input_ids"])} for row in rows]


@pytest.mark.full
@pytest.mark.parametrize("options", TRAINED)
@pytest.mark.parametrize("name", ["marian", "t5"])
def test_trainer(name, options, tmp_path):
    """Hugging Face's Trainer. A checkpoint every second step changes nothing; a new model continues from the last."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    states = pytest.importorskip("accelerate.state")
    words = tokenizers.models.WordLevel({f"<{n}>": n for n in range(99)}, unk_token="<3>")
    words = dict(tokenizer_object=tokenizers.Tokenizer(words), pad_token="<1>", eos_token="<2>")
    tokenizer = transformers.PreTrainedTokenizerFast(**words)
    given = dict(logging_steps=1, save_steps=2, use_cpu=DEVICE == "cpu", report_to=[], disable_tqdm=True)
    given |= dict(per_device_train_batch_size=4, learning_rate=1e-3) | TRAINED[options]
    multiple, found = 8 if given.get("bf16") else None, []
    for graphs in (True, False):
        for steps, new in ((4, 4), (8, 4)):
            model = FAMILIES[name].build().train()
            accelerate(model, graphs=graphs)
            trainer = transformers.Seq2SeqTrainer(
                model,
                transformers.Seq2SeqTrainingArguments(str(tmp_path / str(graphs)), max_steps=steps, **given),
                transformers.DataCollatorForSeq2Seq(tokenizer, model, pad_to_multiple_of=multiple),
                train_dataset=sentences(24),
                eval_dataset=sentences(5),
                processing_class=tokenizer,
            )
            trainer.train(resume_from_checkpoint=steps > new)
            if graphs:
                done, calls = stats(model), 2 * new * given.get("gradient_accumulation_steps", 1)
                assert (done.replays, done.captures, done.eager) == (calls - 2 * EAGER, 2, {NEW_SHAPE: 2 * EAGER})
        history = trainer.state.log_history
        logs = [entry[key] for entry in history for key in ("loss", "grad_norm", "eval_loss") if key in entry]
        found.append((torch.tensor(logs), model.state_dict()))
    states.AcceleratorState._reset_state(True)
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_nn(batch_first):
    """torch.nn.Transformer. Without hints its causal mask is used as it is. The memory gets its gradient."""
    ours, _, eager = graphed("transformer", batch_first=batch_first)
    for n in range(12):
        sizes = [(5, 7), (6, 7), (5, 9)][n % 3]
        src, tgt = [torch.randn(2, size, 16) + n % 2 for size in reversed(sizes)]
        masks = dict(tgt_mask=causal(sizes[0]), src_key_padding_mask=padding(sizes[1]))
        masks |= dict(memory_key_padding_mask=padding(sizes[1]), tgt_is_causal=[None, False, True][n % 3])
        given = [t.to(DEVICE) if batch_first else t.to(DEVICE).transpose(0, 1) for t in (src, tgt)]
        losses = []
        for model in (ours, eager):
            model.zero_grad()
            out = model(*given, **masks)
            losses.append((out * torch.linspace(-1, 1, out.numel(), device=DEVICE).view_as(out)).sum())
        check_step((ours, eager), losses, 1e-4)
    with pytest.raises(TypeError, match="multiple values"):
        ours.encoder(given[0], src=given[0])
    with torch.no_grad():
        out, expected = (model.eval()(*given, **masks) for model in (ours, eager))
    assert torch.equal(out, expected)
    assert stats(ours).replays == 14 and stats(ours).captures == 5


def test_outputs():
    """A stack that is called by itself: its pooler's output is whole, its weights have a gradient if it is used."""
    pytest.importorskip("transformers")
    ours = tiny("BertModel", "BertConfig", **STACK).eval()  # without a cache: it is no decoder
    accelerate(ours, graphs=True)
    eager = copy.deepcopy(ours)
    accelerate(eager, graphs=False)
    for n in range(8):
        batch, losses = batch_of(ours, n, 9 + n % 3), []
        del batch["labels"]
        for model in (ours, eager):
            model.zero_grad()
            output = model(**batch)
            assert output.last_hidden_state.shape[:2] == batch["input_ids"].shape
            assert output.pooler_output.shape == (3, 32)
            losses.append(output.last_hidden_state.square().mean() + (output.pooler_output.sum() if n % 2 else 0))
        check_step((ours, eager), losses)
        assert (ours.pooler.dense.weight.grad is None) == (n % 2 == 0)
    assert stats(ours).replays == 4 and stats(ours).captures == 2  # with a mask and without


def test_a_frozen_encoder_and_a_changed_model():
    """Its stack is eager: there is nothing to differentiate. A change of the decoder captures again."""
    ours, _, eager = graphed("bart")
    for model in (ours, eager):
        model.model.encoder.requires_grad_(False)
    for n in range(9):
        if n == 5:
            for model in (ours, eager):
                model.model.decoder.layers[0].fc1.bias.data = torch.linspace(-1, 1, 48, device=DEVICE)
        losses = []
        for model in (ours, eager):
            model.zero_grad()
            losses.append(model(**batch_of(model, 1)).loss)
        check_step((ours, eager), losses)
    assert stats(ours.model.decoder).replays == 3 + 2 and stats(ours.model.encoder).replays == 0


@pytest.mark.filterwarnings("ignore:.* runs without CUDA graphs. .*cache:RuntimeWarning")
@pytest.mark.parametrize("training", [True, False])
def test_a_loop_that_decodes(training):
    """With gradients, by a cache: it is returned in eval mode, and used in both."""
    ours, _, eager = graphed("whisper")
    name = next(
        n for n in ("cache", "past_key_values") if n in inspect.signature(ours.model.decoder.forward).parameters
    )
    tokens = torch.tensor([[3, 4, 5], [6, 7, 8], [9, 3, 4]], device=DEVICE)
    found = []
    for model in (ours, eager):
        batch = FAMILIES["whisper"].inputs(model)[0] | {"use_cache": True}
        for _ in range(4):
            cache = model.eval()(**batch | {"decoder_input_ids": tokens[:, :2]})[name]
            output = model.train(training)(**batch | {"decoder_input_ids": tokens[:, 2:], name: cache})
        found.append(output.logits)
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert cache.get_seq_length() == 3 and stats(ours.model.decoder).replays == 0


@pytest.mark.parametrize("name", ["marian", "transformer"])
def test_copies_and_restore(name):
    """A copy has its own graphs. restore, and graphs=False, give the classes back."""
    ours = FAMILIES[name].build()
    kinds = [type(m) for m in ours.modules()]
    accelerate(ours)
    accelerated, signatures = [type(m) for m in ours.modules()], [inspect.signature(m.forward) for m in ours.modules()]
    report = accelerate(ours, graphs=True)
    assert sum("CUDA graphs" in entry.kind for entry in report.taken) == 2
    with_graphs = [type(m) for m in ours.modules()]
    assert [inspect.signature(m.forward) for m in ours.modules()] == signatures  # generate reads the encoder's
    assert sum(a is not b for a, b in zip(with_graphs, accelerated, strict=True)) == 2
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert [type(m) for m in other.modules()] == with_graphs
        restore(other)
        assert [type(m) for m in other.modules()] == kinds
    accelerate(ours)
    assert [type(m) for m in ours.modules()] == with_graphs
    accelerate(ours, graphs=False)
    assert [type(m) for m in ours.modules()] == accelerated


# What a graph would not repeat.


PACKED = {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]]), "attention_mask": None}


def checkpoint(model):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def set_config(model, **options):
    for stack in (model, *model.modules()):
        for name, value in options.items():
            if hasattr(getattr(stack, "config", None), name):
                setattr(stack.config, name, value)


def drop_layers(model):
    for module in model.modules():
        if hasattr(module, "layerdrop"):
            module.layerdrop = 0.5
    set_config(model, layerdrop=0.5)


def mask_time(model):
    set_config(model, apply_spec_augment=True, mask_time_prob=0.5, mask_time_length=2)


def ask_for_attentions(model):
    """Since then transformers has hooks on the modules of attention."""
    with torch.no_grad():
        model(**batch_of(model, 1), output_attentions=True)


class Mine(nn.Linear):
    def forward(self, x):
        return super().forward(x) * self.scales["mine"]


def adapt(model):
    """As an adapter, which reads a dict."""
    map_ = next(m for m in model.modules() if type(m) is nn.Linear)
    map_.__class__, map_.scales = Mine, {"mine": 2.0}


NUMBERS = "the module draws random numbers on the host"
# The family, what is done to the model, what is given, the warning, and the stacks that give it.
REFUSED = {
    "checkpointing": ("marian", checkpoint, {}, "gradient checkpointing", 2),
    "LayerDrop": ("marian", drop_layers, {}, NUMBERS, 2),
    "LayerDrop of sound": ("wav2vec2", drop_layers, {}, NUMBERS, 1),
    "SpecAugment": ("hubert", mask_time, {}, NUMBERS, 1),
    "SpecAugment of Wav2Vec2": ("wav2vec2", mask_time, {}, NUMBERS, 1),
    "a class of others": ("t5", adapt, {}, "test_graphs.Mine is a class whose code is not known", 1),
    "hooks": ("bert", ask_for_attentions, {}, "BertLayer has forward hooks", 1),
    "attentions": ("bert", None, {"output_attentions": True}, "output_attentions", 1),
    "hidden states": ("marian", lambda m: set_config(m, output_hidden_states=True), {}, "output_hidden_states", 2),
    "packed": ("llama", None, PACKED, "may be those of packed sequences", 1),
    "a cache": ("t5", nn.Module.eval, {}, "outside of training give use_cache=False", 1),
    "T5Gemma 2": ("t5gemma 2", None, {}, "it selects tokens by their values", 1),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_call_that_is_refused(case):
    """It is eager, with one warning of each stack."""
    name, change, given, message, count = REFUSED[case]
    ours, _, eager = graphed(name)
    for model in (ours, eager):
        if change is not None:
            change(model)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for n in range(5):
            losses = []
            for model in (ours, eager):
                torch.manual_seed(n), np.random.seed(n)
                model.zero_grad()
                losses.append(model(**batch_of(model, 1) | given)[0])
            if n != 2 or change is not mask_time:  # the capture that failed has drawn numbers
                check_step((ours, eager), losses)
    found = [str(w.message) for w in found if "CUDA graphs" in str(w.message)]
    assert len(found) == count and all(message in text for text in found), found
    assert all(message in reason for reason in stats(ours).eager if reason != "a new shape")
