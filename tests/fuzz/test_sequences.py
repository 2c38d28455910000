"""Sequences of calls on one object, against a twin that has no state to get wrong."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from model_checks import DEVICE, GRAPH_CHANGES, NO_DROPOUT, PAD_SRC, PAD_TRG, TINY, VOCAB, fused, model_to_change
from recorded_graph import recorded_calls  # noqa: F401
from torch import Tensor, nn

from fastattn import AttentionMask, GraphedStep, use_backend
from fastattn.backends.reference import philox
from fastattn.graphs.capture import WARM_UP
from fastattn.graphs.graphed_call import EAGER

TIERS = pytest.mark.parametrize("tier", ["everyday", pytest.param("full", marks=pytest.mark.full)])
CAPACITY = 6
UNTIL_REPLAY = EAGER + WARM_UP + 2  # steps


def tokens(rows: int, length: int, seed: int, pad: int | None = None) -> Tensor:
    """Of length tokens the last sentence has one, if they are padded."""
    drawn = torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
    if pad is not None:
        drawn[-1, 1:] = pad
    return drawn.to(DEVICE)


class Steps(RuleBasedStateMachine):
    """GraphedStep with graphs, and the same step without: bit for bit, since nothing is padded."""

    backends: list[str]

    @initialize(accumulate=st.integers(1, 2), clips=st.booleans())
    def start(self, accumulate: int, clips: bool) -> None:
        self.count, self.backend = 0, "reference"
        self.steps = []
        for _ in range(2):
            torch.manual_seed(3)
            parameters = list((model := fused(**TINY, n_position=4)).parameters())
            groups = [{"params": parameters[::2]}, {"params": parameters[1::2]}]
            optimizer = torch.optim.Adam(groups, 2**-6, fused=True, capturable=True)
            options = dict(accumulate=accumulate, max_grad_norm=0.5 if clips else None)
            self.steps.append(GraphedStep(model, optimizer, **options))
        self.weights = {name: t.clone() for name, t in model.state_dict().items()}

    @rule(rows=st.integers(1, 2), training=st.booleans())
    def step(self, rows: int, training: bool) -> None:
        for step in self.steps:
            step.model.train(training)
        for _ in range(UNTIL_REPLAY):
            self.count += 1
            src, trg = tokens(rows, 4, self.count, PAD_SRC), tokens(rows, 4, -self.count, PAD_TRG)
            losses = []
            for step, graphs in zip(self.steps, "10", strict=True):
                torch.manual_seed(self.count)
                with use_backend(self.backend), patch.dict(os.environ, FASTATTN_GRAPHS=graphs):
                    losses.append(step(src, trg, trg))
            assert torch.equal(*losses)
            graphed, eager = ([*step.model.parameters(), step.grad_norm] for step in self.steps)
            assert all(a is b or torch.equal(a, b) for a, b in zip(graphed, eager, strict=True))

    @rule(group=st.integers(0, 1), rate=st.sampled_from((0.0, 2.0**-5, 2.0**-4)), as_tensor=st.booleans())
    def learning_rate(self, group: int, rate: float, as_tensor: bool) -> None:
        for step in self.steps:
            step.optimizer.param_groups[group]["lr"] = torch.tensor(rate) if as_tensor else rate

    @rule(group=st.integers(0, 1), betas=st.sampled_from(((0.5, 0.9), (0.9, 0.99))))
    def change_betas(self, group: int, betas: tuple[float, float]) -> None:
        for step in self.steps:
            step.optimizer.param_groups[group]["betas"] = betas

    @rule()
    def load_weights(self) -> None:
        for step in self.steps:
            step.model.load_state_dict(self.weights)

    @rule()
    def load_optimizer(self) -> None:
        for step in self.steps:
            step.optimizer.load_state_dict(step.optimizer.state_dict())

    @rule(moves=st.booleans(), trains=st.booleans(), data=st.data())
    def change_a_weight(self, moves: bool, trains: bool, data: Any) -> None:
        number = data.draw(st.integers(0, len(self.weights) - 1))
        for step in self.steps:
            weight = list(step.model.parameters())[number % len(list(step.model.parameters()))]
            weight.requires_grad_(trains)
            if moves:
                weight.data = weight.data.clone()

    @rule(data=st.data())
    def change_backend(self, data: Any) -> None:
        self.backend = data.draw(st.sampled_from(self.backends))


@TIERS
@pytest.mark.usefixtures("recorded_calls")
def test_graphed_steps(tier: str, fuzz: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    # A GPU's graph reads no value on the host: so the reference draws its dropout by operators.
    monkeypatch.setattr(philox, "can_read_values", lambda _: False)
    backends = ["reference", "triton"] if tier == "full" else ["reference"]
    fuzz(type("Steps", (Steps,), {"backends": backends}), share=0.1 if tier == "full" else 1)


CHANGES = "weights in place", "weights assigned", "new memory", "encoder frozen", "eps", "padding", "activation"
CHANGES += "evaluation", "child", "buffer", "buffer in place"


class Graphs(RuleBasedStateMachine):
    """A model with graphs=True, and the same model without: loss and gradients."""

    @initialize()
    def start(self) -> None:
        self.model = model_to_change()
        self.models = self.model, copy.deepcopy(self.model)
        self.model.graphs = True
        self.count, self.tolerance, self.hooks, self.dropout = 0, 1e-4, [], 0.0
        self.calls(2, 5, 0.0, 1.0, torch.long, False, False, False)  # what follows meets a captured shape

    @rule(
        rows=st.integers(1, 2),
        length=st.sampled_from((5, 8)),
        smoothing=st.sampled_from((0.0, 0.1)),
        scale=st.sampled_from((1.0, 128.0)),
        dtype=st.sampled_from((torch.long, torch.int32)),
        autocast=st.booleans(),
        own=st.booleans(),
        adds=st.booleans(),
    )
    def calls(
        self, rows: int, length: int, smoothing: float, scale: float, dtype: Any, autocast: bool, own: bool, adds: bool
    ) -> None:
        length = 8 if self.dropout else length  # equal numbers need equal shapes
        for _ in range(EAGER + 1):
            self.count += 1
            src, trg = tokens(rows, length, self.count, PAD_SRC), tokens(rows, length, -self.count, PAD_TRG)
            src, trg, losses = src.to(dtype), trg.to(dtype), []
            if not adds:
                self.tolerance = 1e-4
            self.tolerance = 3e-2 if autocast else self.tolerance
            for m in self.models:
                if not adds:
                    m.zero_grad()
                torch.manual_seed(self.count)
                with use_backend("reference"), torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
                    if own:
                        logits = m(src, trg).float()
                        loss = nn.functional.cross_entropy(logits, trg.flatten().long(), label_smoothing=smoothing)
                    else:
                        loss = m.loss(src, trg, trg, smoothing, reduction="sum")
                (loss * scale).backward()
                losses.append(loss)
            torch.testing.assert_close(*losses, rtol=self.tolerance, atol=1e-5)
            self.compare()

    def compare(self) -> None:
        pairs = list(zip(*(m.parameters() for m in self.models), strict=True))
        largest = max(q.grad.abs().max() for _, q in pairs if q.grad is not None)
        for p, q in pairs:
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or (p.grad - q.grad).abs().max() <= self.tolerance * largest

    @rule()
    @torch.no_grad()
    def update(self) -> None:
        for p, q in zip(*(m.parameters() for m in self.models), strict=True):
            if q.grad is not None:
                q.sub_(q.grad.sign(), alpha=2**-7)
                p.copy_(q)

    @rule(change=st.sampled_from(CHANGES))
    def change(self, change: str) -> None:
        for m in self.models:
            GRAPH_CHANGES[change][1](m)

    @rule()
    def train_all(self) -> None:
        for m in self.models:
            m.train().requires_grad_()

    @rule(dropout=st.sampled_from((0.0, 0.25)))
    def change_dropout(self, dropout: float) -> None:
        self.dropout = dropout
        for module in (module for m in self.models for module in m.modules()):
            if isinstance(module, nn.Dropout):
                module.p = dropout

    @rule()
    def change_hooks(self) -> None:
        if not self.hooks:
            norms = (m.decoder.layer_norm for m in self.models)
            self.hooks = [norm.register_forward_hook(lambda module, given, out: out * 2) for norm in norms]
        else:
            while self.hooks:
                self.hooks.pop().remove()

    @rule()
    def change_graphs(self) -> None:
        self.model.graphs = not self.model.graphs


@TIERS
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.usefixtures("recorded_calls")
def test_graphs_in_any_loop(tier: str, fuzz: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(philox, "can_read_values", lambda _: False)
    fuzz(Graphs, share=0.1 if tier == "full" else 2)


class Decoding(RuleBasedStateMachine):
    """A DecoderCache, and the whole decoder on each row's history."""

    @initialize(on_device=st.booleans(), seed=st.integers(0, 9), rows=st.sampled_from((3, 2, 1)))
    def start(self, on_device: bool, seed: int, rows: int) -> None:
        torch.manual_seed(seed)
        self.model, self.rows, self.on_device = fused(**TINY | NO_DROPOUT, n_head_kv=1).eval(), rows, on_device
        self.begin(4, seed)

    def begin(self, batch: int, seed: int) -> None:
        self.src = tokens(batch, 5, seed, PAD_SRC)
        self.first, self.sentences = batch, list(range(batch))
        self.histories = torch.zeros(batch, self.rows, 0, dtype=torch.long, device=DEVICE)
        with use_backend("reference" if self.on_device else None), torch.no_grad():
            self.cache = self.model.start_decoding(self.src, self.rows, CAPACITY)
        self.cache.on_device |= self.on_device

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
    fuzz(Decoding, share=8 if tier == "everyday" else 1)
