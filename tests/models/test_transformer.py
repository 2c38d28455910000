"""FusedTransformer against the public architecture in plain PyTorch (plain_transformer.py), with the same weights."""

import copy
import pickle
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from model_checks import (
    NO_DROPOUT,
    PAD_SRC,
    PAD_TRG,
    VOCAB,
    assert_same_gradients,
    fused,
    gold_of,
    plain,
    train_step,
)

from fastattn import AttentionMask, FusedTransformer, backends, get_pad_mask, get_subsequent_mask, use_backend
from fastattn.generate import greedy

SHARING = [
    dict(trg_emb_prj_weight_sharing=a, emb_src_trg_weight_sharing=b) for a, b in product([True, False], repeat=2)
]


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("scale", ["emb", "prj", "none"])
@pytest.mark.parametrize("sharing", SHARING, ids=lambda s: "-".join(str(on) for on in s.values()))
def test_equals_the_public_architecture(sharing, scale, backend, batch):
    options = dict(scale_emb_or_prj=scale, **sharing, **NO_DROPOUT)
    ours, theirs = fused(backend=backend, **options), plain(**options)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    logits, gradients = train_step(ours, batch)
    expected_logits, expected_gradients = train_step(theirs, batch)
    assert logits.shape == (3 * 9, VOCAB)
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=2e-5)
    assert_same_gradients(gradients, expected_gradients, 1e-3)


def test_fifty_steps_agree_with_the_public_architecture(batch):
    """From the same seed, which gives the same initial weights, and without dropout: the losses stay equal."""
    losses = []
    for kind in (fused, plain):
        torch.manual_seed(5)
        model = kind(**NO_DROPOUT)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.98), eps=1e-9)
        losses.append([])
        for _ in range(50):
            src, trg = batch
            gold = trg[:, 1:].flatten()
            loss = F.cross_entropy(model(src, trg[:, :-1]), gold, ignore_index=PAD_TRG, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < 0.7 * losses[0][0]


def test_state_dict_loads_strictly_both_ways():
    ours, theirs = fused(), plain()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(theirs.state_dict(), strict=True)


def test_each_parameter_has_its_own_storage(batch):
    """Also after a training step, a cast and a copy. So a saved model is as large as its parameters."""
    model = fused(**NO_DROPOUT)
    logits, _ = train_step(model, batch)
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), fused().double()):
        parameters = list(twin.parameters())  # a tied weight counts once
        assert len({p.untyped_storage().data_ptr() for p in parameters}) == len(parameters)
        assert all(p.untyped_storage().nbytes() == p.nbytes for p in parameters)
        assert twin.trg_word_prj.weight is twin.encoder.src_word_emb.weight, "sharing is lost"
        assert parameters[0].dtype == torch.float64 or torch.equal(twin(*batch), logits)


@pytest.mark.parametrize("backend", ["reference", None])
def test_torch_func(backend, batch):
    """The gradient of a functional call is that of the backward."""
    model = fused(**NO_DROPOUT)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    gold = batch[1].roll(-1, 1).flatten()

    def loss(parameters):
        logits = torch.func.functional_call(model, (parameters, buffers), batch)
        return F.cross_entropy(logits, gold, ignore_index=PAD_TRG)

    with use_backend(backend):
        gradients = torch.func.grad(loss)({name: p.detach() for name, p in parameters.items()})
        loss(parameters).backward()
    # On a GPU: the kernels against the formula, which functional calls use.
    assert_same_gradients(gradients, {name: p.grad for name, p in parameters.items()}, 1e-5)


def test_attention_dropout_does_not_follow_dropout():
    for model in (fused(dropout=0.3), fused(dropout=0.0)):
        assert model.encoder.layer_stack[0].slf_attn.attention.dropout.p == 0.1
    assert fused(attn_dropout=0.2).decoder.layer_stack[1].enc_attn.attention.dropout.p == 0.2


def test_returns_the_attention_weights(batch):
    ours, theirs = fused().eval(), plain().eval()
    ours.load_state_dict(theirs.state_dict())
    src, trg = batch
    src_mask, trg_mask = theirs.masks(src, trg)
    memory, expected = theirs.encoder(src, src_mask)
    out, weights = ours.encoder(src, src_mask, return_attns=True)
    torch.testing.assert_close(out, memory, rtol=0, atol=2e-5)
    torch.testing.assert_close(weights, expected[0], rtol=0, atol=1e-5)
    decoded, expected = theirs.decoder(trg, trg_mask, memory, src_mask)
    out, *weights = ours.decoder(trg, trg_mask, memory, src_mask, return_attns=True)
    torch.testing.assert_close(out, decoded, rtol=0, atol=2e-5)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-5)
    assert [len(ours.encoder(src, src_mask)), len(ours.decoder(trg, trg_mask, memory, src_mask))] == [1, 1]


@torch.no_grad()
def test_the_encoder_may_be_projected_once(batch):
    """For decoding, which needs the projections at every step."""
    model = fused().eval()
    src_seq, trg_seq = batch
    masks = model.trg_mask(trg_seq), model.src_mask(src_seq)
    (encoded,) = model.encoder(src_seq, masks[1])
    known = model.decoder.project_encoder(encoded)
    assert list(known) == list(model.decoder.layer_stack)
    (expected,) = model.decoder(trg_seq, masks[0], encoded, masks[1])
    assert torch.equal(model.decoder(trg_seq, masks[0], encoded, masks[1], enc_projected=known)[0], expected)
    other = model.decoder.project_encoder(encoded + 1)
    assert not torch.allclose(model.decoder(trg_seq, masks[0], encoded, masks[1], enc_projected=other)[0], expected)


@pytest.mark.bug_class("T25")
@torch.no_grad()
def test_every_way_of_giving_a_mask_is_the_same(batch):
    model, dtype = fused(**NO_DROPOUT), torch.uint8
    src, trg = batch
    pad = get_pad_mask(src, PAD_SRC)
    (memory,) = model.encoder(src, model.src_mask(src))
    for mask in (pad, pad.expand(-1, src.size(1), -1)):
        (out,) = model.encoder(src, mask.to(dtype))
        torch.testing.assert_close(out, memory, rtol=0, atol=1e-6)

    (expected,) = model.decoder(trg, model.trg_mask(trg), memory, model.src_mask(src))
    dense = (get_pad_mask(trg, PAD_TRG) & get_subsequent_mask(trg)).to(dtype)
    as_object = AttentionMask(key_padding=pad[:, 0])
    for src_mask in (pad.to(dtype), pad.expand(-1, trg.size(1), -1).to(dtype), as_object):
        (out,) = model.decoder(trg, dense, memory, src_mask)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)

    (expected,) = model.decoder(trg, AttentionMask(is_causal=True), memory, None)
    (out,) = model.decoder(trg, get_subsequent_mask(trg).to(dtype), memory, torch.ones_like(pad).to(dtype))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


@pytest.mark.bug_class("T24")
@pytest.mark.parametrize("backend", [None, "reference"])
def test_padding_changes_nothing_for_real_tokens(backend, batch):
    model = fused(backend=backend, emb_src_trg_weight_sharing=False).eval()
    src, trg = batch
    logits = model(src, trg).view(3, 9, VOCAB)
    with torch.no_grad():  # the embedding of padding may be anything
        model.encoder.src_word_emb.weight[PAD_SRC] = torch.nan
    padded = model(F.pad(src, (0, 5), value=PAD_SRC), F.pad(trg, (0, 3), value=PAD_TRG)).view(3, 12, VOCAB)
    torch.testing.assert_close(padded[:, :9], logits, rtol=0, atol=2e-5)
    alone = model(src[2:, :4], trg[2:, :5])
    torch.testing.assert_close(alone, logits[2, :5], rtol=0, atol=2e-5)


@pytest.mark.parametrize("pack_padding", [False, True])
def test_a_long_sequence_is_a_clear_error(pack_padding, batch):
    model, (src, trg) = fused(n_position=10, pack_padding=pack_padding), batch
    with pytest.raises(ValueError, match=r"11 tokens .* 10 positions"):
        model(src, trg)
    assert model(src[:, :10], trg).isfinite().all()


def test_embeddings_have_the_width_of_the_model():
    model = FusedTransformer(VOCAB, VOCAB, PAD_SRC, PAD_TRG, d_model=24, d_inner=8, n_layers=1, n_head=2, d_k=4, d_v=4)
    assert model.encoder.src_word_emb.weight.shape == (VOCAB, 24)


@pytest.mark.parametrize("norm_first", [False, True])
def test_bad_inputs_are_named(norm_first, batch):
    model, (src, trg) = fused(norm_first=norm_first), batch
    encoded = model.encoder(src, None)
    for enc_output, error in ((encoded, TypeError), (encoded[0][..., 1:], ValueError)):
        with pytest.raises(error, match="enc_output"):
            model.decoder(trg, None, enc_output, None)


def test_shapes_alone(batch):
    """On the meta device, whose tensors have no values: for counting the operations or memory of a large model."""
    model = fused().to("meta")
    logits = model(*(t.to("meta") for t in batch))
    logits.sum().backward()
    assert logits.shape == (3 * 9, VOCAB) and logits.is_meta
    assert all(p.grad.shape == p.shape for p in model.parameters() if p.requires_grad)


def test_backend_is_given_to_every_op(batch, monkeypatch):
    """In training and in decoding. An op without this request never chooses the reference."""
    used, choose = set(), backends.choose

    def choose_and_note(op, *arguments):
        chosen = choose(op, *arguments)
        used.add((op, chosen.name))
        return chosen

    monkeypatch.setattr(backends, "choose", choose_and_note)
    model, (src, trg) = fused(backend="reference"), batch
    model.loss(src, trg, gold_of(trg)).backward()
    greedy(model.eval(), src, max_len=3, bos_idx=0, eos_idx=VOCAB - 1)
    assert used == {(op, "reference") for op in backends.OPS if op != "add_rms_norm"}
    for module in model.modules():
        assert getattr(module, "backend", "reference") == "reference"
