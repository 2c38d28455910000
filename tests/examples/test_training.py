"""A training step, worked out by hand; batches, and the shares of processes in them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import train_translation
from example_runs import TINY, random_examples
from translation import data
from translation.data import Batch, Batches, Step, plan_batches
from translation.settings import Settings
from translation.tokens import BOS, EOS, PAD
from translation.training import Training, build_model, learning_rate


@pytest.fixture
def settings() -> Settings:
    return train_translation.parse_arguments([*TINY, "--max-length", "32", "--dropout", "0.3"])[0]


def test_learning_rate() -> None:
    for step, rate in {1: 512**-0.5 * 4000**-1.5, 4000: (512 * 4000) ** -0.5, 16000: (512 * 16000) ** -0.5}.items():
        assert learning_rate(step, d_model=512, warmup=4000) == pytest.approx(rate, rel=1e-12)
        assert learning_rate(step, d_model=512, warmup=4000, scale=2.0) == pytest.approx(2 * rate, rel=1e-12)


def test_a_step(settings: Settings) -> None:
    """Its loss is the mean over the tokens of all parts, of which padding is none, with label smoothing over all words.
    It learns at the rate that it is given."""
    source, target_in = torch.tensor([[4, 5, 6, EOS], [7, EOS, PAD, PAD]]), torch.tensor([[BOS, 5, 6], [BOS, 7, PAD]])
    target_out = torch.tensor([[5, 6, EOS], [7, EOS, PAD]])
    parts = [Batch(source, target_in, target_out), Batch(source[1:], target_in[1:], target_out[1:])]
    step = Step(parts, tokens=13, target_tokens=7)
    settings = dataclasses.replace(settings, dropout=0.0, label_smoothing=0.2)
    run = Training(build_model(settings, 10), settings)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    expected = 0.0
    for part in parts:
        logits, options = run.model(part.source, part.target_in), {"ignore_index": PAD, "label_smoothing": 0.2}
        expected += F.cross_entropy(logits, part.target_out.flatten(), reduction="sum", **options).item() / 7
    assert run.step(step, 0.0).item() == pytest.approx(expected, rel=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())
    assert min(run.step(step, 0.01).item() for _ in range(30)) < 0.6 * expected


@pytest.mark.parametrize(("seed", "length_step"), [(1, 1), pytest.param(None, 8, marks=pytest.mark.full)])
def test_batches_hold_every_pair_once_within_the_budget(seed: int | None, length_step: int) -> None:
    examples = random_examples(9000)  # more than are sorted at once
    plan = plan_batches(examples, 100, np.random.default_rng(seed) if seed else None, length_step)
    assert len(examples) > data.POOL and sorted(i for batch in plan for i in batch) == list(range(9000))
    lengths = np.maximum(examples.index["source"], examples.index["target"])
    assert all(-(-lengths[batch].max() // length_step) * length_step * len(batch) <= 100 for batch in plan)
    if length_step == 1:
        padded = sum(lengths[batch].max() * len(batch) for batch in plan)
        assert padded < 1.05 * lengths.sum(), "the longer sides in a batch are similar"
    assert [len(batch) for batch in plan_batches(random_examples(20), 1)] == [1] * 20, "each is above the budget"


def test_order_depends_on_seed_and_epoch(settings: Settings) -> None:
    examples, plans = random_examples(100), []
    for seed, epoch in ((1, 0), (1, 0), (1, 1), (2, 0)):
        run = Training(build_model(settings, 10), dataclasses.replace(settings, seed=seed, batch_tokens=60))
        run.progress.epoch = epoch
        plans.append([batch.tolist() for batch in run.plan_epoch(examples)])
    assert plans[0] == plans[1] and plans[2] not in (plans[0], plans[3]) and plans[3] != plans[0]


def test_a_batch_is_shared_by_tokens() -> None:
    """Every sentence once, nearly as many tokens each; and an empty share where there are too few."""
    examples = random_examples(37, 3, 7)
    steps = [Batches(examples, [np.arange(37)], rank, 3, accumulate=2)[0] for rank in range(3)]
    parts = [part for step in steps for part in step.parts]
    tokens = [int((part.source != PAD).sum() + (part.target_out != PAD).sum()) for part in parts]
    assert len(parts) == 6 and sum(len(part.source) for part in parts) == 37
    assert sum(tokens) == steps[0].tokens == steps[2].tokens and max(tokens) - min(tokens) <= 16
    assert sum(int((part.target_out != PAD).sum()) for part in parts) == steps[1].target_tokens
    alone, idle = (Batches(examples, [np.arange(1)], rank, 2)[0].parts[0] for rank in range(2))
    assert alone.target_out.count_nonzero() == examples.index["target"][0] - 1 and not idle.target_out.any()
