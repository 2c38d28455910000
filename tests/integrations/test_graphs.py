"""accelerate(model, graphs=True): next to the same model without graphs. Where there is no GPU, graphs are recorded."""

import copy
import inspect
import pickle
import warnings

import pytest
import torch
from families import DEVICE, FAMILIES, GENERATING, HUGGINGFACE, causal, kinds_of, padding, tiers
from recorded_graph import recorded_calls  # noqa: F401
from torch import nn

from fastattn import GraphedStep, accelerate, restore, use_backend
from fastattn.graphs import stats

pytestmark = [pytest.mark.usefixtures("recorded_calls"), pytest.mark.filterwarnings("ignore::FutureWarning")]
EAGER_CALLS = 2  # of a shape, before it is captured


@pytest.fixture(autouse=True)
def no_host_reads():
    """aten's operators for a CPU read values, which a capture refuses."""
    with use_backend(None if DEVICE == "cuda" else "reference"):
        yield


def graphed(model):
    """The model with graphs, its report, and a copy without graphs."""
    report = accelerate(model, graphs=True)
    eager = copy.deepcopy(model)
    accelerate(eager, graphs=False)
    return model, report, eager


def family(name, **changes):
    return graphed(FAMILIES[name].build(**changes).train())


def batch_of(model, n, source=9, target=6):
    """The n-th of a training set, padded to these lengths. Every third has no mask."""
    generator = torch.Generator().manual_seed(n)
    drawn = lambda *shape: torch.randint(3, 99, shape, generator=generator).to(DEVICE)  # noqa: E731
    real = [torch.arange(k) < torch.tensor([k, k - n % 2, max(k // 2, 1)])[:, None] for k in (source, target)]
    source_real, target_real = (mask.to(DEVICE) for mask in real)
    kind = model.main_input_name
    if kind == "input_ids":
        batch = {kind: drawn(3, source).masked_fill(~source_real, 1)}
        batch |= {"attention_mask": source_real.long()} if n % 3 else {}
        labels = batch[kind].masked_fill(~source_real, -100)
    else:
        batch = {kind: FAMILIES["bert"].inputs(model)[0][kind] * (1 + n % 5)}
        labels = drawn(3) if kind == "pixel_values" else drawn(3, 4)
    return batch | {
        "labels": drawn(3, target).masked_fill(~target_real, -100) if model.config.is_encoder_decoder else labels
    }


def compare(models, loss_of, tolerance=1e-5):
    """The losses and gradients of a step, the gradients relative to the largest of all."""
    losses = []
    for model in models:
        model.zero_grad()
        losses.append(loss_of(model))
        losses[-1].backward()
    torch.testing.assert_close(*(loss.detach() for loss in losses), rtol=tolerance, atol=tolerance)
    ours, eager = ({n: p.grad for n, p in model.named_parameters()} for model in models)
    largest = max(g.abs().max() for g in ours.values() if g is not None)
    for name, found in ours.items():
        assert (found is None) == (eager[name] is None), name
        assert found is None or (found - eager[name]).abs().max() <= 10 * tolerance * largest, name


LENGTHS = ((9, 6), (12, 7), (17, 3))
GRAPHED = [name for name in HUGGINGFACE if name != "gpt2"]


@pytest.mark.parametrize("name", tiers(GRAPHED, "marian"))
@pytest.mark.filterwarnings("ignore:Version v4.12.0")
def test_training(name):
    """Steps of changing lengths by an optimizer, the loss the model's own, as the Trainer has it, and report.loss in
    turn, with generate in between. Lengths that are padded to the same multiple of 8 share graphs."""
    ours, report, eager = family(name)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-3)
    for n in range(18):
        batch = batch_of(ours, n, *LENGTHS[n % len(LENGTHS)])
        count = {"num_items_in_batch": 20 + n} if "kwargs" in inspect.signature(ours.forward).parameters else {}
        loss_of = (lambda m: report.loss(m, **batch)) if n % 2 else (lambda m: m(**batch, **count).loss)  # noqa: B023
        compare((ours, eager), loss_of, 1e-4 if "t5" in name else 1e-5)
        optimizer.step()
        eager.load_state_dict(ours.state_dict())
        if n == 9 and name in GENERATING:
            del batch["labels"]
            found = [model.generate(**batch, max_new_tokens=4, do_sample=False) for model in (ours, eager)]
            assert torch.equal(*found)
    done = stats(ours)
    assert done.replays > 8 and done.captures <= 9 and not stats(eager).replays
    assert {*done.eager} <= {"a new shape", "no gradient is recorded"}


def test_an_output_that_is_not_used():
    """Weights that a loss does not reach have no gradient, as without graphs. The stack is called by itself."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=48))
    ours, _, eager = graphed(model.to(DEVICE).eval())

    def loss_of(model):
        states, pooled = model(ids)[:2]
        return states.square().mean() + (pooled.sum() if n % 2 else 0)

    for n in range(8):
        ids = torch.randint(3, 99, (3, 9 + n % 3), device=DEVICE)
        compare((ours, eager), loss_of)
        assert (ours.pooler.dense.weight.grad is None) == (n % 2 == 0)
    assert stats(ours).replays > 3


MEMORY = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(1))
DECODES = {"is_decoder": True, "add_cross_attention": True}
# The family, its changes, what is changed of a batch, and whether batches of 9 and of 10 tokens share a graph.
SHARED = {
    "mask": ("bert", {}, lambda b: {}, True),
    "left": ("bert", {}, lambda b: {"attention_mask": b["attention_mask"].flip(1)}, True),
    "as long as positions": ("bert", {"max_position_embeddings": 16}, lambda b: {}, True),
    "fewer positions": ("bert", {"max_position_embeddings": 15}, lambda b: {}, False),
    "one mask": ("bert", {}, lambda b: {"attention_mask": b["attention_mask"][1:2]}, False),
    "a memory": ("bert", DECODES, lambda b: {"encoder_hidden_states": MEMORY.to(DEVICE)}, True),
    "no embedding of padding": ("t5", {"pad_token_id": 99}, lambda b: {"labels": b["input_ids"] % 7}, False),
}


@pytest.mark.parametrize("case", tiers(SHARED, "left", "fewer positions", "a memory"))
def test_padding(case):
    """Results and gradients are those without padding."""
    name, changes, change, is_shared = SHARED[case]
    ours, _, eager = family(name, **changes)
    for length in (9, 9, 9, 10, 10):
        batch = batch_of(ours, 1, length)
        batch |= change(batch)
        compare((ours, eager), lambda model: model(**batch).loss, 1e-4 if "t5" in name else 1e-5)  # noqa: B023
    done = stats(ours.get_encoder() if ours.config.is_encoder_decoder else ours)
    assert (done.captures, done.replays) == (1, 3 if is_shared else 1)


@pytest.mark.full
@pytest.mark.parametrize("name", ["marian", "t5"])
def test_trainer(name, tmp_path):
    """Hugging Face's Trainer. A checkpoint every second step changes nothing."""
    transformers, states = pytest.importorskip("transformers"), pytest.importorskip("accelerate.state")
    rows = [{"input_ids": [*range(3, 12 + n % 6)], "labels": [*range(20 + n, 30 + n)]} for n in range(24)]
    rows = [row | {"attention_mask": [1] * len(row["input_ids"]), "unused": "text"} for row in rows]
    given = dict(logging_steps=1, save_steps=2, use_cpu=DEVICE == "cpu", report_to=[], disable_tqdm=True)
    given |= dict(gradient_accumulation_steps=2, label_smoothing_factor=0.1, bf16=True, max_grad_norm=0.1)
    given |= dict(per_device_train_batch_size=4, learning_rate=1e-3, lr_scheduler_type="cosine")

    def collate(features):  # all batches have the same multiple of 8 as lengths
        pad = lambda name, value: [f[name] + [value] * (16 - len(f[name])) for f in features]  # noqa: E731
        batch = {"input_ids": pad("input_ids", 1), "labels": pad("labels", -100)}
        batch = {n: torch.tensor(t) for n, t in (batch | {"attention_mask": pad("attention_mask", 0)}).items()}
        return batch | {"decoder_input_ids": model.prepare_decoder_input_ids_from_labels(batch["labels"])}

    found = []
    for graphs in (True, False):
        model = FAMILIES[name].build().train()
        accelerate(model, graphs=graphs)
        arguments = transformers.Seq2SeqTrainingArguments(str(tmp_path / str(graphs)), max_steps=6, **given)
        trainer = transformers.Seq2SeqTrainer(model, arguments, collate, train_dataset=rows)
        trainer.train()
        assert stats(model).captures == (2 if graphs else 0)
        logs = [entry[key] for entry in trainer.state.log_history for key in ("loss", "grad_norm") if key in entry]
        found.append((torch.tensor(logs), model.state_dict()))
    states.AcceleratorState._reset_state(True)
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


def test_torch_nn():
    """torch.nn.Transformer. Without hints its causal mask is used as it is. The memory gets its gradient."""
    ours, _, eager = family("transformer", batch_first=False)
    for n in range(8):
        L, S = [(5, 7), (6, 9)][n % 2]
        masks = dict(tgt_mask=causal(L), src_key_padding_mask=padding(S), memory_key_padding_mask=padding(S))
        masks["tgt_is_causal"] = [None, True][n % 2]
        given = [torch.randn(size, 2, 16, device=DEVICE) + n % 2 for size in (S, L)]
        weights = torch.linspace(-1, 1, given[1].numel(), device=DEVICE).view_as(given[1])
        compare((ours, eager), lambda model: (model(*given, **masks) * weights).sum(), 1e-4)  # noqa: B023
    with torch.no_grad():
        assert torch.equal(*(model.eval()(*given, **masks) for model in (ours, eager)))
    assert stats(ours).replays == 8 and stats(ours).captures == 4


@pytest.mark.parametrize("graphed_step", [False, True])
def test_a_wrong_call_that_is_repeated(graphed_step):
    """It raises as it would without graphs, and is not captured: right calls of a new shape still are."""
    ours, report, eager = family("marian")
    step = GraphedStep(ours, torch.optim.Adam(ours.parameters(), fused=True, capturable=True), loss=report.loss)
    call = step if graphed_step else lambda **batch: report.loss(ours, **batch)
    for _ in range(EAGER_CALLS + 2):
        with pytest.raises(RuntimeError, match="Float"):
            call(**batch_of(ours, 1) | {"input_ids": torch.ones(3, 9, device=DEVICE)})
    for _ in range(EAGER_CALLS + 6):
        call(**batch_of(ours, 1))
    assert stats(ours).replays and {*stats(ours).eager} == {"a new shape"}


def test_a_frozen_encoder_and_a_changed_model():
    """Its stack is eager: there is nothing to differentiate. A change of the decoder captures again."""
    ours, _, eager = family("bart")
    for model in (ours, eager):
        model.model.encoder.requires_grad_(False)
    for n in range(7):
        for model in (ours, eager) if n == 3 else ():
            model.model.decoder.layers[0].fc1.bias.data = torch.linspace(-1, 1, 48, device=DEVICE)
        compare((ours, eager), lambda model: model(**batch_of(model, 1)).loss)
    assert stats(ours.model.decoder).replays == 1 + 2 and stats(ours.model.encoder).replays == 0


@pytest.mark.filterwarnings("ignore:.* runs without CUDA graphs. .*cache:RuntimeWarning")
def test_a_loop_that_decodes():
    """With gradients, by a cache."""
    ours, _, eager = family("whisper")
    options = inspect.signature(ours.model.decoder.forward).parameters
    name = next(n for n in ("cache", "past_key_values") if n in options)
    tokens, found = torch.tensor([[3, 4, 5], [6, 7, 8], [9, 3, 4]], device=DEVICE), []
    for model in (ours, eager):
        batch = FAMILIES["whisper"].inputs(model)[0] | {"use_cache": True}
        for _ in range(4):
            cache = model.eval()(**batch | {"decoder_input_ids": tokens[:, :2]})[name]
            found.append(model(**batch | {"decoder_input_ids": tokens[:, 2:], name: cache}).logits)
    torch.testing.assert_close(found[3], found[7], rtol=0, atol=0)
    assert cache.get_seq_length() == 3 and stats(ours.model.decoder).replays == 0


@pytest.mark.parametrize("name", ["marian", "transformer"])
def test_copies_and_restore(name):
    """A copy has its own graphs. restore, and graphs=False, give the classes back."""
    ours = FAMILIES[name].build()
    kinds = kinds_of(ours)
    accelerate(ours)
    accelerated, signatures = kinds_of(ours), [inspect.signature(m.forward) for m in ours.modules()]
    report = accelerate(ours, graphs=True)
    assert sum("CUDA graphs" in entry.kind for entry in report.replaced) == 2
    with_graphs = kinds_of(ours)
    assert [inspect.signature(m.forward) for m in ours.modules()] == signatures  # generate reads the encoder's
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert kinds_of(other) == with_graphs
        restore(other)
        assert kinds_of(other) == kinds
    for graphs, expected in ((None, with_graphs), (False, accelerated)):
        accelerate(ours, graphs=graphs)
        assert kinds_of(ours) == expected


# What a graph would not repeat.


def set_config(**options):
    """In the configs of all stacks, and as an attribute of modules that have it."""

    def change(model):
        for module in model.modules():
            for name, value in options.items():
                for owner in (module, getattr(module, "config", None)):
                    if hasattr(owner, name):
                        setattr(owner, name, value)

    return change


def checkpoint(model):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


NUMBERS = "the module draws random numbers on the host"
OF_SOUND = {"attention_mask": torch.ones(3, 18, dtype=torch.long, device=DEVICE)}
PACKED = {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]], device=DEVICE), "attention_mask": None}
# The family, what is done to the model, what is given, the warning, and the stacks that give it.
REFUSED = {
    "checkpointing": ("marian", checkpoint, {}, "gradient checkpointing", 2),
    "LayerDrop": ("marian", set_config(layerdrop=0.5), {}, NUMBERS, 2),
    "hidden states": ("marian", set_config(output_hidden_states=True), {}, "output_hidden_states", 2),
    "packed": ("llama", None, PACKED, "may be those of packed sequences", 1),
    "sound": ("wav2vec2", None, OF_SOUND, "it indexes by its attention_mask", 1),
    "a cache": ("t5", nn.Module.eval, {}, "outside of training give use_cache=False", 1),
}


@pytest.mark.parametrize("case", tiers(REFUSED, "LayerDrop", "packed", "a cache"))
def test_a_call_that_is_refused(case):
    """It is eager, with one warning of each stack."""
    name, change, given, message, count = REFUSED[case]
    ours, _, eager = family(name)
    for model in (ours, eager) if change else ():
        change(model)

    def loss_of(model):
        torch.manual_seed(1)
        return model(**batch_of(model, 1) | given)[0]

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(5):
            compare((ours, eager), loss_of)
    found = [str(w.message) for w in found if "CUDA graphs" in str(w.message)]
    assert len(found) == count and all(message in text for text in found), found
    assert all(message in reason for reason in stats(ours).eager if reason != "a new shape")
