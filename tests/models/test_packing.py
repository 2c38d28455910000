"""pack_padding: the same numbers on real tokens, from real tokens only."""

import pytest
import torch
import torch.nn.functional as F
from model_checks import DEVICE, NO_DROPOUT, PAD_SRC, PAD_TRG, SMALL, TINY, assert_same_gradients, fused

from fastattn import use_backend
from fastattn.models.packing import Packed, worth_it


def both(batch, **options):
    """(padded, packed) by equal weights: logits (B, Lt, VOCAB), and gradients of the loss over real tokens."""
    src, trg = batch
    padded, packed = fused(**options), fused(**options, pack_padding=True)
    packed.load_state_dict(padded.state_dict())
    gold = trg.flip(1).where(trg != PAD_TRG, -100).flatten()  # any classes will do
    results = []
    for model in (padded, packed):
        logits = model(src, trg)
        F.cross_entropy(logits, gold, reduction="sum").backward()
        results.append((logits.detach().view(*trg.shape, -1), {name: p.grad for name, p in model.named_parameters()}))
    return results


@pytest.mark.parametrize(
    "options", [{}, {"norm_first": True, "n_head_kv": 2, "activation": "swiglu"}], ids=["", "variant"]
)
@pytest.mark.parametrize("backend", [None, "reference"])
def test_real_tokens_get_the_same(backend, options, batch):
    (padded, padded_grads), (packed, packed_grads) = both(batch, backend=backend, **options, **NO_DROPOUT)
    real = batch[1] != PAD_TRG
    assert not real.all() and not (batch[0] != PAD_SRC).all()
    torch.testing.assert_close(packed[real], padded[real], rtol=0, atol=2e-5)
    assert not packed[~real].any()
    assert_same_gradients(packed_grads, padded_grads, 1e-4)


def test_triton_gets_the_same(triton, batch):
    (padded, padded_grads), (packed, packed_grads) = both(batch, backend="triton", **TINY, **NO_DROPOUT)
    real = batch[1] != PAD_TRG
    torch.testing.assert_close(packed[real], padded[real], rtol=0, atol=2e-5)
    assert_same_gradients(packed_grads, padded_grads, 1e-4)


def test_a_sequence_of_padding_alone(batch):
    src, trg = (t.clone() for t in batch)
    src[1], trg[2] = PAD_SRC, PAD_TRG
    (padded, padded_grads), (packed, packed_grads) = both((src, trg), **NO_DROPOUT)
    torch.testing.assert_close(packed[trg != PAD_TRG], padded[trg != PAD_TRG], rtol=0, atol=2e-5)
    assert_same_gradients(packed_grads, padded_grads, 1e-4)


def test_work_is_done_on_real_tokens_only(batch):
    model, seen = fused(pack_padding=True, **NO_DROPOUT), []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda module, inputs, out: seen.append(out.shape[:2].numel()))
    model(*batch)
    real = {int((batch[0] != PAD_SRC).sum()), int((batch[1] != PAD_TRG).sum())}
    assert set(seen) == real


def test_dropout_is_drawn_anew_and_repeats_with_the_seed(batch):
    model = fused(pack_padding=True, dropout=0.3)

    def logits(seed):
        torch.manual_seed(seed)
        return model(*batch)

    assert torch.equal(logits(1), logits(1)) and not torch.equal(logits(1), logits(2))


def test_too_long_a_sequence_is_refused():
    tokens = torch.full((1, SMALL["n_position"] + 1), 5, device=DEVICE)
    with pytest.raises(ValueError, match="longer than the 30 positions"):
        fused(pack_padding=True)(tokens, tokens)


def test_pack_and_unpack():
    seq = torch.tensor([[5, 6, PAD_SRC], [PAD_SRC] * 3, [PAD_SRC, 7, 8]])
    packed = Packed(seq, PAD_SRC)
    assert packed.tokens.tolist() == [[5, 6, 7, 8]]
    assert packed.position.tolist() == [[0, 1, 1, 2]]
    assert packed.cu_seqlens.tolist() == [0, 2, 2, 4]
    assert packed.unpack(packed.tokens).tolist() == [[5, 6, 0], [0, 0, 0], [0, 7, 8]]


def padded_batch(padding):
    """Source and target (4, 10) that end in so much padding a row, and gold, the target's next tokens."""
    src, trg = (torch.full((4, 10), 7, device=DEVICE) for _ in range(2))
    for seq, pad in ((src, PAD_SRC), (trg, PAD_TRG)):
        for row, count in zip(seq, padding, strict=True):
            row[10 - count :] = pad
    return src, trg, F.pad(trg[:, 1:], (0, 1), value=PAD_TRG)


@pytest.mark.parametrize(
    ("padding", "backend", "expected"),
    [((0, 0, 5, 5), None, True), ((0, 0, 5, 5), "aten", True), ((0, 0, 5, 4), None, False)]
    + [((0, 0, 9, 9), name, False) for name in ("reference", "triton")],
)
def test_padding_is_dropped_where_it_pays(padding, backend, expected):
    src, trg, gold = padded_batch(padding)
    expected = expected and DEVICE == "cpu"
    assert worth_it(src, trg, gold, PAD_SRC, PAD_TRG, backend=backend) == expected
    with use_backend(backend):
        assert worth_it(src, trg, gold, PAD_SRC, PAD_TRG, backend=None) == expected
    gold[3, 9] = 5  # a token to learn where the target is padding: packing would lose it
    assert not worth_it(src, trg, gold, PAD_SRC, PAD_TRG, backend=backend)


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU nobody asks how much padding there is")
def test_loss_drops_padding_by_itself_and_stays_the_same(monkeypatch):
    src, trg, gold = padded_batch((1, 3, 5, 7))
    models = {pack: fused(pack_padding=pack, **NO_DROPOUT) for pack in (None, False)}
    models[False].load_state_dict(models[None].state_dict())
    packed, decode_packed = [], type(models[None]).decode_packed
    monkeypatch.setattr(
        type(models[None]), "decode_packed", lambda self, *args: packed.append(self) or decode_packed(self, *args)
    )
    results = []
    for model in models.values():
        loss = model.loss(src, trg, gold, 0.1)
        loss.backward()
        results.append((loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
        assert model(src, trg).view(*trg.shape, -1)[3, 9].any()  # logits of padding are still there
    assert packed == [models[None]]
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=0)
    assert_same_gradients(results[0][1], results[1][1], 1e-4)
