"""Schedule, loss, averaging and decoding."""

import dataclasses
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from recorded_graph import RecordedPairs
from translation.checkpoint import average, candidates
from translation.data import Batch, Share
from translation.decoding import Translation, bleu, exact_match, translate
from translation.settings import Settings, parse_arguments
from translation.tokens import BOS, EOS, PAD, CharacterTokenizer
from translation.training import (
    Progress,
    build_model,
    build_optimizer,
    learning_rate,
    loss_of,
    training_step,
    validation_loss,
)
from translation_options import TINY, random_examples

from fastattn import FusedTransformer
from fastattn.graphs import graphed_call


@pytest.fixture
def settings() -> Settings:
    return parse_arguments([*TINY, "--max-length", "16"])[0]


@pytest.fixture
def batch() -> Batch:
    """Two sentences; the second is shorter on both sides."""
    return Batch(
        source=torch.tensor([[4, 5, 6, EOS], [7, EOS, PAD, PAD]]),
        target_in=torch.tensor([[BOS, 5, 6], [BOS, 7, PAD]]),
        target_out=torch.tensor([[5, 6, EOS], [7, EOS, PAD]]),
        tokens=11,
        target_tokens=5,
    )


def texts_of(found: list[list[Translation]]) -> list[str]:
    return [best.text for best, *_ in found]


def test_learning_rate() -> None:
    for step, rate in (
        (1, 512**-0.5 * 4000**-1.5),
        (2000, 512**-0.5 * 2000 * 4000**-1.5),
        (4000, (512 * 4000) ** -0.5),
        (16000, (512 * 16000) ** -0.5),
    ):
        assert learning_rate(step, d_model=512, warmup=4000) == pytest.approx(rate, rel=1e-12)
        assert learning_rate(step, d_model=512, warmup=4000, scale=2.0) == pytest.approx(2 * rate, rel=1e-12)
    assert max(range(1, 2000), key=lambda step: learning_rate(step, 128, 300)) == 300


def test_step_sets_the_rate_and_learns(settings: Settings, batch: Batch) -> None:
    model = build_model(settings, vocabulary=10).train()
    optimizer = build_optimizer(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    training_step(model, optimizer, batch, 0.0, settings)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    losses = [training_step(model, optimizer, batch, 0.01, settings).item() for _ in range(30)]
    assert losses[-1] < 0.1 * losses[0]


def test_graph_steps_learn_as_plain_steps_do(settings: Settings, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same losses at the same rates, with two parts in a batch; the first two parts are not yet replayed."""
    monkeypatch.setattr(graphed_call, "CudaGraphs", RecordedPairs)
    monkeypatch.setenv("FASTATTN_BACKEND", "reference")  # on a CPU other backends read lengths
    losses, share = [], Share([batch, batch], 2 * batch.tokens, 2 * batch.target_tokens)
    for graph in (False, True):
        changed = dataclasses.replace(settings, graph=graph)
        model = build_model(changed, vocabulary=10).train()
        step = partial(training_step, model, build_optimizer(model), share, settings=changed)
        losses.append([step(rate).item() for rate in (0.01, 0.005, 0.02, 0.0)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and losses[0][3] < 0.9 * losses[0][0]
    assert graphed_call.stats(model).replays == 2 * 4 - 2


def test_mixed_precision_stays_near(settings: Settings, batch: Batch) -> None:
    model = build_model(settings, vocabulary=10).eval()
    full = loss_of(model, batch, settings, 0.1).item()
    mixed = loss_of(model, batch, dataclasses.replace(settings, amp=True), 0.1).item()
    assert mixed != full and mixed == pytest.approx(full, rel=2**-7)


def test_progress_of_an_epoch(batch: Batch) -> None:
    progress = Progress()
    progress.add(torch.tensor(3.0), batch)
    progress.add(torch.tensor(1.0), dataclasses.replace(batch, target_tokens=15, tokens=20))
    state = progress.state()
    assert (state["losses"], state["step"], state["position"], state["tokens"]) == ([3.0, 1.0], 2, 2, 31)
    assert Progress(**state).state()["losses"] == [3.0, 1.0]
    entry = progress.finish_epoch()
    assert entry["train_loss"] == pytest.approx((3 * 5 + 1 * 15) / 20)
    assert (progress.epoch, progress.position, progress.tokens, progress.step) == (1, 0, 0, 2)


def test_average() -> None:
    states = [{"weight": torch.tensor([1.0, 2**24])}, {"weight": torch.tensor([2.0, 2**24 + 2])}]
    mean = average(states)["weight"]
    assert mean.dtype == torch.float32 and mean[0] == 1.5
    assert average([states[0]] * 3)["weight"].tolist() == [1.0, 2**24]


@pytest.mark.parametrize(
    ("epoch", "position", "kept", "mean"),
    [(4, 0, 3, 22 / 3), (4, 1, 3, 28 / 3), (4, 0, 1, None), (1, 0, 3, None), (2, 0, 3, 17 / 2)],
)
def test_the_mean_is_of_average_checkpoints(
    epoch: int, position: int, kept: int, mean: float | None, settings: Settings, tmp_path: Path
) -> None:
    """The present weights are 16; after a whole epoch they are also its checkpoint's, which then does not count:
    16, 2 and 4; 16, 4 and 8; 16 alone; 16 alone; 16 and 1."""
    for number, value in enumerate((1.0, 2.0, 4.0, 8.0), start=1):
        torch.save({"w": torch.tensor(value)}, tmp_path / f"epoch-{number:04d}.pt")
    progress, settings = Progress(epoch=epoch, position=position), dataclasses.replace(settings, average=kept)
    found = candidates(tmp_path, {"w": torch.tensor(16.0)}, progress, settings)
    assert found["last"]["w"] == 16
    assert "mean" not in found if mean is None else found["mean"]["w"].item() == pytest.approx(mean)


def test_validation_loss_is_per_target_token(settings: Settings) -> None:
    """Where all logits are 0 each target token costs log(10), and source tokens and padding nothing."""
    model = build_model(settings, vocabulary=10)
    torch.nn.init.zeros_(model.trg_word_prj.weight)
    assert validation_loss(model, random_examples(5, longest=12), settings) == pytest.approx(math.log(10))


@torch.no_grad()
def scrambled_model(settings: Settings, vocabulary: int) -> FusedTransformer:
    """Untrained, but its likelihoods differ and depend on all that went before."""
    model = build_model(settings, vocabulary).eval()
    for weight in (w for w in model.parameters() if w.dim() > 1):
        weight.normal_()
    return model


@pytest.mark.parametrize("beam", [1, 3])
def test_translations_of_a_batch_are_those_of_one_by_one(settings: Settings, beam: int) -> None:
    """Also where a translation is stopped at its limit, which depends on the length of its source."""
    settings, tokenizer = dataclasses.replace(settings, beam=beam, max_length=64), CharacterTokenizer("abcdef")
    model = scrambled_model(settings, tokenizer.size)
    texts = ["abcabc", "fed", "", "a", "f" * 40]
    n_best = min(2, beam)
    together = translate(model, tokenizer, texts, settings, n_best)
    for text, found in zip(texts, together, strict=True):
        (alone,) = translate(model, tokenizer, [text], settings, n_best)
        assert [(t.text, t.ids) for t in found] == [(t.text, t.ids) for t in alone]
        if beam > 1 and text:
            assert [t.score for t in found] == pytest.approx([t.score for t in alone], rel=1e-5)
    assert len(set(texts_of(together))) > 2 and together[2] == [Translation("", [], None)]


def test_n_best_and_progress(settings: Settings) -> None:
    tokenizer, done = CharacterTokenizer("abcdef"), []
    settings = dataclasses.replace(settings, beam=64)  # two sentences are translated together
    found = translate(
        scrambled_model(settings, tokenizer.size), tokenizer, ["abc", "f", "ab"], settings, 4, done.append
    )
    assert done == [2, 1]
    for translations in found:
        assert len({tuple(t.ids) for t in translations}) == 4
        assert [tokenizer.decode(t.ids) for t in translations] == [t.text for t in translations]
        assert [t.score for t in translations] == sorted((t.score for t in translations), reverse=True)


def test_scores() -> None:
    pairs = [("a", "The cat sat on the mat."), ("b", "A dog ran over the grass.")]
    assert exact_match(pairs, ["The cat sat on the mat.", "A dog"]) == 50.0
    value, signature = bleu(pairs, [target for _, target in pairs])
    assert value == pytest.approx(100.0) and "tok:13a" in signature and "version:" in signature
    assert bleu(pairs, ["No.", "Not at all."])[0] < 5
    shouted = [target.upper() for _, target in pairs]
    assert bleu(pairs, shouted)[0] < 50
    value, signature = bleu(pairs, shouted, lowercase=True)
    assert value == pytest.approx(100.0) and "case:lc" in signature
