"""Steps of decoding, next to what test_contract.py and the state machine of tests/generate/test_cache.py see: what is
refused, and what padding holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_checks import DEVICE, SMALL, batch, fused

from fastattn.models import Decoder
from fastattn.nn import DecoderCache


class OtherDecoder(Decoder):
    def forward(self, *inputs: Any, **options: Any) -> Any:
        return super().forward(*inputs, **options)


@pytest.mark.parametrize("what", ["another decoder", "training mode"])
@torch.no_grad()
def test_what_cannot_be_stepped(what: str) -> None:
    """An error, and never another forward than its own."""
    decoder = (model := fused().eval()).decoder
    if what == "training mode":
        decoder.train()
    else:
        decoder.__class__ = OtherDecoder
    with pytest.raises((TypeError, ValueError), match="call eval|overrides forward and not step"):
        model.next_logits(torch.full((4, 1), 3, device=DEVICE), model.start_decoding(batch(rows=4)[0], 1, 2))


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
