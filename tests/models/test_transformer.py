"""FusedTransformer against the public architecture in plain PyTorch (plain_transformer.py), with the same weights."""

import copy
import pickle
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from plain_transformer import PlainTransformer
from torch.utils.checkpoint import checkpoint

from fastattn import (
    AttentionMask,
    FusedTransformer,
    dropout_add_layer_norm,
    explain,
    get_pad_mask,
    get_subsequent_mask,
    use_backend,
)
from fastattn.nn import residual

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAD_SRC, PAD_TRG, VOCAB = 1, 2, 40
SMALL = dict(d_word_vec=32, d_model=32, d_inner=64, n_layers=2, n_head=4, d_k=8, d_v=12, n_position=30)
NO_DROPOUT = dict(dropout=0.0, attn_dropout=0.0)


def fused(**changes):
    return FusedTransformer(VOCAB, VOCAB, PAD_SRC, PAD_TRG, **SMALL | changes).to(DEVICE)


def plain(**changes):
    return PlainTransformer(VOCAB, VOCAB, PAD_SRC, PAD_TRG, **SMALL | changes).to(DEVICE)


@pytest.fixture
def batch():
    """Three sentence pairs, (3, 11) and (3, 9), padded at the end to different lengths."""
    generator = torch.Generator().manual_seed(3)
    src = torch.randint(3, VOCAB, (3, 11), generator=generator)
    trg = torch.randint(3, VOCAB, (3, 9), generator=generator)
    src[1, 7:], src[2, 4:], trg[0, 8:], trg[2, 5:] = PAD_SRC, PAD_SRC, PAD_TRG, PAD_TRG
    return src.to(DEVICE), trg.to(DEVICE)


def train_step(model, batch):
    """Logits, and each parameter's gradient of the cross entropy over real target tokens."""
    src, trg = batch
    logits = model(src, trg)
    F.cross_entropy(logits.float(), trg.roll(-1, 1).reshape(-1), ignore_index=PAD_TRG, reduction="sum").backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}


def assert_same_gradients(actual, expected, relative):
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        error = (actual[name] - want).norm() / want.norm()
        assert error <= relative, f"{name}: relative error {error:.1e}"


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


TINY = dict(d_word_vec=16, d_model=16, d_inner=24, n_layers=1, n_head=2, d_k=8, d_v=12)


@pytest.fixture
def triton():
    """Skips where Triton cannot serve; without a GPU it does in its interpreter."""
    x = torch.zeros(1, 16, device=DEVICE)
    reason = explain(dropout_add_layer_norm, x, x, x[0], x[0]).refusals["triton"]
    if reason is not None:
        pytest.skip(reason)


def test_triton_equals_the_public_architecture(triton, batch):
    ours, theirs = fused(**TINY, **NO_DROPOUT, backend="triton"), plain(**TINY, **NO_DROPOUT)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    logits, gradients = train_step(ours, batch)
    expected_logits, expected_gradients = train_step(theirs, batch)
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=2e-5)
    assert_same_gradients(gradients, expected_gradients, 1e-3)


def test_triton_drops_what_the_reference_drops(triton, batch):
    options = dict(norm_first=True, n_head_kv=1, activation="swiglu", dropout=0.2, attn_dropout=0.3)
    model = fused(**TINY, **options)
    results = []
    for backend in ("triton", "reference"):
        torch.manual_seed(4)
        with use_backend(backend):
            results.append(train_step(copy.deepcopy(model), batch))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=2e-5)
    assert_same_gradients(results[0][1], results[1][1], 1e-3)


def test_layers_share_one_mask_of_each_kind(batch, monkeypatch):
    made, build = [], AttentionMask._build_visible
    monkeypatch.setattr(AttentionMask, "_build_visible", lambda *args: made.append(args) or build(*args))
    fused(n_layers=3, backend="aten")(*batch)
    assert len(made) == 3, "source over source, target over target, target over source, whatever the number of layers"


def test_state_dict_loads_strictly_both_ways():
    ours, theirs = fused(), plain()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(theirs.state_dict(), strict=True)


def test_parameter_names_are_the_public_ones():
    ours = fused(n_layers=1)
    attention = ["w_qs.weight", "w_ks.weight", "w_vs.weight", "fc.weight", "layer_norm.weight", "layer_norm.bias"]
    ffn = ["w_1.weight", "w_1.bias", "w_2.weight", "w_2.bias", "layer_norm.weight", "layer_norm.bias"]
    names = {"trg_word_prj.weight"}
    for stack, embedding, attentions in (
        ("encoder", "src_word_emb", ["slf_attn"]),
        ("decoder", "trg_word_emb", ["slf_attn", "enc_attn"]),
    ):
        names |= {f"{stack}.{embedding}.weight", f"{stack}.position_enc.pos_table"}
        names |= {f"{stack}.layer_norm.weight", f"{stack}.layer_norm.bias"}
        names |= {f"{stack}.layer_stack.0.{attn}.{p}" for attn in attentions for p in attention}
        names |= {f"{stack}.layer_stack.0.pos_ffn.{p}" for p in ffn}
    assert set(ours.state_dict()) == names
    assert ours.encoder.position_enc.pos_table.shape == (1, 30, 32)


def test_initial_weights_are_the_public_ones():
    torch.manual_seed(5)
    ours = fused().state_dict()
    torch.manual_seed(5)
    theirs = plain().state_dict()
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}")


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


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8])
def test_every_way_of_giving_a_mask_is_the_same(dtype, batch):
    model = fused(**NO_DROPOUT)
    src, trg = batch
    with torch.no_grad():
        pad = get_pad_mask(src, PAD_SRC)
        (memory,) = model.encoder(src, model.src_mask(src))
        for mask in (pad, pad.expand(-1, src.size(1), -1)):
            (out,) = model.encoder(src, mask.to(dtype))
            torch.testing.assert_close(out, memory, rtol=0, atol=1e-6)

        (expected,) = model.decoder(trg, model.trg_mask(trg), memory, model.src_mask(src))
        dense = get_pad_mask(trg, PAD_TRG) & get_subsequent_mask(trg)
        for src_mask in (
            pad.to(dtype),
            pad.expand(-1, trg.size(1), -1).to(dtype),
            AttentionMask(key_padding=pad[:, 0]),
        ):
            (out,) = model.decoder(trg, dense.to(dtype), memory, src_mask)
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)

        (expected,) = model.decoder(trg, AttentionMask(is_causal=True), memory, None)
        (out,) = model.decoder(trg, get_subsequent_mask(trg).to(dtype), memory, torch.ones_like(pad).to(dtype))
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


def test_masks_are_not_ignored(batch):
    model = fused().eval()
    src, trg = batch
    (memory,) = model.encoder(src, model.src_mask(src))
    (unmasked,) = model.encoder(src, None)
    assert (memory - unmasked)[1:, 0].abs().amax(-1).min() > 1e-3
    (out,) = model.decoder(trg, model.trg_mask(trg), memory, model.src_mask(src))
    (other_trg,) = model.decoder(trg, None, memory, model.src_mask(src))
    (other_src,) = model.decoder(trg, model.trg_mask(trg), memory, None)
    assert (out - other_trg)[:, 0].abs().amax(-1).min() > 1e-3
    assert (out - other_src)[1:, 0].abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize("backend", [None, "reference"])
def test_padding_changes_nothing_for_real_tokens(backend, batch):
    model = fused(backend=backend, emb_src_trg_weight_sharing=False).eval()
    src, trg = batch
    logits = model(src, trg).view(3, 9, VOCAB)
    with torch.no_grad():  # what padding holds must not matter either, whatever it is
        model.encoder.src_word_emb.weight[PAD_SRC] = torch.nan
    padded = model(F.pad(src, (0, 5), value=PAD_SRC), F.pad(trg, (0, 3), value=PAD_TRG)).view(3, 12, VOCAB)
    torch.testing.assert_close(padded[:, :9], logits, rtol=0, atol=2e-5)
    alone = model(src[2:, :4], trg[2:, :5])
    torch.testing.assert_close(alone, logits[2, :5], rtol=0, atol=2e-5)


def test_a_long_sequence_is_a_clear_error(batch):
    model, (src, trg) = fused(n_position=10), batch
    with pytest.raises(ValueError, match=r"11 tokens .* 10 positions"):
        model(src, trg)
    assert model(src[:, :10], trg).isfinite().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(scale_emb_or_prj="both"), "scale_emb_or_prj .* 'both'"),
        (dict(d_word_vec=16), "d_word_vec must equal d_model, got 16 and 32"),
        (dict(n_head_kv=3), "n_head=4 and n_head_kv=3"),
        (dict(n_head_kv=0), "n_head=4 and n_head_kv=0"),
        (dict(activation="tanh"), "activation .* 'tanh'"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        fused(**changes)


def test_sharing_needs_rows_for_every_source_word():
    with pytest.raises(ValueError, match="n_trg_vocab=30 .* n_src_vocab=40"):
        FusedTransformer(40, 30, PAD_SRC, PAD_TRG, **SMALL)
    FusedTransformer(40, 30, PAD_SRC, PAD_TRG, emb_src_trg_weight_sharing=False, **SMALL)


@pytest.mark.parametrize(
    "options", [{}, dict(norm_first=True, activation="swiglu", n_head_kv=2)], ids=["public", "beyond"]
)
def test_dropout_is_one_rule_in_every_backend(options, batch):
    """One step of training with the same seed: equal dropout in each backend, so equal logits and gradients."""
    torch.manual_seed(11)
    model = fused(dropout=0.2, attn_dropout=0.3, **options)
    results = {}
    for backend in ("reference", "aten"):
        torch.manual_seed(12)
        with use_backend(backend):
            results[backend] = train_step(copy.deepcopy(model), batch)
    torch.testing.assert_close(results["aten"][0], results["reference"][0], rtol=0, atol=2e-5)
    assert_same_gradients(results["aten"][1], results["reference"][1], 1e-3)
    assert (results["aten"][0] - model.eval()(*batch)).abs().max() > 0.05, "dropout did nothing"


def test_dropout_is_repeatable_fresh_and_off_in_eval(batch):
    model = fused()
    torch.manual_seed(1)
    first, second = model(*batch), model(*batch)
    torch.manual_seed(1)
    assert torch.equal(model(*batch), first)
    assert not torch.equal(first, second)
    model.eval()
    evaluated = model(*batch)
    with torch.no_grad():
        torch.testing.assert_close(model(*batch), evaluated, rtol=0, atol=1e-6)
    no_dropout = fused(**NO_DROPOUT)
    no_dropout.load_state_dict(model.state_dict())
    torch.testing.assert_close(no_dropout(*batch), evaluated, rtol=0, atol=1e-6)


def test_activation_checkpointing_draws_the_same_dropout(batch):
    class Checkpointed(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, *args, **kwargs):
            return checkpoint(self.layer, *args, use_reentrant=False, **kwargs)

    for options in ({}, dict(norm_first=True)):
        model = fused(dropout=0.2, **options)
        other = copy.deepcopy(model)
        torch.manual_seed(7)
        logits, gradients = train_step(model, batch)
        for stack in (other.encoder, other.decoder):
            stack.layer_stack = torch.nn.ModuleList(Checkpointed(layer) for layer in stack.layer_stack)
        torch.manual_seed(7)
        again, recomputed = train_step(other, batch)
        assert torch.equal(again, logits)
        assert_same_gradients({k.replace(".layer.", "."): g for k, g in recomputed.items()}, gradients, 1e-6)


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

    def gradient_error(
        gradients,
    ):  # over all parameters: in a small one, a rounding that turns a ReLU off is everything
        each = [(gradients[name].double() - true).norm() / true.norm() for name, true in true_gradients.items()]
        return torch.stack(each).norm()

    assert error(logits) <= 2 * error(rival)
    assert gradient_error(gradients) <= 2 * gradient_error(rival_gradients)
    assert all(g.dtype == torch.float32 for g in gradients.values())


@pytest.mark.parametrize("norm_first", [False, True])
def test_autocast_keeps_statistics_in_float32(norm_first, batch, monkeypatch):
    calls, fused_op = [], residual.dropout_add_layer_norm

    def spy(x, summand, weight, bias, *args, **kwargs):
        result = fused_op(x, summand, weight, bias, *args, **kwargs)
        calls.append((x, summand, weight, bias, result[0] if kwargs["return_sum"] else result))
        return result

    monkeypatch.setattr(residual, "dropout_add_layer_norm", spy)
    model = fused(norm_first=norm_first, **NO_DROPOUT)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(100.0)  # biases far from 0: a mean taken in bfloat16 would be wrong in its third digit
    with torch.autocast(DEVICE, torch.bfloat16), torch.no_grad():
        model(*batch)
    assert len(calls) == 2 + 2 * 2 + 2 * 3
    for x, summand, weight, bias, out in calls:
        assert weight.dtype == bias.dtype == torch.float32 and out.dtype == torch.bfloat16
        z = x.bfloat16().double() + (0 if summand is None else summand.double())
        expected = F.layer_norm(z, (32,), weight.double(), bias.double(), 1e-6)
        torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-4)


def plain_norm_first(model, src, trg):
    """The logits of a model with norm_first, grouped heads and a gated activation, from its weights alone."""

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


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu", "reglu", "geglu", "geglu_tanh", "swiglu"])
def test_every_variant_learns(activation, norm_first, batch):
    torch.manual_seed(0)
    model = fused(activation=activation, norm_first=norm_first, n_head_kv=1, n_layers=1, scale_emb_or_prj="none")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    src, trg = batch
    losses = []
    for _ in range(25):
        losses.append(F.cross_entropy(model(src, trg[:, :-1]), trg[:, 1:].reshape(-1), ignore_index=PAD_TRG))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] / 2, "it does not learn three sentence pairs by heart"


def test_copies_and_pickles(batch):
    model = fused().eval()
    logits = model(*batch)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(*batch), logits)
        assert twin.trg_word_prj.weight is twin.encoder.src_word_emb.weight, "sharing is lost"


def test_backend_is_given_to_every_op(batch):
    with pytest.raises(RuntimeError, match="cuda"):
        fused(backend="cuda")(*batch)
    with pytest.raises(ValueError, match="nosuch"):
        fused(backend="nosuch")(*batch)
    for module in fused(backend="aten").modules():
        assert getattr(module, "backend", "aten") == "aten"
