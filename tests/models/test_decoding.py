"""Decoder.step against the decoder's forward, position by position, by the rule for error."""

import pytest
import torch
from model_checks import DEVICE, PAD_SRC, SMALL, VOCAB, fused

import fastattn
from fastattn import AttentionMask, use_backend
from fastattn.check.tolerance import check_error
from fastattn.nn import DecoderLayer, PositionwiseFeedForward

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
    """(4, 11) and (4, 20): padding after, around and between the words; one source is all padding."""
    generator = torch.Generator().manual_seed(5)
    src = torch.randint(3, VOCAB, (4, 11), generator=generator)
    src[1, 7:], src[2, :3], src[2, 5], src[3] = PAD_SRC, PAD_SRC, PAD_SRC, PAD_SRC
    return src.to(DEVICE), torch.randint(3, VOCAB, (4, 20), generator=generator).to(DEVICE)


CASES = [
    pytest.param(backend, dtype, variant, marks=pytest.mark.full if slow and variant != "beyond" else ())
    for backend, slow in (("reference", False), ("aten", False), ("triton", True), ("cuda", True))
    for dtype in (torch.float32, torch.bfloat16)
    for variant in VARIANTS
]


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
    """Another forward, and the same step."""

    def forward(self, *inputs, **options):
        x, *attns = super().forward(*inputs, **options)
        return x / 2, *attns


class HalvedInSteps(Halved):
    def step(self, x, cache):
        return super().step(x, cache) / 2


class OtherFeedForward(PositionwiseFeedForward):
    def forward(self, x):
        return -x


def with_layer(kind):
    model = fused().eval()
    old = model.decoder.layer_stack[0]
    model.decoder.layer_stack[0] = layer = kind(*(SMALL[n] for n in ("d_model", "d_inner", "n_head", "d_k", "d_v")))
    layer.load_state_dict(old.state_dict())
    return model.to(DEVICE).eval()


@pytest.mark.parametrize("kind", [Renamed, HalvedInSteps])
def test_a_layer_of_another_class_decodes(kind, sentences):
    src, trg = sentences
    model = with_layer(kind)
    torch.testing.assert_close(step_by_step(model, src, trg), forward(model, src, trg), rtol=0, atol=2e-5)
    assert not fastattn.explain(model).not_stepped


def test_a_class_without_its_own_step_is_named(sentences):
    """In the error of decoding, which would ignore its forward, and by explain."""
    message = "which overrides forward and not step: override step too"
    layer, inner, other = with_layer(Halved), fused().eval(), fused().eval()
    inner.decoder.layer_stack[1].pos_ffn = OtherFeedForward(SMALL["d_model"], SMALL["d_inner"]).to(DEVICE).eval()
    other.decoder.layer_stack[1] = torch.nn.Identity()
    for model, name in ((layer, "layer_stack.0 is a Halved"), (inner, "layer_stack.1.pos_ffn is a OtherFeedForward")):
        assert f"  decoder.{name}, {message}" in str(fastattn.explain(model))
        with pytest.raises(TypeError, match=f"cannot decode by steps: {name}, {message}"):
            model.start_decoding(sentences[0], 1, 3)
    with pytest.raises(TypeError, match="a layer of the decoder is a Identity, expected a DecoderLayer"):
        other.start_decoding(sentences[0], 1, 3)


@pytest.mark.parametrize("on_device", [False, True])
@torch.no_grad()
def test_rows_have_the_logits_of_their_histories(on_device, sentences):
    """Rows are chosen again after every step, and two sentences leave after the fifth."""
    src, model, generator = sentences[0], fused().eval(), torch.Generator().manual_seed(2)

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
