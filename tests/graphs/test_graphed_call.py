"""Models with graphs=True against the same models without, in ordinary loops (recorded graphs on a CPU)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from model_checks import DEVICE, NO_DROPOUT, PAD_SRC, PAD_TRG, TINY, VOCAB, fused
from recorded_graph import RecordedPairs, recorded_calls  # noqa: F401
from torch import Tensor, nn

from fastattn import use_backend
from fastattn.graphs.graphed_call import EAGER, NEW_SHAPE, graphs_of, stats

pytestmark = pytest.mark.usefixtures("recorded_calls")
WAITS = "another forward waits for its backward"


@pytest.fixture(autouse=True)
def _reference() -> Iterator[None]:
    with use_backend("reference"):
        yield


def batch(seed: int = 0, rows: int = 3, src_length: int = 6, trg_length: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """src_seq, trg_seq and gold: sentences of different lengths, the first without padding."""
    generator = torch.Generator().manual_seed(seed)
    src, trg = (torch.randint(3, VOCAB, (rows, n), generator=generator) for n in (src_length, trg_length + 1))
    trg, gold = trg[:, :-1].clone(), trg[:, 1:].clone()
    for row in range(1, rows):
        src[row, max(src_length - row, 1) :] = PAD_SRC
        trg[row, max(trg_length - row, 1) :], gold[row, max(trg_length - row, 1) :] = PAD_TRG, PAD_TRG
    return src.to(DEVICE), trg.to(DEVICE), gold.to(DEVICE)


def _loss(model: nn.Module, src: Tensor, trg: Tensor, gold: Tensor, smoothing: float = 0.0) -> Tensor:
    return getattr(model, "module", model)(src, trg, gold, smoothing)


def _own_loss(model: nn.Module, src: Tensor, trg: Tensor, gold: Tensor, smoothing: float = 0.0) -> Tensor:
    logits = model(src, trg).float()
    return nn.functional.cross_entropy(logits, gold.flatten(), ignore_index=PAD_TRG, label_smoothing=smoothing)


class Twins:
    """A model with graphs and the same model without.     loss: of the model, or the user's own of its logits."""

    def __init__(self, loss: Callable[..., Tensor], **changes: Any) -> None:
        torch.manual_seed(3)
        self.model = fused(**TINY | NO_DROPOUT | changes)
        self.plain = copy.deepcopy(self.model)
        self.model.graphs = True
        self.both, self.loss = (self.model, self.plain), loss
        self.graphs = graphs_of(self.model)

    def capture(self, *shape: int) -> Twins:
        """With the shape captured."""
        before = self.graphs.captures
        for seed in range(EAGER + 1):
            self.loss(self.model, *batch(seed, *shape)).backward()
        assert self.graphs.captures == before + 1
        self.model.zero_grad()
        return self

    def step(self, seed: int, *shape: int, replays: int | None = 1) -> None:
        """Forward and backward of both, from no gradients."""
        before, losses = self.graphs.replays, []
        for m in self.both:
            m.zero_grad()
            losses.append(self.loss(m, *batch(seed, *shape)))
            losses[-1].backward()
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
        self.check(replays=None if replays is None else before + replays)

    def check(self, replays: int | None = None, atol: float = 2e-6) -> None:
        """The gradients are equal, and that many replays were made since the beginning."""
        for (name, p), q in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
        assert replays is None or self.graphs.replays == replays, (self.graphs.replays, self.graphs.eager)


LOSSES = pytest.mark.parametrize("loss", [_loss, _own_loss], ids=["loss", "own loss"])


@pytest.fixture(params=[_loss, _own_loss], ids=["loss", "own loss"])
def twins(request: pytest.FixtureRequest) -> Twins:
    return Twins(request.param)


def test_ordinary_loop(twins: Twins) -> None:
    """Shapes change, and so do weights and learning rates, after clipping."""
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in twins.both]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 3, 0.5) for o in optimizers]
    for i in range(14):
        losses = []
        for m, optimizer, scheduler in zip(twins.both, optimizers, schedulers, strict=True):
            losses.append(twins.loss(m, *batch(i, 3 + i % 2, 5 + i % 4, 9 - i % 5), 0.1))
            optimizer.zero_grad()
            losses[-1].backward()
            nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
        twins.check()
    assert (twins.graphs.replays, twins.graphs.captures) == (7, 2)
    assert twins.graphs.eager == {NEW_SHAPE: 7}
    found = stats(twins.model)
    assert (found.replays, found.captures, found.eager) == (7, 2, {NEW_SHAPE: 7})
    assert found.pool_bytes == 4 * RecordedPairs.pool_size or DEVICE == "cuda"


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation(twins: Twins, set_to_none: bool) -> None:
    twins.capture()
    for m in twins.both:
        twins.loss(m, *batch(3)).backward()
        m.zero_grad(set_to_none=set_to_none)
        for seed in (4, 5, 6):
            (twins.loss(m, *batch(seed)) / 3).backward()
    twins.check(replays=5)


def test_gradients_belong_to_the_user(twins: Twins) -> None:
    """They stay when the next ones are computed, and AccumulateGrad does not copy them once more."""
    twins.capture()
    twins.step(4)
    kept = [p.grad for p in twins.model.parameters()]
    before = [g.clone() for g in kept]
    twins.step(5)
    assert all(map(torch.equal, kept, before))
    storages = {p.grad.untyped_storage().data_ptr() for p in twins.model.parameters()}
    # With an own loss the projection's weight, which is an embedding too, has a sum of two gradients.
    assert len(storages) == (1 if twins.loss is _loss else 2)


def test_results_belong_to_the_user(twins: Twins) -> None:
    twins.capture()
    first, again = (twins.loss(twins.model, *batch(4)) for _ in range(2))
    assert twins.graphs.eager[WAITS] == 1
    kept = first.detach().clone()
    first.backward()
    twins.step(5)
    assert torch.equal(first, kept) and torch.allclose(again, kept)


def test_two_forwards_before_a_backward(twins: Twins) -> None:
    """The second is eager. A first one that is dropped does not count."""
    twins.capture()
    for m in twins.both:
        a, b = twins.loss(m, *batch(4)), twins.loss(m, *batch(5, 3, 5, 6))
        (a + 2 * b).backward()
    twins.check(replays=2)
    assert twins.graphs.eager[WAITS] == 1
    twins.loss(twins.model, *batch(6))
    twins.step(7, replays=1)


def test_two_models(twins: Twins) -> None:
    """Each has graphs: both replay before a backward."""
    pair = twins.capture(), Twins(twins.loss, n_layers=2).capture()
    for i in range(2):
        a, b = (t.loss(t.both[i], *batch(4 + k)) for k, t in enumerate(pair))
        (a * b).backward()
    for t in pair:
        t.check(replays=2)


def _weight(model: nn.Module) -> Tensor:
    return model.decoder.layer_stack[0].pos_ffn.w_1.weight


BACKWARDS = {
    "retain_graph": lambda loss, weight: [loss.backward(retain_graph=True), loss.backward()],
    "create_graph": lambda loss, weight: (
        loss + torch.autograd.grad(loss, weight, create_graph=True)[0].square().sum()
    ).backward(),
    "batches": lambda loss, weight: torch.autograd.grad(
        loss, weight, torch.ones(2, device=DEVICE), is_grads_batched=True
    )[0].sum(),
}


@pytest.mark.parametrize("backward", BACKWARDS)
def test_backwards_that_a_graph_cannot_be(twins: Twins, backward: str) -> None:
    """The eager calls of a shape show it, and no graph is made. A replay raises, and is right the next time."""
    with pytest.warns(RuntimeWarning, match=backward) as warned:
        for _ in range(EAGER + 2):
            for m in twins.both:
                BACKWARDS[backward](twins.loss(m, *batch(4)), _weight(m))
            twins.check(replays=0, atol=1e-5)
    assert len(warned) == 1
    other = Twins(twins.loss).capture()
    with pytest.raises(RuntimeError, match=f"second backward|{backward}"):
        BACKWARDS[backward](other.loss(other.model, *batch(4)), _weight(other.model))
    other.step(5)


def test_weight_changed_before_the_backward(twins: Twins) -> None:
    twins.capture()
    for m in twins.both:
        loss = twins.loss(m, *batch(4))
        with torch.no_grad():
            _weight(m).mul_(2.0)
        with pytest.raises(RuntimeError, match="inplace"):
            loss.backward()
        del loss
    twins.step(5)
