"""GraphedStep: the padded step against the plain one, and graphs against both (recorded graphs on a CPU)."""

import gc
from contextlib import contextmanager

import pytest
import torch
from helpers import skip_without_triton
from recorded_graph import recorded_step
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastattn import FusedTransformer, GraphedStep, use_backend
from fastattn.graphs import capture

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
PAD_SRC, PAD_TRG, VOCAB = 1, 2, 40


def small(dropout=0.0, **changes):
    torch.manual_seed(3)
    options = dict(d_word_vec=16, d_model=16, d_inner=32, n_layers=1, n_head=1, d_k=16, d_v=16, n_position=16)
    options |= dict(dropout=dropout, attn_dropout=dropout) | changes
    return FusedTransformer(VOCAB, VOCAB, PAD_SRC, PAD_TRG, **options).to(DEVICE)


def adam(model, lr=2**-6, **changes):
    return torch.optim.Adam(model.parameters(), **dict(lr=lr, fused=True, capturable=CUDA) | changes)


def a_batch(rows, src_length, trg_length, seed=0):
    """src_seq, trg_seq and gold: sentences of different lengths, the first without padding."""
    generator = torch.Generator().manual_seed(seed)
    src, trg = (torch.randint(3, VOCAB, (rows, n), generator=generator) for n in (src_length, trg_length + 1))
    trg, gold = trg[:, :-1].clone(), trg[:, 1:].clone()
    for row in range(1, rows):
        src[row, max(src_length - row, 1) :] = PAD_SRC
        trg[row, max(trg_length - row, 1) :], gold[row, max(trg_length - row, 1) :] = PAD_TRG, PAD_TRG
    return src.to(DEVICE), trg.to(DEVICE), gold.to(DEVICE)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def distance(a, b):
    return max((a[name] - b[name]).abs().max().item() for name in a)


def plain_update(model, optimizer, batches, max_grad_norm=None, **options):
    """What a user writes without GraphedStep, for one or more batches that make one update."""
    tokens = sum((gold != PAD_TRG).sum() for *_, gold in batches)
    optimizer.zero_grad()
    total = 0.0
    for batch in batches:
        loss = model.loss(*batch, reduction="sum", **options) / tokens
        loss.backward()
        total += loss.detach()
    norm = max_grad_norm and nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    return total, norm


def sgd_pair(**changes):
    """Two equal models, each with an optimizer of two groups whose update is the gradient."""
    model, twin = small(**changes), small(**changes)
    return model, twin, *(torch.optim.SGD(halves(m), lr=1.0) for m in (model, twin))


def halves(model):
    """Groups of parameters, as with and without weight decay."""
    parameters = list(model.parameters())
    return [{"params": parameters[::2]}, {"params": parameters[1::2]}]


# --- the padded step, without graphs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 5, 7), (4, 8, 2), (1, 9, 12), (4, 1, 1)], ids=str)
def test_padded_step_is_the_plain_step(shape):
    model, twin, optimizer, twin_optimizer = sgd_pair()
    options = dict(label_smoothing=0.1, smooth_over="others")
    step = GraphedStep(model, optimizer, buckets=(8, 16), batch_size=4, max_grad_norm=0.3, capture=False, **options)
    batch = a_batch(*shape)
    loss = step(*batch)
    expected, norm = plain_update(twin, twin_optimizer, [batch], max_grad_norm=0.3, **options)
    assert loss.dtype == torch.float32 and loss.shape == () and not loss.requires_grad
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(step.grad_norm, norm, rtol=1e-5, atol=0)
    assert norm > 0.3 and distance(weights(model), weights(twin)) < 1e-6
    assert all(p.grad is None for p in model.parameters())


def test_a_smaller_batch_after_a_larger_one():
    """Nothing of the larger batch is left, and its returned loss stays. Any integer dtype and device are accepted."""
    model, twin, optimizer, twin_optimizer = sgd_pair()
    step = GraphedStep(model, optimizer, buckets=(8,), batch_size=4, capture=False)
    losses, expected = [], []
    for batch in (a_batch(4, 8, 8, seed=1), a_batch(2, 3, 4, seed=2)):
        src, trg, gold = (t.int().cpu() for t in batch)
        losses.append(step(src, trg, gold.flatten()))
        expected.append(plain_update(twin, twin_optimizer, [batch])[0])
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)


def test_accumulated_batches_are_one_batch():
    """Of different lengths and numbers of tokens; clipped by the gradient of all, updated once in three calls."""
    model, twin, optimizer, twin_optimizer = sgd_pair()
    step = GraphedStep(model, optimizer, buckets=(4, 8), batch_size=4, accumulate=3, max_grad_norm=0.3, capture=False)
    for first in (0, 3):
        batches = [a_batch(2 + i % 3, 3 + i, 8 - i, seed=first + i) for i in range(3)]
        before = weights(model)
        for i, batch in enumerate(batches):
            assert distance(before, weights(model)) == 0
            with torch.no_grad():
                alone = model.loss(*batch)
            torch.testing.assert_close(step(*batch), alone, rtol=1e-5, atol=0, msg=f"call {i}")
        _, norm = plain_update(twin, twin_optimizer, batches, max_grad_norm=0.3)
        torch.testing.assert_close(step.grad_norm, norm, rtol=1e-5, atol=0)
        assert 1e-3 < distance(before, weights(model)) and distance(weights(model), weights(twin)) < 1e-6


def test_a_batch_of_padding_alone_does_not_move_an_accumulated_update():
    model, _, optimizer, _ = sgd_pair()
    step = GraphedStep(model, optimizer, buckets=(4,), batch_size=2, accumulate=2, capture=False)
    before, empty = weights(model), torch.full((2, 3), PAD_TRG, device=DEVICE)
    for _ in range(2):
        step(torch.full_like(empty, PAD_SRC), empty, empty)
    assert distance(before, weights(model)) == 0


def test_autocast_is_that_of_the_plain_step():
    model, twin, optimizer, twin_optimizer = sgd_pair()
    batch = a_batch(4, 8, 8)
    step = GraphedStep(model, optimizer, buckets=(8,), batch_size=4, autocast=torch.bfloat16, capture=False)
    loss = step(*batch)
    with torch.autocast(DEVICE, torch.bfloat16):
        expected = twin.loss(*batch)
    expected.backward()
    twin_optimizer.step()
    assert torch.equal(loss, expected.detach()) and distance(weights(model), weights(twin)) < 1e-6


def test_every_way_of_setting_a_learning_rate():
    """As a number, by a scheduler, as a tensor; the optimizer's groups keep the value that was set."""
    model, twin, optimizer, twin_optimizer = sgd_pair()
    step = GraphedStep(model, optimizer, buckets=(8,), batch_size=2, capture=False)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda i: 2.0**-i) for o in (optimizer, twin_optimizer)]
    for number in range(6):
        batch = a_batch(2, 8, 8, seed=number)
        if number == 4:
            optimizer.param_groups[0]["lr"] = twin_optimizer.param_groups[0]["lr"] = 0.75
        if number == 5:
            optimizer.param_groups[0]["lr"] = torch.tensor(0.125)
            twin_optimizer.param_groups[0]["lr"] = 0.125
        step(*batch)
        plain_update(twin, twin_optimizer, [batch])
        if number < 3:
            for scheduler in schedulers:
                scheduler.step()
            assert optimizer.param_groups[0]["lr"] == 2.0 ** -(number + 1)
        assert distance(weights(model), weights(twin)) < 2e-6


def test_rows_of_a_bucket():
    step = GraphedStep(model := small(), adam(model), buckets=(16, 4), batch_tokens=70, capture=False)
    assert (step.buckets, step.rows(1), step.rows(4), step.rows(5), step.rows(16)) == ((4, 16), 17, 17, 4, 4)
    with pytest.raises(ValueError, match="17 tokens is longer than the last of buckets"):
        step.rows(17)
    with pytest.raises(ValueError, match="5 sentences; of 9 tokens, in the bucket of 16, 4 are taken"):
        step(*a_batch(5, 9, 3))
    assert GraphedStep(model, adam(model), buckets=(16,), batch_tokens=3, capture=False).rows(2) == 1


# --- what is refused --------------------------------------------------------------------------------------------------


def test_models_that_cannot_be_captured():
    hooked, with_tensor_hook = small(), small()
    hooked.encoder.register_forward_hook(print)
    with_tensor_hook.trg_word_prj.weight.register_hook(print)
    for model, error, message in (
        (torch.compile(small()), TypeError, "got OptimizedModule; what wraps one"),
        (hooked, ValueError, "model has a hook at encoder"),
        (with_tensor_hook, ValueError, "parameter .* has a hook"),
    ):
        with pytest.raises(error, match=message):
            GraphedStep(model, adam(model), batch_size=2, buckets=(8,), capture=False)


@pytest.mark.parametrize("n_position, buckets", [(200, (16, 32, 64, 128)), (100, (16, 32, 64, 100)), (9, (9,))])
def test_buckets_unless_given(n_position, buckets):
    model = small(n_position=n_position)
    assert GraphedStep(model, adam(model), batch_size=2, capture=False).buckets == buckets


def test_optimizers_that_cannot_be_captured():
    model = small()
    with pytest.raises(ValueError, match="optimizer has a hook"):
        optimizer = adam(model)
        optimizer.register_step_post_hook(lambda *_: None)
        GraphedStep(model, optimizer, batch_size=2)


def test_capture_needs_a_gpu_and_a_capturable_optimizer():
    model = small()
    if CUDA:
        with pytest.raises(ValueError, match="Adam keeps its step count in Python.*capturable=True"):
            GraphedStep(model, adam(model, capturable=False), batch_size=2, buckets=(8,))
        model = model.cpu()
    with pytest.raises(ValueError, match="model is on cpu, and CUDA graphs need a GPU; capture=False"):
        GraphedStep(model, torch.optim.Adam(model.parameters()), batch_size=2, buckets=(8,))


def test_batches_that_do_not_fit():
    step = GraphedStep(model := small(), adam(model), buckets=(8,), batch_size=2, capture=False)
    src, trg, gold = a_batch(2, 8, 6)
    for batch, error, message in (
        ((src.float(), trg, gold), TypeError, "src_seq has dtype torch.float32, expected integers"),
        ((src.tolist(), trg, gold), TypeError, "src_seq must be a Tensor, got list"),
        ((src[:1], trg, gold), ValueError, "src_seq holds 1 sequences and trg_seq 2"),
        ((src, trg, gold[:, 1:]), ValueError, r"gold has shape \(2, 5\), expected \(2, 6\)"),
    ):
        with pytest.raises(error, match=message):
            step(*batch)


def test_changes_that_a_graph_would_ignore_are_refused_until_reset():
    step = GraphedStep(model := small(), optimizer := adam(model), buckets=(8,), batch_size=2, capture=False)
    batch = a_batch(2, 8, 6)
    step(*batch)

    def refused(message):
        with pytest.raises(ValueError, match=message):
            step(*batch)
        step.reset()
        step(*batch)

    optimizer.param_groups[0]["betas"] = (0.8, 0.99)
    refused(r"param_groups\[0\]\['betas'\] changed since graphs were captured")
    optimizer.load_state_dict(optimizer.state_dict())
    refused("the optimizer's state, as by load_state_dict, changed")
    moved = model.encoder.layer_norm.weight, model.decoder.layer_norm.weight, model.encoder.position_enc.pos_table
    moved[1].requires_grad_(False)
    refused("which parameters require grad changed")
    for t in moved:
        t.data = t.data.clone()
        refused("an address of a parameter or buffer changed")
    with torch.autocast(DEVICE, torch.bfloat16), pytest.raises(ValueError, match="use autocast= instead"):
        step(*batch)


# --- graphs: CUDA's, or recorded on a CPU -----------------------------------------------------------------------------


@pytest.fixture
def graphed(monkeypatch):
    """GraphedStep by graphs; without a GPU they are recorded and run interpreted kernels."""
    skip_without_triton()
    make = GraphedStep if CUDA else recorded_step(monkeypatch)
    with use_backend("triton"):
        yield lambda *given, **options: make(*given, **dict(buckets=(2, 4), batch_size=2) | options)


def replays(step):
    """For each graph of the step whether it was captured."""
    return [work.replay is not None for work in step._captured_work.values()]


@pytest.mark.bug_class("T16")
@pytest.mark.parametrize("buckets", [(4,), pytest.param((2, 4), marks=pytest.mark.full)], ids=str)
def test_replay_is_the_eager_step_bit_for_bit(buckets, graphed):
    """Buckets in turn, batches of all shapes, another rate at every step: weights and losses as without graphs. Another
    model's graphs run in between."""
    model, twin, other = small(), small(), small(d_inner=48)
    options = dict(label_smoothing=0.1, max_grad_norm=0.5)
    step = graphed(model, optimizer := adam(model), buckets=buckets, **options)
    eager = GraphedStep(twin, twin_optimizer := adam(twin), buckets=buckets, batch_size=2, capture=False, **options)
    between = [graphed(other, adam(other), buckets=buckets)] if len(buckets) > 1 else []
    kept = None
    if capture.stream_override():  # else test_a_result_that_stays_alive_is_named
        with use_backend("aten"):  # holds AccumulateGrad nodes of the stream it ran on
            kept = model.loss(*a_batch(1, 2, 2))
    shapes = [(2, 4, 4), (1, 3, 4), (2, 4, 3), (1, 4, 1)]
    if len(buckets) > 1:
        shapes = [shapes[0], (2, 2, 1), shapes[1], (1, 2, 2), shapes[2], (2, 2, 2), shapes[3], (1, 1, 2)]
    for number, shape in enumerate(shapes):
        optimizer.param_groups[0]["lr"] = twin_optimizer.param_groups[0]["lr"] = 2.0 ** -(5 + number % 3)
        batch = a_batch(*shape, seed=number)
        assert torch.equal(step(*batch), eager(*batch)), f"loss of step {number}"
        assert all(disturb(*batch).isfinite() for disturb in between)
        assert torch.equal(step.grad_norm, eager.grad_norm), f"norm of step {number}"
        assert distance(weights(model), weights(twin)) == 0, f"weights after step {number}"
    assert replays(step) == [True] * len(buckets) and (kept is None or kept.requires_grad)


def test_a_result_that_stays_alive_is_named(monkeypatch, graphed):
    """Before torch 2.13 the third step refuses it before it captures; once it is gone, the same step is captured."""
    monkeypatch.delattr(torch.autograd.graph, "set_override_stale_capture_stream", raising=False)
    step, batch = graphed(model := small(), adam(model), buckets=(2,), batch_size=1), a_batch(1, 2, 2)
    with use_backend("aten"):
        logits = model(*batch[:2])
        model.loss(*batch).backward()  # its graph is gone
    model.zero_grad()
    for _ in range(capture.WARM_UP):
        step(*batch)
    count = len([p for p in model.parameters() if p.requires_grad])
    with pytest.raises(RuntimeError, match=f"It holds encoder.* and {count - 1} more. Delete it or detach"):
        step(*batch)
    assert replays(step) == [False]
    logits = logits.detach()
    step(*batch)
    assert replays(step) == [True]


@pytest.mark.bug_class("T15", "T16")
def test_every_replay_draws_new_dropout_and_a_seed_repeats_it(graphed):
    """In evaluation mode, where another graph is used, there is none."""
    model = small(dropout=0.3)
    step, batch = graphed(model, adam(model, lr=0.0), buckets=(2,), batch_size=1), a_batch(1, 2, 2)
    for _ in range(capture.WARM_UP):
        step(*batch)
    losses = [step(*batch).item() for _ in range(2)]
    assert losses[0] != losses[1]
    repeated = []
    for _ in range(2):
        torch.manual_seed(8)
        repeated.append(step(*batch).item())
    assert repeated[0] == repeated[1] and replays(step) == [True]
    model.eval()
    assert step(*batch) == step(*batch)


@pytest.mark.full
def test_accumulation_over_graphs_of_two_buckets(graphed):
    """Against PyTorch's operators, by an optimizer whose update is smooth where gradients are small."""
    model, twin = small(), small()
    optimizer, twin_optimizer = (adam(m, lr=1.0, eps=1.0) for m in (model, twin))
    step = graphed(model, optimizer, accumulate=2)
    for number in range(capture.WARM_UP + 2):
        before, batches = weights(twin), [a_batch(2, n, 3, seed=number + n) for n in (2, 4)]
        with use_backend("aten"):
            plain_update(twin, twin_optimizer, batches)
        for batch in batches:
            step(*batch)
            model.zero_grad(set_to_none=True)  # what a user may do between steps touches nothing
        assert distance(before, weights(twin)) > 1e-2 and distance(weights(model), weights(twin)) < 1e-5
    assert all(replays(step)) and len(replays(step)) >= 2


@pytest.mark.bug_class("T16")
@pytest.mark.full
def test_a_step_that_waits_for_the_device_is_refused(graphed):
    class Waiting(FusedTransformer):
        def loss(self, src_seq, trg_seq, *options, **more):
            if src_seq.sum().item() < 0:
                raise AssertionError("token ids are not negative")
            return super().loss(src_seq, trg_seq, *options, **more)

    model = small()
    model.__class__ = Waiting
    step, batch = graphed(model, adam(model)), a_batch(2, 2, 2)
    for _ in range(capture.WARM_UP):
        step(*batch)
    with pytest.raises(RuntimeError, match="(?s)could not be captured.*waits for the device.*capture=False"):
        step(*batch)


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
    """No garbage is collected, which might be a graph; and autograd follows the capture where PyTorch has a setting.
    Afterwards both are as they were, after a failure too."""
    _Cuda(monkeypatch)
    setting = getattr(torch._C, "_override_stale_capture_stream", None)
    graphs_ = capture.CudaGraphs(torch.device("cuda", 1))
    seen = []

    def work():
        seen.append((gc.isenabled(), setting is None or setting()))
        if len(seen) == 2:
            raise KeyboardInterrupt

    graphs_.captured(work)
    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        graphs_.captured(work)
    assert seen == [(False, True)] * 2 and gc.isenabled() and not (setting is not None and setting())
    gc.disable()
    try:
        graphs_.captured(lambda: None)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_learning_rate_of_the_host_is_copied_without_a_wait():
    step = GraphedStep(model := small(), optimizer := adam(model), buckets=(2,), batch_size=1, capture=False)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.125)

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.copy_.default:
                assert args[2:] == (True,)
            return function(*args, **kwargs or {})

    with Copies():
        step._learning_rates.copy_to_device()
    assert step._learning_rates.on_device[0].item() == 0.125
