"""GraphedStep against the same step in a plain loop (recorded graphs on a CPU), and the calls of torch.cuda."""

import copy
import gc
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from families import FAMILIES
from helpers import skip_without_triton
from model_checks import DEVICE, NO_DROPOUT, PAD_SRC, PAD_TRG, TINY, fused
from recorded_graph import RecordedPairs, recorded_calls  # noqa: F401
from test_graphed_call import batch
from test_packing import no_value_is_read  # noqa: F401
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastattn import GraphedStep, accelerate, use_backend
from fastattn.graphs import capture, graphed_call, stats
from fastattn.graphs.graphed_call import EAGER, graphs_of

UNTIL_REPLAY = EAGER + capture.WARM_UP + 2  # steps of a shape until all three graphs have been replayed


def adam(model, **changes):
    """Its update is smooth where gradients are small. Two groups, as with and without weight decay."""
    groups = [{"params": list(model.parameters())[i::2]} for i in range(2)]
    return torch.optim.Adam(groups, **dict(lr=1.0, eps=1.0, fused=True, capturable=True) | changes)


def small(**changes):
    torch.manual_seed(3)
    return fused(**TINY | NO_DROPOUT | changes)


def sentences(seed, rows=3):
    """Of one bucket for each number of rows."""
    return dict(zip(("src_seq", "trg_seq", "gold"), batch(seed, rows, 5 + seed % 4, 8 - seed % 3), strict=True))


def nothing():
    """A batch of padding alone."""
    empty = torch.full((3, 5), PAD_TRG, device=DEVICE)
    return {"src_seq": torch.full_like(empty, PAD_SRC), "trg_seq": empty, "gold": empty}


def labelled(model, seed, rows=3):
    """Of a model of transformers."""
    inputs, _ = FAMILIES["marian"].inputs(model)
    ids, mask = (inputs[name].roll(seed, 0)[:rows] for name in ("input_ids", "attention_mask"))
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(ids == 1, -100)}


class Twins:
    """A model with GraphedStep, and the same model in a plain loop.     of_step: what its steps are called with."""

    def __init__(self, model, of_step=None, **options):
        self.model, self.plain, self.of_step = model, copy.deepcopy(model), of_step or {}
        self.is_fused = hasattr(model, "trg_pad_idx")
        if not self.is_fused:
            options["loss"] = accelerate(model).loss
        self.optimizers = [adam(m, lr=1.0 if self.is_fused else 2**-3) for m in (self.model, self.plain)]
        self.step = GraphedStep(self.model, self.optimizers[0], **options)
        next(model.parameters()).grad = torch.ones_like(next(model.parameters()))  # what is left does not count

    def update(self, *batches, tolerance=1e-5):
        """By both, from one or more batches."""
        tokens = [(b["gold"] != PAD_TRG if self.is_fused else b["labels"] != -100).sum() for b in batches]
        for given, count in zip(batches, tokens, strict=True):
            loss = self.step(**given, **self.of_step)
            with capture.without_autocast_cache():
                expected = self.plain.loss(**given, **self.of_step) if self.is_fused else self.plain(**given).loss
            assert loss.dtype == torch.float32 and loss.shape == () and not loss.requires_grad
            if count:
                torch.testing.assert_close(loss, expected.detach(), rtol=tolerance, atol=1e-6)
                (expected * count / sum(tokens)).backward()
            else:
                assert loss == 0
        if self.step.max_grad_norm:
            norm = nn.utils.clip_grad_norm_(self.plain.parameters(), self.step.max_grad_norm)
            assert norm > self.step.max_grad_norm
            torch.testing.assert_close(self.step.grad_norm, norm, rtol=1e-3, atol=0)
        before = weights(self.plain)
        self.optimizers[1].step()
        self.plain.zero_grad()
        assert distance(before, weights(self.plain)) > 1e-4
        assert distance(weights(self.model), weights(self.plain)) < tolerance
        assert all(p.grad is None for p in self.model.parameters())

    def replays_all(self):
        return stats(self.model).replays > 1 and all(w.replay for w in self.step._updates.values())


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def distance(a, b):
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


@pytest.fixture
def reference(recorded_calls):  # noqa: F811
    with use_backend("reference"):
        yield


CASES = {
    "clipped": dict(max_grad_norm=0.05, of_step=dict(label_smoothing=0.1, smooth_over="others")),
    "accumulated": dict(max_grad_norm=0.05, accumulate=3),
    "bfloat16": dict(),
    "packed": dict(max_grad_norm=0.05, accumulate=2),
    "marian": dict(max_grad_norm=0.05),
    "t5": dict(max_grad_norm=0.05, accumulate=2),
}


@pytest.mark.parametrize("case", CASES)
def test_updates_are_those_of_a_plain_loop(case, reference, request):
    """Shapes change. A rate is set as a number or as a tensor, or by a scheduler, and the groups keep what was set.
    torch.autocast is open over several steps, and no step uses casts of older weights."""
    if case == "packed":
        request.getfixturevalue("no_value_is_read")
    model = FAMILIES[case].build().train() if case in FAMILIES else small(pack_padding=case == "packed")
    twins = Twins(model, **CASES[case])
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda i: 2.0 ** -(i % 3)) for o in twins.optimizers]
    make, count = sentences if twins.is_fused else partial(labelled, model), twins.step.accumulate
    with torch.autocast(DEVICE, torch.bfloat16, enabled=case == "bfloat16"):
        for number in range(UNTIL_REPLAY + 3):
            if number % 4 == 3:
                for optimizer, kind in zip(twins.optimizers, (torch.tensor, float), strict=True):
                    optimizer.param_groups[0]["lr"] = kind(0.3)
            elif number % 4 == 2:
                for optimizer in twins.optimizers:
                    optimizer.param_groups[1]["lr"] = 0.6
            groups = twins.optimizers[0].param_groups
            kept = [group["lr"] for group in groups]
            given = [make(number + i, 3 - number % 2) for i in range(count)]
            if case == "accumulated" and number % 3 == 0:
                given[1] = nothing()
            twins.update(*given, tolerance=3e-3 if case == "bfloat16" else 1e-4)
            assert all(a is b for a, b in zip(kept, (g["lr"] for g in groups), strict=True))
            for scheduler in schedulers:
                scheduler.step()
    assert twins.replays_all()
    if case == "accumulated":
        for _ in range(count):
            twins.step(**nothing())
        assert all(p.isfinite().all() for p in model.parameters())


def change_betas(model, optimizer):
    optimizer.param_groups[0]["betas"] = (0.5, 0.6)


def load_state(model, optimizer):
    state = copy.deepcopy(optimizer.state_dict())
    for moments in state["state"].values():
        moments["exp_avg"].mul_(-1)
    optimizer.load_state_dict(state)


def forget_state(model, optimizer):
    optimizer.state.clear()


def move_weight(model, optimizer):
    w = model.decoder.layer_norm.weight
    w.data = w.data.clone()


def freeze(model, optimizer):
    model.decoder.layer_norm.weight.requires_grad_(False)


def unfreeze(model, optimizer):
    model.decoder.layer_norm.weight.requires_grad_(True)


def evaluate(model, optimizer):
    model.eval()


def move_to_a_new_group(model, optimizer):
    moved = optimizer.param_groups[0]["params"].pop()
    optimizer.add_param_group({"params": [moved], "lr": 0.1})


CHANGES = (change_betas, load_state, forget_state, move_weight, freeze, unfreeze, evaluate, move_to_a_new_group)


@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.full)])
def test_what_changes_is_captured_again(accumulate, reference):
    twins = Twins(small(), accumulate=accumulate)
    for change in (None, *CHANGES):
        if change:
            for model, optimizer in zip((twins.model, twins.plain), twins.optimizers, strict=True):
                change(model, optimizer)
        for seed in range(UNTIL_REPLAY):
            twins.update(*[sentences(seed + i) for i in range(accumulate)])
        assert twins.replays_all(), change


def test_a_later_batch(reference):
    """A smaller one leaves nothing of a larger one, and the loss of that stays. Its tokens may have another integer
    dtype, be on the CPU, and its gold flat. What makes no batch raises, before a capture and after it."""
    twins, losses = Twins(small()), []
    for number in range(UNTIL_REPLAY):
        src, trg, gold = batch(number, 3, 8 - number, 8 - number)
        losses.append(
            (twins.step(src.int().cpu(), trg.int().cpu(), gold.int().cpu().flatten()), twins.plain.loss(src, trg, gold))
        )
        losses[-1][1].backward()
        twins.optimizers[1].step()
        twins.plain.zero_grad()
        mistakes = (
            ((src[:1], trg, gold), ValueError, "src_seq holds 1 sequences and trg_seq 3"),
            ((src, trg, gold[:, 1:]), ValueError, "gold has shape"),
            ((src.tolist(), trg, gold), TypeError, "src_seq must be a Tensor, got list"),
            ((src.float(), trg, gold), TypeError, "src_seq has dtype torch.float32"),
        )
        for wrong, error, message in mistakes if number in (0, UNTIL_REPLAY - 1) else ():
            with pytest.raises(error, match=message):
                twins.step(*wrong)
    assert twins.replays_all()
    for loss, expected in losses:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)


def loss_of_parts(model, src_seq, trg_seq, gold, with_scale):
    """Of a module that contains a FusedTransformer and a scale."""
    loss = model[0].loss(src_seq, trg_seq, gold)
    return model[1](loss[None]).sum() if with_scale else loss


def test_graphs_within_a_larger_module(reference, monkeypatch):
    """Captures of the whole have no graphs of the parts within them. A call that trains more has an update of these."""
    monkeypatch.setattr(RecordedPairs, "warm_up", lambda self, work: work())  # without its mode, under which none are
    model = nn.ModuleList([small(graphs=True), nn.Linear(1, 1, device=DEVICE)])
    plain = copy.deepcopy(model)
    plain[0].graphs = None
    optimizers = [adam(m) for m in (model, plain)]
    step = GraphedStep(model, optimizers[0], loss=loss_of_parts)
    for number in range(4 * UNTIL_REPLAY):
        given = *batch(number), (0, 1, 2, 0)[number // UNTIL_REPLAY]
        expected = loss_of_parts(plain, *given)
        torch.testing.assert_close(step(*given), expected.detach(), rtol=1e-5, atol=0)
        expected.backward()
        optimizers[1].step()
        plain.zero_grad()
        assert distance(weights(model), weights(plain)) < 1e-5
    graphs = graphs_of(model)
    assert graphs.captures == 3 and not stats(graphs.twin(model).module).captures


def test_what_cannot_be_captured(reference):
    """A model runs eagerly, with a warning. An optimizer is refused."""
    twins = Twins(small())
    for model in (twins.model, twins.plain):
        model.encoder.register_forward_hook(lambda module, args, out: (out[0] * 2, *out[1:]))
    with pytest.warns(RuntimeWarning, match="without CUDA graphs: .*hook"):
        for seed in range(UNTIL_REPLAY):
            twins.update(sentences(seed))
    assert not stats(twins.model).captures
    with pytest.raises(ValueError, match="Adam keeps its step count in Python.*capturable=True"):
        GraphedStep(twins.model, adam(twins.model, capturable=False))
    with torch.autocast(DEVICE, torch.float16), pytest.raises(ValueError, match="float16 needs a GradScaler"):
        twins.step(**sentences(0))
    (hooked := adam(twins.model)).register_step_post_hook(lambda *_: None)
    with pytest.raises(ValueError, match="optimizer has a hook"):
        GraphedStep(twins.model, hooked)


def test_an_optimizer_that_waits_for_the_device(reference):
    class Waiting(torch.optim.Adam):
        def step(self):
            assert self.param_groups[0]["params"][0].grad.norm().item() >= 0
            super().step()

    model = small()
    step = GraphedStep(model, Waiting(model.parameters(), fused=True, capturable=True))
    for seed in range(UNTIL_REPLAY - 2):
        step(**sentences(seed))
    with pytest.raises(RuntimeError, match="(?s)could not be captured.*waits for the device.*FASTATTN_GRAPHS=0"):
        step(**sentences(0))


@pytest.mark.bug_class("T15", "T16")
def test_replay_is_the_eager_step_bit_for_bit(monkeypatch, recorded_calls):  # noqa: F811
    """With Triton's kernels, where nothing is padded. Every step draws new dropout, from the same generator."""
    skip_without_triton()
    model, twin = (small(n_position=2, dropout=0.3, attn_dropout=0.3) for _ in range(2))
    step, eager = (GraphedStep(m, adam(m), max_grad_norm=0.05) for m in (model, twin))
    monkeypatch.setattr(graphed_call, "EAGER", 0)
    given = batch(0, 1, 2, 2)
    with use_backend("triton"):
        for number in range(2):
            torch.manual_seed(number)
            found = step(*given), torch.rand((), device=DEVICE)
            torch.manual_seed(number)
            with monkeypatch.context() as patch:
                patch.setenv("FASTATTN_GRAPHS", "0")
                expected = eager(*given), torch.rand((), device=DEVICE)
            assert all(map(torch.equal, found, expected)), f"step {number}"
            assert torch.equal(step.grad_norm, eager.grad_norm), f"norm of step {number}"
            assert distance(weights(model), weights(twin)) == 0, f"weights after step {number}"
    assert stats(model).captures == 1 and stats(model).replays == 2


def test_a_learning_rate_of_the_host_is_copied_without_a_wait():
    step = GraphedStep(model := small(), optimizer := adam(model, capturable=DEVICE == "cuda"))
    optimizer.param_groups[0]["lr"] = torch.tensor(0.125)

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.copy_.default:
                assert args[2:] == (True,)
            return function(*args, **kwargs or {})

    with Copies():
        step._copy_rates()
    assert step._rates[0].item() == 0.125


class _Cuda:
    """torch.cuda of two devices, of which the first is the current one: which stream each has, and what was called.

    pools: into which the allocator records.     random_is_captured: whether an eager dropout would raise.
    workspaces: of cuBLAS on the stream of captures, of the default pool and of the graphs' pools.
    """

    def __init__(self, monkeypatch):
        self.pools, self.random_is_captured, self.workspaces = [], False, set()
        self.log, self.now, self.streams, self.made = [], 0, {}, []
        cuda = self

        class Stream:
            def __init__(self, device):
                self.device = torch.device(device)
                cuda.made.append(self)

            def wait_stream(self, other):
                cuda.log.append("wait")
                cuda.workspaces.add("default")

        class Capture:
            """As torch.cuda.graph: after a failure its end fails too, before the stream is restored."""

            def __init__(self, graph, stream, capture_error_mode, pool=None):
                assert capture_error_mode == "thread_local" and not any(pool is failed.pool for failed in cuda.failed)
                self.pool, self.context = pool, cuda.stream(stream)

            def __enter__(self):
                assert cuda.now == 1, "PyTorch synchronises the current device"
                cuda.log += ["begin"] if self.pool else []
                cuda.pools.append(self.pool)
                cuda.random_is_captured = True
                assert "default" not in cuda.workspaces
                cuda.workspaces.add("graphs")
                self.context.__enter__()

            def __exit__(self, kind, *_):
                cuda.log += ["end"] if self.pool else []
                if kind is not None:
                    cuda.failed.append(self)
                    raise RuntimeError("the capture is not valid")
                cuda.pools.remove(self.pool)
                cuda.random_is_captured = False
                self.context.__exit__(kind, *_)

        class Graph:
            def reset(self):
                pass

            def replay(self):
                cuda.log.append("replay")

        self.failed, self.first = [], [Stream(f"cuda:{i}") for i in range(2)]
        self.streams = dict(enumerate(self.first))
        fakes = dict(Stream=Stream, graph=Capture, CUDAGraph=Graph, graph_pool_handle=object)
        fakes |= dict(current_stream=lambda device: self.streams[torch.device(device).index])
        fakes |= dict(set_stream=self.set_stream, stream=self.stream, device=self.device)
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(capture, "_streams", {})
        monkeypatch.setattr(torch, "zeros", lambda *size, device: None)
        calls = dict(_cuda_clearCublasWorkspaces=self.workspaces.clear, _cuda_releasePool=lambda *pool: None)
        calls |= dict(_cuda_endAllocateToPool=lambda device, pool: self.pools.remove(pool))
        for name, fake in calls.items():
            monkeypatch.setattr(torch._C, name, fake, raising=False)

    def set_stream(self, stream):
        self.now = stream.device.index
        self.streams[self.now] = stream

    @contextmanager
    def device(self, device):
        before, self.now = self.now, torch.device(device).index
        try:
            yield
        finally:
            self.now = before

    @contextmanager
    def stream(self, stream):
        before, there = self.streams[self.now], self.streams[stream.device.index]
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(there)
            self.set_stream(before)

    def is_as_before(self):
        streams_are = self.now == 0 and list(self.streams.values()) == self.first
        return streams_are and not self.pools and not self.random_is_captured and "graphs" not in self.workspaces


@pytest.mark.bug_class("T6")
def test_the_calls_of_torch_cuda(monkeypatch):
    """What a CPU can check with fakes: warm-up, capture and replay on a device that is not the current one. The
    user's device and streams stay as they were."""
    cuda, device = _Cuda(monkeypatch), torch.device("cuda", 1)
    work = capture.CapturedWork(lambda: cuda.log.append("work"), capture.CudaGraphs(device), "it", "")
    for _ in range(4):
        work()
        assert cuda.is_as_before()
    assert cuda.log == ["wait", "work", "wait"] * 2 + ["begin", "work", "end", "replay", "replay"]


def test_after_a_capture_that_failed(monkeypatch):
    """Another capture warms up again and uses neither stream nor pool of the one that failed."""
    cuda, fails = _Cuda(monkeypatch), [True]

    def work():
        if fails and cuda.log[-1] == "begin":
            fails.pop()
            raise RuntimeError("not permitted")

    captured = capture.CapturedWork(work, capture.CudaGraphs(torch.device("cuda", 1)), "it", "a hint")
    captured(), captured()
    with pytest.raises(RuntimeError, match="(?s)it could not be captured.*a hint"):
        captured()
    assert cuda.is_as_before() and cuda.failed
    captured(), captured(), captured()
    assert cuda.log[-3:] == ["begin", "end", "replay"] and cuda.is_as_before()
    assert len(cuda.made) == len(cuda.first) + 3  # one was to end the failed capture


def test_one_stream_for_all_graphs_of_a_device(monkeypatch):
    """And one pool for the graphs of one CudaGraphs, while one of them is alive: later the allocator refuses it."""
    cuda, device = _Cuda(monkeypatch), torch.device("cuda", 1)
    first, second = capture.CudaGraphs(device), capture.CudaGraphs(device)
    replays, pools = [], []
    for graphs_ in (first, first, second):
        graphs_.warm_up(lambda: None)
        replays.append(graphs_.captured(lambda: None))
        pools.append(graphs_.pool)
    assert len(cuda.made) == len(cuda.first) + 1 and pools[0] is pools[1] is not pools[2]
    replays.clear()
    first.captured(lambda: None)
    assert first.pool is not pools[0]


def test_during_a_capture(monkeypatch):
    """No garbage is collected, which might be a graph. Afterwards it is as before, after a failure too."""
    _Cuda(monkeypatch)
    graphs_ = capture.CudaGraphs(torch.device("cuda", 1))
    seen = []

    def work():
        seen.append(gc.isenabled())
        if len(seen) == 2:
            raise KeyboardInterrupt

    graphs_.captured(work)
    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        graphs_.captured(work)
    assert seen == [False] * 2 and gc.isenabled()
    gc.disable()
    try:
        graphs_.captured(lambda: None)
        assert not gc.isenabled()
    finally:
        gc.enable()
