"""Steps of decoding, next to what test_contract.py and the state machine of tests/generate/test_cache.py see: modules
of another class, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_checks import DEVICE, PAD_SRC, SMALL, VOCAB, fused, rows
from torch import Tensor, nn

import fastattn
from fastattn import AttentionMask, FusedTransformer, use_backend
from fastattn.models import Decoder
from fastattn.nn import DecoderCache, DecoderLayer, MultiHeadAttention, PositionwiseFeedForward


@torch.no_grad()
def forward(model: FusedTransformer, src: Tensor, trg: Tensor) -> Tensor:
    """Logits (B, Lt, VOCAB) of the whole target under a causal mask."""
    mask = model.src_mask(src)
    return model.project(model.decoder(trg, AttentionMask(is_causal=True), model.encoder(src, mask)[0], mask)[0])


@pytest.fixture
def sentences() -> tuple[Tensor, Tensor]:
    """(4, 11) and (4, 8): padding after, around and between the words; one source is one word."""
    generator = torch.Generator().manual_seed(5)
    src = torch.randint(3, VOCAB, (4, 11), generator=generator)
    src[1, 7:], src[2, :3], src[2, 5], src[3, 1:] = PAD_SRC, PAD_SRC, PAD_SRC, PAD_SRC
    return src.to(DEVICE), torch.randint(3, VOCAB, (4, 8), generator=generator).to(DEVICE)


class Renamed(DecoderLayer):
    """Another class that changes nothing."""


class Halved(DecoderLayer):
    """Another forward, which hands all options on."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        x, *attns = super().forward(*inputs, **options)
        return x / 2, *attns


class HalvedAttention(MultiHeadAttention):
    def forward(self, *inputs: Any, **options: Any) -> Any:
        x, attn = super().forward(*inputs, **options)
        return x / 2, attn


class HalvedCore(nn.Module):
    """Called as ScaledDotProductAttention is."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Any, **options: Any) -> Any:
        out, weights = self.inner(*inputs, **options)
        return out / 2, weights


class WithoutCache(DecoderLayer):
    def forward(self, x: Any, memory: Any, mask: Any = None, memory_mask: Any = None, **options: Any) -> Any:
        return super().forward(x, memory, mask, memory_mask)


class OtherFeedForward(PositionwiseFeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return -x


class OtherDecoder(Decoder):
    def forward(self, *inputs: Any, **options: Any) -> Any:
        return super().forward(*inputs, **options)


def of_class(kind: type, *path: str) -> Callable[[nn.Module], None]:
    """A module of the second decoder layer, or this itself, becomes one of this class."""
    return lambda decoder: setattr(decoder.layer_stack[1].get_submodule(".".join(path)), "__class__", kind)


def share_a_layer(decoder: Any) -> None:
    decoder.layer_stack[1] = decoder.layer_stack[0]


def share_a_changed_layer(decoder: Any) -> None:
    share_a_layer(decoder)
    decoder.layer_stack[0].pos_ffn.w_1.register_forward_hook(lambda m, _, out: 2 * out)


def change_cores(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda decoder: [change(a) for layer in decoder.layer_stack for a in (layer.slf_attn, layer.enc_attn)]


OTHERS: dict[str, Callable[[Any], Any]] = {
    "renamed layer": of_class(Renamed),
    "layer": of_class(Halved),
    "self-attention": of_class(HalvedAttention, "slf_attn"),
    "attention to the encoder": of_class(HalvedAttention, "enc_attn"),
    "feed-forward": of_class(OtherFeedForward, "pos_ffn"),
    "a layer twice": share_a_layer,
    "a changed layer twice": share_a_changed_layer,
    "another core": change_cores(lambda attn: setattr(attn, "attention", HalvedCore(attn.attention))),
    "hooked core": change_cores(
        lambda attn: attn.attention.register_forward_hook(lambda m, _, out: (out[0] / 2, out[1]))
    ),
}


@pytest.mark.parametrize(("other", "on_device"), rows([(o, False) for o in OTHERS], [(o, True) for o in OTHERS]))
@torch.no_grad()
def test_modules_of_another_class_decode(other: str, on_device: bool, sentences: tuple[Tensor, Tensor]) -> None:
    """By their forward. Rows are chosen again after every step, and two sentences leave after the third."""
    src, generator = sentences[0], torch.Generator().manual_seed(2)
    model = fused(n_head_kv=2).eval()
    OTHERS[other](model.decoder)
    assert not fastattn.explain(model).not_stepped

    def draw(high: int) -> Tensor:
        return torch.randint(high, (len(src), 3), generator=generator).to(DEVICE)

    with use_backend("reference" if on_device else None):
        cache = model.start_decoding(src, 3, 6)
        cache.on_device |= on_device
        histories = torch.zeros(4, 3, 0, dtype=torch.long, device=DEVICE)
        for step in range(1, 7):
            tokens = draw(VOCAB)
            histories = torch.cat([histories, tokens[..., None]], 2)
            logits = model.next_logits(tokens, cache)
            for row in range(3):
                expected = forward(model, src, histories[:, row])[:, -1]
                torch.testing.assert_close(logits[:, row], expected, rtol=1e-4, atol=1e-5)
            parents = draw(3)
            cache.reorder(parents)
            histories = histories.gather(1, parents[..., None].expand_as(histories))
            if step == 3:
                left = torch.tensor([3, 1], device=DEVICE)
                cache.select(left)
                src, histories = src[left], histories[left]


def test_what_cannot_be_stepped(sentences: tuple[Tensor, Tensor]) -> None:
    """An error, and never another forward than its own."""

    def refused(change: Callable[[Any], Any], error: Any, message: str, token: Any = 3) -> None:
        model = fused().eval()
        change(model.decoder)
        with torch.no_grad(), pytest.raises(error, match=message):
            model.next_logits(torch.as_tensor(token).expand(4, 1), model.start_decoding(sentences[0], 1, 2))

    refused(lambda d: setattr(d, "__class__", OtherDecoder), TypeError, "OtherDecoder overrides forward and not step")
    identity = "a layer of the decoder is a Identity, expected a DecoderLayer"
    refused(lambda d: d.layer_stack.__setitem__(1, nn.Identity()), TypeError, identity)
    refused(of_class(WithoutCache), (TypeError, AttributeError), "enc_output must be a Tensor|NoneType")
    refused(lambda d: None, ValueError, f"tokens has the value {VOCAB}, expected 0 to", VOCAB)
    refused(lambda d: None, ValueError, "tokens has the value -1", -1)
    refused(lambda d: None, TypeError, "tokens has dtype torch.float32", 1.0)
    refused(lambda d: d.train(), ValueError, "call eval")
    model = fused().eval()
    cache = model.start_decoding(sentences[0], 1, 4)
    with torch.enable_grad(), pytest.raises(ValueError, match="decode_attention has no gradient"):
        model.next_logits(sentences[1][:, :1], cache)


@torch.no_grad()
def test_what_does_not_count_may_be_anything() -> None:
    model, generator = fused().eval(), torch.Generator().manual_seed(3)
    encoded, tokens = torch.randn(2, 6, SMALL["d_model"], generator=generator).to(DEVICE), torch.tensor([[3], [4]])
    lengths, found = torch.tensor([4, 0], dtype=torch.int32, device=DEVICE), []
    for other in (1.0, torch.nan, torch.inf):
        encoded[0, 4:], encoded[1] = other, other
        cache = DecoderCache(2, 1, 3, DEVICE, (model.decoder.memory(encoded, lengths),))
        found.append(torch.cat([model.decoder.step(tokens.to(DEVICE), cache) for _ in range(3)], 1))
    assert found[0].isfinite().all() and torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
