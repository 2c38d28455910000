"""What the benchmarks measure: the work of a case, counted another way, and rivals that solve the same problem."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_clock
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
CPU = torch.device("cpu")
MASKS = ("full", "causal", "padding", "blocks", "alibi", "bias")


def counted(call: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def test_lengths_are_like_multi30ks(load: Any) -> None:
    """Multi30k's English words: the median is 11, 5 % are below 7, 1 % above 23; in batches padded to 23."""
    cases = load("cases")
    lengths = torch.cat([cases.draw_lengths(100, 23, cases.MULTI30K, seed) for seed in range(200)]).double()
    assert lengths.median().item() == pytest.approx(11, abs=1)
    assert lengths.quantile(0.05).item() == pytest.approx(7, abs=1.5)
    assert lengths.log().std().item() == pytest.approx(cases.MULTI30K, rel=0.05) and lengths.max() == 23


def test_pairs_flops_and_bytes_of_attention(load: Any) -> None:
    cases = load("cases")
    for mask in MASKS:
        case = cases.AttentionCase(3, 2, 150, 200, 8, mask)
        dense = case.dense()
        pairs = 3 * 150 * 200 if dense is None else dense.expand(3, 1, 150, 200).sum().item()
        assert case.pairs == pairs and case.work["forward"]["flop"] == 4 * 2 * pairs * 8, mask
    full, biased = (cases.AttentionCase(2, 3, 4, 4, 8, mask).work for mask in ("full", "bias"))
    assert full["backward"]["byte"] == 8 * (2 * 3 * 4 * 8) * 4  # q, k, v, out, dout; dq, dk, dv
    assert biased["both"]["byte"] - full["both"]["byte"] == 3 * (3 * 4 * 4) * 4  # bias twice read, dbias


def test_a_models_flops_are_those_of_its_products(load: Any) -> None:
    """torch counts the products of plain PyTorch, none padded, and the masked causal half. One teacher-forced pass
    meets each token once, as incremental decoding would."""
    module, cases, models = load("bench_transformer"), load("cases"), load("models")
    case = cases.StepCase(3, 20, 2, 32, 64, 4, 50, dropout_p=0.0, spread=0.0)
    plain = next(provider for provider in module.providers(CPU) if provider.name == "plain PyTorch")
    run = plain.make(case, module.make_inputs(case, CPU), 0.0)
    causal_half = 12 * 32 * 2 * 3 * (20 * 20 - 20 * 21 / 2)
    assert counted(run.timed["step"]) == case.work["step"]["flop"] + causal_half

    case = cases.DecodingCase(3, 12, 2, 32, 64, 4, 50, new_tokens=12, spread=0.0)
    model = models.plain(case, 0.0, 20).eval()
    src_seq = models.make_inputs(case, CPU, 20).fixed["src_seq"]
    causal_half = 4 * 32 * 2 * 3 * (12 * 12 - 12 * 13 / 2)
    with torch.no_grad():
        assert counted(lambda: model(src_seq, src_seq)) == case.work["decode"]["flop"] + causal_half


def test_a_case_says_what_share_of_it_is_padding(load: Any) -> None:
    cases, models = load("cases"), load("models")
    case = cases.StepCase(8, 64, 1, 32, 64, 2, 50)
    fixed = models.make_inputs(case, CPU, 64).fixed
    source, gold = fixed["src_seq"] == models.PAD, fixed["trg_seq"][:, 1:] == models.PAD
    share = torch.cat([source, gold]).double().mean().item()
    assert share > 0.25 and f" {share:.0%} padding," in str(case)


def test_plans_name_every_measurement_once(load: Any) -> None:
    for table, device in (("quick", "cpu"), ("cpu", "cpu"), ("cuda", "cuda")):
        plan = load("catalogue").plan(table)
        assert {benchmark.name for benchmark, _ in plan} == {given.name for given in load("catalogue").BENCHMARKS}
        providers = [(b.name, str(case), p.name) for b, case in plan for p in b.providers(torch.device(device))]
        assert len(set(providers)) == len(providers), table
        for _, case in plan:
            assert all(work["flop"] > 0 and work["byte"] > 0 for work in case.work.values())


def test_memory_is_that_of_the_tensors_alive_at_once(load: Any) -> None:
    x = torch.ones(2**18)  # 1 MiB

    def call() -> Tensor:
        for _ in range(3):
            y = (x + 1) * 2  # two at a time, and the first is released
        return y

    assert 2 <= load("timing").peak_mib(call, CPU) <= 3.1


def test_a_gpus_time_and_its_hosts_are_two_figures(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short op, whose host takes longer, by the GPU's time; the same as a user waits for it; a long one; one that
    waits for its result, whose wait counts as the host's too."""
    timing, clock = load("timing"), gpu_clock.GpuClock(monkeypatch)

    def found(call: Any, hide_host: bool) -> tuple[float, float]:
        timed = timing.measure(call, gpu_clock.DEVICE, 0.01, hide_host)
        return timed.median_ms * 1e3, timed.host_us

    assert found(lambda: clock.run(100e-6, 5e-6), True) == pytest.approx((5, 100))
    assert found(lambda: clock.run(100e-6, 5e-6), False) == pytest.approx((105, 100))
    assert found(lambda: clock.run(20e-6, 300e-6), True) == pytest.approx((300, 20))
    waiting = lambda: (clock.run(20e-6, 300e-6), clock.wait(), clock.run(20e-6, 10e-6))  # noqa: E731
    assert found(waiting, True) == pytest.approx((330, 340))


def test_a_model_on_a_gpu_is_timed_as_its_user_waits(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records and tables have, of a step, also the GPU's time alone and the host's; of an op, also the host's."""
    harness, markdown, clock = load("harness"), load("report_markdown"), gpu_clock.GpuClock(monkeypatch)
    monkeypatch.setattr(harness.timing, "peak_mib", lambda *_: 0.0)
    asked: list[str] = []
    output = SimpleNamespace(stdout="1000 MHz\n")
    monkeypatch.setattr(subprocess, "run", lambda command, **options: asked.extend(command) or output)
    step = lambda: clock.run(2e-3, 1e-3)  # noqa: E731
    provider = harness.Provider(
        "x", lambda *_: harness.Run(dict, {"step": step, "both": step}, {"default": True}), compared=False
    )
    case, texts = SimpleNamespace(dropout_p=0.0), []
    for direction in ("step", "both"):
        benchmark = SimpleNamespace(directions=(direction,), hide_host=direction == "both")
        checked = SimpleNamespace(benchmark=benchmark, case=case, inputs=None, device=gpu_clock.DEVICE)
        row = harness.measure_provider(checked, provider, 0.01)
        texts.append(markdown.brief(row))
    assert texts == ["step 3 (host 2, GPU 1) ms", "both 1 (host 2) ms"]
    assert "--id=GPU-12-34" in asked and row["clocks"] == "1000 MHz"


def test_a_worker_measures_on_the_gpu_that_was_asked_for(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Events are recorded on the current GPU."""
    worker, current = load("report_worker"), []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for name in ("setsid", "dup2"):
        monkeypatch.setattr(os, name, lambda *_: None)
    monkeypatch.setattr(worker.threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))

    def hung_up() -> None:
        raise EOFError

    connection = SimpleNamespace(send=lambda ready: None, recv=hung_up)
    for device in ("cpu", "cuda:1"):
        worker.serve(connection, worker.Task("catalogue", "quick", device, tmp_path / "log", 0.1))
    assert current == [torch.device("cuda:1")]


@pytest.mark.full
def test_a_step_takes_at_most_half_of_the_reference_paths_memory(load: Any) -> None:
    """The base model at 2048 tokens, sequences of 512, dropout 0.1, no padding. To be quick it has 8000 words, which
    favours the reference path, as the fused loss keeps no logits, and is measured with one layer and with two: each
    layer more takes as much again, so that these figures give those of all six."""
    module, timing, cases = (load(name) for name in ("bench_transformer", "timing", "cases"))

    def peak(provider: Any, n_layers: int) -> float:
        case = cases.MemoryCase(4, 512, n_layers, 512, 2048, 8, 8000)
        run = provider.make(case, module.MEMORY.inputs(case, CPU), case.dropout_p)
        return timing.peak_mib(run.timed["step"], CPU)

    reference, default, *_ = module.memory_providers(CPU)
    (one, two), (fused_one, fused_two) = ([peak(given, n) for n in (1, 2)] for given in (reference, default))
    whole, fused_whole = one + 5 * (two - one), fused_one + 5 * (fused_two - fused_one)
    assert fused_whole <= whole / 2, f"{fused_whole:.0f} MiB, by the reference path {whole:.0f}"


def test_a_step_is_checked_by_its_loss_and_by_every_op(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient 10 % off fails; the ops asked for are those that can be left out; the rivals are the same model."""
    from fastattn import backends

    models, harness, module = load("models"), load("harness"), load("bench_transformer")
    providers = {provider.name: provider for provider in module.providers(CPU)}
    checked = harness.Checked(module.BENCHMARK, module.BENCHMARK.cases["quick"][0], CPU)
    asked, choose = set(), backends.choose
    monkeypatch.setattr(backends, "choose", lambda op, *rest: (asked.add(op), choose(op, *rest))[1])
    assert checked.error_over_bound(providers["default"]) <= 1
    assert asked == set(module.MODEL_OPS)
    for rival in module.RIVALS:
        assert checked.error_over_bound(providers[rival]) <= 1, rival
    with pytest.raises(harness.Refused, match="CUDA graphs need a GPU"):
        checked.error_over_bound(providers["default, GraphedStep"])
    monkeypatch.setattr(module, "GraphedStep", functools.partial(module.GraphedStep, capture=False))
    assert checked.error_over_bound(providers["default, GraphedStep"]) <= 1
    fused_loss = models.fused_loss
    monkeypatch.setattr(models, "fused_loss", lambda *given: 1.1 * (loss := fused_loss(*given)) - 0.1 * loss.detach())
    wrong = module.provider("default")
    assert harness.measure_provider(checked, wrong, 0.01)["status"] == "wrong result"


@pytest.mark.full
@pytest.mark.parametrize("mask", MASKS)
def test_attentions_rivals_have_the_same_problem(mask: str, load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the part that is compared, with grouped heads; FlexAttention uncompiled and without its GPU-only backward."""
    module, harness, rivals = load("bench_attention"), load("harness"), load("attention_rivals")
    case = load("cases").AttentionCase(2, 4, 128, 128, 16, mask, heads_k=None if mask == "bias" else 2)
    checked = harness.Checked(module.BENCHMARK, case, CPU)
    for provider in (checked.providers[0], rivals.torch_sdpa(None, None)):
        assert checked.error_over_bound(provider) <= 1
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    inputs = checked.inputs._replace(leaves={name: leaf.detach() for name, leaf in checked.inputs.leaves.items()})
    expected = checked.providers[0].make(case, inputs, 0.0).timed["forward"]()
    for count_mask in (False, True):
        provider = rivals.flex(count_mask)
        if count_mask and mask in ("full", "bias"):
            with pytest.raises(harness.Refused, match="no mask to build"):
                provider.make(case, inputs, 0.0)
        else:
            torch.testing.assert_close(provider.make(case, inputs, 0.0).timed["forward"](), expected)


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, causal: bool = False) -> Tensor:
    """q (B, Lq, H, D), k and v (B, Lk, Hk, D)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, None, dropout_p, causal, enable_gqa=True).transpose(1, 2)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """q (all queries, H, D), k and v (all keys, Hk, D); offsets int32. Returns (out, lse), as some versions do."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == cu_seqlens_k.diff().max()
    spans = zip(cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[:-1], cu_seqlens_k[1:], strict=True)
    outs = [flash_attn_func(q[None, a:b], k[None, c:d], v[None, c:d], **options)[0] for a, b, c, d in spans]
    return torch.cat(outs), None


@pytest.mark.full
def test_rivals_that_need_a_gpu_by_stand_ins_with_their_signatures(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    flash = SimpleNamespace(flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func)
    liger = SimpleNamespace(
        liger_layer_norm=lambda X, W, B, eps: F.layer_norm(X, W.shape, W, B, eps),
        liger_swiglu=lambda a, b: F.silu(a) * b,
        liger_fused_linear_cross_entropy=lambda input, weight, target, **options: F.cross_entropy(
            input @ weight.T, target, **options
        ),
    )
    monkeypatch.setitem(sys.modules, "flash_attn", flash)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", liger)
    monkeypatch.setitem(sys.modules, "quack", SimpleNamespace(cross_entropy=F.cross_entropy))
    cases, harness, attention = load("cases"), load("harness"), load("cases").AttentionCase
    modules = {name: load(f"bench_{name}") for name in ("add_layer_norm", "feed_forward", "linear_cross_entropy")}
    modules["attention"] = load("bench_attention")
    flash_2, varlen = load("attention_rivals").flash_attention(2), load("attention_rivals").torch_varlen()
    torch_varlen = pytest.importorskip("torch.nn.attention.varlen", reason="torch 2.10 has it")
    signature = inspect.signature(torch_varlen.varlen_attn)

    def varlen_attn(*given: Any, **options: Any) -> Tensor:
        q, k, v, *rest = signature.bind(*given, **options).arguments.values()
        return flash_attn_varlen_func(q, k, v, *rest)[0]

    monkeypatch.setattr(torch_varlen, "varlen_attn", varlen_attn)
    provided = [
        *(("attention", flash_2, case) for case in (
            attention(2, 4, 40, 72, 16), attention(2, 4, 40, 40, 16, "causal"), attention(3, 2, 24, 40, 16, "padding")
        )),
        ("attention", varlen, attention(3, 2, 24, 40, 16, "padding")),
        *((name, harness.rival("Liger-Kernel", modules[name].liger), case) for name, case in (
            ("add_layer_norm", cases.NormCase(40, 96)),
            ("feed_forward", cases.FeedForwardCase(40, 48, 96, "swiglu")),
            ("linear_cross_entropy", cases.CrossEntropyCase(40, 32, 60)),
        )),
        ("linear_cross_entropy", harness.rival("quack", modules["linear_cross_entropy"].quack),
         cases.CrossEntropyCase(40, 32, 60, smoothing=0.0)),
    ]  # fmt: skip
    for name, provider, case in provided:
        assert harness.Checked(modules[name].BENCHMARK, case, CPU).error_over_bound(provider) <= 1, case
    for refused in (attention(2, 4, 40, 72, 16, "causal"), attention(2, 4, 72, 72, 16, "blocks")):
        with pytest.raises(harness.Refused):
            harness.Checked(modules["attention"].BENCHMARK, refused, CPU).error_over_bound(flash_2)
        with pytest.raises(harness.Refused, match="only for packed"):
            varlen.make(refused, None, 0.0)
    with pytest.raises(harness.Refused, match="cannot be imported"):
        harness.imported("no_such_module_anywhere")


def test_a_pinned_kernel_that_did_not_run_is_refused(load: Any) -> None:
    rivals, module, harness = load("attention_rivals"), load("bench_attention"), load("harness")
    case = module.BENCHMARK.cases["quick"][0]
    inputs, backends = module.make_inputs(case, CPU), torch.nn.attention.SDPBackend
    with pytest.raises(harness.Refused, match="pinned, but math ran"):
        rivals.torch_sdpa("flash (CPU)", backends.MATH).make(case, inputs, 0.0)
    with pytest.raises(harness.Refused, match="no such kernel"):
        rivals.torch_sdpa("cudnn", backends.CUDNN_ATTENTION).make(case, inputs, 0.0)


def test_another_flash_implementation_is_active_in_its_own_calls_only(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's registry, with an implementation that changes nothing; where there is none, the rival is refused."""
    rivals, module, harness = load("attention_rivals"), load("bench_attention"), load("harness")
    registry = pytest.importorskip("torch.nn.attention._registry", reason="torch 2.10 has it")
    case = module.BENCHMARK.cases["quick"][0]
    inputs, rival = module.make_inputs(case, CPU), rivals.torch_flash("FA4")
    assert "FA4" in torch.nn.attention.list_flash_attention_impls() and rival.name == "sdpa flash, FA4"
    with pytest.raises(harness.Refused, match="cannot be activated"):
        rival.make(case, inputs, 0.0)
    handle = SimpleNamespace(remove=lambda: None)
    monkeypatch.setitem(registry._FLASH_ATTENTION_IMPLS, "FA4", lambda: handle)
    monkeypatch.setitem(rivals.NODES, "flash", rivals.NODES["flash (CPU)"])
    active, attend, grad = [], F.scaled_dot_product_attention, torch.autograd.grad
    note = lambda: active.append(torch.nn.attention.current_flash_attention_impl())  # noqa: E731
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **o: (note(), attend(*a, **o))[1])
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **o: (note(), grad(*a, **o))[1])
    run = rival.make(case, inputs, 0.0)
    for call in run.timed.values():
        call()
        assert torch.nn.attention.current_flash_attention_impl() is None
    assert len(active) >= 5 and set(active) == {"FA4"}


@pytest.mark.full
def test_torch_compile_is_checked_and_timed(load: Any) -> None:
    module, harness = load("bench_attention"), load("harness")
    checked = harness.Checked(module.BENCHMARK, module.BENCHMARK.cases["quick"][0], CPU)
    compiled = next(provider for provider in checked.providers if provider.later)
    row = harness.measure_provider(checked, compiled, 0.01)
    assert row["status"] == "ok", row
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("pytest_benchmark") is None, reason="pytest-benchmark is not installed")
def test_pytest_benchmark_collects_the_benchmarks() -> None:
    command = [sys.executable, "-m", "pytest", str(BENCHMARKS / "bench_add_layer_norm.py"), "--benchmark-only", "-q"]
    command += ["--benchmark-max-time=0.01", "--benchmark-min-rounds=1", "-p", "no:cacheprovider", "-k", "forward"]
    # Under pytest-xdist its variables would tell the new process that it is a worker, where nothing is timed.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "test_add_layer_norm[40x96 fp32-reference-forward]" in result.stdout
