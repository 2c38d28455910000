"""pack_padding: equal results for real tokens, and only real tokens are computed."""

import pytest
import torch
import torch.nn.functional as F
from model_checks import DEVICE, NO_DROPOUT, PAD_SRC, PAD_TRG, VOCAB, assert_same_gradients, fused, gold_of

from fastattn import FusedTransformer, use_backend
from fastattn.models import pad, unpad
from fastattn.models.padding import KEEP_PADDING, Packing, Unpadded, choose_packing


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
    assert reads == ([(2,)] * 2 if tokens_on == "meta" else [])
    assert bool(pinned) == (tokens_on == "cpu")


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
    packed, decoder_output = [], FusedTransformer.decoder_output

    def run_and_note(model, src_seq, trg_seq, packing):
        packed.extend([model] if packing.target else [])
        return decoder_output(model, src_seq, trg_seq, packing)

    monkeypatch.setattr(FusedTransformer, "decoder_output", run_and_note)
    results = []
    for model in models.values():
        loss = model.loss(src, trg, gold, 0.1)
        loss.backward()
        results.append((loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
        assert model(src, trg).view(*trg.shape, -1)[3, 9].any()  # forward still gives logits of padding
    assert packed == [models[None]]
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=0)
    assert_same_gradients(results[0][1], results[1][1], 1e-4)
