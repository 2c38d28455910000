"""Common uses of an nn.Module: FusedTransformer gives the same results as the public architecture in plain modules."""

import copy
import io
import math
import threading
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from model_checks import (
    DEVICE,
    NO_DROPOUT,
    PAD_SRC,
    PAD_TRG,
    SMALL,
    VOCAB,
    assert_same_gradients,
    draw_own_seeds,
    fused,
    gold_of,
    keep_products,
    pair,
    plain,
)
from recorded_graph import recorded_calls  # noqa: F401
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from fastattn import FusedTransformer, use_backend
from fastattn.graphs.graphed_call import EAGER, NEW_SHAPE, stats
from fastattn.nn import DecoderLayer, EncoderLayer, PositionalEncoding


def loss_of(model, batch, by_loss=True):
    """Of FusedTransformer by a call with gold, of others by their logits."""
    src, trg = batch
    gold = gold_of(trg)
    if by_loss and isinstance(model, FusedTransformer):
        return model(src, trg, gold, label_smoothing=0.1)
    logits = model(src, trg).float()
    return F.cross_entropy(logits, gold.flatten(), ignore_index=PAD_TRG, label_smoothing=0.1)


def gradients(model):
    return {name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in model.named_parameters()}


def check_same_training(train, batch, tolerance=1e-4, graphs=False, **options):
    """train(model, loss) gives losses: of both models, and of FusedTransformer by its loss and by its logits."""
    found = []
    for kind, by_loss in ((fused, True), (fused, False), (plain, True)):
        torch.manual_seed(5)
        model = kind(**NO_DROPOUT, **options)
        with use_backend("reference") if graphs else nullcontext():
            model.graphs = graphs
            found.append(torch.tensor(train(model, partial(loss_of, by_loss=by_loss))))
        if graphs and kind is fused:
            done = stats(model)
            assert done.replays == len(found[-1]) - EAGER and done.eager == {NEW_SHAPE: EAGER}, done.eager
    for losses in found[:-1]:
        torch.testing.assert_close(losses, found[-1], rtol=tolerance, atol=0)
    assert found[-1][-1] < found[-1][0]


def optimise(model, loss, batch, optimizer, steps=8, micro=1, clip=None):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for part in zip(*(t.chunk(micro) for t in batch), strict=True):
            value = loss(model, part) / micro
            value.backward()
            total += value.item()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(total)
    return losses


GRAPHS = pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
OPTIMIZERS = {
    "fused": partial(torch.optim.Adam, lr=3e-3, fused=True),
    "foreach": partial(torch.optim.AdamW, lr=3e-3, foreach=True),
    "momentum": partial(torch.optim.SGD, lr=3e-2, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_accumulation_and_clipping(optimizer, batch):
    def train(model, loss):
        return optimise(model, loss, batch, OPTIMIZERS[optimizer](model.parameters()), micro=3, clip=0.5)

    check_same_training(train, batch)


@GRAPHS
def test_grad_scaler_with_float16(graphs, batch, recorded_calls):  # noqa: F811
    """A scaled loss in float16: the same steps are skipped, and the losses of the others fall equally."""

    def train(model, loss):
        scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**14, growth_interval=4)
        optimizer, losses = torch.optim.Adam(model.parameters(), lr=3e-3), []
        for i in range(12):
            with torch.autocast(DEVICE, torch.float16):
                value = loss(model, batch)
            optimizer.zero_grad()
            scaler.scale(value * (math.inf if i == 6 else 1)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(value.item())
        assert scaler.get_scale() >= 2.0**14 and all(p.isfinite().all() for p in model.parameters())
        return losses

    check_same_training(train, batch, tolerance=1e-2, graphs=graphs)


def test_ema_copies(batch):
    averages = []
    for model in pair():
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            optimise(model, loss_of, batch, optimizer, steps=1)
            average.update_parameters(model)
        averages.append(average.module.eval())
    state, expected = (a.state_dict() for a in averages)
    for name, t in expected.items():
        torch.testing.assert_close(state[name], t, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(loss_of(averages[0], batch), loss_of(averages[1], batch))
    assert averages[0].trg_word_prj.weight is averages[0].decoder.trg_word_emb.weight


@pytest.mark.parametrize(
    ("kind", "norm_first"), [("plain", False), ("plain", True), ("reentrant", False), ("selective", False)]
)
def test_activation_checkpointing(kind, norm_first, batch):
    """The recomputed forward drops the same elements."""
    options = {"checkpoint_impl": CheckpointImpl.REENTRANT if kind == "reentrant" else CheckpointImpl.NO_REENTRANT}
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, keep_products)
    found = fused(dropout=0.3, attn_dropout=0.2, norm_first=norm_first, pack_padding=False)
    expected = copy.deepcopy(found)
    for model, wrap in ((found, options), (expected, {"checkpoint_fn": draw_own_seeds})):
        apply_activation_checkpointing(
            model, partial(checkpoint_wrapper, **wrap), lambda m: isinstance(m, (EncoderLayer, DecoderLayer))
        )
        torch.manual_seed(8)
        loss_of(model, batch).backward()
    assert_same_gradients(gradients(found), gradients(expected), 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_cast_as_a_whole(dtype, batch):
    """model.half() and the like: within a few roundings of the plain modules, in forward, loss and gradients."""
    ours, theirs = pair()
    exact = loss_of(theirs, batch)
    exact.backward()
    truth, errors = gradients(theirs), []
    for model in (theirs, ours):
        low = copy.deepcopy(model).to(dtype)
        low.zero_grad()
        assert low(*batch).dtype == dtype
        value = loss_of(low, batch)
        value.backward()
        assert all(p.grad.dtype == dtype for p in low.parameters())
        errors.append({n: (g.float() - truth[n]).norm() for n, g in gradients(low).items()} | {"loss": value - exact})
    for name, error in errors[1].items():
        assert error.abs() <= 2 * errors[0][name].abs() + 4 * torch.finfo(dtype).eps + 1e-5, name


def test_state_dicts_files_and_memory(batch, tmp_path):
    """torch.save holds each parameter once; safetensors accepts the model; both load into plain modules and back."""
    safetensors = pytest.importorskip("safetensors.torch")
    ours, theirs = pair()
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(0.01)
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    numbers = sum(t.numel() for t in {t.data_ptr(): t for t in ours.state_dict().values()}.values())
    assert file.tell() <= 4 * numbers * 1.05 + 30_000  # names, and a header for each tensor
    safetensors.save_model(ours, str(tmp_path / "model.safetensors"))
    for target in (fused(), plain()):
        missing, unexpected = safetensors.load_model(target, str(tmp_path / "model.safetensors"))
        assert not missing and not unexpected
        for name, t in ours.state_dict().items():
            assert torch.equal(target.state_dict()[name], t)
    safetensors.save_model(theirs, str(tmp_path / "plain.safetensors"))
    safetensors.load_model(ours, str(tmp_path / "plain.safetensors"))
    torch.testing.assert_close(ours(*batch), theirs(*batch), rtol=0, atol=2e-5)


def built_on_meta(how):
    """A model whose parameters get their memory later, as loaders of large checkpoints do it."""
    _, theirs = pair()
    with torch.device("meta"):
        model = FusedTransformer(VOCAB, VOCAB, PAD_SRC, PAD_TRG, **SMALL, **NO_DROPOUT)
    if how == "assign":
        model.load_state_dict(copy.deepcopy(theirs.state_dict()), assign=True)
    else:
        model.to_empty(device=DEVICE)
        with torch.no_grad():
            for t in (*model.parameters(), *model.buffers()):
                t.fill_(torch.nan)
        if how == "to_empty":
            model.load_state_dict(theirs.state_dict())
        else:
            model.reset_parameters()
    return model, theirs


@pytest.mark.parametrize("how", ["assign", "to_empty", "reset"])
def test_meta_device(how, batch):
    """The shared weight stays one: three steps equal those of a model that was built on its device."""
    model, theirs = built_on_meta(how)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert model.trg_word_prj.weight is model.decoder.trg_word_emb.weight is model.encoder.src_word_emb.weight
    if how == "reset":
        fresh = fused(**NO_DROPOUT)
        for (name, t), u in zip(model.state_dict().items(), fresh.state_dict().values(), strict=True):
            assert t.isfinite().all() and (t.std() - u.std()).abs() <= 0.2 * u.std() + 1e-6, name
        theirs.load_state_dict(model.state_dict())
    losses = [optimise(m, loss_of, batch, torch.optim.SGD(m.parameters(), lr=0.1), steps=3) for m in (model, theirs)]
    torch.testing.assert_close(*map(torch.tensor, losses))


def test_constructors_take_device_and_dtype():
    model = FusedTransformer(VOCAB, VOCAB, PAD_SRC, PAD_TRG, **SMALL, device="meta", dtype=torch.bfloat16)
    assert {(t.device.type, t.dtype) for t in model.state_dict().values()} == {("meta", torch.bfloat16)}
    assert EncoderLayer(8, 16, 2, 4, 4, dtype=torch.float64).slf_attn.fc.weight.dtype == torch.float64
    table = PositionalEncoding(6, 5, dtype=torch.float64).pos_table
    torch.testing.assert_close(table.float(), PositionalEncoding(6, 5).pos_table)


def replica_of(module):
    """As torch.nn.DataParallel makes replicas on other devices: modules whose weights are plain tensors."""
    copies = {m: m._replicate_for_data_parallel() for m in module.modules()}
    for m, replica in copies.items():
        for name, child in m._modules.items():
            replica._modules[name] = copies.get(child)
        for name, p in m._parameters.items():
            if p is None:
                replica._parameters[name] = None
            else:
                setattr(replica, name, p * 1)
    return copies[module]


def test_replicas_of_data_parallel(batch):
    """Two replicas in threads, each with its part of the batch: losses are gathered, gradients meet in the model."""
    ours, theirs = pair()
    parts = [tuple(t[rows] for t in batch) for rows in (slice(0, 1), slice(1, 3))]
    losses = [None, None]

    def run(n, replica):
        losses[n] = loss_of(replica, parts[n])

    threads = [threading.Thread(target=run, args=(n, replica_of(ours))) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.stack(losses).mean().backward()
    torch.stack([loss_of(theirs, part) for part in parts]).mean().backward()
    assert_same_gradients(gradients(ours), gradients(theirs), 1e-3)
    with torch.no_grad():
        torch.testing.assert_close(nn.DataParallel(ours)(*batch), theirs(*batch), rtol=0, atol=2e-5)


@GRAPHS
def test_accelerate(graphs, batch, recorded_calls):  # noqa: F811
    accelerate = pytest.importorskip("accelerate")

    def train(model, loss):
        accelerator = accelerate.Accelerator(cpu=DEVICE == "cpu", mixed_precision="bf16")
        model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=3e-3))
        losses = []
        for _ in range(6):
            value = loss(model, batch)
            optimizer.zero_grad()
            accelerator.backward(value)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(value.item())
        return losses

    check_same_training(train, batch, tolerance=2e-2, graphs=graphs)


@GRAPHS
def test_lightning(graphs, batch, recorded_calls):  # noqa: F811
    lightning = pytest.importorskip("lightning.pytorch")

    class Task(lightning.LightningModule):
        def __init__(self, model, loss):
            super().__init__()
            self.model, self.loss, self.losses = model, loss, []

        def training_step(self, given, number):
            value = self.loss(self.model, given)
            self.losses.append(value.item())
            return value

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=3e-3)

    def train(model, loss):
        task = Task(model, loss)
        options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        options |= dict(accumulate_grad_batches=2, gradient_clip_val=0.5, precision="bf16-mixed") if graphs else {}
        trainer = lightning.Trainer(max_steps=6, accelerator="auto", devices=1, **options)
        trainer.fit(task, torch.utils.data.DataLoader([batch] * 12, batch_size=None))
        return task.losses

    check_same_training(train, batch, tolerance=2e-2 if graphs else 1e-4, graphs=graphs)
