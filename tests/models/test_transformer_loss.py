"""FusedTransformer.loss is forward and a cross-entropy: equal numbers, equal gradients, whatever way they are made."""

import copy

import pytest
import torch
import torch.nn.functional as F
from model_checks import NO_DROPOUT, PAD_TRG, TINY, VOCAB, assert_same_gradients, fused

from fastattn import use_backend


def by_forward(model, src, trg, gold, label_smoothing, smooth_over, reduction):
    """The loss from logits: torch's, or as the public implementation writes it."""
    logits = model(src, trg).float()
    if smooth_over == "all":
        options = {"label_smoothing": label_smoothing, "reduction": reduction, "ignore_index": PAD_TRG}
        return F.cross_entropy(logits, gold.flatten(), **options)
    one_hot = torch.zeros_like(logits).scatter(1, gold.view(-1, 1), 1)
    one_hot = one_hot * (1 - label_smoothing) + (1 - one_hot) * label_smoothing / (VOCAB - 1)
    losses = -(one_hot * F.log_softmax(logits, dim=1)).sum(1)[gold.flatten() != PAD_TRG]
    return losses.sum() if reduction == "sum" else losses.mean()


def by_loss(model, src, trg, gold, label_smoothing, smooth_over, reduction):
    return model.loss(src, trg, gold, label_smoothing, smooth_over=smooth_over, reduction=reduction)


def solve(function, model, batch, *options):
    """Loss and the gradient of each parameter. The same seed: with dropout both draw the same."""
    src, trg = batch
    gold = F.pad(trg[:, 1:], (0, 1), value=PAD_TRG)
    model = copy.deepcopy(model)
    torch.manual_seed(5)
    loss = function(model, src, trg, gold, *options)
    (2 * loss).backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(model, batch, *options, relative=1e-4):
    (loss, grads), (want, want_grads) = (solve(f, model, batch, *options) for f in (by_loss, by_forward))
    assert loss.shape == () and loss.dtype == torch.float32
    torch.testing.assert_close(loss, want, rtol=relative, atol=0)
    assert_same_gradients(grads, want_grads, relative)


@pytest.mark.parametrize("pack_padding", [False, True])
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
    """A shared weight gets the gradients of all its uses; logits are scaled exactly where forward scales them."""
    model = fused(**TINY, **sharing, dropout=0.2, pack_padding=pack_padding)
    for options in ((0.0, "all", "mean"), (0.1, "all", "sum"), (0.1, "others", "mean")):
        assert_same(model, batch, *options)


@pytest.mark.parametrize("backend", ["reference", "aten", "triton"])
def test_loss_in_every_backend(backend, batch, request):
    if backend == "triton":
        request.getfixturevalue("triton")
    model = fused(**TINY, **NO_DROPOUT)
    want, want_grads = solve(by_forward, model, batch, 0.1, "others", "mean")
    for by_argument in (False, True):
        asked = fused(**TINY, **NO_DROPOUT, backend=backend) if by_argument else model
        asked.load_state_dict(model.state_dict())
        with use_backend(None if by_argument else backend):
            loss, grads = solve(by_loss, asked, batch, 0.1, "others", "mean")
        torch.testing.assert_close(loss, want, rtol=1e-5, atol=0)
        assert_same_gradients(grads, want_grads, 1e-3)


def test_loss_under_autocast(batch):
    """As near to float32 as forward's logits are; and a float32 scalar."""
    model = fused(**NO_DROPOUT)
    exact, exact_grads = solve(by_forward, model, batch, 0.1, "all", "mean")
    errors = []
    for function in (by_forward, by_loss):
        with torch.autocast(batch[0].device.type, torch.bfloat16):
            loss, grads = solve(function, model, batch, 0.1, "all", "mean")
        assert loss.dtype == torch.float32 and all(grad.dtype == torch.float32 for grad in grads.values())
        torch.testing.assert_close(loss, exact, rtol=0.02, atol=0)
        errors.append({name: (grad - exact_grads[name]).norm() for name, grad in grads.items()})
    for name, error in errors[1].items():
        assert error <= 1.5 * errors[0][name] + 1e-6, name


def test_gold_may_be_flat_and_padding_does_not_count(batch):
    src, trg = batch
    model = fused(**TINY).eval()
    gold = F.pad(trg[:, 1:], (0, 1), value=PAD_TRG)
    loss = model.loss(src, trg, gold)
    assert torch.equal(model.loss(src, trg, gold.flatten()), loss)
    longer = [F.pad(t, (0, 4), value=PAD_TRG) for t in (trg, gold)]
    torch.testing.assert_close(model.loss(src, *longer), loss, rtol=1e-5, atol=0)


def test_bad_gold_and_reduction_are_named(batch):
    src, trg = batch
    model = fused(**TINY)
    with pytest.raises(ValueError, match=r"gold has shape \(3, 8\), expected \(3, 9\) as trg_seq, or \(27,\)"):
        model.loss(src, trg, trg[:, 1:])
    with pytest.raises(ValueError, match="gold has shape"):
        model.loss(src, trg, trg.T)
    with pytest.raises(TypeError, match="gold has dtype torch.float32"):
        model.loss(src, trg, trg.float())
    with pytest.raises(ValueError, match="gold has the value -100, expected 0 to"):
        model.loss(src, trg, trg.masked_fill(trg == PAD_TRG, -100))
    with pytest.raises(ValueError, match="reduction"):
        model.loss(src, trg, trg, reduction="none")
