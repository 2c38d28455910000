"""What the benchmarks measure: the work of a case, counted in another way, and rivals that solve the same problem."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attention_rivals
import bench_accelerate
import bench_attention
import bench_attention_masks
import bench_epoch
import bench_host_time
import bench_transformer
import cases
import gpu_clock
import harness
import models
import pytest
import report_markdown
import tables
import timing
import torch
import torch.nn.functional as F
from cases import AttentionCase
from helpers import skip_without_triton
from recorded_graph import recorded_calls  # noqa: F401
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fastattn import use_backend

CPU = torch.device("cpu")
GENERATING = tables._GENERATING[1:]  # without Marian
MASKS = ("full", "causal", "padding", "blocks", "alibi", "bias")


def count_flops(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def quick_check(benchmark: harness.Benchmark) -> harness.Checked:
    """The first quick case of this benchmark."""
    case = next(case for given, case in tables.plan("quick") if given is benchmark)
    return harness.Checked(benchmark, case, CPU)


def test_lengths_are_like_multi30ks() -> None:
    """Multi30k's English words: the median is 11, 5 % are below 7, 1 % above 23; in batches padded to 23."""
    lengths = torch.cat([cases.draw_lengths(100, 23, cases.MULTI30K, seed) for seed in range(200)]).double()
    assert lengths.median().item() == pytest.approx(11, abs=1)
    assert lengths.quantile(0.05).item() == pytest.approx(7, abs=1.5)
    assert lengths.log().std().item() == pytest.approx(cases.MULTI30K, rel=0.05) and lengths.max() == 23


def test_work_of_attention() -> None:
    for mask in MASKS:
        case = AttentionCase(3, 2, 150, 200, 8, mask)
        dense = case.dense()
        pairs = 3 * 150 * 200 if dense is None else dense.expand(3, 1, 150, 200).sum().item()
        assert case.pairs == pairs and case.work["forward"]["flop"] == 4 * 2 * pairs * 8, mask
    full, biased = (AttentionCase(2, 3, 4, 4, 8, mask).work for mask in ("full", "bias"))
    assert full["backward"]["byte"] == 8 * (2 * 3 * 4 * 8) * 4  # q, k, v, out, dout; dq, dk, dv
    assert biased["both"]["byte"] - full["both"]["byte"] == 3 * (3 * 4 * 4) * 4  # bias twice read, dbias


def test_work_of_a_model() -> None:
    """torch counts the matrix products of plain PyTorch, none padded, and the masked half of causal scores too. One
    teacher-forced pass computes each token once, as incremental decoding does."""
    case = cases.StepCase(3, 20, 2, 32, 64, 4, 50, dropout_p=0.0, spread=0.0)
    plain = next(provider for provider in bench_transformer.providers(CPU) if provider.name == "plain PyTorch")
    run = plain.make(case, bench_transformer.make_inputs(case, CPU), 0.0)
    causal_half = 12 * 32 * 2 * 3 * (20 * 20 - 20 * 21 / 2)
    assert count_flops(run.timed["step"]) == case.work["step"]["flop"] + causal_half

    case = cases.DecodingCase(3, 12, 2, 32, 64, 4, 50, new_tokens=12, spread=0.0)
    model = models.plain(case, 0.0, 20).eval()
    src_seq = models.make_inputs(case, CPU, 20).fixed["src_seq"]
    causal_half = 4 * 32 * 2 * 3 * (12 * 12 - 12 * 13 / 2)
    with torch.no_grad():
        assert count_flops(lambda: model(src_seq, src_seq)) == case.work["decode"]["flop"] + causal_half


def test_a_cases_name_gives_its_share_of_padding() -> None:
    case = cases.StepCase(8, 64, 1, 32, 64, 2, 50)
    fixed = models.make_inputs(case, CPU, 64).fixed
    share = (torch.cat([fixed["src_seq"], fixed["trg_seq"][:, 1:]]) == models.PAD).double().mean().item()
    assert share > 0.25 and f" {share:.0%} padding," in str(case)


def test_plans_name_every_measurement_once() -> None:
    for table, device in (("quick", "cpu"), ("cpu", "cpu"), ("cuda", "cuda")):
        plan = tables.plan(table)
        of_cpus = {"attention_masks", "accelerate_inference", "accelerate_training"}
        left_out = of_cpus if device == "cuda" else set()
        assert {benchmark.name for benchmark, _ in plan} == {b.name for b in tables.BENCHMARKS} - left_out
        providers = [(b.name, str(case), p.name) for b, case in plan for p in b.providers(torch.device(device))]
        assert len(set(providers)) == len(providers), table
        for _, case in plan:
            assert all(work["flop"] > 0 and work["byte"] > 0 for work in case.work.values())


def test_memory_is_that_of_the_tensors_alive_at_once() -> None:
    x = torch.ones(2**18)  # 1 MiB

    def call() -> Tensor:
        for _ in range(3):
            y = (x + 1) * 2  # two at a time, and the first is released
        return y

    assert 2 <= timing.peak_mib(call, CPU) <= 3.1


def test_a_gpus_time_and_its_hosts_are_two_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short op, whose host needs longer, by the GPU's time; the same as a user waits for it; a long one; one that
    waits for its result, whose wait counts as the host's too."""
    clock = gpu_clock.GpuClock(monkeypatch)

    def found(call: Any, hide_host: bool) -> tuple[float, float]:
        timed = timing.measure(call, gpu_clock.DEVICE, 0.01, hide_host)
        return timed.median_ms * 1e3, timed.host_us

    assert found(lambda: clock.run(100e-6, 5e-6), True) == pytest.approx((5, 100))
    assert found(lambda: clock.run(100e-6, 5e-6), False) == pytest.approx((105, 100))
    assert found(lambda: clock.run(20e-6, 300e-6), True) == pytest.approx((300, 20))
    waiting = lambda: (clock.run(20e-6, 300e-6), clock.wait(), clock.run(20e-6, 10e-6))  # noqa: E731
    assert found(waiting, True) == pytest.approx((330, 340))


def test_a_model_on_a_gpu_is_timed_as_its_user_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step, records and tables also have the GPU's time alone and the host's; of an op, also the host's. Of a step
    that waits for the GPU they have no time of the GPU. The first call is a figure too."""
    clock = gpu_clock.GpuClock(monkeypatch)
    monkeypatch.setattr(timing, "peak_mib", lambda *_: 0.0)
    step = lambda: clock.run(2e-3, 1e-3)  # noqa: E731
    waiting = lambda: (step(), clock.wait())  # noqa: E731
    case, of_step = SimpleNamespace(dropout_p=0.0), "step 3 (host 2, GPU 1) ms"
    for call, direction, text in (
        (step, "step", of_step),
        (step, "both", "both 1 (host 2) ms"),
        (waiting, "step", "step 3 (host 3) ms"),
    ):
        run = harness.Run(dict, {direction: call}, {"default": True})
        provider = harness.Provider("x", lambda *_, run=run: run, compared=False)
        benchmark = SimpleNamespace(directions=(direction,), hide_host=direction == "both", measure=None)
        checked = SimpleNamespace(benchmark=benchmark, case=case, inputs=None, device=gpu_clock.DEVICE)
        row = harness.measure_provider(checked, provider, 0.01)
        assert report_markdown.brief(row) == text
        assert row.get("first_s") == (None if direction == "both" else pytest.approx(3e-3))
    assert clock.mode == "default"


def test_a_record_says_how_fast_its_host_and_its_gpu_were(monkeypatch: pytest.MonkeyPatch) -> None:
    found, real_run = timing.conditions(CPU), subprocess.run
    assert set(found) == {"loop_us", "add_us"} and found["loop_us"] > found["add_us"] > 0
    pool = {"total_size": 3 * 2**20, "segment_pool_id": (0, 5)}
    clock = gpu_clock.GpuClock(monkeypatch)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [pool, pool | {"segment_pool_id": (0, 0)}])
    assert timing.pool_mib(gpu_clock.DEVICE) == 3 and timing.pool_mib(CPU) == 0
    for name, host_us, device_us in (("ones", 0, 0), ("randn", 0, 0), ("add", 7, 1), ("mm", 20, 1500)):
        run = lambda *_, h=host_us, d=device_us, **__: clock.run(h * 1e-6, d * 1e-6)  # noqa: E731
        monkeypatch.setattr(torch, name, run)
    said = SimpleNamespace(stdout="1980, 1980, 3201, 690.5, 700.0, 55\n")

    def run_smi(command: list[str], **_: Any) -> Any:
        assert command[:2] == ["nvidia-smi", "--id=GPU-12-34"] and clock.free - clock.now > 1  # s, it is at work
        return said

    monkeypatch.setattr(subprocess, "run", run_smi)
    found = timing.conditions(gpu_clock.DEVICE)
    assert found["add_us"] == pytest.approx(7, rel=0.01) and found["clocks.sm"] == "1980"
    assert found["power.draw"] == "690.5" and found["launch_us"] == pytest.approx(1, rel=0.01)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(subprocess, "run", real_run)
    assert set(timing.conditions(gpu_clock.DEVICE)) == {"loop_us", "add_us", "launch_us"}  # without nvidia-smi


@pytest.mark.full
def test_pytest_benchmark(tmp_path: Path) -> None:
    """The command of the README times a right result, and records its work and error. A wrong one fails."""
    pytest.importorskip("pytest_benchmark")
    import test_quick_cases

    record = tmp_path / "record.json"
    command = [sys.executable, "-m", "pytest", "benchmarks", "--benchmark-only", "--benchmark-max-time=0.01"]
    command += ["-k", "feed_forward and swiglu and aten", f"--benchmark-json={record}"]
    no_worker = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, env=no_worker)
    found = json.loads(record.read_text())["benchmarks"]
    forward = 6 * 40 * 48 * 96
    assert [entry["extra_info"]["flop"] for entry in found] == [forward, 2 * forward, 3 * forward]
    assert all(0 <= entry["extra_info"]["error_over_bound"] <= 1 and entry["stats"]["min"] > 0 for entry in found)

    index = next(i for i, (given, _) in enumerate(test_quick_cases.PLAN) if given.name == "feed_forward")
    right = quick_check(test_quick_cases.PLAN[index][0]).providers[0]
    wrong = right._replace(make=lambda case, inputs, p: right.make(case, inputs.changed(lambda t: 1.1 * t), p))
    with pytest.raises(pytest.fail.Exception, match="wrong result: error is"):
        test_quick_cases.test_quick(None, index, wrong, "forward")


@pytest.mark.full
def test_a_step_needs_at_most_half_of_the_reference_paths_memory() -> None:
    """The base model at 2048 tokens, sequences of 512, dropout 0.1, no padding. To be quick it has 8000 words, which
    favours the reference path, as the fused loss keeps no logits. It is measured with one layer and with two: each
    further layer needs the same again, so these figures give those of all six."""

    def peak(provider: Any, n_layers: int) -> float:
        case = cases.MemoryCase(4, 512, n_layers, 512, 2048, 8, 8000)
        run = provider.make(case, bench_transformer.MEMORY.inputs(case, CPU), case.dropout_p)
        return timing.peak_mib(run.timed["step"], CPU)

    reference, default, *_ = bench_transformer.memory_providers(CPU)
    (one, two), (fused_one, fused_two) = ([peak(given, n) for n in (1, 2)] for given in (reference, default))
    whole, fused_whole = one + 5 * (two - one), fused_one + 5 * (fused_two - fused_one)
    assert fused_whole <= whole / 2, f"{fused_whole:.0f} MiB, by the reference path {whole:.0f}"


def test_a_step_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rivals are the same model. A gradient that is 10 % wrong fails."""
    providers = {provider.name: provider for provider in bench_transformer.providers(CPU)}
    checked = quick_check(bench_transformer.BENCHMARK)
    for name in ("default", *bench_transformer.RIVALS):
        assert checked.error_over_bound(providers[name]) <= 1, name
    in_graphs = [name for name in providers if "graph" in name.lower()]
    assert len(in_graphs) == 5, in_graphs
    for name in in_graphs:
        with pytest.raises(harness.Refused, match="CUDA graphs need a GPU"):
            checked.error_over_bound(providers[name])
    fused_loss = models.fused_loss
    monkeypatch.setattr(models, "fused_loss", lambda *given: 1.1 * (loss := fused_loss(*given)) - 0.1 * loss.detach())
    assert harness.measure_provider(checked, bench_transformer.provider("x"), 0.01)["status"] == "wrong result"


def test_users_calls_of_every_family_are_measured() -> None:
    """Of those that docs/accelerate.md names, all in float32."""
    found: dict[str, set[str]] = {}
    for benchmark, case in tables.plan("cpu"):
        if benchmark in (bench_accelerate.INFERENCE, bench_accelerate.TRAINING) and case.dtype == torch.float32:
            found.setdefault(str(case).partition(":")[0], set()).add(case.model)
    families = {*bench_accelerate.TRANSFORMERS, "nn.Transformer"}
    generating = families - {"BERT", "RoBERTa", "ViT", "nn.Transformer"}
    assert found["forward"] == found["default dropout"] == families
    assert found["greedy"] == found["4 beams"] == generating and found["greedy, static cache"] <= generating
    assert found["no dropout"] == families - {"Whisper", "Llama", "ViT"}, "these have none by default"


@pytest.mark.parametrize("model", ["Marian", *(pytest.param(name, marks=pytest.mark.full) for name in GENERATING)])
def test_generated_tokens_depend_on_source_and_past(model: str) -> None:
    """A wrong cache would be seen: sentences differ, do not repeat one token, do not end, and follow their source."""
    pytest.importorskip("transformers")
    case = cases.CallCase(3, 12, 2, 64, 128, 4, 200, model=model, call=cases.GREEDY)
    inputs = bench_accelerate.make_inputs(case, CPU)
    untouched, default = bench_accelerate.untouched_and_default(CPU)
    tokens = untouched.make(case, inputs, 0.0).results()["tokens"][:, -cases.NEW_TOKENS :]
    assert tokens.shape == (3, cases.NEW_TOKENS) and not (tokens == bench_accelerate.SPECIAL["eos_token_id"]).any()
    assert len({tuple(sentence) for sentence in tokens.tolist()}) == 3
    assert all(len(set(sentence)) > 4 for sentence in tokens.tolist())
    source = inputs.fixed["src_seq"]
    inputs.fixed["src_seq"] = -source if source.is_floating_point() else source.roll(1, 0)
    others = default.make(case, inputs, 0.0).results()["tokens"][:, -cases.NEW_TOKENS :]
    assert not (others == tokens).all(1).any()


@pytest.mark.full
def test_an_accelerated_models_calls_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider with other tokens, other logits or other gradients is not timed; the others are."""
    pytest.importorskip("transformers")
    accelerate = bench_accelerate.fastattn.accelerate

    def broken(model: torch.nn.Module) -> Any:
        report = accelerate(model)
        with torch.no_grad():
            model.model.get_output_embeddings().weight.mul_(torch.tensor([[1.0], [-1.0]]).repeat(25, 1))
        return report

    for benchmark, name in ((bench_accelerate.INFERENCE, "call"), (bench_accelerate.TRAINING, "step")):
        for case in (case for given, case in tables.plan("quick") if given is benchmark):
            for planted in (False, True):
                if planted:
                    monkeypatch.setattr(bench_accelerate.fastattn, "accelerate", broken)
                checked = harness.Checked(benchmark, case, CPU)
                rows = {p.name: harness.measure_provider(checked, p, 0.001) for p in checked.providers}
                monkeypatch.undo()
                untouched = rows.pop("as it is")
                assert untouched["timings"][name]["min_ms"] > 0, case
                for row in rows.values():
                    assert row["status"] == ("wrong result" if planted else "ok"), (case, row)
                    assert planted or row["timings"][name]["samples"] == untouched["timings"][name]["samples"]


def test_an_epoch_is_like_multi30ks() -> None:
    """docs/training.md: 29,000 pairs in batches of 8192 tokens are 64 steps with 10 % padding; with --graph 75."""
    case = next(case for _, case in tables.plan("cuda") if isinstance(case, cases.EpochCase))
    first, second, in_steps = (bench_epoch.batches(case, epoch, step) for epoch, step in ((0, 1), (1, 1), (0, 8)))
    shapes = {(src.shape, trg.shape) for src, trg in first}
    assert len(first) == pytest.approx(64, abs=2) and len(in_steps) == pytest.approx(75, abs=2) and len(shapes) > 25
    tokens = [t for src, trg in first for t in (src, trg[:, 1:])]
    real = [(t != models.PAD).sum().item() for t in tokens]
    assert 1 - sum(real) / sum(t.numel() for t in tokens) == pytest.approx(0.10, abs=0.02)
    assert sum(real[1::2]) == case.work["epoch"]["token"] and max(t.numel() for t in tokens) <= case.tokens
    assert not shapes >= {(src.shape, trg.shape) for src, trg in second}
    assert all(case.tokens // (-(-max(s.shape[1], t.shape[1] - 1) // 8) * 8) >= len(s) for s, t in in_steps)


@pytest.mark.full
@pytest.mark.usefixtures("recorded_calls")
def test_graphs_are_checked_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What replays graphs is compared and timed, also with changing shapes; what replays none is refused."""
    monkeypatch.setattr(bench_transformer, "needs_gpu", lambda device: None)
    given = bench_transformer.provider("x", models.padded, "reference", compute_loss=models.fused_loss, graphs=True)
    checked = quick_check(bench_transformer.BENCHMARK)
    row = harness.measure_provider(checked, given, 0.0)
    assert row["status"] == "ok" and row["captures"] == 1 and row["replays"] > 8, row
    epochs = quick_check(bench_epoch.BENCHMARK)
    row = harness.measure_provider(epochs, bench_epoch.over_epochs(given, CPU), 0.0)
    steps = sum(len(bench_epoch.batches(epochs.case, number, 1)) for number in range(bench_epoch.EPOCHS))
    assert row["status"] == "ok" and row["captures"] > 1 and row["replays"] + row["eager"] == steps, row
    assert row["first_s"] > 0 and row["timings"]["epoch"]["samples"] == bench_epoch.EPOCHS - 1
    accelerated = quick_check(bench_accelerate.BENCHMARK)
    given_model = next(p for p in accelerated.providers if p.name == "default, graphs")
    monkeypatch.setattr(bench_accelerate, "needs_gpu", lambda device: None)
    monkeypatch.setenv("FASTATTN_BACKEND", "reference")  # aten reads values on a CPU, which no graph can
    row = harness.measure_provider(accelerated, given_model, 0.0)
    assert row["status"] == "ok" and row["captures"] == 2 and row["replays"] > 8, row
    monkeypatch.setenv("FASTATTN_GRAPHS", "0")
    row = harness.measure_provider(checked, given, 0.0)
    assert row["status"] == "refused" and "no graph was replayed: FASTATTN_GRAPHS" in row["reason"], row


def test_make_graphed_callables_is_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs for each shape, with the model's parameters, and no cache of autocast."""
    monkeypatch.setattr(bench_transformer, "needs_gpu", lambda device: None)
    made = []

    def graphed(unit: torch.nn.Module, tokens: tuple[Tensor, ...]) -> Any:
        assert not torch.is_autocast_cache_enabled()
        made.append(tuple(t.shape for t in tokens))
        return unit.forward

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", graphed)
    for case in (case for given, case in tables.plan("quick") if given is bench_transformer.BENCHMARK):
        checked = harness.Checked(bench_transformer.BENCHMARK, case, CPU)
        rival = next(p for p in checked.providers if p.name.startswith("make_graphed_callables"))
        assert not rival.ours and harness.measure_provider(checked, rival, 0.0)["status"] == "ok"
    assert len(made) == 4  # of two cases, one to check and one to time


@pytest.mark.full
@pytest.mark.usefixtures("recorded_calls")
def test_a_step_in_graphs_is_checked(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_triton()
    case = replace(quick_check(bench_transformer.BENCHMARK).case, batch=1)
    checked = harness.Checked(bench_transformer.BENCHMARK, case, device)
    graphed = next(p for p in checked.providers if p.name == "default, GraphedStep")
    monkeypatch.setattr(bench_transformer, "needs_gpu", lambda device: None)
    with use_backend("triton"):
        assert checked.error_over_bound(graphed) <= 1


def test_host_time_is_a_share_of_the_public_models() -> None:
    checked, threads = quick_check(bench_host_time.BENCHMARK), torch.get_num_threads()
    aten = next(provider for provider in checked.providers if provider.name == "aten")
    row = harness.measure_provider(checked, aten, 0.0)
    forward, backward, both = (row["timings"][direction] for direction in bench_host_time.BENCHMARK.directions)
    assert forward["min_ms"] + backward["min_ms"] <= both["min_ms"] and both["samples"] == bench_host_time.LEAST
    assert row["of_plain"]["both"] > 0.1 and row["launches"] is None
    assert torch.get_num_threads() == threads


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, causal: bool = False) -> Tensor:
    """q (B, Lq, H, D), k and v (B, Lk, Hk, D)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, None, dropout_p, causal, enable_gqa=True).transpose(1, 2)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *lengths: int, **options: Any
) -> tuple[Tensor, None]:
    """q (all queries, H, D), k and v (all keys, Hk, D); offsets int32. Returns (out, lse), as some versions do."""
    longest = [options.pop(name) for name in ("max_seqlen_q", "max_seqlen_k") if name in options] or list(lengths)
    assert longest == [cu_seqlens_q.diff().max(), cu_seqlens_k.diff().max()]
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    spans = zip(cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[:-1], cu_seqlens_k[1:], strict=True)
    outs = [flash_attn_func(q[None, a:b], k[None, c:d], v[None, c:d], **options)[0] for a, b, c, d in spans]
    return torch.cat(outs), None


@pytest.mark.full
@pytest.mark.parametrize("mask", MASKS)
def test_attentions_rivals_have_the_same_problem(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the part that is compared, with grouped heads. FlexAttention is not compiled and has no backward on a CPU;
    what needs a GPU is replaced by a function with the same signature."""
    case = AttentionCase(2, 4, 128, 128, 16, mask, n_head_kv=None if mask == "bias" else 2)
    checked = harness.Checked(bench_attention.BENCHMARK, case, CPU)
    for provider in (checked.providers[0], attention_rivals.torch_sdpa(None, None)):
        assert checked.error_over_bound(provider) <= 1
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    inputs = checked.inputs._replace(leaves={name: leaf.detach() for name, leaf in checked.inputs.leaves.items()})
    expected = checked.providers[0].make(case, inputs, 0.0).timed["forward"]()
    for count_mask in (False, True):
        provider = attention_rivals.flex(count_mask)
        if count_mask and mask in ("full", "bias"):
            with pytest.raises(harness.Refused, match="no mask to build"):
                provider.make(case, inputs, 0.0)
        else:
            torch.testing.assert_close(provider.make(case, inputs, 0.0).timed["forward"](), expected)

    flash = SimpleNamespace(flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", flash)
    varlen = SimpleNamespace(varlen_attn=lambda *given: flash_attn_varlen_func(*given)[0])
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", varlen)
    runs = {"full": (True, False), "causal": (True, False), "padding": (True, True)}.get(mask, (False, False))
    if mask != "alibi":  # FlashAttention computes it inside
        for provider, can_run in zip(
            (attention_rivals.flash_attention(2), attention_rivals.torch_varlen()), runs, strict=True
        ):
            if can_run:
                assert checked.error_over_bound(provider) <= 1, provider.name
            else:
                with pytest.raises(harness.Refused):
                    checked.error_over_bound(provider)


@pytest.mark.parametrize("mask", cases.MASKS)
def test_torchs_operator_has_the_same_masks(mask: str) -> None:
    """Results and gradients of all three providers are right. Inference keeps no graph."""
    case = cases.MaskCase(mask, 32, tokens=96)
    checked = harness.Checked(bench_attention_masks.BENCHMARK, case, CPU)
    for provider in checked.providers:
        assert checked.error_over_bound(provider) <= 1, provider.name
    _, ours, theirs = (p.make(case, checked.inputs, 0.0).timed for p in checked.providers)
    torch.testing.assert_close(ours["inference"](), theirs["inference"]())
    assert not ours["inference"]().requires_grad and ours["training"]()[0].requires_grad


def test_a_pinned_kernel_that_did_not_run_is_refused() -> None:
    checked, backends = quick_check(bench_attention.BENCHMARK), torch.nn.attention.SDPBackend
    with pytest.raises(harness.Refused, match="pinned, but math ran"):
        checked.error_over_bound(attention_rivals.torch_sdpa("flash (CPU)", backends.MATH))
    with pytest.raises(harness.Refused, match="no such kernel"):
        checked.error_over_bound(attention_rivals.torch_sdpa("cudnn", backends.CUDNN_ATTENTION))


@pytest.mark.full
def test_torch_compile_is_checked_and_timed() -> None:
    checked = quick_check(bench_attention.BENCHMARK)
    compiled = next(provider for provider in checked.providers if provider.later)
    row = harness.measure_provider(checked, compiled, 0.01)
    assert row["status"] == "ok", row
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
