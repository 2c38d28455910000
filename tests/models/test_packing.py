"""pack_padding: the same numbers on real tokens, from real tokens only."""

import pytest
import torch
import torch.nn.functional as F
from model_checks import DEVICE, NO_DROPOUT, PAD_SRC, PAD_TRG, SMALL, TINY, assert_same_gradients, fused

from fastattn.models.packing import Packed


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
