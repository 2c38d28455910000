"""FusedTransformer in training: dropout, checkpointing, autocast, and variants that the public architecture lacks."""

import copy

import pytest
import torch
import torch.nn.functional as F
from model_checks import (
    DEVICE,
    NO_DROPOUT,
    PAD_SRC,
    PAD_TRG,
    assert_same_gradients,
    fused,
    plain,
    train_step,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fastattn import get_pad_mask, get_subsequent_mask


@pytest.mark.bug_class("T15")
def test_dropout_is_repeatable_fresh_and_off_in_eval(batch):
    model = fused()
    torch.manual_seed(1)
    first, second = model(*batch), model(*batch)
    torch.manual_seed(1)
    assert torch.equal(model(*batch), first)
    assert not torch.equal(first, second)
    evaluated = model.eval()(*batch)
    assert (first - evaluated).abs().max() > 0.05, "dropout did nothing"
    with torch.no_grad():
        torch.testing.assert_close(model(*batch), evaluated, rtol=0, atol=1e-6)
    no_dropout = fused(**NO_DROPOUT)
    no_dropout.load_state_dict(model.state_dict())
    torch.testing.assert_close(no_dropout(*batch), evaluated, rtol=0, atol=1e-6)


def test_a_checkpoint_of_the_whole_model_draws_what_the_model_does(batch):
    model, results = fused(), []
    for call in (model, lambda *args: checkpoint(model, *args, use_reentrant=False)):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(7)
        call(*batch).sum().backward()
        results.append([p.grad for p in model.parameters()])
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)


class Draws(TorchDispatchMode):
    """Counts within its context the operators that draw integers."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ == "randint"
        return func(*args, **(kwargs or {}))


def test_a_layer_draws_all_seeds_at_once(batch):
    model = fused(n_layers=6)  # as many dropouts as the base model: 50
    with Draws() as draws:
        model.loss(*batch, batch[1]).backward()
    assert 1 <= draws.count <= 16


@pytest.mark.bug_class("T18")
def test_autocast_is_as_accurate_as_plain_pytorch(batch):
    ours, theirs, exact = fused(**NO_DROPOUT), plain(**NO_DROPOUT), plain(**NO_DROPOUT).double()
    ours.load_state_dict(theirs.state_dict())
    exact.load_state_dict(theirs.state_dict())
    truth, true_gradients = train_step(exact, batch)
    with torch.autocast(DEVICE, torch.bfloat16):
        logits, gradients = train_step(ours, batch)
        rival, rival_gradients = train_step(theirs, batch)
    assert logits.dtype == torch.bfloat16
    real = batch[1].reshape(-1) != PAD_TRG

    def error(logits):
        return (logits.double() - truth)[real].norm()

    def gradient_error(gradients):
        # Over all parameters: in a small one, a rounding that turns one ReLU off may be the whole error.
        each = [(gradients[name].double() - true).norm() / true.norm() for name, true in true_gradients.items()]
        return torch.stack(each).norm()

    assert error(logits) <= 2 * error(rival)
    assert gradient_error(gradients) <= 2 * gradient_error(rival_gradients)
    assert all(g.dtype == torch.float32 for g in gradients.values())


def plain_norm_first(model, src, trg):
    """The logits of a model with norm_first, grouped heads and a gated activation, from its weights only."""

    def attend(sub, q, k, v, keep):
        q, k, v = (
            w(x).unflatten(-1, (-1, width)).transpose(1, 2)
            for w, x, width in ((sub.w_qs, q, sub.d_k), (sub.w_ks, k, sub.d_k), (sub.w_vs, v, sub.d_v))
        )
        group = q.size(1) // k.size(1)
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = (q @ k.mT / sub.d_k**0.5).masked_fill(~keep.unsqueeze(1), -torch.inf)
        return sub.fc((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def feed(sub, x):
        gate, up = sub.w_1(x).chunk(2, -1)
        return sub.w_2(F.silu(gate) * up)

    def embed(stack, embedding, seq):
        return embedding(seq) + stack.position_enc.pos_table[:, : seq.size(1)]

    src_keep, trg_keep = get_pad_mask(src, PAD_SRC), get_pad_mask(trg, PAD_TRG) & get_subsequent_mask(trg)
    x = embed(model.encoder, model.encoder.src_word_emb, src)
    for layer in model.encoder.layer_stack:
        normed = layer.slf_attn.layer_norm(x)
        x = x + attend(layer.slf_attn, normed, normed, normed, src_keep)
        x = x + feed(layer.pos_ffn, layer.pos_ffn.layer_norm(x))
    memory = model.encoder.layer_norm(x)
    x = embed(model.decoder, model.decoder.trg_word_emb, trg)
    for layer in model.decoder.layer_stack:
        normed = layer.slf_attn.layer_norm(x)
        x = x + attend(layer.slf_attn, normed, normed, normed, trg_keep)
        x = x + attend(layer.enc_attn, layer.enc_attn.layer_norm(x), memory, memory, src_keep)
        x = x + feed(layer.pos_ffn, layer.pos_ffn.layer_norm(x))
    logits = model.trg_word_prj(model.decoder.layer_norm(x)) * 32**-0.5
    return logits.flatten(0, 1)


def test_norm_first_grouped_heads_and_gates_follow_their_formulas(batch):
    model = fused(norm_first=True, n_head_kv=2, activation="swiglu", **NO_DROPOUT)
    logits, gradients = train_step(model, batch)
    other = copy.deepcopy(model)
    other.zero_grad()
    other.forward = lambda src, trg: plain_norm_first(other, src, trg)
    expected, expected_gradients = train_step(other, batch)
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)
    assert_same_gradients(gradients, expected_gradients, 1e-3)
