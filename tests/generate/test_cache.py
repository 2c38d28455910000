"""Sequences of calls of one DecoderCache: after each step the logits are those of the whole decoder."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from model_checks import DEVICE, NO_DROPOUT, PAD_SRC, TINY, VOCAB, Doubled, doubled, fused
from recorded_graph import decoding_as_on_a_gpu
from torch import Tensor

from fastattn import AttentionMask, explain, use_backend

CAPACITY = 6
TIERS = pytest.mark.parametrize("tier", ["everyday", pytest.param("full", marks=pytest.mark.full)])


def tokens(rows: int, length: int, seed: int) -> Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def share_a_layer(decoder: Any) -> None:
    decoder.layer_stack.append(decoder.layer_stack[0])


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


class Decoding(RuleBasedStateMachine):
    """A DecoderCache, and the whole decoder on each row's history.     others: changes of a decoder."""

    others = [lambda decoder: None]

    @initialize(on_device=st.booleans(), seed=st.integers(0, 9), rows=st.sampled_from((3, 2, 1)), data=st.data())
    def start(self, on_device: bool, seed: int, rows: int, data: Any) -> None:
        torch.manual_seed(seed)
        self.model, self.rows, self.on_device = fused(**TINY | NO_DROPOUT, n_head_kv=1).eval(), rows, on_device
        data.draw(st.sampled_from(self.others))(self.model.decoder)
        assert not explain(self.model).not_stepped
        self.begin(4, seed)

    def begin(self, batch: int, seed: int) -> None:
        self.src = tokens(batch, 5, seed)
        self.src[-1, 1:] = PAD_SRC
        self.first, self.sentences = batch, list(range(batch))
        self.histories = torch.zeros(batch, self.rows, 0, dtype=torch.long, device=DEVICE)
        with use_backend("reference" if self.on_device else None), torch.no_grad():
            with decoding_as_on_a_gpu() if self.on_device else nullcontext():
                self.cache = self.model.start_decoding(self.src, self.rows, CAPACITY)

    @precondition(lambda self: self.cache.length < CAPACITY)
    @rule(seed=st.integers(0, 99), reorders=st.booleans())
    @torch.no_grad()
    def step(self, seed: int, reorders: bool) -> None:
        if reorders and self.cache.length:
            self.reorder(seed)
        drawn = tokens(len(self.src), self.rows, seed)
        self.histories = torch.cat([self.histories, drawn[..., None]], 2)
        with use_backend("reference" if self.on_device else None):
            logits = self.model.next_logits(drawn, self.cache)
        mask, causal = self.model.src_mask(self.src), AttentionMask(is_causal=True)
        memory = self.model.encoder(self.src, mask)[0]
        for row in range(self.rows):
            decoded, *_ = self.model.decoder(self.histories[:, row], causal, memory, mask)
            torch.testing.assert_close(logits[:, row], self.model.project(decoded[:, -1]), rtol=1e-4, atol=1e-5)

    def reorder(self, seed: int) -> None:
        parents = tokens(len(self.src), self.rows, seed) % self.rows
        self.cache.reorder(parents)
        self.histories = self.histories.gather(1, parents[..., None].expand_as(self.histories))

    @rule(data=st.data())
    def select(self, data: Any) -> None:
        left = data.draw(st.lists(st.integers(0, len(self.src) - 1), min_size=1, max_size=len(self.src), unique=True))
        self.cache.select(torch.tensor(left, device=DEVICE))
        self.src, self.histories = self.src[left], self.histories[left]
        self.sentences = [self.sentences[i] for i in left]
        assert self.cache.sentences.tolist() == self.sentences

    @precondition(lambda self: self.on_device and self.cache.batch == self.first)
    @rule(seed=st.integers(0, 9))
    def resume(self, seed: int) -> None:
        """As a kept graph does it, at the addresses of the old cache."""
        old = self.cache
        self.begin(self.first, seed)
        old.resume(self.cache)
        self.cache = old


@TIERS
def test_decoding(tier: str, fuzz: Callable[..., None]) -> None:
    fuzz(Decoding, share=4 if tier == "everyday" else 1)


@TIERS
def test_a_changed_decoder(tier: str, fuzz: Callable[..., None]) -> None:
    fuzz(type("Changed", (Decoding,), {"others": [*OTHERS.values()]}), share=2 if tier == "everyday" else 0.5)
