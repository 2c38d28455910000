"""What the benchmarks measure: the work of a case, counted in another way, and rivals that solve the same problem."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import bench_attention
import bench_transformer
import cases
import gpu_clock
import harness
import models
import pytest
import tables
import timing
import torch
from cases import AccelerateCase, AttentionCase, DecodingCase, ModelCase
from harness import Checked, Provider, measure_provider
from tables import BENCHMARKS
from torch.utils.flop_counter import FlopCounterMode

import fastattn

CPU = torch.device("cpu")


def count_flops(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def quick_checks(name: str) -> list[Checked]:
    return [Checked(benchmark, case, CPU) for benchmark, case in tables.plan("quick") if benchmark.name == name]


def provider_of(checked: Checked, name: str) -> Provider:
    return next(provider for provider in checked.providers if provider.name == name)


@pytest.mark.parametrize("mask", cases.MASKS)
def test_work_of_attention(mask: str) -> None:
    """The visible pairs are those of the mask that the call gets."""
    case = AttentionCase(1 if "packed" in mask else 3, 2, 160, 160, 8, mask)
    given = case.restrictions | ({"is_causal": True} if mask == "causal" else {})
    visible = fastattn.AttentionMask(**given).dense(case.batch, 1, 160, 160, CPU)
    assert case.work["forward"]["flop"] == 4 * 2 * visible.sum() * 8
    elements = case.batch * 2 * 160 * 8
    more = {"bias": 8 * 160 * 160, "blocks": case.batch * 160 * 160, "bias by distance": 8 * 319, "sinks": 8}
    assert case.work["forward"]["byte"] == 4 * elements * 4 + more.get(mask, 0)  # q, k, v, out; and a mask or a bias


def test_work_of_a_model() -> None:
    """torch counts the matrix products of plain PyTorch, and the masked half of causal scores too. A batch is its
    sentences one by one, so padding is no work. One teacher-forced pass computes each token once, as incremental
    decoding does."""
    case = ModelCase(3, 20, 2, 32, 64, 4, 50, dropout_p=0.0)
    model, inputs, counted = models.plain(case, 0.0, 20), models.make_inputs(case, CPU, 20), 0.0
    assert 0.1 < case.padding < 0.5
    for src, trg in zip(inputs.fixed["src_seq"], inputs.fixed["trg_seq"], strict=True):
        src, trg = (sequence[sequence != models.PAD][None] for sequence in (src, trg))
        n = trg.shape[1] - 1
        counted += count_flops(lambda s=src, t=trg: models.plain_loss(model, s, t[:, :-1], t[:, 1:]).backward())
        counted -= 12 * 32 * 2 * (n * n - n * (n + 1) / 2)
    assert case.work["step"]["flop"] == counted

    decoding = DecodingCase(3, 12, 2, 32, 64, 4, 50, new_tokens=12, spread=0.0)
    src_seq = models.make_inputs(decoding, CPU, 20).fixed["src_seq"]
    causal_half = 4 * 32 * 2 * 3 * (12 * 12 - 12 * 13 / 2)
    with torch.no_grad():
        assert count_flops(lambda: model(src_seq, src_seq)) == decoding.work["decode"]["flop"] + causal_half


def test_plans_name_every_measurement_once() -> None:
    for table, device in (("quick", "cpu"), ("cpu", "cpu"), ("cuda", "cuda")):
        plan = tables.plan(table)
        providers = [(b.name, str(case), p.name) for b, case in plan for p in b.providers(torch.device(device))]
        assert len(set(providers)) == len(providers), table
    ops = {"attention", "add_layer_norm", "feed_forward", "linear_cross_entropy", "decode_attention"}
    overview = {benchmark.name for benchmark, _ in tables.plan("cpu")[: tables.OVERVIEW]}
    assert overview == ops | {"transformer", "accelerate_training", "decoding"}


def test_memory_is_that_of_the_tensors_alive_at_once() -> None:
    x = torch.ones(2**18)  # 1 MiB
    assert 2 <= timing.peak_mib(lambda: [((x + 1) * 2).sum() for _ in range(3)], CPU) <= 3.1  # two at a time


def test_samples_alternate_and_their_middle_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of four calls take 1 s, one takes 9 s. No call is sampled twice before the others."""
    now, order = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def call(name: str) -> None:
        order.append(name)
        now[0] += 9.0 if order.count(name) % 4 == 0 else 1.0

    a, b = timing.measure_in_turn([lambda: call("a"), lambda: call("b")], CPU, 80.0)
    assert a.median_ms == b.median_ms == a.min_ms == 1e3 and a.samples > 7
    assert all({*order[i : i + 2]} == {"a", "b"} for i in range(0, len(order), 2))


def test_a_gpus_time_and_its_hosts_are_two_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short op, whose host needs longer, by the GPU's time; the same as a user waits for it; one that waits for its
    result, whose wait counts as the host's too."""
    clock = gpu_clock.GpuClock(monkeypatch)
    short = lambda: clock.run(100e-6, 5e-6)  # noqa: E731
    waiting = lambda: (clock.run(20e-6, 300e-6), clock.wait(), clock.run(20e-6, 10e-6))  # noqa: E731
    for call, hide_host, expected in ((short, True, (5, 100)), (short, False, (105, 100)), (waiting, True, (330, 340))):
        timed = timing.measure(call, gpu_clock.DEVICE, 0.01, hide_host)
        assert (timed.median_ms * 1e3, timed.host_us) == pytest.approx(expected)


@pytest.mark.full
def test_a_step_needs_at_most_half_of_the_reference_paths_memory() -> None:
    """The base model at 2048 tokens, sequences of 512, dropout 0.1, no padding. Each further layer needs what the
    second one does, so one and two layers give the figures of all six."""

    def peak(provider: Provider, n_layers: int) -> float:
        case = ModelCase(4, 512, n_layers, 512, 2048, 8, 8000, spread=0.0)
        run = provider.make(case, BENCHMARKS["transformer"].inputs(case, CPU), case.dropout_p)
        run.timed["step"]()  # allocates the optimizer's state
        return timing.peak_mib(run.timed["step"], CPU)

    reference, fused = (5 * peak(p, 2) - 4 * peak(p, 1) for p in BENCHMARKS["transformer"].providers(CPU)[:2])
    assert fused <= reference / 2, f"{fused:.0f} MiB, by the reference path {reference:.0f}"


def test_a_step_is_checked_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rivals are the same model. A gradient that is 10 % wrong is not timed."""
    checked = quick_checks("transformer")[0]
    for name in ("plain PyTorch", "plain PyTorch with SDPA"):
        row = measure_provider(checked, provider_of(checked, name), 0.0)
        assert row["status"] == "ok" and 0 < row["error_over_bound"] <= 1, row
    for name in ("default, graphs", "default, GraphedStep"):
        assert measure_provider(checked, provider_of(checked, name), 0.0)["reason"] == "CUDA graphs need a GPU"
    default, timed = provider_of(checked, "default"), checked.default().timed["step"]
    twice = {"step": lambda: (timed(), timed())}  # without the note it is timed in turn with the default
    slow = default._replace(make=lambda *given: default.make(*given)._replace(timed=twice, notes={}))
    assert measure_provider(checked, slow, 0.2)["speed"]["step"] > 1.3
    fused_loss = models.fused_loss
    monkeypatch.setattr(models, "fused_loss", lambda *given: 1.1 * (loss := fused_loss(*given)) - 0.1 * loss.detach())
    row = measure_provider(checked, bench_transformer.provider("x"), 0.01)
    assert row["status"] == "wrong result" and "timings" not in row


@pytest.mark.parametrize("model", ["Marian", "nn.Transformer"])
def test_a_compiled_model_is_what_a_step_calls(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile of the object that a step calls. Where nothing is compiled the row is refused."""
    counters = torch._dynamo.utils.counters

    def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: counters["frames"].update(ok=1) or function(*args, **kwargs)

    checked = Checked(BENCHMARKS["accelerate_training"], AccelerateCase(2, 6, 1, 32, 64, 2, 50, model=model), CPU)
    for compile_, status in ((compiled, "ok"), (lambda function, **options: function, "refused")):
        monkeypatch.setattr(torch, "compile", compile_)
        for name in ("default, compiled", "torch.compile of it"):
            row = measure_provider(checked, provider_of(checked, name), 0.0)
            assert row["status"] == status, row


@pytest.mark.parametrize("mask", cases.MASKS)
def test_attentions_rivals_have_the_same_problem(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the part that is compared, with grouped heads. FlexAttention is not compiled and has no backward on a CPU.
    What a rival has no argument for it refuses."""
    heads = {"n_head_kv": None if mask in cases.LEARNED else 2}
    case = AttentionCase(1 if "packed" in mask else 2, 4, 128, 128, 16, mask, **heads)
    checked = Checked(BENCHMARKS["attention"], case, CPU)
    assert checked.error_over_bound(checked.providers[0]) <= 1
    with pytest.raises(harness.Refused) if mask == "softcap" else nullcontext():
        assert checked.error_over_bound(bench_attention.torch_sdpa(None, None)) <= 1
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    inputs = checked.inputs._replace(leaves={name: leaf.detach() for name, leaf in checked.inputs.leaves.items()})
    expected = checked.providers[0].make(case, inputs, 0.0).timed["forward"]()
    has_mask = mask not in ("full", "softcap", *cases.LEARNED)
    for count_mask in (False, True):
        provider = bench_attention.flex(count_mask)
        with nullcontext() if has_mask or not count_mask else pytest.raises(harness.Refused):
            torch.testing.assert_close(provider.make(case, inputs, 0.0).timed["forward"](), expected)


def test_a_pinned_kernel_that_did_not_run_is_refused() -> None:
    checked, backends = quick_checks("attention")[0], torch.nn.attention.SDPBackend
    with pytest.raises(harness.Refused, match="pinned, but math ran"):
        checked.error_over_bound(bench_attention.torch_sdpa("flash (CPU)", backends.MATH))
    with pytest.raises(harness.Refused, match="no such kernel"):
        checked.error_over_bound(bench_attention.torch_sdpa("cudnn", backends.CUDNN_ATTENTION))
