"""pack_padding: equal results for real tokens, and only real tokens are computed."""

import sys

import pytest
import torch
import torch.nn.functional as F
from model_checks import DEVICE, NO_DROPOUT, PAD_SRC, PAD_TRG, TINY, VOCAB, assert_same_gradients, fused, gold_of
from recorded_graph import RecordedGraphs, recorded_calls  # noqa: F401

from fastattn import FusedTransformer, use_backend
from fastattn.backends.aten import linear_cross_entropy
from fastattn.graphs import stats
from fastattn.graphs.capture import CudaGraphs
from fastattn.graphs.graphed_call import round_up
from fastattn.models import pad, unpad
from fastattn.models.padding import KEEP_PADDING, SIZES, PackedBatch, Packing, Unpadded, choose_packing


def assert_packed_is_padded(src, trg, **options):
    """By equal weights: equal logits of real tokens, zeros for padding, and equal gradients of the loss."""
    padded, packed = fused(**options, **NO_DROPOUT), fused(**options, **NO_DROPOUT, pack_padding=True)
    packed.load_state_dict(padded.state_dict())
    real = trg != PAD_TRG
    assert not real.all() and not (src != PAD_SRC).all()
    gold = trg.flip(1).where(real, -100).flatten()  # any classes will do
    logits, gradients = [], []
    for model in (padded, packed):
        out = model(src, trg)
        F.cross_entropy(out, gold, reduction="sum").backward()
        logits.append(out.detach().view(*trg.shape, -1))
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(logits[1][real], logits[0][real], rtol=0, atol=2e-5)
    assert not logits[1][~real].any()
    assert_same_gradients(gradients[1], gradients[0], 1e-4)


@pytest.mark.bug_class("T24")
@pytest.mark.parametrize("options", [{}, {"norm_first": True, "n_head_kv": 2, "activation": "swiglu"}], ids=str)
@pytest.mark.parametrize("backend", [None, "reference"])
def test_real_tokens_get_the_same(backend, options, batch):
    assert_packed_is_padded(*batch, backend=backend, **options)


def test_a_sequence_of_padding_alone(batch):
    src, trg = (t.clone() for t in batch)
    src[1], trg[2] = PAD_SRC, PAD_TRG
    assert_packed_is_padded(src, trg)


def test_only_real_tokens_are_computed(batch):
    model, rows = fused(pack_padding=True, **NO_DROPOUT), set()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda module, inputs, out: rows.add(out.shape[:2].numel()))
    model(*batch)
    assert rows == {int((batch[0] != PAD_SRC).sum()), int((batch[1] != PAD_TRG).sum())}


@pytest.mark.bug_class("T16")
@pytest.mark.parametrize("tokens_on", ["meta", "cpu"])
def test_a_gpu_is_waited_for_once_or_never(tokens_on, batch, monkeypatch):
    """The meta device is the GPU here: it has no values, so nonzero(), item() and the like raise. tolist() is counted,
    and a copy to it has to be of pinned memory and not to block."""
    src, trg = (t.cpu() for t in batch)
    counts = [int((src != PAD_SRC).sum()), int((trg != PAD_TRG).sum())]
    reads, pinned, to = [], [], torch.Tensor.to

    def checked_to(t, *args, **kwargs):
        if t.device.type == "cpu" and torch.device("meta") in args:
            assert kwargs == {"non_blocking": True} and any(t is other for other in pinned)
        return to(t, *args, **kwargs)

    model = fused(pack_padding=True, backend="reference").to("meta")
    src, trg = src.to(tokens_on), trg.to(tokens_on)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: reads.append(t.shape) or counts)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: pinned.append(t.clone()) or pinned[-1])
    monkeypatch.setattr(torch.Tensor, "to", checked_to)
    model.loss(src, trg, trg).backward()
    assert model(src, trg).shape == (trg.numel(), VOCAB)
    pinned.clear()
    rounded, _ = PackedBatch.of(model, src, trg, trg, True)
    assert rounded.numbers.device.type == "meta" and len(pinned) == (tokens_on == "cpu")  # one copy
    assert reads == ([(2,)] * 3 if tokens_on == "meta" else [])


def test_packing_by_known_counts_is_the_same(batch):
    """As on a GPU, where the number of tokens is read first."""
    seq = batch[0]
    real = seq != PAD_SRC
    (expected,) = Unpadded.of((seq, PAD_SRC), device=seq.device)
    found = Unpadded(seq, real, expected.cu_seqlens, int(real.sum()), seq.device)
    for name in ("index", "position", "tokens"):
        assert torch.equal(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("shape", [(3, 4, 2), (2, 3), (0, 4, 2), (2, 0, 2)])
def test_unpad_and_pad(shape):
    """They gather and scatter, in order, and so do their gradients; padding is anywhere."""
    x, real = torch.randn(shape, device=DEVICE, requires_grad=True), torch.rand(shape[:2], device=DEVICE) < 0.5
    row, unpadded = unpad(x, real)
    assert torch.equal(row[0], x[real]) and torch.equal(unpadded.position[0], real.nonzero()[:, 1])
    assert unpadded.cu_seqlens.tolist() == [int(real[:b].sum()) for b in range(len(real) + 1)]
    back, kept = pad(row, unpadded), real.view(*real.shape, *[1] * (x.dim() - 2)).expand(shape)
    assert torch.equal(back, x.where(kept, 0))
    (dx,) = torch.autograd.grad(back.sum(), x)
    assert torch.equal(dx, kept.float())


def padded_batch(padding):
    """Source and target (240, 10), the padding at the end of every four rows, and gold, the target's next tokens."""
    src, trg = (torch.full((4, 10), 7, device=DEVICE) for _ in range(2))
    for seq, pad_idx in ((src, PAD_SRC), (trg, PAD_TRG)):
        for row, count in zip(seq, padding, strict=True):
            row[10 - count :] = pad_idx
    src, trg = src.repeat(60, 1), trg.repeat(60, 1)  # in small batches padding is kept
    return src, trg, gold_of(trg)


@pytest.mark.parametrize(
    ("padding", "backend", "expected"),
    [((0, 0, 5, 5), None, True), ((0, 0, 5, 5), "aten", True), ((0, 0, 5, 4), None, False)]
    + [((0, 0, 9, 9), name, False) for name in ("reference", "triton")],
)
def test_when_packing_pays(padding, backend, expected):
    src, trg, gold = padded_batch(padding)
    expected = expected and DEVICE == "cpu"
    model = fused(backend=backend)
    assert choose_packing(model, src, trg, gold) == Packing(expected, expected)
    assert choose_packing(model, src) == Packing(expected, False)
    with use_backend(backend):
        assert choose_packing(fused(), src, trg, gold) == Packing(expected, expected)
    gold[3, 9] = 5  # a token to learn where the target is padding: packing would lose it
    assert choose_packing(model, src, trg, gold) == Packing(expected, False)
    assert choose_packing(fused(backend=backend, pack_padding=False), src, trg, gold) == KEEP_PADDING
    assert choose_packing(model, src[:4], trg[:4], gold[:4]) == choose_packing(model, src[:4]) == KEEP_PADDING


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU packing is not chosen automatically")
def test_loss_drops_padding_by_itself_and_stays_the_same(monkeypatch):
    src, trg, gold = padded_batch((1, 3, 5, 7))
    models = {pack: fused(pack_padding=pack, **NO_DROPOUT) for pack in (None, False)}
    models[False].load_state_dict(models[None].state_dict())
    packed, packed_loss = [], FusedTransformer.packed_loss
    monkeypatch.setattr(FusedTransformer, "packed_loss", lambda *a: packed.append(a[0]) or packed_loss(*a))
    results = []
    for model in models.values():
        loss = model.loss(src, trg, gold, 0.1)
        loss.backward()
        results.append((loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
        assert model(src, trg).view(*trg.shape, -1)[3, 9].any()  # forward still gives logits of padding
    assert packed == [models[None]]
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=0)
    assert_same_gradients(results[0][1], results[1][1], 1e-4)


# --- rounded sizes ----------------------------------------------------------------------------------------------------


def sentences(src_lengths, trg_lengths, seed=0):
    """src, trg and gold, padded; sentences of these lengths, which may be 0."""
    generator, made = torch.Generator().manual_seed(seed), []
    for lengths, pad_idx in ((src_lengths, PAD_SRC), (trg_lengths, PAD_TRG)):
        seq = torch.randint(3, VOCAB, (len(lengths), max(lengths, default=2)), generator=generator)
        made.append(seq.where(torch.arange(seq.shape[1]) < torch.tensor(lengths)[:, None], pad_idx).to(DEVICE))
    return *made, gold_of(made[1])


BATCHES = {
    "odd": ([5, 12, 1, 9], [7, 2, 11, 4]),
    "one sentence": ([13], [3]),
    "nothing to learn": ([4, 0], [1, 0]),
    "no sentence": ([], []),
    "empty rows": ([0, 6, 3, 0, 0], [4, 0, 6, 0, 5]),
    "nothing to add": ([16] * 4, [16] * 4),
    "a tile to add": ([29] * 18 + [1] * 4, [20, 29] * 11),
}


def loss_and_gradients(model, batch, how, label_smoothing, smooth_over, reduction):
    """By the padded batch, by exact sizes, or by rounded ones."""
    model.zero_grad()
    if how == "padded":
        loss = model.loss(*batch, label_smoothing, smooth_over=smooth_over, reduction=reduction)
    else:
        packed, _ = PackedBatch.of(model, *batch, how == "rounded")
        loss = model.packed_loss(packed, label_smoothing, smooth_over, reduction)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "backend, name",
    [(backend, name) for backend in ("reference", "aten") for name in BATCHES]
    + [
        pytest.param(backend, name, marks=() if name == "empty rows" else pytest.mark.full)
        for backend in ("triton", "cuda")
        for name in BATCHES
    ],
)
def test_rounded_sizes_change_nothing(backend, name, request):
    """Loss and gradients of padded, exact and rounded batches. Memory that no kernel writes is NaN (conftest)."""
    if is_slow := backend in ("triton", "cuda"):
        request.getfixturevalue(backend)
        request.getfixturevalue("triton")  # embeddings have no CUDA kernel
    batch, model = sentences(*BATCHES[name]), fused(**TINY | {"n_head": 1}, **NO_DROPOUT, pack_padding=False)
    has_no_gold = name in ("nothing to learn", "no sentence")
    for options in ((0.0, "all", "sum"), (0.1, "others", "mean"))[is_slow:]:
        expected, gradients = loss_and_gradients(model, batch, "padded", *options)
        for how in ("exact", "rounded")[is_slow:]:
            with use_backend(backend):
                loss, found = loss_and_gradients(model, batch, how, *options)
            torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0, equal_nan=True)
            if not has_no_gold:
                assert_same_gradients(found, gradients, 1e-5)
            elif "sum" in options:
                assert loss == 0 and not any(g.any() for g in found.values())
            else:
                assert loss.isnan()


def test_rounded_sizes():
    """Four for each doubling. The number of sentences counts only where they have fewer than 4 tokens each."""
    counts = {0: 64, 64: 64, 65: 128, 513: 640, 640: 640, 641: 768, 5000: 5120, 8192: 8192, 8193: 10240}
    assert {n: round_up(n, *SIZES) for n in counts} == counts

    def parts(*lengths):
        return PackedBatch.of(fused(), *sentences(*lengths), True)[0].parts()

    for src, trg in (([20] * 40, [9] * 40), ([26] * 30, [12] * 30)):
        src_tokens, _, queries, keys, trg_tokens, *_, gold = parts(src, trg)
        assert [t.shape[-1] for t in (src_tokens, queries, keys, trg_tokens, gold)] == [896, 256, 256, 384, 384]
        # As queries and as keys what is added is alone in a sequence.
        assert queries[-3:].tolist() == [sum(src), 896, 896] and keys[-3:].tolist() == [sum(src)] * 2 + [896]
    assert len(parts([1] * 70, [1] * 70)[2]) == 128


@pytest.fixture
def no_value_is_read(monkeypatch):
    """As of tensors on a GPU."""
    if DEVICE == "cpu":
        for name, module in sys.modules.items():
            if name.startswith("fastattn") and hasattr(module, "can_read_values"):
                monkeypatch.setattr(module, "can_read_values", lambda t: False)
        monkeypatch.setattr(linear_cross_entropy, "_can_count", lambda x: False)


@pytest.mark.usefixtures("no_value_is_read")
@pytest.mark.parametrize("backend", ["reference", "aten", pytest.param("triton", marks=pytest.mark.full)])
def test_a_graph_of_one_rounded_batch_computes_another(backend, request):
    """On a GPU a CUDA graph. Else recorded operators."""
    if backend == "triton":
        request.getfixturevalue("triton")
    model = fused(**TINY, **NO_DROPOUT, backend=backend)
    first, second = (PackedBatch.of(model, *sentences(*BATCHES[name]), True)[0] for name in ("odd", "empty rows"))
    batch, result = PackedBatch(first.numbers.clone(), first.sizes), torch.zeros((), device=DEVICE)

    def work():
        model.zero_grad()
        loss = model.packed_loss(batch, 0.1)
        loss.backward()
        result.copy_(loss.detach())

    graphs = (CudaGraphs if DEVICE == "cuda" else RecordedGraphs)(torch.device(DEVICE))
    graphs.warm_up(work)
    replay = graphs.captured(work)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for given in (second, first, second):
        batch.numbers.copy_(given.numbers)
        replay()
        found = result.clone(), {name: g.clone() for name, g in gradients.items()}
        model.zero_grad()
        loss = model.packed_loss(given, 0.1)
        loss.backward()
        torch.testing.assert_close(found[0], loss.detach(), rtol=1e-6, atol=0)
        assert_same_gradients(found[1], {name: p.grad for name, p in model.named_parameters()}, 1e-5)


@pytest.mark.usefixtures("recorded_calls", "no_value_is_read")
def test_packed_batches_have_graphs():
    """graphs=True with pack_padding=True: the loss of other batches replays. Logits and no_grad are eager."""
    model, twin = (fused(**TINY, **NO_DROPOUT, backend="reference", graphs=graphs) for graphs in (True, None))
    twin.load_state_dict(model.state_dict())
    model.pack_padding = True
    for name in ("odd", "empty rows", "odd", "empty rows", "odd"):
        batch = sentences(*BATCHES[name])
        expected, gradients = loss_and_gradients(twin, batch, "padded", 0.1, "all", "mean")
        model.zero_grad()
        loss = model.loss(*batch, 0.1)
        loss.backward()
        torch.testing.assert_close(loss.detach(), expected, rtol=1e-6, atol=0)
        assert_same_gradients({name: p.grad for name, p in model.named_parameters()}, gradients, 1e-5)
    model(*batch[:2])
    with torch.no_grad():
        assert torch.equal(model.loss(*batch, 0.1), twin.loss(*batch, 0.1))
    found = stats(model)
    assert (found.captures, found.replays) == (1, 3) and found.eager == {"a new shape": 2, "no gradient is recorded": 1}
