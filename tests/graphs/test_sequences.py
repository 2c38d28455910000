"""Sequences of calls of one model with graphs, and of one GraphedStep, next to the same without graphs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from graph_twins import CHANGES, Calls, adam, model_to_change, small
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from model_checks import DEVICE, batch
from recorded_graph import recorder  # noqa: F401
from torch import nn

from fastattn import GraphedStep, use_backend
from fastattn.graphs.capture import WARM_UP
from fastattn.graphs.graphed_call import EAGER

pytestmark = pytest.mark.usefixtures("recorder")
TIERS = pytest.mark.parametrize("tier", ["everyday", pytest.param("full", marks=pytest.mark.full)])


def changes_of(users: str) -> st.SearchStrategy[str]:
    """Those that do not prevent graphs and can be made again and again."""
    kept = {name for name, c in CHANGES.items() if c.effect in ("kept", "captured") and {*users} & {*c.users}}
    return st.sampled_from(sorted(kept - {"layer shared", "float64", "a group more"}))


class Steps(RuleBasedStateMachine):
    """GraphedStep with graphs, and the same step without: bit for bit, since nothing is padded."""

    backends = ["reference"]

    @initialize(accumulate=st.integers(1, 2), clips=st.booleans())
    def start(self, accumulate: int, clips: bool) -> None:
        self.count, self.backend = 0, "reference"
        models = [small(n_position=4, dropout=0.1, attn_dropout=0.1) for _ in range(2)]
        options = dict(accumulate=accumulate, max_grad_norm=0.5 if clips else None)
        self.steps = [GraphedStep(m, adam(m, lr=2**-6, eps=1e-8), **options) for m in models]

    @rule(rows=st.integers(1, 2))
    def step(self, rows: int) -> None:
        for _ in range(EAGER + WARM_UP + 2):
            self.count += 1
            given = batch(self.count, rows, 4, 4)
            results = []
            for step, graphs in zip(self.steps, "10", strict=True):
                torch.manual_seed(self.count)
                with use_backend(self.backend), patch.dict(os.environ, FASTATTN_GRAPHS=graphs):
                    loss = step(*given)
                results.append((loss, torch.rand((), device=DEVICE), *step.model.parameters(), step.grad_norm))
            assert all(a is b or torch.equal(a, b) for a, b in zip(*results, strict=True))

    @rule(group=st.integers(0, 1), rate=st.sampled_from((0.0, 2.0**-5, 2.0**-4)), as_tensor=st.booleans())
    def learning_rate(self, group: int, rate: float, as_tensor: bool) -> None:
        for step in self.steps:
            step.optimizer.param_groups[group]["lr"] = torch.tensor(rate) if as_tensor else rate

    @rule(change=changes_of("so"))
    def change(self, change: str) -> None:
        for step in self.steps:
            CHANGES[change].apply(step.model, step.optimizer)

    @rule()
    def train_all(self) -> None:
        for step in self.steps:
            step.model.train().requires_grad_()

    @rule(data=st.data())
    def change_backend(self, data: Any) -> None:
        self.backend = data.draw(st.sampled_from(self.backends))


@TIERS
def test_graphed_steps(tier: str, fuzz: Callable[..., None]) -> None:
    backends = ["reference", "triton"] if tier == "full" else ["reference"]
    fuzz(type("Steps", (Steps,), {"backends": backends}), share=0.1 if tier == "full" else 1)


class AnyLoop(RuleBasedStateMachine):
    """A model with graphs=True, and the same model without: loss and gradients."""

    @initialize()
    def start(self) -> None:
        self.twins = Calls(model=model_to_change())
        self.count, self.tolerance, self.dropout = 0, 1e-4, 0.0
        self.calls(2, 5, {}, 1.0, torch.long, False, False, False)  # what follows meets a captured shape

    @rule(
        rows=st.integers(1, 2),
        length=st.sampled_from((5, 8)),
        options=st.sampled_from(({}, {"label_smoothing": 0.1}, {"label_smoothing": 0.1, "smooth_over": "others"})),
        scale=st.sampled_from((1.0, 128.0)),
        dtype=st.sampled_from((torch.long, torch.int32)),
        autocast=st.booleans(),
        own=st.booleans(),
        adds=st.booleans(),
    )
    def calls(
        self, rows: int, length: int, options: Any, scale: float, dtype: Any, autocast: bool, own: bool, adds: bool
    ) -> None:
        """adds: to the gradients of earlier calls.     own: the loss is the user's."""
        length = 8 if self.dropout else length  # equal numbers need equal shapes
        self.tolerance = 3e-2 if autocast else self.tolerance if adds else 1e-4
        for _ in range(EAGER + 1):
            self.count += 1
            src, trg = (t.to(dtype) for t in batch(self.count, rows, length, length)[:2])
            losses = []
            for m in self.twins.both:
                if not adds:
                    m.zero_grad()
                torch.manual_seed(self.count)
                with use_backend("reference"), torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
                    if own:
                        loss = nn.functional.cross_entropy(m(src, trg).float(), trg.flatten().long())
                    else:
                        loss = m.loss(src, trg, trg, reduction="sum", **options)
                (loss * scale).backward()
                losses.append(loss)
            torch.testing.assert_close(*losses, rtol=self.tolerance, atol=1e-5)
            pairs = [(p.grad, q.grad) for p, q in zip(*(m.parameters() for m in self.twins.both), strict=True)]
            largest = max(q.abs().max() for _, q in pairs if q is not None)
            for p, q in pairs:
                assert (p is None) == (q is None)
                assert p is None or (p - q).abs().max() <= self.tolerance * largest

    @rule()
    @torch.no_grad()
    def update(self) -> None:
        for p, q in zip(*(m.parameters() for m in self.twins.both), strict=True):
            if q.grad is not None:
                q.sub_(q.grad.sign(), alpha=2**-7)
                p.copy_(q)

    @rule(change=changes_of("c"))
    def change(self, change: str) -> None:
        self.twins.change(CHANGES[change].apply)

    @rule(dropout=st.sampled_from((0.0, 0.25)))
    def train_all(self, dropout: float) -> None:
        self.dropout = dropout
        for m in self.twins.both:
            m.train().requires_grad_()
            for module in m.modules():
                if isinstance(module, nn.Dropout):
                    module.p = dropout

    @rule()
    def change_graphs(self) -> None:
        self.twins.model.graphs = not self.twins.model.graphs


@TIERS
def test_graphs_in_any_loop(tier: str, fuzz: Callable[..., None]) -> None:
    fuzz(AnyLoop, share=0.1 if tier == "full" else 1)
