"""The cases of the benchmarks: lengths as written, and work counted in another way."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

CPU = torch.device("cpu")


@pytest.mark.parametrize("spread", ["MULTI30K", "LONG_TAIL"])
def test_lengths_are_drawn_from_the_written_distribution(spread: str, load: Any) -> None:
    cases = load("cases")
    sigma = getattr(cases, spread)
    lengths = cases.draw_lengths(20000, 10**6, sigma)
    logs = lengths.double().log()
    assert lengths.max() == 10**6 and lengths.min() >= 1
    assert logs.std().item() == pytest.approx(sigma, rel=0.03)
    normal = (logs - logs.mean()) / logs.std()
    assert (normal.abs() < 1).double().mean().item() == pytest.approx(math.erf(2**-0.5), abs=0.02)
    assert torch.equal(lengths, cases.draw_lengths(20000, 10**6, sigma))
    assert not torch.equal(lengths, cases.draw_lengths(20000, 10**6, sigma, seed=1))


def test_lengths_are_like_multi30ks(load: Any) -> None:
    """Multi30k's English words: the median is 11, 5 % are below 7, 1 % above 23; in batches padded to 23."""
    cases = load("cases")
    lengths = torch.cat([cases.draw_lengths(100, 23, cases.MULTI30K, seed) for seed in range(200)]).double()
    assert lengths.median().item() == pytest.approx(11, abs=1)
    assert lengths.quantile(0.05).item() == pytest.approx(7, abs=1.5)


@pytest.mark.parametrize("masked", [0.25, 0.5, 0.9])
def test_block_masks_mask_the_share_they_say_in_every_row(masked: float, load: Any) -> None:
    case = load("cases").AttentionCase(2, 1, 1280, 1280, 8, "blocks", masked=masked)
    visible = case.dense().double().mean(-1)
    assert (visible - (1 - masked)).abs().max() < 1e-9


def test_the_pairs_counted_are_those_of_the_mask(load: Any) -> None:
    cases = load("cases")
    for mask in ("full", "causal", "alibi", "padding", "blocks"):
        case = cases.AttentionCase(3, 2, 150, 200, 8, mask)
        dense = case.dense()
        pairs = 3 * 150 * 200 if dense is None else dense.expand(3, 1, 150, 200).sum().item()
        assert case.pairs == pairs, mask
        assert case.work["forward"]["flop"] == 4 * 2 * pairs * 8


def test_bytes_and_flops_of_the_ops(load: Any) -> None:
    cases = load("cases")
    full = cases.AttentionCase(2, 3, 4, 4, 8).work
    assert full["both"]["flop"] == 3.5 * full["forward"]["flop"]
    assert full["forward"]["byte"] == 4 * (2 * 3 * 4 * 8) * 4  # q, k, v; out
    assert full["backward"]["byte"] == 8 * (2 * 3 * 4 * 8) * 4  # q, k, v, out, dout; dq, dk, dv
    biased = cases.AttentionCase(2, 3, 4, 4, 8, "bias").work
    assert biased["both"]["byte"] - full["both"]["byte"] == 3 * (3 * 4 * 4) * 4  # bias twice read, dbias
    assert cases.NormCase(10, 16).work["forward"]["byte"] == 4 * 10 * 16 * 4
    assert cases.NormCase(10, 16, dropout_p=0.1).work["backward"]["byte"] == 4 * 10 * 16 * 4
    assert cases.FeedForwardCase(5, 4, 6, "swiglu").work["backward"]["flop"] == 4 * 5 * 4 * (12 + 6)
    assert cases.CrossEntropyCase(16, 4, 6).work["both"]["flop"] == 6 * 14 * 4 * 6


def counted(call: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def test_a_steps_flops_are_those_of_its_products(load: Any) -> None:
    """torch counts the products of plain PyTorch, none padded; it also counts the masked causal half."""
    module, cases = load("bench_transformer"), load("cases")
    case = cases.StepCase(3, 20, 2, 32, 64, 4, 50, dropout_p=0.0, spread=0.0)
    plain = next(provider for provider in module.providers(CPU) if provider.name == "plain PyTorch")
    run = plain.make(case, module.make_inputs(case, CPU), 0.0)
    causal_half = 12 * 32 * 2 * 3 * (20 * 20 - 20 * 21 / 2)
    assert counted(run.timed["step"]) == case.work["step"]["flop"] + causal_half


def test_decodings_flops_are_those_of_one_pass_over_each_token(load: Any) -> None:
    """One teacher-forced pass meets each token once, as incremental decoding would; torch counts its products."""
    case = load("cases").DecodingCase(3, 12, 2, 32, 64, 4, 50, new_tokens=12, spread=0.0)
    models = load("models")
    model = models.plain(case, 0.0, 20).eval()
    src_seq = models.make_inputs(case, CPU, 20).fixed["src_seq"]
    causal_half = 4 * 32 * 2 * 3 * (12 * 12 - 12 * 13 / 2)
    work = case.work["decode"]["flop"]
    with torch.no_grad():
        assert counted(lambda: model(src_seq, src_seq)) == work + causal_half


def test_every_table_has_every_kind_and_no_case_twice(load: Any) -> None:
    tables, catalogue = load("tables"), load("catalogue")
    for name, table in tables.TABLES.items():
        plan = catalogue.plan(name)
        assert [case for _, case in plan] == table
        assert {benchmark.name for benchmark, _ in plan} == set(catalogue.BENCHMARKS)
        assert len({(benchmark.name, str(case)) for benchmark, case in plan}) == len(table), name
        for _, case in plan:
            assert all(work["flop"] > 0 and work["byte"] > 0 for work in case.work.values())


def test_memory_is_that_of_the_tensors_alive_at_once(load: Any) -> None:
    timing = load("timing")
    x = torch.ones(2**18)  # 1 MiB

    def call() -> torch.Tensor:
        for _ in range(3):
            y = (x + 1) * 2  # two at a time, and the first is released
        return y

    assert 2 <= timing.peak_mib(call, CPU) <= 3.1


def test_a_steps_memory_counts_gradients(load: Any) -> None:
    """So few tokens, and so many words, that gradients are nearly all of it; and the second step needs as much."""
    module, timing = load("bench_memory"), load("timing")
    case = load("cases").MemoryCase(1, 4, 1, 64, 64, 2, 20000)
    gradient = 20000 * 64 * 4 / 2**20  # both embeddings and the projection: one weight, three gradients to add up
    for provider in module.providers(CPU):
        step = provider.make(case, module.BENCHMARK.inputs(case, CPU), 0.0).timed["step"]
        step()  # makes Adam's state
        first, second = (timing.peak_mib(step, CPU) for _ in range(2))
        at_once = 2 if provider.name == "default" else 3  # two of them added up in place, or into new memory
        assert 0.99 < first / (at_once * gradient) < 1.2 and second == pytest.approx(first, rel=0.02), provider.name


def test_a_case_says_what_share_of_it_is_padding(load: Any) -> None:
    cases, models = load("cases"), load("models")
    case = cases.StepCase(8, 64, 1, 32, 64, 2, 50)
    fixed = models.make_inputs(case, CPU, 64).fixed
    source, gold = fixed["src_seq"] == models.PAD, fixed["trg_seq"][:, 1:] == models.PAD
    share = torch.cat([source, gold]).double().mean().item()
    assert share > 0.25 and f" {share:.0%} padding," in str(case)
    assert "padding" not in str(cases.MemoryCase(8, 64, 1, 32, 64, 2, 50))


def test_every_op_of_the_loss_can_be_left_out(load: Any) -> None:
    from fastattn import _dispatch

    module, models = load("bench_transformer"), load("models")
    case = module.BENCHMARK.cases["quick"][0]
    fixed = models.make_inputs(case, CPU, case.length).fixed
    asked = set()
    choose = _dispatch.choose
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_dispatch, "choose", lambda op_name, *rest: (asked.add(op_name), choose(op_name, *rest))[1])
        models.fused_loss(
            models.fused(case, 0.1, case.length), fixed["src_seq"], fixed["trg_seq"][:, :-1], fixed["trg_seq"][:, 1:]
        )
    assert asked == set(module.MODEL_OPS)


def test_one_op_by_reference_leaves_the_others(load: Any) -> None:
    from fastattn import _dispatch, dropout_add_layer_norm, scaled_dot_product_attention

    asked = []
    choose = _dispatch.choose

    def noting(op_name: str, *rest: Any) -> Any:
        name, backend = choose(op_name, *rest)
        asked.append((op_name, name))
        return name, backend

    x = torch.ones(1, 1, 4, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_dispatch, "choose", noting)
        with load("models").by_reference("attention"):
            scaled_dot_product_attention(x, x, x)
            dropout_add_layer_norm(x, x, x[0, 0, 0], x[0, 0, 0])
        scaled_dot_product_attention(x, x, x)
    assert asked == [("attention", "reference"), ("add_layer_norm", "aten"), ("attention", "aten")]
