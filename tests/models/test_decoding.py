"""Steps of decoding, next to what test_contract.py and the state machine of tests/generate/test_cache.py see: a
layer that is used twice, another core of attention, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_checks import DEVICE, PAD_SRC, SMALL, VOCAB, Doubled, doubled, fused, rows
from torch import Tensor

import fastattn
from fastattn import AttentionMask, FusedTransformer, use_backend
from fastattn.models import Decoder
from fastattn.nn import DecoderCache, DecoderLayer


@torch.no_grad()
def forward(model: FusedTransformer, src: Tensor, trg: Tensor) -> Tensor:
    """Logits (B, Lt, VOCAB) of the whole target under a causal mask."""
    mask = model.src_mask(src)
    return model.project(model.decoder(trg, AttentionMask(is_causal=True), model.encoder(src, mask)[0], mask)[0])


def sources() -> Tensor:
    """(4, 11): padding after, around and between the words; one source is one word."""
    src = torch.randint(3, VOCAB, (4, 11), generator=torch.Generator().manual_seed(5))
    src[1, 7:], src[2, :3], src[2, 5], src[3, 1:] = PAD_SRC, PAD_SRC, PAD_SRC, PAD_SRC
    return src.to(DEVICE)


class WithoutCache(DecoderLayer):
    def forward(self, x: Any, memory: Any, mask: Any = None, memory_mask: Any = None, **options: Any) -> Any:
        return super().forward(x, memory, mask, memory_mask)


class OtherDecoder(Decoder):
    def forward(self, *inputs: Any, **options: Any) -> Any:
        return super().forward(*inputs, **options)


def share_a_layer(decoder: Any) -> None:
    decoder.layer_stack[1] = decoder.layer_stack[0]


def share_a_changed_layer(decoder: Any) -> None:
    share_a_layer(decoder)
    decoder.layer_stack[0].pos_ffn.w_1.register_forward_hook(lambda m, _, out: 2 * out)


def change_cores(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda decoder: [change(a) for layer in decoder.layer_stack for a in (layer.slf_attn, layer.enc_attn)]


OTHERS: dict[str, Callable[[Any], Any]] = {
    "a layer twice": share_a_layer,
    "a changed layer twice": share_a_changed_layer,
    "another core": change_cores(lambda attn: setattr(attn, "attention", Doubled(attn.attention))),
    "hooked core": change_cores(lambda attn: attn.attention.register_forward_hook(lambda m, _, out: doubled(out))),
}


@pytest.mark.parametrize(("other", "on_device"), rows([(o, False) for o in OTHERS], [(o, True) for o in OTHERS]))
@torch.no_grad()
def test_what_is_called_decodes(other: str, on_device: bool) -> None:
    """Rows are chosen again after every step, and two sentences leave after the third."""
    src, generator = sources(), torch.Generator().manual_seed(2)
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


REFUSED: dict[str, tuple[Callable[[Any], Any], int, str]] = {
    "another decoder": (lambda d: setattr(d, "__class__", OtherDecoder), 3, "overrides forward and not step"),
    "a layer without a cache": (
        lambda d: setattr(d.layer_stack[1], "__class__", WithoutCache),
        3,
        "enc_output must be a Tensor|NoneType",
    ),
    "training mode": (lambda d: d.train(), 3, "call eval"),
    "a token that is none": (lambda d: None, VOCAB, f"tokens has the value {VOCAB}, expected 0 to"),
}


@pytest.mark.parametrize("what", REFUSED)
@torch.no_grad()
def test_what_cannot_be_stepped(what: str) -> None:
    """An error, and never another forward than its own."""
    change, token, message = REFUSED[what]
    model = fused().eval()
    change(model.decoder)
    with pytest.raises((TypeError, ValueError, AttributeError), match=message):
        model.next_logits(torch.full((4, 1), token, device=DEVICE), model.start_decoding(sources(), 1, 2))


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
