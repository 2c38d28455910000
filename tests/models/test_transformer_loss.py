"""FusedTransformer.loss is forward and a cross-entropy: equal numbers, equal gradients."""

import pytest
import torch
import torch.nn.functional as F
from model_checks import PAD_TRG, TINY, VOCAB, assert_same_gradients, fused, gold_of


def loss_of_logits(model, src, trg, gold, label_smoothing, smooth_over, reduction):
    """The loss from logits: torch's, or as the public implementation writes it."""
    logits = model(src, trg).float()
    if smooth_over == "all":
        options = {"label_smoothing": label_smoothing, "reduction": reduction, "ignore_index": PAD_TRG}
        return F.cross_entropy(logits, gold.flatten(), **options)
    one_hot = torch.zeros_like(logits).scatter(1, gold.view(-1, 1), 1)
    one_hot = one_hot * (1 - label_smoothing) + (1 - one_hot) * label_smoothing / (VOCAB - 1)
    losses = -(one_hot * F.log_softmax(logits, dim=1)).sum(1)[gold.flatten() != PAD_TRG]
    return losses.sum() if reduction == "sum" else losses.mean()


def solve(model, batch, label_smoothing, smooth_over, reduction, by_loss):
    """Loss and the gradient of each parameter. The same seed draws the same dropout."""
    src, trg = batch
    gold = gold_of(trg)
    model.zero_grad()
    torch.manual_seed(5)
    if by_loss:
        loss = model.loss(src, trg, gold, label_smoothing, smooth_over=smooth_over, reduction=reduction)
    else:
        loss = loss_of_logits(model, src, trg, gold, label_smoothing, smooth_over, reduction)
    (2 * loss).backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("pack_padding", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    "sharing",
    [
        dict(scale_emb_or_prj="prj"),
        dict(scale_emb_or_prj="emb"),
        dict(trg_emb_prj_weight_sharing=False),
        dict(emb_src_trg_weight_sharing=False),
        dict(trg_emb_prj_weight_sharing=False, emb_src_trg_weight_sharing=False),
    ],
    ids=["prj", "emb", "own projection", "own source", "nothing shared"],
)
def test_loss_is_forward_and_cross_entropy(sharing, pack_padding, batch):
    """A shared weight gets the gradients of all its uses, and the scale of the logits is that of forward."""
    model = fused(**TINY, **sharing, dropout=0.2, pack_padding=pack_padding)
    for options in ((0.0, "all", "mean"), (0.1, "all", "sum"), (0.1, "others", "mean")):
        (loss, grads), (expected, expected_grads) = (
            solve(model, batch, *options, by_loss) for by_loss in (True, False)
        )
        assert loss.shape == () and loss.dtype == torch.float32
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=0)
        assert_same_gradients(grads, expected_grads, 1e-4)


def test_gold_may_be_flat_and_padding_does_not_count(batch):
    src, trg = batch
    model = fused(**TINY).eval()
    gold = gold_of(trg)
    loss = model.loss(src, trg, gold)
    assert torch.equal(model.loss(src, trg, gold.flatten()), loss)
    longer = [F.pad(t, (0, 4), value=PAD_TRG) for t in (trg, gold)]
    torch.testing.assert_close(model.loss(src, *longer), loss, rtol=1e-5, atol=0)


def test_a_call_with_gold_gives_the_loss(batch):
    src, trg = batch
    model, options = fused(**TINY).eval(), {"label_smoothing": 0.1, "smooth_over": "others", "reduction": "sum"}
    gold = gold_of(trg)
    assert torch.equal(model(src, trg, gold, **options), model.loss(src, trg, gold, **options))
    with pytest.raises(ValueError, match="gold is not given"):
        model(src, trg, label_smoothing=0.1)
