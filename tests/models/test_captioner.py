"""ABDTransformer against plain PyTorch with the same state_dict, in every feature mode: forward, gradients, greedy and
beam decoding."""

from types import SimpleNamespace

import pytest
import torch
from model_checks import Doubled, assert_same_gradients
from plain_captioner import PlainCaptioner

import fastattn
from fastattn import get_subsequent_mask
from fastattn.models import ABDTransformer, src_trg_mask
from fastattn.models.captioner.layers import MultiHeadAttention

PAD, ENDS, WORDS = 0, 1, 13
VOCAB = SimpleNamespace(
    n_vocabs=WORDS,
    word2idx={"<PAD>": PAD, "<S>": ENDS} | {f"w{i}": i for i in range(2, WORDS)},
    idx2word={PAD: "<PAD>", ENDS: "<S>"} | {i: f"w{i}" for i in range(2, WORDS)},
)
WIDTHS = {"one": 10, "two": (10, 7), "three": (10, 7, 5), "four": (10, 7, 5, 9)}
MODES = tuple(WIDTHS)


def both(mode, positions="batch", dropout=0.0, seed=3, **more):
    """The model and the same in plain PyTorch, with the same random weights and names, in eval mode."""
    torch.manual_seed(seed)
    sizes = (WIDTHS[mode], 16, 24, 4, 2, dropout, mode)
    plain = PlainCaptioner(VOCAB, *sizes, 8, positions).eval()
    for name, parameter in plain.named_parameters():
        if parameter.dim() > 1 or "a_2" in name:
            torch.nn.init.normal_(parameter, mean=1.0 if "a_2" in name else 0.0, std=0.4)
    model = ABDTransformer(VOCAB, *sizes, "cpu", 8, positions=positions, **more).eval()
    model.load_state_dict(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    return model, plain


def features(mode, dtype=torch.float32):
    """Three videos of 6 frames at most; one is padded at its end, one at its start."""
    widths = WIDTHS[mode] if mode != "one" else (WIDTHS[mode],)
    src = tuple(torch.randn(3, 6, width, dtype=dtype) for width in widths)
    for t in src:
        t[1, 4:], t[2, :2] = PAD, PAD
    if len(src) > 1:
        src[1][0, 5:] = PAD
    return src[0] if mode == "one" else src


def captions():
    trg, r2l_trg = torch.randint(2, WORDS, (3, 7)), torch.randint(2, WORDS, (3, 5))
    trg[:, 0] = r2l_trg[:, 0] = ENDS
    trg[1, 4:], r2l_trg[2, 3:] = PAD, PAD
    return r2l_trg, trg


@pytest.mark.parametrize("positions", ["batch", "sequence"])
@pytest.mark.parametrize("mode", MODES)
def test_forward_and_gradients(mode, positions):
    model, plain = both(mode, positions)
    model, plain, src, (r2l_trg, trg) = model.double(), plain.double(), features(mode, torch.float64), captions()
    mask = src_trg_mask(src, r2l_trg, trg, PAD)
    weights = [torch.randn(*t.shape, WORDS, dtype=torch.float64) for t in (r2l_trg, trg)]
    gradients = []
    for module, masks in ((model, mask), (plain, plain.masks(src, r2l_trg, trg, PAD))):
        results = module(src, r2l_trg, trg, masks)
        sum((t * w).sum() for t, w in zip(results, weights, strict=True)).backward()
        used = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        gradients.append((results, used))
    (results, used), (expected, expected_used) = gradients
    torch.testing.assert_close(results, expected, rtol=1e-9, atol=1e-10)
    expected_used = {name: grad for name, grad in expected_used.items() if grad.norm() > 1e-12}
    assert_same_gradients({name: used[name] for name in expected_used}, expected_used, 1e-8)
    assert len(expected_used) > 60


@pytest.mark.parametrize("positions", ["batch", "sequence"])
@pytest.mark.parametrize("mode", MODES)
def test_greedy_decode(mode, positions):
    model, plain = both(mode, positions)
    src = features(mode)
    src_mask = src_trg_mask(src, None, None, PAD)
    with torch.no_grad():
        memory, _, mask = plain.encodings(src, src_mask)
    states, tokens = model.greedy_decode(3, mask, memory, 8)
    expected_states, expected = plain.greedy(mask, memory, 8)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(states, expected_states, rtol=1e-4, atol=1e-4)


@pytest.mark.few(2)
@pytest.mark.parametrize("positions", ["batch", "sequence"])
@pytest.mark.parametrize("mode", MODES)
def test_beam_search_decode(mode, positions):
    model, plain = both(mode, positions)
    src = features(mode)
    found = model.beam_search_decode(src, 3, 6)
    for side, expected_side in zip(found, plain.beams(src, src_trg_mask(src, None, None, PAD), 3, 6), strict=True):
        for hypotheses, expected in zip(side, expected_side, strict=True):
            assert [h.value for h in hypotheses] == [words for words, _ in expected]
            torch.testing.assert_close([h.score for h in hypotheses], [s for _, s in expected], rtol=1e-4, atol=1e-4)


def test_dropout():
    """The feed-forwards have their own rate, the rest has that of the model. Nothing is dropped in eval mode."""
    model, _ = both("two", dropout=0.3)
    src, (r2l_trg, trg) = features("two"), captions()
    mask = src_trg_mask(src, r2l_trg, trg, PAD)

    def run():
        return model(src, r2l_trg, trg, mask)[1]

    assert torch.equal(run(), run())
    model.train()
    assert not torch.equal(run(), run())
    rates = {name: m.p for name, m in model.named_modules() if isinstance(m, torch.nn.Dropout)}
    assert {p for name, p in rates.items() if "feed_forward" in name} == {0.1}
    assert {p for name, p in rates.items() if "feed_forward" not in name} == {0.3}


def test_autocast():
    model, _ = both("one")
    src, (r2l_trg, trg) = features("one"), captions()
    mask = src_trg_mask(src, r2l_trg, trg, PAD)
    with torch.autocast("cpu", torch.bfloat16):
        low = model(src, r2l_trg, trg, mask)
        found = model.beam_search_decode(src, 2, 4)
    torch.testing.assert_close(low[1].float(), model(src, r2l_trg, trg, mask)[1], rtol=0.2, atol=0.3)
    assert len(found[1]) == 3


def test_bad_sources():
    model, _ = both("two")
    image, motion = features("two")
    for src, message in (
        (image, "src must be a tuple of 2 features"),
        ((image,), "got 1 tensors"),
        ((image, motion[..., :3]), "the features of motion_src have shape"),
        ((image, motion[:, :3]), "the features of motion_src have shape"),
        ((image, motion[:2]), "the features of motion_src have shape"),
    ):
        with pytest.raises(ValueError, match=message):
            model.encode(src, (None, None))
    with pytest.raises(ValueError, match="pe has rows for 5000"):
        model.pos_embed(torch.zeros(5001, 1, 16))
    with pytest.raises(ValueError, match="batch_size is 2, and memory holds 3"):
        model.greedy_decode(2, None, torch.zeros(3, 4, 16), 3)


class Halved(MultiHeadAttention):
    def forward(self, *inputs):
        return super().forward(*inputs) / 2


class WithoutCache(MultiHeadAttention):
    def forward(self, query, memory, mask, *_):
        return super().forward(query, memory, mask)


def test_an_attention_of_another_class():
    """Decoding calls its forward, or raises: never another one."""
    model, _ = both("one")
    states, decoder = torch.randn(3, 4, 16), model.r2l_decoder
    decoder.decoder_layer[1].attn = attn = Halved(4, 16, 0.0)
    found, tokens = model.greedy_decode(3, None, states, 3)
    expected = model.eval().r2l_decode(tokens[:, :-1], states, None, get_subsequent_mask(tokens[:, :-1]))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    decoder.decoder_layer[1].attn = other = WithoutCache(4, 16, 0.0)
    other.load_state_dict(attn.state_dict())
    with pytest.raises((TypeError, AttributeError), match="NoneType"):
        model.greedy_decode(3, None, states, 3)


@pytest.mark.parametrize(
    "child",
    ["feed_forward.w_1", "feed_forward.layer_norm", "feed_forward.dropout_1", "attn.dropout", "attn.linear_query"],
)
def test_a_changed_child_is_called(child):
    """In every layer, by forward and by decoding; explain names each."""
    models, src, (r2l_trg, trg) = both("two"), features("two"), captions()
    for module in models:
        for name in [n for n, _ in module.named_modules() if n.endswith(child)]:
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, Doubled(module.get_submodule(name)))
    model, plain = models
    with torch.no_grad():
        results = model(src, r2l_trg, trg, src_trg_mask(src, r2l_trg, trg, PAD))
        expected = plain(src, r2l_trg, trg, plain.masks(src, r2l_trg, trg, PAD))
        torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-4)
        memory, _, mask = plain.encodings(src, src_trg_mask(src, None, None, PAD))
    if child != "attn.dropout":  # a step has no weights to drop
        assert torch.equal(model.greedy_decode(3, mask, memory, 8)[1], plain.greedy(mask, memory, 8)[1])
    called = fastattn.explain(model).called
    assert len(called) >= 10 and all(name.endswith(child) for name in called)
