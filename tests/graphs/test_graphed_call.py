"""Models with graphs=True against the same models without, next to the sequences of test_sequences.py."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from families import tiers
from graph_twins import Calls, a_weight, loss_of, own_loss_of
from model_checks import DEVICE, batch, rows
from recorded_graph import RecordedGraphs, Recorder, recorder  # noqa: F401
from torch import Tensor, nn
from torch.testing._internal.common_utils import DeterministicGuard
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fastattn import generate, shadow, use_backend
from fastattn.graphs import graphed_call, stats
from fastattn.graphs.graphed_call import EAGER, NEW_SHAPE, ModuleGraphs

pytestmark = pytest.mark.usefixtures("recorder")
LOSSES = {"loss": loss_of, "own loss": own_loss_of}
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


@pytest.fixture(params=tiers(LOSSES, "loss"))
def twins(request: pytest.FixtureRequest) -> Calls:
    return Calls(LOSSES[request.param])


@pytest.mark.parametrize("twins", LOSSES, indirect=True)
def test_a_shorter_batch(twins: Calls) -> None:
    """Nothing is left of a longer one. 17 sentences are padded to 18, and lengths to 8, or to the last position. More
    positions are captured with what reads them."""
    twins = Calls(twins.loss, n_position=9).capture(18, 8, 8)
    twins.check(4, 17, 5, 6)
    twins.check(5, 18, 8, 8)
    assert twins.stats[:2] == (3, 1)
    twins.capture(3, 9, 9).check(6, 3, 9, 9)
    assert twins.stats[:2] == (5, 2)
    twins.capture(3, 12, 10).capture(3, 20, 9).capture(3, 12, 10).check(6, 3, 11, 12)
    assert twins.stats[:2] == (9, 5)
    for m in twins.both:  # other rows continue it
        m.decoder.position_enc.pos_table.copy_(m.decoder.position_enc.pos_table.bfloat16())
    twins.check(6, 3, 11, 12)


def test_results_and_gradients_belong_to_the_user(twins: Calls) -> None:
    """They stay when the next ones are computed, and AccumulateGrad does not copy gradients once more."""
    twins.capture().model.zero_grad()
    loss = twins.loss(twins.model, *batch(4))
    loss.backward()
    kept = [loss.detach(), *(p.grad for p in twins.model.parameters())]
    before = [t.clone() for t in kept]
    twins.check(5)
    assert all(map(torch.equal, kept, before))
    # With an own loss the projection's weight, which is an embedding too, has a sum of two gradients.
    assert len({g.untyped_storage().data_ptr() for g in kept[1:]}) == (1 if twins.loss is loss_of else 2)


def test_two_forwards_before_a_backward(twins: Calls) -> None:
    """The second is eager. A first one that is dropped does not count. Another model has its own graphs."""
    pair = twins.capture(), Calls(twins.loss, n_layers=2).capture()
    for i, m in enumerate(twins.both):
        for t in pair:
            t.both[i].zero_grad()
        a, b = twins.loss(m, *batch(4)), twins.loss(m, *batch(5, 3, 5, 6))
        (a + 2 * b + pair[1].loss(pair[1].both[i], *batch(6))).backward()
    assert twins.stats.eager["another forward waits for its backward"] == 1
    for t in pair:
        t.check_gradients()
        assert t.stats.replays == 2
    twins.loss(twins.model, *batch(6))
    twins.check(7)
    assert twins.stats.replays == 4


BACKWARDS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "retain_graph": lambda loss, weight: [loss.backward(retain_graph=True), loss.backward()],
    "create_graph": lambda loss, weight: (
        loss + torch.autograd.grad(loss, weight, create_graph=True)[0].square().sum()
    ).backward(),
    "batches": lambda loss, weight: torch.autograd.grad(loss, weight, loss.new_ones(2), is_grads_batched=True),
}


@pytest.mark.parametrize("backward", BACKWARDS)
def test_backwards_that_a_graph_cannot_be(twins: Calls, backward: str) -> None:
    """The eager calls of a shape show it, and no graph is made. A replay raises, and is right the next time."""
    with pytest.warns(RuntimeWarning, match=backward) as warned:
        for _ in range(EAGER + 2):
            for m in twins.both:
                BACKWARDS[backward](twins.loss(m, *batch(4)), a_weight(m))
            twins.check_gradients(atol=1e-5)
    assert len(warned) == 1 and twins.stats.replays == 0
    other = Calls(twins.loss).capture()
    with pytest.raises(RuntimeError, match=f"second backward|{backward}"):
        BACKWARDS[backward](other.loss(other.model, *batch(4)), a_weight(other.model))
    other.check(5)


def test_weight_changed_before_the_backward(twins: Calls) -> None:
    twins.capture()
    for m in twins.both:
        loss = twins.loss(m, *batch(4))
        with torch.no_grad():
            a_weight(m).mul_(2.0)
        with pytest.raises(RuntimeError, match="inplace"):
            loss.backward()
        del loss
    twins.check(5)


def test_hooks_of_parameters(twins: Calls) -> None:
    """They change gradients. Optimizers step in the backward; with an own loss the projection's is the first."""
    for m in twins.both:
        a_weight(m).register_hook(lambda g: g * 3)
        for p in m.parameters():
            optimizer = torch.optim.SGD([p], 0.1)
            p.register_post_accumulate_grad_hook(lambda _, o=optimizer: o.step() or o.zero_grad())
    for seed in range(6):
        for m in twins.both:
            twins.loss(m, *batch(seed)).backward()
    for p, q in zip(*(m.parameters() for m in twins.both), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)
    assert twins.stats.replays == 4


# --- what is around a call --------------------------------------------------------------------------------------------


def _under(context: Callable[..., Any], backward: bool = True) -> Callable[..., None]:
    def run(loss: Callable[[], Tensor], model: nn.Module) -> None:
        with context():
            found = loss()
            if backward:
                found.backward()

    return run


def _checkpointed(loss: Callable[[], Tensor], model: nn.Module, reentrant: bool = False) -> None:
    one = torch.ones((), device=DEVICE, requires_grad=True)
    # A GPU's backward, which calls the model again, is in a thread that use_backend does not reach.
    with patch.dict("os.environ", FASTATTN_BACKEND="reference"):
        checkpoint(lambda x: x * loss(), one, use_reentrant=reentrant).backward()


def _in_a_thread(loss: Callable[[], Tensor], model: nn.Module) -> None:
    thread = threading.Thread(target=_under(lambda: use_backend("reference")), args=(loss, model))
    thread.start()
    thread.join()


# Each with the reason why its calls are eager. A model that is compiled has no graphs, and counts no calls.
AROUND: dict[str, tuple[str | None, Callable[..., None]]] = {
    "autocast": (NEW_SHAPE, _under(lambda: torch.autocast(DEVICE, torch.bfloat16))),
    "another backend": (NEW_SHAPE, _under(lambda: use_backend("aten"))),
    "deterministic": (NEW_SHAPE, _under(lambda: DeterministicGuard(True))),
    "checkpoint": ("saved tensors have hooks", _checkpointed),
    "reentrant checkpoint": ("a backward computes it again", lambda *given: _checkpointed(*given, reentrant=True)),
    "no_grad": ("no gradient is recorded", _under(torch.no_grad, backward=False)),
    "a dispatch mode": ("traced or transformed", _under(lambda: FlopCounterMode(display=False))),
    "forward mode": ("traced or transformed", _under(torch.autograd.forward_ad.dual_level)),
    "compiled": (None, lambda loss, model: torch.compile(loss, backend="eager")().backward()),
    "shadow": ("shadow", lambda loss, model: _under(lambda: shadow(model, 1))(loss, model)),
    "a thread": ("another thread", _in_a_thread),
}
EVERYDAY = [("own loss", "autocast"), ("loss", "another backend"), ("own loss", "checkpoint"), ("loss", "no_grad")]
EVERYDAY += [("own loss", "forward mode"), ("loss", "a thread")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("loss", "around"), rows(EVERYDAY, itertools.product(LOSSES, AROUND)))
def test_around_a_call(loss: str, around: str) -> None:
    """With dropout: what computes a forward again computes the same."""
    reason, run = AROUND[around]
    twins = Calls(LOSSES[loss], dropout=0.25)
    for _ in range(EAGER + 1):
        twins.loss(twins.model, *batch()).backward()
    for _ in range(EAGER + 1 if reason == NEW_SHAPE else 1):
        losses: list[Tensor] = []
        for m in twins.both:

            def compute(m: nn.Module = m, computed: Any = losses) -> Tensor:
                loss = twins.loss(m, *batch(4, 3, 8, 8))  # lengths that are not rounded: equal dropout
                computed.append(loss)
                return loss

            m.zero_grad()
            torch.manual_seed(5)
            run(compute, m)
        torch.testing.assert_close(losses[0], losses[len(losses) // 2])
        twins.check_gradients(atol=1e-5)
    assert twins.stats.replays == 1 + (len(losses) // 2 if reason == NEW_SHAPE else 0)
    assert reason is None or any(reason in r for r in twins.stats.eager)


def test_copies(twins: Calls) -> None:
    """A deep copy and a pickled model have their own graphs and weights. Graphs keep no model alive."""
    twins.capture()
    for made in (copy.deepcopy(twins.model), pickle.loads(pickle.dumps(twins.model))):
        assert made.graphs and stats(made).captures == 0
        with torch.no_grad():
            a_weight(made).zero_()
        for _ in range(EAGER + 1):
            twins.loss(made, *batch()).backward()
        assert stats(made).replays == 1 and not a_weight(made).any()
    twins.check(5)
    dead = weakref.ref(twins.model)
    del twins.model, twins.both
    gc.collect()
    assert dead() is None


# --- limits and failures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["1 shapes are captured", "graphs use half of the device's memory"])
def test_limits(twins: Calls, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is captured is still replayed; other shapes are eager."""
    if limit.startswith("1"):
        monkeypatch.setattr(graphed_call, "MAX_SHAPES", 1)
    else:
        gc.collect()  # the graphs of all models count
        monkeypatch.setattr(graphed_call.CudaGraphs, "limit", lambda graphs: 1)
    twins.capture()
    for seed in range(4, 8):
        twins.check(seed, 4, 9, 9)
        twins.check(seed)
    new = 4 if limit.startswith("g") else 2
    assert twins.stats.replays == 5 and twins.stats.eager == {NEW_SHAPE: new, limit: 6 - new}


def _raise() -> None:
    raise torch.OutOfMemoryError("planted\nand more")


@pytest.mark.parametrize("fail_at", tiers([1, 2], 2))
def test_capture_that_fails(twins: Calls, fail_at: int, recorder: Recorder) -> None:  # noqa: F811
    """Of forward or backward. The step is right, a warning gives the reason, the model is eager from then on, and its
    graphs are freed. The allocator and eager dropout work, and another model gets graphs."""
    twins.capture()
    recorder.failures[recorder.captures + fail_at] = _raise
    with pytest.warns(RuntimeWarning, match="the capture failed: planted[.]") as warned:
        for seed in range(EAGER + 3):
            twins.check(seed, 4, 9, 9)
    assert len(warned) == 1 and twins.stats.pool_bytes == 0 and twins.stats.replays == 1
    assert nn.functional.dropout(torch.ones(999, device=DEVICE)).unique().numel() == 2
    other = Calls(twins.loss).capture()
    other.check(9)
    assert other.stats.replays == 2


def test_a_captured_backward_is_outside_of_autocast() -> None:
    """As users call it. Products that a module keeps in float32 are then float32 in the backward too."""
    module, graphs = nn.Linear(8, 8, device=DEVICE), ModuleGraphs()
    x, dout = torch.randn(2, 16, 8, device=DEVICE)

    def exact(module: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast(DEVICE, enabled=False):
            return module(x)

    for _ in range(EAGER + 2):
        module.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16):
            out = graphs(module, exact, (x,), {})
        out.backward(dout)
        torch.testing.assert_close(module.weight.grad, dout.T @ x)
    assert graphs.replays == 2


# --- several processes, and a GPU -------------------------------------------------------------------------------------


def _process(rank: int, folder: str, option: str, library: str = "gloo", count: int = 2) -> None:
    torch.set_num_threads(1)
    if DEVICE == "cpu":
        graphed_call.CudaGraphs = RecordedGraphs
    dist.init_process_group(library, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=count)
    with use_backend("reference"):
        for loss in LOSSES.values():
            _train(rank, loss, option)
    dist.destroy_process_group()


def _train(rank: int, loss: Callable[..., Tensor], option: str) -> None:
    twins = Calls(loss)
    ddp = nn.parallel.DistributedDataParallel(twins.model, **{option: True})
    for i in range(6):
        count = dist.get_world_size()
        parts, accumulates = [batch(2 * i + r) for r in range(count)], i == 3 and option != "static_graph"
        with ddp.no_sync() if accumulates else torch.enable_grad():
            loss(ddp, *parts[rank]).backward()
        for part in parts:
            (loss(twins.plain, *part) / count).backward()
        if not accumulates:
            twins.check_gradients()
            for m in twins.both:
                m.zero_grad()
    assert twins.stats.replays == 4, twins.stats.eager


DDP_OPTIONS = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")


@pytest.mark.parametrize("option", tiers(DDP_OPTIONS, DDP_OPTIONS[0]))
def test_ddp(option: str, tmp_path: Path) -> None:
    """The hooks of DistributedDataParallel see the gradients, in two processes."""
    method = "fork" if DEVICE == "cpu" else "spawn"  # a fork has imported everything
    mp.start_processes(_process, (str(tmp_path), option), nprocs=2, start_method=method)


@needs_gpu
def test_nccl(tmp_path: Path) -> None:
    """Its watchdog looks at events while a graph is captured."""
    mp.spawn(_process, (str(tmp_path), "find_unused_parameters", "nccl", 1), nprocs=1)


LARGE = dict(n_layers=2, d_word_vec=256, d_model=256, d_inner=1024, n_head=4, d_k=64, d_v=64, n_position=80)
SHAPES = ((64, 60, 56), (72, 50, 64), (64, 60, 56), (56, 64, 64))


@needs_gpu
@pytest.mark.parametrize("loss", LOSSES)
def test_kernels_and_memory(loss: str) -> None:
    """The default backends in mixed precision, shapes in turn. In between graphs of decoding are made and destroyed.
    All shapes share a pool of about one step's memory, which is freed with the model."""
    with use_backend(None):
        twins, peak = Calls(LOSSES[loss], **LARGE), 0
        for seed in range(24):
            for m in twins.both:
                m.zero_grad()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                with torch.autocast("cuda", torch.bfloat16):
                    value = twins.loss(m, *batch(seed, *SHAPES[seed % 4]))
                value.backward()
            peak = max(peak, torch.cuda.max_memory_allocated() - before)  # of the model without graphs
            for (name, p), q in zip(twins.model.named_parameters(), twins.plain.parameters(), strict=True):
                assert (p.grad - q.grad).norm() <= 0.05 * q.grad.norm(), name
            if seed % 5 == 4:
                generate.greedy(twins.model.eval(), batch(seed)[0], max_len=8, bos_idx=3, eos_idx=4)
                twins.model.train()
                generate.drop_graphs()
                torch.cuda.empty_cache()
        found = twins.stats
        assert found.captures == 3 and found.replays == 18 and 0 < found.pool_bytes < 2 * peak
        torch.cuda.empty_cache()
        reserved, pool_bytes = torch.cuda.memory_reserved(), found.pool_bytes
        del twins, m, p, q, value
        gc.collect()
        torch.cuda.empty_cache()
        assert reserved - torch.cuda.memory_reserved() >= pool_bytes
