"""Models with graphs=True against the same models without, in ordinary loops (recorded graphs on a CPU)."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import random
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from model_checks import DEVICE, GRAPH_CHANGES, NO_DROPOUT, PAD_SRC, PAD_TRG, TINY, VOCAB, fused, model_to_change
from recorded_graph import RecordedPairs, recorded_calls  # noqa: F401
from torch import Tensor, nn
from torch.testing._internal.common_utils import DeterministicGuard
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fastattn import generate, shadow, use_backend
from fastattn.backends.reference import philox
from fastattn.graphs import graphed_call
from fastattn.graphs.capture import CudaGraphs
from fastattn.graphs.fingerprint import fingerprint
from fastattn.graphs.graphed_call import CHANGED, EAGER, NEW_SHAPE, ModuleGraphs, graphs_of, stats

pytestmark = pytest.mark.usefixtures("recorded_calls")
WAITS = "another forward waits for its backward"


@pytest.fixture(autouse=True)
def _reference(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # A GPU's graph reads no value on the host: so the reference draws its dropout by operators.
    monkeypatch.setattr(philox, "can_read_values", lambda _: False)
    with use_backend("reference"):
        yield


def batch(seed: int = 0, rows: int = 3, src_length: int = 6, trg_length: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """src_seq, trg_seq and gold: sentences of different lengths, the first without padding, the last without tokens."""
    generator = torch.Generator().manual_seed(seed)
    src, trg = (torch.randint(3, VOCAB, (rows, n), generator=generator) for n in (src_length, trg_length + 1))
    trg, gold = trg[:, :-1].clone(), trg[:, 1:].clone()
    for row in range(1, rows):
        src[row, max(src_length - row, 0) :] = PAD_SRC
        trg[row, max(trg_length - row, 0) :], gold[row, max(trg_length - row, 0) :] = PAD_TRG, PAD_TRG
    return src.to(DEVICE), trg.to(DEVICE), gold.to(DEVICE)


def _loss(model: nn.Module, src: Tensor, trg: Tensor, gold: Tensor, smoothing: float = 0.0) -> Tensor:
    return model(src, trg, gold, smoothing)


def _own_loss(model: nn.Module, src: Tensor, trg: Tensor, gold: Tensor, smoothing: float = 0.0) -> Tensor:
    logits = model(src, trg).float()
    return nn.functional.cross_entropy(logits, gold.flatten(), ignore_index=PAD_TRG, label_smoothing=smoothing)


def _weight(model: nn.Module) -> Tensor:
    return model.decoder.layer_stack[0].pos_ffn.w_1.weight


class Twins:
    """A model with graphs and the same model without.     loss: the model's, or the user's own of its logits."""

    def __init__(self, loss: Callable[..., Tensor], model: nn.Module | None = None, **changes: Any) -> None:
        torch.manual_seed(3)
        self.model = model or fused(**TINY | NO_DROPOUT | changes)
        self.plain = copy.deepcopy(self.model)
        self.model.graphs = True
        self.both, self.loss, self.graphs = (self.model, self.plain), loss, graphs_of(self.model)

    def capture(self, *shape: int) -> Twins:
        before = self.graphs.captures
        for seed in range(EAGER + 1):
            self.loss(self.model, *batch(seed, *shape)).backward()
        assert self.graphs.captures == before + 1
        self.model.zero_grad()
        return self

    def step(self, seed: int, *shape: int, replays: int | None = 1) -> None:
        """Loss and gradients of both are equal, with that many replays."""
        before, losses = self.graphs.replays, []
        for m in self.both:
            m.zero_grad()
            losses.append(self.loss(m, *batch(seed, *shape)))
            losses[-1].backward()
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
        self.check(None if replays is None else before + replays)

    def check(self, replays: int | None = None, atol: float = 2e-6) -> None:
        """The gradients are equal, and that many replays were made since the beginning."""
        for (name, p), q in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                torch.testing.assert_close(
                    p.grad, q.grad, rtol=1e-4, atol=atol, equal_nan=True, msg=f"{name}: {{}}".format
                )
        assert replays is None or self.graphs.replays == replays, (self.graphs.replays, self.graphs.eager)


@pytest.fixture(params=[_loss, _own_loss], ids=["loss", "own loss"])
def twins(request: pytest.FixtureRequest) -> Twins:
    return Twins(request.param)


def test_ordinary_loop(twins: Twins) -> None:
    """Shapes change, and so do weights and learning rates, after clipping. 17 sentences are padded to 18."""
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in twins.both]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 3, 0.5) for o in optimizers]
    for i in range(14):
        losses = []
        for m, optimizer, scheduler in zip(twins.both, optimizers, schedulers, strict=True):
            losses.append(twins.loss(m, *batch(i, 16 + i % 2, 5 + i % 4, 9 - i % 5), 0.1))
            optimizer.zero_grad()
            losses[-1].backward()
            nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
        twins.check()
    found = stats(twins.model)
    assert (found.replays, found.captures, found.eager) == (7, 2, {NEW_SHAPE: 7})
    assert found.pool_bytes == 4 * RecordedPairs.pool_size or DEVICE == "cuda"


def test_results_and_gradients_belong_to_the_user(twins: Twins) -> None:
    """They stay when the next ones are computed, and AccumulateGrad does not copy gradients once more."""
    twins.capture()
    loss = twins.loss(twins.model, *batch(4))
    loss.backward()
    kept = [loss.detach(), *(p.grad for p in twins.model.parameters())]
    before = [t.clone() for t in kept]
    twins.step(5)
    assert all(map(torch.equal, kept, before))
    # With an own loss the projection's weight, which is an embedding too, has a sum of two gradients.
    assert len({g.untyped_storage().data_ptr() for g in kept[1:]}) == (1 if twins.loss is _loss else 2)


def test_two_forwards_before_a_backward(twins: Twins) -> None:
    """The second is eager. A first one that is dropped does not count. Another model has its own graphs."""
    pair = twins.capture(), Twins(twins.loss, n_layers=2).capture()
    for i, m in enumerate(twins.both):
        a, b = twins.loss(m, *batch(4)), twins.loss(m, *batch(5, 3, 5, 6))
        (a + 2 * b + pair[1].loss(pair[1].both[i], *batch(6))).backward()
    assert twins.graphs.eager[WAITS] == 1
    for t in pair:
        t.check(replays=2)
    twins.loss(twins.model, *batch(6))
    twins.step(7, replays=1)


BACKWARDS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "retain_graph": lambda loss, weight: [loss.backward(retain_graph=True), loss.backward()],
    "create_graph": lambda loss, weight: (
        loss + torch.autograd.grad(loss, weight, create_graph=True)[0].square().sum()
    ).backward(),
    "batches": lambda loss, weight: torch.autograd.grad(loss, weight, loss.new_ones(2), is_grads_batched=True),
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


# --- changes of the model ---------------------------------------------------------------------------------------------


@pytest.mark.few(10)
@pytest.mark.parametrize("change", GRAPH_CHANGES)
def test_change_of_the_model(twins: Twins, change: str) -> None:
    """Each costs a capture or none, or makes calls eager, with one warning."""
    twins = Twins(twins.loss, model=model_to_change()).capture()
    twins.step(3)
    effect, apply = GRAPH_CHANGES[change]
    for m in twins.both:
        apply(m)
    before = twins.graphs.replays
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", RuntimeWarning)
        for seed in range(4, 7):
            twins.step(seed, replays=None)
    if change == "all but the projection frozen" and twins.loss is _own_loss:  # the stacks have no backward
        assert twins.graphs.eager["nothing of it requires a gradient"] == 1 and not warned
        return
    expected = {"kept": (1, 3), "captured": (2, 1)}.get(effect, (1, 0))
    assert (twins.graphs.captures, twins.graphs.replays - before) == expected
    assert twins.graphs.eager[CHANGED] == (EAGER if effect == "captured" else 0)
    assert [effect in str(w.message) for w in warned] == [True] * (expected == (1, 0))


@pytest.mark.parametrize("shared", [True, False])
def test_hooks_of_parameters(twins: Twins, shared: bool) -> None:
    """They change gradients. Optimizers step in the backward; with an own loss the projection's is the first."""
    twins = Twins(twins.loss, trg_emb_prj_weight_sharing=shared, emb_src_trg_weight_sharing=shared)
    for m in twins.both:
        _weight(m).register_hook(lambda g: g * 3)
        for p in m.parameters():
            optimizer = torch.optim.SGD([p], 0.1)
            p.register_post_accumulate_grad_hook(lambda _, o=optimizer: o.step() or o.zero_grad())
    for seed in range(6):
        for m in twins.both:
            twins.loss(m, *batch(seed)).backward()
    for p, q in zip(*(m.parameters() for m in twins.both), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)
    assert twins.graphs.replays == 4


# --- what is around a call --------------------------------------------------------------------------------------------


@pytest.mark.bug_class("T15", "T16")
def test_dropout(twins: Twins) -> None:
    """Other numbers at every replay, the same after torch.manual_seed. A capture draws none."""
    twins = Twins(twins.loss, dropout=0.2, attn_dropout=0.2)
    losses = []
    for i in range(9):
        if i in (2, 3, 5, 7):
            torch.manual_seed(4)
        losses.append(twins.loss(twins.model, *batch()))
        losses[-1].backward()
    assert twins.graphs.replays == 7
    captured, replayed, *later = (loss.item() for loss in losses[2:])
    assert captured == replayed == later[1] == later[3]
    assert later[0] == later[2] == later[4] != captured


def _under(context: Callable[..., Any], backward: bool = True) -> Callable[..., None]:
    def run(loss: Callable[[], Tensor], model: nn.Module) -> None:
        with context():
            found = loss()
            if backward:
                found.backward()

    return run


def _checkpointed(loss: Callable[[], Tensor], model: nn.Module, reentrant: bool = False) -> None:
    checkpoint(
        lambda x: x * loss(), torch.ones((), device=DEVICE, requires_grad=True), use_reentrant=reentrant
    ).backward()


def _functionally(loss: Callable[[], Tensor], model: nn.Module) -> None:
    names, values = zip(*model.named_parameters(), strict=True)

    def of(*given: Tensor) -> Tensor:
        with torch.nn.utils.stateless._reparametrize_module(model, dict(zip(names, given, strict=True))):
            return loss()

    for p, g in zip(values, torch.func.grad(of, tuple(range(len(values))))(*values), strict=True):
        p.grad = g


def _in_a_thread(loss: Callable[[], Tensor], model: nn.Module) -> None:
    thread = threading.Thread(target=_under(lambda: use_backend("reference")), args=(loss, model))
    thread.start()
    thread.join()


def _of_one_weight(loss: Callable[[], Tensor], model: nn.Module) -> None:
    (_weight(model).grad,) = torch.autograd.grad(loss(), _weight(model))


def _accumulated(loss: Callable[[], Tensor], model: nn.Module, set_to_none: bool) -> None:
    loss().backward()
    model.zero_grad(set_to_none)
    for _ in range(3):
        (loss() / 3).backward()


# Each with the reason why its calls are eager, "" if they replay.
AROUND: dict[str, tuple[str, Callable[..., None]]] = {
    "accumulation": ("", lambda *given: _accumulated(*given, set_to_none=True)),
    "accumulation in place": ("", lambda *given: _accumulated(*given, set_to_none=False)),
    "an infinite scale": ("", lambda loss, model: (loss() * torch.inf).backward()),
    "gradient of one weight": ("", _of_one_weight),
    "FASTATTN_GRAPHS": ("FASTATTN_GRAPHS=0", _under(lambda: patch.dict(os.environ, FASTATTN_GRAPHS="0"))),
    "autocast": (NEW_SHAPE, _under(lambda: torch.autocast(DEVICE, torch.bfloat16))),
    "deterministic": (NEW_SHAPE, _under(lambda: DeterministicGuard(True))),
    "default device": ("", _under(lambda: torch.device(DEVICE))),
    "checkpoint": ("saved tensors have hooks", _checkpointed),
    "reentrant checkpoint": ("a backward computes it again", lambda *given: _checkpointed(*given, reentrant=True)),
    "save_on_cpu": ("saved tensors have hooks", _under(torch.autograd.graph.save_on_cpu)),
    "no_grad": ("no gradient is recorded", _under(torch.no_grad, backward=False)),
    "inference": ("no gradient is recorded", _under(torch.inference_mode, backward=False)),
    "anomalies": ("autograd looks for anomalies", _under(torch.autograd.detect_anomaly)),
    "a dispatch mode": ("traced or transformed", _under(lambda: FlopCounterMode(display=False))),
    "torch.func": ("traced or transformed", _functionally),
    "shadow": ("shadow", lambda loss, model: _under(lambda: shadow(model, 1))(loss, model)),
    "a thread": ("another thread", _in_a_thread),
}


@pytest.mark.few(14)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("around", AROUND)
def test_around_a_call(twins: Twins, around: str) -> None:
    """With dropout: what computes a forward again computes the same."""
    reason, run = AROUND[around]
    twins = Twins(twins.loss, dropout=0.25).capture()
    replays, losses = twins.graphs.replays, []
    for m in twins.both:

        def loss(m: nn.Module = m) -> Tensor:
            losses.append(twins.loss(m, *batch(4, 3, 8, 8)))  # lengths that are not rounded: equal dropout
            return losses[-1]

        torch.manual_seed(5)
        run(loss, m)
    if around != "torch.func":
        torch.testing.assert_close(losses[0], losses[len(losses) // 2])
    twins.check(replays=replays + (0 if reason else len(losses) // 2))
    assert any(reason in r for r in twins.graphs.eager)


def test_wrong_calls_have_the_usual_errors(twins: Twins) -> None:
    """However often a call is repeated."""
    twins.capture().capture(3, 30, 30)  # 30 positions: the longest is no multiple of 8
    src, trg, gold = batch(4)
    wrong = (src.repeat(1, 6), trg, gold), [t.repeat(1, 5) for t in (src, trg, gold)], (src.float(), trg, gold)
    for given in (
        *wrong,
        (src[:2], trg, gold),
        (src, trg.tolist(), gold),
        (src, trg, gold[:, 1:]),
        (src, trg, gold, 2.0),
    ):
        errors = []
        for m in (*[twins.model] * (EAGER + 1), twins.plain):
            with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
                twins.loss(m, *given)
            errors.append((caught.type, str(caught.value)))
        assert len(set(errors)) == 1
    twins.step(5)
    twins.step(6, 3, 29, 26)


def test_arguments_of_the_loss() -> None:
    """Each has graphs: another smoothing, sum, dtype of tokens; gold may be flat."""
    twins = Twins(_loss)
    smoothed = {"label_smoothing": 0.2}
    calls = [smoothed, {"label_smoothing": 0.1}, {"reduction": "sum"}, smoothed | {"smooth_over": "others"}]
    for _ in range(EAGER + 2):
        for options, dtype in zip([*calls, smoothed], [torch.long] * 4 + [torch.int32], strict=True):
            losses = []
            for m in twins.both:
                m.zero_grad()
                src, trg, gold = (t.to(dtype) for t in batch(4))
                losses.append(m.loss(src, trg, gold if dtype == torch.long else gold.flatten(), **options))
                losses[-1].backward()
            torch.testing.assert_close(*losses)
            twins.check(atol=1e-5)
    assert (twins.graphs.captures, twins.graphs.replays) == (5, 10)


def test_copies(twins: Twins) -> None:
    """A deep copy and a pickled model have their own graphs and weights. Graphs keep no model alive."""
    twins.capture()
    for made in (copy.deepcopy(twins.model), pickle.loads(pickle.dumps(twins.model))):
        assert made.graphs and graphs_of(made).captures == 0
        with torch.no_grad():
            _weight(made).zero_()
        for _ in range(EAGER + 1):
            twins.loss(made, *batch()).backward()
        assert graphs_of(made).replays == 1 and not _weight(made).any()
    twins.step(5)
    dead = weakref.ref(twins.model)
    del twins.model, twins.both
    gc.collect()
    assert dead() is None


@pytest.mark.full
def test_compiled(twins: Twins) -> None:
    twins.capture()
    torch._dynamo.reset()
    compiled = torch.compile(lambda *args: twins.loss(twins.model, *args), backend="eager", fullgraph=True)
    compiled(*batch(4)).backward()
    twins.loss(twins.plain, *batch(4)).backward()
    twins.check(replays=1)


# --- limits and failures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["1 shapes are captured", "graphs use half of the device's memory"])
def test_limits(twins: Twins, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is captured is still replayed; other shapes are eager."""
    if limit.startswith("1"):
        monkeypatch.setattr(graphed_call, "MAX_SHAPES", 1)
    else:
        used = sum(g.pool_bytes for g in graphed_call._kept.values())  # by all models
        monkeypatch.setattr(RecordedPairs, "limit", lambda self: used + 2 * self.pool_size)
    twins.capture()
    for seed in range(4, 8):
        twins.step(seed, 4, 9, 9, replays=0)
        twins.step(seed)
    assert twins.graphs.eager == {
        NEW_SHAPE: 4 if limit.startswith("g") else 2,
        limit: 2 if limit.startswith("g") else 4,
    }


@pytest.mark.skipif(DEVICE == "cuda", reason="the failure is planted into recorded graphs")
@pytest.mark.few(4)
@pytest.mark.parametrize("fail_at", [1, 2])
@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_capture_that_fails(twins: Twins, fail_at: int, error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of forward or backward. The step is right, a warning gives the reason, and the model is eager from then on."""
    twins.capture()
    pool, calls = weakref.ref(twins.graphs.graphs), weakref.WeakSet(twins.graphs._calls.values())
    made, captured = [], RecordedPairs.captured

    def failing(self: RecordedPairs, *args: Any) -> Any:
        made.append(1)
        replay = captured(self, *args)
        if len(made) == fail_at:
            raise error("planted\nand more")
        return replay

    monkeypatch.setattr(RecordedPairs, "captured", failing)
    with pytest.warns(RuntimeWarning, match="the capture failed: planted[.]") as warned:
        for seed in range(EAGER + 3):
            twins.step(seed, 4, 9, 9, replays=0)
    assert len(warned) == 1 and pool() is None and not calls and twins.graphs.pool_bytes == 0
    twins.step(7, 4, 9, 9, replays=0)


class Drops(nn.Linear):
    """As LayerDrop does.     host: draws a number.     graphs: of its calls, where it has them."""

    host: Any = None
    graphs: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.graphs(self, Drops.compute, (x,), {}) if self.graphs else self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.host is None or type(self).host() < 0.5 else x


@pytest.fixture
def drops(monkeypatch: pytest.MonkeyPatch) -> Drops:
    monkeypatch.setattr(Drops, "graphs", ModuleGraphs(known=("torch.nn.modules.", __name__)))
    return Drops(8, 8, device=DEVICE)


@pytest.mark.bug_class("T15", "T16")
@pytest.mark.parametrize("host", [random.random, lambda: torch.rand([]).item(), numpy.random.rand])
def test_random_numbers_of_the_host(drops: Drops, host: Callable[[], float], monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph would repeat one decision for ever: eager, with one warning."""
    monkeypatch.setattr(Drops, "host", host)
    with pytest.warns(RuntimeWarning, match="draws random numbers on the host") as warned:
        for i in range(12):
            results = []
            for call in (drops, drops.compute):
                random.seed(i), torch.manual_seed(i), numpy.random.seed(i)
                results.append(call(torch.full((2, 8), float(i), device=DEVICE)))
            torch.testing.assert_close(*results)
    assert len(warned) == 1 and drops.graphs.replays == 0


def test_a_captured_backward_is_outside_of_autocast(drops: Drops, monkeypatch: pytest.MonkeyPatch) -> None:
    """As users call it. Products that a module keeps in float32 are then float32 in the backward too."""

    def exact(module: Drops, x: Tensor) -> Tensor:
        with torch.autocast(DEVICE, enabled=False):
            return nn.Linear.forward(module, x)

    monkeypatch.setattr(Drops, "compute", exact)
    x, dout = torch.randn(2, 16, 8, device=DEVICE)
    for call in (*[drops] * (EAGER + 2), drops.compute):
        drops.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16):
            out = call(x)
        out.backward(dout)
        found, expected = drops.weight.grad, dout.T @ x
        torch.testing.assert_close(found, expected)
    assert drops.graphs.replays == 2


def test_objects_are_told_apart_by_more_than_their_addresses() -> None:
    """A new one is often where the one before it was."""
    module = nn.TransformerEncoderLayer(8, 2, 16)
    module.activation = partial(nn.functional.gelu, approximate="none")
    before, place = fingerprint(module), id(module.activation)
    module.activation, others = None, []
    while id(module.activation) != place:
        module.activation = partial(nn.functional.gelu, approximate="tanh")
        others.append(module.activation)
    assert fingerprint(module) != before == before


@pytest.mark.filterwarnings("ignore")
def test_jit_trace_has_no_replay(drops: Drops) -> None:
    x = torch.randn(3, 8, device=DEVICE)
    for _ in range(EAGER + 1):
        drops(x)
    assert drops.graphs.captures == 1
    traced = torch.jit.trace(drops, x, check_trace=False)
    torch.testing.assert_close(traced(x + 1), drops.compute(x + 1))
    assert drops.graphs.replays == 1


def _process(rank: int, folder: str, option: str, library: str = "gloo", count: int = 2) -> None:
    torch.set_num_threads(1)
    if DEVICE == "cpu":
        graphed_call.CudaGraphs = RecordedPairs
    dist.init_process_group(library, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=count)
    with use_backend("reference"):
        for loss in (_loss, _own_loss):
            _train(rank, loss, option)
    dist.destroy_process_group()


def _train(rank: int, loss: Callable[..., Tensor], option: str) -> None:
    twins = Twins(loss)
    ddp = nn.parallel.DistributedDataParallel(twins.model, **{option: True})
    for i in range(6):
        count = dist.get_world_size()
        parts, accumulates = [batch(2 * i + r) for r in range(count)], i == 3 and option != "static_graph"
        with ddp.no_sync() if accumulates else torch.enable_grad():
            loss(ddp, *parts[rank]).backward()
        for part in parts:
            (loss(twins.plain, *part) / count).backward()
        if not accumulates:
            twins.check()
            for m in twins.both:
                m.zero_grad()
    assert twins.graphs.replays == 4, twins.graphs.eager


FULL = [pytest.param(o, marks=pytest.mark.full) for o in ("static_graph", "gradient_as_bucket_view")]


@pytest.mark.parametrize("option", ["find_unused_parameters", *FULL])
def test_ddp(option: str, tmp_path: Path) -> None:
    """The hooks of DistributedDataParallel see the gradients, in two processes."""
    method = "fork" if DEVICE == "cpu" else "spawn"  # a fork has imported everything
    mp.start_processes(_process, (str(tmp_path), option), nprocs=2, start_method=method)


# --- on a GPU ---------------------------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
LARGE = dict(n_layers=2, d_word_vec=256, d_model=256, d_inner=1024, n_head=4, d_k=64, d_v=64, n_position=80)
SHAPES = ((64, 60, 56), (72, 50, 64), (64, 60, 56), (56, 64, 64))


@needs_gpu
@pytest.mark.parametrize("loss", [_loss, _own_loss])
def test_kernels_and_memory(loss: Callable[..., Tensor]) -> None:
    """The default backends in mixed precision, shapes in turn. In between graphs of decoding are made and destroyed.
    All shapes share a pool of about one step's memory, which is freed with the model."""
    with use_backend(None):
        twins, peak = Twins(loss, **LARGE), 0
        for seed in range(24):
            for m in twins.both:
                m.zero_grad()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                with torch.autocast("cuda", torch.bfloat16):
                    value = loss(m, *batch(seed, *SHAPES[seed % 4]))
                value.backward()
            peak = max(peak, torch.cuda.max_memory_allocated() - before)  # of the model without graphs
            for (name, p), q in zip(twins.model.named_parameters(), twins.plain.parameters(), strict=True):
                assert (p.grad - q.grad).norm() <= 0.05 * q.grad.norm(), name
            if seed % 5 == 4:
                generate.greedy(twins.model.eval(), batch(seed)[0], max_len=8, bos_idx=3, eos_idx=4)
                twins.model.train()
                generate.drop_graphs()
                torch.cuda.empty_cache()
        found = stats(twins.model)
        assert found.captures == 3 and found.replays == 18 and 0 < found.pool_bytes < 2 * peak
        torch.cuda.empty_cache()
        reserved, pool_bytes = torch.cuda.memory_reserved(), found.pool_bytes
        del twins, m, p, q, value
        gc.collect()
        torch.cuda.empty_cache()
        assert reserved - torch.cuda.memory_reserved() >= pool_bytes


@needs_gpu
def test_nccl(tmp_path: Path) -> None:
    """Its watchdog looks at events while a graph is captured."""
    mp.spawn(_process, (str(tmp_path), "find_unused_parameters", "nccl", 1), nprocs=1)


@needs_gpu
@pytest.mark.bug_class("T16")
@pytest.mark.parametrize("fail_at", [1, 2])
@pytest.mark.parametrize("reads", [False, True], ids=["out of memory", "a read on the host"])
def test_capture_that_fails_on_a_gpu(twins: Twins, reads: bool, fail_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is right, the allocator and eager dropout work, and another model gets graphs."""
    made, captured = [], CudaGraphs.captured

    def failing(self: CudaGraphs, work: Callable[[], None], *args: Any) -> Any:
        def fails() -> None:
            work()
            torch.ones(1 if reads else 2**34, device=DEVICE)[0].item()

        made.append(1)
        if len(made) != fail_at:
            return captured(self, work, *args)
        torch.cuda.set_per_process_memory_fraction(1.0 if reads else 0.04)
        try:
            return captured(self, fails, *args)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    monkeypatch.setattr(CudaGraphs, "captured", failing)
    reason = "" if reads else ".*out of memory"
    with pytest.warns(RuntimeWarning, match=f"the capture failed: {reason}") as warned:
        for seed in range(EAGER + 3):
            twins.step(seed, replays=0)
    assert len(warned) == 1 and twins.graphs.pool_bytes == 0
    torch.cuda.empty_cache()
    assert nn.functional.dropout(torch.ones(999, device=DEVICE)).unique().numel() == 2
    Twins(twins.loss).capture().step(9)
