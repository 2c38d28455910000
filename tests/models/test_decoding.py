"""Decoder.step against the decoder's forward, position by position, by the rule for error."""

import pytest
import torch
from model_checks import DEVICE, PAD_SRC, SMALL, VOCAB, Doubled, fused
from torch.utils._python_dispatch import TorchDispatchMode

import fastattn
from fastattn import AttentionMask, generate, use_backend
from fastattn.backends import cpu_matmul
from fastattn.check.tolerance import check_error
from fastattn.models import Decoder
from fastattn.nn import DecoderCache, DecoderLayer, MultiHeadAttention, PositionwiseFeedForward, decoding

VARIANTS = {
    "public": {},
    "packed": dict(pack_padding=True, scale_emb_or_prj="emb"),
    "beyond": dict(norm_first=True, n_head_kv=2, activation="swiglu"),
}


@torch.no_grad()
def forward(model, src, trg):
    """Logits (B, Lt, VOCAB) of the whole target under a causal mask."""
    mask = model.src_mask(src)
    decoded, *_ = model.decoder(trg, AttentionMask(is_causal=True), model.encoder(src, mask)[0], mask)
    return model.project(decoded)


@torch.no_grad()
def step_by_step(model, src, trg, on_device=False):
    cache = model.start_decoding(src, 1, trg.shape[1])
    cache.on_device |= on_device
    return torch.cat([model.next_logits(trg[:, t : t + 1], cache) for t in range(trg.shape[1])], 1)


@pytest.fixture
def sentences():
    """(4, 11) and (4, 20): padding after, around and between the words; one source is one word."""
    generator = torch.Generator().manual_seed(5)
    src = torch.randint(3, VOCAB, (4, 11), generator=generator)
    src[1, 7:], src[2, :3], src[2, 5], src[3, 1:] = PAD_SRC, PAD_SRC, PAD_SRC, PAD_SRC
    return src.to(DEVICE), torch.randint(3, VOCAB, (4, 20), generator=generator).to(DEVICE)


EVERYDAY = "beyond", torch.bfloat16
CASES = [
    pytest.param(backend, dtype, variant, marks=pytest.mark.full if slow and (variant, dtype) != EVERYDAY else ())
    for backend, slow in (("reference", False), ("aten", False), ("triton", True), ("cuda", True))
    for dtype in (torch.float32, torch.bfloat16)
    for variant in VARIANTS
]


@pytest.mark.few(5)
@pytest.mark.bug_class("T23")
@pytest.mark.parametrize(("backend", "dtype", "variant"), CASES)
def test_a_step_is_as_exact_as_forward(backend, dtype, variant, sentences, request):
    src, trg = sentences
    is_kernel = backend in ("triton", "cuda")
    if is_kernel:
        request.getfixturevalue(backend)
        trg = trg[:, :6]  # without a GPU they are slow
    model = fused(**VARIANTS[variant]).eval()
    with use_backend("reference"):
        truth = forward(model.double(), src, trg)
        low = forward(model.to(dtype), src, trg)
    with use_backend(backend):
        actual = step_by_step(model, src, trg, on_device=is_kernel)
    judgement = check_error(actual, truth, low, torch.zeros_like(truth))
    assert judgement.ok, judgement


class Renamed(DecoderLayer):
    """Another class that changes nothing."""


class Halved(DecoderLayer):
    """Another forward, which hands all options on."""

    def forward(self, *inputs, **options):
        x, *attns = super().forward(*inputs, **options)
        return x / 2, *attns


class HalvedAttention(MultiHeadAttention):
    def forward(self, *inputs, **options):
        x, attn = super().forward(*inputs, **options)
        return x / 2, attn


class WithoutCache(DecoderLayer):
    def forward(self, dec_input, enc_output, slf_attn_mask=None, dec_enc_attn_mask=None, **options):
        masks = slf_attn_mask, dec_enc_attn_mask
        return super().forward(dec_input, enc_output, *masks)


class OldLayer(DecoderLayer):
    def forward(self, dec_input, enc_output, slf_attn_mask=None, dec_enc_attn_mask=None, *, return_attns=False):
        return super().forward(dec_input, enc_output, slf_attn_mask, dec_enc_attn_mask)


class OtherFeedForward(PositionwiseFeedForward):
    def forward(self, x):
        return -x


class OtherDecoder(Decoder):
    def forward(self, *inputs, **options):
        return super().forward(*inputs, **options)


def with_layer(kind):
    model = fused().eval()
    old = model.decoder.layer_stack[0]
    model.decoder.layer_stack[0] = layer = kind(*(SMALL[n] for n in ("d_model", "d_inner", "n_head", "d_k", "d_v")))
    layer.load_state_dict(old.state_dict())
    return model.to(DEVICE).eval()


def with_sublayer(name, kind, *sizes):
    model = fused().eval()
    layer = model.decoder.layer_stack[1]
    module = kind(*(SMALL[n] for n in sizes)).to(DEVICE).eval()
    module.load_state_dict(layer.get_submodule(name).state_dict())
    setattr(layer, name, module)
    return model


ATTENTION, FEED_FORWARD = ("n_head", "d_model", "d_k", "d_v"), ("d_model", "d_inner")
OTHERS = {
    "renamed layer": lambda: with_layer(Renamed),
    "layer": lambda: with_layer(Halved),
    "self-attention": lambda: with_sublayer("slf_attn", HalvedAttention, *ATTENTION),
    "attention to the encoder": lambda: with_sublayer("enc_attn", HalvedAttention, *ATTENTION),
    "feed-forward": lambda: with_sublayer("pos_ffn", OtherFeedForward, *FEED_FORWARD),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_module_of_another_class_decodes(other, sentences):
    """By its forward."""
    src, trg = sentences
    model = OTHERS[other]()
    torch.testing.assert_close(step_by_step(model, src, trg), forward(model, src, trg), rtol=0, atol=2e-5)
    assert not fastattn.explain(model).not_stepped


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("backend", ["aten", "reference"])
def test_a_layer_that_the_stack_holds_twice(backend, changed, sentences):
    """Each place has its own past, also op by op."""
    model = fused(backend=backend).eval()
    for stack in (model.encoder.layer_stack, model.decoder.layer_stack):
        stack[1] = stack[0]
    if changed:
        model.decoder.layer_stack[0].pos_ffn.w_1.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(step_by_step(model, *sentences), forward(model, *sentences), rtol=0, atol=2e-5)


def test_a_class_that_cannot_be_stepped(sentences):
    """An error, and never another forward than its own."""
    other, replaced = with_layer(Renamed), with_layer(Renamed)
    other.decoder.__class__ = OtherDecoder
    replaced.decoder.layer_stack[1] = torch.nn.Identity()
    with pytest.raises(TypeError, match="OtherDecoder overrides forward and not step: override step too"):
        other.start_decoding(sentences[0], 1, 3)
    with pytest.raises(TypeError, match="a layer of the decoder is a Identity, expected a DecoderLayer"):
        replaced.start_decoding(sentences[0], 1, 3)
    for kind, message in ((WithoutCache, "enc_output must be a Tensor|NoneType"), (OldLayer, "argument 'cache'")):
        with pytest.raises((TypeError, AttributeError), match=message):
            step_by_step(with_layer(kind), *sentences)


class HalvedCore(torch.nn.Module):
    """Called as ScaledDotProductAttention is."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *inputs, **options):
        out, weights = self.inner(*inputs, **options)
        return out / 2, weights


def change_cores(model, change):
    for layer in model.decoder.layer_stack:
        for attn in (layer.slf_attn, layer.enc_attn):
            if change == "another core":
                attn.attention = HalvedCore(attn.attention)
            if change == "hooked core":
                attn.attention.register_forward_hook(lambda _, inputs, out: (out[0] / 2, out[1]))
    return model


@pytest.mark.parametrize(
    ("on_device", "change"),
    [(False, ""), (True, ""), (False, "hooked core"), (True, "hooked core"), (True, "another core")],
)
@torch.no_grad()
def test_rows_have_the_logits_of_their_histories(on_device, change, sentences):
    """Rows are chosen again after every step, and two sentences leave after the fifth."""
    src, generator = sentences[0], torch.Generator().manual_seed(2)
    model = change_cores(fused(n_head_kv=2).eval(), change)

    def draw(high):
        return torch.randint(high, (len(src), 3), generator=generator).to(DEVICE)

    with use_backend("reference" if on_device else None):
        cache = model.start_decoding(src, 3, 8)
        cache.on_device |= on_device
        histories = torch.zeros(4, 3, 0, dtype=torch.long, device=DEVICE)
        for step in range(1, 9):
            tokens = draw(VOCAB)
            histories = torch.cat([histories, tokens[..., None]], 2)
            logits = model.next_logits(tokens, cache)
            for row in range(3):
                expected = forward(model, src, histories[:, row])[:, -1]
                torch.testing.assert_close(logits[:, row], expected, rtol=1e-4, atol=1e-5)
            parents = draw(3)
            cache.reorder(parents)
            histories = histories.gather(1, parents[..., None].expand_as(histories))
            if step == 5:
                left = torch.tensor([3, 1], device=DEVICE)
                cache.select(left)
                src, histories = src[left], histories[left]
                assert torch.equal(cache.sentences, left)


# The straight path of fastattn/nn/decoding.py, which is for a CPU.


@torch.no_grad()
def logits_of_a_search(model, src, rows, straight=True):
    """Logits (sentences * rows, VOCAB) of 6 steps: rows are chosen again after each, two sentences leave after the
    third."""
    generator = torch.Generator().manual_seed(7)
    cache, found = model.start_decoding(src, rows, 6), []
    for step in range(6):
        found.append(
            model.next_logits(torch.randint(VOCAB, (cache.batch, rows), generator=generator), cache).flatten(0, 1)
        )
        assert cache.steps.is_straight == straight
        if rows > 1:
            cache.reorder(torch.randint(rows, (cache.batch, rows), generator=generator))
        if step == 2:
            cache.select(torch.tensor([3, 1]))
    return torch.cat(found)


def op_by_op(model, *search):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "_is_straight", lambda *_: False)
        return logits_of_a_search(model, *search, straight=False)


@pytest.mark.few(6)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("mode", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_straight_path_has_the_numbers_of_the_ops(variant, mode, rows, sentences):
    """Also where sources have padding or no token, and where oneDNN's weights are prepacked."""
    torch.manual_seed(0)
    src, model = sentences[0].cpu(), fused(**VARIANTS[variant]).cpu().eval()
    with use_backend("reference"):
        truth = op_by_op(model.double(), src, rows)
        low = op_by_op(model.bfloat16(), src, rows) if mode != "float32" else op_by_op(model.float(), src, rows)
    model.to(torch.bfloat16 if mode == "bfloat16" else torch.float32)
    for min_products in (cpu_matmul.MIN_PRODUCTS, 0):
        with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            patch.setattr(cpu_matmul, "MIN_WEIGHTS", min(min_products, cpu_matmul.MIN_WEIGHTS))
            patch.setattr(cpu_matmul, "MIN_PRODUCTS", min_products)
            patch.setattr(cpu_matmul, "choice", lambda: "oneDNN")
            judgement = check_error(logits_of_a_search(model, src, rows), truth, low, torch.zeros_like(truth))
        assert judgement.ok, judgement


def test_a_step_has_few_operators():
    """PyTorch's dispatcher sees some 90 operators and views in a step of greedy decoding by three layers; op by op
    they were 238."""

    class Count(TorchDispatchMode):
        operators = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.operators += 1
            return function(*args, **kwargs or {})

    def operators(tokens):
        with Count() as count:
            generate.greedy(model, src, max_len=tokens, bos_idx=3, eos_idx=-1)
        return count.operators

    model, src = fused(n_layers=3, d_v=8).cpu().eval(), torch.full((1, 9), 3)
    assert (operators(25) - operators(5)) / 20 <= 100


@torch.no_grad()
def test_when_steps_are_not_straight():
    """Where one of them is modified or drops, where another backend is requested, and where gradients are recorded."""
    src, token = torch.full((2, 5), 3), torch.full((2, 1), 3)

    def logits(model, straight):
        cache = model.start_decoding(src, 1, 4)
        found = torch.cat([model.next_logits(token, cache) for _ in range(2)], 1)
        assert cache.steps.is_straight == straight
        return found

    model = fused().cpu().eval()
    before = logits(model, True)
    with use_backend("reference"):
        torch.testing.assert_close(logits(model, False), before, rtol=1e-4, atol=1e-5)
    hook = model.decoder.layer_stack[1].pos_ffn.w_2.register_forward_hook(lambda _, inputs, out: 2 * out)
    assert not torch.allclose(logits(model, False), before)
    hook.remove()
    assert torch.equal(logits(model, True), before)
    model.decoder.layer_stack[0].slf_attn.dropout.train()
    assert not torch.allclose(logits(model, False), before)
    model.eval()
    model.decoder.layer_norm = Doubled(model.decoder.layer_norm)
    assert not torch.allclose(logits(model, False), before)
    model.decoder.layer_norm = model.decoder.layer_norm.inner
    cache = model.start_decoding(src, 1, 4)
    with torch.enable_grad(), pytest.raises(ValueError, match="decode_attention has no gradient"):
        model.next_logits(token, cache)
    model.requires_grad_(False)
    with torch.enable_grad():
        torch.testing.assert_close(logits(model, False), before, rtol=1e-4, atol=1e-5)


@pytest.mark.bug_class("T10")
@torch.no_grad()
def test_what_does_not_count_may_be_anything():
    model, generator = fused().cpu().eval(), torch.Generator().manual_seed(3)
    encoded, tokens = torch.randn(2, 6, SMALL["d_model"], generator=generator), torch.tensor([[3], [4]])
    lengths, found = torch.tensor([4, 0], dtype=torch.int32), []
    for other in (1.0, torch.nan, torch.inf):
        encoded[0, 4:], encoded[1] = other, other
        cache = DecoderCache(2, 1, 3, "cpu", (model.decoder.memory(encoded, lengths),))
        found.append(torch.cat([model.decoder.step(tokens, cache) for _ in range(3)], 1))
    assert found[0].isfinite().all() and torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@torch.no_grad()
def test_tokens_that_do_not_exist():
    model = fused().cpu().eval()
    for token, message in ((VOCAB, f"tokens has the value {VOCAB}, expected 0 to"), (-1, "tokens has the value -1")):
        cache = model.start_decoding(torch.full((1, 4), 3), 1, 2)
        with pytest.raises(ValueError, match=message):
            model.next_logits(torch.full((1, 1), token), cache)
    with pytest.raises(TypeError, match="tokens has dtype torch.float32"):
        model.next_logits(torch.ones(1, 1), cache)
